"""The built package: wheel and sdist, installed where torch and numpy are the only other packages."""

import os
import subprocess
import sys
import tarfile
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from once import once

ROOT = Path(__file__).parents[1]
PRETRAINED = ROOT / "src" / "primal_attention" / "pretrained"
SCRIPT = """
import torch, primal_attention, importlib.util
assert primal_attention.__file__.startswith({prefix!r}), primal_attention.__file__
for name in ("scipy", "lightning", "pandas", "transformers"):
    assert importlib.util.find_spec(name) is None, name
attn = primal_attention.PrimalAttention(64, 4, rank=8, landmarks=16)
y = attn(torch.randn(2, 50, 64))
(y.square().mean() + primal_attention.ksvd_loss(attn)).backward()
assert y.shape == (2, 50, 64) and attn.w_e.grad.isfinite().all()
"""


def run(command: list[str | Path], **keywords: object) -> str:
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [str(part) for part in command], env=clean, capture_output=True, text=True, timeout=120, **keywords
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def requirements(name: str, seen: dict[str, metadata.Distribution]) -> dict[str, metadata.Distribution]:
    """An installed package and all that it requires on this machine, by name."""
    distribution = metadata.distribution(name)
    if seen.setdefault(name.lower(), distribution) is distribution:
        for line in distribution.requires or ():
            required = Requirement(line)
            is_needed = required.marker is None or required.marker.evaluate({"extra": ""})
            if is_needed and required.name.lower() not in seen:
                requirements(required.name, seen)
    return seen


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel and the sdist."""
    return once(
        tmp_path_factory,
        "built",
        lambda folder: run([sys.executable, "-m", "hatchling", "build", "-d", folder], cwd=ROOT),
    )


def test_the_wheel_works_beside_torch_and_numpy_alone(built: Path, tmp_path: Path) -> None:
    (wheel,) = built.glob("*.whl")
    run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv"])
    python = tmp_path / "venv" / "bin" / "python"
    (site,) = (tmp_path / "venv" / "lib").glob("python*/site-packages")
    # Links instead of an installation of torch: the same packages, in a second instead of minutes.
    for distribution in requirements("numpy", requirements("torch", {})).values():
        for top in {file.parts[0] for file in distribution.files or () if file.parts[0] not in ("..", "__pycache__")}:
            if not (site / top).exists():
                (site / top).symlink_to(Path(str(distribution.locate_file(top))))
    run([sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index", "--quiet", wheel])
    run([python, "-c", SCRIPT.format(prefix=str(tmp_path))], cwd=tmp_path)
    output = run([tmp_path / "venv" / "bin" / "primal", "info"], cwd=tmp_path)
    assert "torch" in output
    assert "backend" in output


def test_the_sdist_builds_the_same_wheel(built: Path, tmp_path: Path) -> None:
    (sdist,) = built.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path, filter="data")
    (folder,) = tmp_path.iterdir()
    run([sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", tmp_path / "again"], cwd=folder)
    (first,), (second,) = built.glob("*.whl"), (tmp_path / "again").glob("*.whl")
    with zipfile.ZipFile(first) as a, zipfile.ZipFile(second) as b:
        assert {name: a.getinfo(name).CRC for name in a.namelist()} == {n: b.getinfo(n).CRC for n in b.namelist()}
        assert "primal_attention/report/page.html.j2" in a.namelist()
        assert "primal_attention/py.typed" in a.namelist()
        weights = {f"primal_attention/pretrained/{file.relative_to(PRETRAINED)}" for file in PRETRAINED.glob("*/*.*")}
        assert weights
        assert weights <= set(a.namelist())
    trained = sum(file.stat().st_size for file in PRETRAINED.rglob("*.safetensors"))
    assert sdist.stat().st_size < 2**20 + trained
