"""Padded = packed = one at a time: outputs, scores, objective and gradients, whatever stands in the padding."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from closeness import assert_close
from primal_cases import EMBED, HEADS, MAX_LENGTH, MODES, MODES_AND_DECAYS, gradients, inputs, make

# float64; the same sums in another order and over other shapes.
SAME = 1e-11

CASES = [(mode, decay, feature_map) for mode, decay in MODES_AND_DECAYS for feature_map in ("cosine", "softmax")]
lengths_of_a_batch = st.lists(st.integers(1, MAX_LENGTH), min_size=1, max_size=4)


def pad(sequences: list[Tensor], where: str, filler: float) -> tuple[Tensor, Tensor]:
    """Sequences of tokens as one (B, N, d) batch and its mask, with the padding at the named place."""
    width = max(map(len, sequences)) + 2
    x = torch.full((len(sequences), width, EMBED), filler, dtype=sequences[0].dtype)
    mask = torch.ones(len(sequences), width, dtype=torch.bool)
    for b, sequence in enumerate(sequences):
        spare = width - len(sequence)
        if where == "right":
            places = torch.arange(len(sequence))
        elif where == "left":
            places = torch.arange(spare, width)
        else:
            places = torch.randperm(width)[: len(sequence)].sort().values
        x[b, places] = sequence
        mask[b, places] = False
    return x, mask


def one_at_a_time(layer: Any, sequences: list[Tensor]) -> tuple[list[Tensor], list[Tensor], Tensor]:
    results = [(*layer(x[None], return_scores=True), layer.objective) for x in sequences]
    ys, scores, js = zip(*results, strict=True)
    return [y[0] for y in ys], [torch.cat([*s], -1)[0] for s in scores], torch.cat(js)


def total(ys: list[Tensor], j: Tensor) -> Tensor:
    """One number that weighs every output and every J differently."""
    weights = torch.Generator().manual_seed(1)
    flat = torch.cat(ys)
    outputs = (flat * torch.randn(flat.shape, generator=weights, dtype=flat.dtype)).sum()
    return outputs + (j.square() * torch.arange(1, len(j) + 1)).sum()


@pytest.mark.parametrize("where", ["right", "left", "hole"])
@pytest.mark.parametrize(("mode", "decay", "feature_map"), CASES)
@settings(max_examples=6, deadline=None)
@given(lengths=lengths_of_a_batch, filler=st.sampled_from([0.0, float("nan"), float("inf"), -1e30]), data=st.data())
def test_padded_equals_one_at_a_time(
    mode: str, decay: str | None, feature_map: str, where: str, lengths: list[int], filler: float, data: st.DataObject
) -> None:
    torch.manual_seed(data.draw(st.integers(0, 2**16)))
    layer = make(mode, decay, feature_map=feature_map)
    sequences = [inputs(n).requires_grad_() for n in lengths]
    ys, scores, j = one_at_a_time(layer, sequences)
    loss = total(ys, j)
    expected = gradients(layer, loss, keep_graph=True)
    expected_x = torch.autograd.grad(loss, sequences)

    x, mask = pad([s.detach() for s in sequences], where, filler)
    x.requires_grad_()
    y, s = layer(x, mask, return_scores=True)
    padded_ys = [row[~m] for row, m in zip(y, mask, strict=True)]
    padded_j = layer.objective
    loss = total(padded_ys, padded_j)
    assert_close(torch.cat(padded_ys), torch.cat(ys), SAME, "y")
    assert_close(padded_j, j, SAME, "objective")
    both = torch.cat([*s], -1).transpose(1, 2)
    for b in range(len(sequences)):
        assert_close(both[b][~mask[b]].transpose(0, 1), scores[b], SAME, "scores")
    for name, grad in gradients(layer, loss, keep_graph=True).items():
        assert_close(grad, expected[name], SAME, name)
    (grad_x,) = torch.autograd.grad(loss, x)
    assert_close(grad_x[~mask], torch.cat(expected_x), SAME, "gradient of x")
    assert (grad_x[mask] == 0).all()
    assert (y[mask] == 0).all()
    assert (both[mask] == 0).all()


@pytest.mark.parametrize(("mode", "decay", "feature_map"), CASES)
@settings(max_examples=8, deadline=None)
@given(lengths=lengths_of_a_batch, tell_longest=st.booleans(), data=st.data())
def test_packed_equals_one_at_a_time(
    mode: str, decay: str | None, feature_map: str, lengths: list[int], tell_longest: bool, data: st.DataObject
) -> None:
    torch.manual_seed(data.draw(st.integers(0, 2**16)))
    layer = make(mode, decay, feature_map=feature_map)
    sequences = [inputs(n).requires_grad_() for n in lengths]
    ys, scores, j = one_at_a_time(layer, sequences)
    loss = total(ys, j)
    expected, expected_x = gradients(layer, loss, keep_graph=True), torch.autograd.grad(loss, sequences)

    x = torch.cat(sequences).detach().requires_grad_()
    y, s = layer(
        x,
        cu_seqlens=boundaries(lengths),
        max_seqlen=max(lengths) if tell_longest else None,
        return_scores=True,
    )
    assert_close(y, torch.cat(ys), SAME, "y")
    assert_close(layer.objective, j, SAME, "objective")
    assert_close(torch.cat([*s], -1), torch.cat(scores, dim=1), SAME, "scores")
    loss = total([y], layer.objective)
    for name, grad in gradients(layer, loss, keep_graph=True).items():
        assert_close(grad, expected[name], SAME, name)
    assert_close(torch.autograd.grad(loss, x)[0], torch.cat(expected_x), SAME, "gradient of x")


def boundaries(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)


@pytest.mark.parametrize("feature_map", ["cosine", "softmax"])
@pytest.mark.parametrize("mode", MODES)
def test_a_fully_padded_row_is_zero_and_disturbs_nobody(mode: str, feature_map: str) -> None:
    layer = make(mode, feature_map=feature_map)
    x = inputs(2, 7)
    alone = layer(x[:1])
    alone_j = layer.objective
    x[1] = float("nan")
    x.requires_grad_()
    mask = torch.tensor([[False] * 7, [True] * 7])
    y, scores = layer(x, mask, return_scores=True)
    assert_close(y[:1], alone, SAME, "the other row")
    assert (y[1] == 0).all()
    assert (scores.e[1] == 0).all()
    # No tokens, no energy: only the trace is left of J.
    trace = (layer.w_e * layer.w_r).sum((-2, -1)).mean()
    assert_close(layer.objective, torch.stack([alone_j[0], -trace]), SAME, "objective")
    loss = y.sum() + layer.objective.square().sum()
    for name, grad in gradients(layer, loss, keep_graph=True).items():
        assert torch.isfinite(grad).all(), name
    assert torch.isfinite(torch.autograd.grad(loss, x)[0]).all()


@pytest.mark.parametrize("mode", MODES)
def test_an_empty_packed_sequence_gives_no_rows_and_disturbs_nobody(mode: str) -> None:
    layer = make(mode)
    x = inputs(9)
    full = layer(x, cu_seqlens=torch.tensor([0, 5, 9], dtype=torch.int32))
    with_empty = layer(x, cu_seqlens=torch.tensor([0, 0, 5, 5, 9, 9], dtype=torch.int32))
    assert_close(with_empty, full, SAME)
    assert layer.objective.shape == (5,)
    assert torch.isfinite(layer.objective).all()


@pytest.mark.parametrize("mode", MODES)
def test_packed_input_without_tokens_is_allowed(mode: str) -> None:
    layer = make(mode)
    y, scores = layer(inputs(0), cu_seqlens=torch.tensor([0, 0], dtype=torch.int32), return_scores=True)
    assert y.shape == (0, EMBED)
    assert scores.e.shape == (HEADS, 0, 4)


@pytest.mark.parametrize("mode", MODES)
def test_a_mask_without_padding_changes_nothing(mode: str) -> None:
    layer = make(mode)
    x = inputs(2, 9)
    assert_close(layer(x, torch.zeros(2, 9, dtype=torch.bool)), layer(x), SAME)


@pytest.mark.parametrize("where", ["right", "left", "hole"])
@pytest.mark.parametrize(("mode", "decay"), MODES_AND_DECAYS)
def test_the_kernel_matrix_of_padded_input_is_that_of_its_tokens(mode: str, decay: str | None, where: str) -> None:
    layer = make(mode, decay)
    sequences = [inputs(n) for n in (5, 8)]
    x, mask = pad(sequences, where, float("nan"))
    kernel = layer.kernel_matrix(x, mask)
    for b, sequence in enumerate(sequences):
        tokens = ~mask[b]
        assert_close(kernel[b][:, tokens][:, :, tokens], layer.kernel_matrix(sequence[None])[0], SAME)
    assert (kernel.masked_select(mask[:, None, :, None] | mask[:, None, None, :]) == 0).all()
