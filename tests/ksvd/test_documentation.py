"""Every example of the docstrings and of the theory page runs and prints what it says."""

from __future__ import annotations

import doctest
import importlib
import pkgutil
from pathlib import Path

import pytest

import primal_attention.ksvd

MODULES = [f"primal_attention.ksvd.{module.name}" for module in pkgutil.iter_modules(primal_attention.ksvd.__path__)]


@pytest.mark.parametrize("name", MODULES)
def test_docstring_examples(name) -> None:
    assert doctest.testmod(importlib.import_module(name)).failed == 0


def test_theory_page() -> None:
    page = Path(__file__).parents[2] / "docs" / "theory.md"
    result = doctest.testfile(str(page), module_relative=False)
    assert result.attempted > 0
    assert result.failed == 0
