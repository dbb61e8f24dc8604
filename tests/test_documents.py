"""The documents stay true: the README's code runs, and links lead somewhere."""

from __future__ import annotations

import importlib.util
import warnings
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def check() -> ModuleType:
    spec = importlib.util.spec_from_file_location("docs_check", ROOT / "docs" / "check.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_readmes_code_runs(check: ModuleType) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert check.run_examples(ROOT / "README.md") >= 5


def test_every_relative_link_leads_to_a_file(check: ModuleType) -> None:
    broken = {str(d.relative_to(ROOT)): check.broken_links(d) for d in check.documents()}
    assert not {document: targets for document, targets in broken.items() if targets}


def test_the_first_example_is_short(check: ModuleType) -> None:
    first = check.PYTHON_BLOCK.search((ROOT / "README.md").read_text(encoding="utf-8")).group(1)
    assert len([line for line in first.splitlines() if line.strip()]) == 6


def test_help_names_every_target() -> None:
    text = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in ("demo", "test", "lint", "bench", "docs", "help"):
        assert f"\n{target}:" in text
