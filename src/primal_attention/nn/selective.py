"""Primal-Attention whose memory fades as the tokens say: γ of each head is a function of the token, not a constant.

    γ_i = sigmoid(b_h + a_hᵀ x_i),   q̄_i = γ_i q̄_{i−1} + (1 − γ_i) q_i,   e_i = W_eᵀ φ(q̄_i)        (k̄ and r alike)

With a = 0, where training starts, this is the learned decay, and the state is the same two running sums.

`DualPrimalAttention` also lets the tokens write the projection weights. At the optimum of the kernel SVD they are sums
over the data, W_e = Σ_j φ(k_j) h_{r_j}ᵀ and W_r = Σ_j φ(q_j) h_{e_j}ᵀ, with dual vectors h per token. Here these
are linear in the token, and the sums run over the past:

    W_{e|X≤i} = γ_i W_{e|X≤i−1} + (1 − γ_i) φ(k_i) h_r(x_i)ᵀ,   e_i = W_{e|X≤i}ᵀ φ(q_i)              (W_r and r alike)

so that e_i = Σ_{j≤i} κ(x_i, x_j) h_r(x_j): a token reads what similar tokens wrote. The state is the two matrices.
"""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..ops import feature_maps
from ..ops import reference as eq
from ..ops.decayed import decayed_sum, decayed_weights
from ..ops.layer import Energies
from ..ops.reference import RunningState, Scores
from . import checks
from .primal import PrimalAttention
from .tie import tie


class DualState(NamedTuple):
    """The projection weights that the past has written; nothing here grows with the context."""

    w_e_x: Tensor  # (B, H, p, s)
    w_r_x: Tensor  # (B, H, p, s)


class Fading(NamedTuple):
    """What each token does to each head's memory, (B, H, N) each; padding does nothing."""

    log_decay: Tensor  # log γ
    share: Tensor  # 1 − γ, the token's part in the mean


