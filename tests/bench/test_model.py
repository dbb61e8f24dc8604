"""Whole models: every row runs, errors stay in their row, files are written as rows finish."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch
from torch.nn import functional as F

from primal_attention.bench import model
from primal_attention.bench.attention import Shape
from primal_attention.bench.measurement import format_report, plot_report
from primal_attention.bench.model import SPECS, Spec
from primal_attention.models.lm import LanguageModel
from primal_attention.nn.blocks import BlockState
from primal_attention.report.results import read_benchmark, read_summaries
from primal_attention.utils.errors import RunError
from primal_attention.utils.files import read_json

CPU = torch.device("cpu")


# Training steps


@pytest.fixture
def read(flags, monkeypatch):
    """Flags for models of two heads of width 8; those of vit cannot be built."""
    specs = [dataclasses.replace(s, embed_dim=16, num_heads=2, primal={**s.primal, "landmarks": 5}) for s in SPECS]
    specs = [dataclasses.replace(s, num_heads=3) if s.model == "vit" else s for s in specs]
    monkeypatch.setattr(model, "SPECS", specs)

    def read(words):
        args = flags(f"model --tokens 32 --layers 1 --repeats 2 {words}")
        args.compiler = "eager"  # Dynamo's graphs without kernels
        return args

    return read


def test_rows_have_times_and_ratios(read, capsys):
    names = [str(spec) for spec in SPECS if spec.mode == "eager"] + ["512x1024-compile-bf16"]
    args = read(f"--rows {' '.join(names)}")
    report = model.run_model(args)
    assert {row["model"] for row in report["rows"]} == set(names)
    for sdpa, primal in zip(report["rows"][::2], report["rows"][1::2], strict=True):
        assert (sdpa["name"], primal["name"]) == ("sdpa", "primal")
        if primal["model"] == "vit-eager-autocast":
            assert primal["status"] == "unsupported"
            assert "divisible by num_heads" in primal["note"]
            continue
        assert sdpa["status"] == primal["status"] == "ok", primal["note"]
        assert primal["speedup"] == sdpa["seconds"] / primal["seconds"]
        assert primal["peak_bytes"] is None  # on a GPU only
    saved = json.loads(args.file.read_text(encoding="utf-8"))
    assert saved == json.loads(json.dumps(report))
    assert read_benchmark(args.file)["rows"][0]["seconds"] > 0
    assert capsys.readouterr().err.count("\n") == len(report["rows"])
    assert "padded-eager-autocast" in format_report(report)


def test_the_dynamic_row_counts_recompilations_over_ten_lengths(read):
    report = model.run_model(read("--rows dynamic"))
    assert [(row["status"], row["note"], row["seconds"]) for row in report["rows"]] == [("ok", "", None)] * 2
    assert all(row["recompilations"] >= 0 and row["first_seconds"] > 0 for row in report["rows"])
    assert "recompilations" in format_report(report)


def test_packed_and_padded_rows_train_on_the_same_sequences():
    spec = Spec("packed", 8, 2, 16, tokens=64, layout="packed")
    packed, keywords, _ = model.make_input(spec, "primal", CPU, 0)
    padded, masked, weight = model.make_input(spec, "sdpa", CPU, 0)
    assert keywords["cu_seqlens"].diff().tolist() == masked["attn_mask"].sum(-1).flatten().tolist()
    assert len(packed) == masked["attn_mask"].sum() < padded.shape[0] * padded.shape[1]
    assert weight.sum() == pytest.approx(1.0)


def test_rank_96_models_have_one_primal_layer(read, monkeypatch):
    built = []
    monkeypatch.setattr(model, "Block", lambda spec, kind: built.append(kind) or torch.nn.Linear(2, 2))
    model.make_step("primal", read(""), next(spec for spec in SPECS if spec.model == "deit"))
    assert built == ["sdpa"] * 11 + ["primal"]


# Long-Range Arena


def test_lra_steps_are_stored_as_summaries_and_measured_once(flags, monkeypatch):
    monkeypatch.setitem(model.TASKS, "retrieval", model.Task(32, 20, 2, filled=0.5, pairs=True))
    args = flags("lra --tasks retrieval --models softmax primal+ published --batch-size 2")
    report = model.run_lra(args)
    assert [row["status"] for row in report["rows"]] == ["ok"] * 3, format_report(report)
    assert "eager ms" in format_report(report)
    runs = {run.label: run for run in read_summaries(args.out)}
    assert set(runs) == {"softmax", "primal+", "published"}
    for run in runs.values():
        assert run.score("step", "eager") > 0
        assert run.score("step", "graph") is None  # on a GPU only
        assert run.recipe == "lra-efficiency/retrieval"
    stored = read_json(args.out / "retrieval" / "primal+.json")
    assert stored["command"].startswith("primal bench lra --tasks retrieval")
    assert {"commit", "versions", "hardware", "date", "device", "torch"} <= set(stored)
    facts = {"set": "retrieval", "max_length": 32, "batch_size": 2, "note": "", "compiled": False, "repeats": 20}
    assert stored["data"] == facts
    assert [row["status"] for row in model.run_lra(args)["rows"]] == ["skipped"] * 3
    assert read_json(args.out / "retrieval" / "primal+.json") == stored
    with pytest.raises(RunError, match="no model is called 'lstm'"):
        model.run_lra(flags("lra --models lstm"))


# Generation


def test_only_the_cache_of_softmax_attention_grows_with_the_tokens_read(flags, tmp_path):
    report = model.run_generate(flags("generate --rank 4 --widths 16:2 --lengths 16 40 --batches 2 3 --layers 2"))
    sizes = {}
    for row in report["rows"]:
        assert row["status"] == "ok", row["note"]
        assert row["tokens_per_second"] == row["batch"] / row["seconds"]
        sizes.setdefault((row["name"], row["batch"]), []).append(row["state_bytes"])
    assert list(sizes)[:4] == [(name, 2) for name in ("sdpa", "primal-mean", "primal-decay", "primal-delta")]
    for (name, _), (short, long) in sizes.items():
        assert long - short == (24 * 2 * (2 * 16 * 4) if name == "sdpa" else 0)  # keys and values of two layers
    assert sizes["primal-mean", 2][0] == 2 * (2 * 16 + 2) * 4 + 8  # two sums, a weight per head; a position
    assert "One more token after N tokens, causal, layers: 2" in format_report(report)
    pytest.importorskip("matplotlib")
    assert len(plot_report(report, tmp_path / "generate")) == 2


def test_the_preallocated_cache_gives_the_logits_of_the_model():
    shape = Shape(16, 2, batch=2, length=5)
    language_model = model.build_model(2, {"attention": ("softmax",)}, shape).eval()
    plain = LanguageModel(language_model.config).eval()
    plain.load_state_dict(language_model.state_dict())
    tokens = torch.randint(100, (2, 6))
    _, state = plain(tokens[:, :5], return_state=True)
    room = [c.attention._replace(k=F.pad(c.attention.k, (0, 0, 0, 1)), v=F.pad(c.attention.v, (0, 0, 0, 1)))
            for c in state.blocks]  # fmt: skip
    blocks = tuple(BlockState(cache, None) for cache in room)
    logits, _ = language_model.step(tokens[:, 5], state._replace(blocks=blocks))
    torch.testing.assert_close(logits, plain.step(tokens[:, 5], state)[0])
