"""`primal bench model`: training steps of whole models, softmax attention (SDPA) and Primal in the same process.

The models are pre-LN encoders with FFNs of width 4d, GELU, AdamW and no dropout. A step is forward, backward and
update. The loss of Primal models includes the KSVD loss. Steps run back to back, launched by the host.
"""

from __future__ import annotations

import time
import warnings
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from primal_attention.bench import attention, measurement
from primal_attention.bench.attention import Implementation
from primal_attention.bench.measurement import Row
from primal_attention.nn.objective import ksvd_loss
from primal_attention.nn.primal import PrimalAttention
from primal_attention.utils.errors import check_name

ETA = 0.1
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
    def batch(self) -> int:
        if self.layout in ("padded", "packed"):  # the mean length is 5/8 of the longest
            return max(1, 8 * self.tokens // (5 * self.length))
        return min(max(1, self.tokens // self.length), self.max_batch or self.tokens)

    @property
    def facts(self) -> dict[str, Any]:
        return {"model": str(self), "mode": self.mode, "dtype": self.dtype}

    def __str__(self) -> str:
        return f"{self.model}-{self.mode}-{self.dtype}"


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
    known = dict.fromkeys(name for spec in SPECS for name in (spec.model, str(spec)))
    for row in args.rows:
        check_name(row, known, "row")
    chosen = [spec for spec in SPECS if not args.rows or {str(spec), spec.model} & set(args.rows)]
    tokens = args.tokens
    return [replace(s, tokens=tokens, layers=args.layers or s.layers, length=min(s.length, tokens)) for s in chosen]


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
        return torch.randn(spec.batch, n, width, device=device), {}, None
    # Lengths are uniform in [n/4, n] with the mean 5n/8, and the same for both kinds.
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(max(1, n // 4), n + 1, (spec.batch,), generator=generator)
    longest = int(lengths.max())
    if spec.layout == "packed" and kind == "primal":
        boundaries = F.pad(lengths.cumsum(0), (1, 0)).to(device, torch.int32)
        x = torch.randn(int(lengths.sum()), width, device=device)
        return x, {"cu_seqlens": boundaries, "max_seqlen": longest}, None
    valid = (torch.arange(longest) < lengths[:, None]).to(device)
    x = torch.randn(len(lengths), longest, width, device=device)
    keywords = {"attn_mask": valid[:, None, None]} if kind == "sdpa" else {"key_padding_mask": ~valid}
    return x, keywords, valid / valid.sum()


def make_step(kind: str, args: Namespace, spec: Spec) -> tuple[Callable[[Tensor], None], Tensor]:
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


def measure_step(build: Callable[[Spec], tuple[Callable[[Tensor], None], Tensor]], spec: Spec, args: Namespace) -> Row:
    """Return the time of the first step, which compiles, then time and peak memory of a step, parameters included."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    # At the default limit of recompilations Dynamo stops compiling and counting.
    with torch._dynamo.config.patch(recompile_limit=64):
        step, x = build(spec)
        start = time.perf_counter()
        step(x)
        if x.is_cuda:
            torch.cuda.synchronize(x.device)
        row: Row = {"first_seconds": time.perf_counter() - start}
        if spec.layout == "dynamic":
            return row | count_graphs(step, x)
        if x.is_cuda:
            row["peak_bytes"] = measurement.peak_bytes(partial(step, x), x.device)
        return row | measurement.time_step(partial(step, x), x.device, True, args.repeats, args.seconds)


def count_graphs(step: Callable[[Tensor], None], x: Tensor) -> Row:
    """Return the number of graphs that Dynamo compiles, and of those after the first step, over ten lengths."""
    from torch._dynamo.utils import counters

    first = counters["stats"]["unique_graphs"]
    for n in LENGTHS[:-1]:
        part = x[:, : max(2, n * x.shape[1] // LENGTHS[-1])]
        step(part.clone(memory_format=torch.contiguous_format))
    graphs = counters["stats"]["unique_graphs"]
    return {"graphs": graphs, "recompilations": graphs - first}


def run(args: Namespace) -> dict[str, Any]:
    """Measure all rows and return the report, which is also written to `args.file`; args: the flags of the command."""
    models = [Implementation(kind, kind, partial(make_step, kind, args)) for kind in ("sdpa", "primal")]
    return attention.run(args, models, measure_step, [[spec] for spec in choose_specs(args)])
