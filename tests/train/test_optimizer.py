"""Optimizers, schedules and averaged weights."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from closeness import assert_close
from primal_attention.nn.baselines import make_attention
from primal_attention.train.config import OptimConfig
from primal_attention.train.optimizer import (
    RecordableRAdam,
    learning_rate,
    load_optimizer,
    one_cycle,
    set_learning_rate,
    update_average,
)


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_recordable_radam_is_radam(weight_decay: float):
    """Also after a checkpoint in between, of this version and of one that counted the steps per group."""
    start = [torch.randn(4, 3), torch.randn(3)]
    ours, theirs = ([torch.nn.Parameter(t.clone()) for t in start] for _ in range(2))
    a = RecordableRAdam(ours, lr=0.05, weight_decay=weight_decay, fused=True)
    b = torch.optim.RAdam(theirs, lr=0.05, weight_decay=weight_decay)
    for step in range(30):
        for p in (*ours, *theirs):
            p.grad = torch.sin(3 * p.detach()) + 0.01 * step
        if step in (12, 20):
            state = copy.deepcopy(a.state_dict())
            if step == 20:
                names = ("params", "lr", "betas", "eps", "weight_decay")
                state["param_groups"] = [
                    {**{n: group[n] for n in names}, "step": 20} for group in state["param_groups"]
                ]
                for entries in state["state"].values():
                    del entries["step"]
            a = RecordableRAdam(ours, lr=0.05, weight_decay=weight_decay, fused=True)
            load_optimizer(a, state)
        set_learning_rate(a, torch.tensor(a.rectify(0.05, step + 1)))
        assert a.is_first == (step < 5)  # the first five steps have no 1/√v
        a.step()
        b.step()
        for p, q in zip(ours, theirs, strict=True):
            torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)  # float32, factors in another order
    assert a.param_groups[0]["fused"]


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
def test_the_average_follows_weights_and_counts(share: float | torch.Tensor):
    model, mean = nn.BatchNorm1d(3), nn.BatchNorm1d(3)
    nn.init.constant_(model.weight, 3.0)
    model.num_batches_tracked.fill_(7)
    update_average(mean, model, share)
    assert mean.weight.tolist() == [2.0] * 3
    assert int(mean.num_batches_tracked) == 7


@pytest.mark.parametrize("on_device", [False, True], ids=["number", "tensor"])
def test_random_draws_are_taken_over_as_they_are(on_device: bool):
    share = torch.tensor(0.5) if on_device else 0.5
    model = nn.Sequential(make_attention("performer", 16, 2, seed=0), make_attention("reformer", 16, 2, seed=1))
    mean = copy.deepcopy(model)
    for layer in model:
        layer.redraw()
        nn.init.constant_(layer.in_proj.weight, 3.0)
    half = torch.lerp(mean[0].in_proj.weight.detach(), torch.tensor(3.0), 0.5)
    update_average(mean, model, share)
    assert torch.equal(mean[0].frequencies, model[0].frequencies)
    assert torch.equal(mean[1].coarse_rotations, model[1].coarse_rotations)
    assert torch.equal(mean[1].fine_rotations, model[1].fine_rotations)
    assert_close(mean[0].in_proj.weight, half, 1e-6)
    model[0].redraw()
    update_average(mean[0], model[0], share)  # a layer that is the whole model
    assert torch.equal(mean[0].frequencies, model[0].frequencies)
