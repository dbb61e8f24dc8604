"""Training steps of whole models: every row runs, errors stay in their row, the file is written as the run goes on."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch

from primal_attention.bench import encoders, model, tables
from primal_attention.bench.encoders import SPECS, Spec
from primal_attention.cli.bench import main

ROW = {
    "name", "mode", "dtype", "kind", "wall_ms", "busy_ms", "first_s", "peak_mib", "ratio", "peak_ratio", "error",
    "prepare_s",
}  # fmt: skip
CPU = torch.device("cpu")


@pytest.fixture
def narrow(monkeypatch) -> None:
    """Models of two heads of width 8."""
    specs = [dataclasses.replace(s, embed_dim=16, num_heads=2, primal={**s.primal, "landmarks": 5}) for s in SPECS]
    monkeypatch.setattr(model, "SPECS", specs)


@pytest.fixture
def settings(tmp_path) -> model.ModelSettings:
    # Dynamo alone: its graphs are what is counted, and no kernels are built
    return model.ModelSettings(
        tokens=32, layers=1, repeats=2, steps=1, device="cpu", out=tmp_path, compiler="eager", command="…"
    )


def test_every_eager_row_has_times_and_a_ratio(narrow, settings, capsys):
    rows = tuple(spec.name for spec in SPECS if spec.mode == "eager")
    report = model.run(dataclasses.replace(settings, rows=rows))
    assert [(row["name"], row["kind"]) for row in report["rows"]] == [(n, k) for n in rows for k in ("sdpa", "primal")]
    for sdpa, primal in zip(report["rows"][::2], report["rows"][1::2], strict=True):
        assert set(sdpa) == set(primal) == ROW
        assert sdpa["error"] is primal["error"] is None
        assert primal["ratio"] == primal["wall_ms"] / sdpa["wall_ms"]
        assert primal["first_s"] > 0
        assert primal["busy_ms"] is primal["peak_mib"] is None  # measured on a GPU only
    assert json.loads(settings.file.read_text(encoding="utf-8")) == json.loads(json.dumps(report))
    assert capsys.readouterr().err.count("\n") == len(report["rows"])
    assert "padded-eager-autocast, primal" in tables.model(report)


def test_compiled_rows_and_recompilations(narrow, settings):
    report = model.run(dataclasses.replace(settings, rows=("512x1024-compile-bf16", "dynamic")))
    assert [row["error"] for row in report["rows"]] == [None] * 3
    assert report["rows"][1]["ratio"] > 0
    dynamic = report["rows"][2]
    assert dynamic["graphs"] == 1 + dynamic["recompilations"]
    assert f"{dynamic['recompilations']} recompilations" in tables.model(report)


def test_a_failed_row_keeps_its_error_and_the_run_goes_on(narrow, settings, monkeypatch):
    specs = [s if s.model != "vit" else dataclasses.replace(s, num_heads=3) for s in model.SPECS]
    monkeypatch.setattr(model, "SPECS", specs)
    rows = model.run(dataclasses.replace(settings, rows=("vit-eager-autocast", "padded")))["rows"]
    assert rows[1]["wall_ms"] is None
    assert "divisible by num_heads" in rows[1]["error"]
    assert "\n" not in rows[1]["error"]
    assert [row["error"] for row in rows[2:]] == [None, None]


def test_packed_and_padded_rows_train_on_the_same_sequences():
    spec = Spec("packed", 8, 2, 16, tokens=64, layout="packed")
    packed, keywords, _ = encoders.make_input(spec, "primal", CPU, 0)
    padded, masked, weight = encoders.make_input(spec, "sdpa", CPU, 0)
    assert keywords["cu_seqlens"].diff().tolist() == masked["attn_mask"].sum(-1).flatten().tolist()
    assert len(packed) == masked["attn_mask"].sum() < padded.shape[0] * padded.shape[1]
    assert weight.sum() == pytest.approx(1.0)


def test_the_rank_96_models_have_one_primal_layer(monkeypatch):
    built = []
    monkeypatch.setattr(encoders, "Block", lambda spec, kind: built.append(kind) or torch.nn.Linear(2, 2))
    spec = next(spec for spec in SPECS if spec.model == "deit")
    encoders.make_step(spec, "primal", CPU, 0, "eager")
    assert built == ["sdpa"] * 11 + ["primal"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--rows vitt", "--rows vitt: no row or model has this name; known are 512x1024, 512x1024-compile-autocast"),
        ("--layers 0", "--layers must be above 0 (got 0)"),
        ("--steps -1", "--steps must be above 0 (got -1)"),
        ("--tokens 4Q", "4096, 4K or 1M (got '4Q')"),
        ("--device tpu", "--device must be cpu, cuda or cuda:N"),
        ("--out /proc/nowhere", "--out /proc/nowhere cannot be written to"),
    ],
)
def test_bad_input_is_one_line_and_code_two(words, said, capsys):
    assert main(["model", *words.split()]) == 2
    captured = capsys.readouterr()
    assert said in captured.err
    assert captured.err.count("\n") == 1


def test_preparation_compiles_in_another_process(settings, capsys):
    specs = [Spec("tiny", 16, 2, 8, "eager"), Spec("tiny", 16, 2, 8, tokens=16, layers=1, layout="dynamic")]
    assert model.prepare(specs, settings)["tiny-compile-autocast", "primal"] > 0
    assert "tiny-compile-autocast, primal: compiled" in capsys.readouterr().err
