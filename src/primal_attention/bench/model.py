"""`primal bench model`: training steps of whole models, softmax attention (SDPA) and Primal in the same process.

The models are pre-LN encoders with FFNs of width 4d, GELU, AdamW and no dropout. A step is forward, backward and
update. The loss of Primal models includes the KSVD loss. Times are wall times of steps back to back.
"""

from __future__ import annotations

import contextlib
import dataclasses
import statistics
import time
import warnings
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from primal_attention.bench import measurement
from primal_attention.bench.measurement import Row, ratio
from primal_attention.nn.objective import ksvd_loss
from primal_attention.nn.primal import PrimalAttention
from primal_attention.utils.errors import check_name
from primal_attention.utils.progress import Progress

ETA = 0.1
WARMUP = 4  # steps after the first one
LENGTHS = (128, 197, 256, 333, 512, 640, 777, 1024, 1500, 2048)  # of the dynamic row


@dataclass(frozen=True)
class Spec:
    """A row of the table: a model, its input and how it runs."""

    model: str
    embed_dim: int
    num_heads: int
    length: int
    mode: str = "compile"  # or "reduce-overhead", "eager"
    dtype: str = "autocast"  # or "bf16"
    tokens: int = 32768  # per step
    layers: int = 12
    max_batch: int | None = None
    layout: str = "dense"  # or "padded", "packed", "dynamic" (several lengths)
    last_layer_only: bool = False  # the other layers of the Primal model are softmax attention
    primal: dict[str, Any] = field(default_factory=dict)  # keywords of PrimalAttention

    @property
    def name(self) -> str:
        return f"{self.model}-{self.mode}-{self.dtype}"

    @property
    def kinds(self) -> tuple[str, ...]:
        return ("primal",) if self.layout == "dynamic" else ("sdpa", "primal")


DEIT: dict[str, Any] = {"last_layer_only": True, "primal": {"rank": 96, "landmarks": 197}}
DECISION: dict[str, Any] = {
    "layers": 3, "max_batch": 64, "last_layer_only": True,
    "primal": {"rank": 96, "causal": True, "data_dependent": False},
}  # fmt: skip
SPECS = (
    Spec("512x1024", 512, 8, 1024),
    Spec("512x1024", 512, 8, 1024, "compile", "bf16"),
    Spec("512x1024", 512, 8, 1024, "eager", "bf16"),
    Spec("512x1024", 512, 8, 1024, "eager"),
    Spec("512x1024", 512, 8, 1024, "reduce-overhead"),
    Spec("512x4096", 512, 8, 4096),
    Spec("768x8192", 768, 12, 8192),
    *(Spec("vit", 384, 6, 197, mode) for mode in ("compile", "eager")),
    *(Spec("deit", 384, 6, 197, mode, **DEIT) for mode in ("compile", "eager")),
    *(Spec("decision", 256, 4, 60, mode, **DECISION) for mode in ("compile", "eager")),
    *(Spec(layout, 512, 8, 1024, "eager", layout=layout) for layout in ("padded", "packed")),
    Spec("dynamic", 512, 8, LENGTHS[-1], layout="dynamic"),
)


def choose_specs(args: Namespace) -> list[Spec]:
    """Return all rows, or those that `args.rows` names by row or model; few tokens also shorten the sequences."""
    known = dict.fromkeys(name for spec in SPECS for name in (spec.model, spec.name))
    for row in args.rows:
        check_name(row, known, "row")
    chosen = [spec for spec in SPECS if not args.rows or {spec.name, spec.model} & set(args.rows)]
    return [
        dataclasses.replace(s, tokens=args.tokens, layers=args.layers or s.layers, length=min(s.length, args.tokens))
        for s in chosen
    ]


# Models


