"""The models that `primal bench model` trains: pre-LN encoders, FFN of width 4d, GELU, AdamW, no dropout."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from primal_attention.nn.objective import ksvd_loss
from primal_attention.nn.primal import PrimalAttention

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


class SoftmaxAttention(nn.Module):
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
    """x, the keywords of the attention layers, and the weight of each token in the loss (None: equal)."""
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


def make_step(
    spec: Spec, kind: str, device: torch.device, seed: int, compiler: str
) -> tuple[Callable[[Tensor], None], Tensor]:
    """A training step of a new model, and its input."""
    torch.manual_seed(seed)
    dtype = torch.bfloat16 if spec.dtype == "bf16" else torch.float32
    kinds = [kind if not spec.last_layer_only or i == spec.layers - 1 else "sdpa" for i in range(spec.layers)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # rank 96 is above the head width
        model = nn.ModuleList(Block(spec, kind) for kind in kinds).to(device, dtype)
    x, keywords, weight = make_input(spec, kind, device, seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=device.type == "cuda")

    def loss_of(x: Tensor) -> Tensor:
        with torch.autocast(device.type, torch.bfloat16, enabled=spec.dtype == "autocast"):
            for block in model:
                x = block(x, keywords)
            error = x.float().square()
            loss = error.mean() if weight is None else (error.mean(-1) * weight).sum()
            return loss if kind == "sdpa" else loss + ETA * ksvd_loss(model)

    compiled = loss_of
    if spec.mode != "eager":
        mode, dynamic = spec.mode.replace("compile", "default"), True if spec.layout == "dynamic" else None
        compiled = torch.compile(loss_of, mode=mode, dynamic=dynamic, backend=compiler)

    def step(x: Tensor) -> None:
        if spec.mode == "reduce-overhead":
            torch.compiler.cudagraph_mark_step_begin()
        optimizer.zero_grad(set_to_none=True)
        compiled(x).backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    return step, x.to(dtype)
