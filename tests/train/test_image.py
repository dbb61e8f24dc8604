"""Image recipes: batches of files, and whole runs."""

from functools import partial
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
from primal_attention.train import loop
from primal_attention.train.image import NO_LABEL, ImageBatches, ImageRecipe, make_batches
from primal_attention.utils.errors import DataError, RunError

CROP = partial(image_data.crop_centre, size=28)
SMALL = {"data.size": 28, "data.workers": 0, "data.holdout": 0.2, "model.patch_size": 7}
SMALL |= {"model.embed_dim": 16, "model.rank": 4}


def random_square(image: Any) -> np.ndarray:
    """A random crop by Pillow alone."""
    left, top = torch.randint(8, (2,)).tolist()
    return np.asarray(image.crop((left, top, left + 28, top + 28))).transpose(2, 0, 1).copy()


def mix_by_torch(images: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Mixup with a random number of torch's generator."""
    share, pairs = torch.rand(()), torch.nn.functional.one_hot(labels, 3).float()
    return torch.lerp(images.flip(0) / 255, images / 255, share), torch.lerp(pairs.flip(0), pairs, share)


@pytest.fixture(autouse=True)
def crops(monkeypatch: pytest.MonkeyPatch) -> None:
    """Augmentation is torchvision's. Where it does not import, `random_square` takes its place."""
    try:
        import torchvision.transforms.v2  # noqa: F401
    except Exception:  # an installation that does not fit torch raises almost any type
        monkeypatch.setattr(image_data, "training", lambda size, **options: random_square)
        monkeypatch.setattr(image_data, "mixing", lambda mixup, cutmix, classes: mix_by_torch if mixup else None)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("images") / "set")


def small(folder: Path, **changes: Any) -> ImageRecipe:
    return toy.small("image/imagenette", folder, **SMALL, **changes)


# Runs


@pytest.mark.parametrize("augment", ["deit", "none"])
def test_a_run_has_three_scores_and_resumes(folder: Path, tmp_path: Path, augment: str) -> None:
    """A run that was cut off within an epoch ends with the same weights; files are read by two workers."""
    recipe = small(folder, augment=augment, data__workers=2, trainer__checkpoint_steps=1)
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
    model, batches = load_run(tmp_path, 5, 4)
    assert [len(images) for (images,) in batches] == [4, 1]
    assert [layer.kind for layer in spectrum(model, batches).values()] == ["primal", "primal"]


def test_bad_input_is_one_line(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(RunError, match="cannot be built: attention must be softmax"):
        loop.train(small(folder, model__attention=("linear",)), tmp_path / "run")
    assert not (tmp_path / "run").exists()


# Batches


@pytest.mark.parametrize("workers", [0, 2])
def test_a_broken_image_is_one_line(workers: int, tmp_path: Path) -> None:
    place = write(tmp_path / "set")
    bad = spoil(place / "val" / "n01" / "0.jpg")
    with pytest.raises(DataError, match=f"^{bad} does not decode as an image$"):
        list(ImageBatches(image_data.load(place).test, CROP, 8, workers=workers))


def test_the_rest_of_an_epoch_has_the_random_crops_of_the_whole(folder: Path) -> None:
    data = image_data.load(folder)

    def pixels(workers: int, *, epoch: int = 0, skip: int = 0) -> list[torch.Tensor]:
        recipe = small(folder, data__workers=workers, augment="none", trainer__batch_size=4)
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
    crop = image_data.training(28, smallest=0.2, ops=0, magnitude=0.0, erase=0.0)
    repeated = ImageBatches(data.train, crop, 6, shuffle_seed=0, steps=1, repeats=3)
    ((images, labels),) = repeated
    assert labels[:3].unique().numel() == 1
    assert len({image.numpy().tobytes() for image in images}) == 6, "copies of an image are different crops"
    repeated.epoch = 1
    ((_, others),) = repeated
    assert others[:3].unique().numel() == 1


def test_the_last_batch_of_an_evaluation_is_filled(folder: Path) -> None:
    batches = ImageBatches(image_data.load(folder).test.take(np.arange(5)), CROP, 4)
    assert [images.shape[0] for images, _ in batches] == [4, 4]
    assert [labels[1:].tolist() for _, labels in batches][1] == 3 * [NO_LABEL]


def test_the_loss_smooths_labels(folder: Path) -> None:
    module = small(folder, augment="light").build().module.eval()
    images, labels = torch.randint(256, (6, 3, 28, 28), dtype=torch.uint8), torch.zeros(6, dtype=torch.long)
    targets = torch.tensor([0.9 + 0.1 / 3, 0.1 / 3, 0.1 / 3]).expand(6, 3)
    expected = torch.nn.functional.cross_entropy(module.model(images), targets)
    torch.testing.assert_close(module.task_loss((images, labels)), expected)
