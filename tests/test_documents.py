"""The code of the documents runs, links exist, and tables equal the stored results."""

from __future__ import annotations

import importlib.util
import inspect
import re
import warnings
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import nn

import primal_attention

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
        assert check.run_examples(ROOT / "README.md") >= 3


@pytest.mark.parametrize("page", ["quickstart", "masks-and-packing", "streaming", "objective", "benchmarks/lm"])
def test_the_code_of_the_guide_runs(check: ModuleType, page: str, capsys: pytest.CaptureFixture[str]) -> None:
    document = f"docs/guide/{page}.md"
    assert document in check.COMPLETE
    assert check.run_examples(ROOT / document) >= 1


def test_the_code_about_baselines_runs(check: ModuleType) -> None:
    given = {"x": torch.randn(2, 9, 512), "key_padding_mask": torch.zeros(2, 9, dtype=torch.bool)}
    assert check.run_examples(ROOT / "docs" / "notes" / "baselines.md", given) == 1


def test_the_code_about_pretrained_models_runs(check: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    layer = nn.TransformerEncoderLayer(256, 4, batch_first=True)
    given = {"model": nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)}
    assert check.run_examples(ROOT / "docs" / "guide" / "pretrained-models.md", given) == 1
    assert "parameters" in capsys.readouterr().out


def test_the_code_for_transformers_runs(
    check: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("transformers")
    monkeypatch.chdir(tmp_path)
    check.run_examples(ROOT / "docs" / "guide" / "transformers.md", first=1)  # the next one needs a run
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


def test_the_readme_is_short_and_starts_with_the_two_commands() -> None:
    lines = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 130
    assert [line.split("#")[0].strip() for line in lines if line.startswith("make ")][:2] == ["make demo", "make test"]


def test_the_reference_has_every_public_name() -> None:
    pages = "\n".join(page.read_text(encoding="utf-8") for page in (ROOT / "docs" / "reference").glob("*.md"))
    for name in set(primal_attention.__all__) - {"__version__"}:
        assert f":: primal_attention.{name}\n" in pages, name


def test_docstrings_of_public_names_list_every_argument() -> None:
    for name in set(primal_attention.__all__) - {"__version__"}:
        public = getattr(primal_attention, name)
        arguments = set(inspect.signature(public).parameters)
        missing = [a for a in arguments if not re.search(rf"\b{a}\b", inspect.getdoc(public) or "")]
        assert not missing, f"{name}: {missing}"


def test_the_readmes_numbers_are_those_of_the_stored_results(check: ModuleType) -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    steps = {(row["name"], row["kind"]): row["wall_ms"] for row in check._read_bench("model")["rows"]}
    for name in ("512x1024-compile", "512x4096-compile", "768x8192-compile", "512x1024-eager"):
        primal, sdpa = (steps[f"{name}-autocast", kind] for kind in ("primal", "sdpa"))
        assert f"{primal:.1f} ms per step, SDPA {sdpa:.1f} ms" in text, name
    states = {r["name"]: r["state_bytes"] for r in check._read_bench("decode")["rows"] if r["length"] == 2**20}
    primal, sdpa = states["primal-fused"] / 1e3, states["sdpa"] / 1e9
    assert f"state of {primal:.1f} kB, softmax cache of {sdpa:.1f} GB" in text
    results = "\n".join(page.read_text(encoding="utf-8") for page in (ROOT / "docs" / "results").glob("*.md"))
    for number in ("1.4348", "1.3746", "1.3636", "55.6 ± 0.2", "58.7 ± 0.5", "58.4 ± 1.2", "64.7 ± 1.0", "58.9 ± 0.4"):
        assert number in results  # generated tables, which the README rounds
