"""DeltaPrimalAttention: equations, padding, streaming, and behaviour as a module."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
from torch import nn

from kernel_cases import make_delta
from primal_attention import PrimalAttention, ksvd_loss
from primal_attention.nn.delta import DeltaPrimalAttention
from primal_attention.ops.delta_rule import recurrence

EXACT = {"rtol": 0.0, "atol": 1e-11}  # float64
make_layer = partial(make_delta, 3, 4, rank=4, backend="auto", dtype=torch.float64)


def test_the_layer_equals_its_equations() -> None:
    layer = make_layer(conv=0, gate=False).eval()
    x = torch.randn(2, 21, 12, dtype=torch.float64)
    y, scores, state = layer(x, return_scores=True, return_state=True)
    q, k = (t.unflatten(-1, (3, 4)).transpose(1, 2) for t in layer.qk_proj(x).chunk(2, dim=-1))
    q, k = q / q.norm(dim=-1, keepdim=True), k / k.norm(dim=-1, keepdim=True)
    h_r, h_e = (t.unflatten(-1, (3, 4)).transpose(1, 2) for t in layer.dual_proj(x).chunk(2, dim=-1))
    beta_e, beta_r = layer.write_proj(x).sigmoid().transpose(1, 2).chunk(2, dim=1)
    log_decay = (layer.decay_proj(x) + layer.decay_logit).sigmoid().log().transpose(1, 2)
    e, w_e = recurrence(q, k, h_r, log_decay, beta_e)
    r, w_r = recurrence(k, q, h_e, log_decay, beta_r)
    for actual, expected in ((scores.e, e), (scores.r, r), (state.w_e_x, w_e), (state.w_r_x, w_r)):
        torch.testing.assert_close(actual, expected, **EXACT)
    both = torch.cat([e, r], dim=-1)
    both = both * (both.square().mean(dim=-1, keepdim=True) + 1e-5).rsqrt()
    torch.testing.assert_close(y, layer.out_proj(layer.score_proj(both).transpose(1, 2).flatten(2)), **EXACT)
    # e = κ h̃, where h̃ solves the triangular system of the updates.
    kernel, at_keys = layer.kernel_matrix(x), (k @ k.mT) * layer.kernel_matrix(x) / (q @ k.mT)
    eye = torch.eye(21, dtype=torch.float64)
    dual = torch.linalg.solve_triangular(
        eye + beta_e[..., None] * at_keys.tril(-1), beta_e[..., None] * h_r, upper=False
    )
    torch.testing.assert_close(e, kernel @ dual, rtol=0.0, atol=1e-9)  # divided by small q·k above
    with pytest.raises(ValueError, match="no factors of constant width"):
        layer.kernel_factors(x)


def test_padded_equals_single_and_every_parameter_has_a_gradient() -> None:
    layer, mask = make_layer(), torch.zeros(2, 9, dtype=torch.bool)
    mask[0, [0, 4]] = mask[1, 6:] = True
    x = torch.randn(2, 9, 12, dtype=torch.float64)
    y, scores, state = layer(x.masked_fill(mask[..., None], torch.nan), mask, return_scores=True, return_state=True)
    objective = layer.objective
    for i in range(2):
        single, own, after = layer(x[i][~mask[i]][None], return_scores=True, return_state=True)
        torch.testing.assert_close(y[i][~mask[i]], single[0], **EXACT)
        torch.testing.assert_close(scores.r[i][:, ~mask[i]], own.r[0], **EXACT)
        torch.testing.assert_close(objective[i], layer.objective[0], **EXACT)
        for actual, expected in zip(state[:3], after[:3], strict=True):
            torch.testing.assert_close(actual[i], expected[0], **EXACT)
    (layer(x).square().sum() + ksvd_loss(layer)).backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in layer.parameters())


# A module


@pytest.mark.parametrize(
    "name", ["qk_proj", "dual_proj", "write_proj", "decay_proj", "gate_proj", "score_proj", "out_proj"]
)
def test_wrapped_and_hooked_maps_take_effect(name: str) -> None:
    layer, x = make_layer(), torch.randn(1, 9, 12, dtype=torch.float64)
    expected, base = copy.deepcopy(layer), getattr(layer, name)
    with torch.no_grad():
        for parameter in getattr(expected, name).parameters():
            parameter.mul_(2)
    wrapper = nn.Sequential(base)  # it has no weight of its own, like an adapter
    wrapper.register_forward_hook(lambda module, args, result: 2 * result)
    setattr(layer, name, wrapper)
    y = layer(x)
    torch.testing.assert_close(y, expected(x), **EXACT)
    y.sum().backward()
    assert base.weight.grad.abs().sum() > 0


def test_bad_input_is_refused() -> None:
    with pytest.raises(ValueError, match="backend must be one of 'auto', 'reference', 'fused'"):
        make_layer(backend="cpu")
    with pytest.raises(ValueError, match="gate must be one of True, False, 'silu', 'sigmoid'"):
        make_layer(gate="tanh")
    layer, x = make_layer(), torch.randn(2, 3, 12, dtype=torch.float64)
    other = PrimalAttention(12, 3, rank=4, causal=True, data_dependent=False, dtype=torch.float64)
    with pytest.raises(TypeError, match=r"state must be a DeltaState.*got RunningState"):
        layer(x, state=other.initial_state(2))
    with pytest.raises(ValueError, match=r"another kind of layer \(delta rule.*rank=3, conv=4\); this layer is"):
        layer(x, state=make_layer(rank=3).initial_state(2))
    with pytest.raises(TypeError, match="dtype of the layer's parameters"):
        layer(x.float())


def test_reset_parameters_after_to_empty_and_an_empty_batch() -> None:
    with torch.device("meta"):
        layer = DeltaPrimalAttention(12, 3, rank=4)
    layer = layer.to_empty(device="cpu")
    layer.reset_parameters()
    assert layer.decay_proj.weight.abs().max() == 0
    assert torch.equal(layer.qk_proj.weight[:12], layer.qk_proj.weight[12:])
    assert torch.isfinite(layer(torch.randn(1, 5, 12))).all()
    x = torch.zeros(0, 20, 12, requires_grad=True)
    y = layer(x)
    (y.sum() + layer.objective.sum()).backward()
    assert y.shape == x.grad.shape == (0, 20, 12)
