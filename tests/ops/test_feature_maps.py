"""φ: the cosine map, and the positive random features whose inner product estimates the softmax kernel."""

from __future__ import annotations

import pytest
import torch

from closeness import assert_close
from primal_attention.ops.feature_maps import cosine, normalise_features, positive_random


def test_cosine_has_unit_length_and_ignores_scale() -> None:
    z = torch.randn(4, 7, dtype=torch.float64)
    assert_close(cosine(z).norm(dim=-1), torch.ones(4, dtype=torch.float64), 1e-15)
    assert_close(cosine(1e3 * z), cosine(z), 1e-15)


def test_cosine_of_zero_is_zero_with_a_finite_gradient() -> None:
    z = torch.zeros(2, 3, requires_grad=True)
    phi = cosine(z)
    assert (phi == 0).all()
    (grad,) = torch.autograd.grad(phi.sum(), z)
    assert torch.isfinite(grad).all()


@pytest.mark.parametrize("scale", [1e4, 1e-4])
def test_cosine_in_half_precision_neither_overflows_nor_vanishes(scale: float) -> None:
    z = (scale * torch.randn(5, 64)).half()
    # Half keeps 11 bits; the squares inside would leave its range.
    assert_close(cosine(z).float(), cosine(z.double()), 1e-3)


def test_random_features_estimate_the_softmax_kernel_without_bias() -> None:
    p, draws = 4, 100_000
    q, k = 0.8 * torch.randn(2, 1, 3, p, dtype=torch.float64)
    frequencies = torch.randn(draws, p, p, dtype=torch.float64)
    # One head per draw of the frequencies: (1, draws, 3, p).
    phi_q, phi_k = (positive_random(z[:, None].expand(1, draws, 3, p), frequencies)[0] for z in (q, k))
    estimates = phi_q @ phi_k.mT  # (draws, 3, 3)
    exact = (q[0] @ k[0].T / p**0.5).exp()
    deviation = (estimates.mean(0) - exact).abs() / (estimates.std(0) / draws**0.5)
    assert deviation.max() < 5.0, "the mean is more than five standard errors away"


def test_normalisation_divides_both_maps_by_the_root_of_the_row_sums() -> None:
    phi_q, phi_k = positive_random(torch.randn(2, 1, 2, 6, 4, dtype=torch.float64), torch.randn(2, 4, 4).double())
    assert (phi_q > 0).all()
    scaled_q, scaled_k = normalise_features(phi_q, phi_k, phi_k.sum(2, keepdim=True))
    row_sums = (phi_q @ phi_k.mT).sum(-1, keepdim=True)  # D̂
    assert_close(scaled_q, phi_q / row_sums.sqrt(), 1e-14)
    assert_close(scaled_k, phi_k / row_sums.sqrt(), 1e-14)
