"""Training on images: augmentation on the device, batches from pixels and from files, whole runs, three readings."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest
import torch
from faults import assert_resumes_to_the_same

from image_files import spoil, write
from primal_attention.cli import table
from primal_attention.convert.sources import load
from primal_attention.convert.spectrum import spectrum
from primal_attention.data import image as image_crops
from primal_attention.data import image as images
from primal_attention.train import loop as runner
from primal_attention.train import registry
from primal_attention.train.config import override
from primal_attention.train.image import (
    AUGMENT,
    MOVES,
    NOBODY,
    TONES,
    FileBatches,
    ImageRecipe,
    PixelBatches,
    Strength,
    augment_pixels,
    erase,
    file_batches,
    mix,
    moves,
    random_crop,
    rectangle,
    sample,
    smooth,
    tones,
)  # fmt: skip
from primal_attention.utils.errors import DataError, RunError
from primal_attention.utils.files import write_json

pytest.importorskip("PIL")
pytest.importorskip("transformers", minversion="5")
CPU = torch.device("cpu")
SMALL = {
    "data.size": 28,
    "data.workers": 0,
    "data.holdout": 0.2,
    "model.patch_size": 7,
    "model.embed_dim": 16,
    "model.num_heads": 2,
    "model.layers": 2,
    "model.rank": 4,
    "trainer.epochs": 3,
    "trainer.batch_size": 8,
    "trainer.precision": "32-true",
    "trainer.compile": "off",
    "trainer.accelerator": "cpu",
    "trainer.progress": False,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return write(tmp_path_factory.mktemp("images") / "set")


def small(folder: Path, **changes: Any) -> ImageRecipe:
    given = {k.replace("__", "."): v for k, v in changes.items()}
    return override(registry.get("image/imagenette"), {**SMALL, "data.folder": folder, **given})


def rows(place: Path) -> list[dict[str, str]]:
    with (place / "metrics.csv").open() as file:
        return list(csv.DictReader(file))


def test_the_papers_and_deits_settings() -> None:
    recipe = registry.get("image/deit-small").resolved()
    assert (recipe.model.attention, recipe.model.rank, recipe.eta) == (("primal+",), 96, 0.05)
    assert (recipe.trainer.epochs, recipe.trainer.batch_size, recipe.data.size) == (300, 1024, 224)
    assert (recipe.optim.name, recipe.optim.lr, recipe.optim.weight_decay) == ("adamw", 1e-3, 0.05)
    assert round(recipe.optim.warmup * 300) == 5
    how = AUGMENT[recipe.augment]
    assert (how.ops, how.magnitude, how.erase, how.mixup, how.cutmix, how.smoothing, how.repeats) == (
        2, 0.9, 0.25, 0.8, 1.0, 0.1, 3,
    )  # fmt: skip
    assert recipe.model.drop_path == 0.1
    assert registry.get("image/imagenette").model.patch_size == 8


@pytest.mark.parametrize(("cache", "augment"), [("device", "deit"), ("device", "light"), ("none", "none")])
def test_a_run_has_all_three_readings_and_repeats(folder: Path, tmp_path: Path, cache: str, augment: str) -> None:
    recipe = small(folder, data__cache=cache, augment=augment)
    one, two = (runner.train(recipe, tmp_path / name, name="image/imagenette") for name in ("one", "two"))
    assert set(one["scores"]) == {"last", "best_on_test", "validation_chosen"}
    assert one["scores"] == two["scores"]
    assert (tmp_path / "one" / "metrics.csv").read_bytes() == (tmp_path / "two" / "metrics.csv").read_bytes()
    seen = rows(tmp_path / "one")
    assert one["scores"]["last"]["accuracy"] == float(seen[-1]["test_accuracy"])
    assert one["scores"]["best_on_test"]["accuracy"] == max(float(r["test_accuracy"]) for r in seen)
    chosen = one["scores"]["validation_chosen"]
    assert chosen["accuracy"] == float(seen[chosen["epoch"] - 1]["test_accuracy"])
    assert "retrained_accuracy" not in chosen
    assert one["data"] == {"set": "set", "train_cases": 24, "validation_cases": 6, "test_cases": 12,
                           "images_per_epoch": 24, "classes": 3, "max_length": 17}  # fmt: skip
    assert runner.evaluate(tmp_path / "one")[""]["accuracy"] == chosen["accuracy"]


def test_it_learns_colours(folder: Path, tmp_path: Path) -> None:
    changes = {"trainer__epochs": 12, "optim__lr": 5e-3, "augment": "none", "model__attention": ("primal",)}
    summary = runner.train(small(folder, **changes), tmp_path, name="image/imagenette")
    assert summary["primal_layers"] == 2
    source = load(tmp_path, data=None, cases=5, batch=4, tokens=0)
    assert [len(images) for (images,) in source.batches] == [4, 1]
    assert [layer.kind for layer in spectrum(source.model, source.batches).values()] == ["primal", "primal"]
    assert summary["scores"]["validation_chosen"]["accuracy"] > 0.9


def test_files_and_pixels_give_the_same_evaluation(folder: Path) -> None:
    recipes = [small(folder, data__cache=cache, augment="none") for cache in ("none", "device")]
    found = []
    for recipe in recipes:
        torch.manual_seed(0)
        experiment = recipe.build()
        found.append(experiment.module.evaluate(experiment.test))
    # Cut by the model on the device or by a worker, the pixels are the same.
    assert found[0]["accuracy"] == found[1]["accuracy"]
    assert found[0]["loss"] == pytest.approx(found[1]["loss"], rel=1e-6)


def test_broken_images_are_skipped_in_both_ways_or_an_error(tmp_path: Path) -> None:
    place = write(tmp_path / "set")
    bad = spoil(place / "val" / "n01" / "0.jpg")
    for cache in ("none", "device"):
        recipe = small(place, data__cache=cache, augment="none")
        with pytest.warns(UserWarning, match=rf"1 of 12 images do not decode and are skipped, first {bad}"):
            total = sum(int((labels != NOBODY).sum()) for _, labels in recipe.build().test)
        assert total == 11
        strict = override(recipe, {"data.strict": True})
        with pytest.raises(DataError, match=f"{bad} does not decode as an image"):
            list(strict.build().test)


def test_workers_read_what_one_process_reads(folder: Path) -> None:
    data = images.load(folder)
    found = []
    for workers in (0, 2):
        recipe = small(folder, data__cache="none", data__workers=workers, augment="none").resolved()
        _, _, test = file_batches(recipe, data)
        found.append([torch.cat(parts) for parts in zip(*test, strict=True)])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("group", [1, 2])
def test_random_parts_of_the_rest_of_an_epoch_are_those_of_the_whole(folder: Path, group: int) -> None:
    data = images.load(folder)

    def pixels(workers: int, *, epoch: int = 0, skip: int = 0) -> list[torch.Tensor]:
        recipe = small(folder, data__cache="none", data__workers=workers, augment="none", trainer__batch_size=4)
        train, _, _ = file_batches(recipe.resolved(), data)
        train.set_epoch(epoch)
        train.group, train.skip = group, skip
        turns = [turn if isinstance(turn, list) else [turn] for turn in train]
        return [found for turn in turns for found, _ in turn]

    before = torch.get_rng_state()
    whole = pixels(0)
    assert torch.equal(torch.get_rng_state(), before), "the training's own draws are left alone"
    assert len(whole) == 6
    for workers, skip in ((0, 1), (1, 0), (2, 1)):
        rest = pixels(workers, skip=skip)
        assert len(rest) == 6 - skip * group
        assert all(torch.equal(a, b) for a, b in zip(whole[skip * group :], rest, strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(whole, pixels(0, epoch=1), strict=True))


@pytest.mark.parametrize("workers", [0, 2])
def test_a_run_cut_off_within_an_epoch_resumes_to_the_same_weights(folder: Path, tmp_path: Path, workers: int) -> None:
    changes = {"data__workers": workers, "trainer__checkpoint_steps": 1, "trainer__epochs": 2}
    recipe = small(folder, data__cache="none", augment="none", **changes)
    assert_resumes_to_the_same(recipe, tmp_path, step=5)


def test_an_image_that_stands_twice_in_a_batch_has_draws_of_its_own_each_time(folder: Path) -> None:
    data = images.load(folder)
    crop = image_crops.training(16, smallest=0.2, ops=0, magnitude=0.0)
    (found, labels), *_ = FileBatches(data.train, crop, 6, shuffle_seed=0, steps=1, repeats=3)
    assert labels[:3].unique().numel() == 1
    assert len({one.numpy().tobytes() for one in found}) == 6


def test_repeats_stand_together_and_epochs_keep_their_length() -> None:
    numbers = torch.arange(10)
    batches = PixelBatches([numbers, numbers], 4, shuffle_seed=0, steps=2, repeats=3)
    first = torch.cat([labels for _, labels in batches])
    assert len(first) == 8
    assert first[:3].unique().numel() == first[3:6].unique().numel() == 1
    batches.set_epoch(1)
    assert not torch.equal(first, torch.cat([labels for _, labels in batches]))


def test_the_last_batch_is_filled_with_nobody() -> None:
    batches = list(PixelBatches([torch.zeros(5, 3, 2, 2), torch.arange(5)], 4, fill=True))
    assert [b[0].shape[0] for b in batches] == [4, 4]
    assert batches[1][1].tolist() == [4, NOBODY, NOBODY, NOBODY]


def test_a_whole_crop_gives_the_picture_and_a_mirrored_one_its_mirror() -> None:
    torch.manual_seed(0)
    x = torch.randint(256, (8, 3, 12, 12), dtype=torch.uint8)
    plane = random_crop(8, 1.0, CPU)
    mirrored = plane[:, 0, 0] < 0
    plane[:, 0, 0], plane[:, 1, 1] = plane[:, 0, 0].sign(), 1.0
    plane[:, :2, 2] = 0
    y = sample(x, plane, 12)
    for one, before, turned in zip(y, x / 255, mirrored, strict=True):
        assert torch.allclose(one, before.flip(-1) if turned else before, atol=1e-6)


def test_crops_lie_inside() -> None:
    torch.manual_seed(0)
    plane = random_crop(500, 0.08, CPU)
    corners = plane @ torch.tensor([[-1.0, 1.0], [-1.0, 1.0], [1.0, 1.0]])
    assert (corners[:, :2].abs() <= 1 + 1e-6).all()
    area = (plane[:, 0, 0] * plane[:, 1, 1]).abs()
    assert 0.075 < float(area.min()) < 0.15
    assert float(area.max()) > 0.8


def test_moves_turn_shift_and_slant() -> None:
    kinds = torch.tensor([0, 1 + MOVES.index("rotate"), 1 + MOVES.index("translate_x"), 1 + MOVES.index("shear_y")])
    planes = moves(kinds, torch.ones(4))
    assert torch.equal(planes[0], torch.eye(3))
    assert torch.allclose(planes[1, :2, :2] @ planes[1, :2, :2].T, torch.eye(2), atol=1e-6)
    assert float(planes[1, 1, 0]) == pytest.approx(0.5)  # sine of 30 degrees
    assert float(planes[2, 0, 2]) == pytest.approx(0.9)
    assert planes[3, 1].tolist() == pytest.approx([0.3, 1, 0])


@pytest.mark.parametrize("name", TONES)
def test_tones_change_the_images_that_drew_them_only(name: str) -> None:
    torch.manual_seed(0)
    x = 0.2 + 0.6 * torch.rand(3, 3, 8, 8)
    kind = torch.tensor([TONES.index(name), -1, len(TONES)])
    y = tones(x, kind, torch.full((3,), 0.9), torch.full((3,), -0.9))
    assert torch.equal(y[1:], x[1:])
    assert not torch.allclose(y[0], x[0], atol=1e-3)
    assert ((y >= 0) & (y <= 1)).all()
    if name == "colour":
        assert float(y[0].std(0).mean()) < 0.3 * float(x[0].std(0).mean())
    if name == "autocontrast":
        assert (float(y[0].min()), float(y[0].max())) == pytest.approx((0, 1), abs=1e-6)
    if name == "posterize":
        assert y[0].unique().numel() <= 17


def test_erasing_hits_rectangles_of_the_area_asked_for() -> None:
    torch.manual_seed(0)
    y = erase(torch.full((400, 3, 32, 32), 7.0), 0.25)
    hit = (y != 7).flatten(1).any(1)
    assert 0.18 < float(hit.float().mean()) < 0.32
    area = (y[hit][:, 0] != 7).float().mean((-2, -1))
    assert float(area.min()) > 0.01
    assert float(area.max()) < 0.37
    inside = rectangle((torch.tensor([2.0]), torch.tensor([3.0])), (torch.tensor([0.0]), torch.tensor([0.999])), 5, 6)
    assert inside[0, :2, 3 - 1 : 5].all()
    assert int(inside.sum()) == 6


@pytest.mark.parametrize("how", [Strength(mixup=0.8), Strength(cutmix=1.0), Strength(mixup=0.8, cutmix=1.0)])
def test_targets_are_mixed_as_the_images_are(how: Strength) -> None:
    torch.manual_seed(1)
    labels = torch.tensor([0, 1, 1, 0])
    images = labels.float().view(4, 1, 1, 1).expand(4, 3, 16, 16)
    for _ in range(10):
        mixed, targets = mix(images, smooth(labels, 2, 0.0), how)
        # Images of class 1 are ones, of class 0 zeros: the mean pixel is the probability of class 1.
        assert torch.allclose(mixed.mean((1, 2, 3)), targets[:, 1], atol=1e-6)
        assert torch.allclose(targets.sum(1), torch.ones(4))
        if not how.mixup:
            assert set(mixed.unique().tolist()) <= {0.0, 1.0}


def test_labels_are_smoothed_over_all_classes() -> None:
    assert smooth(torch.tensor([1]), 4, 0.2)[0].tolist() == pytest.approx([0.05, 0.85, 0.05, 0.05])


def test_augmented_pixels_have_the_models_size_and_range() -> None:
    torch.manual_seed(0)
    y = augment_pixels(torch.randint(256, (6, 3, 32, 32), dtype=torch.uint8), 28, AUGMENT["deit"])
    assert y.shape == (6, 3, 28, 28)
    assert ((y >= 0) & (y <= 1)).all()


def test_the_table_shows_accuracy_speed_and_the_papers_numbers(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = small(folder, trainer__epochs=1)
    summary = runner.train(recipe, tmp_path / "run", name="image/imagenette")
    write_json(tmp_path / "results" / "run.json", summary)
    changes = [f"{name}={value}" for name, value in {**SMALL, "trainer.epochs": 1}.items() if name != "data.workers"]
    words = ["image", "--results", str(tmp_path / "results"), "--csv", str(tmp_path / "table.csv")]
    table.main([*words, "--no-run", "--set", "data.workers=0", *changes])
    shown = capsys.readouterr().out
    assert "Primal.+DeiT-Small (primal+)" in shown
    assert "2330.2" in shown
    with (tmp_path / "table.csv").open() as file:
        softmax, plus, everywhere = csv.DictReader(file)
    assert float(plus["last_mean"]) == pytest.approx(100 * summary["scores"]["last"]["accuracy"])
    assert float(plus["images_per_second_mean"]) == pytest.approx(24 / summary["seconds_per_epoch"])
    assert softmax["last_seeds"] == everywhere["last_seeds"] == "0"


def test_bad_input_is_one_line(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="has no folder train"):
        runner.train(small(tmp_path / "nowhere"), tmp_path / "run")
    with pytest.raises(RunError, match=r"data\.holdout must lie between 0 and 1"):
        small(folder, data__holdout=1.5)
    with pytest.raises(RunError, match="cannot be built: attention must be softmax"):
        runner.train(small(folder, model__attention=("linear",)), tmp_path / "run")
    with pytest.raises(RunError, match="patch_size must divide image_size"):
        runner.train(small(folder, model__patch_size=9), tmp_path / "run")
    assert not (tmp_path / "run").exists()
