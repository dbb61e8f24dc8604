"""Retrieval pairs from articles: labels, halves, separate splits, files, bad input."""

import csv
from pathlib import Path

import numpy as np
import pytest

from primal_attention.data.lra import retrieval, tokens
from primal_attention.utils.errors import DataError

SIZES = {"train": 30, "valid": 10, "test": 10}


@pytest.fixture
def articles(tmp_path: Path) -> Path:
    """Forty articles of one to three segments; every word of an article names it. One is too short."""
    folder = tmp_path / "articles"
    folder.mkdir()
    texts = [f"article{i:03d}é " * (700 * (1 + i % 3)) for i in range(40)]
    (folder / "a.txt").write_text("".join(f" = Title {i} = \n\n{text}\n" for i, text in enumerate(texts[:30])), "utf-8")
    for i, text in enumerate(texts[30:]):
        (folder / f"b{i}.txt").write_text(text, "utf-8")
    (folder / "c.txt").write_text("too short", "utf-8")
    return folder


def read_rows(folder: Path) -> dict[str, list[list[str]]]:
    return {
        name: list(csv.reader((folder / file).open(encoding="utf-8"), delimiter="\t"))
        for name, file in tokens.PAIRS.items()
    }


def test_a_pair_has_label_1_where_its_halves_are_of_one_article(articles: Path, tmp_path: Path) -> None:
    done: list[int] = []
    folder = retrieval.write(tmp_path / "set", SIZES, articles=articles, progress=done.append)
    seen: dict[str, set[str]] = {}
    for name, rows in read_rows(folder).items():
        assert len(rows) == SIZES[name]
        for label, first_id, second_id, *halves in rows:
            assert (label == "1") == (first_id == second_id)
            names = [{word for word in half.split() if len(word) == 11} for half in halves]  # complete words
            assert all(len(words) == 1 for words in names)
            assert (label == "1") == (names[0] == names[1])
            assert all(tokens.TEXT_LENGTH - 2 < len(half.encode()) <= tokens.TEXT_LENGTH for half in halves)
            seen.setdefault(name, set()).update(*names)
        assert sum(label == "0" for label, *_ in rows) == SIZES[name] // 2
        # Every half is used once, so that it says nothing about the label.
        assert len({row[1] for row in rows}) == len({row[2] for row in rows}) == len(rows)
        assert {row[1] for row in rows} == {row[2] for row in rows}
    assert not seen["train"] & seen["valid"]
    assert not seen["train"] & seen["test"]
    assert not seen["valid"] & seen["test"]
    assert sum(done) == sum(SIZES.values())


def test_the_loader_reads_the_set_and_the_seed_decides_it(articles: Path, tmp_path: Path) -> None:
    folders = [retrieval.write(tmp_path / str(i), SIZES, articles=articles, seed=i // 2) for i in range(3)]
    first, same, other = (tokens.load_retrieval(folder) for folder in folders)
    assert [len(split) for split in first.splits.values()] == list(SIZES.values())
    np.testing.assert_array_equal(first.train.tokens, same.train.tokens)
    assert not np.array_equal(first.train.tokens, other.train.tokens)


def test_bad_input_is_one_line(articles: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no \*\.txt files"):
        retrieval.write(tmp_path / "set", articles=tmp_path)
    with pytest.raises(DataError, match=r"40 articles .* \(\d+ pairs\) do not fill the splits \(train 5,000"):
        retrieval.write(tmp_path / "set", articles=articles)
    with pytest.raises(DataError, match="too few to pair different articles: raise --train"):
        retrieval.write(tmp_path / "set", {"train": 4, "valid": 4, "test": 3}, articles=articles)
    assert not (tmp_path / "set").exists()
