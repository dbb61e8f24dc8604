"""Epochs counted in steps, and straight-line schedules."""

from __future__ import annotations

import pytest
import torch

from primal_attention.train.batches import Batches
from primal_attention.train.config import OptimConfig, TrainerConfig
from primal_attention.train.optimizer import linear, one_cycle
from primal_attention.utils.errors import RunError


def epochs(batches: Batches, count: int) -> list[list[int]]:
    found = []
    for epoch in range(count):
        batches.set_epoch(epoch)
        found += [rows.tolist() for (rows,) in batches]
    return found


def test_an_epoch_of_steps_goes_on_where_the_last_one_ended():
    short = Batches([torch.arange(10)], 3, shuffle_seed=0, steps=2)
    long = Batches([torch.arange(10)], 3, shuffle_seed=0, steps=6)
    assert len(short) == 2
    assert epochs(short, 3) == epochs(long, 1)


def test_every_case_comes_once_per_pass_and_batches_are_whole():
    batches = epochs(Batches([torch.arange(12)], 4, shuffle_seed=1, steps=3), 2)
    assert all(len(batch) == 4 for batch in batches)
    for turn in (batches[:3], batches[3:]):
        assert sorted(case for batch in turn for case in batch) == list(range(12))
    assert batches[:3] != batches[3:]


def test_without_steps_an_epoch_is_one_pass_with_its_rest():
    batches = epochs(Batches([torch.arange(10)], 4, shuffle_seed=1), 1)
    assert [len(batch) for batch in batches] == [4, 4, 2]


def test_a_batch_larger_than_the_set_takes_the_set():
    assert [len(b) for b in epochs(Batches([torch.arange(5)], 8, shuffle_seed=0, steps=3), 1)] == [5, 5, 5]


def test_straight_lines_are_torchs_linear_one_cycle():
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.AdamW([weight], lr=1.0)
    theirs = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, 1.0, total_steps=101, pct_start=20 / 100, anneal_strategy="linear", final_div_factor=1e9
    )
    for step in range(100):
        # Theirs reaches the top one step earlier: the two differ by what a step changes.
        expected = theirs.get_last_lr()[0]
        assert one_cycle(step, 20, 100, linear) == pytest.approx(expected, abs=0.06)
        optimizer.step()
        theirs.step()
    assert one_cycle(20, 20, 100, linear) == 1.0
    assert one_cycle(60, 20, 100, linear) == pytest.approx(0.5)
    assert one_cycle(100, 20, 100, linear) == 0.0


@pytest.mark.parametrize(
    ("make", "complaint"),
    [
        (lambda: OptimConfig(eps=0.0), "optim.eps must be positive"),
        (lambda: TrainerConfig(steps_per_epoch=-1), "trainer.steps-per-epoch must not be negative"),
    ],
)
def test_values_out_of_range_are_refused(make, complaint):
    with pytest.raises(RunError, match=complaint):
        make()
