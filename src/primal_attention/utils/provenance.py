"""Where a number comes from: command, commit, date, versions, device and a hash of the data."""

from __future__ import annotations

import datetime
import hashlib
import importlib.metadata
import os
import platform
import re
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

OTHER_PACKAGES = ("numpy", "flash-linear-attention", "fla-core", "flash-attn-4")  # listed if they are installed


def collect(
    *,
    command: str | None,
    device: torch.device | None = None,
    commit: str | None = None,
    data_sha256: str | None = None,
) -> dict[str, Any]:
    """Return the provenance of a measurement, as plain values for JSON or YAML.

    Args:
        command: The command line that made the number; None for a call from Python.
        device: Where it ran; adds the field "hardware".
        commit: Commit of the code where git is not available, marked as `"commit_source": "argument"`.
        data_sha256: Hash of the data that was read; None if nothing was read.
    """
    date = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    origin = {"date": date, "command": command, **code_version(commit), "versions": versions()}
    if device is not None:
        origin["hardware"] = hardware(device)
    return {**origin, "data_sha256": data_sha256}


def code_version(commit: str | None = None) -> dict[str, Any]:
    """Return the commit of this source tree, whether files differ from it, and the source of both; None is unknown."""
    if commit is not None:
        return {"commit": commit, "dirty": None, "commit_source": "argument"}

    def git(*words: str) -> str:
        here = Path(__file__).parent
        done = subprocess.run(["git", *words], cwd=here, capture_output=True, text=True, check=True, timeout=10)
        return done.stdout.strip()

    try:
        git("ls-files", "--error-unmatch", Path(__file__).name)  # fails if this file is in another repository
        dirty = bool(git("status", "--porcelain", "--", ".."))
        return {"commit": git("rev-parse", "HEAD") + "-changed" * dirty, "dirty": dirty, "commit_source": "git"}
    except (OSError, subprocess.SubprocessError):
        return {"commit": None, "dirty": None, "commit_source": None}


def versions() -> dict[str, str | None]:
    """Return the versions of Python, torch, CUDA and packages; None is not installed."""
    import torch

    from primal_attention import __version__

    facts: dict[str, str | None] = {"primal-attention": __version__, "python": platform.python_version()}
    facts |= {"torch": str(torch.__version__), "cuda": torch.version.cuda}
    facts |= {name: installed(name) for name in ("triton", "lightning")}
    return facts | {name: version for name in OTHER_PACKAGES if (version := installed(name)) is not None}


def installed(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def hardware(device: torch.device) -> dict[str, Any]:
    import torch

    facts: dict[str, Any] = {
        "device": device.type,
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "load_before": round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,  # of the last minute
    }
    if device.type == "cuda":
        gpu = torch.cuda.get_device_properties(device)
        facts |= {
            "gpu": gpu.name,
            "gpu_memory_bytes": gpu.total_memory,
            "compute_capability": f"{gpu.major}.{gpu.minor}",
            "tf32": torch.backends.cuda.matmul.allow_tf32,
        }
    return facts


def device_name(hardware: dict[str, Any]) -> str:
    threads = hardware["threads"]
    return hardware.get("gpu") or f"{hardware['cpu']}, {threads} thread{'' if threads == 1 else 's'}"


def cpu_name() -> str:
    try:
        names = re.findall(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    except OSError:
        names = []
    return names[0].strip() if names else platform.processor() or platform.machine()


def hash_files(files: Iterable[Path]) -> str:
    """Return one SHA-256 of the names and contents of files, whatever their order and folder."""
    lines = [f"{file.name}\0{hash_file(file)}\n" for file in sorted(files, key=lambda file: file.name)]
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def hash_file(file: Path | str) -> str:
    """Return the SHA-256 of a file's content."""
    digest = hashlib.sha256()
    with open(file, "rb") as content:
        while block := content.read(2**20):
            digest.update(block)
    return digest.hexdigest()
