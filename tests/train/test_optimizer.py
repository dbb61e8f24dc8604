"""Optimizers, schedules and averaged weights."""

import copy

import pytest
import torch
from torch import nn

from closeness import assert_close
from primal_attention.nn.baselines import make_attention
from primal_attention.train.config import OptimConfig
from primal_attention.train.optimizer import learning_rate, one_cycle, update_average


def test_one_cycle_goes_up_to_one_and_down_to_zero():
    factors = [one_cycle(step, 30, 100) for step in range(101)]
    assert max(factors) == factors[30] == 1.0
    assert factors[0] == pytest.approx(1 / 25)
    assert factors[100] == pytest.approx(0.0)
    straight = [one_cycle(step, 20, 100, linear=True) for step in (0, 10, 20, 60, 100)]
    assert straight == pytest.approx([0.04, 0.52, 1.0, 0.5, 0.0])


@pytest.mark.parametrize(
    ("schedule", "factors"),
    [
        ("constant", [1, 1, 1, 1]),
        ("warmup", [0.5, 1, 1, 1]),
        ("inverse-sqrt", [0.5, 1, (2 / 3) ** 0.5, 0.5**0.5]),
    ],
)
def test_schedules_without_an_end_do_not_depend_on_later_steps(schedule, factors):
    config = OptimConfig(lr=0.1, schedule=schedule, warmup=0.5)
    for total in (4, 400):
        rate = learning_rate(config, total, warmup_total=4)
        assert [rate(step) for step in range(4)] == pytest.approx([0.1 * factor for factor in factors])


@pytest.mark.parametrize("share", [0.5, torch.tensor(0.5)], ids=["number", "tensor"])
def test_the_average_follows_weights_and_copies_counts_and_random_draws(share: float | torch.Tensor):
    model = nn.Sequential(make_attention("performer", 16, 2, seed=0), make_attention("reformer", 16, 2, seed=1))
    model.append(nn.BatchNorm1d(3))
    mean = copy.deepcopy(model)
    model[2].num_batches_tracked.fill_(7)
    for layer in model[:2]:
        layer.redraw()
        nn.init.constant_(layer.in_proj.weight, 3.0)
    half = torch.lerp(mean[0].in_proj.weight.detach(), torch.tensor(3.0), 0.5)
    update_average(mean, model, share)
    assert int(mean[2].num_batches_tracked) == 7
    assert torch.equal(mean[0].frequencies, model[0].frequencies)
    assert torch.equal(mean[1].coarse_rotations, model[1].coarse_rotations)
    assert torch.equal(mean[1].fine_rotations, model[1].fine_rotations)
    assert_close(mean[0].in_proj.weight, half, 1e-6)
    model[0].redraw()
    update_average(mean[0], model[0], share)  # a layer that is the whole model
    assert torch.equal(mean[0].frequencies, model[0].frequencies)
