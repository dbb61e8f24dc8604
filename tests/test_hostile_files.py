"""Damaged files of every kind that the package reads: one line, exit code 2, nothing executed, nothing written.

`KINDS` names each kind of file with what reads it and the ways to damage it; `hostile_data.py` has those of data sets.
"""

import json
import os
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import toy
from safetensors.torch import load_file, save_file

import page_cases
from hostile_data import COMMON, DATA_KINDS, MARK, Damage, Damages, Kind, Payload, content, edit, put, rows, without
from primal_attention.cli import main as cli
from primal_attention.train import registry
from primal_attention.train.config import override
from primal_attention.utils.errors import DataError

# Damages of the files of runs and models


def replace_by_pipe(file: Path) -> None:
    """A file that nothing is ever read from."""
    file.unlink()
    os.mkfifo(file)


SAVED: Damages = {**COMMON, "saved-tensor": lambda file: torch.save(torch.zeros(2), file)}
TEXT: Damages = {**SAVED, "pipe": replace_by_pipe, "larger-than-memory": lambda file: os.truncate(file, 2**40)}


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = {"a": value}
    return value


def swap(path: str, text: str) -> Damage:
    """Put text at a place that no serialiser would write there."""
    return lambda file: put(path, "MARK")(file) or file.write_text(file.read_text().replace("MARK", text))


def fields(text: str, number: str, table: str, *needed: str, string: str = "\\ud800") -> dict[str, Damage]:
    """Damages of a field with a text, one with a number, one with a table or list, and fields that must be there."""
    return {
        **TEXT,
        "a-list": partial(edit, lambda _: [1, 2]),
        "a-number": partial(edit, lambda _: 7),
        "a-text": partial(edit, lambda _: "text"),
        "number-for-text": put(text, 7),
        "half-a-character": swap(text, string),
        "text-for-number": put(number, "many"),
        "huge-number": put(number, 10**400),
        "digits-without-end": lambda file: (
            put(number, 77777)(file) or file.write_text(file.read_text().replace("77777", "9" * 10_000))
        ),
        "list-for-number": put(number, [1]),
        "true-for-number": put(number, True),
        "text-for-table": put(table, "text"),
        "number-for-table": put(table, 3),
        "deep-field": put(f"{table.partition('.')[0]}", nested(200)),
        **{f"without-{name}": put(name, ...) for name in (table, *needed)},
    }


def append(text: str) -> Damage:
    return lambda file: file.write_text(f"{file.read_text()}\n{text}\n")


YAML: Damages = {
    "truncated": lambda file: file.write_text(file.read_text().partition("config:")[0]),
    "python-object": content(f"!!python/object/apply:builtins.open [{MARK}, w]\n"),
    "python-field": append(f"x: !!python/object/apply:os.mkdir [{MARK}]"),
    "aliases": append("a0: &a0 [1, 1]\n" + "".join(f"a{i}: &a{i} [*a{i - 1}, *a{i - 1}]\n" for i in range(1, 60))),
    "impossible-date": append("when: 2026-99-99"),
    "a-date": append("config: {when: 2026-01-01}"),
    "number-as-key": rows(lambda lines: ["1: 2", *lines]),
}


def last_cell(text: str) -> Damage:
    return rows(lambda lines: [*lines[:-1], f"{lines[-1].rpartition(',')[0]},{text}"])


def table(column: str) -> Damages:
    return {
        **without(TEXT, "truncated"),
        "cut-row": rows(lambda lines: [*lines[:-1], lines[-1].partition(",")[0]]),
        "one-cell-more": rows(lambda lines: [*lines[:-1], lines[-1] + ",1"]),
        "a-word": last_cell("many"),
        "digits-without-end": last_cell("9" * 10_000),
        "huge-number": last_cell("1e999"),
        "huge-cell": last_cell("a" * 200_000),
        "column-twice": rows(lambda lines: [f"{lines[0]},{column}", *(f"{line},1" for line in lines[1:])]),
        "no-header": rows(lambda lines: lines[1:]),
        f"without-{column}": rows(lambda lines: [lines[0].replace(column, "other"), *lines[1:]]),
    }


def weights(change: Callable[[dict[str, torch.Tensor], str], object]) -> Damage:
    """Apply a change to the tensors, with the name of the first matrix among them."""

    def damage(file: Path) -> None:
        tensors = load_file(file)
        change(tensors, next(name for name, tensor in tensors.items() if tensor.ndim == 2))
        save_file({name: tensor.clone() for name, tensor in tensors.items()}, file, {"format": "pt"})

    return damage


def header(text: bytes, length: int | None = None) -> Damage:
    return content((len(text) if length is None else length).to_bytes(8, "little") + text)


WEIGHTS: Damages = {
    **SAVED,
    "huge-header": header(b"{}", 2**62),
    "header-without-end": header(b'{"a": ' * 50_000),
    "no-tensors": header(b"{}"),
    "beyond-the-end": header(b'{"a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}}'),
    "unknown-type": header(b'{"a": {"dtype": "X9", "shape": [], "data_offsets": [0, 0]}}'),
    "without-a-tensor": weights(lambda tensors, name: tensors.pop(name)),
    "other-shape": weights(lambda tensors, name: tensors.update({name: tensors[name][:1]})),
}


