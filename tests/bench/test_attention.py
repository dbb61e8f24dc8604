"""Layers are checked, then measured; every implementation has a row with numbers or the reason why it has none."""

from __future__ import annotations

import json

import pytest
import torch
from torch import Tensor, nn

from primal_attention.bench import attention
from primal_attention.bench.attention import Case, Gate, Implementation, Step, build_primal
from primal_attention.bench.measurement import UnsupportedError, format_report, plot_report
from primal_attention.utils.errors import RunError

SMALL = {"embed_dim": 24, "num_heads": 2, "batch": 1, "length": 1, "rank": 5, "landmarks": 9}
MODES = {
    "bidirectional": {},
    "causal": {"causal": True, "data_dependent": False},
    "decay": {"causal": True, "data_dependent": False, "decay": "learned"},
    "landmarks": {"causal": True},
}
ROW = {
    "name", "label", "kind", "embed_dim", "num_heads", "batch", "length", "status", "note", "seconds", "iqr", "runs",
    "method", "peak_bytes", "kept_bytes", "speedup", "peak_ratio", "kept_ratio", "state_bytes",
}  # fmt: skip


# The check


class Changed(nn.Module):
    """The reference layer with a function applied to its output and a factor on its objective."""

    def __init__(self, case: Case, change, factor: float = 1.0) -> None:
        super().__init__()
        self.inner, self.change, self.factor = build_primal("reference", case), change, factor

    def load_state_dict(self, *args, **keywords):
        return self.inner.load_state_dict(*args, **keywords)

    def named_parameters(self, *args, **keywords):
        return self.inner.named_parameters(*args, **keywords)

    @property
    def objective(self) -> Tensor:
        return self.inner.objective * self.factor

    def forward(self, x: Tensor) -> Tensor:
        return self.change(self.inner(x))


class WrongGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return 1.02 * grad


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("mode", MODES)
def test_correct_implementations_pass(mode, dtype):
    gate = Gate(Case(**SMALL, **MODES[mode], dtype=dtype))
    assert gate.check(lambda case: build_primal("reference", case))["passed"]
    if mode != "landmarks":
        assert gate.check(lambda case: build_primal("cpu", case))["passed"]
    if mode in ("bidirectional", "causal"):
        assert gate.check(attention.build_authors)["passed"]
    else:
        with pytest.raises(UnsupportedError, match="authors' code"):
            gate.check(attention.build_authors)


@pytest.mark.parametrize(
    ("change", "factor", "where"),
    [
        (lambda y: 1.01 * y, 1.0, ""),
        (lambda y: y + torch.where(y == y.max(), torch.nan, 0.0), 1.0, "y"),
        (WrongGradient.apply, 1.0, "∂"),
        (lambda y: y, 1.05, ""),
        (lambda y: y.detach() + 0 * y, 1.0, "∂"),
    ],
    ids=["scaled", "one NaN", "wrong gradient", "wrong objective", "no gradient"],
)
def test_wrong_results_fail(change, factor, where):
    verdict = Gate(Case(**SMALL)).check(lambda case: Changed(case, change, factor))
    assert not verdict["passed"]
    assert where in verdict["where"]
    assert verdict["error"] is None or verdict["error"] > verdict["allowed"]


