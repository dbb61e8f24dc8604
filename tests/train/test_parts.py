"""Augmentation of padded series."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from closeness import assert_close
from primal_attention.train.uea import (
    AugmentConfig,
    ClassificationModule,
    jitter,
    mix,
    modern_recipe,
    scale_and_shift,
    warp_time,
)


@pytest.fixture
def padded():
    lengths = torch.tensor([9, 5, 1])
    mask = torch.arange(9) >= lengths.unsqueeze(1)
    x = torch.randn(3, 9, 2).masked_fill(mask.unsqueeze(-1), 0.0)
    return x, mask


def test_a_warp_stays_inside_the_series_and_zero_strength_without_crop_is_the_identity(padded):
    x, mask = padded
    assert_close(warp_time(x, mask, 0.0, crop=0.0), x, 1e-5)
    warped = warp_time(x, mask, 0.5)
    assert (warped[mask] == 0).all()
    for i in range(3):
        valid = x[i, ~mask[i]]
        inside = warped[i, ~mask[i]]
        assert (inside <= valid.max(dim=0).values + 1e-5).all()
        assert (inside >= valid.min(dim=0).values - 1e-5).all()


def test_a_warp_never_turns_time_back(padded):
    _, mask = padded
    ramp = torch.arange(9.0).view(1, 9, 1).expand(3, 9, 1)
    warped = warp_time(ramp, mask, 0.8)
    for i in range(3):
        assert (warped[i, ~mask[i], 0].diff() >= 0).all()


def test_scale_and_jitter_change_values_by_about_their_deviation():
    x = torch.ones(200, 50, 3)
    assert abs(float(jitter(x, 0.1).std()) - 0.1) < 0.01
    scaled = scale_and_shift(x, 0.1)
    assert torch.equal(scaled[:, 0], scaled[:, 1])
    assert abs(float(scaled.std()) - 0.1 * 2**0.5) < 0.03


def test_mixup_keeps_steps_that_either_case_has(padded):
    x, mask = padded
    mixed, mixed_mask, partner, share = mix(x, mask, 0.2)
    assert torch.equal(mixed_mask, mask & mask[partner])
    expected = share.view(-1, 1, 1) * x + (1 - share.view(-1, 1, 1)) * x[partner]
    assert_close(mixed, expected, 1e-6)


@pytest.mark.parametrize(("padded", "unequal", "warp"), [(True, True, 0.2), (True, False, 0.0), (False, False, 0.2)])
def test_series_of_unequal_length_may_be_left_as_they_are(padded: bool, unequal: bool, warp: float):
    augment = AugmentConfig(warp=0.2, scale=0.1, jitter=0.1, mixup=0.3, unequal=unequal)
    found = ClassificationModule(nn.Linear(1, 1), modern_recipe("Toy"), augment, padded=padded).augment
    assert (found.warp, found.mixup) == (warp, 0.3)
