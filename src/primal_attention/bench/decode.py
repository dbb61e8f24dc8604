"""`primal bench decode`: one more token after N tokens, and the size of the state.

A single causal layer, or a whole language model with `--layers`. The states are real: random tokens are read in chunks.
Only the caches of softmax attention are random, because reading is quadratic and the values do not change the time.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
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
    new_row,
    select,
)
from primal_attention.bench.measurement import FAILED, OK, SKIPPED, Row
from primal_attention.models.lm import LanguageConfig, LanguageModel, LanguageState
from primal_attention.nn.baselines import attention_names, attention_traits
from primal_attention.nn.baselines.softmax import CacheState
from primal_attention.nn.blocks import BlockState
from primal_attention.utils.progress import Progress

CHUNK = 16384  # tokens that are read at once
VOCABULARY = 8192
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "softmax": ("softmax (KV cache)", {"attention": ("softmax",)}),
    "primal-mean": ("Primal, mean", {"primal_mode": "mean", "positions": "sinusoidal"}),
    "primal-decay": ("Primal, decay + conv + gate", {"primal_mode": "decay", "conv": 4, "gate": True}),
    "primal-delta": ("Primal, delta + conv + gate", {"primal_mode": "delta", "conv": 4, "gate": True}),
}
# Yields, for each case, the step to time and the bytes of the state after N tokens.
Reader = Iterator[tuple[Callable[[], object], int]]


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


def read_layer(build: Callable[[Case], nn.Module], cases: Sequence[Case]) -> Reader:
    return read_tokens(build(cases[-1]), cases, random_rows)


def read_model(layers: int, keywords: dict[str, Any], cases: Sequence[Case]) -> Reader:
    case = cases[0]
    config = LanguageConfig(
        VOCABULARY, embed_dim=case.embed_dim, num_heads=case.num_heads, ffn_dim=4 * case.embed_dim, layers=layers,
        **{"rank": case.rank, "attention": ("primal",), **keywords},
    )  # fmt: skip
    model = LanguageModel(config).to(case.device, case.dtype)
    if config.attention == ("softmax",):
        return (time_from(model.eval(), random_cache(model, case), random_ids(case, 1), case) for case in cases)
    return read_tokens(model, cases, random_ids, only_last=True)


def read_tokens(module: Any, cases: Sequence[Case], draw: Callable[[Case, int], Tensor], **keywords: Any) -> Reader:
    """Read up to each case's length, continuing from the state of the one before."""
    module.eval()
    state, done = module.initial_state(cases[0].batch), 0
    for case in cases:
        while done < case.length:
            n = min(CHUNK, case.length - done)
            _, state = module(draw(case, n), state=state, return_state=True, **keywords)
            done += n
        yield time_from(module, state, draw(case, 1), case)


def time_from(module: Any, state: Any, token: Tensor, case: Case) -> tuple[Callable[[], object], int]:
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


def read_softmax(cases: Sequence[Case]) -> Reader:
    for case in cases:
        layer = CachedSoftmax(case)
        yield partial(layer.step, random_rows(case, 1)[:, 0]), layer.cache.nbytes // case.batch


@torch.no_grad()
def run(args: Namespace) -> dict[str, Any]:
    """Measure and return the report, which is also written to `args.file` after each layer or model.

    Args:
        args: the flags of `primal bench decode`.
    """
    streams = list_streams(args)
    longest = 6 if args.layers or args.device.type == "cuda" else 4
    grid = make_grid(args, [1024 * 4**k for k in range(longest)])
    report = measurement.start_report("decode", args)
    with Progress(len(streams) * sum(map(len, grid)), "decoding") as progress:
        for cases in grid:
            for stream in streams:
                for row in measure(stream, cases, args):
                    report["rows"].append(row)
                    result = row["status"] if row["seconds"] is None else f"{1e6 * row['seconds']:.3g} µs"
                    progress.advance(f"{stream.label}, d {row['embed_dim']}, after {row['length']}: {result}")
                measurement.write_report(args.file, report)
    return report


def measure(stream: Implementation, cases: Sequence[Case], args: Namespace) -> Iterator[Row]:
    torch.manual_seed(args.seed)
    reader, problem = None, None
    for case in cases:
        measurement.free_memory(case.device)
        row = new_row(stream, case, OK) | {"state_bytes": None}
        if problem is None:
            try:
                reader = reader or stream.build(cases)
                step, row["state_bytes"] = next(reader)
                row |= measurement.time_step(step, case.device, args.eager, args.repeats, args.seconds)
                yield row
                continue
            except Exception as error:  # becomes the note of the row
                status, note = measurement.failure(error)
                yield row | {"status": status, "note": note, "state_bytes": None}
                problem = (SKIPPED, "an earlier length failed") if status == FAILED else (status, note)
                continue
        yield row | {"status": problem[0], "note": problem[1]}
