"""`primal info`: versions, devices, the backend that "auto" uses here and why not another, installed extras."""

from __future__ import annotations

import platform
import re
from collections.abc import Sequence

from primal_attention.cli.flags import Parser
from primal_attention.utils.errors import EXTRAS, PACKAGES
from primal_attention.utils.provenance import cpu_name, installed

RANK, WIDTH, TOKENS = 30, 512, 1024  # of a layer that is large enough for a fast path


def main(args: Sequence[str]) -> int:
    Parser("info").parse_args(args)
    import torch

    from primal_attention import __version__

    print(f"primal-attention {__version__}, Python {platform.python_version()}, {platform.platform()}")
    print(f"torch {torch.__version__}, triton {installed('triton') or 'not installed'}")
    print(f"  cpu     {cpu_name()}, threads: {torch.get_num_threads()}")
    devices = [f"cuda:{i}" for i in range(torch.cuda.device_count())]
    for device in devices:
        gpu = torch.cuda.get_device_properties(device)
        size = f"{gpu.total_memory / 1024**3:.0f} GiB"
        print(f"  {device}  {gpu.name}, {size}, compute capability {gpu.major}.{gpu.minor}")
    print('backend="auto" uses', *(line for device in ("cpu", *devices) for line in backends(device)), sep="\n")
    print("extras, installed by pip install 'primal-attention[EXTRA]'")
    for extra, modules in EXTRAS.items():
        # "gymnasium[mujoco]" installs two packages
        names = [module if module in ("gymnasium", "mujoco") else PACKAGES[module][0] for module in modules.split()]
        states = [f"{name} {installed(name) or 'missing'}" for name in names]
        print(f"  [{extra}] {', '.join(states)}")
    return 0


def backends(device: str) -> list[str]:
    """Return one line per mode: the backend of "auto" on this device, and why the fast ones are not used."""
    import torch

    from primal_attention.ops.feature_maps import COSINE
    from primal_attention.ops.primal import choose_backend
    from primal_attention.ops.types import Mode, Weights

    x = torch.empty(1, TOKENS, WIDTH, device=device, dtype=torch.float32 if device == "cpu" else torch.bfloat16)
    w = torch.empty(8, 0, RANK)
    weights = Weights(w, None, w, w, w, None, w, None)
    modes = {
        "not causal": Mode(heads=8, landmarks=300),
        "causal": Mode(heads=8, landmarks=300, data_dependent=False, causal=True),
        "causal, data-dependent": Mode(heads=8, landmarks=300, causal=True, max_length=1024),
    }
    lines = []
    for name, mode in modes.items():
        chosen = choose_backend("auto", x, weights, mode, COSINE)
        reasons = []
        for backend in ("cpu", "fused"):
            try:
                choose_backend(backend, x, weights, mode, COSINE)
            except ValueError as error:
                reasons.append(f"not {backend}: {re.sub('^.*this call: | [(]backend=.auto.*$', '', str(error))}")
        lines.append(f"  {device:<7} {name:<23} {chosen:<10} {'; '.join(reasons)}")
    return lines
