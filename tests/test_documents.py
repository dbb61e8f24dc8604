"""The code of the documents runs, links exist, and tables equal the stored results."""

import doctest
import importlib
import importlib.util
import inspect
import re
import warnings
from pathlib import Path
from types import ModuleType

import pytest

import primal_attention
from primal_attention.nn.baselines.base import BaselineAttention

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def check() -> ModuleType:
    spec = importlib.util.spec_from_file_location("docs_check", ROOT / "docs" / "check.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# The least number of blocks of a document's code.
CODE: dict[str, int] = {
    "README.md": 3,
    "docs/index.md": 1,
    "docs/guide/quickstart.md": 5,
    "docs/guide/choosing.md": 1,
    "docs/guide/compatibility.md": 1,
    "docs/guide/performance.md": 1,
    "docs/guide/time-series.md": 5,
    "docs/guide/masks-and-packing.md": 2,
    "docs/guide/streaming.md": 3,
    "docs/guide/objective.md": 2,
    "docs/guide/kernel-svd.md": 3,
    "docs/guide/language-models.md": 2,
    "docs/notes/baselines.md": 1,
    "docs/guide/pretrained-models.md": 2,
    "docs/guide/transformers.md": 3,
}


@pytest.mark.parametrize("document", CODE)
def test_the_code_of_a_document_runs(document: str, check: ModuleType, tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    with warnings.catch_warnings():
        if document == "README.md":
            warnings.simplefilter("error")
        first = 4 if "transformers" in document else None  # the next block needs a run
        assert check.run_examples(ROOT / document, first=first) >= CODE[document]
    assert set(check.COMPLETE) <= set(CODE)


SOURCES = [path.relative_to(ROOT / "src") for path in (ROOT / "src").rglob("*.py") if "    >>> " in path.read_text()]


@pytest.mark.parametrize("path", sorted(SOURCES), ids=str)
def test_the_examples_of_docstrings_run(path: Path) -> None:
    name = ".".join(path.with_suffix("").parts).removesuffix(".__init__")
    result = doctest.testmod(importlib.import_module(name))
    assert result.attempted > 0
    assert result.failed == 0


def test_the_examples_of_the_theory_page_run() -> None:
    result = doctest.testfile(str(ROOT / "docs" / "notes" / "theory.md"), module_relative=False)
    assert result.attempted > 0
    assert result.failed == 0


def test_a_link_to_a_heading_that_is_not_there_is_found(check: ModuleType, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# The theory, as a tool\n[here](#the-theory-as-a-tool) [nowhere](#theory) [gone](page.md#gone)")
    assert check.broken_links(page) == ["#theory", "page.md#gone"]


def test_a_measured_number_without_a_source_is_found(check: ModuleType, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    table = "<!-- table: bench -->\n| a | 1,234.56 |\n<!-- end -->\n<!-- source: 7.7: primal info -->\n"
    page.write_text(f"{table}1,234.6, 7.7, `0.3`, η = 0.1 and 12 layers, but 0.25 and 40 % or 2.5\ntimes.")
    assert check.numbers_without_source(page) == ["0.25", "40", "2.5"]


def test_links_numbers_and_tables_of_the_documents(check: ModuleType) -> None:
    assert check.failures() == []
    with_table = [page for page in check.documents() if check.TABLE.search(page.read_text(encoding="utf-8"))]
    assert {page.stem for page in (ROOT / "docs" / "results").glob("*.md")} - {"index"} <= {p.stem for p in with_table}


def test_the_readme_is_short_with_its_commands_and_generated_tables(check: ModuleType) -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    lines = text.splitlines()
    assert len(lines) <= 130
    assert [line.split("#")[0].strip() for line in lines if line.startswith("make ")][:2] == ["make demo", "make test"]
    assert len(check.PYTHON_BLOCK.search(text)[1].split("\n")) <= 10
    assert [name for name, _ in check.TABLE.findall(text)] == ["situations", "support"]


def test_the_reference_has_every_public_name() -> None:
    pages = "\n".join(page.read_text(encoding="utf-8") for page in (ROOT / "docs" / "reference").glob("*.md"))
    packages = ("ksvd", "parallel", "nn.baselines", "convert", "hf")
    for package in ("primal_attention", *(f"primal_attention.{name}" for name in packages)):
        for name in set(importlib.import_module(package).__all__) - {"__version__"}:
            assert re.search(rf":: primal_attention\.([\w.]+\.)?{name}$", pages, re.MULTILINE), name


def reference_names() -> list[tuple[str, list[str]]]:
    """Classes and functions of the reference, with the methods that it shows."""
    pages = [page.read_text(encoding="utf-8") for page in sorted((ROOT / "docs" / "reference").glob("*.md"))]
    found = re.findall(r"\.\. auto(?:class|function):: (\S+)(?:\n   :members: (.+))?", "\n".join(pages))
    return [(name, members.split(", ") if members else []) for name, members in found]


@pytest.mark.parametrize(("name", "members"), reference_names(), ids=lambda value: str(value).rpartition(".")[2])
def test_docstrings_of_the_reference_list_every_argument(name: str, members: list[str]) -> None:
    module, _, attribute = name.rpartition(".")
    public = getattr(importlib.import_module(module), attribute)
    described = {"self", "cls"}
    if inspect.isclass(public) and issubclass(public, BaselineAttention) and public is not BaselineAttention:
        described |= {"common", *inspect.signature(BaselineAttention).parameters}  # described there
    for function in (public, *(getattr(public, member) for member in members)):
        if callable(function):
            doc = inspect.getdoc(function) or ""
            missing = [
                argument
                for argument in set(inspect.signature(function).parameters) - described
                if not re.search(rf"^\s*([\w*]+, )*\*{{0,2}}{argument}(, \w+)* ?:", doc, re.MULTILINE)
            ]
            assert not missing, f"{function.__qualname__}: {missing}"


def test_support_without_a_test_is_named_untested(check: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check.tables, "read_marks", lambda: {("compile", "cpu"): ["tests/test_it.py"]})
    rows = {row.split(" | ")[0]: row for row in check.tables.support_table().splitlines()}
    assert "[tested](tests/test_it.py) | untested |" in rows["| `torch.compile(fullgraph=True)`, dynamic shapes"]
    monkeypatch.setattr(check.tables, "read_marks", lambda: {("compiling", "cpu"): ["tests/test_it.py"]})
    with pytest.raises(ValueError, match="compiling"):
        check.tables.support_table()


def test_contributing_names_files_and_constants_that_exist() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    package = ROOT / "src" / "primal_attention"
    folders = (
        ROOT,
        package,
        package / "nn" / "baselines",
        ROOT / "tests" / "ops" / "triton",
        ROOT / "tests/nn/baselines",
    )
    for path in re.findall(r"`([\w./]+\.(?:py|md|txt|toml|cff))`", text):
        assert re.search("NAME|MODE|BENCHMARK", path) or any((folder / path).exists() for folder in folders), path
    code = "\n".join(
        file.read_text(encoding="utf-8")
        for folder in ("src", "tests", "docs")
        for file in ROOT.glob(f"{folder}/**/*.py")
    )
    for name in re.findall(r"`(_?[A-Z]{5,})`", text):
        assert re.search(rf"^{name}\b", code, re.MULTILINE), name


def test_the_version_is_the_same_everywhere() -> None:
    for file, line in (("pyproject.toml", 'version = "{}"'), ("CITATION.cff", "version: {}")):
        assert line.format(primal_attention.__version__) in (ROOT / file).read_text(encoding="utf-8").splitlines(), file


def test_documents_use_the_terms_of_the_field(check: ModuleType) -> None:
    odd = re.compile(
        r"\b(way back|rivals?|opponents?|contenders?|held[- ]out cases|whoever|nobody|somebody|the published way"
        r"|learn(ed|t)? by heart|told|mends?|stretch(es)?|fading|shelf|shelves)\b",
        re.IGNORECASE,
    )
    for document in check.documents():
        prose = re.sub(r"`[^`]*`", "", check.ANY_BLOCK.sub("", document.read_text(encoding="utf-8")))
        assert not odd.search(prose), f"{document}: {odd.search(prose)[0]}"
