"""Differences beside the values: what they are, what vanishes in them, and that padding never shows."""

from __future__ import annotations

import torch

from closeness import assert_close
from primal_attention.models.uea import ConvStem, Differences


def settled(channels: int) -> Differences:
    """Normalised by mean 0 and variance 1, so that the steps can be read as they are."""
    module = Differences(channels).double().eval()
    module.norm.eps = 0.0
    return module


def test_differences_stand_beside_the_values_and_start_at_zero():
    x = torch.tensor([[[1.0], [4.0], [2.0]]], dtype=torch.float64)
    assert settled(1)(x).tolist() == [[[1.0, 0.0], [4.0, 3.0], [2.0, -2.0]]]


def test_a_step_from_or_into_padding_is_none():
    x = torch.tensor([[[7.0], [1.0], [4.0], [9.0], [5.0]]], dtype=torch.float64)
    mask = torch.tensor([[True, False, False, True, False]])
    assert settled(1)(x, mask)[0, :, 1].tolist() == [0.0, 0.0, 3.0, 0.0, 0.0]


def test_an_offset_vanishes_in_the_differences():
    x = torch.randn(2, 9, 3, dtype=torch.float64)
    module = Differences(3).double().train()
    assert_close(module(x)[..., 3:], module(x + torch.randn(2, 1, 3).double())[..., 3:], 1e-12)


def test_in_training_they_are_standardised_over_the_valid_steps():
    x = torch.randn(4, 40, 3, dtype=torch.float64) * 0.01
    mask = torch.arange(40) >= torch.tensor([40, 30, 20, 10]).unsqueeze(1)
    steps = Differences(3).double().train()(x, mask)[..., 3:][~mask]
    assert_close(steps.mean(dim=0), torch.zeros(3).double(), 1e-9)
    assert ((steps.var(dim=0, unbiased=False) - 1).abs() < 0.1).all()  # eps beside a variance of about 2e-4


def test_the_stem_with_differences_sees_no_padding():
    x = torch.randn(2, 12, 3, dtype=torch.float64)
    mask = torch.arange(12) >= torch.tensor([12, 7]).unsqueeze(1)
    stem = ConvStem(3, 8, 5, differences=True).double().eval()
    found = stem(x.masked_fill(mask.unsqueeze(-1), 0.0), mask)
    assert_close(found[1, :7], stem(x[1:, :7])[0], 1e-12)
