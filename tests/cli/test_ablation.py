"""What the paper ablates: r-scores and data-dependent weights, by the recipe's flags."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
import toy

from primal_attention.models.uea import without_r_scores
from primal_attention.nn.primal import PrimalAttention
from primal_attention.train import loop
from primal_attention.train.uea import ClassifierConfig, make_model


def layer() -> PrimalAttention:
    torch.manual_seed(0)
    return PrimalAttention(8, 2, rank=3, landmarks=4)


def test_without_r_scores_the_output_knows_nothing_of_r():
    ablated, x = without_r_scores(layer()), torch.randn(2, 6, 8)
    y = ablated(x)
    with torch.no_grad():
        ablated.w_r.add_(1.0)
    assert torch.equal(ablated(x), y)
    assert not torch.equal(layer()(x), y)


def test_without_r_scores_is_the_layer_with_those_columns_at_zero():
    by_hand, x = layer(), torch.randn(2, 6, 8)
    with torch.no_grad():
        by_hand.score_proj.weight[:, 3:] = 0.0
    torch.testing.assert_close(without_r_scores(layer())(x), by_hand(x), rtol=0, atol=0)


def test_r_stays_in_the_objective_and_no_gradient_reaches_its_columns():
    ablated, x = without_r_scores(layer()).train(), torch.randn(2, 6, 8)
    loss = ablated(x).square().sum() + ablated.objective.square().sum()
    loss.backward()
    assert ablated.w_r.grad.abs().sum() > 0
    grad = ablated.score_proj.parametrizations.weight.original.grad
    assert grad[:, :3].abs().sum() > 0
    assert grad[:, 3:].abs().sum() == 0


def test_an_ablated_model_can_be_copied():
    ablated, x = without_r_scores(layer()), torch.randn(1, 5, 8)
    assert torch.equal(copy.deepcopy(ablated)(x), ablated(x))


@pytest.mark.parametrize("kind", ["paper", "modern"])
def test_the_flags_reach_every_primal_layer(kind):
    config = ClassifierConfig(
        kind=kind, embed_dim=8, num_heads=2, ffn_dim=8, rank=3, landmarks=4, data_dependent=False, r_scores=False
    )
    layers = [m for m in make_model(config, 2, 3, 12).modules() if isinstance(m, PrimalAttention)]
    assert len(layers) == 2
    assert not any(m.data_dependent for m in layers)
    assert all((m.score_proj.weight[:, 3:] == 0).all() for m in layers)


def test_an_ablated_run_is_evaluated_as_it_was_trained(toy_folder: Path, tmp_path: Path):
    recipe = toy.recipe(toy_folder, model__r_scores=False, trainer__epochs=1, trainer__ema=0.9)
    summary = loop.train(recipe, tmp_path / "run")
    assert loop.evaluate(tmp_path / "run")[""]["accuracy"] == summary["scores"]["last"]["accuracy"]
    assert summary["config"]["model"]["r_scores"] is False
