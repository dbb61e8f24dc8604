"""Pathfinder: labels re-derived by a tracer of the pictures, no short cut by the dots' places, the files, bad input."""

from pathlib import Path

import numpy as np
import pytest

from primal_attention.data.lra import pathfinder

LIT = 48  # a fifth of full light
JUMP = 2.75  # the gap between two dashes, from pixel centre to pixel centre, and no more


def find_dots(image: np.ndarray) -> list[tuple[int, int]]:
    """Centres of the two brightest 3×3 patches."""
    padded = np.pad(image.astype(int), 1)
    height, width = image.shape
    patch = sum(padded[y : y + height, x : x + width] for y in range(3) for x in range(3))
    dots = []
    for _ in range(2):
        y, x = np.unravel_index(patch.argmax(), patch.shape)
        dots.append((int(y), int(x)))
        patch[max(0, y - 3) : y + 4, max(0, x - 3) : x + 4] = 0
    return dots


def connected(image: np.ndarray) -> bool:
    """Whether light spreads from one dot to the other over jumps below `JUMP`; knows nothing of the drawing."""
    start, goal = find_dots(image)
    lit = np.argwhere(image >= LIT)
    near = np.hypot(*(lit[:, None] - lit).transpose(2, 0, 1)) < JUMP
    reached = (lit == start).all(axis=1)
    assert reached.any(), "a dot must be lit"
    while True:
        wider = near[reached].any(axis=0)
        if (wider == reached).all():
            break
        reached = wider
    return bool(reached[(lit == goal).all(axis=1)].any())


@pytest.fixture(scope="module")
def sample() -> pathfinder.Arrays:
    return pathfinder.generate(1200, seed=7)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(pathfinder, "DRAWN_AT_ONCE", 64)
    return pathfinder.write(tmp_path / "set", {"train": 8, "valid": 4, "test": 2}, seed=1)


def test_every_label_is_what_the_tracer_finds(sample):
    traced = [connected(image) for image in sample["images"]]
    np.testing.assert_array_equal(traced, sample["labels"] == 1)


def test_the_classes_are_balanced_in_every_pair(sample):
    assert (sample["labels"].reshape(-1, 2).sum(axis=1) == 1).all()
    assert 0.4 < sample["labels"][::2].mean() < 0.6


def test_neither_the_dots_distance_nor_the_light_tells_the_label(sample):
    dots = [find_dots(image) for image in sample["images"]]
    features = {
        "distance": np.array([np.hypot(*np.subtract(a, b)) for a, b in dots]),
        "light": sample["images"].sum(axis=(1, 2), dtype=float),
    }
    for name, feature in features.items():
        cuts = np.quantile(feature, np.linspace(0.05, 0.95, 19))
        best = max(abs(((feature > cut) == sample["labels"]).mean() - 0.5) for cut in cuts)
        assert best < 0.06, name  # four standard deviations of 1200 coins; 0.14 before distances were made alike


def test_the_written_layout_is_the_released_one_and_reads_back(folder: Path):
    assert (folder / "imgs" / "0" / "sample_0.png").is_file()
    assert (folder / "metadata" / "0.npy").read_text().splitlines()[0].split()[:3] == ["imgs/0", "sample_0.png", "0"]
    made = pathfinder.generate(14, seed=1)
    data = pathfinder.load(folder)
    assert isinstance(data.train.tokens, np.memmap)
    assert [len(s) for s in data.splits.values()] == [8, 4, 2]
    assert (data.length, data.vocabulary, data.classes, data.padded) == (1024, 256, 2, False)
    np.testing.assert_array_equal(data.train.tokens, made["images"][:8].reshape(8, -1))
    np.testing.assert_array_equal(data.test.tokens, made["images"][12:].reshape(2, -1))
    np.testing.assert_array_equal(data.test.labels, made["labels"][12:])


def test_a_released_folder_has_no_splits_file_and_is_split_by_a_fixed_draw(folder: Path, tmp_path: Path):
    (folder / "splits.json").unlink()
    released = tmp_path / "pathfinder32"
    released.mkdir()
    folder.rename(released / "curv_contour_length_14")
    first, again = pathfinder.load(released), pathfinder.load(released)
    assert [len(s) for s in first.splits.values()] == [11, 1, 2]
    np.testing.assert_array_equal(first.test.tokens, again.test.tokens)
