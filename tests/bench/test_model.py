"""Training steps of whole models: every row runs, errors stay in their row, the file is written after each row."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch

from primal_attention.bench import model
from primal_attention.bench.measurement import check_report, format_report
from primal_attention.bench.model import SPECS, Spec

CPU = torch.device("cpu")


@pytest.fixture
def read(flags, monkeypatch):
    """Flags for models of two heads of width 8; those of vit cannot be built."""
    specs = [dataclasses.replace(s, embed_dim=16, num_heads=2, primal={**s.primal, "landmarks": 5}) for s in SPECS]
    specs = [dataclasses.replace(s, num_heads=3) if s.model == "vit" else s for s in specs]
    monkeypatch.setattr(model, "SPECS", specs)

    def read(words):
        args = flags(f"model --tokens 32 --layers 1 --repeats 2 {words}")
        args.compiler = "eager"  # Dynamo's graphs are counted without building kernels
        return args

    return read


def test_eager_rows_have_times_and_ratios(read, capsys):
    names = [str(spec) for spec in SPECS if spec.mode == "eager"]
    args = read(f"--rows {' '.join(names)}")
    report = model.run(args)
    rows = [(row["model"], row["name"]) for row in report["rows"]]
    assert rows == [(name, kind) for name in names for kind in ("sdpa", "primal")]
    for sdpa, primal in zip(report["rows"][::2], report["rows"][1::2], strict=True):
        if primal["model"] == "vit-eager-autocast":
            assert primal["status"] == "unsupported"
            assert "divisible by num_heads" in primal["note"]
            continue
        assert sdpa["status"] == primal["status"] == "ok", primal["note"]
        assert primal["speedup"] == sdpa["seconds"] / primal["seconds"]
        assert primal["first_seconds"] > 0
        assert primal["peak_bytes"] is None  # on a GPU only
    saved = json.loads(args.file.read_text(encoding="utf-8"))
    assert saved == json.loads(json.dumps(report))
    assert check_report(saved, args.file)["rows"][0]["seconds"] > 0
    assert capsys.readouterr().err.count("\n") == len(report["rows"])
    assert "padded-eager-autocast" in format_report(report)


def test_compiled_rows_and_recompilations(read):
    report = model.run(read("--rows 512x1024-compile-bf16 dynamic"))
    assert [row["note"] for row in report["rows"]] == [""] * 4
    assert report["rows"][1]["speedup"] > 0
    for dynamic in report["rows"][2:]:
        assert dynamic["graphs"] == 1 + dynamic["recompilations"]
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