class SoftmaxAttention(nn.Module):
    """The least that softmax attention needs: one input map, SDPA, one output map."""

    def __init__(self, embed_dim: int, num_heads: int, causal: bool) -> None:
        super().__init__()
        self.num_heads, self.causal = num_heads, causal
        self.in_proj, self.out_proj = nn.Linear(embed_dim, 3 * embed_dim), nn.Linear(embed_dim, embed_dim)

    def forward(self, x: Tensor, attn_mask: Tensor | None = None) -> Tensor:
        q, k, v = self.in_proj(x).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)  # (B, H, N, p)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=attn_mask, is_causal=self.causal)
        return self.out_proj(y.transpose(1, 2).flatten(-2))  # type: ignore[no-any-return]


class Block(nn.Module):
    def __init__(self, spec: Spec, kind: str) -> None:
        super().__init__()
        d, h = spec.embed_dim, spec.num_heads
        self.norm1, self.norm2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.fc1, self.fc2 = nn.Linear(d, 4 * d), nn.Linear(4 * d, d)
        if kind == "sdpa":
            self.attention: nn.Module = SoftmaxAttention(d, h, spec.primal.get("causal", False))
        else:
            self.attention = PrimalAttention(d, h, **{"rank": 30, "landmarks": 300, **spec.primal})

    def forward(self, x: Tensor, keywords: dict[str, Any]) -> Tensor:
        x = x + self.attention(self.norm1(x), **keywords)
        return x + self.fc2(F.gelu(self.fc1(self.norm2(x))))  # type: ignore[no-any-return]


