"""The small parts: batches, schedules, averaged weights."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from closeness import assert_close
from primal_attention.nn.baselines import make_attention
from primal_attention.train.batches import Batches, derive_seed, set_seed
from primal_attention.train.optimizer import one_cycle, update_average


def test_the_order_depends_on_seed_and_epoch_alone():
    batches = Batches([torch.arange(10)], 4, shuffle_seed=3)
    first = torch.cat([b[0] for b in batches])
    assert torch.equal(torch.cat([b[0] for b in batches]), first)
    batches.set_epoch(1)
    assert not torch.equal(torch.cat([b[0] for b in batches]), first)
    batches.set_epoch(0)
    assert torch.equal(torch.cat([b[0] for b in batches]), first)
    assert sorted(first.tolist()) == list(range(10))
    assert len(batches) == 3


def test_ranks_share_every_batch_between_them():
    shares = []
    for rank in range(2):
        batches = Batches([torch.arange(11)], 4, shuffle_seed=0)
        batches.share(rank, 2)
        shares.append([b[0].tolist() for b in batches])
    assert all(a for a in shares[0] + shares[1])
    assert sorted({x for share in shares for batch in share for x in batch}) == list(range(11))
    assert len(shares[0]) == len(shares[1]) == 3


def test_neighbouring_seeds_give_unrelated_streams():
    assert len({derive_seed("epoch", s, e) for s in range(20) for e in range(20)}) == 400


def test_a_seed_starts_the_numbers_that_torch_starts():
    torch.manual_seed(5)
    numbers = torch.randn(3)
    set_seed(5, torch.device("cpu"))
    assert torch.equal(torch.randn(3), numbers)


def test_one_cycle_goes_up_to_one_and_down_to_zero():
    factors = [one_cycle(step, 30, 100) for step in range(101)]
    assert max(factors) == factors[30] == 1.0
    assert factors[0] == pytest.approx(1 / 25)
    assert factors[100] == pytest.approx(0.0)


def test_the_average_follows_weights_and_counts():
    model, mean = nn.BatchNorm1d(3), nn.BatchNorm1d(3)
    nn.init.constant_(model.weight, 3.0)
    model.num_batches_tracked.fill_(7)
    update_average(mean, model, 0.5)
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
