"""The command `primal data`: files in the released layouts, the same for the same seed; one line for what is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from primal_attention.cli import main as cli
from primal_attention.data.lra import listops, pathfinder

pytest.importorskip("tyro")

SIZES = ("--train", "4", "--valid", "2", "--test", "2")


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    try:
        code = cli.main(words)
    except SystemExit as leaving:
        code = int(leaving.code or 0)
    captured = capsys.readouterr()
    return code, captured.out, captured.err


@pytest.mark.parametrize("task", ["listops", "pathfinder"])
def test_a_set_is_made_where_the_recipe_looks_for_it(task, tmp_path: Path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, out, _ = run(capsys, "data", task, *SIZES)
    assert code == 0
    assert "8 " in out
    load = {"listops": listops.load, "pathfinder": pathfinder.load}[task]
    assert [len(s) for s in load(tmp_path / "data" / "lra" / task).splits.values()] == [4, 2, 2]
    code, _, err = run(capsys, "data", task, *SIZES)
    assert code == 2
    assert "already holds a set" in err


def test_the_seed_decides(tmp_path: Path, capsys):
    for name, seed in (("a", "1"), ("b", "1"), ("c", "2")):
        assert run(capsys, "data", "listops", "--out", str(tmp_path / name), "--seed", seed, *SIZES)[0] == 0
    texts = [(tmp_path / name / "basic_train.tsv").read_text() for name in "abc"]
    assert texts[0] == texts[1] != texts[2]


@pytest.mark.parametrize("words", [(), ("--help",), ("listops", "--help"), ("pathfinder", "--help")], ids=str)
def test_help_has_an_example(words, capsys):
    code, out, _ = run(capsys, "data", *words)
    assert code == 0
    assert "Example: primal data" in out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("imdb",), "makes listops or pathfinder (got 'imdb')"),
        (("listops", "--train", "0"), "at least one sample"),
        (("listops", "--seed", "-1"), "seed must not be negative"),
        (("listops", "--trian", "5"), "did you mean --train"),
        (("pathfinder", "--contour-length", "99"), "contour_length must lie between"),
    ],
    ids=str,
)
def test_what_is_wrong_is_one_line(words, said, tmp_path: Path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, _, err = run(capsys, "data", *words)
    assert code == 2
    assert said in err
    assert err.strip().count("\n") == 0


def test_ctrl_c_says_how_to_complete_the_set(tmp_path: Path, capsys, monkeypatch):
    def interrupt(*args, **keywords):
        raise KeyboardInterrupt

    monkeypatch.setattr(listops, "generate", interrupt)
    words = ("data", "listops", "--out", str(tmp_path / "set"), *SIZES)
    code, _, err = run(capsys, *words)
    assert (code, err) == (130, "interrupted; the same command completes the set\n")
    monkeypatch.undo()
    assert run(capsys, *words)[0] == 0
