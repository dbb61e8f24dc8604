"""Augmentation case by case: what each does to the values, and that padding stays what it was."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn

from closeness import assert_close
from primal_attention.engine.errors import RunError
from primal_attention.engine.timeseries.augment import blend_channels, cut_out, scale_and_shift
from primal_attention.engine.timeseries.classify import AugmentConfig, ClassificationModule
from primal_attention.engine.timeseries.uea import modern_recipe

LENGTHS = torch.tensor([40, 20, 1])


@pytest.fixture
def mask():
    torch.manual_seed(0)
    return torch.arange(40) >= LENGTHS.unsqueeze(1)


def test_factor_and_offset_may_have_deviations_of_their_own():
    x = torch.ones(400, 5, 3)
    only_offset = scale_and_shift(x, 0.0, 0.5) - x
    assert_close(only_offset, only_offset[:, :1].expand_as(x), 0.0)
    assert abs(float(only_offset[:, 0].std()) - 0.5) < 0.05
    assert_close(scale_and_shift(torch.zeros(4, 5, 3), 0.5, 0.0), torch.zeros(4, 5, 3), 0.0)


@pytest.mark.parametrize("channels", [3, 48])
def test_what_is_blended_in_has_the_size_asked_for(channels: int):
    torch.manual_seed(0)
    x = torch.randn(200, 7, channels)
    added = blend_channels(x, 0.3) - x
    assert abs(float(added.std()) - 0.3) < 0.02
    assert_close(blend_channels(torch.zeros(2, 7, channels), 0.3), torch.zeros(2, 7, channels), 0.0)


def test_one_stretch_within_the_series_is_cut_out(mask):
    x = torch.ones(3, 40, 2)
    for _ in range(20):
        cut = cut_out(x, mask, 0.5)[..., 0] == 0
        assert not (cut & mask).any()  # the padding is left to those who mask it
        assert (cut.sum(dim=1) <= 0.5 * LENGTHS + 1).all()
        assert ((cut[:, 1:] & ~cut[:, :-1]).sum(dim=1) + cut[:, 0] <= 1).all()


@pytest.mark.parametrize("name", ["offset", "blend", "cut"])
def test_each_reaches_the_training_and_a_value_out_of_range_is_refused(name: str, mask):
    config = AugmentConfig(**{name: 0.4})
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
    with pytest.raises(RunError, match=f"augment.{name} "):
        dataclasses.replace(config, **{name: -0.1})
