"""`primal bench decode`: one more token after N tokens, and the size of the state.

A single causal layer, or a whole language model with `--layers`. The states are real: random tokens are read in chunks.
Only the caches of softmax attention are random, because reading is quadratic and the values do not change the time.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from primal_attention.bench import measurement
from primal_attention.bench.attention import (
    PRIMAL_BACKENDS,
    Case,
    Implementation,
    build_baseline,
    build_primal,
    make_grid,
    measure_grid,
    select,
)
from primal_attention.bench.measurement import Row
from primal_attention.models.lm import LanguageConfig, LanguageModel, LanguageState
from primal_attention.nn.baselines import attention_names, attention_traits
from primal_attention.nn.baselines.softmax import CacheState
from primal_attention.nn.blocks import BlockState

CHUNK = 16384  # tokens that are read at once
VOCABULARY = 8192
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "softmax": ("softmax (KV cache)", {"attention": ("softmax",)}),
    "primal-mean": ("Primal, mean", {"primal_mode": "mean", "positions": "sinusoidal"}),
    "primal-decay": ("Primal, decay + conv + gate", {"primal_mode": "decay", "conv": 4, "gate": True}),
    "primal-delta": ("Primal, delta + conv + gate", {"primal_mode": "delta", "conv": 4, "gate": True}),
}
Stream = tuple[Callable[[], object], int]  # the step to time, and the bytes of the state after N tokens


def list_streams(args: Namespace) -> list[Implementation]:
    """Return the layers, or the models of `args.layers` blocks, that the flags choose."""
    if args.layers:
        models = [
            Implementation(name, label, name.partition("-")[0], partial(read_model, args.layers, keywords))
            for name, (label, keywords) in MODELS.items()
        ]
        return select(models, args.only, args.baselines)
    found = [Implementation("sdpa", "softmax (SDPA, KV cache)", "softmax", read_softmax)]
    for backend in PRIMAL_BACKENDS:
        if backend != "compiled":  # the guards of a compiled function cost more than a step
            read = partial(read_layer, partial(build_primal, backend))
            found.append(Implementation(f"primal-{backend}", f"Primal ({backend})", "primal", read))
    for name in attention_names():
        if name != "primal" and attention_traits(name).streams:
            found.append(Implementation(name, name, "baseline", partial(read_layer, partial(build_baseline, name))))
    return select(found, args.only, args.baselines)


def read_layer(build: Callable[[Case], nn.Module], case: Case) -> Stream:
    return read_tokens(build(case), case, random_rows)


def read_model(layers: int, keywords: dict[str, Any], case: Case) -> Stream:
    config = LanguageConfig(
        VOCABULARY, embed_dim=case.embed_dim, num_heads=case.num_heads, ffn_dim=4 * case.embed_dim, layers=layers,
        **{"rank": case.rank, "attention": ("primal",), **keywords},
    )  # fmt: skip
    model = LanguageModel(config).to(case.device, case.dtype)
    if config.attention == ("softmax",):
        return time_from(model.eval(), random_cache(model, case), random_ids(case, 1), case)
    return read_tokens(model, case, random_ids, only_last=True)


def read_tokens(module: Any, case: Case, draw: Callable[[Case, int], Tensor], **keywords: Any) -> Stream:
    """Read `case.length` tokens in chunks."""
    state = module.eval().initial_state(case.batch)
    for start in range(0, case.length, CHUNK):
        tokens = draw(case, min(CHUNK, case.length - start))
        _, state = module(tokens, state=state, return_state=True, **keywords)
    return time_from(module, state, draw(case, 1), case)


def time_from(module: Any, state: Any, token: Tensor, case: Case) -> Stream:
    _, after = module.step(token[:, 0], state)
    return partial(module.step, token[:, 0], state), state_bytes(after) // case.batch


def random_rows(case: Case, n: int) -> Tensor:
    return torch.randn(case.batch, n, case.embed_dim, device=case.device, dtype=case.dtype)


def random_ids(case: Case, n: int) -> Tensor:
    return torch.randint(VOCABULARY, (case.batch, n), device=case.device)


def random_cache(model: LanguageModel, case: Case) -> LanguageState:
    """Return the state of a softmax model after `case.length` random tokens."""
    position = torch.full((case.batch,), case.length, device=case.device)
    valid = torch.ones(case.batch, case.length, dtype=torch.bool, device=case.device)
    shape = (2, case.batch, case.num_heads, case.length, case.embed_dim // case.num_heads)
    caches = (torch.randn(shape, device=case.device, dtype=case.dtype) for _ in model.blocks)
    return LanguageState(tuple(BlockState(CacheState(k, v, valid, position), None) for k, v in caches), position)


def state_bytes(state: Any) -> int:
    """Count each storage once and as a whole: a view keeps all of it alive."""
    tensors = [t for t in tree_leaves(state) if isinstance(t, Tensor)]
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


class CachedSoftmax(nn.Module):
    """Softmax attention that decodes from a preallocated cache of keys and values."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        keywords: dict[str, Any] = {"device": case.device, "dtype": case.dtype}
        self.heads = case.num_heads
        self.in_proj = nn.Linear(case.embed_dim, 3 * case.embed_dim, **keywords)
        self.out_proj = nn.Linear(case.embed_dim, case.embed_dim, **keywords)
        shape = (2, case.batch, case.num_heads, case.length + 1, case.embed_dim // case.num_heads)
        self.cache = torch.randn(shape, **keywords)

    def step(self, x_t: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (self.heads, 1, -1)) for t in self.in_proj(x_t).chunk(3, dim=-1))  # (B, H, 1, p)
        self.cache[0, :, :, -1:], self.cache[1, :, :, -1:] = k, v
        return self.out_proj(F.scaled_dot_product_attention(q, *self.cache).flatten(1))  # type: ignore[no-any-return]


def read_softmax(case: Case) -> Stream:
    layer = CachedSoftmax(case)
    return partial(layer.step, random_rows(case, 1)[:, 0]), layer.cache.nbytes // case.batch


@torch.no_grad()
def measure_stream(stream: Implementation, case: Case, args: Namespace) -> Row:
    step, size = stream.build(case)
    return {"state_bytes": size, **measurement.time_step(step, case.device, args.eager, args.repeats, args.seconds)}


def run(args: Namespace) -> dict[str, Any]:
    """Measure and return the report, which is also written to `args.file` after each length.

    Args:
        args: the flags of `primal bench decode`.
    """
    longest = 6 if args.layers or args.device.type == "cuda" else 4
    grid = make_grid(args, [1024 * 4**k for k in range(longest)])
    return measure_grid("decode", args, list_streams(args), grid, measure_stream)
