"""Hints name extras that exist and include the package."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from primal_attention.utils.errors import PACKAGES, install_hint


@pytest.mark.parametrize(
    ("module", "extra", "expected"),
    [
        ("tyro", "", "primal-attention[train]"),
        ("lightning.pytorch", "train", "primal-attention[train]"),
        ("tyro", "timeseries,report", "primal-attention[timeseries,report]"),
        ("matplotlib", "timeseries,report", "primal-attention[timeseries,report]"),
        ("sklearn", "train", "primal-attention[ksvd]"),
        ("tokenizers.models", "language", "primal-attention[language]"),
        ("nothing_known", "train", "nothing_known"),
    ],
)
def test_a_hint_names_the_extra_that_includes_the_package(module: str, extra: str, expected: str) -> None:
    assert install_hint(module, extra).replace("'", "") == f"pip install {expected}"


def test_every_extra_of_the_hints_declares_its_packages() -> None:
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    for package, extra in PACKAGES.values():
        (declared,) = re.findall(rf"^{extra} = \[(.*)\]$", text, re.MULTILINE)
        assert f'"{package}>=' in declared, package
