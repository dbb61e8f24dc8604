"""Damaged files of every kind that the command reads: exit code 2, one line, nothing executed, nothing written.

`KINDS` names each kind of file with the command that reads it and the ways to damage it. Data sets have a table of
their own in `hostile_data.py`; here they are read through the command.
"""

from __future__ import annotations

import copy
import json
import os
import pickle
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("tyro")
pytest.importorskip("lightning")
pytest.importorskip("matplotlib")
yaml = pytest.importorskip("yaml")
safetensors = pytest.importorskip("safetensors.torch")
hf = pytest.importorskip("transformers")

import page_cases  # noqa: E402
from primal_attention.cli import main as cli  # noqa: E402
from primal_attention.data import uea  # noqa: E402
from primal_attention.data.uea import SeriesData, Split  # noqa: E402
from primal_attention.train import loop, registry  # noqa: E402
from primal_attention.train.config import override  # noqa: E402

Damage = Callable[[Path], object]
SMALL = {
    "model.embed_dim": 8, "model.num_heads": 2, "model.layers": 2, "model.ffn_dim": 16, "model.rank": 3,
    "model.landmarks": 4, "trainer.epochs": 1, "trainer.batch_size": 8, "trainer.accelerator": "cpu",
    "trainer.progress": False,
}  # fmt: skip
LANGUAGE = {"data.vocabulary": 280, "data.context": 16, "trainer.steps_per_epoch": 1, "trainer.precision": "32-true"}
HUGE = 10**400
MARK = "executed"


class Payload:
    """Creates a file in the working directory when it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return open, (MARK, "w")


# Damages that any file can suffer


def truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2 - 3])


def replace_by_folder(file: Path) -> None:
    file.unlink()
    file.mkdir()


def replace_by_pipe(file: Path) -> None:
    """A file that nothing is ever read from."""
    file.unlink()
    os.mkfifo(file)


NOT_TEXT: dict[str, Damage] = {
    "random-bytes": lambda file: file.write_bytes(bytes(range(256)) * 8),
    "foreign-image": lambda file: file.write_bytes(b"\x89PNG\r\n\x1a\n" + bytes(64)),
    "latin-1": lambda file: file.write_bytes("Schrödinger, naïve\n".encode("latin-1") * 30),
    "utf-16": lambda file: file.write_bytes(file.read_bytes().decode().encode("utf-16")),
    "cut-character": lambda file: file.write_bytes(file.read_bytes() + "é".encode()[:1]),
    "compressed": lambda file: file.write_bytes(b"\x1f\x8b\x08" + bytes(40)),
    "pickle": lambda file: file.write_bytes(pickle.dumps(Payload())),
    "saved-tensor": lambda file: torch.save(torch.zeros(2), file),
    "folder": replace_by_folder,
    "pipe": replace_by_pipe,
    "larger-than-memory": lambda file: os.truncate(file, 2**40),
}
GENERIC: dict[str, Damage] = {
    **{name: damage for name, damage in NOT_TEXT.items() if name not in ("utf-16", "cut-character")},
    "empty": lambda file: file.write_bytes(b""),
    "zero-bytes": lambda file: file.write_bytes(bytes(4096)),
    "other-text": lambda file: file.write_text("It was a dark,\tand: stormy {night\n\n"),
    "deep-nesting": lambda file: file.write_bytes(b"[" * 20_000),
    "truncated": truncate,
}


# Damages inside of JSON and YAML


def edit(change: Callable[[Any], Any], file: Path) -> None:
    """Apply a change to the content; what it returns, if anything, takes the content's place."""
    language: Any = yaml if file.suffix == ".yaml" else json
    dump = partial(yaml.safe_dump, sort_keys=False) if file.suffix == ".yaml" else json.dumps
    content = (yaml.safe_load if language is yaml else json.loads)(file.read_text())
    changed = change(content)
    file.write_text(dump(content if changed is None else changed))


def put(path: str, value: Any) -> Damage:
    """Set, or with `...` remove, the field of a dotted path; numbers are places in lists."""

    def change(content: Any) -> None:
        *way, last = [int(key) if key.isdecimal() else key for key in path.split(".")]
        for key in way:
            content = content[key]
        if value is ...:
            del content[last]
        else:
            content[last] = copy.deepcopy(value)

    return partial(edit, change)


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = {"a": value}
    return value


