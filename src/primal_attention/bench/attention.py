"""`primal bench attention`: one attention layer with its projections against sequence length.

Implementations of Primal-Attention are checked against the equations in float64 first. Those that fail are not timed.
"""

from __future__ import annotations

import dataclasses
import importlib
import math
import warnings
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from primal_attention.bench import measurement
from primal_attention.bench.measurement import OK, REFUSED, SIZES, SKIPPED, Row, ratio
from primal_attention.nn.baselines import attention_names, attention_traits, make_attention
from primal_attention.nn.primal import PrimalAttention
from primal_attention.ops.landmarks import landmark_indices
from primal_attention.ops.primal import is_interpreting
from primal_attention.utils.errors import RunError, check_name
from primal_attention.utils.progress import Progress
from primal_attention.utils.provenance import installed

PRIMAL_BACKENDS = ("fused", "cpu", "compiled", "reference")
CHECKED = ("primal", "published")  # kinds that must compute Primal-Attention
SDPA_BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}


@dataclass(frozen=True)
class Shape:
    """A layer and the shape of its input."""

    embed_dim: int
    num_heads: int
    batch: int
    length: int
    dtype: torch.dtype = torch.float32
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    causal: bool = False
    data_dependent: bool = True
    decay: str | float | None = None
    rank: int = 30
    landmarks: int = 300

    def __str__(self) -> str:
        return f"d {self.embed_dim}, batch {self.batch}, N {self.length}"

    @property
    def primal_arguments(self) -> dict[str, Any]:
        """The keywords of PrimalAttention."""
        names = ("rank", "landmarks", "data_dependent", "causal", "decay", "device", "dtype")
        grid = {"max_length": self.length} if self.causal and self.data_dependent else {}
        return {name: getattr(self, name) for name in names} | grid

    @property
    def factory(self) -> dict[str, Any]:
        """Device and dtype as the keywords of a tensor or module."""
        return {"device": self.device, "dtype": self.dtype}


# Implementations


class Implementation(NamedTuple):
    """A layer by name. Those of the kinds "primal" and "published" must pass the check before they are timed."""

    name: str
    kind: str
    build: Callable[[Shape], Any]


def list_implementations() -> list[Implementation]:
    """Return softmax attention by every backend of torch, all backends of Primal-Attention, and the baselines."""
    softmax: dict[str, Callable[[Shape], Any]] = {"sdpa": partial(build_baseline, "softmax")}
    softmax |= {f"sdpa-{backend}": partial(build_sdpa, backend) for backend in SDPA_BACKENDS}
    if installed("flash-attn-4"):
        softmax["flash-attn-4"] = build_flash_attention_4
    names = [name for name in attention_names() if name not in ("softmax", "primal")]
    return [
        *(Implementation(name, "softmax", build) for name, build in softmax.items()),
        *(Implementation(f"primal-{b}", "primal", partial(build_primal, b)) for b in PRIMAL_BACKENDS),
        Implementation("published", "published", build_authors),
        *(Implementation(name, "baseline", partial(build_baseline, name)) for name in names),
    ]


def choose(implementations: Sequence[Implementation], only: Sequence[str], baselines: bool) -> list[Implementation]:
    """Return those that `only` names by name or kind (all but baselines if empty), and with `baselines` these too."""
    kinds = dict.fromkeys(i.kind for i in implementations)
    for name in only:
        check_name(name, [*kinds, *(i.name for i in implementations)], "implementation")
    wanted = {*(only or kinds.keys() - {"baseline"}), *(["baseline"] if baselines else [])}
    return [i for i in implementations if {i.name, i.kind} & wanted]


def build_primal(backend: str, shape: Shape) -> PrimalAttention:
    if backend == "fused" and shape.device.type == "cpu" and is_interpreting():
        raise NotImplementedError("Triton's interpreter is not timed")
    return PrimalAttention(shape.embed_dim, shape.num_heads, backend=backend, **shape.primal_arguments)  # type: ignore[arg-type]


