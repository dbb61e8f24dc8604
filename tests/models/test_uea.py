"""The two series classifiers: shapes, masks, lengths, gradients."""

from __future__ import annotations

import copy
from functools import partial

import numpy as np
import pytest
import torch

from closeness import assert_close
from primal_attention.models.uea import (
    NOISE,
    MaskedBatchNorm,
    PoolingHead,
    ScorePosterior,
    modern_classifier,
    paper_classifier,
    pooled_scores,
    without_r_scores,
)
from primal_attention.nn.objective import ksvd_loss
from primal_attention.nn.primal import PrimalAttention
from primal_attention.train.uea import ClassifierConfig, make_model

KEYWORDS = {"primal": {"rank": 4, "landmarks": 6}}
LENGTHS = (12, 7, 1)


def small(kind: str, attention="primal", **changes):
    settings = {"attention": attention, "embed_dim": 16, "num_heads": 2, "attention_kwargs": KEYWORDS, **changes}
    make = partial(paper_classifier, max_length=12, ffn_dim=32) if kind == "paper" else modern_classifier
    return make(3, 5, **settings).double()


@pytest.fixture
def batch():
    x = torch.randn(3, 12, 3, dtype=torch.float64)
    mask = torch.arange(12) >= torch.tensor(LENGTHS).unsqueeze(1)
    return x, mask


@pytest.mark.parametrize("attention", ["primal", "primal+", "softmax", "linear", "none"])
@pytest.mark.parametrize("kind", ["paper", "modern", "strided"])
def test_padding_never_matters_nan_included(kind, attention, batch):
    if (kind, attention) == ("paper", "none"):
        pytest.skip("the paper's network mixes tokens by attention only")
    x, mask = batch
    model = small(kind, attention, **({"stride": 5} if kind == "strided" else {})).eval()
    logits = model(x.masked_fill(mask.unsqueeze(-1), 0.0), mask)
    assert logits.shape == (3, 5)
    assert torch.equal(model(x.masked_fill(mask.unsqueeze(-1), torch.nan), mask), logits)
    for i, n in enumerate(LENGTHS):
        assert_close(logits[i], model(x[i : i + 1, :n])[0], 1e-10, f"length {n}")


@pytest.mark.parametrize("kind", ["paper", "modern"])
def test_every_weight_gets_a_gradient_from_the_task_and_the_objective(kind, batch):
    x, mask = batch
    model = small(kind).train()
    loss = model(x, mask).logsumexp(dim=-1).sum() + ksvd_loss(model)
    loss.backward()
    for name, weight in model.named_parameters():
        assert weight.grad is not None, name
        assert torch.isfinite(weight.grad).all(), name


def test_a_stride_averages_the_steps_of_the_first_convolution(batch):
    x, _ = batch
    stem = small("modern", stride=5).eval().stem
    steps = torch.nn.functional.gelu(stem.norms[0](stem.convs[0](x.transpose(1, 2)).transpose(1, 2)))
    tokens = torch.stack([steps[:, :5].mean(1), steps[:, 5:10].mean(1), steps[:, 10:].mean(1)], dim=1)
    second = stem.norms[1](stem.convs[1](tokens.transpose(1, 2)).transpose(1, 2))
    assert_close(stem(x), torch.nn.functional.gelu(second), 1e-12)


def test_the_score_posterior_is_that_of_a_bayesian_linear_model():
    rng = np.random.default_rng(0)
    train, new = rng.standard_normal((1, 30, 6)) @ np.diag([3.0, 2, 1, 1, 0.1, 0]), rng.standard_normal((1, 4, 6))
    posterior = ScorePosterior.fit(train)
    centred = train[0] - train[0].mean(0)
    covariance = centred.T @ centred / 30
    precision = np.linalg.inv(covariance + NOISE * np.trace(covariance) / 6 * np.eye(6))
    variance = np.einsum("bi,ij,bj->b", new[0] - train[0].mean(0), precision, new[0] - train[0].mean(0))
    np.testing.assert_allclose(posterior(new), variance / np.trace(covariance @ precision), rtol=1e-9)
    np.testing.assert_allclose(posterior(train).mean(), 1.0)


