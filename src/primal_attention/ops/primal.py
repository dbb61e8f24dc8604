"""Entry point: choose a backend and compute a layer.

    reference   the equations of `reference.py`, any dtype and device
    compiled    torch.compile of the equations
    cpu         few passes over memory with a hand-written backward pass (`cpu/`)
    fused       Triton kernels on a GPU (`triton/`)

"auto" uses "fused" on a GPU and "cpu" on a CPU where they support the call, otherwise "reference". The fast backends
cannot be differentiated twice.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import nullcontext
from functools import lru_cache
from importlib.util import find_spec
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd import forward_ad

from . import padding, reference
from .feature_maps import COSINE, FeatureMap
from .types import Boundary, Mode, Output, Scores, State, Weights

BACKENDS = ("auto", "reference", "compiled", "cpu", "fused")
SMALL_INPUT = 2**17  # numbers in x: with fewer, calls of operations take longer than the computation
MAX_HEAD_DIM = 256  # largest head width and rank of the fused kernels
FUSED_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
HAS_TRITON = find_spec("triton") is not None
MIN_TRITON = (3, 6)  # the oldest version that the kernels were tested with


def attend(
    x: Tensor,
    weights: Weights,
    mode: Mode,
    feature_map: FeatureMap = COSINE,
    *,
    qk: Tensor | None = None,
    valid: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
    decay: Tensor | None = None,
    state: State | None = None,
    shift: Tensor | None = None,
    boundary: Boundary | None = None,
    dropout: float = 0.0,
    trace: Literal["weights", "projections"] = "weights",
    backend: str = "auto",
    need_scores: bool = False,
    need_state: bool = False,
) -> Output:
    """Compute a layer on padded (B, N, d) or packed (total, d) input.

    Args:
        x: the input.
        weights: parameters of the layer. Maps that are None are applied by the caller.
        mode: the mode of the layer.
        feature_map: φ.
        qk: projected queries and keys, like x with 2d columns, if the caller has computed them.
        valid: (B, N) bool, True at tokens.
        cu_seqlens: boundaries of packed sequences.
        max_seqlen: the longest packed sequence.
        decay: γ of each head, (H,).
        state: the state before the first token (causal modes).
        shift: jitter of the landmarks.
        boundary: contributions of tokens on other ranks.
        dropout: rate of the dropout on the scores.
        trace: the weights under the trace of J.
        backend: one of `BACKENDS`.
        need_scores: return the scores.
        need_state: return the state after the last token.
    """
    check_shapes(x, weights, mode, decay)
    chosen = choose_backend(backend, x, weights, mode, feature_map, qk, decay, state, need_state, boundary)
    common: dict[str, Any] = {"qk": qk, "decay": decay, "shift": shift, "dropout": dropout, "trace": trace}
    if chosen == "fused":
        from .triton.layer import fused_attention

        with current_device(x):
            return fused_attention(
                x, weights, mode, valid=valid, cu_seqlens=cu_seqlens, state=state, boundary=boundary,
                need_scores=need_scores, need_state=need_state, **common,
            )  # fmt: skip
    compute: Callable[..., Output]
    if chosen == "cpu":
        from .cpu.attention import cpu_attention

        compute = cpu_attention
        common = {**common, "need_scores": need_scores, "need_state": need_state}
    else:
        is_compiled = chosen == "compiled" and not torch.compiler.is_compiling()  # else the caller compiles it
        compute = _compiled_attention() if is_compiled else reference.attention
        common = {**common, "feature_map": feature_map, "boundary": boundary}
    if cu_seqlens is None:
        return compute(x, weights, mode, valid=valid, state=state, **common)
    width = max(int(cu_seqlens.diff().max()), 1) if max_seqlen is None else max_seqlen
    rows, valid = padding.padded_positions(cu_seqlens, width)
    total = x.shape[0]

    def pad(t: Tensor) -> Tensor:
        return t[rows] if total else t.new_zeros(*rows.shape, t.shape[-1])

    padded, common["qk"] = pad(x), None if qk is None else pad(qk)
    result = compute(padded, weights, mode, valid=valid, **common)
    sequence, place = padding.packed_positions(cu_seqlens, total)
    scores = result.scores
    packed = None if scores is None else Scores(*(s.transpose(1, 2)[sequence, place].transpose(0, 1) for s in scores))
    y = None if result.y is None else result.y[sequence, place]
    return Output(y, result.energy, result.trace, packed)  # scores: (H, total, s)


def compute_objective(
    result: Output, sqrt_lambda: Tensor, tokens: Tensor | int, form: Literal["mean", "sum"] = "mean"
) -> Tensor:
    """Return J of each sample, (B,), from the energies and traces of a layer. tokens: (B,) or one number."""
    energy, trace = result.energy, result.trace
    assert energy is not None
    assert trace is not None
    heads, rank = energy.shape[1], energy.shape[3]  # the fused kernels store a rank that is rounded up
    if sqrt_lambda.shape != (heads, min(sqrt_lambda.shape[-1], rank) if result.is_fused else rank):
        raise ValueError(f"sqrt_lambda must have shape {(heads, rank)} (got {tuple(sqrt_lambda.shape)})")
    if not result.is_fused:
        return reference.objective(energy, trace, sqrt_lambda, tokens, form)
    if trace.ndim == 2:
        return reference.objective(energy[..., : sqrt_lambda.shape[1]], trace, sqrt_lambda, tokens, form)
    from .triton.objective import Objective

    lengths, length = (tokens, 0) if isinstance(tokens, Tensor) else (None, tokens)
    with current_device(energy):
        return Objective.apply(energy, sqrt_lambda, trace, lengths, length, form == "sum")  # type: ignore[no-any-return]


class _CoupleGradients(torch.autograd.Function):
    """Let the gradient of the objective enter the layer together with that of the output.

    FSDP gathers a layer's parameters when the gradient of its output arrives. The gradient of the objective could
    arrive earlier, when the parameters are still sharded.
    """

    @staticmethod
    def forward(ctx: Any, y: Tensor, objective: Tensor) -> tuple[Tensor, Tensor]:
        # Not views: autograd forbids writing into views of a node with two outputs, and `y += x` is common.
        return y.data, objective.data

    @staticmethod
    def backward(ctx: Any, grad_y: Tensor, grad_objective: Tensor) -> tuple[Tensor, Tensor]:
        return grad_y, grad_objective


def couple_gradients(y: Tensor, objective: Tensor) -> tuple[Tensor, Tensor]:
    """Return both unchanged; in distributed training their gradients arrive together."""
    if torch.distributed.is_available() and torch.distributed.is_initialized() and torch.is_grad_enabled():
        return _CoupleGradients.apply(y, objective)  # type: ignore[no-any-return]
    return y, objective


def check_shapes(x: Tensor, weights: Weights, mode: Mode, decay: Tensor | None = None) -> None:
    """Raise if a parameter does not fit x and the mode. The kernels read memory by these shapes."""
    d, heads, rank = x.shape[-1], mode.heads, weights.w_e.shape[-1]
    p = d // heads
    side = (heads, mode.landmarks if mode.data_dependent else p, rank)
    shapes = ((2 * d, d), (2 * d,), side, side, (p, 2 * rank), (p,), (d, d), (d,))
    for name, weight, shape in zip(Weights._fields, weights, shapes, strict=True):
        if weight is not None and weight.shape != shape:
            raise ValueError(f"{name} must have shape {shape} (got {tuple(weight.shape)})")
    if decay is not None and decay.shape != (heads,):
        raise ValueError(f"decay must have shape {(heads,)} (got {tuple(decay.shape)})")


@lru_cache(maxsize=1)
def _compiled_attention() -> Callable[..., Output]:
    return torch.compile(reference.attention, dynamic=True)


def choose_backend(
    backend: str,
    x: Tensor,
    weights: Weights,
    mode: Mode,
    feature_map: FeatureMap,
    qk: Tensor | None = None,
    decay: Tensor | None = None,
    state: State | None = None,
    need_state: bool = False,
    boundary: Boundary | None = None,
) -> str:
    """Return the backend of a call; raise if the requested one does not support it."""
    rank = weights.w_e.shape[2]
    if backend == "fused" or (backend == "auto" and x.is_cuda):
        why = why_not_fused(x, rank, mode, feature_map, state, need_state)
    elif backend == "cpu":
        why = why_not_cpu(weights, mode, feature_map, qk, decay, boundary)
        why = why if x.device.type == "cpu" else f"x is on {x.device.type!r}"
    elif backend != "auto":
        return backend
    # torch.compile fuses the equations itself, and other tracers record them better than one opaque node.
    elif x.device.type != "cpu" or torch.compiler.is_compiling() or torch.jit.is_tracing() or x.numel() < SMALL_INPUT:
        return "reference"
    else:
        return "reference" if why_not_cpu(weights, mode, feature_map, qk, decay, boundary) else "cpu"
    if why is None:
        return "cpu" if backend == "cpu" else "fused"
    if backend == "auto":
        return "reference"
    raise ValueError(f"backend={backend!r} does not support this call: {why} (backend='auto' falls back)")


def is_interpreting() -> bool:
    """Return True if Triton's interpreter runs the kernels on the CPU, as in the tests."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def device_problem(device: torch.device) -> str | None:
    """Return why the fused kernels cannot run on a device, or None."""
    if not HAS_TRITON:
        return "Triton is not installed"
    if _triton_version() < MIN_TRITON:
        return f"Triton is older than {'.'.join(map(str, MIN_TRITON))}"
    if device.type != "cuda":
        return None if is_interpreting() else f"x is on {device.type!r}, the kernels run on 'cuda'"
    if torch.version.hip is not None:
        return "the kernels are untested on AMD GPUs"
    return _capability_problem(device.index or 0)