def build_baseline(name: str, shape: Shape) -> nn.Module:
    """Build a baseline with its paper's settings; random features are drawn once."""
    traits = attention_traits(name)
    if shape.causal and not traits.supports_causal:
        raise NotImplementedError(f"{name} has no causal form")
    keywords: dict[str, Any] = {"causal": shape.causal, **shape.factory}
    if name == "linformer" or (name == "cosformer" and shape.causal):
        keywords["max_length"] = shape.length + 1  # decoding adds a token
    if traits.stochastic:
        keywords |= {"seed": 0, "redraw_every": None}
    layer = make_attention(name, shape.embed_dim, shape.num_heads, **keywords)
    layer.isolates_non_finite = False  # type: ignore[assignment]  # time the mechanism alone
    return layer


def build_sdpa(backend: str, shape: Shape) -> nn.Module:
    layer = build_baseline("softmax", shape)
    forward = layer.forward

    def forward_with_backend(x: Tensor) -> Tensor:
        with sdpa_kernel(SDPA_BACKENDS[backend]):
            return forward(x)  # type: ignore[no-any-return]

    layer.forward = forward_with_backend  # type: ignore[method-assign]
    return layer


def build_flash_attention_4(shape: Shape) -> nn.Module:
    layer: Any = build_baseline("softmax", shape)
    attend = importlib.import_module("flash_attn.cute").flash_attn_func

    def mix(x: Tensor, tokens: object) -> Tensor:
        q, k, v = (t.transpose(1, 2) for t in layer.project_in(x))  # (B, N, H, p)
        y = attend(q, k, v, causal=shape.causal)
        return (y[0] if isinstance(y, tuple) else y).transpose(1, 2)  # type: ignore[no-any-return]

    layer.mix = mix
    return layer  # type: ignore[no-any-return]


class AuthorsPrimal(PrimalAttention):
    """Primal-Attention as the authors' code computes it: eager, tensor by tensor, the core in float32.

    Padding takes part in f(X) and J; only the output is zeroed there. q and k come from one product instead of two.
    """

    def __init__(self, *args: Any, **keywords: Any) -> None:
        super().__init__(*args, **keywords)
        if self.decay_logit is not None or (self.causal and self.data_dependent):
            raise NotImplementedError("the authors' code has neither decay nor a causal data-dependent mode")
        self.core_dtype = torch.promote_types(self.w_e.dtype, torch.float32)
        self.score_proj.to(self.core_dtype)
        for weight in (self.w_e, self.w_r, self.sqrt_lambda):
            weight.data = weight.data.to(self.core_dtype)

    def forward(self, x: Tensor, key_padding_mask: Tensor | None = None) -> Tensor:  # type: ignore[override]
        q, k = (self._split_heads(t) for t in self.qk_proj(x).chunk(2, dim=-1))  # (B, H, N, p)
        if self.causal:
            count = torch.arange(1, x.shape[1] + 1, device=x.device, dtype=q.dtype)[:, None]
            q, k = q.cumsum(dim=2) / count, k.cumsum(dim=2) / count
        q, k = F.normalize(q, dim=-1), F.normalize(k, dim=-1)
        w_e, w_r = self.w_e[None], self.w_r[None]  # (1, H, p, s)
        if self.data_dependent:
            rows = self._split_heads(x)[:, :, landmark_indices(x.shape[1], self.landmarks, x.device)]  # (B, H, n, p)
            w_e, w_r = (torch.einsum("bhnp,hns->bhps", rows, w) for w in (self.w_e, self.w_r))
        e, r = q @ w_e, k @ w_r  # (B, H, N, s)
        if self.training:
            scale = self.sqrt_lambda[:, None]  # (H, 1, s)
            energy = (e * scale).square().sum(-1).mean((1, 2)) + (r * scale).square().sum(-1).mean((1, 2))
            self._objective = 0.5 * energy - torch.einsum("hns,hns->h", self.w_e, self.w_r).mean()  # (B,)
        heads = self.score_proj(torch.cat([e, r], dim=-1))  # (B, H, N, p)
        y: Tensor = self.out_proj(heads.transpose(1, 2).flatten(2).to(x.dtype))
        return y if key_padding_mask is None else y.masked_fill(key_padding_mask.unsqueeze(-1), 0.0)

    def _split_heads(self, t: Tensor) -> Tensor:
        return t.to(self.core_dtype).unflatten(-1, (self.num_heads, self.head_dim)).transpose(1, 2)


