"""DeltaPrimalAttention: causal Primal-Attention whose projection weights follow the delta rule.

At the optimum of the kernel SVD, W_e = Σ_j φ(k_j) h_{r_j}ᵀ and W_r = Σ_j φ(q_j) h_{e_j}ᵀ are sums over the data. Here
they are sums over the past, with h linear in the token, and each token first subtracts what its key already stores:

    h̃_i = β_i (h_r(x_i) − γ_i W_{e|X≤i−1}ᵀ φ(k_i))
    W_{e|X≤i} = γ_i W_{e|X≤i−1} + φ(k_i) h̃_iᵀ,   e_i = W_{e|X≤i}ᵀ φ(q_i)

This is one step of least squares per token towards e = h_r at the keys. W_r and r are the same with queries and keys,
h_r and h_e exchanged. W_{e|X≤i} = Σ_j (γ_{j+1} ⋯ γ_i) φ(k_j) h̃_jᵀ is still a sum over the data with one dual vector per
token, and e_i = Σ_{j≤i} κ(x_i, x_j) h̃_j. `ops/delta_rule.py` has the equations and the choice of the backend.

Around the rule the layer has what language models need: short causal convolutions with SiLU on q, k and h, an RMS norm
of each head's scores, because their scale varies, and a gate on the scores before W_o.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..ops import delta_rule, reference
from ..ops.feature_maps import accumulation_dtype
from ..ops.padding import Padding
from ..ops.types import DeltaState, Output, Scores
from . import checks
from .blocks import CausalConv
from .primal import PrimalAttention, read_linear


class DeltaPrimalAttention(PrimalAttention):
    """Causal Primal-Attention with the delta rule. It streams (`initial_state`, `step`).

    Args:
        embed_dim: width of the tokens, d.
        num_heads: number of heads, H; the head width is p = d / H.
        rank: number of directions of each head's projection scores, s.
        conv: kernel size of the causal convolutions on q, k and h; 0 for none.
        gate: nonlinearity of the gate on the scores; True is "silu", False is no gate.
        bias: add a bias in `qk_proj`, `score_proj` and `out_proj`.
        dropout: rate of the dropout on the projection scores, after the objective.
        backend: "auto", "fused" (Triton kernels) or "reference".
        objective_form: "mean" averages the energies in J over the tokens, "sum" is the paper's J.
        device: device of the parameters.
        dtype: dtype of the parameters.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        rank: int = 30,
        conv: int = 4,
        gate: bool | Literal["silu", "sigmoid"] = True,
        bias: bool = True,
        dropout: float = 0.0,
        backend: Literal["auto", "reference", "fused"] = "auto",
        objective_form: Literal["mean", "sum"] = "mean",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        checks.one_of("backend", backend, delta_rule.BACKENDS)
        checks.one_of("gate", gate, (True, False, "silu", "sigmoid"))
        super().__init__(
            embed_dim, num_heads, rank=rank, causal=True, data_dependent=False, decay="learned", bias=bias,
            dropout=dropout, backend=backend, objective_form=objective_form, device=device, dtype=dtype,
        )  # fmt: skip
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        for name in ("w_e", "w_r"):
            self.register_parameter(name, None)  # the tokens determine them
        self._state_type = DeltaState
        width = 2 * num_heads * rank
        self.decay_proj = nn.Linear(embed_dim, num_heads, bias=False, **factory)
        self.dual_proj = nn.Linear(embed_dim, width, bias=False, **factory)  # rows [h_r; h_e]
        self.write_proj = nn.Linear(embed_dim, 2 * num_heads, **factory)  # β of both sides
        self.conv = CausalConv(2 * embed_dim + width, conv).to(**factory) if conv else None
        self.score_norm = nn.Parameter(torch.empty(2 * rank, **factory))
        self.gate: Literal["silu", "sigmoid"] = "silu" if isinstance(gate, bool) else gate
        self.gate_proj = nn.Linear(embed_dim, width, bias=False, **factory) if gate else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """As in `PrimalAttention`. W_k starts equal to W_q, so that tokens read what similar tokens stored."""
        super().reset_parameters()
        if not hasattr(self, "gate_proj"):  # called by the constructor of the base class
            return
        for module in (self.dual_proj, self.write_proj, self.conv, self.gate_proj):
            if module is not None:
                module.reset_parameters()
        nn.init.zeros_(self.decay_proj.weight)
        nn.init.ones_(self.score_norm)
        with torch.no_grad():
            self.qk_proj.weight[self.embed_dim :] = self.qk_proj.weight[: self.embed_dim]
            if self.qk_proj.bias is not None:
                self.qk_proj.bias.zero_()

    def forward(  # type: ignore[override]
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
        state: DeltaState | None = None,
        return_scores: bool = False,
        return_state: bool = False,
    ) -> Any:
        """Attend within each sequence. Arguments and results as in `PrimalAttention.forward`, without packed input."""
        key, mask = self._check_like_multihead(x, key, value, key_padding_mask, need_weights, attn_mask, is_causal)
        self._check_not_sharded("the delta rule")
        mask = self._check_input(x, mask, state=state, return_state=return_state)
        layout: Padding | None = None
        tokens: Tensor | int = x.shape[1]
        if mask is not None:
            layout = Padding(mask, compact=True)
            x, tokens = layout.enter(x), layout.lengths
        needs_objective = self._begin_objective()
        fused = delta_rule.uses_kernels(self.backend, x, self.head_dim, self.rank)

        z = self._projections(x, fused)
        past = None if state is None else state.conv
        phi, h = self._features(z, past, fused)
        log_decay, beta = self._log_decay(x), self.write_proj(x).to(accumulation_dtype(x.dtype)).sigmoid()
        if layout is not None:  # padding neither decays nor updates W
            log_decay, beta = layout.zero(log_decay), layout.zero(beta)
        initial = None if state is None else torch.stack([state.w_e_x, state.w_r_x], dim=1)
        beta = beta.unflatten(-1, (2, self.num_heads))
        scores, final = delta_rule.delta_scores(phi, h, log_decay, beta, initial, fused=fused)  # (B, N, H, 2, s)
        scores = scores if layout is None else layout.zero(scores)

        gate = None if self.gate_proj is None else self.gate_proj(x).unflatten(-1, (self.num_heads, -1))
        gated, energy = delta_rule.gated_scores(scores, self.score_norm, gate, self.gate, fused=fused)
        y = self.out_proj(self.score_proj(F.dropout(gated, self.dropout, self.training)).flatten(2))
        trace, by_side, after = None, None, None
        if needs_objective:
            trace = reference.weight_trace(final[:, 0], final[:, 1])
        if return_scores:
            scores = scores if layout is None else layout.leave(scores)
            by_side = Scores(*scores.permute(3, 0, 2, 1, 4))
        if return_state:
            lengths = None if layout is None else layout.lengths
            conv = None if self.conv is None else self.conv.last_inputs(z, past, lengths)
            after = DeltaState(final[:, 0], final[:, 1], conv)
        result = Output(y if layout is None else layout.leave(y), energy, trace, by_side, after)
        return self._finish(result, tokens if needs_objective else None, key, return_scores, return_state)

    def _projections(self, x: Tensor, fused: bool = False) -> Tensor:
        """[q; k; h_r; h_e] before the convolution, (B, N, 2d + 2Hs)."""
        qk, dual = self.qk_proj, self.dual_proj
        if not (fused and read_linear(qk) and read_linear(dual)):
            return torch.cat([qk(x), dual(x)], dim=-1)
        # For long input, concatenating the weights is cheaper than concatenating the results.
        bias = None if qk.bias is None else torch.cat([qk.bias, qk.bias.new_zeros(dual.out_features)])
        return F.linear(x, torch.cat([qk.weight, dual.weight]), bias)

    def _features(self, z: Tensor, past: Tensor | None, fused: bool) -> tuple[Tensor, Tensor]:
        """φ(q), φ(k) (B, N, 2, H, p) and h_r, h_e (B, N, 2, H, s). past: the inputs before z."""
        conv = self.conv
        if conv is None or not fused:
            z = z if conv is None else F.silu(conv(z, past))
            return delta_rule.split_features(z, self.num_heads, self.rank)
        inputs = z if past is None else torch.cat([past.to(z.dtype), z], dim=1)
        phi, h = delta_rule.conv_features(inputs, conv.weight, conv.bias, self.num_heads, self.rank)
        return (phi, h) if past is None else (phi[:, past.shape[1] :], h[:, past.shape[1] :])

    def _log_decay(self, x: Tensor) -> Tensor:
        """log γ of each token and head, (B, N, H), in at least float32: 16 bits have few numbers near 1."""
        assert self.decay_logit is not None
        return F.logsigmoid(self.decay_proj(x).to(accumulation_dtype(x.dtype)) + self.decay_logit)

    def kernel_factors(self, x: Tensor, key_padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        raise ValueError("the kernel of a delta layer has no factors of constant width: use kernel_matrix")

    def kernel_matrix(self, x: Tensor, key_padding_mask: Tensor | None = None) -> Tensor:
        """Return κ(x_i, x_j) = φ(q_i)·φ(k_j) γ_{j+1} ⋯ γ_i for j ≤ i, else 0, so that e = κ h̃. (B, H, N, N)."""
        if key_padding_mask is not None:
            raise ValueError("kernel_matrix of a delta layer takes sequences without padding")
        self._check_input(x, None)
        phi, _ = self._features(self._projections(x), None, False)
        phi_q, phi_k = phi.permute(2, 0, 3, 1, 4)
        total = self._log_decay(x).transpose(1, 2).cumsum(dim=-1)
        return phi_q @ phi_k.mT * delta_rule.decay_between(total).to(phi.dtype)

    def _state_label(self) -> str:
        conv = 0 if self.conv is None else self.conv.kernel_size
        return f"delta rule, num_heads={self.num_heads}, head_dim={self.head_dim}, rank={self.rank}, conv={conv}"

    def initial_state(self, batch_size: int) -> DeltaState:  # type: ignore[override]
        """Return the state before the first token."""
        checks.sequences(batch_size)
        like = self.sqrt_lambda
        shape = (2, batch_size, self.num_heads, self.head_dim, self.rank)
        zeros = torch.zeros(shape, dtype=accumulation_dtype(like.dtype), device=like.device)
        conv = None if self.conv is None else self.conv.initial_state(batch_size)
        return DeltaState(zeros[0], zeros[1], conv, self._state_label())

    def extra_repr(self) -> str:
        return f"{self.embed_dim}, heads={self.num_heads}, rank={self.rank}, delta rule, backend={self.backend}"
