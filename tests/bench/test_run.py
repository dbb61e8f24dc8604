"""A run: rows for whoever can be timed, reasons for everybody else, a JSON file, a picture."""

from __future__ import annotations

import dataclasses
import json
import math

import pytest
import torch
from torch import nn

from primal_attention.bench import plot, run, tables
from primal_attention.bench.contenders import CannotRunError, Contender, build_primal, contenders, primal, sdpa
from primal_attention.bench.settings import BenchError, Settings

ROW = {
    "name", "label", "kind", "embed_dim", "num_heads", "batch", "length", "status", "note", "seconds", "iqr", "runs",
    "method", "peak_bytes", "resident_bytes", "kept_bytes", "speedup", "peak_ratio", "kept_ratio",
}  # fmt: skip


class Wrong(nn.Module):
    def __new__(cls, case):
        layer = build_primal(case, "reference")
        forward = layer.forward
        layer.forward = lambda x: 2 * forward(x)
        return layer


def raising(error: Exception):
    def build(case):
        raise error

    return build


class Hungry(nn.Linear):
    """Fits at short lengths only."""

    def forward(self, x):
        if x.shape[1] > 16:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 TiB")
        return super().forward(x)


EVERYBODY = [
    sdpa(),
    primal("reference"),
    Contender("wrong", "wrong one", "primal", Wrong, gated=True),
    Contender("hungry", "hungry one", "baseline", lambda case: Hungry(case.embed_dim, case.embed_dim)),
    Contender("absent", "absent one", "baseline", raising(CannotRunError("no GPU"))),
    Contender("broken", "broken one", "baseline", raising(ZeroDivisionError("by zero"))),
]


@pytest.fixture(scope="module")
def settings(tmp_path_factory) -> Settings:
    return Settings(
        lengths=(16, 64), widths=((16, 2), (24, 2)), rank=4, landmarks=7, tokens=128, seconds=0.01,
        device="cpu", out=tmp_path_factory.mktemp("bench"), command="primal bench attention …",
    )  # fmt: skip


@pytest.fixture(scope="module")
def report(settings):
    return run.run(settings, EVERYBODY)


def rows(report, name, **sizes):
    return [r for r in report["rows"] if r["name"] == name and all(r[k] == v for k, v in sizes.items())]


def test_every_contender_has_a_row_at_every_size(report):
    assert len(report["rows"]) == len(EVERYBODY) * 4
    assert all(set(row) == ROW for row in report["rows"])
    assert {(r["batch"], r["length"]) for r in report["rows"]} == {(8, 16), (2, 64)}


def test_times_memory_and_ratios(report):
    for row in rows(report, "primal-reference"):
        base = rows(report, "sdpa", embed_dim=row["embed_dim"], length=row["length"])[0]
        assert row["seconds"] > 0
        assert row["runs"] >= 1
        assert row["method"] == "torch.utils.benchmark"
        assert row["kept_bytes"] > 0
        assert row["peak_bytes"] is None  # nobody measures it on a CPU
        assert row["speedup"] == pytest.approx(base["seconds"] / row["seconds"])
        assert row["kept_ratio"] == pytest.approx(row["kept_bytes"] / base["kept_bytes"])
    assert all(row["speedup"] == 1 for row in rows(report, "sdpa"))


def test_a_wrong_backend_is_refused_and_not_timed(report):
    for row in rows(report, "wrong"):
        assert row["status"] == "refused"
        assert row["seconds"] is None
        assert "wrong results: error of" in row["note"]
    verdicts = {v["name"]: v["passed"] for v in report["gate"]}
    assert verdicts == {"primal-reference": True, "wrong": False}


def test_what_does_not_fit_is_reported(report):
    assert {r["length"]: r["status"] for r in rows(report, "hungry")} == {16: "ok", 64: "out of memory"}


def test_other_trouble_is_told_apart(report):
    assert {(r["status"], r["note"]) for r in rows(report, "absent")} == {("unsupported", "no GPU")}
    assert {(r["status"], r["note"]) for r in rows(report, "broken")} == {("failed", "ZeroDivisionError: by zero")}


def test_a_slow_contender_is_not_tried_at_longer_lengths(settings):
    eager = dataclasses.replace(settings, widths=((16, 2),), limit=1e-9, name="slow")
    found = run.run(eager, [sdpa()])
    assert [row["status"] for row in found["rows"]] == ["ok", "skipped"]


