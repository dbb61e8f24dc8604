"""Measurements: J without side effects, spectra against the formula, times that stop where asked."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import toy

from closeness import assert_close
from primal_attention.nn.baselines.softmax import SoftmaxAttention
from primal_attention.report import look
from primal_attention.train import loop as runner


def test_j_of_a_data_set_needs_no_dropout_and_changes_nothing(toy_folder: Path):
    experiment = runner.build(toy.recipe(toy_folder).resolved())
    model = experiment.module.model
    before = {k: v.clone() for k, v in model.state_dict().items()}
    first = look.mean_objective(model, experiment.train)
    assert first == look.mean_objective(model, experiment.train)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert model.training
    softmax = runner.build(toy.recipe(toy_folder, model__attention=("softmax",)).resolved())
    assert look.mean_objective(softmax.module.model, softmax.train) is None


def test_the_softmax_matrix_is_the_one_the_layer_applies():
    layer = SoftmaxAttention(8, 2).double()
    x = torch.randn(2, 5, 8, dtype=torch.float64)
    _, _, v = layer.project_in(x)
    assert_close(layer(x), layer.project_out(look.attention_matrix(layer, x) @ v), 1e-12)


@pytest.mark.parametrize("attention", ["primal", "softmax"])
def test_singular_values_fall_from_one(attention, toy_folder: Path):
    model = runner.build(
        toy.recipe(toy_folder, model__attention=(attention,), data__principal=False).resolved()
    ).module.model
    sigma = look.singular_values(model, [torch.randn(9, 2), torch.randn(3, 2)], count=6)
    assert sigma[0] == pytest.approx(1.0)
    assert sigma == sorted(sigma, reverse=True)
    with pytest.raises(ValueError, match="no series has 60 steps"):
        look.singular_values(model, [torch.randn(9, 2)], count=60)


def test_a_slow_attention_is_not_tried_on_longer_sequences():
    seconds = look.time_lengths({"softmax": {}}, [16, 32], embed_dim=8, num_heads=2, limit=0.0)
    assert list(seconds["softmax"]) == [16]
