"""Layers are checked, then measured; every implementation has a row with numbers or the reason why it has none."""

from __future__ import annotations

import json
from functools import partial

import pytest
import torch
from torch import nn

from primal_attention.bench.attention import (
    Shape,
    Step,
    build_primal,
    check_layer,
    list_implementations,
    run_attention,
)  # fmt: skip
from primal_attention.bench.measurement import Implementation, choose, format_report, plot_report

SMALL = {"embed_dim": 24, "num_heads": 2, "batch": 1, "length": 1, "rank": 5, "landmarks": 9}
MODES = {
    "bidirectional": {},
    "causal": {"causal": True, "data_dependent": False},
    "decay": {"causal": True, "data_dependent": False, "decay": "learned"},
    "landmarks": {"causal": True},
}
SIZES = {"name", "kind", "embed_dim", "num_heads", "batch", "length", "status", "note", "seconds"}
NUMBERS = {"iqr", "runs", "method", "peak_bytes", "saved_bytes", "speedup", "peak_ratio", "saved_ratio"}
TINY = "--rank 4 --widths 16:2"


# The check


def build_changed(change, factor: float = 1.0):
    """Build reference layers with a function applied to their output and a factor on their objective."""

    def hook(layer, inputs, y):
        layer._objective = layer._objective * factor
        return change(y)

    def build(shape: Shape) -> nn.Module:
        layer = build_primal("reference", shape)
        layer.register_forward_hook(hook)
        return layer

    return build


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("mode", MODES)
def test_correct_implementations_pass(mode, dtype):
    shape = Shape(**SMALL, **MODES[mode], dtype=dtype)
    backends = ("reference",) if mode == "landmarks" else ("reference", "cpu")
    for backend in backends:
        assert check_layer(partial(build_primal, backend), shape)["passed"]
    if mode in ("bidirectional", "causal"):
        assert check_layer(partial(build_primal, "published"), shape)["passed"]
    else:
        with pytest.raises(NotImplementedError, match="authors' code"):
            check_layer(partial(build_primal, "published"), shape)


@pytest.mark.parametrize(
    ("change", "factor", "where"),
    [
        (lambda y: 1.01 * y, 1.0, ""),
        (lambda y: y + torch.where(y == y.max(), torch.nan, 0.0), 1.0, "y"),
        (lambda y: 1.02 * y - 0.02 * y.detach(), 1.0, "∂"),
        (lambda y: y, 1.05, ""),
        (lambda y: y.detach() + 0 * y, 1.0, "∂"),
    ],
    ids=["scaled", "one NaN", "wrong gradient", "wrong objective", "no gradient"],
)
def test_wrong_results_fail(change, factor, where):
    verdict = check_layer(build_changed(change, factor), Shape(**SMALL))
    assert not verdict["passed"]
    assert where in verdict["where"]
    assert verdict["error"] is None or verdict["error"] > verdict["allowed"]


# Bytes saved for backward