def make_input(spec: Spec, kind: str, device: torch.device, seed: int) -> tuple[Tensor, dict[str, Any], Tensor | None]:
    """Return x, the keywords of the attention layers, and the weight of each token in the loss (None: equal)."""
    n, width = spec.length, spec.embed_dim
    if spec.layout in ("dense", "dynamic"):
        batch = min(max(1, spec.tokens // n), spec.max_batch or spec.tokens)
        return torch.randn(batch, n, width, device=device), {}, None
    # Lengths are uniform in [n/4, n] with the mean 5n/8, and the same for both kinds.
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(max(1, n // 4), n + 1, (max(1, 8 * spec.tokens // (5 * n)),), generator=generator)
    longest = int(lengths.max())
    if spec.layout == "packed" and kind == "primal":
        boundaries = F.pad(lengths.cumsum(0), (1, 0)).to(device, torch.int32)
        x = torch.randn(int(lengths.sum()), width, device=device)
        return x, {"cu_seqlens": boundaries, "max_seqlen": longest}, None
    valid = (torch.arange(longest) < lengths[:, None]).to(device)
    x = torch.randn(len(lengths), longest, width, device=device)
    keywords = {"attn_mask": valid[:, None, None]} if kind == "sdpa" else {"key_padding_mask": ~valid}
    return x, keywords, valid / valid.sum()


def make_step(spec: Spec, kind: str, args: Namespace) -> tuple[Callable[[Tensor], None], Tensor]:
    """Return a training step of a new model, and its input."""
    device: torch.device = args.device
    torch.manual_seed(args.seed)
    dtype = torch.bfloat16 if spec.dtype == "bf16" else torch.float32
    kinds = [kind if not spec.last_layer_only or i == spec.layers - 1 else "sdpa" for i in range(spec.layers)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # rank 96 is above the head width
        model = nn.ModuleList(Block(spec, kind) for kind in kinds).to(device, dtype)
    x, keywords, weight = make_input(spec, kind, device, args.seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=device.type == "cuda")

    def compute_loss(x: Tensor) -> Tensor:
        with torch.autocast(device.type, torch.bfloat16, enabled=spec.dtype == "autocast"):
            for block in model:
                x = block(x, keywords)
            error = x.float().square()
            loss = error.mean() if weight is None else (error.mean(-1) * weight).sum()
            return loss if kind == "sdpa" else loss + ETA * ksvd_loss(model)

    compiled = compute_loss
    if spec.mode != "eager":
        mode, dynamic = spec.mode.replace("compile", "default"), True if spec.layout == "dynamic" else None
        compiled = torch.compile(compute_loss, mode=mode, dynamic=dynamic, backend=args.compiler)

    def step(x: Tensor) -> None:
        if spec.mode == "reduce-overhead":
            torch.compiler.cudagraph_mark_step_begin()
        optimizer.zero_grad(set_to_none=True)
        compiled(x).backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    return step, x.to(dtype)


# Measurement


def time_steps(step: Callable[[Tensor], None], x: Tensor, steps: int = 1) -> float:
    """Return the wall time of one of `steps` steps back to back."""
    synchronize = torch.cuda.synchronize if x.is_cuda else lambda: None
    synchronize()
    start = time.perf_counter()
    for _ in range(steps):
        step(x)
    synchronize()
    return (time.perf_counter() - start) / steps


def measure_steps(step: Callable[[Tensor], None], x: Tensor, args: Namespace) -> Row:
    """Return the wall time; on a GPU also the time it is busy and the peak of a step, parameters included."""
    time_steps(step, x, WARMUP)
    if x.is_cuda:
        torch.cuda.reset_peak_memory_stats()
    row = {"wall_ms": 1e3 * statistics.median(time_steps(step, x, args.steps) for _ in range(args.repeats))}
    if x.is_cuda:
        row["peak_mib"] = torch.cuda.max_memory_allocated() / 2**20
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
            time_steps(step, x)
        row["busy_ms"] = sum(event.self_device_time_total for event in profiler.key_averages()) / 1e3
    return row


def count_graphs(step: Callable[[Tensor], None], x: Tensor) -> Row:
    """Return the number of graphs that Dynamo compiles, and of those after the first step, over ten lengths."""
    from torch._dynamo.utils import counters

    first = counters["stats"]["unique_graphs"]
    for n in LENGTHS[:-1]:
        part = x[:, : max(2, n * x.shape[1] // LENGTHS[-1])]
        step(part.clone(memory_format=torch.contiguous_format))
    graphs = counters["stats"]["unique_graphs"]
    return {"graphs": graphs, "recompilations": graphs - first}


def measure(spec: Spec, kind: str, args: Namespace) -> Row:
    """Return a row of the report; an error becomes a one-line text in it."""
    row: Row = {"name": spec.name, "mode": spec.mode, "dtype": spec.dtype, "kind": kind}
    row |= dict.fromkeys(("wall_ms", "busy_ms", "first_s", "peak_mib", "ratio", "peak_ratio", "error"))
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    measurement.free_memory(args.device)
    on_device = torch.cuda.device(args.device) if args.device.type == "cuda" else contextlib.nullcontext()
    try:
        # At the default limit of recompilations Dynamo stops compiling and counting.
        with on_device, torch._dynamo.config.patch(recompile_limit=64):
            step, x = make_step(spec, kind, args)
            row["first_s"] = time_steps(step, x)
            row |= count_graphs(step, x) if spec.layout == "dynamic" else measure_steps(step, x, args)
    except Exception as error:  # the other rows still run
        row["error"] = ": ".join(measurement.failure(error))
    step = x = None  # type: ignore[assignment]
    torch._dynamo.reset()
    measurement.free_memory(args.device)
    return row


def run(args: Namespace) -> dict[str, Any]:
    """Measure all rows and return the report, which is also written to `args.file` after each of them.

    Args:
        args: the flags of `primal bench model`.
    """
    specs = choose_specs(args)
    report = measurement.start_report("model", args)
    report["settings"]["eta"] = ETA
    with Progress(sum(len(spec.kinds) for spec in specs), "timing") as progress:
        for spec in specs:
            for kind in spec.kinds:
                row = measure(spec, kind, args)
                if kind == "primal" and "sdpa" in spec.kinds:
                    base = report["rows"][-1]
                    row["ratio"] = ratio(row["wall_ms"], base["wall_ms"])
                    row["peak_ratio"] = ratio(row["peak_mib"], base["peak_mib"])
                report["rows"].append(row)
                measurement.write_report(args.file, report)
                result = row["error"] or f"{row.get('recompilations')} recompilations over {len(LENGTHS)} lengths"
                result = result if row["wall_ms"] is None else f"{row['wall_ms']:.2f} ms"
                progress.advance(f"{spec.name}, {kind}: {result}")
    return report
