"""`primal bench decode`: one more token after N tokens were read, and what a sequence's state weighs.

Primal-Attention keeps two running sums per head, whatever N is; softmax attention keeps all keys and values. The state
is the real one: random tokens are read in stretches, and the step is timed each time a length is reached.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from primal_attention.bench import memory, timing
from primal_attention.bench.contenders import PRIMAL_BACKENDS, build_primal, without_checks
from primal_attention.bench.run import OK, SKIPPED, Timed, plain, why
from primal_attention.bench.settings import (
    DEFAULT_WIDTHS,
    BenchError,
    Case,
    OnDevice,
    check_device,
    check_out,
    check_positive,
)
from primal_attention.nn.baselines import attention_names, attention_traits, make_attention
from primal_attention.utils.files import write_json
from primal_attention.utils.progress import Progress
from primal_attention.utils.provenance import collect, load

STRETCH = 16384  # tokens that are read at once


@dataclass(frozen=True)
class DecodeSettings(OnDevice):
    """A run of `primal bench decode`. None means: what suits the device."""

    lengths: tuple[int, ...] | None = None
    widths: tuple[tuple[int, int], ...] = DEFAULT_WIDTHS
    batch: int = 1
    dtype: str | None = None
    device: str | None = None
    decay: str | float | None = None
    rank: int = 30
    baselines: bool = False
    only: tuple[str, ...] = ()
    eager: bool = False
    repeats: int = 100
    seconds: float = 0.3
    seed: int = 0
    out: Path = Path("results/bench")
    name: str | None = None
    plot: bool = True
    commit: str | None = None
    command: str | None = None

    @property
    def file_name(self) -> str:
        return self.name or "-".join(
            ["decode", *(["baselines"] if self.baselines else []), *(["eager"] if self.eager else [])]
        )

    def cases(self) -> list[list[Case]]:
        gpu = self.on.type == "cuda"
        default = tuple(1024 * 4**k for k in range(6)) if gpu else (1024, 4096, 16384, 65536)
        return [
            [
                Case(width, heads, self.batch, n, self.torch_dtype, self.on, True, False, self.decay, self.rank)
                for n in sorted(set(self.lengths or default))
            ]
            for width, heads in self.widths
        ]

    def check(self) -> None:
        check_device(self.device)
        for flag, value in (("batch", self.batch), ("repeats", self.repeats), ("seconds", self.seconds)):
            check_positive(flag, value)
        for width, heads in self.widths:
            try:
                build_primal(Case(width, heads, 1, 1, causal=True, data_dependent=False, rank=self.rank), "reference")
            except (ValueError, TypeError) as error:
                raise BenchError(f"a Primal layer of width {width}:{heads} cannot be made: {error}") from None
        check_out(self.out, self.name)


@dataclass(frozen=True)
class DecodeRow(Timed):
    """One layer after `length` tokens."""

    state_bytes: int | None = None


# Reads up to the case's tokens and gives the step to time and the bytes of the state; resumes where it left off.
Reader = Iterator[tuple[Callable[[], object], int]]


@dataclass(frozen=True)
class Stream:
    name: str
    label: str
    kind: str
    read: Callable[[list[Case]], Reader]


def streams(settings: DecodeSettings) -> list[Stream]:
    found = [Stream("sdpa", "softmax (SDPA, KV cache)", "softmax", read_softmax)]
    for backend in PRIMAL_BACKENDS:
        if backend != "compiled":  # a step is too short for a compiled function's guards

            def build(case: Case, backend: str = backend) -> nn.Module:
                return build_primal(case, backend)

            found.append(
                Stream(
                    f"primal-{backend}",
                    f"Primal ({backend})",
                    "primal",
                    lambda cases, build=build: read_stream(build, cases),  # type: ignore[misc]
                )
            )
    for name in attention_names():
        if name != "primal" and attention_traits(name).streams:

            def read(cases: list[Case], name: str = name) -> Reader:
                return read_stream(build_baseline(name, cases[-1]), cases)

            found.append(Stream(name, name, "baseline", read))
    if settings.only:
        return chosen(found, settings.only)
    return [s for s in found if settings.baselines or s.kind != "baseline"]


def chosen(found: list[Stream], only: tuple[str, ...]) -> list[Stream]:
    """Those of a name or a kind."""
    names = {s.name for s in found} | {s.kind for s in found}
    for wanted in only:
        if wanted not in names:
            raise BenchError(f"--only {wanted}: nobody has this name; known are {', '.join(sorted(names))}")
    return [s for s in found if s.name in only or s.kind in only]


def build_baseline(name: str, longest: Case) -> Callable[[Case], nn.Module]:
    def build(case: Case) -> nn.Module:
        keywords: dict[str, Any] = {"causal": True, "device": case.device, "dtype": case.dtype}
        if name == "cosformer":
            keywords["max_length"] = longest.length + 1
        if attention_traits(name).stochastic:
            keywords |= {"seed": 0, "redraw_every": None}
        return without_checks(make_attention(name, case.embed_dim, case.num_heads, **keywords))

    return build


def read_stream(build: Callable[[Case], nn.Module], cases: list[Case]) -> Reader:
    """A layer with `initial_state` and `step`."""
    layer: Any = build(cases[0]).eval()
    state, read = layer.initial_state(cases[0].batch), 0
    for case in cases:
        while read < case.length:
            n = min(STRETCH, case.length - read)
            _, state = layer(tokens_of(case, n), state=state, return_state=True)
            read += n
        x_t = tokens_of(case, 1)[:, 0]
        _, after = layer.step(x_t, state)  # what a sequence holds while it decodes
        yield (lambda x_t=x_t, state=state: layer.step(x_t, state)), state_bytes(after) // case.batch  # type: ignore[misc]


def state_bytes(state: Any) -> int:
    """Whole storages, each once: a view of one row would keep all rows alive."""
    tensors = [t for t in tree_leaves(state) if isinstance(t, Tensor)]
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


class CachedSoftmax(nn.Module):
    """Softmax attention that decodes: keys and values of all tokens in buffers of the final size."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.heads, self.width = case.num_heads, case.embed_dim
        self.in_proj = nn.Linear(case.embed_dim, 3 * case.embed_dim, device=case.device, dtype=case.dtype)
        self.out_proj = nn.Linear(case.embed_dim, case.embed_dim, device=case.device, dtype=case.dtype)
        shape = (2, case.batch, case.num_heads, case.length + 1, case.embed_dim // case.num_heads)
        self.register_buffer("cache", torch.randn(shape, device=case.device, dtype=case.dtype))

    def step(self, x_t: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (self.heads, 1, -1)) for t in self.in_proj(x_t).chunk(3, dim=-1))  # (B, H, 1, p)
        cache: Any = self.cache
        cache[0, :, :, -1:], cache[1, :, :, -1:] = k, v
        y = F.scaled_dot_product_attention(q, cache[0], cache[1])
        return self.out_proj(y.flatten(1))


