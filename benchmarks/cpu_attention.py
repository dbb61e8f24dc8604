"""Time one attention layer on a CPU: the CPU backend, the equations, the authors' implementation and SDPA.

    python benchmarks/cpu_attention.py                       # two threads, 8192 tokens in sequences of N = 256 … 8192
    python benchmarks/cpu_attention.py --lengths 1024 --rounds 50 --threads 4 --dropout 0.1
    python benchmarks/cpu_attention.py --busy                # one thread, CPU time: for a machine under other load

A step is forward and backward of the layer with its projections, with gradients to x and all parameters, in float32.
The Primal layers include the KSVD loss. SDPA is F.scaled_dot_product_attention between two nn.Linear. The
implementations take turns in every round and the fastest round counts. Implementations of the same layer must agree
before they are timed. Bytes saved are the distinct storages that autograd holds between forward and backward, without
the parameters.
"""

from __future__ import annotations

import argparse
import os
import platform
import time
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.benchmark import Timer, timer

from primal_attention import PrimalAttention, ksvd_loss


class SoftmaxAttention(nn.Module):
    """One projection to q, k, v, PyTorch's fused attention, one output projection."""

    def __init__(self, embed_dim: int, num_heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = num_heads, dropout
        self.qkv = nn.Linear(embed_dim, 3 * embed_dim)
        self.out = nn.Linear(embed_dim, embed_dim)

    def forward(self, x: Tensor) -> tuple[Tensor]:
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, dim=-1))
        mixed = F.scaled_dot_product_attention(q, k, v, dropout_p=self.dropout)
        return (self.out(mixed.transpose(1, 2).flatten(2)),)


class AuthorsAttention(nn.Module):
    """The operations of the authors' implementation, on the parameters of a PrimalAttention."""

    def __init__(self, layer: PrimalAttention) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        layer = self.layer
        q, k = layer.qk_proj(x).chunk(2, dim=-1)
        x_h, q, k = (t.unflatten(-1, (layer.num_heads, -1)).transpose(1, 2) for t in (x, q, k))  # (B, H, N, p)
        if layer.causal:
            count = torch.arange(1, x.shape[1] + 1)[:, None]
            q, k = q.cumsum(dim=2) / count, k.cumsum(dim=2) / count
        q, k = F.normalize(q, dim=-1), F.normalize(k, dim=-1)
        if layer.data_dependent:
            rows = x_h[:, :, torch.linspace(0, x.shape[1] - 1, layer.landmarks, dtype=torch.int64)]
            w_e_x, w_r_x = (torch.einsum("bhnp,hns->bhps", rows, w) for w in (layer.w_e, layer.w_r))
            e, r = torch.einsum("bhnp,bhps->bhns", q, w_e_x), torch.einsum("bhnp,bhps->bhns", k, w_r_x)
        else:
            e, r = torch.einsum("bhnp,hps->bhns", q, layer.w_e), torch.einsum("bhnp,hps->bhns", k, layer.w_r)
        heads = layer.score_proj(F.dropout(torch.cat([e, r], dim=-1), layer.dropout))
        y = layer.out_proj(heads.transpose(1, 2).flatten(2))
        root = layer.sqrt_lambda[None, :, None]
        energies = ((e * root).square().sum(-1) + (r * root).square().sum(-1)).mean((1, 2)) / 2
        return y, (energies - (layer.w_e * layer.w_r).sum((-2, -1)).mean()).square().mean()


class PrimalBackend(nn.Module):
    """A PrimalAttention with one of its backends."""

    def __init__(self, layer: PrimalAttention, backend: str) -> None:
        super().__init__()
        self.layer, self.backend = layer, backend

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        self.layer.backend = self.backend  # type: ignore[assignment]
        return self.layer(x), ksvd_loss(self.layer)


class Result(NamedTuple):
    seconds: float
    bytes_saved: int


def implementations(args: argparse.Namespace) -> dict[str, nn.Module]:
    mode = {"data_dependent": False, "causal": True} if args.causal else {}
    layer = PrimalAttention(
        args.width, args.heads, rank=args.rank, landmarks=args.landmarks, dropout=args.dropout, **mode
    )
    return {
        "SDPA": SoftmaxAttention(args.width, args.heads, args.dropout),
        "authors": AuthorsAttention(layer),
        "reference": PrimalBackend(layer, "reference"),
        "cpu": PrimalBackend(layer, "cpu"),
    }


