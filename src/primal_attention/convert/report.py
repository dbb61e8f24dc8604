"""What a replacement changes: parameters, and floating-point operations at a length."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..nn.primal import PrimalAttention
from .sites import Projections

LENGTHS = (512, 4096)


def softmax_flops(tokens: int, width: int, key_width: int) -> int:
    """Of one softmax attention on one sequence; a multiplication and an addition are two."""
    maps = 2 * tokens * width * (2 * width + 2 * key_width)
    return maps + 4 * tokens * tokens * width  # QKᵀ, and its product with V


def primal_flops(tokens: int, layer: PrimalAttention) -> int:
    """Of one PrimalAttention on one sequence."""
    width, rank = layer.embed_dim, layer.rank
    maps = 2 * tokens * width * 3 * width  # q, k and the output
    weights = 4 * layer.landmarks * width * rank if layer.data_dependent else 0  # W_{e|X}, W_{r|X}
    scores = 4 * tokens * width * rank
    return maps + weights + scores + 4 * tokens * rank * width  # the last: [e; r] back to the head's width


@dataclass(frozen=True)
class Row:
    """One replaced attention."""

    name: str
    kind: str
    width: int
    key_width: int
    parameters_before: int
    parameters_after: int
    layer: PrimalAttention = field(repr=False)
    note: str = ""

    def flops(self, tokens: int) -> tuple[int, int]:
        """Before and after, for one sequence of this many tokens."""
        return softmax_flops(tokens, self.width, self.key_width), primal_flops(tokens, self.layer)


@dataclass(frozen=True)
class Report:
    """What primalize did; str() is a table."""

    rows: tuple[Row, ...]
    parameters_before: int
    parameters_after: int
    left: tuple[tuple[str, str], ...] = ()
    """Attentions that cannot be replaced, and why."""

    def flops(self, tokens: int) -> tuple[int, int]:
        """Of the replaced attentions together, before and after."""
        pairs = [row.flops(tokens) for row in self.rows]
        return sum(a for a, _ in pairs), sum(b for _, b in pairs)

    def __str__(self) -> str:
        width = max([len(row.name) for row in self.rows] + [5])
        lines = [
            f"{row.name:<{width}}  {row.kind}: {row.parameters_before:,} → {row.parameters_after:,} parameters"
            for row in self.rows
        ]
        lines.append(f"{'model':<{width}}  {self.parameters_before:,} → {self.parameters_after:,} parameters")
        for tokens in LENGTHS:
            before, after = self.flops(tokens)
            lines.append(
                f"at {tokens:,} tokens the replaced attentions cost {before / 1e6:,.1f} → {after / 1e6:,.1f} MFLOP"
            )
        lines += sorted({f"note: {row.note}" for row in self.rows if row.note})
        lines += [f"left as it is: {name}: {reason}" for name, reason in self.left]
        return "\n".join(lines)


def row(name: str, kind: str, before: int, after: int, kept: Projections, layer: PrimalAttention, note: str) -> Row:
    key_width = kept.embed_dim // kept.num_heads * kept.key_heads
    return Row(name, kind, kept.embed_dim, key_width, before, after, layer, note)