def fields(text: str, number: str, table: str, *needed: str) -> dict[str, Damage]:
    """Damages of a field with a text, one with a number, one with a table or list, and fields that must be there."""
    return {
        **GENERIC,
        "a-list": partial(edit, lambda _: [1, 2]),
        "a-number": partial(edit, lambda _: 7),
        "a-text": partial(edit, lambda _: "text"),
        "number-for-text": put(text, 7),
        "half-a-character": lambda file: (
            put(text, "MARK")(file)
            or file.write_text(file.read_text().replace("MARK", '"\\ud800"' if file.suffix == ".yaml" else "\\ud800"))
        ),
        "text-for-number": put(number, "many"),
        "huge-number": put(number, HUGE),
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


YAML: dict[str, Damage] = {
    "truncated": lambda file: file.write_text(file.read_text().partition("config:")[0]),
    "python-object": lambda file: file.write_text(f"!!python/object/apply:builtins.open [{MARK}, w]\n"),
    "python-field": lambda file: file.write_text(f"{file.read_text()}\nx: !!python/object/apply:os.mkdir [{MARK}]\n"),
    "aliases": lambda file: file.write_text(
        file.read_text() + "a0: &a0 [1, 1]\n" + "".join(f"a{i}: &a{i} [*a{i - 1}, *a{i - 1}]\n" for i in range(1, 60))
    ),
    "impossible-date": lambda file: file.write_text(file.read_text() + "when: 2026-99-99\n"),
    "a-date": lambda file: file.write_text(file.read_text() + "config: {when: 2026-01-01}\n"),
    "number-as-key": lambda file: file.write_text("1: 2\n" + file.read_text()),
}


# Damages inside of tables, weights and checkpoints


def lines(change: Callable[[list[str]], list[str]]) -> Damage:
    return lambda file: file.write_text("\n".join(change(file.read_text().splitlines())) + "\n")


def table(column: str) -> dict[str, Damage]:
    return {
        **{name: damage for name, damage in GENERIC.items() if name != "truncated"},
        "cut-row": lines(lambda rows: [*rows[:-1], rows[-1].partition(",")[0]]),
        "one-cell-more": lines(lambda rows: [*rows[:-1], rows[-1] + ",1"]),
        "a-word": lines(lambda rows: [*rows[:-1], rows[-1].rpartition(",")[0] + ",many"]),
        "digits-without-end": lines(lambda rows: [*rows[:-1], rows[-1].rpartition(",")[0] + "," + "9" * 10_000]),
        "huge-number": lines(lambda rows: [*rows[:-1], rows[-1].rpartition(",")[0] + ",1e999"]),
        "huge-cell": lines(lambda rows: [*rows[:-1], rows[-1].rpartition(",")[0] + "," + "a" * 200_000]),
        "column-twice": lines(lambda rows: [f"{rows[0]},{column}", *(f"{row},1" for row in rows[1:])]),
        "no-header": lines(lambda rows: rows[1:]),
        f"without-{column}": lines(lambda rows: [rows[0].replace(column, "other"), *rows[1:]]),
    }


def weights(change: Callable[[dict[str, torch.Tensor]], object]) -> Damage:
    def damage(file: Path) -> None:
        tensors = safetensors.load_file(file)
        change(tensors)
        safetensors.save_file({name: tensor.clone() for name, tensor in tensors.items()}, file, {"format": "pt"})

    return damage


def header(text: bytes, length: int | None = None) -> Damage:
    size = (len(text) if length is None else length).to_bytes(8, "little")
    return lambda file: file.write_bytes(size + text)


def first(tensors: dict[str, torch.Tensor]) -> str:
    return next(name for name, tensor in tensors.items() if tensor.ndim == 2)


BINARY = {name: damage for name, damage in GENERIC.items() if name not in ("pipe", "larger-than-memory")}
WEIGHTS: dict[str, Damage] = {
    **BINARY,
    "huge-header": header(b"{}", 2**62),
    "header-without-end": header(b'{"a": ' * 50_000),
    "no-tensors": header(b"{}"),
    "beyond-the-end": header(b'{"a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}}'),
    "unknown-type": header(b'{"a": {"dtype": "X9", "shape": [], "data_offsets": [0, 0]}}'),
    "without-a-tensor": weights(lambda tensors: tensors.pop(first(tensors))),
    "other-shape": weights(lambda tensors: tensors.update({first(tensors): tensors[first(tensors)][:1]})),
}


def checkpoint(change: Callable[[Any], Any]) -> Damage:
    def damage(file: Path) -> None:
        content = torch.load(file, weights_only=True)
        changed = change(content)
        torch.save(content if changed is None else changed, file)

    return damage


def flip_byte(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


CHECKPOINT: dict[str, Damage] = {
    **{name: damage for name, damage in GENERIC.items() if name not in ("pipe", "larger-than-memory", "folder")},
    "pickled-object": lambda file: torch.save({"state_dict": Payload(), "run": {}}, file),
    "a-list": lambda file: torch.save([1, 2], file),
    "no-content": lambda file: torch.save({}, file),
    "flipped-byte": flip_byte,
    "without-weights": checkpoint(lambda content: content.pop("state_dict") and None),
    "without-optimizer": checkpoint(lambda content: content.pop("optimizer_states") and None),
    "without-progress": checkpoint(lambda content: content.update(run={})),
    "text-for-step": checkpoint(lambda content: content.update(global_step="many")),
    "other-model": checkpoint(lambda content: content.update(state_dict={"weight": torch.zeros(2)})),
}


# Folders with valid files


def make_page(home: Path) -> None:
    """A run folder with and without a spectrum, a benchmark, a demo, and results of a table."""
    run = page_cases.put_run(home / "run", "primal", 0, 0.9)
    shutil.copytree(run, home / "other")
    (home / "other" / "spectrum.csv").write_text("layer,head,index,value\na,0,1,2.0\na,0,2,1.0\n")
    (home / "bench.json").write_text(json.dumps({**page_cases.bench(), "command": "primal bench"}))
    (home / "demo.json").write_text(json.dumps(page_cases.demo()))
    place = home / "results" / "uea" / "JapaneseVowels"
    place.mkdir(parents=True)
    recipe = override(registry.get(page_cases.RECIPE), {"model.attention": ("primal",)}).resolved()
    config = page_cases.to_plain(recipe)
    result = {**page_cases.summary("primal", 0, 0.9), "config": config}
    (place / "primal-seed0.json").write_text(json.dumps(result))
    cost = home / "results" / "lra-efficiency" / "text"
    cost.mkdir(parents=True)
    sizes = {"length": 4000, "eager": 1.0, "graph": None, "peak_bytes": None}
    about = {"kind": "lra-cost", "task": "text", "attention": "primal", "device": "cpu", "torch": "2", "commit": "a"}
    (cost / "primal.json").write_text(json.dumps({**sizes, **about}))


def make_run(home: Path) -> None:
    """A finished run of a small set, and the same run before its summary was written."""
    draw = np.random.default_rng(0)
    halves = [Split([draw.standard_normal((9, 2)) for _ in range(8)], np.arange(8) % 2) for _ in range(2)]
    uea.save_npz(SeriesData("Toy", *halves, ("a", "b")), home)
    loop.train(override(registry.get("uea/Toy"), {**SMALL, "data.folder": home}), home / "run", name="uea/Toy")
    shutil.copytree(home / "run", home / "stopped")
    (home / "stopped" / "summary.json").unlink()


def make_language(home: Path) -> None:
    for split, count in (("train", 12), ("valid", 3), ("test", 3)):
        articles = [f" = {split} {i} = \n\nThe cat {i} sat on the mat of {split} for days.\n" for i in range(count)]
        (home / f"wiki.{split}.txt").write_text("".join(articles))
    recipe = override(registry.get("lm/wikipedia"), {**SMALL, **LANGUAGE, "data.folder": home})
    loop.train(recipe, home / "run", name="lm/wikipedia")
    (home / "prompt.txt").write_text("The café cat")


def make_model(home: Path) -> None:
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    hf.BertModel(hf.BertConfig(vocab_size=50, **sizes)).save_pretrained(home / "model")
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"w{i}" for i in range(45))]
    hf.BertTokenizer(vocab={w: i for i, w in enumerate(words)}).save_pretrained(home / "model")
    (home / "text.txt").write_text("\n".join(" ".join(f"w{(i * j) % 45}" for j in range(30)) for i in range(5)))