class SelectivePrimalAttention(PrimalAttention):
    """Causal Primal-Attention with a decay that each token sets. Cosine feature map, streaming, any padding."""

    def __init__(self, embed_dim: int, num_heads: int, *, rank: int = 30, **settings: Any) -> None:
        settings = {"causal": True, "data_dependent": False, "decay": "learned", "backend": "reference", **settings}
        super().__init__(embed_dim, num_heads, rank=rank, **settings)
        if not isinstance(self.decay_logit, nn.Parameter) or self.data_dependent or self.feature_map != "cosine":
            raise ValueError("a selective decay is learned, with data_dependent=False and feature_map='cosine'")
        if self.recompute:
            raise ValueError("recompute=True has no meaning here: put the block under torch's activation checkpointing")
        weight = self.qk_proj.weight
        self.decay_proj = nn.Linear(embed_dim, num_heads, bias=False, device=weight.device, dtype=weight.dtype)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """As the learned decay starts; the tokens' say in it comes with training."""
        super().reset_parameters()
        if hasattr(self, "decay_proj"):  # not yet when the base class calls
            nn.init.zeros_(self.decay_proj.weight)

    def forward(  # type: ignore[override]
        self,
        x: Tensor,
        key_padding_mask: Tensor | None = None,
        *,
        state: Any = None,
        return_scores: bool = False,
        return_state: bool = False,
    ) -> Any:
        """As `PrimalAttention.forward`, without packed input."""
        checks.tokens(x, self.embed_dim, packed=False)
        if key_padding_mask is not None:
            checks.padding_mask(key_padding_mask, x)
            x = x.masked_fill(key_padding_mask[..., None], 0.0)
        scores, traced, after = self.read(x, self.fading(x, key_padding_mask), state)
        if key_padding_mask is not None:
            scores = Scores(*(s.masked_fill(key_padding_mask[:, None, :, None], 0.0) for s in scores))
        y = self.out_proj(self.heads(scores).transpose(1, 2).flatten(2))
        if key_padding_mask is not None:
            y = y.masked_fill(key_padding_mask[..., None], 0.0)
        if self.training:
            tokens = x.shape[1] if key_padding_mask is None else (~key_padding_mask).sum(dim=1)
            energies = Energies(eq.energy(scores.e), eq.energy(scores.r), tokens)
            y, self._objective = tie(y, self._objective_spec().of(energies, traced))
        extras = ([scores] if return_scores else []) + ([after] if return_state else [])
        return (y, *extras) if extras else y

    def fading(self, x: Tensor, key_padding_mask: Tensor | None = None) -> Fading:
        assert self.decay_logit is not None
        logit = self.decay_proj(x).to(eq.wide(x.dtype)) + self.decay_logit  # wide: few 16-bit numbers are near 1
        logit = logit.transpose(1, 2)
        log_decay, share = F.logsigmoid(logit), (-logit).sigmoid()
        if key_padding_mask is not None:
            padding = key_padding_mask[:, None]
            log_decay, share = log_decay.masked_fill(padding, 0.0), share.masked_fill(padding, 0.0)
        return Fading(log_decay, share)

    def queries_and_keys(self, x: Tensor) -> tuple[Tensor, Tensor]:
        q, k = self.qk_proj(x).chunk(2, dim=-1)
        return eq.split_heads(q, self.num_heads), eq.split_heads(k, self.num_heads)

    def read(self, x: Tensor, fading: Fading, state: RunningState | None) -> tuple[Scores, tuple[Tensor, Tensor], Any]:
        """Scores of all tokens, the two sets of weights under the objective's trace, and the state after them."""
        phi_q, phi_k, after = self._running(x, fading, state)
        return Scores(eq.project(phi_q, self.w_e), eq.project(phi_k, self.w_r)), (self.w_e, self.w_r), after

    def _running(self, x: Tensor, fading: Fading, state: RunningState | None) -> tuple[Tensor, Tensor, RunningState]:
        both = torch.cat(self.queries_and_keys(x), dim=-1)  # they fade together: one pass for both
        start = None if state is None else torch.cat([state.query_sum, state.key_sum], dim=-1)
        means, after = decayed_sum(both * fading.share[..., None].to(both.dtype), fading.log_decay, start)
        left = fading.log_decay.sum(dim=-1).exp()  # of what was there before, (B, H)
        weight = 1 - left if state is None else 1 - left * (1 - state.weight)
        phi_q, phi_k = (feature_maps.cosine(mean).to(both.dtype) for mean in means.chunk(2, dim=-1))
        query_sum, key_sum = after.chunk(2, dim=-1)
        return phi_q, phi_k, RunningState(query_sum, key_sum, weight)

    def heads(self, scores: Scores) -> Tensor:
        """o_h = W_o [e; r], (B, H, N, p)."""
        both = torch.cat(scores, dim=-1)
        return self.score_proj(F.dropout(both, self.dropout, self.training))

    def kernel_factors(self, x: Tensor, key_padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        checks.tokens(x, self.embed_dim, packed=False)
        if key_padding_mask is not None:
            checks.padding_mask(key_padding_mask, x)
            x = x.masked_fill(key_padding_mask[..., None], 0.0)
        phi_q, phi_k, _ = self._running(x, self.fading(x, key_padding_mask), None)
        if key_padding_mask is None:
            return phi_q, phi_k
        padding = key_padding_mask[:, None, :, None]  # where the running means go on unchanged
        return phi_q.masked_fill(padding, 0.0), phi_k.masked_fill(padding, 0.0)


class DualPrimalAttention(SelectivePrimalAttention):
    """Causal Primal-Attention whose projection weights the tokens write; see the module's first lines."""

    def __init__(self, embed_dim: int, num_heads: int, *, rank: int = 30, **settings: Any) -> None:
        super().__init__(embed_dim, num_heads, rank=rank, **settings)
        weight = self.qk_proj.weight
        where: dict[str, Any] = {"device": weight.device, "dtype": weight.dtype}
        del self.w_e, self.w_r  # the tokens write them
        self.w_e = self.w_r = None  # type: ignore[assignment]
        self.dual_proj = nn.Linear(embed_dim, 2 * num_heads * rank, bias=False, **where)  # rows [h_r; h_e]
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """W_k = W_q at the start: from the first step on, tokens read what tokens like them wrote."""
        super().reset_parameters()
        if hasattr(self, "dual_proj"):  # not yet when the base class calls
            self.dual_proj.reset_parameters()
            with torch.no_grad():
                for whole in (self.qk_proj.weight, self.qk_proj.bias):
                    if whole is not None:
                        whole[self.embed_dim :] = whole[: self.embed_dim]

    def read(self, x: Tensor, fading: Fading, state: Any) -> tuple[Scores, tuple[Tensor, Tensor], Any]:
        phi_q, phi_k = (feature_maps.cosine(z) for z in self.queries_and_keys(x))
        h_r, h_e = (eq.split_heads(h, self.num_heads) for h in self.dual_proj(x).chunk(2, dim=-1))
        share = fading.share[..., None].to(h_r.dtype)
        w_e, w_r = (None, None) if state is None else cast(DualState, state)
        e, w_e = decayed_weights(phi_q, phi_k, h_r * share, fading.log_decay, w_e)
        r, w_r = decayed_weights(phi_k, phi_q, h_e * share, fading.log_decay, w_r)
        return Scores(e, r), (w_e, w_r), DualState(w_e, w_r)

    def heads(self, scores: Scores) -> Tensor:
        # A head that remembers much has small means: φ brings each head's scores to one size before they share W_o.
        both = feature_maps.cosine(torch.cat(scores, dim=-1)) * (2 * self.rank) ** 0.5
        return self.score_proj(F.dropout(both, self.dropout, self.training))

    def kernel_factors(self, x: Tensor, key_padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        raise ValueError("the fading kernel of a dual layer has no factors of constant width: see kernel_matrix")

    def kernel_matrix(self, x: Tensor, key_padding_mask: Tensor | None = None) -> Tensor:
        """κ(x_i, x_j) = φ(q_i)·φ(k_j) (1 − γ_j) γ_{j+1} ⋯ γ_i for j ≤ i, else 0: e = κ h_r. (B, H, N, N)."""
        if key_padding_mask is not None:
            x = x.masked_fill(key_padding_mask[..., None], 0.0)
        fading = self.fading(x, key_padding_mask)
        phi_q, phi_k = (feature_maps.cosine(z) for z in self.queries_and_keys(x))
        one_hot = torch.eye(x.shape[1], dtype=x.dtype, device=x.device).expand(*phi_k.shape[:2], -1, -1)
        kernel, _ = decayed_weights(phi_q, phi_k, one_hot * fading.share[..., None].to(x.dtype), fading.log_decay)
        return kernel if key_padding_mask is None else kernel.masked_fill(key_padding_mask[:, None, :, None], 0.0)

    def initial_state(self, batch_size: int) -> DualState:  # type: ignore[override]
        weight = self.qk_proj.weight
        shape = (2, batch_size, self.num_heads, self.head_dim, self.rank)
        zeros = torch.zeros(shape, dtype=eq.wide(weight.dtype), device=weight.device)
        return DualState(zeros[0], zeros[1])
