"""`primal info`: what this installation has, which backend "auto" takes here, and the reason against the others."""

from __future__ import annotations

import importlib.metadata
import platform
import re
import shutil
import sys
from collections.abc import Sequence

import torch

from primal_attention.bench.measurement import plain_reason
from primal_attention.cli.bench import Parser
from primal_attention.ops import primal
from primal_attention.ops.feature_maps import COSINE
from primal_attention.ops.types import Mode, Weights
from primal_attention.utils.errors import RunError
from primal_attention.utils.provenance import cpu_name, installed

ABOUT = "Say what this installation has: versions, devices, which backend runs here and why, extras."
MODES = {
    "not causal": Mode(heads=8, landmarks=300),
    "causal": Mode(heads=8, landmarks=300, data_dependent=False, causal=True),
    "causal, data-dependent": Mode(heads=8, landmarks=300, causal=True, max_length=1024),
}
RANK, WIDTH, TOKENS = 30, 512, 1024  # as of a layer that is worth a fast path


def main(args: Sequence[str]) -> int:
    parser = Parser(prog="primal info", description=ABOUT, epilog="Example: primal info")
    try:
        parser.parse_args(list(args))
    except RunError as error:
        print(f"primal: {error}", file=sys.stderr)
        return 2
    print("\n".join([*system(), "", *chosen(), "", *extras()]))
    return 0


def system() -> list[str]:
    from primal_attention import __version__

    threads = torch.get_num_threads()
    lines = [
        f"primal-attention {__version__}, Python {platform.python_version()}, {platform.platform()}",
        f"torch {torch.__version__}, triton {installed('triton') or 'not installed'}",
        f"  cpu     {cpu_name()}, {threads} thread{'s' if threads > 1 else ''}",
    ]
    for i in range(torch.cuda.device_count()):
        gpu = torch.cuda.get_device_properties(i)
        size = f"{gpu.total_memory / 1024**3:.0f} GiB"
        lines.append(f"  cuda:{i}  {gpu.name}, {size}, compute capability {gpu.major}.{gpu.minor}")
    return lines if torch.cuda.device_count() else [*lines, "  no CUDA device"]


def chosen() -> list[str]:
    """What "auto" takes on each device and in each mode, then every backend that cannot serve, and why."""
    devices = ["cpu", *(f"cuda:{i}" for i in range(torch.cuda.device_count()))]
    lines = ['backend="auto" takes']
    for device in devices:
        taken = {name: choose("auto", probe(device), mode) for name, mode in MODES.items()}
        if len(set(taken.values())) == 1:
            lines.append(f"  {device:<7} {taken['not causal']}, in every mode")
        else:
            lines += [f"  {device:<7} {backend:<10} {name}" for name, backend in taken.items()]
        lines += [f"          not {backend}: {reason}" for backend, reason in against(device, set(taken.values()))]
    return lines


def against(device: str, taken: set[str]) -> list[tuple[str, str]]:
    """(backend, reason) for each that "auto" passes over on this device."""
    x = probe(device)
    found = []
    for backend in ("fused", "cpu"):
        if (reason := refusal(backend, x, MODES["not causal"])) is not None:
            found.append((backend, reason))
            continue
        reasons = {name: refusal(backend, x, mode) for name, mode in MODES.items()}
        found += [(f"{backend} ({name})", reason) for name, reason in reasons.items() if reason is not None]
        if backend not in taken:
            found.append((backend, "works when asked for; another one is faster here"))
    if "compiled" not in taken:
        found.append(("compiled", compiled_note(device)))
    return found


def choose(backend: str, x: torch.Tensor, mode: Mode) -> str:
    """Return the backend of a layer with plain maps."""
    weight = torch.empty(mode.heads, 0, RANK)
    weights = Weights(weight, None, weight, weight, weight, None, weight, None)
    return primal.choose_backend(backend, x, weights, mode, COSINE)


def refusal(backend: str, x: torch.Tensor, mode: Mode) -> str | None:
    try:
        choose(backend, x, mode)
    except ValueError as error:
        return plain_reason(str(error))
    return None


def compiled_note(device: str) -> str:
    needed = shutil.which("g++") or shutil.which("c++") or shutil.which("clang++")
    if device == "cpu" and not needed:
        return "torch.compile needs a C++ compiler, and none is on the path"
    if device != "cpu" and not primal.HAS_TRITON:
        return "torch.compile needs Triton, which is not installed"
    return "works when asked for; compiling takes up to a minute at the first call"


def probe(device: str) -> torch.Tensor:
    return torch.empty(1, TOKENS, WIDTH, device=device, dtype=torch.float32 if device == "cpu" else torch.bfloat16)


def extras() -> list[str]:
    """Each extra's packages, by what the installed distribution declares."""
    try:
        declared = importlib.metadata.requires("primal-attention") or []
    except importlib.metadata.PackageNotFoundError:
        return ["extras: unknown, for the package runs from its source folder without being installed"]
    packages: dict[str, list[str]] = {}
    for requirement in declared:
        extra = re.search(r"extra\s*==\s*['\"]([\w-]+)['\"]", requirement)
        name = re.match(r"[\w.-]+", requirement)
        if extra and name and name[0] != "primal-attention":
            packages.setdefault(extra[1], []).append(name[0])
    lines = ["extras"]
    for extra_name, names in packages.items():
        found = [f"{name} {version}" for name in names if (version := installed(name))]
        missing = [name for name in names if not installed(name)]
        state = ", ".join(found) if found else "nothing"
        hint = f"; missing: {', '.join(missing)}" if missing else ""
        lines.append(f"  [{extra_name}] {state}{hint}")
    return [*lines, "pip install 'primal-attention[EXTRA]' brings what is missing"]
