"""Decoding: Primal's state does not grow, softmax attention's does."""

from __future__ import annotations

import pytest

from primal_attention.bench import decode, plot, tables
from primal_attention.bench.settings import BenchError


@pytest.fixture(scope="module")
def settings(tmp_path_factory) -> decode.DecodeSettings:
    return decode.DecodeSettings(
        lengths=(32, 128), widths=((16, 2),), rank=4, batch=2, seconds=0.01, baselines=True, device="cpu",
        out=tmp_path_factory.mktemp("decode"),
    )  # fmt: skip


@pytest.fixture(scope="module")
def report(settings):
    return decode.run(settings)


def states(report, name):
    return [r["state_bytes"] for r in report["rows"] if r["name"] == name]


def test_a_stream_keeps_as_much_whatever_was_read(report):
    for name in ("primal-reference", "primal-cpu", "linear", "performer", "cosformer"):
        first, last = states(report, name)
        assert first == last
    assert states(report, "primal-reference")[0] == 2 * 16 * 4 + 2 * 4  # two sums of d floats, a count per head


def test_softmax_keeps_every_key_and_value(report):
    assert states(report, "sdpa") == [2 * 16 * 4 * (n + 1) for n in (32, 128)]


def test_rows_have_times_or_reasons(report):
    for row in report["rows"]:
        assert (row["seconds"] is not None) == (row["status"] == "ok")
        assert row["status"] == "ok" or row["note"]
    assert {r["status"] for r in report["rows"] if r["name"] == "primal-fused"} == {"unsupported"}


def test_the_table_and_the_picture(report, tmp_path):
    assert "state per sequence, kB" in tables.decode(report)
    pytest.importorskip("matplotlib")
    assert len(plot.draw(report, tmp_path / "decode")) == 2


def test_an_unknown_name_is_refused(tmp_path):
    with pytest.raises(BenchError, match="nobody has this name"):
        decode.run(decode.DecodeSettings(only=("reformer",), out=tmp_path))
