"""Augmentation case by case: what each does to the values, and that padding stays what it was."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn

from primal_attention.engine.errors import RunError
from primal_attention.engine.timeseries.augment import cut_out
from primal_attention.engine.timeseries.classify import AugmentConfig, ClassificationModule
from primal_attention.engine.timeseries.uea import modern_recipe

LENGTHS = torch.tensor([40, 20, 1])


@pytest.fixture
def mask():
    torch.manual_seed(0)
    return torch.arange(40) >= LENGTHS.unsqueeze(1)


def test_one_stretch_within_the_series_is_cut_out(mask):
    x = torch.ones(3, 40, 2)
    for _ in range(20):
        cut = cut_out(x, mask, 0.5)[..., 0] == 0
        assert not (cut & mask).any()  # the padding is left to those who mask it
        assert (cut.sum(dim=1) <= 0.5 * LENGTHS + 1).all()
        assert ((cut[:, 1:] & ~cut[:, :-1]).sum(dim=1) + cut[:, 0] <= 1).all()


def test_it_reaches_the_training_and_a_value_out_of_range_is_refused(mask):
    config = AugmentConfig(cut=0.4)
    seen = []

    class Model(nn.Module):
        def forward(self, x, key_padding_mask=None):
            seen.append(x)
            return x[:, 0]

    x, y = torch.randn(3, 40, 2), torch.tensor([0, 1, 0])
    module = ClassificationModule(Model(), modern_recipe("Toy"), config)
    for _ in range(10):
        module.task_loss((x, mask, y))
    assert not all(torch.equal(s, x) for s in seen)
    with pytest.raises(RunError, match=r"augment\.cut must lie in \[0, 1\)"):
        dataclasses.replace(config, cut=-0.1)
