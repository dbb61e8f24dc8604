"""The documents stay true: their code runs, and links lead somewhere."""

from __future__ import annotations

import importlib.util
import warnings
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import nn

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


def test_the_code_about_language_models_runs(check: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert check.run_examples(ROOT / "docs" / "language.md") == 2


def test_the_code_about_baselines_runs(check: ModuleType) -> None:
    given = {"x": torch.randn(2, 9, 512), "key_padding_mask": torch.zeros(2, 9, dtype=torch.bool)}
    assert check.run_examples(ROOT / "docs" / "baselines.md", given) == 1


def test_the_code_about_other_models_runs(check: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    layer = nn.TransformerEncoderLayer(256, 4, batch_first=True)
    given = {"model": nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)}
    check.run_examples(ROOT / "docs" / "convert.md", given, first=1)
    assert "parameters" in capsys.readouterr().out


def test_the_code_for_transformers_runs(
    check: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("transformers")
    monkeypatch.chdir(tmp_path)
    check.run_examples(ROOT / "docs" / "transformers.md", first=1)  # the next one needs a run
    assert (tmp_path / "my-model" / "model.safetensors").exists()


def test_a_link_to_a_heading_that_is_not_there_is_found(check: ModuleType, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# The theory, as a tool\n[here](#the-theory-as-a-tool) [nowhere](#theory) [gone](page.md#gone)")
    assert check.broken_links(page) == ["#theory", "page.md#gone"]


def test_every_relative_link_leads_to_a_file(check: ModuleType) -> None:
    broken = {str(d.relative_to(ROOT)): check.broken_links(d) for d in check.documents()}
    assert not {document: targets for document, targets in broken.items() if targets}


def test_tables_are_those_of_the_stored_results(check: ModuleType) -> None:
    documents = [document for document in check.documents() if check.TABLE.search(document.read_text(encoding="utf-8"))]
    assert len(documents) >= 5
    for document in documents:
        assert check.with_tables(document) == document.read_text(encoding="utf-8"), "run docs/check.py --write"


def test_the_first_example_is_short(check: ModuleType) -> None:
    first = check.PYTHON_BLOCK.search((ROOT / "README.md").read_text(encoding="utf-8")).group(1)
    assert len([line for line in first.splitlines() if line.strip()]) == 6


def test_help_names_every_target() -> None:
    text = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in ("demo", "test", "lint", "bench", "docs", "help"):
        assert f"\n{target}:" in text