def read_softmax(cases: list[Case]) -> Reader:
    """Reading would be quadratic in N, and what the keys are does not change the time: the cache is random."""
    for case in cases:
        layer = CachedSoftmax(case).eval()
        x_t = tokens_of(case, 1)[:, 0]
        cache: Any = layer.cache
        yield (lambda layer=layer, x_t=x_t: layer.step(x_t)), cache.nbytes // case.batch  # type: ignore[misc]


def tokens_of(case: Case, n: int) -> Tensor:
    return torch.randn(case.batch, n, case.embed_dim, device=case.device, dtype=case.dtype)


@torch.no_grad()
def run(settings: DecodeSettings) -> dict[str, Any]:
    settings.check()
    return run_streams(settings, streams(settings), "decode")


@torch.no_grad()
def run_streams(settings: DecodeSettings, field: list[Stream], kind: str) -> dict[str, Any]:
    grid = settings.cases()
    report: dict[str, Any] = {
        "format": 1,
        "kind": kind,
        **collect(command=settings.command, device=settings.on, commit=settings.commit),
        "settings": plain(settings),
        "rows": [],
    }
    with Progress(len(field) * sum(map(len, grid)), "decoding") as progress:
        for cases in grid:
            for stream in field:
                for row in measure(stream, cases, settings):
                    report["rows"].append(dataclasses.asdict(row))
                    what = row.status if row.seconds is None else f"{1e6 * row.seconds:.3g} µs"
                    progress.advance(f"{stream.label}, d {row.embed_dim}, after {row.length}: {what}")
                write_json(settings.out / f"{settings.file_name}.json", report)
    report["hardware"]["load_after"] = load()
    write_json(settings.out / f"{settings.file_name}.json", report)
    return report


def measure(stream: Stream, cases: list[Case], settings: DecodeSettings) -> Iterator[DecodeRow]:
    torch.manual_seed(settings.seed)
    reader: Reader | None = None
    trouble: tuple[str, str] | None = None
    for case in cases:
        memory.free(case.device)
        who, shape = (stream.name, stream.label, stream.kind), (case.embed_dim, case.num_heads, case.batch)
        row = DecodeRow(*who, *shape, case.length, OK)
        if trouble is not None:
            yield dataclasses.replace(row, status=trouble[0], note=trouble[1])
            continue
        try:
            with memory.refusing_too_much(case.device):
                reader = stream.read(cases) if reader is None else reader
                step, held = next(reader)
                time = timing.measure(
                    step, case.device, eager=settings.eager, repeats=settings.repeats, seconds=settings.seconds
                )
        except Exception as error:  # this layer's trouble is a line of the table, not the run's end
            trouble = why(error)
            yield dataclasses.replace(row, status=trouble[0], note=trouble[1])
            trouble = trouble if trouble[0] != "failed" else (SKIPPED, "an earlier length failed")
            continue
        yield dataclasses.replace(
            row,
            note=time.note,
            seconds=time.median,
            iqr=time.iqr,
            runs=time.runs,
            method=time.method,
            state_bytes=held,
        )
