"""Padded, packed and single sequences agree in outputs, scores, objective and gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from closeness import assert_close
from primal_cases import EMBED, HEADS, MAX_LENGTH, MODES, MODES_AND_DECAYS, gradients, inputs, make, pad

SAME = 1e-11  # float64; the same sums in another order and over other shapes
LAYERS = [(mode, decay, feature_map) for mode, decay in MODES_AND_DECAYS for feature_map in ("cosine", "softmax")]

every_mode = pytest.mark.parametrize("mode", MODES)


def results(layer: Any, inputs: list[Tensor], y: Tensor, scores: Tensor, j: Tensor) -> dict[str, Tensor]:
    """y (total, d), scores (H, total, 2s), J and the gradients of a loss that weights each of them differently."""
    draw = torch.Generator().manual_seed(1)
    weight = torch.randn(y.shape, generator=draw, dtype=y.dtype)
    loss = (y * weight).sum() + (j.square() * torch.arange(1, len(j) + 1)).sum()
    of_inputs = torch.autograd.grad(loss, inputs, retain_graph=True)
    return {"y": y, "scores": scores, "J": j, "x": torch.cat(of_inputs), **gradients(layer, loss)}


def assert_layouts_agree(layer: Any, lengths: list[int], where: str, filler: float, max_seqlen: int | None) -> None:
    sequences = [inputs(n).requires_grad_() for n in lengths]
    singles = [(*layer(x[None], return_scores=True), layer.objective) for x in sequences]
    ys, scores, js = zip(*singles, strict=True)
    both = torch.cat([torch.cat([*s], -1)[0] for s in scores], dim=1)
    expected = results(layer, sequences, torch.cat([y[0] for y in ys]), both, torch.cat(js))

    rows = torch.cat(sequences).detach().requires_grad_()
    bounds = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    y, s = layer(rows, cu_seqlens=bounds, max_seqlen=max_seqlen, return_scores=True)
    packed = results(layer, [rows], y, torch.cat([*s], -1), layer.objective)

    x, mask = pad([one.detach() for one in sequences], where, filler)
    x.requires_grad_()
    y, s = layer(x, mask, return_scores=True)
    both = torch.cat([*s], -1).transpose(1, 2)  # (B, N, H, 2s)
    padded = results(layer, [x], y[~mask], both[~mask].transpose(0, 1), layer.objective)
    for values in (padded["x"][mask], y[mask], both[mask]):
        assert (values == 0).all()
    padded["x"] = padded["x"][~mask]
    for name, value in expected.items():
        assert_close(packed[name], value, SAME, f"packed: {name}")
        assert_close(padded[name], value, SAME, f"padded {where}: {name}")


@pytest.mark.parametrize(("mode", "decay", "feature_map"), LAYERS)
def test_padded_and_packed_equal_single(mode: str, decay: str | None, feature_map: str) -> None:
    layer = make(mode, decay, feature_map=feature_map)
    for lengths, where, filler, max_seqlen in (
        ([7, 1, MAX_LENGTH, 5], "right", torch.nan, None),
        ([2, 9, 6, 3], "left", torch.inf, 24),
        ([13, 1, MAX_LENGTH - 1, 8], "gaps", -1e30, 30),
    ):
        assert_layouts_agree(layer, lengths, where, filler, max_seqlen)


@pytest.mark.parametrize("feature_map", ["cosine", "softmax"])
@every_mode
def test_a_row_of_padding_is_zero_and_leaves_the_others_unchanged(mode: str, feature_map: str) -> None:
    layer, x = make(mode, feature_map=feature_map), inputs(2, 7)
    expected = layer(x[:1])
    expected_j = layer.objective
    x[1] = float("nan")
    x.requires_grad_()
    y, scores = layer(x, torch.tensor([[False] * 7, [True] * 7]), return_scores=True)
    assert_close(y[:1], expected, SAME, "the other row")
    assert (y[1] == 0).all()
    assert (scores.e[1] == 0).all()
    # Without tokens there is no energy: J is the trace term alone.
    trace = (layer.w_e * layer.w_r).sum((-2, -1)).mean()
    assert_close(layer.objective, torch.stack([expected_j[0], -trace]), SAME, "objective")
    loss = y.sum() + layer.objective.square().sum()
    for name, grad in gradients(layer, loss, keep_graph=True).items():
        assert torch.isfinite(grad).all(), name
    assert torch.isfinite(torch.autograd.grad(loss, x)[0]).all()


@every_mode
def test_empty_sequences_and_masks_without_padding_change_nothing(mode: str) -> None:
    layer, x = make(mode), inputs(9)
    full = layer(x, cu_seqlens=torch.tensor([0, 5, 9], dtype=torch.int32))
    bounds = torch.tensor([0, 0, 5, 5, 9, 9], dtype=torch.int32)
    assert_close(layer(x, cu_seqlens=bounds), full, SAME)
    assert layer.objective.shape == (5,)
    assert torch.isfinite(layer.objective).all()
    with torch.inference_mode():
        for _ in range(2):
            assert_close(layer(x, cu_seqlens=bounds.clone()), full, SAME)
    y, scores = layer(inputs(0), cu_seqlens=torch.tensor([0, 0], dtype=torch.int32), return_scores=True)
    assert y.shape == (0, EMBED)
    assert scores.e.shape == (HEADS, 0, 4)
    assert_close(layer(x[None], torch.zeros(1, 9, dtype=torch.bool)), layer(x[None]), SAME)


@pytest.mark.parametrize(("mode", "decay"), MODES_AND_DECAYS)
def test_the_kernel_matrix_of_padded_input_is_that_of_its_tokens(mode: str, decay: str | None) -> None:
    layer, sequences = make(mode, decay), [inputs(n) for n in (5, 8)]
    for where in ("right", "left", "gaps"):
        x, mask = pad(sequences, where, float("nan"))
        kernel = layer.kernel_matrix(x, mask)
        for b, sequence in enumerate(sequences):
            valid = ~mask[b]
            assert_close(kernel[b][:, valid][:, :, valid], layer.kernel_matrix(sequence[None])[0], SAME)
        assert (kernel.masked_select(mask[:, None, :, None] | mask[:, None, None, :]) == 0).all()
