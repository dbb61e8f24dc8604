"""Fading that the tokens set, and projection weights that they write: against loops over the tokens."""

from __future__ import annotations

import pytest
import torch

from primal_attention import PrimalAttention, ksvd_loss
from primal_attention.nn.selective import DualPrimalAttention, SelectivePrimalAttention
from primal_attention.ops.decayed import decayed_sum, decayed_weights

EXACT = {"rtol": 0.0, "atol": 1e-11}  # float64


def draws(n: int, width: int = 5) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(n)
    q, k, v = (torch.randn(2, 3, n, width, generator=generator, dtype=torch.float64) for _ in range(3))
    log_decay = -torch.rand(2, 3, n, generator=generator, dtype=torch.float64) * 3
    log_decay[:, 0] = -1e-9  # remembers
    log_decay[:, 1] *= 300  # forgets at once: nothing may overflow
    return q, k, v, log_decay


@pytest.mark.parametrize("n", [1, 7, 64, 65])
def test_chunks_equal_a_loop(n: int) -> None:
    q, k, v, log_decay = draws(n)
    start = torch.randn(2, 3, 5, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    sums, weights = [start[..., 0]], [start]
    for i in range(n):
        gamma = log_decay[:, :, i].exp()[..., None]
        sums.append(gamma * sums[-1] + v[:, :, i])
        weights.append(gamma[..., None] * weights[-1] + k[:, :, i, :, None] * v[:, :, i, None])
    s, last = decayed_sum(v, log_decay, start[..., 0])
    torch.testing.assert_close(s, torch.stack(sums[1:], dim=2), **EXACT)
    torch.testing.assert_close(last, sums[-1], **EXACT)
    y, last = decayed_weights(q, k, v, log_decay, start)
    expected = torch.stack([(w.mT @ q[:, :, i, :, None])[..., 0] for i, w in enumerate(weights[1:])], dim=2)
    torch.testing.assert_close(y, expected, **EXACT)
    torch.testing.assert_close(last, weights[-1], **EXACT)


def test_nothing_of_the_future_is_seen() -> None:
    q, k, v, log_decay = draws(100)
    y, s = decayed_weights(q, k, v, log_decay)[0], decayed_sum(v, log_decay)[0]
    later = [t.clone() for t in (q, k, v, log_decay)]
    for t in later:
        t[:, :, 70:] *= 2
    torch.testing.assert_close(decayed_weights(*later)[0][:, :, :70], y[:, :, :70], **EXACT)
    torch.testing.assert_close(decayed_sum(later[2], later[3])[0][:, :, :70], s[:, :, :70], **EXACT)


def test_training_starts_at_the_learned_decay() -> None:
    torch.manual_seed(0)
    selective = SelectivePrimalAttention(12, 3, rank=4, dtype=torch.float64)
    plain = PrimalAttention(12, 3, rank=4, data_dependent=False, causal=True, decay="learned", dtype=torch.float64)
    plain.load_state_dict({k: v for k, v in selective.state_dict().items() if k != "decay_proj.weight"})
    x = torch.randn(2, 70, 12, dtype=torch.float64)
    torch.testing.assert_close(selective(x), plain(x), **EXACT)
    torch.testing.assert_close(selective.objective, plain.objective, **EXACT)


@pytest.mark.parametrize("kind", [SelectivePrimalAttention, DualPrimalAttention])
def test_padding_changes_nothing_and_every_parameter_learns(kind: type[SelectivePrimalAttention]) -> None:
    torch.manual_seed(0)
    layer = kind(12, 3, rank=4, dtype=torch.float64)
    torch.nn.init.normal_(layer.decay_proj.weight)
    x = torch.randn(2, 9, 12, dtype=torch.float64)
    mask = torch.zeros(2, 9, dtype=torch.bool)
    mask[0, [0, 4]] = mask[1, 6:] = True
    y, state = layer(x.masked_fill(mask[..., None], torch.nan), mask, return_state=True)
    objective = layer.objective
    for i in range(2):
        alone, after = layer(x[i][~mask[i]][None], return_state=True)
        torch.testing.assert_close(y[i][~mask[i]], alone[0], **EXACT)
        torch.testing.assert_close(objective[i], layer.objective[0], **EXACT)
        for mine, theirs in zip(state, after, strict=True):
            assert (mine is None) == (theirs is None)
            if mine is not None:
                torch.testing.assert_close(mine[i], theirs[0], **EXACT)
    layer(x)
    (layer(x).square().sum() + ksvd_loss(layer)).backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in layer.parameters())


def test_the_kernel_does_not_see_padding() -> None:
    torch.manual_seed(0)
    layer, x = SelectivePrimalAttention(8, 2, rank=3).double(), torch.randn(2, 6, 8, dtype=torch.float64)
    mask = torch.tensor([[False] * 6, [False, True, False, False, True, True]])
    alone = layer.kernel_matrix(x[1:, ~mask[1]])
    kernel = layer.kernel_matrix(x.masked_fill(mask[..., None], torch.nan), mask)
    torch.testing.assert_close(kernel[0], layer.kernel_matrix(x[:1])[0])
    torch.testing.assert_close(kernel[1][:, ~mask[1]][..., ~mask[1]], alone[0])
    assert not kernel[1][:, mask[1]].any()
    assert not kernel[1][..., mask[1]].any()


def test_the_dual_layer_reads_through_its_kernel() -> None:
    """e = κ h_r: what the layer computes in the primal is the kernel sum of the dual."""
    torch.manual_seed(0)
    layer = DualPrimalAttention(12, 3, rank=4, dtype=torch.float64).eval()
    torch.nn.init.normal_(layer.decay_proj.weight)
    x = torch.randn(2, 70, 12, dtype=torch.float64)
    _, scores = layer(x, return_scores=True)
    h_r = layer.dual_proj(x).chunk(2, dim=-1)[0].unflatten(-1, (3, 4)).transpose(1, 2)
    kernel = layer.kernel_matrix(x)
    torch.testing.assert_close(scores.e, kernel @ h_r, **EXACT)
    assert kernel.triu(1).abs().max() == 0
    with pytest.raises(ValueError, match="no factors of constant width"):
        layer.kernel_factors(x)


def test_a_selective_decay_is_learned() -> None:
    with pytest.raises(ValueError, match="a selective decay is learned"):
        SelectivePrimalAttention(12, 3, rank=4, decay=0.5)
    with pytest.raises(ValueError, match="recompute=True has no meaning here"):
        SelectivePrimalAttention(12, 3, rank=4, recompute=True)


def test_starting_again_gives_a_fresh_layer() -> None:
    layer = DualPrimalAttention(12, 3, rank=4)
    torch.nn.init.ones_(layer.decay_proj.weight)
    layer.reset_parameters()
    assert layer.decay_proj.weight.abs().max() == 0
    torch.testing.assert_close(layer.qk_proj.weight[:12], layer.qk_proj.weight[12:])  # the kernel starts symmetric
