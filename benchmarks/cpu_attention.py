"""One attention layer on a CPU: Primal-Attention's lean path against SDPA and against the published way of computing.

    python benchmarks/cpu_attention.py                       # two threads, N = 256 … 8192
    python benchmarks/cpu_attention.py --lengths 1024 --rounds 50 --threads 4
    python benchmarks/cpu_attention.py --busy                # one thread, CPU time: on a machine that others use too

Forward + backward of the layer with its projections, gradients to x and to all parameters, float32; the Primal layers
also carry the KSVD loss. SDPA is F.scaled_dot_product_attention between two nn.Linear. Contenders take turns within
every round, so that whatever else the machine does hits all of them alike, and the fastest of the rounds counts.
Before anything is timed, the layers that compute the same thing must agree. "Products" are the layer's six large matrix
products alone (q and k, the folded output map, and two gradients of each), as torch.mm computes them and as the lean
path has them computed (primal_attention.ops.lean.products): the second is what it can at best come down to. "Bytes
kept" are the distinct storages that autograd holds between forward and backward, parameters not counted.
"""

from __future__ import annotations

import argparse
import os
import platform
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.benchmark import Timer, timer

from primal_attention import PrimalAttention, ksvd_loss
from primal_attention.ops.lean.products import add_product


class SoftmaxAttention(nn.Module):
    """The baseline: one projection to q, k, v, PyTorch's fused attention, one projection out."""

    def __init__(self, embed_dim: int, num_heads: int) -> None:
        super().__init__()
        self.heads = num_heads
        self.qkv = nn.Linear(embed_dim, 3 * embed_dim)
        self.out = nn.Linear(embed_dim, embed_dim)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, dim=-1))
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class PublishedAttention(nn.Module):
    """Primal-Attention operation by operation, as research code writes it, on the parameters of a PrimalAttention."""

    def __init__(self, layer: PrimalAttention) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        layer = self.layer
        q, k = layer.qk_proj(x).chunk(2, dim=-1)
        x_h, q, k = (t.unflatten(-1, (layer.num_heads, -1)).transpose(1, 2) for t in (x, q, k))  # (B, H, N, p)
        q, k = F.normalize(q, dim=-1), F.normalize(k, dim=-1)
        rows = x_h[:, :, torch.linspace(0, x.shape[1] - 1, layer.landmarks, dtype=torch.int64)]
        w_e_x = torch.einsum("bhnp,hns->bhps", rows, layer.w_e)
        w_r_x = torch.einsum("bhnp,hns->bhps", rows, layer.w_r)
        e, r = torch.einsum("bhnp,bhps->bhns", q, w_e_x), torch.einsum("bhnp,bhps->bhns", k, w_r_x)
        heads = layer.score_proj(torch.cat([e, r], dim=-1))
        y = layer.out_proj(heads.transpose(1, 2).flatten(2))
        root = layer.sqrt_lambda[None, :, None]
        energies = ((e * root).square().sum(-1) + (r * root).square().sum(-1)).mean((1, 2)) / 2
        return y, energies - (layer.w_e * layer.w_r).sum((-2, -1)).mean()


class Products:
    """The six large products of a step, and nothing between them."""

    def __init__(self, args: argparse.Namespace, multiply: Callable[[Tensor, Tensor], Tensor]) -> None:
        self.w_qk = torch.randn(2 * args.width, args.width)
        self.w_out = torch.randn(args.width, args.heads * 2 * args.rank)
        self.multiply = multiply  # a bᵀ

    def step(self, x: Tensor, grad: Tensor) -> None:
        with torch.no_grad():
            x, grad, times = x[0], grad[0], self.multiply
            qk = times(x, self.w_qk)
            scores = qk.new_zeros(len(x), self.w_out.shape[1])
            _ = times(scores, self.w_out), times(grad, self.w_out.t()), times(scores.t(), grad.t())
            _ = times(qk, self.w_qk.t()), times(qk.t(), x.t())


