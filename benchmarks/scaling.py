"""Predict the time of one layer on a sequence of 100 million tokens, distributed over 1 … 1024 GPUs.

    python benchmarks/scaling.py                      # reads results/bench, writes results/scaling and docs/img

Measured: seconds of one layer (forward and backward) on one GPU against its length, from results/bench/attention*.json.
Counted: the bytes that a layer passes to collectives in a step. Assumed: bandwidth and latency of the network.
Computed: everything else; docs/notes/scaling.md has the formulas.
"""

from __future__ import annotations

import argparse
import json
import math
import shlex
import sys
from pathlib import Path
from typing import Any, NamedTuple

import torch

from primal_attention.utils.files import write_json
from primal_attention.utils.provenance import collect, hash_files

ROOT = Path(__file__).resolve().parents[1]
TOKENS = 100_000_000
GPUS = [2**k for k in range(11)]
MEMORY = 139 * 2**30  # of the GPU that was measured


class Link(NamedTuple):
    """Network link from a rank to the next: bandwidth in bytes per second, latency in seconds."""

    bandwidth: float
    latency: float


NETWORK = Link(50e9, 5e-6)  # assumed: 400 Gbit/s per GPU, 5 µs


def all_reduce_seconds(size: float, ranks: int, link: Link) -> float:
    """A ring: reduce-scatter and all-gather, C − 1 hops of a C-th each."""
    return 2 * (ranks - 1) * (link.latency + size / ranks / link.bandwidth)


def tree_seconds(size: float, ranks: int, link: Link) -> float:
    """Up and down a tree: few hops of everything, better than the ring where messages are small and ranks many."""
    return 2 * math.ceil(math.log2(max(ranks, 1))) * (link.latency + size / link.bandwidth)


def all_gather_seconds(size: float, ranks: int, link: Link) -> float:
    """A ring: C − 1 hops of one rank's piece."""
    return (ranks - 1) * (link.latency + size / link.bandwidth)


def doubling_seconds(size: float, ranks: int, link: Link) -> float:
    """An all-gather by recursive doubling: as many bytes, few hops."""
    return math.ceil(math.log2(max(ranks, 1))) * link.latency + (ranks - 1) * size / link.bandwidth


def counted_bytes(
    ranks: int, embed_dim: int, heads: int, *, rank: int, landmarks: int, dtype: torch.dtype, tokens: int = 512
) -> dict[str, list[int]]:
    """The messages of a layer's step on one of `ranks` ranks, in bytes: a real step among ranks that only pretend."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore
    from torch.utils._python_dispatch import TorchDispatchMode

    from primal_attention import PrimalAttention, context_parallel

    class Messages(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.sizes: dict[str, list[int]] = {"all_reduce": [], "all_gather": []}

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            namespace, name = func._schema.name.split("::")
            if namespace == "_c10d_functional" and name != "wait_tensor" and isinstance(args[0], torch.Tensor):
                kind = name.removesuffix("_into_tensor").removesuffix("_tensor")
                self.sizes.setdefault(kind, []).append(args[0].numel() * args[0].element_size())
            return func(*args, **(kwargs or {}))

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    try:
        layer = PrimalAttention(embed_dim, heads, rank=rank, landmarks=landmarks, dtype=dtype, backend="reference")
        context_parallel(layer, init_device_mesh("cpu", (ranks,)))
        x = torch.randn(1, tokens, embed_dim, dtype=dtype, requires_grad=True)
        with Messages() as messages:
            (layer(x).float().sum() + layer.objective.sum()).backward()  # type: ignore[union-attr]
    finally:
        dist.destroy_process_group()
    return messages.sizes


def read_points(folder: Path, width: int, heads: int) -> dict[str, Any]:
    """Seconds against length of one sequence on one GPU, not causal: the fused layer's and softmax's."""
    points: dict[str, dict[int, Any]] = {"primal-fused": {}, "sdpa": {}}
    for file in sorted(folder.glob("attention*.json")):
        run = json.loads(file.read_text())
        settings = run["settings"]
        if "gpu" not in run["hardware"] or settings["causal"] or settings.get("eager"):
            continue
        for row in run["rows"]:
            fits = row["embed_dim"] == width and row["num_heads"] == heads and row["batch"] == 1
            if row["name"] in points and fits and row["status"] == "ok":
                points[row["name"]][row["length"]] = {**row, "file": file.name, "gpu": run["hardware"]["gpu"]}
                points[row["name"]][row["length"]] |= {"rank": settings["rank"], "landmarks": settings["landmarks"]}
    return points


def brief(rows: dict[int, Any]) -> dict[int, Any]:
    return {length: {key: row[key] for key in ("seconds", "file")} for length, row in rows.items()}


def line_through(points: dict[int, Any]) -> tuple[float, float]:
    """Least squares of a + b·N."""
    n, t = list(points), [row["seconds"] for row in points.values()]
    mean_n, mean_t = sum(n) / len(n), sum(t) / len(t)
    slope = sum((a - mean_n) * (b - mean_t) for a, b in zip(n, t, strict=True)) / sum((a - mean_n) ** 2 for a in n)
    return mean_t - slope * mean_n, slope


def predict(
    ranks: int, fixed: float, per_token: float, per_pair: float, width: int, sent: dict[str, list[int]]
) -> dict[str, float]:
    """Seconds of one layer's step on `ranks` GPUs."""
    tokens, link = TOKENS / ranks, NETWORK
    reduced = sum(min(all_reduce_seconds(s, ranks, link), tree_seconds(s, ranks, link)) for s in sent["all_reduce"])
    gathered = sum(
        min(all_gather_seconds(s, ranks, link), doubling_seconds(s, ranks, link)) for s in sent["all_gather"]
    )
    blocks = 2 * tokens * width * 2  # K and V of a rank in bfloat16; in the backward pass also their gradients
    hops = (ranks - 1) * (link.latency + blocks / link.bandwidth) + ranks * (link.latency + 2 * blocks / link.bandwidth)
    ring_sent = (ranks - 1) * blocks + (ranks * 2 * blocks if ranks > 1 else 0)
    return {
        "gpus": ranks,
        "primal_compute": fixed + per_token * tokens,
        "primal_communication": reduced + gathered if ranks > 1 else 0.0,
        "primal_bytes": float(sum(sent["all_reduce"]) + sum(sent["all_gather"])) if ranks > 1 else 0.0,
        "ring_compute": per_pair * TOKENS * tokens,
        "ring_communication": hops if ranks > 1 else 0.0,
        "ring_bytes": ring_sent,
    }