def build_authors(shape: Shape) -> nn.Module:
    return AuthorsPrimal(shape.embed_dim, shape.num_heads, **shape.primal_arguments)


# The work that is timed


class Step:
    """Forward and backward of a layer, or forward only, on random input.

    The gradient of y is random; a layer with an objective J also gets the gradient of mean J². Nothing is accumulated.
    """

    def __init__(self, layer: nn.Module, shape: Shape, seed: int = 0, inference: bool = False) -> None:
        self.layer, self.inference = layer.train(not inference), inference
        self.x, self.grad_y = random_input(shape, seed)
        self.inputs = (self.x, *(p for p in layer.parameters() if p.requires_grad))

    def forward(self) -> tuple[Tensor, ...]:
        y = self.layer(self.x)
        objective = getattr(self.layer, "objective", None)
        return (y,) if objective is None else (y, F.mse_loss(objective, torch.zeros_like(objective)))

    def backward(self, outputs: tuple[Tensor, ...]) -> tuple[Tensor | None, ...]:
        return torch.autograd.grad(outputs, self.inputs, (self.grad_y, None)[: len(outputs)], allow_unused=True)

    def __call__(self) -> None:
        if self.inference:
            with torch.no_grad():
                self.layer(self.x)
        else:
            self.backward(self.forward())

    def saved_bytes(self) -> int:
        """Return the bytes saved for backward, parameters excluded. Each storage counts once and as a whole."""
        parameters = {p.untyped_storage().data_ptr() for p in self.layer.parameters()}
        storages: dict[int, int] = {}

        def pack(t: Tensor) -> Tensor:
            if t.device == self.x.device:
                storages[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
            return t.detach()  # a node that holds its own output would never be freed

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            outputs = self.forward()
        total = sum(size for address, size in storages.items() if address not in parameters)
        self.backward(outputs)
        return total


def random_input(shape: Shape, seed: int) -> tuple[Tensor, Tensor]:
    """Return x, which requires its gradient, and the gradient of y."""
    generator = torch.Generator(shape.device).manual_seed(seed)
    size = (shape.batch, shape.length, shape.embed_dim)
    x, grad_y = (torch.empty(size, **shape.factory) for _ in range(2))
    for t in (x, grad_y):
        for row in t:  # a float32 draw of all tokens would be the largest tensor of the step
            row.copy_(torch.randn(row.shape, generator=generator, device=shape.device))
    return x.requires_grad_(), grad_y


# The check


SHAPES = ((3, 77), (2, 331))  # odd, below and above the usual number of landmarks
FLOORS = {torch.bfloat16: 4e-3, torch.float16: 5e-4, torch.float32: 1e-5, torch.float64: 1e-12}


def check_layer(build: Callable[[Shape], Any], shape: Shape, seed: int = 1) -> dict[str, Any]:
    """Compare output, objective and all gradients of a layer with the equations in float64.

    The RMS error may be 1.2 × that of the eager equations in the same dtype (4 × for results of at most 32 numbers,
    whose errors scatter), or below a few roundings. NaN fails.

    Returns:
        Whether the layer passes, and the result whose error is largest relative to what is allowed.
    """
    state = build_primal("reference", shape).state_dict()
    # Noise breaks the symmetries of the initialisation.
    weights = {name: value + 0.02 * torch.randn_like(value) for name, value in state.items()}
    worst, worst_ratio = {}, -math.inf
    for batch, length in SHAPES:
        small = dataclasses.replace(shape, batch=batch, length=length)
        x, grad_y = random_input(small, seed)
        precise = build_primal("reference", dataclasses.replace(small, dtype=torch.float64))
        exact = all_results(precise, weights, x.detach().double().requires_grad_(), grad_y.double())
        eager = all_results(build_primal("reference", small), weights, x, grad_y)
        results = all_results(build(small), weights, x, grad_y)
        for name, expected in exact.items():
            error, factor = rms_error(results[name], expected), 1.2 if expected.numel() > 32 else 4.0
            allowed = max(factor * rms_error(eager[name], expected), FLOORS[shape.dtype])
            excess = error / allowed if math.isfinite(error) else math.inf
            if excess > worst_ratio:
                worst_ratio = excess
                shown = error if math.isfinite(error) else None  # JSON has no NaN
                worst = {"passed": excess <= 1, "where": name, "error": shown, "allowed": allowed}
    return worst


def all_results(layer: Any, weights: dict[str, Tensor], x: Tensor, grad_y: Tensor) -> dict[str, Tensor]:
    """Return output, objective and the gradients of input and parameters by name."""
    layer.load_state_dict(weights, strict=False)
    y = layer.train()(x)
    objective = layer.objective
    tensors = {"x": x, **dict(layer.named_parameters())}
    # J is a mean over tokens and heads. Undo it, or its gradient drowns in the rounding of the other one.
    weight = torch.full_like(objective, x.shape[1] * weights["w_e"].shape[0])
    inputs = tuple(tensors.values())
    grads = torch.autograd.grad((y, objective), inputs, (grad_y.to(y.dtype), weight), allow_unused=True)
    results = {"y": y.detach(), "objective": objective.detach()}
    for (name, value), grad in zip(tensors.items(), grads, strict=True):
        results[f"∂{name}"] = torch.zeros_like(value) if grad is None else grad
    return results


def rms_error(actual: Tensor, expected: Tensor) -> float:
    """RMS(error) / RMS(expected); infinite for another shape."""
    if actual.shape != expected.shape:
        return math.inf
    error = (actual.double() - expected.double()).square().mean().sqrt()
    return float(error / expected.double().square().mean().sqrt().clamp(min=1e-300))


# The run


def make_grid(args: Namespace) -> list[list[Shape]]:
    """Return one list of shapes per width, by length."""
    names = ("device", "causal", "data_dependent", "decay", "rank", "landmarks")
    layer: dict[str, Any] = {name: getattr(args, name) for name in names} | {"dtype": getattr(torch, args.dtype)}
    tokens = args.tokens or (65536 if args.device.type == "cuda" else 1)
    for width, heads in args.widths:
        try:
            build_primal("reference", Shape(width, heads, 1, 1, **layer | {"device": torch.device("cpu")}))
        except (ValueError, TypeError) as error:
            raise RunError(f"no Primal layer of width {width}:{heads}: {error}") from None
    return [
        [Shape(width, heads, args.batch or max(1, tokens // n), n, **layer) for n in sorted(args.lengths)]
        for width, heads in args.widths
    ]


def measure_layer(build: Callable[[Shape], Any], shape: Shape, args: Namespace) -> Row:
    """Measure memory, then time: the pool of a CUDA graph must not exist while memory is counted."""
    step = Step(build(shape), shape, args.seed, args.inference)
    step()  # compiles and allocates
    row: Row = {} if args.inference else {"saved_bytes": step.saved_bytes()}
    if shape.device.type == "cuda":
        row["peak_bytes"] = measurement.peak_bytes(step, shape.device)
    return row | measurement.time_step(step, shape.device, args.eager, args.repeats, args.seconds)


def run(
    args: Namespace,
    implementations: Sequence[Implementation] | None = None,
    measure: Callable[[Callable[[Any], Any], Any, Namespace], Row] = measure_layer,
    grid: Sequence[Sequence[Any]] | None = None,
) -> dict[str, Any]:
    """Measure and return the report, which is also written to `args.file` after each length.

    Args:
        args: the flags of `primal bench attention`, or of a benchmark that passes what follows.
        implementations: instead of those that the flags choose.
        measure: returns the numbers of a row.
        grid: shapes, or what `build` of the implementations takes; an implementation that is too slow for a shape skips
            the others in the same list.
    """
    chosen = implementations or choose(list_implementations(), args.only, args.baselines)
    report, grid = measurement.start_report(args.benchmark, args) | {"gate": []}, grid or make_grid(args)
    with Progress(sum(len(chosen) * len(shapes) for shapes in grid), "timing") as progress, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a large rank; torch's reasons against each SDPA backend
        for shapes in grid:
            torch.compiler.reset()  # Dynamo stops compiling at its limit of graphs per function
            is_layer = measure is measure_layer
            excluded = check_all(chosen, shapes[0], report["gate"], args.seed + 1, progress) if is_layer else {}
            for shape in shapes:
                # All implementations at one length before the next, so that what is compared is measured together.
                for name, kind, build in chosen:
                    row = new_row(name, kind, shape, *excluded.get(name, (OK, "")))
                    if row["status"] == OK:
                        torch.manual_seed(args.seed)
                        try:
                            row |= measure(build, shape, args)
                        except Exception as error:  # becomes the note of the row
                            row["status"], row["note"] = measurement.failure(error)
                        measurement.free_memory(args.device)
                    report["rows"].append(row)
                    if (row["seconds"] or 0.0) > args.limit:
                        excluded[name] = SKIPPED, f"{row['seconds']:.1f} s at {shape.length:,} tokens"
                    result = row["status"] if row["seconds"] is None else f"{1e3 * row['seconds']:.3g} ms"
                    progress.advance(f"{name}, {shape}: {result}")
                add_ratios(report["rows"])
                measurement.write_report(args.file, report)
    return report


def check_all(
    implementations: Sequence[Implementation], shape: Shape, gate: list[Row], seed: int, progress: Progress
) -> dict[str, tuple[str, str]]:
    """Check implementations of Primal-Attention; return status and note of those that are not timed."""
    excluded: dict[str, tuple[str, str]] = {}
    for name, _, build in (i for i in implementations if i.kind in CHECKED):
        try:
            verdict = check_layer(build, shape, seed)
            gate.append({"name": name, "embed_dim": shape.embed_dim, "num_heads": shape.num_heads, **verdict})
            if not verdict["passed"]:
                errors = f"{verdict['error'] or math.nan:.1e}, allowed {verdict['allowed']:.1e}"
                excluded[name] = REFUSED, f"wrong results: error of {verdict['where']} {errors}"
        except Exception as error:  # becomes the note of the row
            excluded[name] = measurement.failure(error)
        status, _ = excluded.get(name, ("results are correct", ""))
        progress.advance(f"{name}, d {shape.embed_dim}, check: {status}", count=0)
    measurement.free_memory(shape.device)
    return excluded


def new_row(name: str, kind: str, shape: Any, status: str, note: str) -> Row:
    """Return a row without measurements."""
    facts = {size: getattr(shape, size) for size in SIZES} | getattr(shape, "facts", {})
    empty = ("seconds", "iqr", "runs", "method", "peak_bytes", "saved_bytes", "state_bytes")
    ratios = ("speedup", "peak_ratio", "saved_ratio")
    return {"name": name, "kind": kind, **facts, "status": status, "note": note, **dict.fromkeys((*empty, *ratios))}


def add_ratios(rows: Sequence[Row]) -> None:
    """Set the speed relative to SDPA and the bytes relative to SDPA's."""

    def case(row: Row) -> tuple[Any, ...]:
        return (row.get("model"), *(row[size] for size in SIZES))

    base = {case(row): row for row in rows if row["name"] == "sdpa" and row["status"] == OK}
    for row in rows:
        if row["status"] == OK and (sdpa := base.get(case(row))):
            row["speedup"] = ratio(sdpa["seconds"], row["seconds"])
            row["peak_ratio"] = ratio(row["peak_bytes"], sdpa["peak_bytes"])
            row["saved_ratio"] = ratio(row["saved_bytes"], sdpa["saved_bytes"])
