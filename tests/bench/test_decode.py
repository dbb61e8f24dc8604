"""The state of Primal-Attention does not grow with the tokens read; the cache of softmax attention does."""

from __future__ import annotations

import pytest

from primal_attention.bench import decode
from primal_attention.bench.measurement import format_report, plot_report

TINY = "decode --lengths 32 128 --widths 16:2 --rank 4 --seconds 0.01"


def state_sizes(report):
    sizes: dict[str, list[int]] = {}
    for row in report["rows"]:
        assert (row["seconds"] is not None) == (row["status"] == "ok")
        assert row["status"] == "ok" or row["note"]
        sizes.setdefault(row["name"], []).append(row["state_bytes"])
    return sizes


def test_layers(flags, tmp_path):
    report = decode.run(flags(f"{TINY} --batch 2 --baselines"))
    sizes = state_sizes(report)
    for name in ("primal-reference", "primal-cpu", "linear", "performer", "cosformer"):
        assert sizes[name][0] == sizes[name][1]
    assert sizes["primal-reference"][0] == 2 * 16 * 4 + 2 * 4  # two sums of d floats, a count per head
    assert sizes["sdpa"] == [2 * 16 * 4 * (n + 1) for n in (32, 128)]
    assert sizes["primal-fused"] == [None, None]
    assert "state kB" in format_report(report)
    pytest.importorskip("matplotlib")
    assert len(plot_report(report, tmp_path / "decode")) == 2


def test_language_models(flags):
    report = decode.run(flags(f"{TINY} --layers 2"))
    sizes = state_sizes(report)
    first, last = sizes.pop("softmax")
    assert last - first == 2 * 2 * 96 * 16 * 4 + 2 * 96  # keys and values of two layers, and which slots are valid
    assert all(sizes[name][0] == sizes[name][1] for name in ("primal-mean", "primal-decay", "primal-delta"))
    assert all(row["status"] == "ok" for row in report["rows"])
    assert "language model of 2 layers" in format_report(report)
