"""`primal bench attention`: one attention layer with its projections against sequence length.

Implementations of Primal-Attention are checked against the equations in float64 first. Those that fail are not timed.
"""

from __future__ import annotations

import importlib
import math
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from primal_attention.bench import measurement
from primal_attention.bench.measurement import REFUSED, Implementation, Row, choose
from primal_attention.nn.baselines import attention_names, attention_traits, make_attention
from primal_attention.nn.primal import PrimalAttention
from primal_attention.official.attention import AuthorsPrimal
from primal_attention.utils.errors import RunError
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
    def factory(self) -> dict[str, Any]:
        """Device and dtype as the keywords of a tensor or module."""
        return {"device": self.device, "dtype": self.dtype}


# Implementations


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
        Implementation("published", "published", partial(build_primal, "published")),
        *(Implementation(name, "baseline", partial(build_baseline, name)) for name in names),
    ]


def build_primal(backend: str, shape: Shape) -> PrimalAttention:
    """Build the layer with a backend of this library, or as the authors' code computes it ("published")."""
    if backend == "fused" and shape.device.type == "cpu":
        raise NotImplementedError("the kernels are timed on a GPU, not in Triton's interpreter")
    make: Any = AuthorsPrimal if backend == "published" else partial(PrimalAttention, backend=backend)  # type: ignore[arg-type]
    names = ("rank", "landmarks", "data_dependent", "causal", "decay")
    keywords = {name: getattr(shape, name) for name in names} | shape.factory
    if shape.causal and shape.data_dependent:
        keywords["max_length"] = shape.length
    return make(shape.embed_dim, shape.num_heads, **keywords)  # type: ignore[no-any-return]


def build_baseline(name: str, shape: Shape) -> nn.Module:
    """Build a baseline with its paper's settings; random features are drawn once."""
    traits = attention_traits(name)
    if shape.causal and not traits.supports_causal:
        raise NotImplementedError(f"{name} has no causal form")
    keywords: dict[str, Any] = {"causal": shape.causal, **shape.factory}
    if name == "linformer" or (name == "cosformer" and shape.causal):
        keywords["max_length"] = shape.length
    if traits.stochastic:
        keywords |= {"seed": 0, "redraw_every": None}
    layer = make_attention(name, shape.embed_dim, shape.num_heads, **keywords)
    layer.isolates_non_finite = False  # type: ignore[assignment]  # time the mechanism alone
    return layer


def build_sdpa(backend: str, shape: Shape) -> nn.Module:
    layer = build_baseline("softmax", shape)
    layer.forward = sdpa_kernel(SDPA_BACKENDS[backend])(layer.forward)  # type: ignore[method-assign]
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
    x, grad_y = (torch.randn(size, generator=generator, device=shape.device).to(shape.dtype) for _ in range(2))
    return x.requires_grad_(), grad_y


# The check


SHAPES = ((3, 77), (2, 331))  # odd, below and above the usual number of landmarks
FLOORS = {torch.bfloat16: 4e-3, torch.float16: 5e-4, torch.float32: 1e-5, torch.float64: 1e-12}


@cache
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
    verdicts: dict[float, dict[str, Any]] = {}
    for batch, length in SHAPES:
        small = replace(shape, batch=batch, length=length)
        x, grad_y = random_input(small, seed)
        precise = build_primal("reference", replace(small, dtype=torch.float64))
        exact = all_results(precise, weights, x.detach().double().requires_grad_(), grad_y.double())
        eager = all_results(build_primal("reference", small), weights, x, grad_y)
        results = all_results(build(small), weights, x, grad_y)
        for name, expected in exact.items():
            error, factor = rms_error(results[name], expected), 1.2 if expected.numel() > 32 else 4.0
            allowed = max(factor * rms_error(eager[name], expected), FLOORS[shape.dtype])
            excess = error / allowed if math.isfinite(error) else math.inf
            shown = error if math.isfinite(error) else None  # JSON has no NaN
            verdicts.setdefault(excess, {"passed": excess <= 1, "where": name, "error": shown, "allowed": allowed})
    return verdicts[max(verdicts)]


def all_results(layer: Any, weights: dict[str, Tensor], x: Tensor, grad_y: Tensor) -> dict[str, Tensor]:
    """Return output, objective and the gradients of input and parameters by name."""
    layer.load_state_dict(weights, strict=False)
    y = layer.train()(x)
    objective = layer.objective
    tensors = {"x": x, **dict(layer.named_parameters())}
    # J is a mean over tokens and heads. Undo it: its gradient would be below the rounding errors of the other.
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


def measure_layer(implementation: Implementation, shape: Shape, args: Namespace) -> Row:
    """Check an implementation of Primal-Attention, then measure the bytes saved for backward, peak memory and time."""
    row: Row = {}
    if implementation.kind in CHECKED:
        row["check"] = check = check_layer(implementation.build, replace(shape, batch=1, length=1), args.seed + 1)
        if not check["passed"]:
            errors = f"{check['error'] or math.nan:.1e}, allowed {check['allowed']:.1e}"
            return row | {"status": REFUSED, "note": f"wrong results: error of {check['where']} {errors}"}
    step = Step(implementation.build(shape), shape, args.seed, args.inference)
    step()  # compiles and allocates
    row["saved_bytes"] = None if args.inference else step.saved_bytes()
    return row | measurement.measure_step(step, args, args.eager)


def run_attention(args: Namespace, implementations: Sequence[Implementation] | None = None) -> dict[str, Any]:
    """Measure what the flags choose, or `implementations`; return the report, which is also written to `args.file`."""
    chosen = implementations or choose(list_implementations(), args.only, args.baselines)
    return measurement.measure_all(args, chosen, measure_layer, make_grid(args))
