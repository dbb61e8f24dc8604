"""`primal bench attention` and `primal bench decode`: one attention layer with its projections against sequence length.

Implementations of Primal-Attention are checked against the equations in float64 first. Those that fail are not timed.
Decoding times one more token after N tokens, and measures the state of a causal layer, or of a language model.
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
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_leaves

from primal_attention.bench import measurement
from primal_attention.bench.measurement import OK, REFUSED, SKIPPED, Row, ratio
from primal_attention.models.lm import LanguageConfig, LanguageModel, LanguageState
from primal_attention.nn.baselines import attention_names, attention_traits, make_attention
from primal_attention.nn.baselines.softmax import CachedSoftmaxAttention, CacheState, rotary_angles, rotate
from primal_attention.nn.blocks import BlockState
from primal_attention.nn.padding import Tokens
from primal_attention.nn.primal import PrimalAttention
from primal_attention.ops.landmarks import landmark_indices
from primal_attention.ops.primal import is_interpreting
from primal_attention.utils.errors import RunError, check_name
from primal_attention.utils.progress import Progress
from primal_attention.utils.provenance import installed

CHUNK = 16384  # tokens that are read at once before decoding
VOCABULARY = 8192
# Name → label, kind and keywords of the configuration.
LANGUAGE_MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "sdpa": ("softmax (SDPA, KV cache)", "softmax", {"attention": ("softmax",)}),
    "primal-mean": ("Primal, mean", "primal", {"positions": "sinusoidal"}),
    "primal-decay": ("Primal, decay + conv + gate", "primal", {"primal_mode": "decay", "conv": 4, "gate": True}),
    "primal-delta": ("Primal, delta + conv + gate", "primal", {"primal_mode": "delta", "conv": 4, "gate": True}),
}
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


@dataclass(frozen=True)
class Implementation:
    """A layer by name. Those of the kinds "primal" and "published" must pass the check before they are timed."""

    name: str
    label: str
    kind: str
    build: Callable[[Shape], Any]


def list_implementations(args: Namespace) -> list[Implementation]:
    """Return the implementations that `args.only` names by name or kind, and the baselines with `args.baselines`.

    By default these are all but the baselines.
    """
    decodes, layers = args.benchmark == "decode", getattr(args, "layers", None)
    found = [Implementation("sdpa", "softmax (SDPA)", "softmax", partial(build_baseline, "softmax"))]
    for backend in SDPA_BACKENDS:
        label = f"softmax (SDPA, {backend})"
        found.append(Implementation(f"sdpa-{backend}", label, "softmax", partial(build_sdpa, backend)))
    if installed("flash-attn-4"):
        found.append(Implementation("flash-attn-4", "softmax (flash-attn-4)", "softmax", build_flash_attention_4))
    if decodes:
        found = [Implementation("sdpa", "softmax (SDPA, KV cache)", "softmax", build_cached)]
    for backend in PRIMAL_BACKENDS:
        if not (decodes and backend == "compiled"):  # the guards of a compiled function cost more than a step
            build = partial(build_primal, backend)
            found.append(Implementation(f"primal-{backend}", f"Primal ({backend})", "primal", build))
    if not decodes:
        found.append(Implementation("published", "Primal (authors' implementation)", "published", build_authors))
    for name in attention_names():
        if name not in ("softmax", "primal") and (attention_traits(name).streams or not decodes):
            found.append(Implementation(name, name, "baseline", partial(build_baseline, name)))
    if layers:
        found = [
            Implementation(name, label, kind, partial(build_language_model, layers, keywords))
            for name, (label, kind, keywords) in LANGUAGE_MODELS.items()
        ]
    names = {i.name for i in found} | {i.kind for i in found}
    for name in args.only:
        check_name(name, sorted(names), "implementation")
    wanted = set(args.only or {i.name for i in found if i.kind != "baseline"})
    return [i for i in found if {i.name, i.kind} & wanted or (args.baselines and i.kind == "baseline")]


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

    The gradient of y is given; a layer with an objective J also gets the gradient of mean J². Nothing is accumulated.
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


def wrong_results(verdict: Row) -> str:
    error = verdict["error"] or math.nan
    return f"wrong results: error of {verdict['where']} {error:.1e}, allowed {verdict['allowed']:.1e}"


def rms_error(actual: Tensor, expected: Tensor) -> float:
    """RMS(error) / RMS(expected); infinite for another shape."""
    if actual.shape != expected.shape:
        return math.inf
    error = (actual.double() - expected.double()).square().mean().sqrt()
    return float(error / expected.double().square().mean().sqrt().clamp(min=1e-300))


# Decoding


class PreallocatedCache(CachedSoftmaxAttention):
    """Softmax attention that writes into the last place of its cache instead of copying it."""

    isolates_non_finite = False  # time the mechanism alone

    def _resume(
        self, x: Tensor, tokens: Tokens, state: CacheState | None, poison: Tensor | None
    ) -> tuple[Tensor, CacheState]:
        assert state is not None
        q, k, v = self.project_in(x)  # (B, H, 1, p)
        if self.rotary:
            angles = rotary_angles(state.position[:, None], self.head_dim)
            q, k = rotate(q, *angles), rotate(k, *angles)
        state.k[:, :, -1:], state.v[:, :, -1:] = k, v
        return F.scaled_dot_product_attention(q, state.k, state.v), state


def build_cached(shape: Shape) -> PreallocatedCache:
    return PreallocatedCache(shape.embed_dim, shape.num_heads, rotary=False, **shape.factory)


def build_language_model(layers: int, keywords: dict[str, Any], shape: Shape) -> LanguageModel:
    d, h = shape.embed_dim, shape.num_heads
    sizes = {"embed_dim": d, "num_heads": h, "ffn_dim": 4 * d, "layers": layers, "rank": shape.rank}
    model = LanguageModel(LanguageConfig(VOCABULARY, **{"attention": ("primal",), **sizes, **keywords}))
    if model.config.attention == ("softmax",):
        for block in model.blocks:
            block.attention = PreallocatedCache(d, h)
    return model.to(shape.device, shape.dtype)


def random_cache(shape: Shape, position: Tensor) -> CacheState:
    """Return random keys and values of N tokens, with a place for the next one.

    Reading the tokens would be quadratic, and the values do not change the time.
    """
    size = (2, shape.batch, shape.num_heads, shape.length + 1, shape.embed_dim // shape.num_heads)
    k, v = torch.randn(size, **shape.factory)
    return CacheState(k, v, position[:0], position)


@torch.no_grad()
def measure_decoding(implementation: Implementation, shape: Shape, args: Namespace) -> Row:
    """Measure the state after N random tokens, then the time of the next one."""
    layer, row = implementation.build(shape).eval(), Row()
    is_model = isinstance(layer, LanguageModel)
    read = layer.hidden if is_model else layer
    chunk = max(1, CHUNK // shape.batch) if is_model else CHUNK

    def draw(n: int) -> Tensor:
        if is_model:
            return torch.randint(VOCABULARY, (shape.batch, n), device=shape.device)
        return torch.randn(shape.batch, n, shape.embed_dim, **shape.factory)

    if implementation.kind == "softmax":
        position = torch.full((shape.batch if is_model else 0,), shape.length, device=shape.device)
        caches = [random_cache(shape, position) for _ in (layer.blocks if is_model else [layer])]
        blocks = tuple(BlockState(cache, None) for cache in caches)
        state: Any = LanguageState(blocks, position) if is_model else caches[0]
    else:
        state = layer.initial_state(shape.batch)
        for start in range(0, shape.length, chunk):
            _, state = read(draw(min(chunk, shape.length - start)), state=state, return_state=True)
    token = draw(1)[:, 0]
    _, after = layer.step(token, state)
    # Each storage counts once and as a whole: a view keeps all of it alive.
    storages = [t.untyped_storage() for t in tree_leaves(after) if isinstance(t, Tensor)]
    size = sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())
    step = partial(layer.step, token, state)
    if is_model and shape.device.type == "cuda":
        row["peak_bytes"] = measurement.peak_bytes(step, shape.device)
    row |= measurement.time_step(step, shape.device, args.eager, args.repeats, args.seconds)
    row |= {"tokens_per_second": shape.batch / row["seconds"]} if is_model else {}
    return {"state_bytes": size // shape.batch, **row}


# The run


def make_grid(args: Namespace) -> list[list[Shape]]:
    """Return one list of shapes per width, by length."""
    names = ("device", "causal", "data_dependent", "decay", "rank", "landmarks")
    layer: dict[str, Any] = {name: getattr(args, name) for name in names} | {"dtype": getattr(torch, args.dtype)}
    is_gpu, decodes = args.device.type == "cuda", args.benchmark == "decode"
    count = (6 if is_gpu else 4) if decodes else (5 if is_gpu else 3)
    lengths = args.lengths or [(1024 if decodes else 256) * 4**k for k in range(count)]
    tokens = args.tokens or (65536 if is_gpu and not decodes else 1)
    for width, heads in args.widths:
        try:
            build_primal("reference", Shape(width, heads, 1, 1, **layer | {"device": torch.device("cpu")}))
        except (ValueError, TypeError) as error:
            raise RunError(f"no Primal layer of width {width}:{heads}: {error}") from None
    return [
        [Shape(width, heads, args.batch or max(1, tokens // n), n, **layer) for n in sorted(lengths)]
        for width, heads in args.widths
    ]


def run(args: Namespace, implementations: Sequence[Implementation] | None = None) -> dict[str, Any]:
    """Measure and return the report, which is also written to `args.file` after each length.

    Args:
        args: the flags of `primal bench attention` or `primal bench decode`.
        implementations: instead of those that the flags choose.
    """
    chosen, grid = implementations or list_implementations(args), make_grid(args)
    measure = measure_decoding if args.benchmark == "decode" else measure_layer
    report = measurement.start_report(args.benchmark, args) | {"gate": []}
    rows = report["rows"]
    checked = [i for i in chosen if i.kind in CHECKED and measure is measure_layer]
    total = sum(len(checked) + len(chosen) * len(shapes) for shapes in grid)
    with Progress(total, "timing") as progress, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a large rank; torch's reasons against each SDPA backend
        for shapes in grid:
            torch.compiler.reset()  # Dynamo stops compiling at its limit of graphs per function
            excluded: dict[str, tuple[str, str]] = {}
            for implementation in checked:
                status, sizes = "results are correct", {s: getattr(shapes[0], s) for s in ("embed_dim", "num_heads")}
                try:
                    verdict = check_layer(implementation.build, shapes[0], args.seed + 1)
                    report["gate"].append({"name": implementation.name, **sizes, **verdict})
                    if not verdict["passed"]:
                        excluded[implementation.name] = REFUSED, wrong_results(verdict)
                        status = REFUSED
                except Exception as error:  # becomes the note of the row
                    excluded[implementation.name] = measurement.failure(error)
                    status = excluded[implementation.name][0]
                progress.advance(f"{implementation.label}, d {shapes[0].embed_dim}, check: {status}")
            measurement.free_memory(args.device)
            for shape in shapes:
                # All implementations at one length before the next, so that what is compared is measured together.
                for implementation in chosen:
                    reason = excluded.get(implementation.name)
                    row = new_row(implementation, shape, *reason or (OK,))
                    if not reason:
                        torch.manual_seed(args.seed)
                        try:
                            row |= measure(implementation, shape, args)
                        except Exception as error:  # becomes the note of the row
                            row["status"], row["note"] = measurement.failure(error)
                        measurement.free_memory(shape.device)
                    rows.append(row)
                    if (row["seconds"] or 0.0) > args.limit:
                        note = f"{row['seconds']:.1f} s at {shape.length:,} tokens"
                        excluded[implementation.name] = SKIPPED, note
                    result = row["status"] if row["seconds"] is None else f"{1e3 * row['seconds']:.3g} ms"
                    progress.advance(f"{row['label']}, d {shape.embed_dim}, N {shape.length}: {result}")
                add_ratios(rows)
                measurement.write_report(args.file, report)
    return report


def measure_layer(implementation: Implementation, shape: Shape, args: Namespace) -> Row:
    """Measure memory, then time: the pool of a CUDA graph must not exist while memory is counted."""
    row: Row = {}
    step = Step(implementation.build(shape), shape, args.seed, args.inference)
    step()  # compiles and allocates
    if not args.inference:
        row["kept_bytes"] = step.saved_bytes()
    if shape.device.type == "cuda":
        row["peak_bytes"] = measurement.peak_bytes(step, shape.device)
    return row | measurement.time_step(step, shape.device, args.eager, args.repeats, args.seconds)


def new_row(implementation: Implementation, shape: Shape, status: str, note: str = "") -> Row:
    """Return a row without measurements."""
    names = {"name": implementation.name, "label": implementation.label, "kind": implementation.kind}
    sizes = {name: getattr(shape, name) for name in ("embed_dim", "num_heads", "batch", "length")}
    empty = ("seconds", "iqr", "runs", "method", "peak_bytes", "kept_bytes", "state_bytes")
    ratios = ("speedup", "peak_ratio", "kept_ratio")
    return {**names, **sizes, "status": status, "note": note, **dict.fromkeys((*empty, *ratios))}


def add_ratios(rows: Sequence[Row]) -> None:
    """Set the speed relative to SDPA and the bytes relative to SDPA's."""
    sizes = ("embed_dim", "num_heads", "length")
    base = {tuple(row[s] for s in sizes): row for row in rows if row["name"] == "sdpa" and row["status"] == OK}
    for row in rows:
        sdpa = base.get(tuple(row[s] for s in sizes))
        if sdpa is not None and row["status"] == OK:
            row["speedup"] = ratio(sdpa["seconds"], row["seconds"])
            row["peak_ratio"] = ratio(row["peak_bytes"], sdpa["peak_bytes"])
            row["kept_ratio"] = ratio(row["kept_bytes"], sdpa["kept_bytes"])