def test_triton_interpreter_is_not_timed(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(UnsupportedError, match="interpreter"):
        build_primal("fused", Case(**SMALL))


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
    step = Step(layer, Case(8, 2, batch=2, length=16))
    assert step.saved_bytes() == 2 * 16 * floats * 4
    assert all(grad.isfinite().all() for grad in step.backward(step.forward()))


# A run


class FitsShort(nn.Linear):
    def forward(self, x):
        if x.shape[1] > 16:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 TiB")
        return super().forward(x)


def raising(error: Exception):
    def build(case):
        raise error

    return build


IMPLEMENTATIONS = [
    *attention.list_implementations(only=("sdpa", "sdpa-cudnn", "primal-reference")),
    Implementation("wrong", "wrong one", "primal", lambda case: Changed(case, lambda y: 2 * y)),
    Implementation("large", "large one", "baseline", lambda case: FitsShort(case.embed_dim, case.embed_dim)),
    Implementation("absent", "absent one", "baseline", raising(UnsupportedError("no GPU"))),
    Implementation("broken", "broken one", "baseline", raising(ZeroDivisionError("by zero"))),
]
TINY = "attention --rank 4 --landmarks 7 --seconds 0.01"


@pytest.fixture(scope="module")
def args(flags):
    return flags(f"{TINY} --lengths 16 64 --widths 16:2 24:2 --tokens 128")


@pytest.fixture(scope="module")
def report(args):
    return attention.run(args, IMPLEMENTATIONS)


def rows(report, name):
    return [row for row in report["rows"] if row["name"] == name]


def test_rows_have_times_memory_and_ratios(report):
    assert len(report["rows"]) == len(IMPLEMENTATIONS) * 4
    assert all(set(row) == ROW for row in report["rows"])
    assert {(r["batch"], r["length"]) for r in report["rows"]} == {(8, 16), (2, 64)}
    for row, base in zip(rows(report, "primal-reference"), rows(report, "sdpa"), strict=True):
        assert row["runs"] >= 1
        assert row["method"] == "torch.utils.benchmark"
        assert row["peak_bytes"] is None  # on a GPU only
        assert row["speedup"] == base["seconds"] / row["seconds"]
        assert row["kept_ratio"] == row["kept_bytes"] / base["kept_bytes"]
        assert base["speedup"] == 1


def test_statuses_and_notes(report):
    said = {(row["name"], row["length"]): (row["status"], row["note"]) for row in report["rows"]}
    assert said["wrong", 16][0] == "refused"
    assert "wrong results: error of" in said["wrong", 16][1]
    assert {v["name"]: v["passed"] for v in report["gate"]} == {"primal-reference": True, "wrong": False}
    assert said["large", 16][0] == "ok"
    assert said["large", 64][0] == "out of memory"
    assert said["absent", 16] == ("unsupported", "no GPU")
    assert said["broken", 16] == ("failed", "ZeroDivisionError: by zero")
    assert said["sdpa-cudnn", 64] == ("unsupported", "torch has no such kernel for this device, dtype and head width")


def test_file_has_provenance(report, args):
    text = args.file.read_text(encoding="utf-8")
    saved = json.loads(text, parse_constant=lambda constant: pytest.fail(f"{constant} is not JSON"))
    assert saved == json.loads(json.dumps(report))
    assert saved["command"].startswith("primal bench attention --rank 4")
    assert saved["versions"]["torch"] == torch.__version__
    assert saved["settings"]["dtype"] == "float32"
    assert {"commit", "date", "hardware", "gate"} <= set(saved)


def test_table_and_plot(report, tmp_path):
    text = format_report(report)
    for words in ("softmax (SDPA)", "wrong one", "out of memory", "unsupported, no GPU", "by zero", "IQR ms"):
        assert words in text
    pytest.importorskip("matplotlib")
    files = plot_report(report, tmp_path / "attention")
    assert [f.name for f in files] == ["attention.png", "attention.svg"]
    svg = files[1].read_text(encoding="utf-8")
    assert all(words in svg for words in ("Primal (reference)", "softmax (SDPA)", "time per token", "d 24, 2 heads"))


def test_slow_implementations_are_skipped_at_longer_lengths(flags):
    report = attention.run(flags(f"{TINY} --lengths 16 32 --widths 16:2 --limit 1e-9 --only sdpa"))
    assert [row["status"] for row in report["rows"]] == ["ok", "skipped"]


@pytest.mark.parametrize("mode", ["", "--causal --inference"])
def test_baselines_run(flags, mode):
    args = flags(f"{TINY} --lengths 32 --widths 16:2 --batch 2 --only baseline published {mode}")
    report = attention.run(args)
    causal = {"linear", "performer", "reformer", "cosformer", "flow", "published"}
    ran = {row["name"] for row in report["rows"] if row["status"] == "ok"}
    assert ran == (causal if mode else {row["name"] for row in report["rows"]})
    assert len(report["rows"]) == 11
    assert args.file.stem == "attention" + mode.replace(" ", "").replace("--", "-")
    assert all((row["kept_bytes"] is None) == bool(mode) for row in report["rows"] if row["name"] in ran)


def test_only_selects_names_and_kinds():
    names = [i.name for i in attention.list_implementations(only=("softmax", "published"))]
    assert names == ["sdpa", "sdpa-flash", "sdpa-cudnn", "sdpa-efficient", "sdpa-math", "published"]
    assert all(i.kind != "baseline" for i in attention.list_implementations())
    assert any(i.kind == "baseline" for i in attention.list_implementations(baselines=True))
    with pytest.raises(RunError, match="did you mean 'performer'"):
        attention.list_implementations(only=("perfromer",))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("eager", [False, True], ids=["graph", "eager"])
def test_gpu_graphs_peaks_and_fallback(flags, eager):
    class Synchronising(nn.Linear):
        def forward(self, x):
            return super().forward(x) * float(x.detach().sum() * 0 + 1)

    args = flags(f"{TINY} --lengths 64 256 --widths 64:2 --tokens 512 --repeats 5 {'--eager' if eager else ''}")
    args.device, args.dtype = torch.device("cuda"), "bfloat16"
    chosen = attention.list_implementations(only=("sdpa", "primal-reference", "published"))
    build = lambda c: Synchronising(64, 64, device=c.device, dtype=c.dtype)  # noqa: E731
    report = attention.run(args, [*chosen, Implementation("sync", "sync", "baseline", build)])
    for row in report["rows"]:
        assert row["status"] == "ok", row["note"]
        graph = not eager and row["name"] != "sync"
        assert row["method"] == ("CUDA graph" if graph else "CUDA events, eager")
        assert row["peak_bytes"] > 0
        assert ("no CUDA graph" in row["note"]) == (row["name"] == "sync" and not eager)
    # Memory that one implementation left behind does not count for the next one.
    peaks = [row["peak_bytes"] for row in rows(report, "sdpa")]
    assert max(peaks) <= min(peaks) + 1024**2
