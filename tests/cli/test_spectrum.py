"""primal spectrum: run folders and saved models, pictures and numbers, and one line for what does not fit."""

from __future__ import annotations

import csv
import shutil
from pathlib import Path

import pytest
import torch
import toy

pytest.importorskip("tyro")
pytest.importorskip("lightning")
pytest.importorskip("matplotlib")
hf = pytest.importorskip("transformers", minversion="5")

from convert.hf_models import SMALL, make  # noqa: E402
from hostile_data import MARK, Payload, put  # noqa: E402
from primal_attention import primalize  # noqa: E402
from primal_attention.report.results import read_spectrum  # noqa: E402

TRAIN = """
--model.embed-dim 8 --model.num-heads 2 --model.layers 2 --model.ffn-dim 16 --model.rank 3 --model.landmarks 4
--trainer.epochs 1 --trainer.batch-size 8 --trainer.accelerator cpu --trainer.no-progress
""".split()  # noqa: SIM905 (reads as it is typed)


@pytest.fixture(scope="module")
def saved_bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved") / "bert"
    model = make("bert")
    primalize(model, **SMALL)
    model.save_pretrained(folder)
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"w{i}" for i in range(45))]
    (folder / "vocab.txt").write_text("\n".join(words))
    hf.BertTokenizer(vocab={w: i for i, w in enumerate(words)}).save_pretrained(folder)
    return folder


@pytest.fixture
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, saved_bert: Path) -> Path:
    """A working directory with a saved model and a text."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(saved_bert, tmp_path / "bert")
    (tmp_path / "text.txt").write_text("\n".join(" ".join(f"w{i * j % 45}" for j in range(30)) for i in range(5)))
    return tmp_path


def test_runs_give_a_table_numbers_and_plots(workplace: Path, primal) -> None:
    toy.folder(workplace / "data" / "uea")
    assert primal("train", "uea/Toy", *TRAIN, "--model.attention", "primal+", "--out", "one")[0] == 0
    assert primal("data", "listops", "--train", "8", "--valid", "2", "--test", "4")[0] == 0
    steps = ["--trainer.steps-per-epoch", "1", "--trainer.precision", "32-true"]
    assert primal("train", "lra/listops", *TRAIN, *steps, "--out", "two")[0] == 0
    assert primal("spectrum", "two", "--samples", "2")[0] == 0
    code, out, _ = primal("spectrum", "one", "--cases", "5")
    assert code == 0
    assert "softmax" in out
    folder = workplace / "results" / "spectrum"
    for name in ("spectrum.csv", "spectrum.png", "spectrum.svg"):
        assert (folder / name).stat().st_size > 0
    with (folder / "spectrum.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 2 * 12  # layers × the longest series
    assert float(rows[11]["explained_mean"]) == pytest.approx(1)
    assert {row["kind"] for row in rows} == {"softmax", "primal"}
    drawn = read_spectrum(folder / "spectrum.csv")  # as the page of runs reads it
    assert [len(values) for values in drawn.values()] == [12, 12]
    config = workplace / "two" / "config.yaml"
    head = config.read_text().replace("benchmark: lra", "benchmark: lm").partition("config:")[0]
    config.write_text(head + "config: {}")
    code, _, err = primal("spectrum", "two")
    assert code == 2
    assert "two is a run of lm: primal spectrum looks at classifiers (uea, lra, image)" in err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nowhere"], "neither a run folder"),
        (["bert"], "--data FILE of text lines"),
        (["bert", "--data", "missing.txt"], "missing.txt does not exist"),
        (["bert", "--data", "short.txt"], "no line of 20 words"),
        (["vit", "--data", "text.txt"], "call primal_attention.spectrum(model, inputs)"),
        ([], "MODEL_OR_RUN"),
    ],
)
def test_bad_input_is_one_line(workplace: Path, primal, words, message) -> None:
    (workplace / "vit").mkdir()
    (workplace / "vit" / "config.json").write_text('{"architectures": ["ViTModel"], "image_size": 224}')
    (workplace / "short.txt").write_text("w1 w2")
    code, _, err = primal("spectrum", *words)
    assert code == 2
    assert message in err
    assert sum(line.startswith("primal: ") for line in err.splitlines()) == 1


def test_saved_models_are_loaded_without_the_folders_code(workplace: Path, primal) -> None:
    shutil.copytree("bert", "other")
    (workplace / "bert" / "own.py").write_text(f"open({MARK!r}, 'w')")
    own = {"AutoConfig": "own.Own", "AutoModel": "own.Own", "AutoTokenizer": ["own.Own", "own.Own"]}
    for name in ("config.json", "tokenizer_config.json"):
        put("auto_map", own)(workplace / "bert" / name)
    put("tokenizer_class", "Own")(workplace / "bert" / "tokenizer_config.json")
    torch.save({"x": Payload()}, workplace / "bert" / "pytorch_model.bin")  # beside the safetensors file: not read
    words = ["--data", "text.txt", "--name", "both", "--out", "o"]
    code, out, _ = primal("spectrum", "bert", "other", *words)
    assert (code, out.count("primal ")) == (0, 2)
    assert (workplace / "o" / "both.svg").stat().st_size > 0
    assert not (workplace / MARK).exists()
