"""Projection weights that tokens write with correction: against loops over the tokens, in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from primal_attention import ksvd_loss
from primal_attention.nn.blocks import ShiftedProducts
from primal_attention.nn.delta import DeltaPrimalAttention
from primal_attention.ops.written import corrected_weights, unit_lower_inverse

EXACT = {"rtol": 0.0, "atol": 1e-11}  # float64


def draws(n: int) -> list[Tensor]:
    """q, k, v, log γ, β and a W to start from: a head that remembers, one that forgets at once, one between."""
    generator = torch.Generator().manual_seed(n)
    q, k, v = (torch.randn(2, 3, n, 5, generator=generator, dtype=torch.float64) for _ in range(3))
    log_decay = -torch.rand(2, 3, n, generator=generator, dtype=torch.float64)
    log_decay[:, 0] = -1e-9
    log_decay[:, 1] *= 900
    strength = torch.rand(2, 3, n, generator=generator, dtype=torch.float64)
    start = torch.randn(2, 3, 5, 4, generator=generator, dtype=torch.float64)
    given = [q, torch.nn.functional.normalize(k, dim=-1), v[..., :4], log_decay, strength, start]
    return [t.detach().requires_grad_() for t in given]


def loop(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, strength: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    rows = []
    for i in range(q.shape[2]):
        w = log_decay[:, :, i, None, None].exp() * w
        held = (w.mT @ k[:, :, i, :, None])[..., 0]
        w = w + k[:, :, i, :, None] * (strength[:, :, i, None] * (v[:, :, i] - held))[..., None, :]
        rows.append((w.mT @ q[:, :, i, :, None])[..., 0])
    return torch.stack(rows, dim=2), w


@pytest.mark.parametrize("n", [1, 7, 16, 37])
def test_chunks_equal_a_loop_and_so_do_their_gradients(n: int) -> None:
    given, mix = draws(n), torch.randn(4, dtype=torch.float64)
    found = []
    for y, w in (loop(*given), corrected_weights(*given, chunk=16)):
        found.append((y, w, *torch.autograd.grad((y @ mix).sin().sum() + (w @ mix).cos().sum(), given)))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, **EXACT)


def test_a_start_that_all_share() -> None:
    q, k, v, log_decay, strength, start = draws(9)
    shared, fading = start[:, :1].detach().requires_grad_(), log_decay[:, 2:]
    each = shared.expand(-1, 3, -1, -1)
    y, _ = corrected_weights(q, k, v, fading, strength, shared)
    z, _ = loop(q, k, v, fading.expand(-1, 3, -1), strength, each)
    torch.testing.assert_close(y, z, **EXACT)
    torch.testing.assert_close(*(torch.autograd.grad(t.sin().sum(), shared)[0] for t in (y, z)), **EXACT)


def test_equal_keys_replace_each_other() -> None:
    """With β = 1 and nothing fading, 64 writes to one place leave the last: no sum, and no error that grows."""
    k = torch.nn.functional.normalize(torch.ones(1, 1, 64, 8), dim=-1)
    v = torch.randn(1, 1, 64, 3, generator=torch.Generator().manual_seed(0))
    y, _ = corrected_weights(k, k, v, torch.zeros(1, 1, 64), torch.ones(1, 1, 64))
    torch.testing.assert_close(y, v, rtol=0.0, atol=1e-5)  # float32


@pytest.mark.parametrize("size", [1, 2, 8, 32])
def test_triangular_inverse(size: int) -> None:
    a = torch.randn(3, 2, size, size, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).tril(-1)
    eye = torch.eye(size, dtype=torch.float64)
    torch.testing.assert_close(unit_lower_inverse(0.3 * a) @ (eye + 0.3 * a), eye.expand_as(a), **EXACT)


def layer(**settings: object) -> DeltaPrimalAttention:
    torch.manual_seed(0)
    made = DeltaPrimalAttention(12, 3, rank=4, dtype=torch.float64, **settings)
    torch.nn.init.normal_(made.decay_proj.weight)
    return made


def test_the_layer_by_its_formulas() -> None:
    """e = κ h̃ with the dual vectors that were written, r from the other side, and what the layer makes of both."""
    attention = layer(conv=0, gate=False).eval()
    x = torch.randn(2, 21, 12, dtype=torch.float64)
    y, scores, state = attention(x, return_scores=True, return_state=True)
    q, k = (t.unflatten(-1, (3, 4)).transpose(1, 2) for t in attention.qk_proj(x).chunk(2, dim=-1))
    q, k = q / q.norm(dim=-1, keepdim=True), k / k.norm(dim=-1, keepdim=True)
    h_r, h_e = (t.unflatten(-1, (3, 4)).transpose(1, 2) for t in attention.dual_proj(x).chunk(2, dim=-1))
    beta_e, beta_r = attention.write_proj(x).sigmoid().transpose(1, 2).chunk(2, dim=1)
    log_decay = attention.fading(x).log_decay
    nothing = torch.zeros(2, 3, 4, 4, dtype=torch.float64)
    e, w_e = loop(q, k, h_r, log_decay, beta_e, nothing)
    r, w_r = loop(k, q, h_e, log_decay, beta_r, nothing)
    for mine, theirs in ((scores.e, e), (scores.r, r), (state.w_e_x, w_e), (state.w_r_x, w_r)):
        torch.testing.assert_close(mine, theirs, **EXACT)
    both = torch.cat([e, r], dim=-1)
    both = both * (both.square().mean(dim=-1, keepdim=True) + 1e-5).rsqrt()
    torch.testing.assert_close(y, attention.out_proj(attention.score_proj(both).transpose(1, 2).flatten(2)), **EXACT)
    # at the keys, κᵀ's counterpart: each dual vector is β times what was missing before the write
    kernel, at_keys = attention.kernel_matrix(x), (k @ k.mT) * attention.kernel_matrix(x) / (q @ k.mT)
    written = torch.linalg.solve_triangular(
        torch.eye(21, dtype=torch.float64) + beta_e[..., None] * at_keys.tril(-1),
        beta_e[..., None] * h_r,
        upper=False,
    )
    torch.testing.assert_close(e, kernel @ written, rtol=0.0, atol=1e-9)  # divided by small q·k above
    with pytest.raises(ValueError, match="no factors of constant width"):
        attention.kernel_factors(x)


def test_padding_changes_nothing_and_every_parameter_learns() -> None:
    attention = layer()
    x = torch.randn(2, 9, 12, dtype=torch.float64)
    mask = torch.zeros(2, 9, dtype=torch.bool)
    mask[0, [0, 4]] = mask[1, 6:] = True
    y, scores, state = attention(x.masked_fill(mask[..., None], torch.nan), mask, return_scores=True, return_state=True)
    objective = attention.objective
    for i in range(2):
        alone, own, after = attention(x[i][~mask[i]][None], return_scores=True, return_state=True)
        torch.testing.assert_close(y[i][~mask[i]], alone[0], **EXACT)
        torch.testing.assert_close(scores.r[i][:, ~mask[i]], own.r[0], **EXACT)
        torch.testing.assert_close(objective[i], attention.objective[0], **EXACT)
        for mine, theirs in zip(state, after, strict=True):
            torch.testing.assert_close(mine[i], theirs[0], **EXACT)
    (attention(x).square().sum() + ksvd_loss(attention)).backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in attention.parameters())


def test_stretches_and_steps_equal_one_pass() -> None:
    attention, x = layer().eval(), torch.randn(2, 30, 12, dtype=torch.float64)
    whole, end = attention(x, return_state=True)
    y, state = attention(x[:, :17], state=attention.initial_state(2), return_state=True)
    rows = [y]
    for token in x[:, 17:].unbind(1):
        y, state = attention.step(token, state)
        rows.append(y[:, None])
    torch.testing.assert_close(torch.cat(rows, dim=1), whole, **EXACT)
    for mine, theirs in zip(state, end, strict=True):
        torch.testing.assert_close(mine, theirs, **EXACT)


def test_starting_again_gives_a_fresh_layer() -> None:
    attention = layer()
    torch.nn.init.ones_(attention.decay_proj.weight)
    attention.reset_parameters()
    assert attention.decay_proj.weight.abs().max() == 0
    torch.testing.assert_close(attention.qk_proj.weight[:12], attention.qk_proj.weight[12:])


def test_autocast_keeps_the_state_wide() -> None:
    attention = layer().float()
    with torch.autocast("cpu", torch.bfloat16):
        y, state = attention(torch.randn(1, 20, 12), return_state=True)
        ksvd_loss(attention).backward()
    assert y.dtype == torch.bfloat16
    assert state.w_e_x.dtype == state.w_r_x.dtype == attention.objective.dtype == torch.float32


def test_the_convolution_and_its_gradient() -> None:
    generator = torch.Generator().manual_seed(0)
    seen, weight, bias = (
        torch.randn(shape, dtype=torch.float64, generator=generator, requires_grad=True)
        for shape in ((2, 8, 3), (4, 3), (3,))
    )
    y = ShiftedProducts.apply(seen, weight, bias)
    torch.testing.assert_close(y, bias + sum(weight[j] * seen[:, 3 - j : 8 - j] for j in range(4)), **EXACT)
    assert torch.autograd.gradcheck(ShiftedProducts.apply, (seen, weight, bias))
