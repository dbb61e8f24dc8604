"""The comparison of the tests: RMS(error) / RMS(reference) below a named ratio. NaN never passes."""

import torch


def rms_ratio(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Root-mean-square error relative to the reference's root-mean-square, in float64."""
    assert actual.shape == expected.shape, f"shape {tuple(actual.shape)} instead of {tuple(expected.shape)}"
    actual, expected = actual.detach().double().cpu(), expected.detach().double().cpu()
    if expected.numel() == 0:
        return 0.0
    error = (actual - expected).square().mean().sqrt()
    scale = expected.square().mean().sqrt()
    return float(error / scale) if scale > 0 else float(error)


def assert_close(actual: torch.Tensor, expected: torch.Tensor, ratio: float, what: str = "result") -> None:
    """Fail unless `actual` is finite and within `ratio` of `expected`."""
    assert torch.isfinite(actual).all(), f"{what} has values that are not finite"
    error = rms_ratio(actual, expected)
    assert error <= ratio, f"{what}: RMS error ratio {error:.2e} is above {ratio:.0e}"
