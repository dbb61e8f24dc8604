"""What the repository takes from outside is pinned: golden arrays and the packages of the development environment."""

import hashlib
import re
from pathlib import Path

import pytest

GOLDEN = Path(__file__).parent / "golden"
ROOT = Path(__file__).parents[1]


def test_golden_files_are_those_of_the_provenance_note() -> None:
    note = (GOLDEN / "README.md").read_text()
    recorded = dict(re.findall(r"\| `(\S+\.npz)` \|.*\| `([0-9a-f]{64})` \|", note))
    assert recorded == {f.name: hashlib.sha256(f.read_bytes()).hexdigest() for f in GOLDEN.glob("*.npz")}


def requirements(file: str) -> dict[str, str]:
    text = re.sub(r"\\\n\s*", "", (ROOT / file).read_text())
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    return {f"{m[1]}=={m[2]}": line for line in lines if (m := re.match(r"([\w.-]+)==([^\s;]+)", line))}


def test_every_locked_package_has_hashes_and_no_address() -> None:
    locked = requirements("requirements-ci.txt")
    assert all(re.search(r"--hash=sha256:[0-9a-f]{64}", line) for line in locked.values())
    assert not re.search(r"://|--(extra-)?index|@", (ROOT / "requirements-ci.txt").read_text())
    assert not any(pin.startswith(("torch==", "triton==", "nvidia-")) for pin in locked)


@pytest.mark.parametrize("file", ["constraints.txt", "requirements-oracles.txt"])
def test_the_lock_agrees_with(file: str) -> None:
    wanted = {pin for pin in requirements(file) if not pin.startswith("torch==")}
    assert wanted <= requirements("requirements-ci.txt").keys()


def test_the_lock_has_every_tool_of_the_dev_extra() -> None:
    names = {pin.partition("==")[0] for pin in requirements("requirements-ci.txt")}
    dev = re.search(r"^dev = \[(.*)\]$", (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert dev is not None
    assert set(re.findall(r'"([\w-]+)', dev[1])) - {"triton"} <= names
