"""`primal bench generate`: tokens per second of a language model after N tokens, and the size of its state.

Softmax attention has a cache of keys and values, which grows with N.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves

from primal_attention.bench import attention, measurement
from primal_attention.bench.attention import Implementation, Shape
from primal_attention.bench.measurement import Row
from primal_attention.models.lm import LanguageConfig, LanguageModel, LanguageState
from primal_attention.nn.baselines.softmax import CachedSoftmaxAttention, CacheState, rotary_angles, rotate
from primal_attention.nn.blocks import BlockState
from primal_attention.ops.padding import Tokens

CHUNK = 16384  # tokens of all sequences that are read at once before the step that is timed
VOCABULARY = 8192
MODELS: dict[str, dict[str, Any]] = {
    "sdpa": {"attention": ("softmax",)},
    "primal-mean": {"positions": "sinusoidal"},
    "primal-decay": {"primal_mode": "decay", "conv": 4, "gate": True},
    "primal-delta": {"primal_mode": "delta", "conv": 4, "gate": True},
}


def run(args: Namespace) -> dict[str, Any]:
    """Measure and return the report, which is also written to `args.file`; args: the flags of the command."""
    models = [
        Implementation(name, name.partition("-")[0], partial(build_model, args.layers, keywords))
        for name, keywords in MODELS.items()
    ]
    chosen = attention.choose(models, args.only, baselines=False)
    grid = [[replace(s, batch=batch) for s in shapes] for shapes in attention.make_grid(args) for batch in args.batches]
    return attention.run(args, chosen, measure_step, grid)


class PreallocatedCache(CachedSoftmaxAttention):
    """Softmax attention that writes into the last place of its cache instead of copying it."""

    isolates_non_finite = False  # time the mechanism alone

    def _resume(
        self, x: Tensor, tokens: Tokens, state: CacheState | None, poison: Tensor | None
    ) -> tuple[Tensor, CacheState]:
        assert state is not None
        q, k, v = self.project_in(x)  # (B, H, 1, p)
        angles = rotary_angles(state.position[:, None], self.head_dim)
        q, k = rotate(q, *angles), rotate(k, *angles)
        state.k[:, :, -1:], state.v[:, :, -1:] = k, v
        return F.scaled_dot_product_attention(q, state.k, state.v), state


def build_model(layers: int, keywords: dict[str, Any], shape: Shape) -> LanguageModel:
    d, h = shape.embed_dim, shape.num_heads
    sizes = {"embed_dim": d, "num_heads": h, "ffn_dim": 4 * d, "layers": layers, "rank": shape.rank}
    model = LanguageModel(LanguageConfig(VOCABULARY, **{**sizes, **keywords}))
    if model.config.attention == ("softmax",):
        for block in model.blocks:
            block.attention = PreallocatedCache(d, h)
    return model.to(shape.device, shape.dtype)


def random_caches(model: LanguageModel, shape: Shape) -> LanguageState:
    """Return a state of random keys and values of N tokens, with a place for the next one.

    Reading the tokens would be quadratic, and the values do not change the time.
    """
    size = (2, shape.batch, shape.num_heads, shape.length + 1, shape.embed_dim // shape.num_heads)
    position = torch.full((shape.batch,), shape.length, device=shape.device)
    pairs = [torch.randn(size, **shape.factory) for _ in model.blocks]
    caches = [CacheState(pair[0], pair[1], position[:0], position) for pair in pairs]
    return LanguageState(tuple(BlockState(cache, None) for cache in caches), position)


@torch.no_grad()
def measure_step(build: Callable[[Shape], LanguageModel], shape: Shape, args: Namespace) -> Row:
    """Measure the state after N random tokens, then the time of the next one."""
    model, row = build(shape).eval(), Row()

    def draw(n: int) -> Tensor:
        return torch.randint(VOCABULARY, (shape.batch, n), device=shape.device)

    state: Any
    if model.config.attention == ("softmax",):
        state = random_caches(model, shape)
    else:
        state, chunk = model.initial_state(shape.batch), max(1, CHUNK // shape.batch)
        for start in range(0, shape.length, chunk):
            _, state = model.hidden(draw(min(chunk, shape.length - start)), state=state, return_state=True)
    token = draw(1)[:, 0]
    _, after = model.step(token, state)
    # Each storage counts once and as a whole: a view keeps all of it alive.
    storages = [t.untyped_storage() for t in tree_leaves(after) if isinstance(t, Tensor)]
    row["state_bytes"] = sum({s.data_ptr(): s.nbytes() for s in storages}.values()) // shape.batch
    step = partial(model.step, token, state)
    if shape.device.type == "cuda":
        row["peak_bytes"] = measurement.peak_bytes(step, shape.device)
    row |= measurement.time_step(step, shape.device, args.eager, args.repeats, args.seconds)
    return row | {"tokens_per_second": shape.batch / row["seconds"]}
