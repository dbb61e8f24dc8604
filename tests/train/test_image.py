"""Image recipes: batches from pixels and from files, augmentation on the device, and whole runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import toy
from faults import assert_resumes_to_the_same

from image_files import spoil, write
from primal_attention.cli.spectrum import load_run
from primal_attention.convert.spectrum import spectrum
from primal_attention.data import image as image_data
from primal_attention.train import loop, registry
from primal_attention.train.config import override
from primal_attention.train.image import (
    AUGMENT,
    MOVES,
    NO_LABEL,
    TONES,
    FileBatches,
    ImageRecipe,
    PixelBatches,
    Strength,
    augment_pixels,
    erase,
    make_batches,
    mix,
    moves,
    random_crop,
    rectangle,
    sample,
    tones,
)
from primal_attention.utils.errors import DataError, RunError

pytest.importorskip("PIL")
pytest.importorskip("transformers", minversion="5")
SMALL = {
    "data.size": 28,
    "data.workers": 0,
    "data.holdout": 0.2,
    "model.patch_size": 7,
    "model.embed_dim": 16,
    "model.num_heads": 2,
    "model.layers": 2,
    "model.rank": 4,
    "trainer.epochs": 2,
    "trainer.batch_size": 8,
    "trainer.compile": "off",
}


def random_square(image: Any) -> np.ndarray:
    """A random crop by Pillow alone."""
    left, top = torch.randint(8, (2,)).tolist()
    return np.asarray(image.crop((left, top, left + 28, top + 28))).transpose(2, 0, 1).copy()


@pytest.fixture
def crops(monkeypatch: pytest.MonkeyPatch) -> None:
    """Random crops of files are torchvision's. Where it does not import, `random_square` takes their place."""
    try:
        import torchvision.transforms.v2  # noqa: F401
    except Exception:  # an installation that does not fit torch raises almost any type
        monkeypatch.setattr(image_data, "training", lambda size, **options: random_square)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("images") / "set")


def small(folder: Path, **changes: Any) -> ImageRecipe:
    return toy.change(registry.get("image/imagenette"), {**SMALL, "data.folder": folder}, **changes)


def test_the_papers_and_deits_settings() -> None:
    recipe = registry.get("image/deit-small").resolved()
    assert (recipe.model.attention, recipe.model.rank, recipe.eta) == (("primal+",), 96, 0.05)
    assert (recipe.trainer.epochs, recipe.trainer.batch_size, recipe.data.size) == (300, 1024, 224)
    assert (recipe.optim.name, recipe.optim.lr, recipe.optim.weight_decay) == ("adamw", 1e-3, 0.05)
    assert round(recipe.optim.warmup * 300) == 5
    how = AUGMENT[recipe.augment]
    assert (how.ops, how.magnitude, how.erase) == (2, 0.9, 0.25)
    assert (how.mixup, how.cutmix, how.smoothing, how.repeats) == (0.8, 1.0, 0.1, 3)
    assert recipe.model.drop_path == 0.1
    assert registry.get("image/imagenette").model.patch_size == 8


# Runs


@pytest.mark.usefixtures("crops")
@pytest.mark.parametrize(("cache", "augment"), [("device", "deit"), ("none", "none")])
def test_a_run_has_three_scores_and_resumes(folder: Path, tmp_path: Path, cache: str, augment: str) -> None:
    """A run that was cut off within an epoch ends with the same weights; files are read by two workers."""
    recipe = small(folder, data__cache=cache, augment=augment, data__workers=2, trainer__checkpoint_steps=1)
    assert_resumes_to_the_same(recipe, tmp_path, step=5)
    one = loop.read_summary(tmp_path / "cut")
    assert set(one["scores"]) == {"last", "best_on_test", "validation_chosen"}
    accuracies = [row["test_accuracy"] for row in toy.rows(tmp_path / "cut")]
    assert one["scores"]["last"]["accuracy"] == accuracies[-1]
    assert one["scores"]["best_on_test"]["accuracy"] == max(accuracies)
    chosen = one["scores"]["validation_chosen"]
    assert chosen["accuracy"] == accuracies[chosen["epoch"] - 1]
    assert "retrained_accuracy" not in chosen
    sizes = {"train_samples": 24, "validation_samples": 6, "test_samples": 12, "images_per_epoch": 24}
    assert one["data"] == {"set": "set", "sha256": one["data"]["sha256"], **sizes, "classes": 3, "max_length": 17}
    assert loop.evaluate(tmp_path / "cut")[""]["accuracy"] == chosen["accuracy"]


