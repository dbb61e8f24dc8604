"""Spectrum measures agree between numpy and torch, over batches, and with the formed matrix."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from primal_attention.ksvd import cumulative_explained_variance, effective_rank, low_rank_singular_values

AS = pytest.mark.parametrize("as_type", [np.asarray, torch.as_tensor], ids=["numpy", "torch"])


@AS
def test_effective_rank_counts_equal_directions(as_type) -> None:
    sigma = as_type(np.array([[1.0, 0, 0, 0], [2.0, 2, 0, 0], [3.0, 3, 3, 3], [0.0, 0, 0, 0]]))
    rank = effective_rank(sigma)
    assert isinstance(rank, type(sigma))
    np.testing.assert_allclose(np.asarray(rank), [1, 2, 4, 0])


@AS
def test_explained_variance_is_sorted_cumulative_and_ends_in_one(as_type) -> None:
    sigma = as_type(np.array([[1.0, 2.0, 1.0], [0.0, 0.0, 0.0]]))
    share = cumulative_explained_variance(sigma)
    assert isinstance(share, type(sigma))
    np.testing.assert_allclose(np.asarray(share), [[4 / 6, 5 / 6, 1], [1, 1, 1]])


@AS
@settings(max_examples=40, deadline=None)
@given(n=st.integers(1, 20), m=st.integers(1, 20), p=st.integers(1, 12), batch=st.sampled_from([(), (3,), (2, 3)]))
def test_low_rank_singular_values_are_those_of_the_product(as_type, n, m, p, batch) -> None:
    rng = np.random.default_rng(n + 100 * m + 10_000 * p)
    A, B = rng.normal(size=(*batch, n, p)), rng.normal(size=(*batch, m, p))
    values = low_rank_singular_values(as_type(A), as_type(B))
    formed = np.linalg.svd(A @ np.swapaxes(B, -1, -2), compute_uv=False)
    assert tuple(values.shape) == (*batch, min(n, m, p))
    np.testing.assert_allclose(np.asarray(values), formed[..., : min(n, m, p)], atol=1e-10 * formed.max())


@AS
def test_low_rank_singular_values_never_form_the_product(as_type) -> None:
    A = as_type(np.random.default_rng(0).normal(size=(200_000, 4)))  # the product would take 320 GB
    expected = np.linalg.eigvalsh(np.asarray(A).T @ np.asarray(A))[::-1]  # A Aᵀ has the eigenvalues of AᵀA
    np.testing.assert_allclose(np.asarray(low_rank_singular_values(A, A)), expected, rtol=1e-10)


def test_bad_spectra() -> None:
    for measure in (effective_rank, cumulative_explained_variance):
        with pytest.raises(ValueError, match=r"singular_values must have at least one entry .*\(shape=\(0,\)\)"):
            measure(np.zeros(0))
        with pytest.raises(ValueError, match=r"singular_values must not be negative \(smallest=-1.0\)"):
            measure(np.array([1.0, -1.0]))
    with pytest.raises(ValueError, match=r"same number of columns \(A \(12, 3\), B \(12, 2\)\)"):
        low_rank_singular_values(np.zeros((12, 3)), np.zeros((12, 2)))
