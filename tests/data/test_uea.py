"""The archive's reader: good files, the cached form, and every way a file can be wrong, each as one clear line."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from primal_attention.data import uea
from primal_attention.utils.errors import DataError

pytest.importorskip("aeon")

HEADER = """@problemName Toy
@timeStamps false
@missing true
@univariate false
@equalLength false
@classLabel true {classes}
@data
"""


def write(folder: Path, half: str, lines: list[str], classes: str = "a b") -> Path:
    home = folder / "Toy"
    home.mkdir(exist_ok=True)
    file = home / f"Toy_{half}.ts"
    file.write_text(HEADER.format(classes=classes) + "\n".join(lines) + ("\n" if lines else ""))
    return file


GOOD = ["1,2,3:4,5,6:a", "1,2:4,5:b", "1,?,3,4:4,5,6,NaN:b"]


@pytest.fixture
def toy(tmp_path: Path) -> Path:
    write(tmp_path, "TRAIN", GOOD)
    write(tmp_path, "TEST", GOOD[:2])
    return tmp_path


def test_japanese_vowels_comes_without_a_download(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PRIMAL_UEA", raising=False)
    data = uea.load("JapaneseVowels")
    assert (len(data.train), len(data.test), data.channels, data.max_length) == (270, 370, 12, 26)
    assert data.classes == tuple("123456789")
    assert np.bincount(data.train.labels).tolist() == [30] * 9


def test_unequal_lengths_and_missing_values(toy: Path):
    data = uea.load("Toy", toy)
    assert [s.shape for s in data.train.series] == [(3, 2), (2, 2), (4, 2)]
    assert data.train.series[2][:, 0].tolist() == [1, 2, 3, 4]
    assert data.train.series[2][:, 1].tolist() == [4, 5, 6, 6]
    assert data.train.labels.tolist() == [0, 1, 1]


def test_numeric_labels_are_coded_by_value(tmp_path: Path):
    for half in ("TRAIN", "TEST"):
        write(tmp_path, half, ["1,2:3,4:10", "1,2:3,4:9"], classes="9 10")
    data = uea.load("Toy", tmp_path)
    assert data.classes == ("9", "10")
    assert data.test.labels.tolist() == [1, 0]


def test_the_cached_form_holds_the_same_numbers(toy: Path, tmp_path: Path):
    data = uea.load("Toy", toy)
    cache = tmp_path / "cache"
    uea.save_npz(data, cache)
    again = uea.load("Toy", cache)
    assert again.classes == data.classes
    assert again.test.labels.tolist() == data.test.labels.tolist()
    for a, b in zip(data.train.series, again.train.series, strict=True):
        np.testing.assert_array_equal(a, b)
    (cache / "Toy.npz").write_bytes(b"PK not a zip")
    with pytest.raises(DataError, match="not a saved data set"):
        uea.load("Toy", cache)


def test_files_directly_in_the_folder_are_found(toy: Path):
    assert len(uea.load("Toy", toy / "Toy").train) == 3


def test_a_missing_set_says_where_the_archive_is(tmp_path: Path):
    with pytest.raises(DataError, match=r"timeseriesclassification\.com"):
        uea.load("Handwriting", tmp_path / "nowhere")


def test_a_mistyped_set_suggests_the_nearest(toy: Path):
    with pytest.raises(DataError, match="did you mean Toy"):
        uea.load("Tooy", toy)


def test_a_missing_half_is_named(toy: Path):
    (toy / "Toy" / "Toy_TEST.ts").unlink()
    with pytest.raises(DataError, match=r"Toy_TEST\.ts is missing"):
        uea.load("Toy", toy)


BAD = {
    "cut inside a channel": ([*GOOD, "1,2,3:4,"], "truncated or ragged"),
    "cut before the label": ([*GOOD, "1,2,3:4,5,6"], "truncated or ragged"),
    "cut before the label of the first case": (["1,2,3:4,5,6"], "does not declare"),
    "ragged channels": ([*GOOD, "1,2,3:4,5:a"], "truncated or ragged"),
    "a channel too many": ([*GOOD, "1,2:4,5:6,7:a"], "truncated or ragged"),
    "words for numbers": ([*GOOD, "1,two:4,5:a"], "truncated or ragged"),
    "one class": (["1,2:3,4:a", "1,2:3,5:a"], "only one class"),
    "no cases": ([], "no cases"),
    "NaN everywhere": (["?,?:?,?:a", "NaN:NaN:b"], "every value is missing"),
}


@pytest.mark.parametrize(("lines", "complaint"), BAD.values(), ids=[k.replace(" ", "-") for k in BAD])
def test_a_bad_file_is_one_clear_line(tmp_path: Path, lines: list[str], complaint: str):
    write(tmp_path, "TRAIN", lines)
    write(tmp_path, "TEST", GOOD)
    with pytest.raises(DataError, match=complaint) as caught:
        uea.load("Toy", tmp_path)
    assert "\n" not in str(caught.value)
    assert "Toy_TRAIN.ts" in str(caught.value)


def test_a_file_cut_inside_its_header_has_no_cases(toy: Path):
    (toy / "Toy" / "Toy_TRAIN.ts").write_text("@problemName Toy\n@timeStamps fal")
    with pytest.raises(DataError, match="no cases"):
        uea.load("Toy", toy)


def test_a_test_label_that_train_lacks_is_named(tmp_path: Path):
    write(tmp_path, "TRAIN", GOOD, classes="a b c")
    write(tmp_path, "TEST", ["1,2:3,4:c"], classes="a b c")
    with pytest.raises(DataError, match=r"label 'c' does not occur in Toy_TRAIN\.ts"):
        uea.load("Toy", tmp_path)


def test_halves_with_different_channels_are_refused(tmp_path: Path):
    write(tmp_path, "TRAIN", GOOD)
    write(tmp_path, "TEST", ["1,2:3,4:5,6:a"])
    with pytest.raises(DataError, match="3 channels where"):
        uea.load("Toy", tmp_path)
