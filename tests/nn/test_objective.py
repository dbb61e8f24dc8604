"""J and the loss made of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from closeness import assert_close
from primal_attention import PrimalAttention, ksvd_loss
from primal_attention.ops.landmarks import landmark_indices
from primal_attention.ops.reference import split_heads
from primal_cases import MODES, MODES_AND_DECAYS, gradients, inputs, make

SAME = 1e-12  # float64, the same sums in another order


def paper_objective(layer: PrimalAttention, e: Tensor, r: Tensor, b: int, *, mean: bool) -> Tensor:
    """J of one sample, token by token: ½ Σ_i e_iᵀΛe_i + ½ Σ_i r_iᵀΛr_i − Tr(W_eᵀW_r), mean over heads."""
    per_head = []
    for h in range(layer.num_heads):
        lam = torch.diag(layer.sqrt_lambda[h].square())
        energy = sum(z[b, h, i] @ lam @ z[b, h, i] for z in (e, r) for i in range(e.shape[2])) / 2
        per_head.append((energy / e.shape[2] if mean else energy) - torch.trace(layer.w_e[h].T @ layer.w_r[h]))
    return torch.stack(per_head).mean()


@pytest.mark.parametrize("form", ["mean", "sum"])
@pytest.mark.parametrize(("mode", "decay"), MODES_AND_DECAYS)
def test_objective_is_the_papers_by_hand(mode: str, decay: Any, form: str) -> None:
    layer = make(mode, decay, objective_form=form)
    _, (e, r) = layer(inputs(3, 8), return_scores=True)
    expected = torch.stack([paper_objective(layer, e, r, b, mean=form == "mean") for b in range(3)])
    assert_close(layer.objective, expected, SAME)


def test_the_trace_may_be_that_of_the_projection_weights() -> None:
    layer, plain = make("data_dependent", objective_trace="projections"), make("data_dependent")
    plain.load_state_dict(layer.state_dict())
    x = inputs(2, 9)
    layer(x)
    plain(x)
    rows = split_heads(x, layer.num_heads)[:, :, landmark_indices(9, layer.landmarks)]
    trace_x = ((rows.mT @ layer.w_e) * (rows.mT @ layer.w_r)).sum((-2, -1)).mean(1)
    trace_w = (layer.w_e * layer.w_r).sum((-2, -1)).mean()
    assert_close(layer.objective, plain.objective + trace_w - trace_x, SAME)


def test_at_the_singular_value_decomposition_of_the_kernel_the_sum_form_is_zero() -> None:
    # Lemma 4.2: W_e = φ_kᵀ V Σ^(-1/2)…, Λ = Σ⁻¹ make J vanish; here with φ itself (not data-dependent), one head.
    torch.manual_seed(3)
    layer = PrimalAttention(4, 1, rank=4, data_dependent=False, objective_form="sum", dtype=torch.float64)
    x = torch.randn(1, 30, 4, dtype=torch.float64)
    phi_q, phi_k = (phi[0, 0] for phi in layer.kernel_factors(x))
    u, sigma, vt = torch.linalg.svd(phi_q @ phi_k.T)
    u, sigma, v = u[:, :4], sigma[:4], vt[:4].T
    with torch.no_grad():
        layer.w_e[0] = phi_k.T @ v  # e = K V = U Σ
        layer.w_r[0] = phi_q.T @ u  # r = Kᵀ U = V Σ
        layer.sqrt_lambda[0] = sigma.rsqrt()
    _, scores = layer(x, return_scores=True)
    assert_close(scores.e[0, 0], u * sigma, 1e-10, "e")  # the smallest singular value limits the accuracy
    assert layer.objective.abs().item() < 1e-10
    with torch.no_grad():
        layer.w_e.mul_(1.1)
    layer(x)
    assert layer.objective.abs().item() > 1e-3


class TwoLayers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = make("data_dependent"), make("plain")

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x))


def test_reductions_square_the_samples_or_their_mean() -> None:
    layer = make("data_dependent")
    layer(inputs(4, 7))
    j = layer.objective
    assert_close(ksvd_loss(layer), (j**2).mean(), SAME)
    assert_close(ksvd_loss(layer, "batch"), j.mean() ** 2, SAME)
    assert ksvd_loss(layer) > ksvd_loss(layer, "batch")


@pytest.mark.parametrize("reduction", ["sample", "batch"])
def test_layers_are_averaged_or_summed(reduction: Any) -> None:
    model = TwoLayers()
    model(inputs(3, 7))
    each = [ksvd_loss(model.first, reduction), ksvd_loss(model.second, reduction)]
    assert_close(ksvd_loss(model, reduction), sum(each) / 2, SAME)
    assert_close(ksvd_loss(model, reduction, layers="sum"), sum(each), SAME)


def test_every_parameter_of_the_scores_gets_a_gradient_from_the_loss_alone() -> None:
    layer = make("causal_data_dependent", "learned")
    layer(inputs(2, 9))
    grads = gradients(layer, ksvd_loss(layer))
    for name in ("qk_proj.weight", "qk_proj.bias", "w_e", "w_r", "sqrt_lambda", "decay_logit"):
        assert grads[name].abs().sum() > 0, name
    assert (grads["out_proj.weight"] == 0).all()


def test_minimising_the_loss_brings_it_to_zero() -> None:
    layer = make("data_dependent")
    x = inputs(4, 9)
    optimiser = torch.optim.Adam(layer.parameters(), lr=1e-2)
    losses = []
    for _ in range(60):
        layer(x)
        loss = ksvd_loss(layer)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    assert losses[-1] < 0.05 * losses[0]


@pytest.mark.parametrize("mode", MODES)
def test_evaluation_leaves_the_objective_alone(mode: str) -> None:
    layer = make(mode)
    assert layer.objective is None
    layer(inputs(2, 7))
    j = layer.objective
    layer.eval()(inputs(2, 7))
    assert layer.objective is j


def test_the_loss_can_be_read_without_gradients() -> None:
    layer = make("data_dependent")
    with torch.no_grad():
        layer(inputs(2, 7))
        assert ksvd_loss(layer).item() >= 0


def test_a_forward_without_gradients_is_noticed() -> None:
    layer = make("data_dependent")
    with torch.no_grad():
        layer(inputs(2, 7))
    with pytest.raises(RuntimeError, match="carries no gradient"):
        ksvd_loss(layer)


def test_a_model_without_primal_layers_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"model has no PrimalAttention layer \(Linear\)"):
        ksvd_loss(nn.Linear(2, 2))


def test_before_the_first_forward_the_loss_names_the_layer() -> None:
    with pytest.raises(RuntimeError, match="layer 'first' has no objective yet: call the model in training mode"):
        ksvd_loss(TwoLayers())


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"reduction": "sum"}, "reduction must be 'sample' or 'batch' (got 'sum')"),
        ({"layers": "max"}, "layers must be 'mean' or 'sum' (got 'max')"),
    ],
)
def test_unknown_reductions_are_refused(keywords: dict[str, Any], message: str) -> None:
    layer = make("plain")
    layer(inputs(1, 3))
    with pytest.raises(ValueError) as error:  # noqa: PT011 - the whole message is compared
        ksvd_loss(layer, **keywords)
    assert str(error.value) == message