def test_it_learns_colours_and_has_a_spectrum(folder: Path, tmp_path: Path) -> None:
    changes = {"trainer__epochs": 10, "optim__lr": 5e-3, "augment": "none", "model__attention": ("primal",)}
    summary = loop.train(small(folder, **changes), tmp_path, name="image/imagenette")
    assert summary["primal_layers"] == 2
    assert summary["scores"]["validation_chosen"]["accuracy"] > 0.9
    source = load_run(tmp_path, 5, 4)
    assert [len(images) for (images,) in source.batches] == [4, 1]
    assert [layer.kind for layer in spectrum(source.model, source.batches).values()] == ["primal", "primal"]


def test_bad_input_is_one_line(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="has no folder train"):
        loop.train(small(tmp_path / "nowhere"), tmp_path / "run")
    with pytest.raises(RunError, match=r"data\.holdout must lie between 0 and 1"):
        small(folder, data__holdout=1.5)
    with pytest.raises(RunError, match="cannot be built: attention must be softmax"):
        loop.train(small(folder, model__attention=("linear",)), tmp_path / "run")
    with pytest.raises(RunError, match="patch_size must divide image_size"):
        loop.train(small(folder, model__patch_size=9), tmp_path / "run")
    assert not (tmp_path / "run").exists()


# Batches


def test_broken_images_are_skipped_or_an_error_and_workers_read_what_one_process_reads(tmp_path: Path) -> None:
    place = write(tmp_path / "set")
    bad = spoil(place / "val" / "n01" / "0.jpg")
    data = image_data.load(place)
    tests = []
    for workers in (0, 2):
        batches = FileBatches(data.test, image_data.evaluation(28), 8, fill=True, workers=workers)
        with pytest.warns(UserWarning, match=rf"1 of 12 images do not decode and are skipped, first {bad}"):
            tests.append([torch.cat(parts) for parts in zip(*batches, strict=True)])
    assert all(torch.equal(a, b) for a, b in zip(*tests, strict=True))
    assert int((tests[0][1] != NO_LABEL).sum()) == 11
    recipe = small(place, augment="none").resolved()
    with pytest.warns(UserWarning, match="1 of 12 images do not decode"):
        pixels = make_batches(recipe, data)[-1]
    # A crop on the device and a worker's crop are the same pixels.
    crops = torch.cat([images[..., 2:30, 2:30] for images, labels in pixels])[:11]
    assert torch.equal(crops, tests[0][0][tests[0][1] != NO_LABEL])
    with pytest.raises(DataError, match=f"{bad} does not decode as an image"):
        make_batches(override(recipe, {"data.strict": True}), data)
    with pytest.raises(DataError, match=f"{bad} does not decode as an image"):
        list(FileBatches(data.test, image_data.evaluation(28), 8, strict=True))


