"""PrimalAttention: attention from the primal side of an asymmetric kernel SVD (Chen et al., NeurIPS 2023).

    e(x) = W_{e|X}ᵀ φ(q(x)),   r(x) = W_{r|X}ᵀ φ(k(x)),   o = W_o [e; r]

Linear in the number of tokens: the N×N kernel matrix that the scores belong to is never formed. `objective` holds the
KSVD objective J of the last forward in training mode; `ksvd_loss` turns it into a loss.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from ..ops import feature_maps, layout
from ..ops import reference as eq
from ..ops.layer import Objective, Weights
from ..ops.modes import COSINE, FeatureMap, Mode, State, kernel_factors
from ..ops.primal import attend
from ..ops.recompute import recomputed
from ..ops.reference import LandmarkState, RunningState
from ..ops.sampling import random_shift
from . import checks
from .tie import tie

if TYPE_CHECKING:
    from ..parallel.context import Context

BACKENDS = ("auto", "reference", "compiled", "lean", "fused")


class PrimalAttention(nn.Module):
    """Drop-in self-attention, linear in the sequence length.

    Args:
        rank: s, the number of directions of each head's projection scores.
        landmarks: how many rows of the input make the data-dependent projection weights.
        sampling: "even" takes evenly spaced rows; "random" moves each of them in training, by up to half of the way to
            its neighbours, so that a sequence cannot be learned by heart from its landmarks.
        data_dependent: build W_{e|X}, W_{r|X} from the input's landmarks, or use W_e, W_r themselves.
        causal: position i sees positions ≤ i only, and the layer streams (`initial_state`, `step`).
        decay: causal modes. None is the paper's running mean; "learned" gives each head a factor γ in (0, 1) by which
            the past fades per token; a number or one per head fixes it.
        feature_map: "cosine", "softmax" (positive random features with D̂) or a callable on (..., head_dim).
        dropout: on the projection scores, after the objective has seen them.
        recompute: keep x alone for the way back and make the pass again there: less memory, more time.
        max_length: causal and data-dependent: the length over which the landmarks' grid is laid.
        objective_form: "mean" over tokens (training) or the paper's "sum".
        objective_trace: "weights" for Tr(W_eᵀ W_r), "projections" for Tr(W_{e|X}ᵀ W_{r|X}).
    """

    context: Context | None = None
    """The ranks that hold the rest of the sequences; `primal_attention.context_parallel` sets it."""

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        rank: int = 30,
        landmarks: int = 300,
        sampling: Literal["even", "random"] = "even",
        data_dependent: bool = True,
        causal: bool = False,
        decay: Literal["learned"] | float | Sequence[float] | None = None,
        feature_map: Literal["cosine", "softmax"] | Callable[[Tensor], Tensor] = "cosine",
        bias: bool = True,
        dropout: float = 0.0,
        backend: Literal["auto", "reference", "compiled", "lean", "fused"] = "auto",
        recompute: bool = False,
        max_length: int | None = None,
        objective_form: Literal["mean", "sum"] = "mean",
        objective_trace: Literal["weights", "projections"] = "weights",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        checks.widths(embed_dim, num_heads)
        checks.positive("landmarks", landmarks)
        checks.rank(rank, embed_dim // num_heads, landmarks if data_dependent else None)
        checks.probability("dropout", dropout)
        checks.one_of("backend", backend, BACKENDS)
        checks.one_of("objective_form", objective_form, ("mean", "sum"))
        checks.one_of("objective_trace", objective_trace, ("weights", "projections"))
        checks.one_of("sampling", sampling, ("even", "random"))
        if sampling == "random" and (causal or not data_dependent):
            raise ValueError(
                "sampling='random' needs data_dependent=True and causal=False "
                f"(got data_dependent={data_dependent}, causal={causal})"
            )
        _check_causal_arguments(causal, data_dependent, decay, max_length, objective_trace)
        self.embed_dim, self.num_heads, self.head_dim = embed_dim, num_heads, embed_dim // num_heads
        self.rank, self.landmarks, self.max_length, self.sampling = rank, landmarks, max_length, sampling
        self.data_dependent, self.causal = data_dependent, causal
        self.dropout, self.backend, self.recompute = dropout, backend, recompute
        self.objective_form: Literal["mean", "sum"] = objective_form
        self.objective_trace: Literal["weights", "projections"] = objective_trace
        self._objective: Tensor | None = None

        where: dict[str, Any] = {"device": device, "dtype": dtype}
        rows = landmarks if data_dependent else self.head_dim
        self.qk_proj = nn.Linear(embed_dim, 2 * embed_dim, bias=bias, **where)
        self.w_e = nn.Parameter(torch.empty(num_heads, rows, rank, **where))
        self.w_r = nn.Parameter(torch.empty(num_heads, rows, rank, **where))
        self.sqrt_lambda = nn.Parameter(torch.empty(num_heads, rank, **where))
        self.score_proj = nn.Linear(2 * rank, self.head_dim, bias=bias, **where)
        self.out_proj = nn.Linear(embed_dim, embed_dim, bias=bias, **where)
        self._set_decay(decay, where)
        self._set_feature_map(feature_map, where)
        self.reset_parameters()

    @property
    def mode(self) -> Mode:
        return Mode(self.num_heads, self.landmarks, self.data_dependent, self.causal, self.max_length)

    def reset_parameters(self) -> None:
        """W_e, W_r with orthonormal heads (as one row each), √Λ uniform in [0, 1), linear maps as torch starts them."""
        for linear in (self.qk_proj, self.score_proj, self.out_proj):
            linear.reset_parameters()
        for w in (self.w_e, self.w_r):
            if w is None:  # a layer whose tokens write them
                continue
            # The QR decomposition behind it does not exist in half precision.
            start = nn.init.orthogonal_(torch.empty_like(w, dtype=eq.wide(w.dtype)))
            with torch.no_grad():
                w.copy_(start)
        nn.init.uniform_(self.sqrt_lambda)
        if isinstance(self.decay_logit, nn.Parameter):
            # Time scales 1 / (1 − γ) from about one token to some four hundred.
            start = torch.linspace(-1.0, 6.0, self.num_heads) if self.num_heads > 1 else torch.tensor([2.5])
            with torch.no_grad():
                self.decay_logit.copy_(start)

    def _set_decay(self, decay: Literal["learned"] | float | Sequence[float] | None, where: dict[str, Any]) -> None:
        # γ is kept as its logit: half precision has next to no numbers between 0.99 and 1.
        self.decay_logit: Tensor | None
        if isinstance(decay, str):
            self.decay_logit = nn.Parameter(torch.empty(self.num_heads, **where))
        elif decay is None:
            self.decay_logit = None
        else:
            rates = torch.as_tensor(decay, dtype=torch.float64)
            if rates.ndim > 1 or rates.numel() not in (1, self.num_heads):
                raise ValueError(f"decay must be one number or num_heads={self.num_heads} numbers (got {decay!r})")
            if not ((rates > 0) & (rates <= 1)).all():
                raise ValueError(f"decay must lie in (0, 1] (got {decay!r})")
            logit = (
                rates.expand(self.num_heads).logit().to(where["device"], where["dtype"] or torch.get_default_dtype())
            )
            self.register_buffer("decay_logit", logit, persistent=False)

    def _set_feature_map(self, feature_map: str | Callable[[Tensor], Tensor], where: dict[str, Any]) -> None:
        self.register_buffer("frequencies", None)
        self._custom_map: Callable[[Tensor], Tensor] | None = None
        if callable(feature_map):
            self._custom_map = feature_map
            self.feature_map = getattr(feature_map, "__name__", type(feature_map).__name__)
            return
        checks.one_of("feature_map", feature_map, ("cosine", "softmax"))
        self.feature_map = feature_map
        if feature_map == "softmax":
            self.frequencies = torch.randn(self.num_heads, self.head_dim, self.head_dim, **where)

    @property
    def decay(self) -> Tensor | None:
        """γ of each head, (H,), or None where nothing fades."""
        return None if self.decay_logit is None else self.decay_logit.to(eq.wide(self.decay_logit.dtype)).sigmoid()

    @property
    def objective(self) -> Tensor | None:
        """J per sample, (B,), of the last forward in training mode; None before it."""
        return self._objective

    def _feature_map(self) -> FeatureMap:
        if self._custom_map is not None:
            return FeatureMap(self._apply_custom_map)
        if self.feature_map == "softmax":
            frequencies = self.frequencies
            return FeatureMap(lambda z: feature_maps.positive_random(z, frequencies), normalised=True)
        return COSINE

    def _apply_custom_map(self, z: Tensor) -> Tensor:
        assert self._custom_map is not None
        phi = self._custom_map(z)
        if phi.shape != z.shape:
            raise ValueError(
                f"feature_map must keep the head width {self.head_dim} ({tuple(z.shape)} became {tuple(phi.shape)})"
            )
        return phi

    def _objective_spec(self) -> Objective:
        return Objective(self.sqrt_lambda, self.objective_form, self.objective_trace)

    def _weights(self) -> Weights:
        return Weights(
            self.qk_proj.weight,
            self.qk_proj.bias,
            self.w_e,
            self.w_r,
            self.score_proj.weight,
            self.score_proj.bias,
            self.out_proj.weight,
            self.out_proj.bias,
        )

    def forward(
        self,
        x: Tensor,
        key_padding_mask: Tensor | None = None,
        *,
        cu_seqlens: Tensor | None = None,
        max_seqlen: int | None = None,
        state: State | None = None,
        return_scores: bool = False,
        return_state: bool = False,
    ) -> Any:
        """y of the shape of x; with `return_scores` or `return_state` a tuple (y, scores, state) of what was asked.

        Args:
            x: (B, N, embed_dim), or (total, embed_dim) with `cu_seqlens`.
            key_padding_mask: (B, N) bool, True at padding, which may stand anywhere. Outputs there are zero.
            cu_seqlens: int32 boundaries of the packed sequences, as FlashAttention's varlen functions take them.
            max_seqlen: the longest packed sequence, if known; saves a look at the device.
            state: where an earlier stretch of the sequences ended (causal modes).
        """
        checks.tokens(x, self.embed_dim, packed=cu_seqlens is not None)
        if key_padding_mask is not None:
            if cu_seqlens is not None:
                raise ValueError("key_padding_mask and cu_seqlens exclude each other: packed input has no padding")
            checks.padding_mask(key_padding_mask, x)
        if (state is not None or return_state) and not self.causal:
            raise ValueError("state needs a causal layer (causal=False): only the causal modes stream")
        if state is not None:
            checks.state(state, LandmarkState if self.data_dependent else RunningState, x.shape[0])
        if cu_seqlens is not None:
            layout.check_boundaries(cu_seqlens, x.shape[0], max_seqlen)
            if state is not None or return_state:
                raise ValueError("state and cu_seqlens exclude each other: stream padded batches instead")
        elif max_seqlen is not None:
            raise ValueError(f"max_seqlen={max_seqlen} has a meaning only with cu_seqlens")
        if self.context is not None:
            self._check_whole("state", state is not None or return_state)
            self._check_whole("cu_seqlens", cu_seqlens is not None)
        self._check_length(x, key_padding_mask, state, cu_seqlens, max_seqlen)
        if self.training:
            # The last pass' graph goes before this one's is built: kept, it would bind the parameters' gradients to the
            # stream of that pass, which a CUDA graph's capture does not survive.
            self._keep_objective(None)
        shift = None
        if self.training and self.sampling == "random":
            shift = random_shift(self.landmarks, x.device)
            shift = shift if self.context is None else self.context.first(shift)
        pass_over = recomputed if self.recompute and torch.is_grad_enabled() else attend
        result = pass_over(
            x,
            self._weights(),
            self.mode,
            self._feature_map(),
            valid=None if key_padding_mask is None else ~key_padding_mask,
            cu_seqlens=cu_seqlens,
            max_seqlen=max_seqlen,
            decay=self.decay,
            state=state,
            shift=shift,
            dropout=self.dropout if self.training else 0.0,
            objective=self._objective_spec() if self.training else None,
            backend=self.backend,
            need_scores=return_scores,
            need_state=return_state,
            context=self.context,
        )
        y = result.y
        if result.objective is not None:
            y, objective = tie(y, result.objective)
            self._keep_objective(objective)
        extras = ([result.scores] if return_scores else []) + ([result.state] if return_state else [])
        return (y, *extras) if extras else y

    def _keep_objective(self, objective: Tensor | None) -> None:
        object.__setattr__(self, "_objective", objective)  # nn.Module would first look whether it is a parameter

    def _check_whole(self, what: str, asked: bool = True) -> None:
        if self.context is not None and asked:
            raise ValueError(f"{what} needs whole sequences, and this layer has shards of them (context parallelism)")

    def _check_length(
        self,
        x: Tensor,
        mask: Tensor | None = None,
        state: State | None = None,
        cu_seqlens: Tensor | None = None,
        max_seqlen: int | None = None,
    ) -> None:
        if self.max_length is None:
            return
        past = state.steps if isinstance(state, LandmarkState) else 0
        longest = past + (x.shape[-2] if max_seqlen is None else max_seqlen)
        # This bound counts padding and, when packed, the other sequences too: only a sequence that really is longer is
        # an error. Inside torch.compile the look at the device is left out.
        if longest > self.max_length and (mask is not None or state is not None or cu_seqlens is not None):
            if torch.compiler.is_compiling():
                return
            longest = _longest(x, mask, state, cu_seqlens)
        if longest > self.max_length:
            raise ValueError(f"max_length={self.max_length} is exceeded by a sequence of {longest} tokens")

    def kernel_factors(self, x: Tensor, key_padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """φ′_q, φ′_k, (B, H, N, n or p), with K = φ′_q φ′_kᵀ: the kernel without forming it."""
        checks.tokens(x, self.embed_dim, packed=False)
        self._check_whole("the kernel")
        valid = None
        if key_padding_mask is not None:
            checks.padding_mask(key_padding_mask, x)
            valid = ~key_padding_mask
            x = x.masked_fill(key_padding_mask[..., None], 0.0)
        self._check_length(x, key_padding_mask)
        q, k = self.qk_proj(x).chunk(2, dim=-1)
        return kernel_factors(x, q, k, self.mode, self._feature_map(), valid=valid, decay=self.decay)

    def kernel_matrix(self, x: Tensor, key_padding_mask: Tensor | None = None) -> Tensor:
        """K_ij = ⟨φ′_q(x_i), φ′_k(x_j)⟩ of Theorem 3.2, (B, H, N, N): for looking at short sequences."""
        phi_q, phi_k = self.kernel_factors(x, key_padding_mask)
        return phi_q @ phi_k.mT

    def initial_state(self, batch_size: int) -> State:
        """The state before the first token (causal modes)."""
        if not self.causal:
            raise ValueError("initial_state needs a causal layer (causal=False): only the causal modes stream")
        dtype, device = eq.wide(self.w_e.dtype), self.w_e.device
        heads, p, s = self.num_heads, self.head_dim, self.rank
        feature_sum = (
            torch.zeros(batch_size, heads, p, dtype=dtype, device=device) if self.feature_map == "softmax" else None
        )
        if self.data_dependent:
            weights = torch.zeros(2, batch_size, heads, p, s, dtype=dtype, device=device)
            position = torch.zeros(batch_size, dtype=torch.int64, device=device)
            return LandmarkState(weights[0], weights[1], position, 0, feature_sum)
        sums = torch.zeros(2, batch_size, heads, p, dtype=dtype, device=device)
        return RunningState(sums[0], sums[1], torch.zeros_like(sums[0, ..., 0]), feature_sum)

    def step(self, x_t: Tensor, state: State, key_padding_mask: Tensor | None = None) -> tuple[Tensor, State]:
        """One token of each sequence: x_t (B, embed_dim) → y_t, row t of the full pass, and the state after it.

        key_padding_mask: (B,) bool, True where a sequence has no token at this step.
        """
        if not self.causal:
            raise ValueError("step needs a causal layer (causal=False): only the causal modes stream")
        if x_t.ndim != 2 or x_t.shape[-1] != self.embed_dim:
            raise ValueError(f"x_t must have shape (batch, {self.embed_dim}) (got {tuple(x_t.shape)})")
        mask = None if key_padding_mask is None else key_padding_mask[:, None]
        y, state = self(x_t[:, None], mask, state=state, return_state=True)
        return y[:, 0], state

    def extra_repr(self) -> str:
        kind = ("causal, " if self.causal else "") + ("data-dependent" if self.data_dependent else "data-independent")
        landmarks = f", landmarks={self.landmarks}" if self.data_dependent else ""
        return f"{self.embed_dim}, heads={self.num_heads}, rank={self.rank}{landmarks}, {kind}, backend={self.backend}"

    def __getstate__(self) -> dict[str, Any]:
        # The objective belongs to one forward and its graph; a copy of the layer starts without it.
        return {**self.__dict__, "_objective": None}


def _longest(x: Tensor, mask: Tensor | None, state: State | None, cu_seqlens: Tensor | None) -> int:
    """How many tokens the longest sequence has, those before `state` included."""
    if cu_seqlens is not None:
        lengths = cu_seqlens.diff()
    else:
        lengths = x.new_full(x.shape[:1], x.shape[1], dtype=torch.int64) if mask is None else (~mask).sum(dim=1)
    if isinstance(state, LandmarkState):
        lengths = lengths + state.position
    return int(lengths.max()) if lengths.numel() else 0


def _check_causal_arguments(
    causal: bool, data_dependent: bool, decay: object, max_length: int | None, objective_trace: str
) -> None:
    if decay is not None and not causal:
        raise ValueError(f"decay needs causal=True (got decay={decay!r} with causal=False)")
    if isinstance(decay, str):
        checks.one_of("decay", decay, ("learned",))
    if causal and data_dependent:
        if max_length is None:
            raise ValueError("max_length is required when causal and data_dependent: the landmarks' grid spans it")
        checks.positive("max_length", max_length)
        if objective_trace == "projections":
            raise ValueError(
                "objective_trace='projections' needs one W_{e|X} per sequence: not in the causal data-dependent mode"
            )
    elif max_length is not None:
        raise ValueError(f"max_length={max_length} has a meaning only when causal and data_dependent are both True")
