"""Film reviews as bytes: both layouts, validation from the training half only, bad input as one clear line."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from primal_attention.data.lra import text
from primal_attention.utils.errors import DataError

REAL = Path(__file__).parents[3] / "shared" / "data" / "imdb"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for half in ("train", "test"):
        for label in ("pos", "neg"):
            home = tmp_path / "aclImdb" / half / label
            home.mkdir(parents=True)
            for i in range(10):
                (home / f"{i}_7.txt").write_text(f"{half} {label} {i} é", encoding="utf-8")
    return tmp_path


def words(row: np.ndarray) -> str:
    return bytes(row[row > 0]).decode()


def test_the_archives_folders_are_read_and_validation_comes_from_train(folder: Path):
    data = text.load(folder, length=50)
    assert [len(s) for s in data.splits.values()] == [18, 2, 20]
    assert (data.vocabulary, data.classes, data.padded, data.length) == (256, 2, True, 50)
    assert all(words(row).startswith("train") for row in (*data.train.tokens, *data.valid.tokens))
    assert all(words(row).startswith("test") for row in data.test.tokens)
    for split in data.splits.values():
        for row, label in zip(split.tokens, split.labels, strict=True):
            assert words(row).split()[1] == ("neg", "pos")[label]
    seen = {words(row) for row in data.train.tokens} & {words(row) for row in data.valid.tokens}
    assert not seen
    assert sorted(data.valid.labels) == [0, 1]


def test_bytes_beyond_the_length_are_cut_and_zero_bytes_become_spaces():
    assert text.encode("abc", 2).tolist() == [97, 98]
    assert text.encode("é", 1).tolist() == [0xC3]
    assert text.encode("a\0b").tolist() == [97, 32, 98]


def test_parquet_gives_the_same(folder: Path, tmp_path: Path):
    pyarrow = pytest.importorskip("pyarrow", reason="reading parquet needs pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    from_folders = text.load(folder, length=50)
    place = tmp_path / "parquet"
    place.mkdir()
    for half in ("train", "test"):
        files = sorted((folder / "aclImdb" / half).glob("*/*.txt"))
        table = {"text": [f.read_text(encoding="utf-8") for f in files], "label": [f.parent.name for f in files]}
        parquet.write_table(pyarrow.table(table), place / f"{half}.parquet")
    from_parquet = text.load(place, length=50)
    for name, split in from_folders.splits.items():
        np.testing.assert_array_equal(split.tokens, from_parquet.splits[name].tokens)
        np.testing.assert_array_equal(split.labels, from_parquet.splits[name].labels)


def test_a_review_that_is_not_utf8_is_named(folder: Path):
    text.load(folder)  # a review that was read before and changed is read again
    (folder / "aclImdb" / "train" / "pos" / "3_7.txt").write_bytes(b"caf\xe9")
    with pytest.raises(DataError, match=r"3_7\.txt is not UTF-8 text \(byte 3 is 0xe9\)"):
        text.load(folder)


def test_a_missing_split_says_what_was_expected(folder: Path):
    (folder / "aclImdb" / "test").rename(folder / "elsewhere")
    with pytest.raises(DataError, match=r"no test split; expected test\.parquet, or the reviews in test/pos"):
        text.load(folder)


def test_an_empty_class_is_named(folder: Path):
    for file in (folder / "aclImdb" / "train" / "neg").iterdir():
        file.unlink()
    with pytest.raises(DataError, match=r"0 reviews \(\*\.txt\)"):
        text.load(folder)


@pytest.mark.skipif(not REAL.is_dir(), reason="the reviews are not in shared/data/imdb beside the checkout")
def test_the_real_reviews():
    pytest.importorskip("pyarrow", reason="reading parquet needs pyarrow")
    data = text.load(REAL, length=1000)
    assert [len(s) for s in data.splits.values()] == [22_500, 2_500, 25_000]
    assert all(split.labels.mean() == 0.5 for split in data.splits.values())
