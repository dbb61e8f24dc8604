"""PrimalAttention: self-attention as an asymmetric kernel SVD in its primal form (Chen et al., NeurIPS 2023).

    e(x) = W_{e|X}ᵀ φ(q(x)),   r(x) = W_{r|X}ᵀ φ(k(x)),   o = W_o [e; r]

The cost is linear in the number of tokens: the N×N kernel matrix is never formed. `ops/reference.py` has the equations.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from ..ops import feature_maps, padding, reference
from ..ops.feature_maps import COSINE, FeatureMap, accumulation_dtype
from ..ops.landmarks import random_shift
from ..ops.primal import BACKENDS, attend, compute_objective, couple_gradients
from ..ops.types import LandmarkState, Mode, Output, RunningState, State, Weights
from . import checks


class PrimalAttention(nn.Module):
    """Self-attention whose time and memory are linear in the sequence length (Chen et al., NeurIPS 2023).

    The projections `qk_proj`, `score_proj` and `out_proj` may be replaced, wrapped, parametrised or hooked: one that is
    not a plain `nn.Linear` is called as a module. With `causal=False`, `data_dependent=False` and no decay the layer
    does not mix tokens: each output depends on its own token only.

    Args:
        embed_dim: width of the tokens, d.
        num_heads: number of heads, H; the head width is p = d / H.
        rank: number of directions of each head's projection scores, s. Use at most p.
        landmarks: number of input rows that build the data-dependent weights, n. Use at most the typical length.
        sampling: "even" spaces the landmarks evenly; "random" jitters each by up to half the landmark spacing during
            training, so that the layer cannot memorise sequences by their landmarks.
        data_dependent: build W_{e|X}, W_{r|X} from the landmarks of the input; False uses W_e, W_r as they are.
        causal: position i depends on positions ≤ i only, and the layer streams (`initial_state`, `step`). A NaN in a
            token does not change earlier outputs, but earlier gradients become NaN, as in torch's attention.
        decay: factor γ of each head per token. None: the paper's running mean. "learned": a parameter in (0, 1),
            initialised over time scales from one to a few hundred tokens. A number, or one per head, fixes it. Causal
            modes weight past tokens by γ^(i−j); with `causal=False, data_dependent=False` all tokens by γ^|i−j|.
        feature_map: "cosine", "softmax" (positive random features with D̂), or a callable on (..., head_dim).
        bias: add a bias to the three projections.
        dropout: rate of the dropout on the projection scores, after the objective.
        backend: "auto", "fused" (Triton kernels), "cpu", "compiled" (torch.compile of the equations) or "reference".
            "cpu" uses the equations if a projection is not a plain `nn.Linear`.
        recompute: save x only and recompute the layer in the backward pass: less memory, more time.
        max_length: length of the landmark grid; required if both `causal` and `data_dependent`.
        objective_form: "mean" averages the energies in J over the tokens, "sum" is the paper's J.
        objective_trace: "weights" for Tr(W_eᵀ W_r), "projections" for Tr(W_{e|X}ᵀ W_{r|X}).
        device: device of the parameters.
        dtype: dtype of the parameters.

    Examples:
        >>> import torch
        >>> from primal_attention import PrimalAttention
        >>> attn = PrimalAttention(embed_dim=64, num_heads=4, rank=8, landmarks=16)
        >>> x = torch.randn(2, 50, 64)
        >>> attn(x).shape
        torch.Size([2, 50, 64])
        >>> y, scores = attn(x, return_scores=True)
        >>> scores.e.shape
        torch.Size([2, 4, 50, 8])
    """

    context: Any = None
    """Exchange with the ranks of the other shards of the sequences; set by `primal_attention.context_parallel`."""

    # Read by torch's encoders. Without `in_proj_bias` their layers do not take the softmax fast path.
    batch_first = True
    in_proj_bias = None
    in_proj_weight = property(lambda self: self.qk_proj.weight)
    _qkv_same_embed_dim = True

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
        backend: Literal["auto", "reference", "compiled", "cpu", "fused"] = "auto",
        recompute: bool = False,
        max_length: int | None = None,
        objective_form: Literal["mean", "sum"] = "mean",
        objective_trace: Literal["weights", "projections"] = "weights",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        flags = {"data_dependent": data_dependent, "causal": causal, "bias": bias, "recompute": recompute}
        for name, value in flags.items():
            checks.boolean(name, value)
        checks.widths(embed_dim, num_heads)
        checks.positive("landmarks", landmarks)
        checks.rank(rank, embed_dim // num_heads, landmarks if data_dependent else None)
        checks.probability("dropout", dropout)
        if backend == "lean":
            raise ValueError("backend='lean' is now called 'cpu'")
        checks.one_of("backend", backend, BACKENDS)
        checks.one_of("objective_form", objective_form, ("mean", "sum"))
        checks.one_of("objective_trace", objective_trace, ("weights", "projections"))
        checks.one_of("sampling", sampling, ("even", "random"))
        if sampling == "random" and (causal or not data_dependent):
            settings = f"data_dependent={data_dependent}, causal={causal}"
            raise ValueError(f"sampling='random' needs data_dependent=True and causal=False (got {settings})")
        if causal and data_dependent:
            if max_length is None:
                raise ValueError("max_length is required when causal and data_dependent: the landmark grid spans it")
            checks.positive("max_length", max_length)
            if objective_trace == "projections":
                raise ValueError("objective_trace='projections' is not defined in the causal data-dependent mode")
        elif max_length is not None:
            raise ValueError(f"max_length={max_length} is used only if causal and data_dependent are both True")
        self.embed_dim, self.num_heads, self.head_dim = embed_dim, num_heads, embed_dim // num_heads
        self.rank, self.landmarks, self.max_length, self.sampling = rank, landmarks, max_length, sampling
        self.data_dependent, self.causal = data_dependent, causal
        self.dropout, self.backend, self.recompute = dropout, backend, recompute
        self.objective_form: Literal["mean", "sum"] = objective_form
        self.objective_trace: Literal["weights", "projections"] = objective_trace
        self._state_type: type[State] = LandmarkState if data_dependent else RunningState
        self._objective: Tensor | None = None  # of the last call in training mode
        self._last_call: RecordedCall | None = None  # set by `record_objective`

        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        rows = landmarks if data_dependent else self.head_dim
        self.qk_proj = nn.Linear(embed_dim, 2 * embed_dim, bias=bias, **factory)
        self.w_e = nn.Parameter(torch.empty(num_heads, rows, rank, **factory))
        self.w_r = nn.Parameter(torch.empty(num_heads, rows, rank, **factory))
        self.sqrt_lambda = nn.Parameter(torch.empty(num_heads, rank, **factory))
        self.score_proj = nn.Linear(2 * rank, self.head_dim, bias=bias, **factory)
        self.out_proj = nn.Linear(embed_dim, embed_dim, bias=bias, **factory)
        self._init_decay(decay, factory)
        self._init_feature_map(feature_map, factory)
        self.reset_parameters()

    def _init_decay(self, decay: Literal["learned"] | float | Sequence[float] | None, factory: dict[str, Any]) -> None:
        # Stored as a logit: 16-bit floats have few numbers between 0.99 and 1.
        self.decay_logit: Tensor | None
        self._fixed_decay: tuple[float, ...] | None = None
        if decay is not None and self.data_dependent and not self.causal:
            raise ValueError(f"decay needs causal=True or data_dependent=False (got decay={decay!r})")
        if decay is None:
            self.decay_logit = None
        elif isinstance(decay, (str, bool)):
            checks.one_of("decay", decay, ("learned",))
            self.decay_logit = nn.Parameter(torch.empty(self.num_heads, **factory))
        else:
            try:
                rates = torch.as_tensor(decay, dtype=torch.float64, device="cpu")
            except (TypeError, ValueError):
                accepted = "None, 'learned', a number or a number per head"
                raise TypeError(f"decay must be {accepted} (got {decay!r})") from None
            if rates.ndim > 1 or rates.numel() not in (1, self.num_heads):
                raise ValueError(f"decay must be one number or num_heads={self.num_heads} numbers (got {decay!r})")
            if not ((rates > 0) & (rates <= 1)).all():
                raise ValueError(f"decay must lie in (0, 1] (got {decay!r})")
            if (rates < torch.finfo(torch.float32).tiny).any():
                raise ValueError(f"decay underflows in float32 (got {decay!r}): use at least 1.2e-38")
            self._fixed_decay = tuple(rates.expand(self.num_heads).tolist())
            self.register_buffer("decay_logit", torch.empty(self.num_heads, **factory), persistent=False)

    def _init_feature_map(self, feature_map: str | Callable[[Tensor], Tensor], factory: dict[str, Any]) -> None:
        self.register_buffer("frequencies", None)
        self._custom_map: Callable[[Tensor], Tensor] | None = None
        if callable(feature_map):
            self._custom_map = feature_map
            self.feature_map = getattr(feature_map, "__name__", type(feature_map).__name__)
            return
        checks.one_of("feature_map", feature_map, ("cosine", "softmax"))
        self.feature_map = feature_map
        if feature_map == "softmax":
            self.frequencies = torch.empty(self.num_heads, self.head_dim, self.head_dim, **factory)

    def reset_parameters(self) -> None:
        """Initialise all parameters and buffers, also after `to_empty`.

        W_e and W_r have orthonormal heads (each flattened to one row), √Λ is uniform in [0, 1), and the projections are
        initialised as in torch. A fixed decay and the random features of the softmax map are restored.
        """
        for linear in (self.qk_proj, self.score_proj, self.out_proj):
            linear.reset_parameters()
        for w in (self.w_e, self.w_r):
            if w is not None:
                # The QR decomposition does not exist in half precision.
                start = nn.init.orthogonal_(torch.empty_like(w, dtype=accumulation_dtype(w.dtype)))
                with torch.no_grad():
                    w.copy_(start)
        nn.init.uniform_(self.sqrt_lambda)
        self.restore_decay()
        with torch.no_grad():
            if self.decay_logit is not None and self._fixed_decay is None:
                # Time scales 1 / (1 − γ) from about one to four hundred tokens.
                heads = self.num_heads
                self.decay_logit.copy_(torch.linspace(-1.0, 6.0, heads) if heads > 1 else torch.tensor([2.5]))
            if self.frequencies is not None:
                self.frequencies.normal_()

    def restore_decay(self) -> None:
        """Set a fixed decay. Its buffer is not part of the state dict."""
        if self._fixed_decay is not None and self.decay_logit is not None:
            if self.decay_logit.device != self.sqrt_lambda.device:  # on "meta" before `load_state_dict(assign=True)`
                self.decay_logit = torch.empty_like(self.decay_logit, device=self.sqrt_lambda.device)
            self.decay_logit.copy_(torch.tensor(self._fixed_decay, dtype=torch.float64, device="cpu").logit())

    def _load_from_state_dict(self, *args: Any) -> None:
        super()._load_from_state_dict(*args)  # type: ignore[no-untyped-call]
        self.restore_decay()

    @property
    def mode(self) -> Mode:
        return Mode(self.num_heads, self.landmarks, self.data_dependent, self.causal, self.max_length)

    @property
    def decay(self) -> Tensor | None:
        """γ of each head, (H,), or None without decay."""
        if self.decay_logit is None:
            return None
        dtype = accumulation_dtype(self.decay_logit.dtype)
        return self.decay_logit.to(dtype).sigmoid().clamp(min=torch.finfo(dtype).tiny)  # log γ stays finite

    @property
    def objective(self) -> Tensor | None:
        """J of each sample, (B,), of the last forward in training mode or inside `record_objective`; None before it."""
        recorded = None if self._last_call is None else self._last_call.objective
        return self._objective if recorded is None else recorded

    def forward(
        self,
        x: Tensor,
        key: Tensor | None = None,
        value: Tensor | None = None,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = False,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
        *,
        cu_seqlens: Tensor | None = None,
        max_seqlen: int | None = None,
        state: State | None = None,
        return_scores: bool = False,
        return_state: bool = False,
    ) -> Any:
        """Attend within each sequence.

        Args:
            x: (B, N, embed_dim), or (total, embed_dim) with `cu_seqlens`.
            key: the same tensor as x, as in `nn.MultiheadAttention`. A bool tensor here is the padding mask.
            value: the same tensor as x.
            key_padding_mask: (B, N), True (or −inf) at padding, which may be anywhere. Outputs there are zero.
            need_weights: not supported; `kernel_matrix` returns the kernel of short sequences.
            attn_mask: accepted if it is the causal mask and the layer is causal, or if it hides nothing and the layer
                is not. Its values are not read under torch.compile.
            average_attn_weights: ignored.
            is_causal: accepted if the layer is causal.
            cu_seqlens: int32 boundaries of packed sequences, as in FlashAttention's varlen functions.
            max_seqlen: the longest packed sequence; saves a device synchronisation.
            state: the state after earlier tokens of the sequences (causal modes).
            return_scores: also return the projection scores.
            return_state: also return the state after the last token (causal modes).

        Returns:
            y of the shape of x; (y, None) if `key` and `value` are passed; then scores and state if requested.
        """
        key, mask = self._check_like_multihead(x, key, value, key_padding_mask, need_weights, attn_mask, is_causal)
        mask = self._check_input(x, mask, cu_seqlens, max_seqlen, state, return_state)
        valid = None if mask is None else ~mask
        needs_objective = self._begin_objective()
        shift = None
        if self.training and self.sampling == "random":
            shift = random_shift(self.landmarks, x.device)
            shift = shift if self.context is None else self.context.first(shift)
        weights, applies_output = self._weights()
        qk, boundary = None, None
        tokens: Tensor | int = x.shape[-2]
        if weights.qk_weight is None or self.context is not None:
            x = x if valid is None else x.masked_fill(~valid[..., None], 0.0)  # zero the padding, including NaNs
            qk = self._project_qk(x)
            weights = Weights(None, None, *weights[2:])
        decay, feature_map = self.decay, self._feature_map()
        if self.context is not None:
            boundary, tokens = self.context.boundary(x, qk, self.mode, feature_map, valid, decay, shift)
        elif cu_seqlens is not None:
            tokens = cu_seqlens.diff()
        elif valid is not None:
            tokens = valid.sum(dim=1)
        dropout = self.dropout if self.training else 0.0
        # The CPU backend reads the weights of plain maps only.
        is_called = x.device.type == "cpu" and (qk is not None or applies_output)
        backend = "reference" if is_called and self.backend == "cpu" else self.backend
        compute: Callable[..., Output] = attend
        if self.recompute and torch.is_grad_enabled():
            # The recomputation must draw the same dropout mask. Without dropout the generator is not read, because
            # CUDA-graph capture forbids reading it.
            compute = partial(checkpoint, attend, use_reentrant=False, preserve_rng_state=dropout > 0)
        result = compute(
            x, weights, self.mode, feature_map, qk=qk, valid=valid, cu_seqlens=cu_seqlens, max_seqlen=max_seqlen,
            decay=decay, state=state, shift=shift, boundary=boundary, dropout=dropout, trace=self.objective_trace,
            backend=backend, need_scores=return_scores, need_state=return_state,
        )  # fmt: skip
        y, energy, trace = result.y, result.energy, result.trace
        if applies_output:
            y = self._apply_output(result, dropout, cu_seqlens is not None)
            y = y if valid is None else y.masked_fill(~valid[..., None], 0.0)
        if needs_objective and energy is None:  # one token of a stream: the kernel returns the scores only
            assert result.scores is not None
            energy = torch.stack([reference.score_energy(s) for s in result.scores], dim=2)
            trace = reference.weight_trace(self.w_e, self.w_r)
        if needs_objective and self.context is not None:
            energy = self.context.sum(energy)
        # Not `_replace`, here and below: Dynamo of older torch versions does not trace it.
        result = Output(y, energy, trace, result.scores, result.state, result.is_fused)
        return self._finish(result, tokens if needs_objective else None, key, return_scores, return_state)

    def _finish(
        self, result: Output, tokens: Tensor | int | None, key: Tensor | None, return_scores: bool, return_state: bool
    ) -> Any:
        """Return y, and scores and state if requested. Set J unless `tokens` is None."""
        y = result.y
        assert y is not None
        if tokens is not None:
            objective = compute_objective(result, self.sqrt_lambda, tokens, self.objective_form)
            y, objective = couple_gradients(y, objective)
            if self.training and not is_recomputing():
                # nn.Module.__setattr__ would first test for a parameter.
                object.__setattr__(self, "_objective", objective)
            if self._last_call is not None and not is_recomputing():
                object.__setattr__(self, "_last_call", RecordedCall(objective, self._last_call))
        extras: list[Any] = [] if key is None else [None]
        if return_scores:
            extras.append(result.scores)
        if return_state:
            assert result.state is not None
            extras.append(type(result.state)(*[*result.state][:-1], self._state_label()))  # type: ignore[call-arg]
        return (y, *extras) if extras else y

    def _weights(self) -> tuple[Weights, bool]:
        """Return the parameters, without maps that must be called, and whether the output maps must be called."""
        score, out = read_linear(self.score_proj), read_linear(self.out_proj)
        is_called = score is None or out is None
        maps = (None,) * 4 if score is None or out is None else (*score, *out)
        return Weights(*(read_linear(self.qk_proj) or (None, None)), self.w_e, self.w_r, *maps), is_called  # type: ignore[call-arg]

    def _project_qk(self, x: Tensor) -> Tensor:
        """Call `qk_proj` as a module; subclasses change q and k here."""
        return self.qk_proj(x)

    def _apply_output(self, result: Output, dropout: float, is_packed: bool) -> Tensor:
        """Call `score_proj` and `out_proj` as modules."""
        assert result.scores is not None
        stacked = F.dropout(torch.cat(result.scores, dim=-1), dropout)  # (B, H, N, 2s), packed (H, total, 2s)
        heads = self.score_proj(stacked)
        return self.out_proj(heads.transpose(0, 1).flatten(1) if is_packed else heads.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]

    def _feature_map(self) -> FeatureMap:
        if self._custom_map is not None:
            return FeatureMap(self._apply_custom_map)
        if self.feature_map == "softmax":
            frequencies = self.frequencies
            return FeatureMap(lambda z: feature_maps.positive_random(z, frequencies), is_normalised=True)
        return COSINE

    def _apply_custom_map(self, z: Tensor) -> Tensor:
        assert self._custom_map is not None
        phi = self._custom_map(z)
        if phi.shape != z.shape:
            raise ValueError(f"feature_map must keep the shape {tuple(z.shape)} of its input (got {tuple(phi.shape)})")
        return phi

    def _begin_objective(self) -> bool:
        """Return True if the call computes J; drop the previous one."""
        if self.training and not is_recomputing():
            # Its graph would pin gradient accumulation to the old stream and break CUDA-graph capture.
            object.__setattr__(self, "_objective", None)
        return self.training or self._last_call is not None

    # Checks

    def _check_like_multihead(
        self,
        x: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        mask: Tensor | None,
        need_weights: bool,
        attn_mask: Tensor | None,
        is_causal: bool,
    ) -> tuple[Tensor | None, Tensor | None]:
        """Raise for a call of `nn.MultiheadAttention` that is not supported; return key and padding mask."""
        for name, t in (("key", key), ("value", value), ("attn_mask", attn_mask)):
            if t is not None:
                checks.device(name, t, self.sqrt_lambda.device)
        if key is not None and value is None and mask is None and (key.dtype == torch.bool or key.ndim < x.ndim):
            key, mask = None, key
        if any(t is not None and not is_same(t, x) for t in (key, value)):
            raise ValueError("key and value must be x itself: cross-attention is not defined for this method")
        if need_weights:
            raise ValueError("need_weights=True is not supported: the layer forms no N×N matrix (see kernel_matrix)")
        if is_causal and not self.causal:
            raise ValueError("is_causal=True needs a layer with causal=True")
        if attn_mask is None:
            return key, mask
        n = x.shape[-2]
        if attn_mask.shape[-2:] != (n, n):
            raise ValueError(f"attn_mask must have shape ({n}, {n}) (got {tuple(attn_mask.shape)})")
        if torch.compiler.is_compiling() or attn_mask.is_meta:  # the values cannot be read
            return key, mask
        hidden = torch.ones(n, n, dtype=torch.bool, device=attn_mask.device).triu(1) & self.causal
        if attn_mask.dtype != torch.bool:
            hidden = attn_mask.new_zeros(n, n).masked_fill(hidden, -torch.inf)
        if not torch.equal(attn_mask, hidden.expand_as(attn_mask)):
            supported = "be the causal mask" if self.causal else "hide nothing"
            raise ValueError(f"attn_mask must {supported} for a layer with causal={self.causal}")
        return key, mask

    def _check_input(
        self,
        x: Tensor,
        mask: Tensor | None,
        cu_seqlens: Tensor | None = None,
        max_seqlen: int | None = None,
        state: State | None = None,
        return_state: bool = False,
    ) -> Tensor | None:
        """Raise for invalid input; return the padding mask as bool."""
        checks.device("x", x, self.sqrt_lambda.device)
        checks.tokens(x, self.embed_dim, packed=cu_seqlens is not None)
        checks.dtype(x, self.sqrt_lambda.dtype)
        if mask is not None:
            if cu_seqlens is not None:
                raise ValueError("key_padding_mask and cu_seqlens exclude each other: packed input has no padding")
            mask = checks.padding_mask(mask, x)
        streams = state is not None or return_state
        if streams and not self.causal:
            raise ValueError("state needs a causal layer (causal=False): only the causal modes stream")
        if cu_seqlens is not None:
            checks.device("cu_seqlens", cu_seqlens, x.device)
            padding.check_boundaries(cu_seqlens, x.shape[0], max_seqlen)
            if streams:
                raise ValueError("state and cu_seqlens exclude each other: stream padded batches instead")
        elif max_seqlen is not None:
            raise ValueError(f"max_seqlen={max_seqlen} is used only with cu_seqlens")
        if state is not None:
            checks.state(state, self._state_type, x.shape[0], self._state_label(), x.device)
        if streams or cu_seqlens is not None:
            self._check_not_sharded("state" if streams else "cu_seqlens")
        if self.max_length is None:
            return mask
        past = state.steps if isinstance(state, LandmarkState) else 0
        longest = past + (x.shape[-2] if max_seqlen is None else max_seqlen)
        # An upper bound: it counts padding and, if packed, all sequences. Read the lengths only where it is too large.
        if longest > self.max_length and (mask is not None or state is not None or cu_seqlens is not None):
            if torch.compiler.is_compiling():
                return mask
            tokens = x.new_ones(x.shape[:2], dtype=torch.int64) if mask is None else ~mask
            lengths = tokens.sum(dim=1) if cu_seqlens is None else cu_seqlens.diff()
            if isinstance(state, LandmarkState):
                lengths = lengths + state.position
            longest = int(lengths.max()) if lengths.numel() else 0
        if longest > self.max_length:
            raise ValueError(f"max_length={self.max_length} is exceeded by a sequence of {longest} tokens")
        return mask

    def _check_not_sharded(self, what: str) -> None:
        if self.context is not None:
            raise ValueError(f"{what} needs complete sequences, but this layer has shards (context parallelism)")

    # Kernel

    def kernel_factors(self, x: Tensor, key_padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return φ′_q, φ′_k, (B, H, N, n or p), with K = φ′_q φ′_kᵀ, without forming K.

        Args:
            x: (B, N, embed_dim).
            key_padding_mask: (B, N), True at padding.
        """
        self._check_not_sharded("the kernel")
        mask = self._check_input(x, key_padding_mask)
        valid = None if mask is None else ~mask
        x = x if mask is None else x.masked_fill(mask[..., None], 0.0)
        qk, feature_map = self._project_qk(x), self._feature_map()
        return reference.kernel_factors(x, qk, self.mode, feature_map, valid=valid, decay=self.decay)

    def kernel_matrix(self, x: Tensor, key_padding_mask: Tensor | None = None) -> Tensor:
        """Return K_ij = ⟨φ′_q(x_i), φ′_k(x_j)⟩ of Theorem 3.2, (B, H, N, N), for inspecting short sequences.

        Args:
            x: (B, N, embed_dim).
            key_padding_mask: (B, N), True at padding.
        """
        phi_q, phi_k = self.kernel_factors(x, key_padding_mask)
        return phi_q @ phi_k.mT

    # Streaming

    def _state_label(self) -> str:
        mode = "causal data-dependent" if self.data_dependent else "causal data-independent"
        length = "" if self.max_length is None else f", max_length={self.max_length}"
        sizes = f"num_heads={self.num_heads}, head_dim={self.head_dim}, rank={self.rank}"
        return f"{mode}, {sizes}, feature_map={self.feature_map}{length}"

    def initial_state(self, batch_size: int) -> State:
        """Return the state before the first token (causal modes).

        Args:
            batch_size: number of sequences.
        """
        checks.sequences(batch_size)
        if not self.causal:
            raise ValueError("initial_state needs a causal layer (causal=False): only the causal modes stream")
        heads, p, s = self.num_heads, self.head_dim, self.rank
        new: dict[str, Any] = {"dtype": accumulation_dtype(self.w_e.dtype), "device": self.w_e.device}
        feature_sum = torch.zeros(batch_size, heads, p, **new) if self.feature_map == "softmax" else None
        if self.data_dependent:
            weights = torch.zeros(2, batch_size, heads, p, s, **new)
            position = torch.zeros(batch_size, dtype=torch.int64, device=self.w_e.device)
            return LandmarkState(weights[0], weights[1], position, 0, feature_sum, self._state_label())
        sums = torch.zeros(2, batch_size, heads, p, **new)
        return RunningState(sums[0], sums[1], torch.zeros_like(sums[0, ..., 0]), feature_sum, self._state_label())

    def step(self, x_t: Tensor, state: State, key_padding_mask: Tensor | None = None) -> tuple[Tensor, State]:
        """Process one token of each sequence.

        Args:
            x_t: (B, embed_dim).
            state: the state after the previous token.
            key_padding_mask: (B,) bool, True where a sequence has no token at this step.

        Returns:
            y_t, equal to row t of the full forward pass, and the state after it.
        """
        if x_t.ndim != 2 or x_t.shape[-1] != self.embed_dim:
            raise ValueError(f"x_t must have shape (batch, {self.embed_dim}) (got {tuple(x_t.shape)})")
        mask = None if key_padding_mask is None else key_padding_mask[:, None]
        y, state = self(x_t[:, None], key_padding_mask=mask, state=state, return_state=True)
        return y[:, 0], state

    def extra_repr(self) -> str:
        kind = ("causal, " if self.causal else "") + ("data-dependent" if self.data_dependent else "data-independent")
        landmarks = f", landmarks={self.landmarks}" if self.data_dependent else ""
        return f"{self.embed_dim}, heads={self.num_heads}, rank={self.rank}{landmarks}, {kind}, backend={self.backend}"

    def __getstate__(self) -> dict[str, Any]:
        # The objective belongs to one forward pass and its graph; a copy of the layer starts without it.
        return {**self.__dict__, "_objective": None, "_last_call": None}

    def __deepcopy__(self, memo: dict[int, Any]) -> PrimalAttention:
        # torch's parametrisations would copy a layer without `__getstate__`, which they also override.
        memo[id(self)] = other = type(self).__new__(type(self))
        other.__dict__ = copy.deepcopy(PrimalAttention.__getstate__(self), memo)
        return other