@pytest.mark.usefixtures("crops")
def test_the_rest_of_an_epoch_has_the_random_crops_of_the_whole(folder: Path) -> None:
    data = image_data.load(folder)

    def pixels(workers: int, *, epoch: int = 0, skip: int = 0) -> list[torch.Tensor]:
        recipe = small(folder, data__cache="none", data__workers=workers, augment="none", trainer__batch_size=4)
        train, *_ = make_batches(recipe.resolved(), data)
        train.epoch = epoch
        train.skip = skip
        return [images for images, _ in train]

    before = torch.get_rng_state()
    whole = pixels(0)
    assert torch.equal(torch.get_rng_state(), before), "the training's generator is unchanged"
    assert len(whole) == 6
    for workers, skip in ((0, 1), (2, 1)):
        rest = pixels(workers, skip=skip)
        assert len(rest) == 6 - skip
        assert all(torch.equal(a, b) for a, b in zip(whole[skip:], rest, strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(whole, pixels(0, epoch=1), strict=True))
    crop = image_data.training(28, smallest=0.2, ops=0, magnitude=0.0)
    (images, labels), *_ = FileBatches(data.train, crop, 6, shuffle_seed=0, steps=1, repeats=3)
    assert labels[:3].unique().numel() == 1
    assert len({image.numpy().tobytes() for image in images}) == 6, "copies of an image are different crops"


def test_repeats_follow_each_other_and_the_last_batch_is_filled() -> None:
    numbers = torch.arange(10)
    batches = PixelBatches([numbers, numbers], 4, shuffle_seed=0, steps=2, repeats=3)
    first = torch.cat([labels for _, labels in batches])
    assert len(first) == 8
    assert first[:3].unique().numel() == first[3:6].unique().numel() == 1
    batches.epoch = 1
    assert not torch.equal(first, torch.cat([labels for _, labels in batches]))
    filled = list(PixelBatches([torch.zeros(5, 3, 2, 2), torch.arange(5)], 4, fill=True))
    assert [images.shape[0] for images, _ in filled] == [4, 4]
    assert filled[1][1].tolist() == [4, NO_LABEL, NO_LABEL, NO_LABEL]


# Augmentation on the device


def test_crops_lie_inside_and_a_whole_one_is_the_image_or_its_mirror() -> None:
    plane = random_crop(500, 0.08, torch.device("cpu"))
    corners = plane @ torch.tensor([[-1.0, 1.0], [-1.0, 1.0], [1.0, 1.0]])
    assert (corners[:, :2].abs() <= 1 + 1e-6).all()
    area = (plane[:, 0, 0] * plane[:, 1, 1]).abs()
    assert 0.075 < float(area.min()) < 0.15
    assert float(area.max()) > 0.8
    images = torch.randint(256, (8, 3, 12, 12), dtype=torch.uint8)
    plane = plane[:8]
    plane[:, 0, 0], plane[:, 1, 1], plane[:, :2, 2] = plane[:, 0, 0].sign(), 1.0, 0.0
    for after, before, sign in zip(sample(images, plane, 12), images / 255, plane[:, 0, 0], strict=True):
        assert torch.allclose(after, before.flip(-1) if sign < 0 else before, atol=1e-6)


def test_moves_rotate_translate_and_shear() -> None:
    ops = torch.tensor([0, 1 + MOVES.index("rotate"), 1 + MOVES.index("translate_x"), 1 + MOVES.index("shear_y")])
    planes = moves(ops, torch.ones(4))
    assert torch.equal(planes[0], torch.eye(3))
    assert torch.allclose(planes[1, :2, :2] @ planes[1, :2, :2].T, torch.eye(2), atol=1e-6)
    assert float(planes[1, 1, 0]) == pytest.approx(0.5)  # sine of 30 degrees
    assert float(planes[2, 0, 2]) == pytest.approx(0.9)
    assert planes[3, 1].tolist() == pytest.approx([0.3, 1, 0])


@pytest.mark.parametrize("name", TONES)
def test_tones_change_only_the_images_that_drew_them(name: str) -> None:
    x = 0.2 + 0.6 * torch.rand(3, 3, 8, 8)
    y = tones(x, torch.tensor([TONES.index(name), -1, len(TONES)]), torch.full((3,), 0.9), torch.full((3,), -0.9))
    assert torch.equal(y[1:], x[1:])
    assert not torch.allclose(y[0], x[0], atol=1e-3)
    assert ((y >= 0) & (y <= 1)).all()
    if name == "colour":
        assert float(y[0].std(0).mean()) < 0.3 * float(x[0].std(0).mean())
    if name == "autocontrast":
        assert (float(y[0].min()), float(y[0].max())) == pytest.approx((0, 1), abs=1e-6)
    if name == "posterize":
        assert y[0].unique().numel() <= 17


def test_erasing_replaces_rectangles_of_the_right_area() -> None:
    y = erase(torch.full((400, 3, 32, 32), 7.0), 0.25)
    hit = (y != 7).flatten(1).any(1)
    assert 0.18 < float(hit.float().mean()) < 0.32
    area = (y[hit][:, 0] != 7).float().mean((-2, -1))
    assert float(area.min()) > 0.01
    assert float(area.max()) < 0.37
    inside = rectangle(torch.full((20,), 2.0), torch.full((20,), 3.0), 5, 6)
    assert (inside.sum((1, 2)) == 6).all()
    assert (inside.any(2).sum(1) == 2).all()


@pytest.mark.parametrize("how", [Strength(mixup=0.8), Strength(cutmix=1.0), Strength(mixup=0.8, cutmix=1.0)])
def test_targets_are_mixed_like_the_images(how: Strength) -> None:
    labels = torch.tensor([0, 1, 1, 0])
    images = labels.float().view(4, 1, 1, 1).expand(4, 3, 16, 16)
    for _ in range(10):
        mixed, targets = mix(images, torch.nn.functional.one_hot(labels, 2).float(), how)
        # Images of class 1 are ones, of class 0 zeros: the mean pixel is the probability of class 1.
        assert torch.allclose(mixed.mean((1, 2, 3)), targets[:, 1], atol=1e-6)
        assert torch.allclose(targets.sum(1), torch.ones(4))
        if not how.mixup:
            assert set(mixed.unique().tolist()) <= {0.0, 1.0}


def test_augmented_pixels_have_the_models_size_and_range_and_labels_are_smoothed(folder: Path) -> None:
    images = torch.randint(256, (6, 3, 32, 32), dtype=torch.uint8)
    pixels = augment_pixels(images, 28, AUGMENT["deit"])
    assert pixels.shape == (6, 3, 28, 28)
    assert ((pixels >= 0) & (pixels <= 1)).all()
    module = small(folder, augment="light").build().module
    _, targets = module.augment(images, torch.zeros(6, dtype=torch.long))
    assert targets[0].tolist() == pytest.approx([0.9 + 0.1 / 3, 0.1 / 3, 0.1 / 3])