# What torch.compiler.assume_constant_result does, without its import of torch._dynamo, which takes seconds.
device_problem._dynamo_marked_constant = True  # type: ignore[attr-defined]


@lru_cache(maxsize=1)
def _triton_version() -> tuple[int, ...]:
    import triton

    return tuple(map(int, triton.__version__.split(".")[:2]))


@lru_cache(maxsize=16)
def _capability_problem(index: int) -> str | None:
    major, minor = torch.cuda.get_device_capability(index)
    return None if major >= 8 else f"the GPU's compute capability {major}.{minor} is below 8.0"


def fused_problem(x: Tensor) -> str | None:
    """Return why no fused kernel can read x, or None."""
    if (problem := device_problem(x.device)) is not None:
        return problem
    dtype = torch.get_autocast_dtype(x.device.type) if torch.is_autocast_enabled(x.device.type) else x.dtype
    if dtype not in FUSED_DTYPES:
        return f"{dtype} is not one of bfloat16, float16, float32"
    return "x is empty" if x.numel() == 0 else None


def why_not_fused(
    x: Tensor, rank: int, mode: Mode, feature_map: FeatureMap, state: State | None = None, need_state: bool = False
) -> str | None:
    """Return why the fused kernels do not support a call, or None."""
    if (problem := fused_problem(x)) is not None:
        return problem
    streams, head_dim = state is not None or need_state, x.shape[-1] // mode.heads
    if streams and torch.is_grad_enabled():
        return "gradients through a streaming state need the equations (torch.no_grad() has none)"
    if mode.causal and mode.data_dependent:
        if streams:
            return "the causal data-dependent mode streams through the equations"
        from .triton.causal_landmarks import fits_registers

        if not fits_registers(head_dim, rank):
            return f"head width {head_dim} and rank {rank} do not fit the registers of a causal data-dependent kernel"
    if max(head_dim, rank) > MAX_HEAD_DIM:
        return f"head width {head_dim} and rank {rank} must not exceed {MAX_HEAD_DIM}"
    return _transform_problem(feature_map)


def why_not_cpu(
    weights: Weights,
    mode: Mode,
    feature_map: FeatureMap,
    qk: Tensor | None = None,
    decay: Tensor | None = None,
    boundary: Boundary | None = None,
) -> str | None:
    """Return why the CPU backend does not support a call, or None."""
    if mode.causal and mode.data_dependent:
        return "it has no causal data-dependent mode"
    if decay is not None and not mode.causal:
        return "it has no decay in both directions"
    if qk is not None or weights.qk_weight is None or weights.out_weight is None:
        return "it reads the weights of plain nn.Linear maps only"
    if boundary is not None:
        return "it needs complete sequences"
    return _transform_problem(feature_map)


def _transform_problem(feature_map: FeatureMap) -> str | None:
    if not feature_map.is_scale_free:
        return "only the cosine feature map has a fast path"
    if torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0:
        return "torch.func transforms and forward derivatives need the equations"
    return None


def current_device(x: Tensor) -> Any:
    """Make the device of x the current one, on which Triton launches. Compiled code and autograd do so themselves."""
    if not x.is_cuda or torch.compiler.is_compiling() or x.device.index in (None, torch.cuda.current_device()):
        return nullcontext()
    return torch.cuda.device(x.device)