class RecordedCall:
    """J of a call, and the call before it. A list would recompile at every call: torch.compile guards its length."""

    def __init__(self, objective: Tensor | None = None, previous: RecordedCall | None = None) -> None:
        self.objective, self.previous = objective, previous
        self.is_differentiated = False

    def mark_differentiated(self, _: Tensor) -> None:
        """Hook of J: the backward pass has reached it."""
        self.is_differentiated = True


def is_same(t: Tensor, x: Tensor) -> bool:
    """Return True if t is x. Backward hooks of modules, and FSDP, replace each argument by a view of its own."""
    if t is x or torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        return t is x
    views = [(z.untyped_storage()._cdata, z.shape, z.stride(), z.storage_offset(), z.requires_grad) for z in (t, x)]
    return views[0] == views[1]


def has_hooks(module: nn.Module) -> bool:
    """Return True if calling the module runs hooks, its own or those of all modules."""
    own = module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    torch_module = nn.modules.module
    forward = torch_module._global_forward_hooks or torch_module._global_forward_pre_hooks
    return bool(own or forward or torch_module._global_backward_hooks or torch_module._global_backward_pre_hooks)


def read_linear(module: nn.Module) -> tuple[Tensor, Tensor | None] | None:
    """Return weight and bias of an nn.Linear without hooks; None if the map must be called."""
    if type(module) is not nn.Linear or "forward" in module.__dict__:
        return None
    if has_hooks(module):
        return None
    weight = module.weight
    return (weight, module.bias) if type(weight) in (nn.Parameter, Tensor) else None


def is_recomputing() -> bool:
    """Return True while activation checkpointing recomputes a forward pass inside a backward pass."""
    return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1