@dataclass
class Contender:
    name: str
    module: nn.Module
    forward: Callable[[Tensor], tuple[Tensor, ...]]  # y, and the objective where there is one

    def step(self, x: Tensor, grad: Tensor) -> None:
        """One forward and backward."""
        for tensor in (x, *self.module.parameters()):
            tensor.grad = None
        outputs = self.forward(x)
        torch.autograd.backward(outputs, [grad] + [None] * (len(outputs) - 1))

    def bytes_kept(self, x: Tensor) -> int:
        parameters = {p.untyped_storage().data_ptr() for p in self.module.parameters()}
        kept: dict[int, int] = {}

        def note(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in parameters:
                kept[storage.data_ptr()] = storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            outputs = self.forward(x)  # alive until here, or a storage freed early could lend its address to another
        del outputs
        return sum(kept.values())


def contenders(args: argparse.Namespace) -> list[Contender]:
    softmax = SoftmaxAttention(args.width, args.heads)
    lean = PrimalAttention(args.width, args.heads, rank=args.rank, landmarks=args.landmarks, backend="lean")
    published = PublishedAttention(lean)

    def lean_forward(x: Tensor) -> tuple[Tensor, ...]:
        return lean(x), ksvd_loss(lean)

    def published_forward(x: Tensor) -> tuple[Tensor, ...]:
        y, j = published(x)
        return y, j.square().mean()

    return [
        Contender("SDPA", softmax, lambda x: (softmax(x),)),
        Contender("published", published, published_forward),
        Contender("lean", lean, lean_forward),
    ]


def check(published: Contender, lean: Contender, x: Tensor, grad: Tensor) -> None:
    """Refuse to time what is wrong: outputs, loss and every gradient, as RMS(error) / RMS(value)."""
    results = []
    for contender in (published, lean):
        contender.step(x, grad)
        grads = [p.grad for p in contender.module.parameters()]
        results.append([*contender.forward(x), x.grad, *grads])
    for ours, theirs in zip(*reversed(results), strict=True):
        ratio = ((ours - theirs).square().mean().sqrt() / theirs.square().mean().sqrt()).item()
        if not ratio < 1e-4:
            raise SystemExit(f"lean and published disagree (RMS error ratio {ratio:.1e}): nothing was timed")


def measure(length: int, args: argparse.Namespace) -> tuple[dict[str, float], dict[str, int]]:
    """Seconds and bytes kept of every contender."""
    torch.manual_seed(0)
    x, grad = torch.randn(1, length, args.width, requires_grad=True), torch.randn(1, length, args.width)
    entered = contenders(args)
    check(entered[1], entered[2], x, grad)
    clock = time.thread_time if args.busy else timer
    steps = {c.name: c.step for c in entered}
    steps["products by torch"] = Products(args, lambda a, b: torch.mm(a, b.t())).step
    steps["products"] = Products(args, lambda a, b: add_product(None, a, b)).step
    timers = {
        name: Timer("step(x, grad)", timer=clock, globals={"step": s, "x": x, "grad": grad}, num_threads=args.threads)
        for name, s in steps.items()
    }
    best = dict.fromkeys(timers, float("inf"))
    for _ in range(args.rounds):
        for name, each in timers.items():
            best[name] = min(best[name], each.timeit(1).mean)  # one unmeasured run comes first
    return best, {c.name: c.bytes_kept(x) for c in entered}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[256, 512, 1024, 2048, 4096, 8192])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--rank", type=int, default=30)
    parser.add_argument("--landmarks", type=int, default=300)
    parser.add_argument("--busy", action="store_true", help="measure the CPU time of one thread instead of wall time")
    args = parser.parse_args()
    if args.busy:
        args.threads = 1
    torch.set_num_threads(args.threads)
    print(
        f"torch {torch.__version__}, {platform.machine()}, {args.threads} of {os.cpu_count()} cores; batch 1, "
        f"d {args.width}, H {args.heads}, rank {args.rank}, landmarks {args.landmarks}; best of {args.rounds}"
        + ("; CPU time of one thread\n" if args.busy else "\n")
    )
    columns = (
        "N", "SDPA ms", "published ms", "lean ms", "products by torch ms", "products ms", "SDPA ÷ published",
        "SDPA ÷ lean", "published ÷ lean", "published ÷ products", "bytes kept ÷ SDPA's",
    )  # fmt: skip
    print("| " + " | ".join(columns) + " |")
    print("|---" * len(columns) + "|")
    for length in args.lengths:
        seconds, kept = measure(length, args)
        softmax, published, lean, _, floor = seconds.values()
        times = " | ".join(f"{t * 1e3:.1f}" for t in seconds.values())
        ratios = " | ".join(
            f"{r:.2f}" for r in (softmax / published, softmax / lean, published / lean, published / floor)
        )
        print(f"| {length} | {times} | {ratios} | {kept['lean'] / kept['SDPA']:.3f} |", flush=True)


if __name__ == "__main__":
    main()