class Product(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(8, 16)

    def forward(self, x):
        a, b = self.wide(x).chunk(2, dim=-1)
        return a * b


@pytest.mark.parametrize(("layer", "floats"), [(nn.Linear(8, 8), 8), (Product(), 8 + 16)], ids=["linear", "views"])
def test_saved_bytes_count_storages_once_without_parameters(layer, floats):
    step = Step(layer, Shape(8, 2, batch=2, length=16))
    assert step.saved_bytes() == 2 * 16 * floats * 4
    assert all(grad.isfinite().all() for grad in step.backward(step.forward()))


# A run


class FitsShort(nn.Linear):
    def forward(self, x):
        if x.shape[1] > 16:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 TiB")
        return super().forward(x)


def raising(error: Exception):
    def build(shape):
        raise error

    return build


def test_every_implementation_has_numbers_or_a_reason(flags, tmp_path):
    args = flags(f"attention {TINY} 24:2 --landmarks 7 --lengths 16 64 --tokens 128 --only sdpa sdpa-cudnn")
    report = run_attention(
        args,
        [
            *choose(list_implementations(), args.only, baselines=False),
            Implementation("primal-reference", "primal", partial(build_primal, "reference")),
            Implementation("wrong", "primal", build_changed(lambda y: 2 * y)),
            Implementation("large", "baseline", lambda s: FitsShort(s.embed_dim, s.embed_dim)),
            Implementation("absent", "baseline", raising(NotImplementedError("no GPU"))),
            Implementation("broken", "baseline", raising(ZeroDivisionError("by zero"))),
        ],
    )
    rows = {(row["name"], row["embed_dim"], row["length"]): row for row in report["rows"]}
    assert len(rows) == len(report["rows"]) == 7 * 4
    for row in rows.values():
        assert set(row) - {"check"} == SIZES | (NUMBERS if row["status"] == "ok" else set())
    assert {(row["batch"], row["length"]) for row in rows.values()} == {(8, 16), (2, 64)}
    primal, base = rows["primal-reference", 24, 64], rows["sdpa", 24, 64]
    assert primal["runs"] >= 1
    assert primal["method"] == "torch.utils.benchmark"
    assert primal["peak_bytes"] is None  # on a GPU only
    assert primal["speedup"] == base["seconds"] / primal["seconds"]
    assert primal["saved_ratio"] == primal["saved_bytes"] / base["saved_bytes"]
    notes = {name: (row["status"], row["note"]) for (name, width, n), row in rows.items() if (width, n) == (16, 64)}
    assert notes["wrong"][0] == "refused"
    assert "wrong results: error of" in notes["wrong"][1]
    checks = {name: row["check"]["passed"] for (name, *_), row in rows.items() if "check" in row}
    assert checks == {"primal-reference": True, "wrong": False}
    assert notes["large"] == ("out of memory", "does not fit into the memory")
    assert notes["absent"] == ("unsupported", "no GPU")
    assert notes["broken"] == ("failed", "ZeroDivisionError: by zero")
    assert notes["sdpa-cudnn"] == ("unsupported", "torch has no such kernel for this device, dtype and head width")

    text = args.file.read_text(encoding="utf-8")
    saved = json.loads(text, parse_constant=lambda constant: pytest.fail(f"{constant} is not JSON"))
    assert saved == json.loads(json.dumps(report))
    assert saved["command"].startswith("primal bench attention --rank 4")
    assert saved["versions"]["torch"] == torch.__version__
    assert saved["settings"]["dtype"] == "float32"
    assert {"commit", "dirty", "date", "hardware"} <= set(saved)
    table = format_report(report)
    for words in ("sdpa-cudnn", "wrong results", "out of memory", "unsupported, no GPU", "by zero", "IQR ms"):
        assert words in table
    pytest.importorskip("matplotlib")
    files = plot_report(report, tmp_path / "attention")
    assert [f.name for f in files] == ["attention.png", "attention.svg"]
    svg = files[1].read_text(encoding="utf-8")
    assert all(words in svg for words in ("primal-reference", "sdpa", "time per token", "d 24, 2 heads"))


def test_slow_implementations_are_skipped_at_longer_lengths(flags):
    args = flags(f"attention {TINY} --lengths 16 32 --only sdpa")
    args.limit = 1e-9
    report = run_attention(args)
    assert [row["status"] for row in report["rows"]] == ["ok", "skipped"]


@pytest.mark.parametrize("mode", ["", "--causal --inference"])
def test_baselines_run(flags, mode):
    args = flags(f"attention {TINY} --landmarks 7 --lengths 32 --batch 2 --only baseline published {mode}")
    report = run_attention(args)
    causal = {"linear", "performer", "reformer", "cosformer", "flow", "published"}
    ran = {row["name"] for row in report["rows"] if row["status"] == "ok"}
    assert ran == (causal if mode else {row["name"] for row in report["rows"]})
    assert len(report["rows"]) == 11
    assert all((row["saved_bytes"] is None) == bool(mode) for row in report["rows"] if row["name"] in ran)
    assert args.file.stem == "attention" + mode.replace(" ", "").replace("--", "-")


def test_only_selects_names_and_kinds():
    layers = list_implementations()
    names = [i.name for i in choose(layers, ["softmax", "published"], baselines=False)]
    assert names == ["sdpa", "sdpa-flash", "sdpa-cudnn", "sdpa-efficient", "sdpa-math", "published"]
    for baselines in (False, True):
        chosen = choose(layers, [], baselines)
        assert any(i.kind == "baseline" for i in chosen) == baselines


@pytest.mark.gpu
@pytest.mark.parametrize("eager", [False, True], ids=["graph", "eager"])
def test_gpu_graphs_peaks_and_fallback(flags, eager):
    class Synchronising(nn.Linear):
        def forward(self, x):
            return super().forward(x) * float(x.detach().sum() * 0 + 1)

    words = "--lengths 64 256 --widths 64:2 --tokens 512 --repeats 5 --only sdpa primal-reference published"
    args = flags(f"attention {TINY} --landmarks 7 {words} {'--eager' if eager else ''}")
    args.device, args.dtype = torch.device("cuda"), "bfloat16"
    build = lambda s: Synchronising(64, 64, device=s.device, dtype=s.dtype)  # noqa: E731
    chosen = choose(list_implementations(), args.only, baselines=False)
    chosen.append(Implementation("sync", "baseline", build))
    report = run_attention(args, chosen)
    for row in report["rows"]:
        assert row["status"] == "ok", row["note"]
        graph = not eager and row["name"] != "sync"
        assert row["method"] == ("CUDA graph" if graph else "CUDA events, eager")
        assert row["peak_bytes"] > 0
        assert ("no CUDA graph" in row["note"]) == (row["name"] == "sync" and not eager)
    # Memory that one implementation left behind does not count for the next one.
    peaks = [row["peak_bytes"] for row in report["rows"] if row["name"] == "sdpa"]
    assert max(peaks) <= min(peaks) + 1024**2