TEMPLATES = {"page": make_page, "run": make_run, "language": make_language, "model": make_model}


@dataclass(frozen=True)
class Kind:
    """A kind of file: the folder it is in, its path there (a pattern), the command that reads it, and its damages."""

    template: str
    file: str
    command: str
    damages: Mapping[str, Damage]


REPORT = "report {} -o page.html"
TABLE = "table uea --no-run --sets JapaneseVowels --models primal --results results"
SPECTRUM = "spectrum model --data text.txt --out out --device cpu"
GENERATE = "generate run --prompt-file prompt.txt --tokens 2 --device cpu"
RESUME = "train uea/Toy --out stopped --resume --data.folder . " + " ".join(
    f"--{name.replace('_', '-')} {value}" for name, value in SMALL.items() if not isinstance(value, bool)
)


def finite(damages: Mapping[str, Damage]) -> dict[str, Damage]:
    """Without files that have no end."""
    return {way: damage for way, damage in damages.items() if way not in ("pipe", "larger-than-memory")}


SUMMARY = fields("label", "seconds_per_epoch", "scores", "format")
CONFIG = {**fields("benchmark", "config.seed", "config", "format"), **YAML}
RESULT = fields("label", "seconds_per_epoch", "scores", "seed", "format")
BENCH = {
    **fields("rows.0.label", "rows.0.seconds", "rows", "hardware", "settings", "rows.1.batch", "format"),
    "zero-length": put("rows.0.length", 0),
    "unknown-status": put("rows.0.status", "fine"),
    "no-time": put("rows.0.seconds", None),
}
TEXTS = {name: damage for name, damage in NOT_TEXT.items() if name not in ("pipe", "larger-than-memory")} | {
    "empty": GENERIC["empty"],
    "blank": lambda file: file.write_text(" \n\n"),
    "a-word": lambda file: file.write_text("w1"),
}
TOKENIZER = {name: GENERIC[name] for name in ("random-bytes", "pickle", "empty", "zero-bytes", "other-text", "folder")}
TOKENIZER |= {"truncated": truncate, "deep-nesting": GENERIC["deep-nesting"], "latin-1": GENERIC["latin-1"]}
TOKENIZER |= {"a-list": partial(edit, lambda _: [1]), "no-model": put("model", ...), "unknown-model": put("model", 3)}
MODEL = {
    **fields("architectures.0", "num_hidden_layers", "architectures"),
    "function-for-model": put("architectures", ["pipeline"]),
    "other-model": put("architectures", ["GPT2Model"]),
    "no-layers": put("num_hidden_layers", 0),
    "other-width": put("hidden_size", 64),
    "width-of-another-type": put("hidden_size", "wide"),
}
PROMPT = {way: NOT_TEXT[way] for way in NOT_TEXT if way != "pipe"} | {"empty": GENERIC["empty"]}  # a pipe is welcome
VOCABULARY = GENERIC | {way: TOKENIZER[way] for way in ("a-list", "no-model", "unknown-model")}
COST = fields("attention", "eager", "device", "task", "torch")
del COST["text-for-table"]  # the device is a text
DEMO = fields("seconds.primal", "seconds.primal.128", "seconds", "singular_values")
del DEMO["without-seconds"]  # it is optional
KINDS = {
    "summary-report": Kind("page", "run/summary.json", REPORT.format("run"), SUMMARY),
    "config-report": Kind("page", "run/config.yaml", REPORT.format("run"), CONFIG),
    "metrics-report": Kind("page", "run/metrics.csv", REPORT.format("run"), table("epoch")),
    "spectrum-csv-report": Kind("page", "other/spectrum.csv", REPORT.format("other"), table("index")),
    "bench-report": Kind("page", "bench.json", REPORT.format("bench.json"), BENCH),
    "bench-plot": Kind("page", "bench.json", "bench plot bench.json", GENERIC),
    "demo-report": Kind("page", "demo.json", REPORT.format("demo.json"), DEMO),
    "result-report": Kind("page", "results/uea/JapaneseVowels/primal-seed0.json", REPORT.format("results"), GENERIC),
    "result-table": Kind("page", "results/uea/JapaneseVowels/primal-seed0.json", TABLE, RESULT),
    "cost-table": Kind(
        "page", "results/lra-efficiency/text/primal.json", "table lra-efficiency --no-run --results results",
        COST,
    ),
    "model-config": Kind("model", "model/config.json", SPECTRUM, MODEL),
    "model-weights": Kind("model", "model/model.safetensors", SPECTRUM, WEIGHTS),
    "model-tokenizer": Kind("model", "model/tokenizer.json", SPECTRUM, TOKENIZER),
    "model-text": Kind("model", "text.txt", SPECTRUM, TEXTS),
    "prompt": Kind("language", "prompt.txt", GENERATE, PROMPT),
    "vocabulary": Kind("language", "run/vocabulary.json", GENERATE, finite(VOCABULARY)),
    "language-weights": Kind("language", "run/model.safetensors", GENERATE, BINARY),
    "summary-generate": Kind("language", "run/summary.json", GENERATE, GENERIC),
    "summary-evaluate": Kind("run", "run/summary.json", "evaluate run", GENERIC),
    "config-evaluate": Kind("run", "run/config.yaml", "evaluate run", GENERIC | YAML),
    "weights-evaluate": Kind("run", "run/model.safetensors", "evaluate run", WEIGHTS),
    "config-resume": Kind("run", "stopped/config.yaml", RESUME, CONFIG),
    "checkpoint-resume": Kind("run", "stopped/checkpoints/*.ckpt", RESUME, CHECKPOINT),
}  # fmt: skip
CASES = [pytest.param(name, way, id=f"{name}-{way}") for name, kind in KINDS.items() for way in kind.damages]


