"""Hints name extras that exist and include the package."""

import re
from pathlib import Path

import pytest

from primal_attention.utils.errors import PACKAGES, install_hint


@pytest.mark.parametrize(
    ("module", "expected"),
    [
        ("tyro", "primal-attention[train]"),
        ("lightning.pytorch", "primal-attention[train]"),
        ("sklearn", "primal-attention[ksvd]"),
        ("nothing_known", "nothing_known"),
    ],
)
def test_a_hint_names_the_extra_that_includes_the_package(module: str, expected: str) -> None:
    assert install_hint(module).replace("'", "") == f"pip install {expected}"


def test_every_extra_of_the_hints_declares_its_packages() -> None:
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    for package, extra in PACKAGES.values():
        (declared,) = re.findall(rf"^{extra} = \[(.*)\]$", text, re.MULTILINE)
        assert f'"{package}>=' in declared, package