def run_step(module: nn.Module, x: Tensor, grad: Tensor) -> tuple[Tensor, ...]:
    for tensor in (x, *module.parameters()):
        tensor.grad = None
    outputs: tuple[Tensor, ...] = module(x)
    torch.autograd.backward(outputs, [grad, *[None] * (len(outputs) - 1)])
    return outputs


def count_bytes_saved(module: nn.Module, x: Tensor) -> int:
    parameters = {p.untyped_storage().data_ptr() for p in module.parameters()}
    sizes: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            sizes[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        outputs = module(x)  # keep the graph until the sum, so that no address is reused
    total = sum(sizes.values())
    del outputs
    return total


def check_agreement(modules: dict[str, nn.Module], x: Tensor, grad: Tensor) -> None:
    """Raise unless outputs, loss and all gradients agree, as RMS(error) / RMS(value)."""
    results = {}
    for name in ("authors", "reference", "cpu"):
        outputs = run_step(modules[name], x, grad)
        results[name] = [*outputs, x.grad, *(p.grad for p in modules[name].parameters())]
    for name, tensors in results.items():
        for ours, expected in zip(tensors, results["reference"], strict=True):
            ratio = ((ours - expected).square().mean().sqrt() / expected.square().mean().sqrt()).item()
            if not ratio < 1e-4:
                raise SystemExit(f"{name} differs from the equations (RMS error ratio {ratio:.1e}): not timed")


def measure(length: int, args: argparse.Namespace) -> dict[str, Result]:
    torch.manual_seed(0)
    shape = (max(args.tokens // length, 1), length, args.width)
    x, grad = torch.randn(shape, requires_grad=True), torch.randn(shape)
    modules = implementations(args)
    if not args.dropout:
        check_agreement(modules, x, grad)
    clock: Callable[[], float] = time.thread_time if args.busy else timer
    timers = {
        name: Timer(
            "run_step(module, x, grad)",
            timer=clock,
            globals={"run_step": run_step, "module": module, "x": x, "grad": grad},
            num_threads=args.threads,
        )
        for name, module in modules.items()
    }
    best = dict.fromkeys(timers, float("inf"))
    for _ in range(args.rounds):
        for name, each in timers.items():
            best[name] = min(best[name], each.timeit(1).mean)  # timeit runs once before it measures
    return {name: Result(best[name], count_bytes_saved(module, x)) for name, module in modules.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[256, 512, 1024, 2048, 4096, 8192])
    parser.add_argument("--tokens", type=int, default=8192, help="tokens of a step; the batch is tokens / length")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--rank", type=int, default=30)
    parser.add_argument("--landmarks", type=int, default=300)
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--causal", action="store_true", help="time the causal data-independent mode")
    parser.add_argument("--busy", action="store_true", help="measure the CPU time of one thread instead of wall time")
    args = parser.parse_args()
    if args.busy:
        args.threads = 1
    torch.set_num_threads(args.threads)
    print(
        f"torch {torch.__version__}, {platform.machine()}, {args.threads} of {os.cpu_count()} cores; "
        f"{args.tokens} tokens, d {args.width}, H {args.heads}, rank {args.rank}, landmarks {args.landmarks}, "
        f"dropout {args.dropout}; best of {args.rounds}" + ("; CPU time of one thread\n" if args.busy else "\n")
    )
    columns = ("N", "SDPA ms", "authors ms", "reference ms", "cpu ms", "authors ÷ cpu", "bytes saved ÷ SDPA's")
    print("| " + " | ".join(columns) + " |")
    print("|---" * len(columns) + "|")
    for length in args.lengths:
        results = measure(length, args)
        times = " | ".join(f"{result.seconds * 1e3:.1f}" for result in results.values())
        ratio = results["authors"].seconds / results["cpu"].seconds
        saved = results["cpu"].bytes_saved / results["SDPA"].bytes_saved
        print(f"| {length} | {times} | {ratio:.2f} | {saved:.3f} |", flush=True)


if __name__ == "__main__":
    main()
