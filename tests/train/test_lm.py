"""Language recipes: every token evaluated once, equal parameters, runs that repeat and can be loaded again."""

import json
import math
import re
import runpy
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import toy
from faults import assert_same, cut_off

from primal_attention.cli import main as cli
from primal_attention.cli.train import parse_run
from primal_attention.data.lm import TextSplit, Vocabulary
from primal_attention.models.lm import LanguageModel
from primal_attention.report.tables import language_variants
from primal_attention.train import lm as language
from primal_attention.train import loop, registry
from primal_attention.train.config import override
from primal_attention.train.grid import Variant
from primal_attention.train.lm import LanguageRecipe, Windows, load_language
from primal_attention.utils.errors import DataError, RunError

SMALL: dict[str, Any] = {"data.vocabulary": 280, "data.context": 16, "trainer.epochs": 1}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return toy.write_articles(tmp_path_factory.mktemp("wikipedia"))


def small(folder: Path, **changes: Any) -> LanguageRecipe:
    return toy.small("lm/wikipedia", folder, **SMALL, **changes)


def split(count: int) -> TextSplit:
    return TextSplit(np.arange(count, dtype=np.uint16), 5 * count, 1)


@pytest.mark.parametrize("count", [2, 9, 17, 18, 50])
def test_every_token_is_predicted_exactly_once(count: int) -> None:
    batches = Windows(split(count), 8, 3)
    windows = torch.cat([batch for (batch,) in batches])
    assert all(len(batch) == 3 for (batch,) in batches)
    targets = windows[:, 1:]
    assert targets[targets >= 0].tolist() == list(range(1, count))
    assert batches.tokens == count - 1
    real = targets >= 0
    assert (windows[:, :-1][real] == targets[real] - 1).all()


def test_training_windows_are_cut_anew_and_repeat_by_seed() -> None:
    stream = split(60_000)  # above the largest signed number of 16 bits

    def starts(epoch: int, seed: int = 0) -> torch.Tensor:
        batches = Windows(stream, 100, 7, seed)
        batches.epoch = epoch
        return torch.cat([batch[:, 0] for (batch,) in batches])

    first = starts(0)
    assert first.unique().numel() == first.numel()
    assert first.min() >= 0
    assert (first % 100).unique().numel() == 1
    torch.testing.assert_close(first, starts(0))
    assert not torch.equal(first.sort().values, starts(1).sort().values)
    with pytest.raises(DataError, match="train has 12 tokens: windows of 8 need 17"):
        Windows(split(12), 8, 1, 0)


DELTA = {"primal_mode": "delta", "primal_heads": 4, "rank": 64, "conv": 4, "gate": True}


@pytest.mark.parametrize(
    ("attention", "options", "positions"),
    [
        (("softmax",), {}, "rotary"),
        (("primal+",), {}, "rotary"),
        (("primal",), {"primal_mode": "decay"}, "rotary"),
        (("primal",), {"primal_mode": "mean", "conv": 4}, "rotary"),
        (("primal", "primal", "softmax") * 2, DELTA, "rotary"),
        (("primal",), {}, "rotary"),  # the recipe's default: the delta rule
        (("primal",), {"primal_mode": "mean"}, "sinusoidal"),
        (("primal",), {"primal_mode": "landmarks"}, "sinusoidal"),
        (("linear",), {}, "sinusoidal"),
        (("flow",), {}, "sinusoidal"),
        (("softmax",), {"conv": 4, "gate": True, "conv_layers": "all"}, "rotary"),
        (("none",), {"conv": 4, "gate": True}, "rotary"),
        (("primal",), {**DELTA, "gate_activation": "sigmoid"}, "rotary"),
    ],
    ids=str,
)
def test_parameters_are_equal_and_positions_are_added_where_nothing_else_encodes_the_order(
    attention: tuple[str, ...], options: dict[str, Any], positions: str
) -> None:
    changes = {"model.attention": attention, **{f"model.{name}": value for name, value in options.items()}}
    recipe = override(registry.get("lm/wikipedia"), changes).resolved()
    assert recipe.model.positions == positions
    softmax = override(registry.get("lm/wikipedia"), {"model.attention": ("softmax",)}).resolved()
    counts = [language.parameters(language.network(r, 8192)) for r in (recipe, softmax)]
    assert abs(counts[0] / counts[1] - 1) < 0.002


