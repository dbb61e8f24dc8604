"""The sets of Long-Range Arena as they are released: reviews, pairs of papers, and CIFAR-10 in gray."""

from pathlib import Path

import numpy as np
import pytest

import hostile_data
from primal_attention.data.lra import tokens
from primal_attention.utils.errors import DataError

PAIRS = [
    "1.0\tP01\tP02\tb'first paper'\tb'second paper'",
    '0.0\tP03\tP04\t"a ""quoted"" word\tand a tab"\tplain é',
    "1\tP05\tP06\tx\t" + "y" * 5000,
]


def words(row: np.ndarray) -> str:
    return bytes(row[row > 0]).decode()


@pytest.fixture
def reviews(tmp_path: Path) -> Path:
    for part in ("train", "test"):
        for label in ("pos", "neg"):
            home = tmp_path / "aclImdb" / part / label
            home.mkdir(parents=True)
            for i in range(10):
                (home / f"{i}_7.txt").write_text(f"{part} {label} {i} é", encoding="utf-8")
    return tmp_path


def test_the_archives_folders_are_read_and_validation_comes_from_train(reviews: Path) -> None:
    data = tokens.load_text(reviews, length=50)
    assert [len(s) for s in data.splits.values()] == [18, 2, 20]
    assert (data.vocabulary, data.classes, data.padded, data.length) == (256, 2, True, 50)
    for name, split in data.splits.items():
        for row, label in zip(split.tokens, split.labels, strict=True):
            assert words(row).split()[:2] == ["test" if name == "test" else "train", ("neg", "pos")[label]]
    assert not {words(row) for row in data.train.tokens} & {words(row) for row in data.valid.tokens}
    assert sorted(data.valid.labels) == [0, 1]


def test_parquet_gives_the_same(reviews: Path, tmp_path: Path) -> None:
    from_folders = tokens.load_text(reviews, length=50)
    place = tmp_path / "parquet"
    place.mkdir()
    for part in ("train", "test"):
        files = sorted((reviews / "aclImdb" / part).glob("*/*.txt"))
        table = {"text": [f.read_text(encoding="utf-8") for f in files], "label": [f.parent.name for f in files]}
        hostile_data.save_columns(place / f"{part}.parquet", table)
    from_parquet = tokens.load_text(place, length=50)
    for name, split in from_folders.splits.items():
        np.testing.assert_array_equal(split.tokens, from_parquet.splits[name].tokens)
        np.testing.assert_array_equal(split.labels, from_parquet.splits[name].labels)


def test_a_review_that_is_not_utf8_is_named(reviews: Path) -> None:
    tokens.load_text(reviews)  # a review that was read before and changed is read again
    (reviews / "aclImdb" / "train" / "pos" / "3_7.txt").write_bytes(b"caf\xe9")
    with pytest.raises(DataError, match=r"3_7\.txt is not UTF-8 text \(byte 3\)"):
        tokens.load_text(reviews)


def test_bytes_beyond_the_length_are_cut_and_zero_bytes_become_spaces() -> None:
    assert tokens.encode_bytes("abc", 2).tolist() == [97, 98]
    assert tokens.encode_bytes("é", 1).tolist() == [0xC3]
    assert tokens.encode_bytes("a\0b").tolist() == [97, 32, 98]


def test_pairs_are_read_as_bytes(tmp_path: Path) -> None:
    for name in tokens.PAIRS.values():
        (tmp_path / name).write_text("\n".join(PAIRS) + "\n", encoding="utf-8")
    data = tokens.load_retrieval(tmp_path)
    assert (data.length, data.vocabulary, data.classes, data.padded) == (4000, 256, 2, True)
    for split in data.splits.values():
        assert split.labels.tolist() == [1, 0, 1]
        assert [words(row) for row in split.tokens] == ["first paper", 'a "quoted" word\tand a tab', "x"]
        assert [words(row) for row in split.second] == ["second paper", "plain é", "y" * 4000]
    assert isinstance(data.train.second, np.memmap)


def test_the_binary_files_become_gray(tmp_path: Path) -> None:
    home = tmp_path / "cifar-10-batches-bin"
    home.mkdir()
    records = hostile_data.make_cifar(home)
    data = tokens.load_image(tmp_path)
    assert [len(s) for s in data.splits.values()] == [18, 2, 4]
    assert (data.length, data.vocabulary, data.classes, data.padded) == (1024, 256, 10, False)
    red, green, blue = records[0, 0, 1:].reshape(3, -1).astype(float)
    np.testing.assert_allclose(data.train.tokens[0], 0.2989 * red + 0.587 * green + 0.114 * blue, atol=0.5 + 1e-9)
    assert data.test.labels.tolist() == records[5, :, 0].tolist()
    assert data.valid.labels.tolist() == records[4, 2:, 0].tolist()


def test_gray_arrays_are_taken_as_they_are(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    images, labels = rng.integers(0, 256, (20, 32, 32), dtype=np.uint8), rng.integers(0, 10, 20, dtype=np.uint8)
    for part in ("train", "test"):
        np.save(tmp_path / f"{part}_images.npy", images)
        np.save(tmp_path / f"{part}_labels.npy", labels)
    data = tokens.load_image(tmp_path)
    assert isinstance(data.train.tokens, np.memmap)
    np.testing.assert_array_equal(data.train.tokens, images[:18].reshape(18, -1))
    np.testing.assert_array_equal(data.valid.labels, labels[18:])