def plot(rows: list[dict[str, float]], gpu: str, fits: int, file: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    x = [row["gpus"] for row in rows]
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.2), constrained_layout=True)
    primal = [row["primal_compute"] + row["primal_communication"] for row in rows]
    ring = [max(row["ring_compute"], row["ring_communication"]) for row in rows]
    left.plot(x, ring, "s-", color="#b0413e", label="softmax, ring attention")
    left.plot(
        x, [row["ring_communication"] or math.nan for row in rows], "s:", color="#b0413e", label="communication only"
    )
    left.plot(x, primal, "o-", color="#1f5f8b", label="Primal, context parallel")
    left.plot(
        x, [row["primal_communication"] or math.nan for row in rows], "o:", color="#1f5f8b", label="communication only"
    )
    left.axvspan(x[0] / 1.4, fits / 1.2, color="0.9", label="does not fit into memory (Primal)")
    left.set(xscale="log", yscale="log", xlabel="GPUs", ylabel="seconds per layer and step")
    left.set_title(f"100 million tokens, predicted from one {gpu}")
    right.plot(x[1:], [row["ring_bytes"] for row in rows[1:]], "s-", color="#b0413e", label="ring attention")
    right.plot(x[1:], [row["primal_bytes"] for row in rows[1:]], "o-", color="#1f5f8b", label="Primal (counted)")
    right.set(xscale="log", yscale="log", xlabel="GPUs", ylabel="bytes per GPU, layer and step")
    right.set_title("bytes sent by each GPU")
    left.set_ylim(top=left.get_ylim()[1] * 1e3)  # room for the legend above the lines
    for axis in (left, right):
        axis.legend(frameon=False, fontsize=8, ncols=2 if axis is left else 1)
        axis.grid(alpha=0.3)
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=130)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bench", type=Path, default=ROOT / "results" / "bench")
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--heads", type=int, default=8)
    args = parser.parse_args()
    points = read_points(args.bench, args.width, args.heads)
    primal, softmax = points["primal-fused"], points["sdpa"]
    if len(primal) < 2 or not softmax:
        print(
            f"{args.bench} needs GPU rows of primal-fused at two lengths and of sdpa at one, batch 1", file=sys.stderr
        )
        return 2
    fixed, per_token = line_through(primal)
    longest = softmax[max(softmax)]
    per_pair = longest["seconds"] / longest["length"] ** 2
    one = primal[max(primal)]
    sent = counted_bytes(4, args.width, args.heads, rank=one["rank"], landmarks=one["landmarks"], dtype=torch.bfloat16)
    rows = [predict(c, max(fixed, 0.0), per_token, per_pair, args.width, sent) for c in GPUS]
    per_token_bytes = one["peak_bytes"] / one["length"]
    fits = 2 ** math.ceil(math.log2(TOKENS * per_token_bytes / MEMORY))
    sources = {row["file"] for rows in points.values() for row in rows.values()}
    data_sha256 = hash_files(args.bench / name for name in sources)
    result = {
        **collect(command=shlex.join(["python", *sys.argv]), device=torch.device("cpu"), data_sha256=data_sha256),
        "tokens": TOKENS,
        "gpu": one["gpu"],
        "measured": {name: brief(rows) for name, rows in points.items()},
        "fit": {"fixed_seconds": fixed, "seconds_per_token": per_token, "softmax_seconds_per_pair": per_pair},
        "peak_bytes_per_token": per_token_bytes,
        "gpus_for_memory": fits,
        "counted_messages": sent,
        "assumed_link": NETWORK._asdict(),
        "predicted": rows,
    }  # fmt: skip
    file = ROOT / "results" / "scaling" / "scaling.json"
    write_json(file, result)
    plot(rows, one["gpu"], fits, ROOT / "docs" / "img" / "scaling.png")
    print(
        "| GPUs | Primal: compute | Primal: communication | softmax: compute | ring: communication |\n"
        "|---|---|---|---|---|"
    )
    for row in rows:
        cells = ("primal_compute", "primal_communication", "ring_compute", "ring_communication")
        print(f"| {row['gpus']} | " + " | ".join(f"{row[c]:.3g} s" if row[c] else "–" for c in cells) + " |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