def test_pooled_scores_are_means_over_the_valid_tokens(batch):
    x, mask = batch
    model = small("modern", layers=2).eval()
    together = pooled_scores(model, x, mask)
    assert together.shape == (3, 2 * 2 * 2 * 4)  # layers, e and r, heads, rank
    for i, n in enumerate(LENGTHS):
        assert_close(together[i], pooled_scores(model, x[i : i + 1, :n])[0], 1e-10, f"length {n}")


def test_training_statistics_ignore_the_padding(batch):
    x, mask = batch
    models = [small("modern", dropout=0.0).train() for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    models[0](x, mask)
    wider = torch.nn.functional.pad(x, (0, 0, 0, 8), value=77.0)
    models[1](wider, torch.nn.functional.pad(mask, (0, 8), value=True))
    for (name, a), b in zip(models[0].state_dict().items(), models[1].state_dict().values(), strict=True):
        if "running" in name:
            assert_close(a, b, 1e-12, name)


def test_masked_batch_norm_without_a_mask_is_batch_norm():
    ours, torchs = MaskedBatchNorm(4).double(), torch.nn.BatchNorm1d(4).double()
    x = torch.randn(3, 7, 4, dtype=torch.float64)
    for mask in (None, torch.zeros(3, 7, dtype=torch.bool)):
        assert_close(ours(x, mask), torchs(x.transpose(1, 2)).transpose(1, 2), 1e-12)
    assert_close(ours.running_var, torchs.running_var, 1e-12)
    assert_close(ours.eval()(x), torchs.eval()(x.transpose(1, 2)).transpose(1, 2), 1e-12)


def test_the_modern_network_takes_any_length_and_the_paper_network_says_its_own():
    x = torch.randn(2, 40, 3, dtype=torch.float64)
    assert small("modern").eval()(x).shape == (2, 5)
    with pytest.raises(ValueError, match="40 tokens and the model was built for 12"):
        small("paper").eval()(x)


# What the paper ablates: r-scores and data-dependent weights


def layer() -> PrimalAttention:
    torch.manual_seed(0)
    return PrimalAttention(8, 2, rank=3, landmarks=4)


def test_without_r_scores_their_columns_are_zero_and_r_stays_in_the_objective() -> None:
    ablated, by_hand, x = without_r_scores(layer()).train(), layer(), torch.randn(2, 6, 8)
    with torch.no_grad():
        by_hand.score_proj.weight[:, 3:] = 0.0
    y = ablated(x)
    torch.testing.assert_close(y, by_hand(x), rtol=0, atol=0)
    assert torch.equal(copy.deepcopy(ablated)(x), y)
    (y.square().sum() + ablated.objective.square().sum()).backward()
    assert ablated.w_r.grad.abs().sum() > 0
    grad = ablated.score_proj.parametrizations.weight.original.grad
    assert grad[:, :3].abs().sum() > 0
    assert grad[:, 3:].abs().sum() == 0
    with torch.no_grad():
        ablated.w_r.add_(1.0)
    assert torch.equal(ablated(x), y)


@pytest.mark.parametrize("kind", ["paper", "modern"])
def test_the_flags_reach_every_primal_layer(kind):
    config = ClassifierConfig(
        kind=kind, embed_dim=8, num_heads=2, ffn_dim=8, rank=3, landmarks=4, data_dependent=False, r_scores=False
    )
    layers = [m for m in make_model(config, 2, 3, 12).modules() if isinstance(m, PrimalAttention)]
    assert len(layers) == 2
    assert not any(m.data_dependent for m in layers)
    assert all((m.score_proj.weight[:, 3:] == 0).all() for m in layers)


def test_pooling_ignores_padding_and_an_empty_row_gives_zero():
    x = torch.tensor([[[1.0], [-5.0], [torch.nan]], [[1.0], [2.0], [3.0]]])
    mask = torch.tensor([[False, False, True], [True, True, True]])
    head = PoolingHead(1, 2)
    head.proj.load_state_dict({"weight": torch.eye(2), "bias": torch.zeros(2)})
    assert head(x, mask).tolist() == [[-2.0, 1.0], [0.0, 0.0]], "mean and maximum"
