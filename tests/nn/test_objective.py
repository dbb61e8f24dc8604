"""J, the loss made of it, and the record of several calls."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from closeness import assert_close
from primal_attention import PrimalAttention, ksvd_loss, record_objective
from primal_cases import CAUSAL, EMBED, MODES, MODES_AND_DECAYS, backend_options, gradients, inputs, make

SAME = 1e-12  # float64, the same sums in another order

every_mode = pytest.mark.parametrize("mode", MODES)


def paper_objective(layer: PrimalAttention, e: Tensor, r: Tensor, b: int, *, mean: bool) -> Tensor:
    """J of one sample, token by token: ½ Σ_i e_iᵀΛe_i + ½ Σ_i r_iᵀΛr_i − Tr(W_eᵀW_r), mean over heads."""
    per_head = []
    for h in range(layer.num_heads):
        lam = torch.diag(layer.sqrt_lambda[h].square())
        energy = sum(z[b, h, i] @ lam @ z[b, h, i] for z in (e, r) for i in range(e.shape[2])) / 2
        per_head.append((energy / e.shape[2] if mean else energy) - torch.trace(layer.w_e[h].T @ layer.w_r[h]))
    return torch.stack(per_head).mean()


@pytest.mark.parametrize(("mode", "decay"), MODES_AND_DECAYS)
def test_the_objective_is_the_papers_formula(mode: str, decay: Any) -> None:
    for form in ("mean", "sum"):
        layer = make(mode, decay, objective_form=form)
        _, (e, r) = layer(inputs(3, 8), return_scores=True)
        expected = torch.stack([paper_objective(layer, e, r, b, mean=form == "mean") for b in range(3)])
        assert_close(layer.objective, expected, SAME)


def test_the_sum_form_is_zero_at_the_kernel_svd() -> None:
    # Lemma 4.2 with one head and φ itself (data-independent): W_e = φ_kᵀ V, W_r = φ_qᵀ U, Λ = Σ⁻¹.
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


# The loss


def test_reductions_over_samples_and_layers() -> None:
    model = nn.Sequential(make("data_dependent"), make("plain"))
    model(inputs(4, 7))
    j = [layer.objective for layer in model]
    samples, batch = [(one**2).mean() for one in j], [one.mean() ** 2 for one in j]
    assert_close(ksvd_loss(model[0]), samples[0], SAME)
    assert_close(ksvd_loss(model[0], "batch"), batch[0], SAME)
    for reduction, each in (("sample", samples), ("batch", batch)):
        assert_close(ksvd_loss(model, reduction), sum(each) / 2, SAME)
        assert_close(ksvd_loss(model, reduction, layers="sum"), sum(each), SAME)


def test_a_forward_without_gradients_is_refused_only_where_gradients_are_needed() -> None:
    layer = make("data_dependent")
    with torch.no_grad():
        layer(inputs(2, 7))
        assert ksvd_loss(layer).item() >= 0
    with pytest.raises(RuntimeError, match="carries no gradient"):
        ksvd_loss(layer)
    checkpoint(layer, inputs(2, 7).requires_grad_(), use_reentrant=True)
    with pytest.raises(RuntimeError, match="use_reentrant=False"):
        ksvd_loss(layer)


def test_bad_calls_of_the_loss_are_refused() -> None:
    with pytest.raises(ValueError, match=r"model has no PrimalAttention layer \(Linear\)"):
        ksvd_loss(nn.Linear(2, 2))
    with pytest.raises(TypeError, match=r"model must be an nn\.Module \(got list\)"):
        ksvd_loss([make("plain")])
    with pytest.raises(RuntimeError, match="layer '0' has no objective yet: call the model in training mode"):
        ksvd_loss(nn.Sequential(make("data_dependent"), make("plain")))
    layer = make("plain")
    layer(inputs(1, 3))
    with pytest.raises(ValueError, match=r"^reduction must be one of 'sample', 'batch' \(got 'sum'\)$"):
        ksvd_loss(layer, "sum")
    with pytest.raises(ValueError, match=r"^layers must be one of 'mean', 'sum' \(got 'max'\)$"):
        ksvd_loss(layer, layers="max")


@pytest.mark.parametrize(("mode", "scale"), [("data_dependent", 1e9), ("data_dependent", 1e20), ("causal", 1e20)])
def test_the_loss_of_large_inputs_is_the_same_in_all_backends(mode: str, scale: float) -> None:
    """Where J² exceeds float32 the loss is infinite in all of them, never zero."""
    pytest.importorskip("triton")
    layer = make(mode, dtype=torch.float32)
    x = scale * inputs(2, 20, dtype=torch.float32)
    results = {}
    for backend in ("reference", "cpu", "fused"):
        one, rows = copy.deepcopy(layer), x.clone().requires_grad_()
        one.backend = backend
        one(rows)
        loss = ksvd_loss(one)
        grads = torch.autograd.grad(loss, [rows, one.qk_proj.weight, one.w_e, one.sqrt_lambda])
        results[backend] = [loss, *grads]
    assert results["reference"][0].isfinite() == (mode != "data_dependent" or scale < 1e10)
    for backend in ("cpu", "fused"):
        for actual, expected in zip(results[backend], results["reference"], strict=True):
            assert actual.isfinite().all() == expected.isfinite().all()
            if expected.isfinite().all():
                assert_close(actual, expected, 1e-4)  # J is a difference of large sums in float32


# The record


class Shared(nn.Module):
    """One layer applied twice, as in models that share parameters over depth."""

    def __init__(self, mode: str = "data_dependent") -> None:
        super().__init__()
        self.layer = make(mode)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            x = x + self.layer(x)
        return x


@every_mode
@pytest.mark.parametrize("reduction", ["sample", "batch"])
def test_every_call_of_a_shared_layer_counts(mode: str, reduction: Any) -> None:
    layer, xs = make(mode), [inputs(3, 9), inputs(2, 7)]
    each, grads = [], []
    for x in xs:
        layer(x)
        each.append(ksvd_loss(layer, reduction))
        grads.append(gradients(layer, each[-1], keep_graph=True))
    with record_objective(layer):
        for x in xs:
            layer(x)
        loss = ksvd_loss(layer, reduction)
        total = ksvd_loss(layer, reduction, layers="sum")
        for name, grad in gradients(layer, loss).items():
            assert_close(grad, (grads[0][name] + grads[1][name]) / 2, 1e-11, name)
    assert_close(loss, sum(each) / 2, SAME)
    assert_close(total, sum(each), SAME)
    assert_close(ksvd_loss(layer, reduction), each[-1], SAME)  # outside the context the last call counts


@every_mode
def test_evaluation_keeps_the_objective_of_training_unless_it_is_recorded(mode: str) -> None:
    layer, x = make(mode), inputs(2, 9)
    assert layer.objective is None
    layer(x)
    j = layer.objective
    layer.eval()
    layer(2 * x)
    assert layer.objective is j
    with torch.no_grad(), record_objective(layer):
        layer(2 * x)
        layer(x)
        assert torch.equal(layer.objective, j)
        assert ksvd_loss(layer) > 0
    assert layer.objective is j


@pytest.mark.parametrize(("mode", "backend"), [("causal", "fused"), *((mode, "reference") for mode in CAUSAL)])
def test_streamed_tokens_are_recorded(mode: str, backend: str) -> None:
    options = backend_options(backend)
    layer = make(mode, **options).eval()
    x = torch.randn(2, 4, EMBED, dtype=options["dtype"], device=options["device"])
    state = layer.initial_state(2)
    with torch.no_grad(), record_objective(layer):
        for t in range(4):
            _, state = layer.step(x[:, t], state)
            assert torch.isfinite(layer.objective).all()
        assert ksvd_loss(layer) > 0


@pytest.mark.supports("checkpointing", "cpu")
@every_mode
def test_recomputation_by_checkpointing_does_not_count(mode: str) -> None:
    model, x = Shared(mode), inputs(2, 9)
    with record_objective(model):
        expected = gradients(model, model(x).square().mean() + ksvd_loss(model))
    with record_objective(model):
        y = checkpoint(model, x, use_reentrant=False)
        before = ksvd_loss(model)
        grads = gradients(model, y.square().mean() + before)
        assert_close(ksvd_loss(model), before, SAME)
    for name, grad in grads.items():
        assert_close(grad, expected[name], SAME, name)


@pytest.mark.parametrize("is_outside", [True, False])
def test_accumulated_gradients_are_those_of_the_whole_batch(is_outside: bool) -> None:
    model, x = Shared(), inputs(6, 9)
    with record_objective(model):
        expected = gradients(model, model(x).square().mean() + ksvd_loss(model))
    with record_objective(model) if is_outside else nullcontext():
        for part in x.split(2):
            with nullcontext() if is_outside else record_objective(model):
                ((model(part).square().mean() + ksvd_loss(model)) / 3).backward()
    for name, parameter in model.named_parameters():
        assert_close(parameter.grad, expected[name], SAME, name)


@pytest.mark.parametrize("is_training", [True, False])
def test_compiled_models_are_recorded_without_recompilation(is_training: bool) -> None:
    torch.compiler.reset()
    model, x = Shared().train(is_training), inputs(2, 9)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    with record_objective(model):
        expected = gradients(model, model(x).square().mean() + ksvd_loss(model))
    with record_objective(model):
        y = compiled(x)
        grads = gradients(model, y.square().mean() + ksvd_loss(model))
        with torch.compiler.set_stance("fail_on_recompile"):
            for _ in range(10):
                y = compiled(x)
            assert_close(ksvd_loss(model, layers="sum"), 20 * ksvd_loss(model), SAME)
    for name, grad in grads.items():
        assert_close(grad, expected[name], SAME, name)


def test_layers_that_were_not_called_do_not_count() -> None:
    model = nn.ModuleList([make("plain"), make("plain")])
    model[1](inputs(2, 9))
    with record_objective(model):
        with pytest.raises(RuntimeError, match="no layer was called inside record_objective"):
            ksvd_loss(model)
        model[0](inputs(2, 9))
        assert_close(ksvd_loss(model), model[0].objective.square().mean(), SAME)


def test_an_exception_and_an_inner_context_leave_the_outer_record() -> None:
    layer = make("plain")

    def fail_inside() -> None:
        with record_objective(layer):
            layer(inputs(2, 9))
            raise KeyError

    with record_objective(layer):
        layer(inputs(2, 9))
        loss = ksvd_loss(layer)
        with pytest.raises(KeyError):
            fail_inside()
        assert torch.equal(ksvd_loss(layer), loss)
    with pytest.raises(KeyError):
        fail_inside()
    layer.eval()(inputs(2, 9))
    assert layer._last_call is None