@pytest.mark.parametrize("words", [["--model.primal-mode", "mean"], ["--model.attention", "linear"]])
def test_rotary_positions_are_refused_where_the_order_would_be_lost(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["train", "lm/wikipedia", *words, "--model.positions", "rotary", "--out", str(tmp_path / "run")]
    assert cli.main(command) == 2
    assert "model.positions rotary needs a softmax layer" in capsys.readouterr().err


def test_the_default_of_wikipedia_is_the_best_mode_and_a_mode_alone_has_plain_settings() -> None:
    best = override(registry.get("lm/wikipedia"), {f"model.{name}": value for name, value in DELTA.items()}).resolved()
    assert registry.get("lm/wikipedia").resolved() == best
    assert registry.get("lm/wikipedia").label() == best.label() == "primal-delta-conv4-gate"
    decay = override(registry.get("lm/wikipedia"), {"model.primal_mode": "decay"}).resolved().model
    assert (decay.primal_heads, decay.rank, decay.conv, decay.gate) == (None, 30, 0, False)
    softmax = override(registry.get("lm/wikipedia"), {"model.attention": ("softmax",)}).resolved().model
    assert (softmax.primal_mode, softmax.rank, softmax.conv, softmax.gate) == ("mean", 30, 0, False)  # as stored
    assert registry.get("lm/wikipedia").model.initializer_range == 0.02
    assert registry.get("lm/wikitext-103").model.initializer_range is None  # the authors' initialisation


@pytest.mark.parametrize("variant", language_variants(), ids=lambda variant: variant.name)
@torch.no_grad()
def test_a_new_model_of_wikipedia_starts_near_the_uniform_loss(variant: Variant) -> None:
    recipe = override(registry.get("lm/wikipedia"), {**variant.changes(), "model.embed_dim": 256}).resolved()
    torch.manual_seed(0)
    model, tokens = LanguageModel(language.network(recipe, 2000)), torch.randint(2000, (4, 65))
    loss = model(tokens[:, :-1], targets=tokens[:, 1:])
    assert abs(loss.item() - math.log(2000)) < 0.3


def test_a_run_that_is_older_than_initializer_range_keeps_its_embeddings(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--data.folder", str(folder), "--data.vocabulary", "280", "--data.context", "16", *toy.FLAGS]
    words += ["--trainer.steps-per-epoch", "4", "--trainer.precision", "32-true"]
    earlier, *_ = parse_run("lm/wikipedia", registry.get("lm/wikipedia"), [*words, "--model.initializer-range", "None"])
    loop.train(earlier, tmp_path / "whole")
    run = tmp_path / "cut"
    cut_off(override(earlier, {"trainer.checkpoint_steps": 2}), run, 3)
    text = (run / "config.yaml").read_text()
    (run / "config.yaml").write_text(re.sub(" +(initializer_range|positions): .*\n", "", text))
    assert (run / "config.yaml").read_text() != text
    resume = ["train", "lm/wikipedia", "--out", str(run), "--resume"]
    assert cli.main([*resume, "--model.initializer-range", "0.02"]) == 2
    assert "was started with --model.initializer-range None, not 0.02" in capsys.readouterr().err
    assert cli.main(resume) == 0
    assert_same(run, tmp_path / "whole")
    assert load_language(run)[0].config.initializer_range is None


def test_a_run_is_evaluated_by_what_its_model_predicts_and_repeats(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = small(folder, model__primal_mode="delta", model__conv=4, model__gate=True)
    summary = loop.train(recipe, tmp_path / "a", name="lm/wikipedia")
    again = loop.train(recipe, tmp_path / "b", name="lm/wikipedia")
    assert summary["scores"] == again["scores"]
    model, vocabulary = load_language(tmp_path / "a")
    data = language.load(recipe.data)
    assert vocabulary.digest == data.vocabulary.digest == summary["data"]["vocabulary_sha256"]
    tokens, nats = torch.from_numpy(data.test.tokens.astype(np.int64)), 0.0
    with torch.no_grad():
        for start in range(0, len(tokens) - 1, 16):  # window by window, as a reader would
            window = tokens[start : start + 17]
            nats += float(F.cross_entropy(model(window[None, :-1])[0], window[1:], reduction="sum"))
    last = summary["scores"]["last"]
    bits = nats / math.log(2) / len((folder / "wiki.test.txt").read_bytes())
    assert last["bits_per_byte"] == pytest.approx(bits, rel=1e-5)  # float32
    assert last["perplexity"] == pytest.approx(math.exp(nats / (len(tokens) - 1)), rel=1e-5)
    assert {"validation_perplexity", "validation_bits_per_byte"} <= last.keys()
    assert loop.evaluate(tmp_path / "a")[""]["bits_per_byte"] == pytest.approx(last["bits_per_byte"], rel=1e-6)
    assert cli.main(["evaluate", str(tmp_path / "a")]) == 0
    assert f"bits per byte {last['bits_per_byte']:.4f}" in (printed := capsys.readouterr().out)
    assert "as in the run" in printed
    refuse_foreign_vocabularies(tmp_path / "a")


def refuse_foreign_vocabularies(run: Path) -> None:
    file = run / "vocabulary.json"
    others = Vocabulary.train_byte_pairs(["Quite other words, and more of these words than of others."], 280).text
    for content in (others, '{"words": ["<eos>", "a"]}'):
        file.write_text(content)
        with pytest.raises(RunError, match=r"vocabulary.json is not the vocabulary that the run was trained with"):
            load_language(run)
    file.unlink()
    with pytest.raises(DataError, match=r"vocabulary.json does not exist"):
        load_language(run)


def test_the_effect_of_the_objective_is_measured_before_and_after_training(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes = {**toy.SMALL, **SMALL, "model.primal_mode": "mean", "trainer.steps_per_epoch": 1}
    fields = [f"{field}={json.dumps(value)}" for field, value in changes.items()]
    monkeypatch.setattr("sys.argv", ["", "lm/wikipedia", f"--data={folder}", f"--out={tmp_path}", "--set", *fields])
    assert runpy.run_path("benchmarks/objective_effect.py")["main"]() == 0
    for curve in json.loads((tmp_path / "lm-wikipedia.json").read_text())["curves"]:
        assert [row["step"] for row in curve["rows"]] == [0, 1]
        assert all(
            math.isfinite(value) for row in curve["rows"] for x in row["layers"].values() for value in x.values()
        )


def test_a_vocabulary_beside_the_text_is_used(folder: Path, tmp_path: Path) -> None:
    home = tmp_path / "text"
    shutil.copytree(folder, home, ignore=shutil.ignore_patterns(".cache"))
    data = language.load(small(folder).data)
    data.vocabulary.save(home / "vocabulary.json")
    (home / "wiki.train.txt").write_text(" = Other = \n\nQuite other words here.\n")
    assert language.load(small(home).data).vocabulary.digest == data.vocabulary.digest
    with pytest.raises(RunError, match=r"vocabulary.json has 280 tokens, not 300: set --data.vocabulary 280"):
        language.load(small(home, data__vocabulary=300).data)
