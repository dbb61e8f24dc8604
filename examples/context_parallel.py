"""One sequence over two processes: each holds half of the tokens and computes its half of the output.

    pip install -e .
    python examples/context_parallel.py

The processes exchange landmark rows and energies, whose size does not depend on the length of the sequence. Outputs and
gradients equal those of one process. The script starts two CPU processes with gloo; on GPUs start it with torchrun, use
nccl and `init_device_mesh("cuda", ...)`. PRIMAL_SMALL=1 uses a shorter sequence.
"""

from __future__ import annotations

import os
import tempfile

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from primal_attention import PrimalAttention, context_parallel, ksvd_loss
from primal_attention.parallel import average_gradients, shard, unshard

RANKS = 2
LENGTH = 1_001 if os.environ.get("PRIMAL_SMALL") else 20_001  # need not be divisible by the number of ranks


class Block(nn.Module):
    """A pre-LN block: attention mixes tokens, the MLP works on each token by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(32)
        self.attention = PrimalAttention(32, 4, rank=6, landmarks=20)
        self.mlp = nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm(x))
        return x + self.mlp(x)


def make_model_and_input() -> tuple[nn.Module, Tensor]:
    """The same on every rank, because the seed is the same."""
    torch.manual_seed(0)
    model = nn.Sequential(Block(), Block()).double()
    return model, torch.randn(1, LENGTH, 32, dtype=torch.float64)


def loss_of(model: nn.Module, y: Tensor) -> Tensor:
    """A loss of the complete sequence, the same on all of its ranks."""
    return y.square().mean() + 0.1 * ksvd_loss(model)


def run(rank: int, store: str) -> None:
    """One process: train one step on its shard and compare with one process."""
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    mesh = init_device_mesh("cpu", (RANKS,))

    model, x = make_model_and_input()
    context_parallel(model, mesh)  # in place
    y_shard = model(shard(x, mesh))
    print(f"rank {rank}: {y_shard.shape[1]:,} of {LENGTH:,} tokens")
    y = unshard(y_shard, mesh)
    loss_of(model, y).backward()
    average_gradients(model, mesh)  # DDP and FSDP2 do the same

    if rank == 0:
        single, x = make_model_and_input()
        expected = single(x)
        loss_of(single, expected).backward()
        pairs = zip(model.parameters(), single.parameters(), strict=True)
        gradients = max((a.grad - b.grad).abs().max().item() for a, b in pairs)
        outputs = (y - expected).abs().max().item()
        print(f"largest difference to one process: outputs {outputs:.0e}, gradients {gradients:.0e}")
        assert outputs < 1e-12
        assert gradients < 1e-12
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(run, args=(f"{folder}/store",), nprocs=RANKS)
