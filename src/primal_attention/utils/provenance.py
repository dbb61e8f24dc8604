"""Where a number comes from: hardware, versions, date, command and commit."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import torch

VERSIONS = ("torch", "triton", "numpy", "flash-linear-attention", "fla-core", "flash-attn-4")


def origin(device: torch.device, command: str | None, commit: str | None = None) -> dict[str, Any]:
    """Everything that a reader needs to repeat a run."""
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "command": command,
        "commit": commit or git_commit(),
        "hardware": hardware(device),
        "versions": versions(),
    }


def hardware(device: torch.device) -> dict[str, Any]:
    found: dict[str, Any] = {
        "device": device.type,
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "load_before": load(),
    }
    if device.type == "cuda":
        gpu = torch.cuda.get_device_properties(device)
        found |= {
            "gpu": gpu.name,
            "gpu_memory_bytes": gpu.total_memory,
            "compute_capability": f"{gpu.major}.{gpu.minor}",
            "tf32": torch.backends.cuda.matmul.allow_tf32,
        }
    return found


def load() -> float | None:
    """Processes that wanted a core in the last minute, this one included."""
    return round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None


def device_name(hardware: dict[str, Any]) -> str:
    threads = hardware["threads"]
    return hardware.get("gpu") or f"{hardware['cpu']}, {threads} thread{'' if threads == 1 else 's'}"


def versions() -> dict[str, str | None]:
    from primal_attention import __version__

    found: dict[str, str | None] = {"primal-attention": __version__, "python": platform.python_version()}
    for package in VERSIONS:
        if (version := installed(package)) is not None:
            found[package] = version
    found["torch"] = torch.__version__  # with the build's suffix
    found["cuda"] = torch.version.cuda
    return found


def installed(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def git_commit() -> str | None:
    """The commit that this source tree stands on, marked where files differ from it; None outside a repository."""

    def git(*words: str) -> str:
        here = Path(__file__).parent
        done = subprocess.run(["git", *words], cwd=here, capture_output=True, text=True, check=True, timeout=10)
        return done.stdout.strip()

    try:
        # An installed package may happen to lie inside somebody else's repository: ours tracks this file.
        git("ls-files", "--error-unmatch", Path(__file__).name)
        return git("rev-parse", "HEAD") + ("-changed" if git("status", "--porcelain", "--", "..") else "")
    except (OSError, subprocess.SubprocessError):
        return None