CHECKPOINT: Damages = {
    **without(SAVED, "folder"),
    "pickled-object": lambda file: torch.save({"state_dict": Payload(), "run": {}}, file),
}


# Folders with valid files


def make_page(home: Path) -> None:
    """A run folder with and without a spectrum, a benchmark, and results of a table."""
    run = page_cases.put_run(home / "run", "primal", 0, 0.9)
    shutil.copytree(run, home / "other")
    (home / "other" / "spectrum.csv").write_text(page_cases.SPECTRUM)
    (home / "bench.json").write_text(json.dumps({**page_cases.bench(), "command": "primal bench"}))
    place = home / "results" / "uea" / "JapaneseVowels"
    place.mkdir(parents=True)
    recipe = override(registry.get(page_cases.RECIPE), {"model.attention": ("primal",)}).resolved()
    result = {**page_cases.summary("primal", 0, 0.9), "config": page_cases.to_plain(recipe)}
    (place / "primal-seed0.json").write_text(json.dumps(result))


def make_run(home: Path) -> None:
    """A finished run of a small set, and the same run before its summary was written."""
    toy.folder(home)
    words = ["train", "uea/Toy", "--out", str(home / "run"), "--data.folder", str(home), *toy.FLAGS]
    assert cli.main(words) == 0
    shutil.copytree(home / "run", home / "stopped")
    (home / "stopped" / "summary.json").unlink()


def make_language(home: Path) -> None:
    toy.write_articles(home)
    words = ["train", "lm/wikipedia", "--out", str(home / "run"), "--data.folder", str(home), *toy.FLAGS]
    words += ["--data.vocabulary", "280", "--data.context", "16"]
    words += ["--trainer.steps-per-epoch", "1", "--trainer.precision", "32-true"]
    assert cli.main(words) == 0
    (home / "prompt.txt").write_text("The café cat")


REPORT = "report {} -o page.html"
TABLE = "table uea --no-run --sets JapaneseVowels --models primal --results results"
GENERATE = "generate run --prompt-file prompt.txt --tokens 2 --device cpu"
RESUME = " ".join(["train uea/Toy --out stopped --resume --data.folder .", *toy.FLAGS])
SUMMARY = fields("label", "seconds_per_epoch", "scores", "format")
CONFIG = {**fields("benchmark", "config.seed", "config", "format", string='"\\ud800"'), **YAML}
RESULT = fields("label", "seconds_per_epoch", "scores", "seed", "format")
BENCH = {
    **fields("rows.0.label", "rows.0.seconds", "rows", "hardware", "settings", "rows.1.batch", "format"),
    "zero-length": put("rows.0.length", 0),
    "unknown-status": put("rows.0.status", "fine"),
    "no-time": put("rows.0.seconds", None),
}
NOT_TEXT: Damages = {
    **without(SAVED, "truncated", "zero-bytes", "deep-nesting", "other-text"),
    "utf-16": lambda file: file.write_bytes(file.read_bytes().decode().encode("utf-16")),
    "cut-character": lambda file: file.write_bytes(file.read_bytes() + "é".encode()[:1]),
}
PROMPT = {**NOT_TEXT, "larger-than-memory": TEXT["larger-than-memory"]}  # a pipe is welcome
TOKENIZER = {
    **without(SAVED, "foreign-image", "compressed", "saved-tensor", "archive"),
    "a-list": partial(edit, lambda _: [1]),
    "no-model": put("model", ...),
    "unknown-model": put("model", 3),
}


STORED = "results/uea/JapaneseVowels/primal-seed0.json"
KINDS = {
    "summary-report": Kind(make_page, "run/summary.json", REPORT.format("run"), SUMMARY),
    "config-report": Kind(make_page, "run/config.yaml", REPORT.format("run"), CONFIG),
    "metrics-report": Kind(make_page, "run/metrics.csv", REPORT.format("run"), table("epoch")),
    "spectrum-csv-report": Kind(make_page, "other/spectrum.csv", REPORT.format("other"), table("index")),
    "bench-report": Kind(make_page, "bench.json", REPORT.format("bench.json"), BENCH),
    "bench-plot": Kind(make_page, "bench.json", "bench plot bench.json", TEXT),
    "result-report": Kind(make_page, STORED, REPORT.format("results"), TEXT),
    "result-table": Kind(make_page, STORED, TABLE, RESULT),
    "prompt": Kind(make_language, "prompt.txt", GENERATE, PROMPT),
    "vocabulary": Kind(make_language, "run/vocabulary.json", GENERATE, {**SAVED, **TOKENIZER}),
    "language-weights": Kind(make_language, "run/model.safetensors", GENERATE, SAVED),
    "summary-generate": Kind(make_language, "run/summary.json", GENERATE, TEXT),
    "summary-evaluate": Kind(make_run, "run/summary.json", "evaluate run", TEXT),
    "config-evaluate": Kind(make_run, "run/config.yaml", "evaluate run", {**TEXT, **YAML}),
    "weights-evaluate": Kind(make_run, "run/model.safetensors", "evaluate run", WEIGHTS),
    "config-resume": Kind(make_run, "stopped/config.yaml", RESUME, CONFIG),
    "checkpoint-resume": Kind(make_run, "stopped/checkpoints/*.ckpt", RESUME, CHECKPOINT),
    **DATA_KINDS,
}


