"""ListOps: every label re-derived by an evaluator of the written text, the distribution, the files, bad input."""

import random
import statistics
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
from scipy.stats import ks_2samp

from primal_attention.data.lra import listops

SMALL = listops.Shape(max_depth=4, max_args=4, min_length=5, max_length=40)
RULES = {
    "[MIN": min,
    "[MAX": max,
    "[MED": lambda values: int(statistics.median(values)),
    "[SM": lambda values: sum(values) % 10,
}


def value_of(text: str) -> int:
    """Evaluate the paired notation by its parentheses alone: ( f x ) applies f to x, and ] calls what was gathered."""
    stack: list[list] = [[]]
    for word in text.split():
        if word == "(":
            stack.append([])
        elif word == ")":
            left, right = stack.pop()
            stack[-1].append(RULES[left[0]](left[1:]) if right == "]" else [*left, right])
        elif word in RULES:
            stack[-1].append([word])
        else:
            stack[-1].append(word if word == "]" else int(word))
    ((value,),) = stack
    return value


def depth_of(codes: np.ndarray) -> int:
    opens = (codes >= listops.OPERATOR) & (codes < listops.END)
    return int(np.cumsum(opens.astype(int) - (codes == listops.END)).max()) + 1


def naive_tree(rng: random.Random, depth: int, shape: listops.Shape) -> int:
    """Length of a random tree, by the definition."""
    if depth == shape.max_depth or rng.random() >= 0.25:
        return 1
    return 2 + sum(naive_tree(rng, depth + 1, shape) for _ in range(rng.randint(2, shape.max_args)))


@pytest.fixture(scope="module")
def sample() -> list[tuple[str, int]]:
    return list(islice(listops.generate(seed=3), 200))


def lengths_of(sample: list[tuple[str, int]]) -> np.ndarray:
    return np.array([len(listops.encode(text)) for text, _ in sample])


def test_every_label_is_the_value_of_its_expression(sample):
    assert all(value_of(text) == value for text, value in sample)


def test_lengths_depths_and_operators_are_the_tasks(sample):
    codes = [listops.encode(text) for text, _ in sample]
    assert lengths_of(sample).min() > 500
    assert lengths_of(sample).max() < 2000
    assert max(map(depth_of, codes)) == 10
    counts = np.bincount(np.concatenate(codes), minlength=len(listops.WORDS))
    operators = counts[listops.OPERATOR : listops.END]
    assert operators.max() / operators.min() < 1.05
    assert {value for _, value in sample} == set(range(10))


def test_lengths_are_distributed_as_by_the_definition():
    shape = listops.Shape(max_depth=6, max_args=6, min_length=20, max_length=400)
    ours = lengths_of(list(islice(listops.generate(0, shape), 2000)))
    rng = random.Random(0)
    drawn = (naive_tree(rng, 1, shape) for _ in range(200_000))
    theirs = np.array([n for n in drawn if 20 < n < 400][:2000])
    assert len(theirs) == 2000
    # Two samples of 2000: the Kolmogorov-Smirnov distance exceeds 0.06 with a probability below 0.2 %.
    assert ks_2samp(ours, theirs).statistic < 0.06


def test_written_files_read_back(tmp_path: Path):
    steps = []
    listops.write(tmp_path, {"train": 20, "valid": 5, "test": 6}, seed=4, progress=steps.append)
    assert sum(steps) == 31
    header, first = (tmp_path / "basic_train.tsv").read_text().splitlines()[:2]
    assert header == "Source\tTarget"
    source, target = first.split("\t")
    assert value_of(source) == int(target)
    data = listops.load(tmp_path)
    assert isinstance(data.train.tokens, np.memmap)
    assert [len(s) for s in data.splits.values()] == [20, 5, 6]
    assert (data.length, data.vocabulary, data.classes) == (2000, 16, 10)
    read = listops.read_tsv(tmp_path / "basic_train.tsv")
    np.testing.assert_array_equal(read["tokens"], data.train.tokens)
    np.testing.assert_array_equal(read["labels"], data.train.labels)


def test_what_the_outermost_operator_tells(tmp_path: Path):
    splits = {
        "train": [("[MAX 1 9 ]", 9), ("[MAX 8 9 ]", 9), ("[MAX 1 2 ]", 2), ("[MIN 0 4 ]", 0)],
        "val": [("[MAX 1 2 ]", 2)],
        "test": [("[MAX 9 9 ]", 9), ("[MAX 3 2 ]", 3), ("[MIN 0 1 ]", 0), ("[SM 1 2 ]", 3)],
    }
    for split, rows in splits.items():
        lines = "".join(f"{text}\t{label}\n" for text, label in rows)
        (tmp_path / f"basic_{split}.tsv").write_text("Source\tTarget\n" + lines)
    assert listops.by_operator(listops.load(tmp_path)) == 0.5


def test_both_notations_are_the_same_expression():
    np.testing.assert_array_equal(listops.encode("( ( ( [MAX 2 ) 9 ) ] )"), listops.encode("[MAX 2 9 ]"))
