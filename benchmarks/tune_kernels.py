"""Time each score kernel alone over block sizes, warps and pipeline stages, to choose `ops/kernels/config.py` from.

    python benchmarks/tune_kernels.py                    # d 512, 8 heads, rank 30, 65,536 rows of bf16, one sequence
    python benchmarks/tune_kernels.py --length 256       # as 256 sequences

Needs a GPU. Prints the fastest settings of each kernel with the bytes that it must move at the least.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from itertools import product

import torch
import triton

from primal_attention.ops.kernels import config, running, scan, scores, sequences

ROWS, HEADS, WIDTH, RANK, STORED = 65536, 8, 64, 30, 32


def microseconds(work: Callable[[], object]) -> float:
    return 1e3 * triton.testing.do_bench(work, warmup=3, rep=15, return_mode="median")


def best(name: str, bytes_moved: int, trials: dict[tuple[int, ...], Callable[[], object]]) -> None:
    """One line: the three fastest settings, and the time that the bytes alone would take at 4.3 TB/s."""
    found = {}
    for setting, work in trials.items():
        try:
            found[setting] = microseconds(work)
        except Exception as error:  # a setting that does not compile or fit is not a candidate
            print(f"  {name} {setting}: {type(error).__name__}")
    fastest = sorted(found.items(), key=lambda item: item[1])[:3]
    shown = "   ".join(f"{setting}: {time:.1f}" for setting, time in fastest)
    print(f"{name:18s} bytes alone {bytes_moved / 4.3e6:6.1f} µs   (block, warps, stages): {shown}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--length", type=int, default=ROWS)
    length = parser.parse_args().length
    device, half = torch.device("cuda", torch.cuda.current_device()), torch.bfloat16
    seqs = sequences.uniform(ROWS // length, length, device)
    batch, chunks = ROWS // length, seqs.chunk_start.shape[0]
    qk = torch.randn(ROWS, 2 * HEADS * WIDTH, device=device, dtype=half)
    wx = 0.1 * torch.randn(batch, HEADS, 2, WIDTH, STORED, device=device)
    grad_scores = torch.randn(ROWS, HEADS, 2, STORED, device=device, dtype=half)
    grad_energy = torch.rand(batch, HEADS, 2, STORED, device=device)
    kept, energy = scores.scores_forward(qk, wx, seqs, RANK, True)
    grad_qk, grad_wx, grad_bias = scores.scores_backward(qk, wx, grad_scores, grad_energy, seqs, RANK, True)
    tables = (seqs.chunk_sequence, seqs.chunk_start, seqs.chunk_end, wx.stride(0) if batch > 1 else 0)
    grid = (chunks, 2 * HEADS)
    shape = {"HEADS": HEADS, "P": WIDTH, "S": STORED, "RANK": RANK, "BP": 64, "BS": 32, "PRECISION": "ieee"}
    settings = list(product((32, 64, 128), (1, 2, 4, 8), (1, 2, 3, 4)))

    def launch(kernel: object, *args: object, **fixed: object) -> Callable[[int, int, int], Callable[[], object]]:
        return lambda block, warps, stages: (
            lambda: kernel[grid](*args, **shape, **fixed, BT=block, num_warps=warps, num_stages=stages)  # type: ignore[index]
        )

    forward = launch(scores._scores, qk, wx, kept, energy, *tables, NS=1)
    best("scores", qk.nbytes + kept.nbytes, {setting: forward(*setting) for setting in settings})
    back = launch(scores._scores_backward, qk, wx, grad_scores, grad_energy, grad_qk, grad_wx, grad_bias, *tables)
    moved = 2 * qk.nbytes + grad_scores.nbytes
    best("scores backward", moved, {setting: back(*setting) for setting in settings if setting[0] < 128})

    plan = scan.Plan(qk, wx[:1], None, seqs, RANK, config.running_tiles(half, WIDTH, RANK))
    _, _, carries = running.running_forward(qk, wx[:1], None, seqs, RANK, True)
    sums, none = plan.sums(), plan.sums(0)
    where = (plan.rate, *tables[:3])
    causal = {"NS": 1, "DECAY": False, "FINE": "tf32"}
    trials = [setting for setting in settings if setting[0] == 32]
    forward = launch(running._running_scores, qk, wx, carries, kept, energy, plan.rate, *tables[1:3], **causal)
    best("running scores", qk.nbytes + kept.nbytes, {setting: forward(*setting) for setting in trials})
    given = (qk, wx, carries, grad_scores, grad_energy, grad_qk, none, sums, grad_wx, *where)
    back = launch(running._adjoint_sums, *given, BLOCKS=plan.blocks, **causal)
    best("adjoint sums", moved, {setting: back(*setting) for setting in trials})


if __name__ == "__main__":
    main()
