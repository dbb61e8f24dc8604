"""The ImageFolder layout: classes, class lists, decoding, broken files, crops."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from image_files import COLOURS, spoil, write
from primal_attention.data import image as images
from primal_attention.utils.errors import DataError

pytest.importorskip("PIL")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write(tmp_path / "set", train=3, val=2)


def test_classes_are_the_folders_in_order(folder: Path) -> None:
    data = images.load(folder)
    assert data.classes == tuple(COLOURS)
    assert (len(data.train), len(data.test)) == (9, 6)
    assert data.train.labels.tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    assert all(
        file.parent.name == data.classes[label] for file, label in zip(data.test.files, data.test.labels, strict=True)
    )


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


def split(*files: Path) -> images.ImageSplit:
    return images.ImageSplit(files, np.arange(len(files)))


def test_decoding_takes_the_centre_of_the_short_side(tmp_path: Path) -> None:
    from PIL import Image

    wide = np.zeros((20, 60, 3), dtype=np.uint8)
    wide[:, 20:40] = (10, 20, 30)
    Image.fromarray(wide).save(tmp_path / "wide.png")
    Image.fromarray(wide).convert("L").save(tmp_path / "gray.png")
    files = split(tmp_path / "wide.png", tmp_path / "gray.png")
    pixels, labels = images.decode_once(tmp_path, "x", files, 20, strict=True)
    assert pixels.shape == (2, 3, 20, 20)
    assert labels.tolist() == [0, 1]
    assert (pixels[0] == np.array([10, 20, 30])[:, None, None]).all()
    assert len(np.unique(pixels[1])) == 1


def test_broken_files_are_skipped_with_a_warning_or_an_error(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = images.load(folder)
    bad = spoil(data.train.files[4])
    data.train.files[6].write_text("no picture")
    with pytest.raises(DataError, match=rf"{bad} does not decode as an image \(1 of 1 do not\)"):
        images.decode_once(folder, "one", split(bad), 16, strict=False)
    found = []
    for _ in range(2):  # the second time from the cache, with the same warning
        with pytest.warns(UserWarning, match=rf"2 of 9 images do not decode and are skipped, first {bad}"):
            found.append(images.decode_once(folder, "train", data.train, 16, strict=False))
        monkeypatch.setattr(images, "read", lambda file: pytest.fail("decoded again"))
    assert all(np.array_equal(a, b) for a, b in zip(*found, strict=True))
    assert found[0][1].tolist() == [0, 0, 0, 1, 1, 2, 2]
    assert len(found[0][0]) == 7
    with pytest.raises(DataError, match=rf"{bad} does not decode as an image \(2 of 9 do not\)"):
        images.decode_once(folder, "train", data.train, 16, strict=True)


def test_evaluation_crops_seven_eighths(folder: Path) -> None:
    image = images.read(images.load(folder).train.files[0])
    assert images.whole_side(224) == 256
    assert np.array_equal(images.evaluation(28)(image), images.crop_centre(image, 32, 32)[:, 2:30, 2:30])


def test_a_dataset_keeps_the_index_of_broken_files(folder: Path) -> None:
    data = images.load(folder)
    spoil(data.train.files[1])
    files = images.ImageFiles(data.train, images.evaluation(28))
    pixels, labels, broken = images.collate([files[i] for i in (0, 1, 8)])
    assert pixels.shape == (2, 3, 28, 28)
    assert (labels.tolist(), broken) == ([0, 2], [1])
    assert images.collate([files[1]]) == (None, None, [1])


@pytest.mark.parametrize("ops", [0, 2])
def test_training_crops_follow_torchs_generator(folder: Path, ops: int) -> None:
    pytest.importorskip("torchvision", reason="random crops and RandAugment are torchvision's")
    image = images.read(images.load(folder).train.files[0])
    crop = images.training(24, smallest=0.3, ops=ops, magnitude=0.9)

    def four(seed: int) -> np.ndarray:
        torch.manual_seed(seed)
        return np.stack([crop(image) for _ in range(4)])

    assert four(0).shape == (4, 3, 24, 24)
    assert np.array_equal(four(0), four(0))
    assert not np.array_equal(four(0), four(1))


def test_without_torchvision_training_crops_are_one_clear_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchvision.transforms.v2", None)
    with pytest.raises(DataError, match=r"needs torchvision: pip install 'primal-attention\[vision\]', or use"):
        images.training(24, smallest=0.3, ops=2, magnitude=0.9)
