"""The models of the language table: softmax, every causal mode of Primal-Attention, what goes beyond it, and baselines.

All have as many parameters as softmax's model: what their attention saves goes to the feed-forward width. The most
telling ones come first, so that a grid that is cut off has said the most.
"""

from __future__ import annotations

from typing import Any

from primal_attention.engine.tables.plan import Variant

LOCAL: dict[str, Any] = {"conv": 4, "gate": True}
DELTA: dict[str, Any] = {"primal_mode": "delta", "primal_heads": 4, "rank": 64, **LOCAL}
BEYOND = {
    "delta": DELTA,
    "hybrid": {"attention": ("primal", "primal", "softmax") * 2, **DELTA},
}
MODES = ("mean", "landmarks", "decay")


def _variants() -> list[Variant]:
    rows = [Variant("models", "softmax", "softmax")]
    rows += [Variant("models", name, "primal", options) for name, options in BEYOND.items()]
    rows += [Variant("models", f"primal+-{mode}", "primal+", {"primal_mode": mode}) for mode in MODES]
    rows += [Variant("models", f"primal-{mode}", "primal", {"primal_mode": mode}) for mode in MODES]
    rows += [Variant("models", f"primal-{mode}-conv", "primal", {"primal_mode": mode, "conv": 4}) for mode in MODES]
    rows += [Variant("models", f"primal+-{mode}-conv", "primal+", {"primal_mode": mode, "conv": 4}) for mode in MODES]
    return [*rows, Variant("models", "linear", "linear"), Variant("models", "flow", "flow")]


LINEUP = {variant.name: variant for variant in _variants()}
