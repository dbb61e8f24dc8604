"""Compile the C sources for this processor, once, into the user's cache folder."""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from contextlib import suppress
from pathlib import Path

SOURCES = Path(__file__).parent
FLAGS = ("-O3", "-fPIC", "-fopenmp", "-fno-math-errno", "-fno-trapping-math", "-std=gnu11")
TARGETS = ("-march=native", "-mcpu=native")  # a compiler knows the first or the second, by the processor
SECONDS = 120  # a compiler that needs more is stuck: it takes two or three


class BuildError(Exception):
    """Why there is no library, in one line."""


def built(real: str) -> Path:
    """The library for numbers of the C type `real`; compiled now unless it is in the cache."""
    compiler = _compiler()
    path = _folder() / f"lean-{real}-{_key(compiler)}.so"
    if not path.exists():
        _compile(compiler, real, path)
    return path


def _compiler() -> str:
    asked = os.environ.get("CC", "")
    names = [asked] if asked else ["cc", "gcc", "clang"]
    found = next((path for name in names if (path := shutil.which(name))), None)
    if found is None:
        raise BuildError(f"no C compiler ({' or '.join(names)}) on the path")
    return found


def _folder() -> Path:
    """<cache>/primal-attention/native, or a folder of this process alone where that cannot be written."""
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    folder = Path(home) / "primal-attention" / "native"
    with suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
    return folder if os.access(folder, os.W_OK) else Path(tempfile.mkdtemp(prefix="primal-attention-"))


def _key(compiler: str) -> str:
    """All that the result depends on: the sources, the compiler, the flags and the processor."""
    digest = hashlib.sha256()
    for source in sorted(SOURCES.glob("*.[ch]")):
        digest.update(source.read_bytes())
    real = Path(compiler).resolve()
    told = (str(real), str(real.stat().st_mtime_ns), *FLAGS, *TARGETS, platform.machine(), _processor())
    digest.update("\0".join(told).encode())
    return digest.hexdigest()[:16]


def _processor() -> str:
    """What the system says of the processor and its instructions."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:  # not Linux
        return platform.processor()
    kinds = ("model name", "flags", "Features", "CPU part")
    return "\n".join(sorted({line for line in lines if line.startswith(kinds)}))


def _compile(compiler: str, real: str, path: Path) -> None:
    """Into a folder of its own first, then to its place in one step: processes may compile at the same time."""
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        code, library = Path(folder, "lean.o"), Path(folder, "lean.so")
        compiled = [compiler, *FLAGS, f"-DREAL={real}", "-c", str(SOURCES / "lean.c"), "-o", str(code)]
        for target in TARGETS:
            if (error := _run([*compiled, target])) is None:
                break
        # Linked without -fopenmp: the threads are to be those of the OpenMP that PyTorch has already loaded.
        error = error or _run([compiler, "-shared", str(code), "-o", str(library), "-lm"])
        if error is not None:
            raise BuildError(f"{Path(compiler).name} failed: {error}")
        os.replace(library, path)


def _run(command: list[str]) -> str | None:
    """None, or the first line that says what went wrong."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
    except (OSError, subprocess.SubprocessError) as error:
        return str(error)
    if done.returncode == 0:
        return None
    lines = [line for line in done.stderr.splitlines() if "error" in line.lower()] or done.stderr.splitlines()
    return lines[0].strip() if lines else f"exit status {done.returncode}"
