"""Packages import in one direction only: `docs/notes/architecture.md` shows the order."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "primal_attention"
# Import order: a package may import from packages before it, and from itself.
ORDER = [
    "utils", "ops", "nn", "ksvd", "parallel", "convert", "models", "official", "data", "train", "hf", "bench",
    "report", "cli",
]  # fmt: skip
# Packages that are not yet in this order. They may import each other; no package of ORDER may import them.
UNORDERED = {"train", "bench", "report", "convert", "data", "models", "official", "hf", "cli"}
STRICT = ["utils", "ops", "nn", "ksvd", "parallel"]


def imported_packages(path: Path) -> set[str]:
    """The packages of primal_attention that a file imports, in functions and under TYPE_CHECKING too."""
    package = path.relative_to(SOURCE.parent).parts[:-1]
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = list(package[: len(package) - node.level + 1]) if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            names = [module, *(f"{module}.{alias.name}" for alias in node.names)]
        else:
            continue
        found |= {name.split(".")[1] for name in names if name.startswith("primal_attention.")}
    return found


@pytest.mark.parametrize("package", STRICT)
def test_packages_import_only_from_packages_before_them(package: str) -> None:
    allowed = {*ORDER[: ORDER.index(package) + 1]}
    packages = {p.name for p in SOURCE.iterdir() if p.is_dir()} | {p.stem for p in SOURCE.glob("*.py")}
    for path in sorted((SOURCE / package).rglob("*.py")):
        wrong = (imported_packages(path) & packages) - allowed
        assert not wrong, f"{path.relative_to(SOURCE)} imports {', '.join(sorted(wrong))}"


def test_the_list_of_unordered_packages_is_current() -> None:
    packages = {p.name for p in SOURCE.iterdir() if (p / "__init__.py").exists()}
    assert packages - set(STRICT) == UNORDERED & packages
