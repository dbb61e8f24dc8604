"""The ImageFolder layout: classes, class lists, decoding, broken files, crops."""

import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from image_files import COLOURS, spoil, write
from primal_attention.data import image as images
from primal_attention.utils.errors import DataError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write(tmp_path / "set", train=3, val=2)


def test_classes_are_the_folders_in_order(folder: Path) -> None:
    data = images.load(folder)
    assert data.classes == tuple(COLOURS)
    assert (len(data.train), len(data.test)) == (9, 6)
    assert data.train.labels.tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    assert [file.parent.name for file in data.test.files] == [data.classes[label] for label in data.test.labels]


def test_a_class_list_takes_its_classes_in_its_order(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "two.txt"
    file.write_text("n03 blue things\n\nn01\n")
    data = images.load(folder, file)
    assert data.classes == ("n03", "n01")
    assert {f.parent.name for f in data.train.files} == {"n03", "n01"}
    assert data.train.labels[0] == 0
    assert data.train.files[0].parent.name == "n03"


@pytest.mark.parametrize(
    ("text", "message"),
    [("", "names no class"), ("n01\nn01\n", "names class 'n01' twice"), ("n09\n", "has no class folder 'n09'")],
)
def test_a_bad_class_list_is_one_line(folder: Path, tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "classes.txt"
    file.write_text(text)
    with pytest.raises(DataError, match=message):
        images.load(folder, file)
    with pytest.raises(DataError, match="does not exist"):
        images.load(folder, tmp_path / "none.txt")


def test_a_wrong_layout_is_one_line(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"has no folder train: expected train/CLASS/\*\.jpg"):
        images.load(tmp_path / "nowhere")
    (tmp_path / "bare" / "train").mkdir(parents=True)
    (tmp_path / "bare" / "val").mkdir()
    with pytest.raises(DataError, match="names no class"):
        images.load(tmp_path / "bare")
    for file in (folder / "val" / "n02").iterdir():
        file.unlink()
    with pytest.raises(DataError, match="n02 has no images"):
        images.load(folder)


def test_decoding_takes_the_centre_of_the_short_side(tmp_path: Path) -> None:
    wide = np.zeros((24, 72, 3), dtype=np.uint8)  # of 24 pixels the central 7/8 are 21
    wide[:, 24:48] = (10, 20, 30)
    Image.fromarray(wide).save(tmp_path / "wide.png")
    Image.fromarray(wide).convert("L").save(tmp_path / "gray.png")
    centre, gray = (images.crop_centre(images.read(tmp_path / f"{name}.png"), 21) for name in ("wide", "gray"))
    assert centre.shape == gray.shape == (3, 21, 21)
    assert (centre == np.array([10, 20, 30])[:, None, None]).all()
    assert len(np.unique(gray)) == 1


def test_a_batch_has_pixels_and_labels_or_the_path_of_a_broken_file(folder: Path) -> None:
    data = images.load(folder)
    bad = spoil(data.train.files[1])
    files = images.ImageFiles(data.train, partial(images.crop_centre, size=28))
    pixels, labels = images.collate([files[i, 0] for i in (0, 8)])
    assert (pixels.shape, labels.tolist()) == ((2, 3, 28, 28), [0, 2])
    assert images.collate([files[i, 0] for i in (0, 1, 8)]) == bad


@pytest.mark.parametrize("strong", [False, True])
def test_training_images_follow_torchs_generator_and_mixed_labels_the_images(folder: Path, strong: bool) -> None:
    pytest.importorskip("torchvision", reason="augmentation is torchvision's")
    image = images.read(images.load(folder).train.files[0])
    crop = images.training(24, smallest=0.3, ops=2 * strong, magnitude=0.9, erase=float(strong))

    def four(seed: int) -> np.ndarray:
        torch.manual_seed(seed)
        return np.stack([crop(image) for _ in range(4)])

    assert (four(0).shape, four(0).dtype) == ((4, 3, 24, 24), np.float32)
    assert np.array_equal(four(0), four(0))
    assert not np.array_equal(four(0), four(1))
    labels = torch.tensor([0, 1, 1, 0])
    pixels = labels.float().view(4, 1, 1, 1).expand(4, 3, 16, 16)
    for mix in (images.mixing(0.8, 0.0, 2), images.mixing(0.0, 1.0, 2), images.mixing(0.8, 1.0, 2)):
        mixed, targets = mix(pixels, labels)
        # Images of class 1 are ones, of class 0 zeros: the mean pixel is the probability of class 1.
        torch.testing.assert_close(mixed.mean((1, 2, 3)), targets[:, 1])
    assert images.mixing(0.0, 0.0, 2) is None


def test_without_torchvision_augmentation_is_one_clear_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchvision.transforms.v2", None)
    training = partial(images.training, 24, smallest=0.3, ops=2, magnitude=0.9, erase=0)
    for make in (training, partial(images.mixing, 1, 1, 2)):
        with pytest.raises(DataError, match=r"needs torchvision: pip install 'primal-attention\[vision\]'"):
            make()