@pytest.fixture(scope="module")
def templates(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Folders with valid files, made once."""
    made: dict[str, Path] = {}

    def get(name: str) -> Path:
        if name not in made:
            made[name] = tmp_path_factory.mktemp(name)
            TEMPLATES[name](made[name])
        return made[name]

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


def check(words: list[str], home: Path, capfd: pytest.CaptureFixture[str]) -> str:
    """Run a command that must fail; its message."""
    before = tree(home)
    code, err = run(words, capfd)
    assert not (home / MARK).exists(), "something was executed"
    assert (code, err.count("\n")) == (2, 1), err
    assert err.startswith("primal: ")
    assert len(err) < 700
    assert tree(home) == before
    return err


@pytest.mark.parametrize("name", [name for name in KINDS if "resume" not in name])
def test_valid_files_are_read(name: str, templates: Any, home: Path, capfd: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(templates(KINDS[name].template), home, dirs_exist_ok=True)
    code, err = run(KINDS[name].command.split(), capfd)
    assert code == 0, err


@pytest.mark.parametrize(("name", "way"), CASES)
def test_a_damaged_file_is_one_line(
    name: str, way: str, templates: Any, home: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    kind = KINDS[name]
    shutil.copytree(templates(kind.template), home, dirs_exist_ok=True)
    files = sorted(home.glob(kind.file))
    assert files
    for file in files:
        kind.damages[way](file)
    err = check(kind.command.split(), home, capfd)
    assert kind.file.partition("/")[0] in err, "the message names the file or its folder"


def test_a_prompt_of_other_bytes_is_one_line(templates: Any, home: Path, capfd: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(templates("language"), home, dirs_exist_ok=True)
    prompt = os.fsdecode(b"caf\xe9")  # as Python holds the argument
    assert "--prompt is not UTF-8" in check(["generate", "run", "--prompt", prompt], home, capfd)


@pytest.mark.parametrize("name", ["summary-report", "config-report", "metrics-report"])
def test_broken_runs_are_skipped_on_request(
    name: str, templates: Any, home: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    kind = KINDS[name]
    for way, damage in kind.damages.items():
        shutil.copytree(templates("page") / "run", home / way)
        damage(home / way / Path(kind.file).name)
    shutil.copytree(templates("page") / "other", home / "valid")
    code, err = run(["report", ".", "-o", "page.html", "--skip-broken"], capfd)
    assert code == 0, err
    assert err.count("left out") == len(kind.damages)
    assert (home / "page.html").exists()
