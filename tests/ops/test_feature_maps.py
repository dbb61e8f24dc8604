"""φ: the cosine map, and the positive random features whose inner product estimates the softmax kernel."""

from __future__ import annotations

import pytest
import torch

from closeness import assert_close
from primal_attention.ops.feature_maps import cosine, positive_random


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
