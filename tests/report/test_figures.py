"""Pictures come out as PNG files of a sensible size, whatever the numbers."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("matplotlib")

from primal_attention.report import figures


def test_the_demos_picture_is_a_png(tmp_path: Path):
    seconds = {"primal": {128: 0.001, 256: 0.002}, "softmax": {128: 0.001}}
    sigma = {"primal": [1.0, 0.1, 1e-12], "softmax": [1.0, 0.5, 0.2]}
    file = figures.demo(tmp_path / "deep" / "demo.png", seconds, sigma)
    assert file.read_bytes().startswith(b"\x89PNG")
    assert [p.name for p in file.parent.iterdir()] == ["demo.png"]