def test_the_file_says_where_the_numbers_come_from(report, settings):
    text = (settings.out / "attention.json").read_text(encoding="utf-8")
    saved = json.loads(text, parse_constant=lambda constant: pytest.fail(f"{constant} is not JSON"))
    assert saved == json.loads(json.dumps(report))
    assert saved["format"] == 1
    assert saved["kind"] == "attention"
    assert saved["command"] == "primal bench attention …"
    assert saved["hardware"]["device"] == "cpu"
    assert saved["hardware"]["cpu"]
    assert saved["versions"]["torch"] == torch.__version__
    assert saved["date"].endswith("+00:00")
    assert {"commit", "settings", "gate", "rows"} <= set(saved)
    assert saved["settings"]["dtype"] == "float32"


def test_the_table_names_everybody_and_every_reason(report):
    text = tables.attention(report)
    for words in ("softmax (SDPA)", "Primal (reference)", "wrong one", "OOM", "1.00×", "no GPU", "by zero", "d 24"):
        assert words in text


def test_the_picture(report, tmp_path):
    pytest.importorskip("matplotlib")
    files = plot.draw(report, tmp_path / "attention")
    assert [f.name for f in files] == ["attention.png", "attention.svg"]
    assert all(f.stat().st_size > 10_000 for f in files)
    svg = files[1].read_text(encoding="utf-8")
    assert all(
        words in svg for words in ("Primal (reference)", "softmax (SDPA)", "out of memory at 64", "time per token")
    )


def test_the_baselines_run(settings):
    small = dataclasses.replace(settings, lengths=(32,), widths=((16, 2),), tokens=None, batch=2, name="baselines")
    baselines = contenders(only=("baseline",))
    found = run.run(small, baselines)
    assert len(found["rows"]) == 10
    assert {row["status"] for row in found["rows"]} == {"ok"}
    causal = run.run(
        dataclasses.replace(small, causal=True, name="causal"),
        [c for c in contenders(baselines=True) if c.kind == "baseline"],
    )
    assert {row["name"] for row in causal["rows"] if row["status"] == "ok"} == {
        "linear", "performer", "reformer", "cosformer", "flow",
    }  # fmt: skip


def test_whom_only_names():
    assert [c.name for c in contenders(only=("sdpa", "published"))] == ["sdpa", "published"]
    assert {c.kind for c in contenders(only=("primal",))} == {"primal"}
    assert all(c.kind != "baseline" for c in contenders())
    with pytest.raises(BenchError, match="did you mean 'performer'"):
        contenders(only=("perfromer",))


def test_the_interpreter_is_never_timed(monkeypatch):
    from primal_attention.bench.settings import Case

    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(CannotRunError, match="interpreter"):
        primal("fused").build(Case(16, 2, 1, 4, rank=4))


def test_spread_of_times():
    from primal_attention.bench.timing import spread

    assert spread([1.0]) == 0.0
    assert math.isclose(spread([1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]), 4.0)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("eager", [False, True], ids=["graph", "eager"])
def test_on_a_gpu_graphs_are_replayed_and_peaks_measured(tmp_path, eager):
    settings = Settings(
        lengths=(64, 256), widths=((64, 2),), tokens=512, rank=8, landmarks=20, eager=eager, repeats=5, out=tmp_path,
        only=("sdpa", "primal-reference", "published"),
    )  # fmt: skip
    found = run.run(settings)
    for row in found["rows"]:
        assert row["status"] == "ok", row["note"]
        assert row["method"] == ("CUDA events, eager" if eager else "CUDA graph")
        assert row["peak_bytes"] > row["resident_bytes"] > 0
        assert row["kept_bytes"] > 0
    # What one contender left behind does not count as the next one's.
    resident = [row["resident_bytes"] for row in found["rows"] if row["name"] == "sdpa"]
    assert max(resident) <= min(resident) + 1024**2


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_what_cannot_be_captured_is_timed_eagerly_and_marked(tmp_path):
    class Looking(nn.Linear):
        def forward(self, x):
            return super().forward(x) * float(x.detach().sum() * 0 + 1)

    settings = Settings(lengths=(64,), widths=((64, 2),), tokens=512, rank=8, landmarks=20, repeats=5, out=tmp_path)
    looking = Contender("looking", "looking", "baseline", lambda c: Looking(64, 64, device=c.device, dtype=c.dtype))
    rows = run.run(settings, [sdpa(), looking, sdpa()])["rows"]
    assert [row["method"] for row in rows] == ["CUDA graph", "CUDA events, eager", "CUDA graph"]
    assert "no CUDA graph" in rows[1]["note"]
