"""Primal-Attention whose projection weights the tokens write with correction: a token replaces what stood at its place.

At the optimum of the kernel SVD, W_e = Σ_j φ(k_j) h_{r_j}ᵀ and W_r = Σ_j φ(q_j) h_{e_j}ᵀ are sums over the data. `dual`
(see `selective`) lets them run over the past with h linear in the token; but then tokens alike pile up, and what a
query reads is a mixture. Here a token first takes away what its place already holds,

    h̃_i = β_i (h_r(x_i) − γ_i W_{e|X≤i−1}ᵀ φ(k_i))
    W_{e|X≤i} = γ_i W_{e|X≤i−1} + φ(k_i) h̃_iᵀ,   e_i = W_{e|X≤i}ᵀ φ(q_i)

which is a step of least squares towards e = h_r at the keys, one per token. W_r and r are the same with queries and
keys, h_r and h_e changed for each other. Still W_{e|X≤i} = Σ_j (γ_{j+1} ⋯ γ_i) φ(k_j) h̃_jᵀ: a sum over the data with
one dual vector per token, and e_i = Σ_{j≤i} κ(x_i, x_j) h̃_j.

What else the layer needs to work in a language model: short causal convolutions with SiLU on q, k and h, so that a
token can be filed under its predecessor; scores brought to one size in each head, since what a head holds varies; and a
gate SiLU(W_g x) on the scores before W_o. The state is the two matrices and the convolution's last inputs.

On a GPU the layer runs on fused kernels (`ops/fused/delta.py`) between its linear maps; backend="reference" is plain
torch, backend="fused" insists on the kernels.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..ops import reference as eq
from ..ops.layer import Energies
from ..ops.reference import Scores
from ..ops.written import corrected_weights, fuses
from . import checks
from .conv import CausalConv
from .rivals.base import Padding
from .selective import SelectivePrimalAttention
from .tie import tie

TINY = 1e-20  # only a vector of zeros notices
EPS = 1e-5  # scores far smaller than the values that were written stay small


class DeltaState(NamedTuple):
    """The projection weights that the past has written; nothing here grows with the context."""

    w_e_x: Tensor  # (B, H, p, s)
    w_r_x: Tensor  # (B, H, p, s)
    conv: Tensor | None  # (B, kernel − 1, 2d + 2Hs)


class DeltaPrimalAttention(SelectivePrimalAttention):
    """Causal Primal-Attention that writes by the delta rule; see the module's first lines.

    conv: kernel of the convolutions on q, k and h, 0 for none. gate: on the scores.
    """

    def __init__(
        self, embed_dim: int, num_heads: int, *, rank: int = 30, conv: int = 4, gate: bool = True, **settings: Any
    ) -> None:
        super().__init__(embed_dim, num_heads, rank=rank, **{"backend": "auto", **settings})
        weight, scores = self.qk_proj.weight, 2 * num_heads * rank
        where: dict[str, Any] = {"device": weight.device, "dtype": weight.dtype}
        del self.w_e, self.w_r  # the tokens write them
        self.w_e = self.w_r = None  # type: ignore[assignment]
        self.dual_proj = nn.Linear(embed_dim, scores, bias=False, **where)  # rows [h_r; h_e]
        self.write_proj = nn.Linear(embed_dim, 2 * num_heads, **where)  # β of both sides
        self.conv = CausalConv(2 * embed_dim + scores, conv).to(**where) if conv else None
        self.score_norm = nn.Parameter(torch.ones(2 * rank, **where))
        self.gate_proj = nn.Linear(embed_dim, scores, bias=False, **where) if gate else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """W_k = W_q at the start: from the first step on, tokens read what tokens like them wrote."""
        super().reset_parameters()
        if not hasattr(self, "gate_proj"):  # not yet when the base class calls
            return
        for module in (self.dual_proj, self.write_proj, self.conv, self.gate_proj):
            if module is not None:
                module.reset_parameters()  # type: ignore[operator]
        with torch.no_grad():
            self.score_norm.fill_(1.0)
            self.qk_proj.weight[self.embed_dim :] = self.qk_proj.weight[: self.embed_dim]
            if self.qk_proj.bias is not None:
                self.qk_proj.bias.zero_()

    def forward(  # type: ignore[override]
        self,
        x: Tensor,
        key_padding_mask: Tensor | None = None,
        *,
        state: DeltaState | None = None,
        return_scores: bool = False,
        return_state: bool = False,
    ) -> Any:
        """As `PrimalAttention.forward`, without packed input."""
        checks.tokens(x, self.embed_dim, packed=False)
        padding, behind = None, None
        if key_padding_mask is not None:  # the convolution wants the tokens in a row
            checks.padding_mask(key_padding_mask, x)
            padding = Padding(key_padding_mask, compact=True)
            x, behind = padding.enter(x), ~padding.tokens.present  # type: ignore[operator]
        if self.training:
            self._objective = None  # the last pass' graph goes before this one's is built
        fused = x.shape[1] > 1 and fuses(self.backend, x, self.head_dim, self.rank)
        both, after = self._scores(x, behind, state, fused)  # (B, 2, H, N, s)
        heads, energies = self.heads(both, x, fused)
        y = self.out_proj(heads)
        y = y if padding is None else padding.leave(y)
        if self.training:
            tokens = x.shape[1] if key_padding_mask is None else (~key_padding_mask).sum(dim=1)
            of_e, of_r = energies.split(self.rank, dim=-1)
            objective = self._objective_spec().of(Energies(of_e, of_r, tokens), (after.w_e_x, after.w_r_x))
            y, self._objective = tie(y, objective)
        extras: list[Any] = []
        if return_scores:
            if padding is not None:
                flat = both.permute(0, 3, 1, 2, 4)  # (B, N, 2, H, s)
                both = padding.leave(flat.flatten(2)).view_as(flat).permute(0, 2, 3, 1, 4)
            extras.append(Scores(both[:, 0], both[:, 1]))
        extras += [after] if return_state else []
        return (y, *extras) if extras else y

    def _scores(
        self, x: Tensor, behind: Tensor | None, state: DeltaState | None, fused: bool
    ) -> tuple[Tensor, DeltaState]:
        phi, h, conv = self._features(x, behind, None if state is None else state.conv, fused)
        strength = self.write_proj(x).to(eq.wide(x.dtype)).sigmoid().unflatten(-1, (2, -1)).permute(0, 2, 3, 1)
        if behind is not None:
            strength = strength.masked_fill(behind[:, None, None], 0.0)
        log_decay = self.fading(x, behind).log_decay[:, None]
        start = None if state is None else torch.stack([state.w_e_x, state.w_r_x], dim=1)
        both, last = corrected_weights(phi, phi, h, log_decay, strength, start, crossed=True, fused=fused)
        if behind is not None:
            both = both.masked_fill(behind[:, None, None, :, None], 0.0)
        return both, DeltaState(last[:, 0], last[:, 1], conv)

    def _features(
        self, x: Tensor, behind: Tensor | None, past: Tensor | None, fused: bool = False
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """φ(q), φ(k) (B, 2, H, N, p), h_r and h_e (B, 2, H, N, s), and the convolution's last inputs."""
        alone = behind is None and past is None and self.conv is not None and self.conv.context is None
        if fused and alone and x.shape[1] >= self.conv.kernel_size:  # type: ignore[union-attr]
            return self._fused_features(x, self.conv)  # type: ignore[arg-type]
        z, conv = torch.cat([self.qk_proj(x), self.dual_proj(x)], dim=-1), None
        if self.conv is not None:
            z, conv = self.conv(z, behind, state=past, return_state=True)
            z = F.silu(z)
        qk, h = z.split([2 * self.embed_dim, 2 * self.num_heads * self.rank], dim=-1)
        # The cosine map z / ‖z‖, as torch's one pass for it.
        size = torch.full((self.head_dim,), self.head_dim**-0.5, dtype=qk.dtype, device=qk.device)
        phi = F.rms_norm(qk.unflatten(-1, (2, self.num_heads, -1)), size.shape, size, TINY).to(
            qk.dtype
        )  # autocast may widen
        return phi.permute(0, 2, 3, 1, 4), h.unflatten(-1, (2, self.num_heads, -1)).permute(0, 2, 3, 1, 4), conv

    def _fused_features(self, x: Tensor, conv: CausalConv) -> tuple[Tensor, Tensor, Tensor]:
        from ..ops.fused.delta import features

        qk, dual = self.qk_proj, self.dual_proj  # joining their weights is cheaper than joining what they make
        bias = None if qk.bias is None else torch.cat([qk.bias, qk.bias.new_zeros(dual.out_features)])
        z = F.linear(x, torch.cat([qk.weight, dual.weight]), bias)
        phi, h = features(z, conv.weight, conv.bias, self.num_heads, self.rank)
        return phi, h, z[:, z.shape[1] - conv.kernel_size + 1 :].clone()

    def heads(self, both: Tensor, x: Tensor, fused: bool) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        """W_o [e; r] of all heads side by side, (B, N, d), and the energies of [e; r] in training, (B, H, 2s)."""
        scores = both.permute(0, 3, 2, 1, 4).flatten(3)  # (B, N, H, 2s)
        gate = None if self.gate_proj is None else self.gate_proj(x).unflatten(-1, (self.num_heads, -1))
        if fused and (gate is None or gate.dtype == scores.dtype):
            from ..ops.fused.delta import gated

            shown, energies = gated(scores, gate, self.score_norm, EPS)
        else:
            shown = F.rms_norm(scores, scores.shape[-1:], self.score_norm.to(scores.dtype), EPS).to(scores.dtype)
            shown = shown if gate is None else shown * F.silu(gate)
            energies = eq.energy(scores.transpose(1, 2)) if self.training else scores.new_zeros(0)
        return self.score_proj(F.dropout(shown, self.dropout, self.training)).flatten(2), energies

    def kernel_factors(self, x: Tensor, key_padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        raise ValueError("the fading kernel of a delta layer has no factors of constant width: see kernel_matrix")

    def kernel_matrix(self, x: Tensor, key_padding_mask: Tensor | None = None) -> Tensor:
        """κ(x_i, x_j) = φ(q_i)·φ(k_j) γ_{j+1} ⋯ γ_i for j ≤ i, else 0: e = κ h̃. (B, H, N, N)."""
        if key_padding_mask is not None:
            raise ValueError("kernel_matrix of a delta layer takes sequences without padding")
        phi, _, _ = self._features(x, None, None)
        total = self.fading(x).log_decay.cumsum(dim=-1)
        past = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).tril()
        left = (total[..., :, None] - total[..., None, :]).masked_fill(~past, -torch.inf).exp()
        return phi[:, 0] @ phi[:, 1].mT * left.to(phi.dtype)

    def initial_state(self, batch_size: int) -> DeltaState:  # type: ignore[override]
        weight = self.qk_proj.weight
        shape = (2, batch_size, self.num_heads, self.head_dim, self.rank)
        zeros = torch.zeros(shape, dtype=eq.wide(weight.dtype), device=weight.device)
        return DeltaState(zeros[0], zeros[1], None if self.conv is None else self.conv.initial_state(batch_size))
