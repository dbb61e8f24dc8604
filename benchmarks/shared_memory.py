"""Compile the kernels for a GPU that this machine may not have, and compare their shared memory with that of the GPU.

    python benchmarks/shared_memory.py 8.9 [--modes landmarks decay] [--json FILE]

Layers run forward and backward on the CPU with Triton's compiler and without launches. This needs a CUDA build of torch
and Triton 3.6, but no GPU. Exit code 1 if a kernel needs more shared memory than the GPU has.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia import driver as nvidia
from triton.runtime import driver

from primal_attention.nn.delta import DeltaPrimalAttention
from primal_attention.nn.primal import PrimalAttention
from primal_attention.ops import primal
from primal_attention.utils.files import write_json
from primal_attention.utils.provenance import collect

BYTES = {"8.0": 166_912, "8.6": 101_376, "8.9": 101_376, "9.0": 232_448, "10.0": 232_448, "12.0": 101_376}  # per block
MODES: dict[str, dict[str, Any]] = {
    "landmarks": {},
    "plain": {"data_dependent": False},
    "two-sided": {"data_dependent": False, "decay": "learned"},
    "mean": {"data_dependent": False, "causal": True},
    "decay": {"data_dependent": False, "causal": True, "decay": "learned"},
    "causal-landmarks": {"causal": True, "max_length": 512},
    "delta": {},
}
WIDTHS = ((32, 16), (64, 30), (64, 96), (96, 48), (128, 64), (128, 128), (256, 64), (256, 256))  # of heads, and ranks


class Utilities:
    """Utilities of a driver of Triton. Loading a kernel records its shared memory; a launch does nothing."""

    def __init__(self) -> None:
        self.shared: dict[str, int] = {}

    def load_binary(self, name: str, kernel: bytes, shared: int, device: int) -> tuple[object, int, int, int, int]:
        self.shared[name] = max(shared, self.shared.get(name, 0))
        return object(), 1, 32, 0, 1024

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": 2**30, "multiprocessor_count": 132, "max_num_regs": 65536, "warpSize": 32}


def replace_device(capability: str) -> Utilities:
    """Replace the device of Triton, torch and the library by a GPU of this compute capability."""
    utilities = Utilities()
    number = int(capability.replace(".", ""))
    fake: Any = SimpleNamespace(
        utils=utilities,
        launcher_cls=nvidia.CudaLauncher,
        get_current_target=lambda: GPUTarget("cuda", number, 32),
        get_current_device=lambda: 0,
        get_current_stream=lambda device: 0,
    )
    driver.set_active(fake)
    nvidia.library_dirs = list
    nvidia.compile_module_from_src = lambda **_: SimpleNamespace(launch=lambda *_: None)
    properties = SimpleNamespace(multi_processor_count=132, shared_memory_per_block_optin=BYTES[capability])
    torch.cuda.get_device_properties = lambda device=None: properties  # type: ignore[assignment,return-value]
    torch.cuda.is_current_stream_capturing = lambda: False
    torch._C._cuda_getCurrentRawStream = lambda device: 0  # type: ignore[attr-defined]
    primal.device_problem = lambda device: None
    return utilities


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("capability", choices=BYTES)
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--json", type=Path, help="also store the numbers")
    args = parser.parse_args()
    warnings.simplefilter("ignore")  # ranks above the head width
    utilities, limit, rows = replace_device(args.capability), BYTES[args.capability], []
    for (width, rank), dtype, mode in itertools.product(WIDTHS, (torch.bfloat16, torch.float32), args.modes):
        utilities.shared.clear()
        settings: dict[str, Any] = {"rank": rank, "dtype": dtype, "backend": "fused", **MODES[mode]}
        layer = (DeltaPrimalAttention if mode == "delta" else PrimalAttention)(2 * width, 2, **settings)
        x = torch.randn(2, 70, 2 * width, dtype=dtype, requires_grad=True)
        try:
            y = layer(x)
        except ValueError as error:  # not supported by the kernels
            print(f"head width {width}, rank {rank}, {dtype}, {mode}: {error}", flush=True)
            continue
        (y.float().sum() + layer.objective.sum()).backward()
        largest = max(utilities.shared.values(), default=0)  # kernels that are new in this layer
        rows.append({"head_dim": width, "rank": rank, "dtype": str(dtype), "mode": mode, "bytes": largest})
        verdict = "TOO LARGE" if largest > limit else "ok"
        print(
            f"head width {width}, rank {rank}, {dtype}, {mode}: {largest:,} of {limit:,} bytes, {verdict}", flush=True
        )
    if args.json:
        command = f"python benchmarks/shared_memory.py {args.capability}"
        origin = collect(command=command, device=torch.device("cpu"))
        write_json(args.json, {**origin, "capability": args.capability, "limit": limit, "rows": rows})
    return int(any(row["bytes"] > limit for row in rows))


if __name__ == "__main__":
    sys.exit(main())
