"""Pathfinder: labels re-derived by a tracer of the pictures, no short cut by the dots' places, the files, bad input."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import tracer

from primal_attention.data.lra import pathfinder
from primal_attention.utils.errors import DataError

Image = pytest.importorskip("PIL.Image")


@pytest.fixture(scope="module")
def sample() -> pathfinder.Arrays:
    return pathfinder.generate(1200, seed=7)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return pathfinder.write(tmp_path / "set", train=8, valid=4, test=2, seed=1)


def test_the_tracer_sees_connection_and_gap_in_pictures_drawn_by_hand():
    image = np.zeros((32, 32), dtype=np.uint8)
    image[10, 5:27:2] = 200  # a dotted line
    for x in (4, 26):
        image[9:12, x - 1 : x + 2] = 255
    assert tracer.find_dots(image) == [(10, 4), (10, 26)]
    assert tracer.connected(image)
    image[:, 14:17] = 0
    assert not tracer.connected(image)


def test_every_label_is_what_the_tracer_finds(sample):
    traced = [tracer.connected(image) for image in sample["images"]]
    np.testing.assert_array_equal(traced, sample["labels"] == 1)


def test_short_contours_keep_their_labels_too():
    sample = pathfinder.generate(100, seed=2, contour_length=9, distractors=8)
    np.testing.assert_array_equal([tracer.connected(i) for i in sample["images"]], sample["labels"] == 1)


def test_the_classes_are_balanced_in_every_pair(sample):
    assert (sample["labels"].reshape(-1, 2).sum(axis=1) == 1).all()
    assert 0.4 < sample["labels"][::2].mean() < 0.6


def test_neither_the_dots_distance_nor_the_light_tells_the_label(sample):
    dots = [tracer.find_dots(image) for image in sample["images"]]
    features = {
        "distance": np.array([np.hypot(*np.subtract(a, b)) for a, b in dots]),
        "light": sample["images"].sum(axis=(1, 2), dtype=float),
    }
    for name, feature in features.items():
        cuts = np.quantile(feature, np.linspace(0.05, 0.95, 19))
        best = max(abs(((feature > cut) == sample["labels"]).mean() - 0.5) for cut in cuts)
        assert best < 0.06, name  # four standard deviations of 1200 coins; 0.14 before distances were made alike


def test_processes_draw_the_same_images():
    alone, together = (pathfinder.generate(1100, 5, workers=workers) for workers in (1, 2))
    assert all(np.array_equal(alone[key], together[key]) for key in alone)


def test_a_seed_repeats_and_another_differs():
    first, again, other = (pathfinder.generate(20, seed)["images"] for seed in (1, 1, 2))
    np.testing.assert_array_equal(first, again)
    assert (first != other).any()
    assert len(np.unique(first.reshape(20, -1), axis=0)) == 20


def test_the_written_layout_is_the_released_one_and_reads_back(folder: Path):
    assert (folder / "imgs" / "0" / "sample_0.png").is_file()
    assert (folder / "metadata" / "0.npy").read_text().splitlines()[0].split()[:3] == ["imgs/0", "sample_0.png", "0"]
    made = pathfinder.generate(14, seed=1)
    data = pathfinder.load(folder)
    assert isinstance(data.train.tokens, np.memmap)
    assert [len(s) for s in data.splits.values()] == [8, 4, 2]
    assert (data.length, data.vocabulary, data.classes, data.padded) == (1024, 256, 2, False)
    np.testing.assert_array_equal(data.train.tokens, made["images"][:8].reshape(8, -1))
    read = pathfinder.read(folder, [folder / "metadata" / "0.npy"])
    np.testing.assert_array_equal(read["images"], made["images"])
    np.testing.assert_array_equal(read["labels"], made["labels"])


def test_a_sheet_shows_connected_dots_above_the_others_and_black_where_there_are_too_few(folder: Path):
    train = pathfinder.load(folder).train
    picture = pathfinder.sheet(train, columns=3, scale=1, gap=0).reshape(2, 2, 32, 3, 32)
    images = picture.swapaxes(2, 3).reshape(2, 6, 32, 32)
    for shown, label in zip(images, (1, 0), strict=True):
        found = train.tokens[train.labels == label].reshape(-1, 32, 32)
        np.testing.assert_array_equal(shown[: len(found)], found)
        assert len(found) < 6
        assert not shown[len(found) :].any()


def test_a_released_folder_has_no_splits_file_and_is_split_by_a_fixed_draw(folder: Path, tmp_path: Path):
    (folder / "splits.json").unlink()
    released = tmp_path / "pathfinder32"
    released.mkdir()
    folder.rename(released / "curv_contour_length_14")
    first, again = pathfinder.load(released), pathfinder.load(released)
    assert [len(s) for s in first.splits.values()] == [11, 1, 2]
    np.testing.assert_array_equal(first.test.tokens, again.test.tokens)


def spoil(folder: Path, how: str) -> None:
    image, meta = folder / "imgs" / "0" / "sample_3.png", folder / "metadata" / "0.npy"
    if how == "size":
        image.write_bytes(pathfinder.png(np.zeros((20, 30), dtype=np.uint8)))
    elif how == "missing image":
        image.unlink()
    elif how == "no image":
        image.write_bytes(b"text")
    elif how == "bad line":
        meta.write_text("imgs/0 sample_0.png\n")
    elif how == "bad label":
        meta.write_text("imgs/0 sample_0.png 0 yes\n")
    elif how == "not text":
        meta.write_bytes(b"\x93NUMPY\xff")
    elif how == "empty":
        meta.write_text("")
    elif how == "no metadata":
        meta.unlink()
    elif how == "other splits":
        (folder / "splits.json").write_text(json.dumps({"train": 1, "valid": 1, "test": 1}))
    elif how == "missing split":
        (folder / "splits.json").write_text(json.dumps({"train": 14}))


SAID = {
    "size": r"sample_3\.png: 30×20 pixels where 32×32 are needed",
    "missing image": r"sample_3\.png is missing, though 0\.npy, line 4, lists it",
    "no image": r"sample_3\.png is no image",
    "bad line": "line 1: expected folder, file, number and label",
    "bad label": "line 1: expected folder, file, number and label",
    "not text": "not UTF-8 text",
    "empty": "lists no images",
    "no metadata": "'primal data pathfinder --out",
    "other splits": "3 cases in splits of .* where the metadata lists 14 images",
    "missing split": "numbers of train, valid and test",
}


@pytest.mark.parametrize("how", SAID, ids=lambda how: how.replace(" ", "-"))
def test_a_spoilt_folder_is_one_clear_line(folder: Path, how: str):
    for file in (folder / ".cache").iterdir():
        file.unlink()
    spoil(folder, how)
    with pytest.raises(DataError, match=SAID[how]) as caught:
        pathfinder.load(folder)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("how", ["size", "missing image", "no image"], ids=lambda how: how.replace(" ", "-"))
def test_an_image_that_is_spoilt_after_the_first_reading_is_told_too(folder: Path, how: str):
    pathfinder.load(folder)
    spoil(folder, how)
    with pytest.raises(DataError, match=SAID[how]):
        pathfinder.load(folder)


def test_contours_that_cannot_fit_are_refused(tmp_path: Path):
    with pytest.raises(DataError, match="contour_length must lie between 3 and 18"):
        pathfinder.generate(2, 0, contour_length=40)
    with pytest.raises(DataError, match="distractors must not be negative"):
        pathfinder.generate(2, 0, distractors=-1)
    with pytest.raises(DataError, match="workers must be at least 1"):
        pathfinder.generate(2, 0, workers=0)
    with pytest.raises(DataError, match="at least one case"):
        pathfinder.write(tmp_path, test=0)
