"""Packages import in one direction only (`docs/architecture.md` shows the order), and names on first use."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import primal_attention

SOURCE = Path(__file__).parents[1] / "src" / "primal_attention"
# Import order: a package may import from packages before it, and from itself.
ORDER = [
    "utils", "ops", "nn", "ksvd", "parallel", "convert", "models", "official", "data", "train", "hf", "bench",
    "report", "cli",
]  # fmt: skip


def imported_packages(path: Path) -> set[str]:
    """The packages of primal_attention that a file imports, in functions and under TYPE_CHECKING too."""
    package = path.relative_to(SOURCE.parent).parts[:-1]
    packages = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = list(package[: len(package) - node.level + 1]) if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            names = [module, *(f"{module}.{alias.name}" for alias in node.names)]
        else:
            continue
        packages |= {name.split(".")[1] for name in names if name.startswith("primal_attention.")}
    return packages


def test_every_package_has_its_place_in_the_order() -> None:
    assert {path.parent.name for path in SOURCE.glob("*/__init__.py")} == set(ORDER)
    assert {path.stem for path in SOURCE.glob("*.py")} == {"__init__", "__main__"}


@pytest.mark.parametrize("package", ORDER)
def test_packages_import_only_from_packages_before_them(package: str) -> None:
    later = set(ORDER[ORDER.index(package) + 1 :])
    for path in sorted((SOURCE / package).rglob("*.py")):
        wrong = imported_packages(path) & later
        assert not wrong, f"{path.relative_to(SOURCE)} imports {', '.join(sorted(wrong))}"


SCRIPT = """
import sys
import primal_attention
print(*sorted({name.partition(".")[0] for name in sys.modules}))
"""


def test_the_import_loads_neither_torch_nor_numpy() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True)
    assert not {"torch", "numpy", "lightning", "scipy"} & set(done.stdout.split())


def test_public_names_resolve() -> None:
    assert set(dir(primal_attention)) == set(primal_attention.__all__)
    assert primal_attention.PrimalAttention(8, 2, rank=2).embed_dim == 8
    assert primal_attention.nn.__name__ == "primal_attention.nn"
    assert not hasattr(primal_attention, "NoSuchThing")