@pytest.fixture(scope="module")
def fill(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Kind, Path], None]:
    """Replace a folder by one with valid files, which are made once."""
    made: dict[Any, Path] = {}

    def get(kind: Kind, home: Path) -> None:
        if kind.make not in made:
            made[kind.make] = tmp_path_factory.mktemp("valid")
            kind.make(made[kind.make])
        for place in home.iterdir():
            shutil.rmtree(place) if place.is_dir() else place.unlink()
        shutil.copytree(made[kind.make], home, dirs_exist_ok=True)

    return get


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    place = tmp_path / "home"
    place.mkdir()
    monkeypatch.chdir(place)
    yield place
    shutil.rmtree(place)


def tree(folder: Path) -> dict[str, bytes | None]:
    """Every file below a folder with its content; caches may be written at any time and are left out."""
    small = (p for p in sorted(folder.rglob("*")) if ".cache" not in p.parts)
    return {str(p): p.read_bytes() if p.is_file() and p.stat().st_size < 2**30 else None for p in small}


def run(words: list[str], capfd: pytest.CaptureFixture[str]) -> tuple[int, str]:
    capfd.readouterr()
    code = cli.main(words)
    return code, capfd.readouterr().err


def message(read: Any, home: Path, capfd: pytest.CaptureFixture[str]) -> str:
    """Read by a command or a function, which must fail; the message."""
    before = tree(home)
    if callable(read):
        with pytest.raises(DataError) as caught:
            read(home)
        text = f"primal: {caught.value}\n"
    else:
        code, text = run(read.split() if isinstance(read, str) else read, capfd)
        assert code == 2, text
    assert text.startswith("primal: ")
    assert text.count("\n") == 1, text
    assert len(text) < 700
    assert "unsafe" not in text, "no advice to unpickle"
    assert tree(home) == before, "nothing is executed or written"
    return text


@pytest.mark.parametrize("name", KINDS)
def test_every_damage_of_a_file_is_one_line(name: str, fill: Any, home: Path, capfd: Any) -> None:
    kind = KINDS[name]
    fill(kind, home)
    if callable(kind.read):
        kind.read(home)
    elif "resume" not in name:
        assert run(kind.read.split(), capfd)[0] == 0
    for way, damage in kind.damages.items():
        fill(kind, home)
        files = sorted(home.glob(kind.file))
        assert files
        for file in files:
            damage(file)
        try:
            text = message(kind.read, home, capfd)
            assert (str(home) if callable(kind.read) else kind.file.partition("/")[0]) in text
        except BaseException as error:
            raise AssertionError(f"{way}: {error}") from error


@pytest.mark.parametrize("name", [name for name in DATA_KINDS if DATA_KINDS[name].recipe])
def test_a_data_set_that_cannot_be_read_leaves_no_run(name: str, fill: Any, home: Path, tmp_path: Path, capfd) -> None:
    kind, folder = DATA_KINDS[name], tmp_path / "set"
    command = ["train", *kind.recipe.split(), "--trainer.accelerator", "cpu", "--data.folder", str(folder)]
    for state in ("no folder", "empty", "random-bytes"):
        if state == "empty":
            folder.mkdir()
        elif state == "random-bytes":
            fill(kind, folder)
            kind.damages[state](next(folder.glob(kind.file)))
        text = message(command, home, capfd)
        assert str(folder) in text
        assert state == "random-bytes" or kind.layout in text


def test_a_prompt_of_other_bytes_is_one_line(fill: Any, home: Path, capfd: pytest.CaptureFixture[str]) -> None:
    fill(KINDS["prompt"], home)
    prompt = os.fsdecode(b"caf\xe9")  # as Python holds the argument
    assert "--prompt is not UTF-8" in message(["generate", "run", "--prompt", prompt], home, capfd)


def test_broken_runs_are_skipped_on_request(fill: Any, home: Path, tmp_path: Path, capfd: Any) -> None:
    fill(KINDS["summary-report"], home)
    count = 0
    for name in ("summary-report", "config-report", "metrics-report"):
        for way, damage in KINDS[name].damages.items():
            shutil.copytree(home / "run", tmp_path / "runs" / name / way)
            damage(tmp_path / "runs" / name / way / Path(KINDS[name].file).name)
            count += 1
    shutil.copytree(home / "other", tmp_path / "runs" / "valid")
    code, err = run(["report", str(tmp_path / "runs"), "-o", "page.html", "--skip-broken"], capfd)
    assert code == 0, err
    assert err.count("left out") == count
    assert (home / "page.html").exists()
