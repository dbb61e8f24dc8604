"""The small kernels beside plain algebra: sums of partial sums, the folded output map, J, the chunks' carries."""

from __future__ import annotations

from itertools import pairwise
from typing import Literal

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from closeness import assert_close
from primal_attention.ops import reference as eq
from primal_attention.ops.kernels import fold, landmarks, landmarks_back, objective, scan, segments, sequences
from primal_attention.ops.kernels.config import running_tiles, stored_rank

SAME = 1e-6  # float32, sums of at most a few hundred terms

pytestmark = pytest.mark.usefixtures("unwritten_memory_is_nan")


@pytest.mark.usefixtures("short_chunks")
def test_segment_sum_adds_the_chunks_of_each_sequence(device: torch.device) -> None:
    seqs = sequences.packed(torch.tensor([0, 0, 70, 270], device=device), 270)
    parts = torch.randn(seqs.chunk_start.shape[0], 3, 100, device=device)
    parts[int(seqs.first_chunk[-1]) :] = float("nan")  # chunks beyond the last one belong to nobody
    bounds = seqs.first_chunk.tolist()
    expected = torch.stack([parts[a:b].sum(0) for a, b in pairwise(bounds)])
    assert_close(segments.segment_sum(parts, seqs), expected, SAME)


def test_one_chunk_for_each_sequence_leaves_nothing_to_add(device: torch.device) -> None:
    parts = torch.randn(3, 5, device=device)
    assert segments.segment_sum(parts, sequences.uniform(3, 9, device)) is parts


@pytest.mark.parametrize(("count", "width"), [(0, 40), (1, 1), (130, 33)])
def test_column_sum_adds_all_chunks(device: torch.device, count: int, width: int) -> None:
    parts = torch.randn(count, width, device=device)
    total = segments.column_sum(parts, torch.float16)
    assert total.dtype == torch.float16
    assert_close(total, parts.double().sum(0), 5e-4)  # one rounding to float16


def test_a_sum_through_a_map_adds_over_heads(device: torch.device) -> None:
    total, weight = torch.randn(200, device=device), torch.randn(200, 3 * 20, device=device).half()
    rounded, sums = segments.sum_through(total, weight, 20)
    assert torch.equal(rounded, total.half())
    assert_close(sums, (total.double() @ weight.double()).view(3, 20).sum(0), 5e-4)  # one rounding to float16


@pytest.mark.parametrize(("batch", "n", "heads", "head_dim", "rank"), [(3, 70, 2, 64, 96), (5, 9, 1, 20, 5)])
@pytest.mark.parametrize("sides", [1, 2])
def test_the_way_back_from_the_weights_of_landmarks(
    device: torch.device, monkeypatch: pytest.MonkeyPatch,
    batch: int, n: int, heads: int, head_dim: int, rank: int, sides: int,
) -> None:  # fmt: skip
    """Every row is a landmark; a program adds up one side of dW, or both."""
    tiles = landmarks_back.landmark_sum_tiles
    monkeypatch.setattr(landmarks_back, "landmark_sum_tiles", lambda *a: tiles(*a)._replace(sides=sides))
    draw = lambda *shape: torch.randn(shape, device=device).half()  # noqa: E731
    x, w_e, w_r = draw(batch * n, heads * head_dim), draw(heads, n, rank), draw(heads, n, rank)
    grad = F.pad(draw(batch, heads, 2, head_dim, rank), (0, stored_rank(rank) - rank))
    rows = torch.arange(batch * n, device=device).view(batch, n)
    both, wide = torch.stack([w_e, w_r]).double(), grad[..., :rank].double()
    expected = torch.einsum("ehns,bheps->bnhp", both, wide).reshape(x.shape)
    added = x.clone()
    landmarks_back.add_to_rows(rows, w_e, w_r, grad, added, distinct=True)
    assert_close(added, expected + x.double(), 3e-4)
    grads = landmarks_back.to_weights(x, rows, w_e, w_r, grad, None)
    by_head = x.double().view(batch, n, heads, head_dim)
    for name, found, true in zip("er", grads, torch.einsum("bnhp,bheps->ehns", by_head, wide), strict=True):
        assert_close(found, true, 3e-4, f"dW_{name}")


@pytest.mark.parametrize(("n", "heads", "head_dim", "rank"), [(70, 2, 64, 96), (9, 1, 20, 5)])
def test_weights_of_landmarks_leave_empty_sequences_and_spare_columns_zero(
    device: torch.device, n: int, heads: int, head_dim: int, rank: int
) -> None:
    batch = 5
    draw = lambda *shape: torch.randn(shape, device=device).half()  # noqa: E731
    x, w_e, w_r = draw(batch * n, heads * head_dim), draw(heads, n, rank), draw(heads, n, rank)
    rows = torch.randint(batch * n, (batch, n), device=device).sort(1).values
    rows[1] = -1  # an empty sequence
    found, trace = landmarks.landmark_weights(x, rows, w_e, w_r, torch.float16)
    picked = x.double().view(-1, heads, head_dim)[rows] * (rows >= 0)[:, :, None, None]
    expected = torch.einsum("bnhp,ehns->bheps", picked, torch.stack([w_e, w_r]).double())
    assert_close(found[..., :rank], expected, 3e-4)
    assert not found[..., rank:].any()
    assert_close(trace, (w_e.double() * w_r.double()).sum((1, 2)), SAME)


def output_maps(device: torch.device, heads: int, head_dim: int, rank: int) -> list[Tensor]:
    """W_out, b_out, W_o, b_o."""
    d = heads * head_dim
    shapes = [(d, d), (d,), (head_dim, 2 * rank), (head_dim,)]
    return [torch.randn(shape, device=device).double() for shape in shapes]


def folded(out_weight: Tensor, out_bias: Tensor, score_weight: Tensor, score_bias: Tensor) -> tuple[Tensor, Tensor]:
    """M and m by plain algebra, in the layout of the stored scores."""
    p, rank = score_weight.shape[0], score_weight.shape[1] // 2
    stored = F.pad(score_weight.view(p, 2, rank), (0, stored_rank(rank) - rank)).flatten(1)  # (p, 2S)
    by_head = out_weight.unflatten(1, (-1, p))  # (d, H, p)
    return (by_head @ stored).flatten(1), out_bias + (by_head @ score_bias).sum(1)


@pytest.mark.parametrize(("heads", "head_dim", "rank"), [(3, 20, 5), (2, 48, 8), (1, 80, 30)])
@pytest.mark.parametrize("biases", [True, False])
def test_the_folded_map_is_the_product_of_both(
    device: torch.device, heads: int, head_dim: int, rank: int, biases: bool
) -> None:
    maps = output_maps(device, heads, head_dim, rank)
    if not biases:
        maps[1].zero_()
        maps[3].zero_()
    product, bias = folded(*maps)
    out_weight, out_bias, score_weight, score_bias = (t.float() for t in maps)
    given = (out_weight, out_bias if biases else None, score_weight, score_bias if biases else None)
    found, found_bias = fold.fold(*given)
    if stored_rank(rank) > rank:
        # The column that meets the scores' ones holds what rounding took from the bias: all but nothing in float32.
        assert (found[:, rank].abs() <= 1e-6 * bias.abs().max()).all()
        found[:, rank] = 0.0
    assert_close(found, product, SAME, "product")
    assert_close(found_bias, bias, SAME, "bias")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.usefixtures("bfloat16_rounds")
def test_the_column_of_ones_carries_what_rounding_takes_from_the_bias(device: torch.device, dtype: torch.dtype) -> None:
    maps = [t.to(dtype) for t in output_maps(device, 2, 16, 5)]
    _, bias = folded(*(t.double() for t in maps))
    product, rounded = fold.fold(*maps)
    # Two 16-bit numbers hold the bias to about the square of eps.
    assert_close(rounded.double() + product[:, 5].double(), bias, torch.finfo(dtype).eps ** 2 * 2)


@pytest.mark.parametrize(("heads", "head_dim", "rank"), [(3, 20, 5), (2, 48, 8)])
def test_the_way_back_through_the_folded_map_is_that_of_both(
    device: torch.device, heads: int, head_dim: int, rank: int
) -> None:
    maps = [t.requires_grad_() for t in output_maps(device, heads, head_dim, rank)]
    product, bias = folded(*maps)
    grad_product, grad_bias = torch.randn_like(product), torch.randn_like(bias)
    expected = torch.autograd.grad([product, bias], maps, [grad_product, grad_bias])
    ones = stored_rank(rank) > rank
    grad_product = grad_product.float()
    if ones:
        grad_product[:, rank] = grad_bias.float()
    weights = [maps[i].detach().float() for i in (0, 2, 3)]
    grad_out, grad_score, grad_out_bias, grad_score_bias = fold.unfold(
        grad_product, None if ones else grad_bias.float(), *weights
    )
    found = (grad_out, grad_out_bias, grad_score, grad_score_bias)
    for name, value, true in zip(("W_out", "b_out", "W_o", "b_o"), found, expected, strict=True):
        assert_close(value, true, SAME, name)


@pytest.mark.parametrize("form", ["mean", "sum"])
@pytest.mark.parametrize("ragged", [True, False])
def test_the_objective_kernel_is_the_equation(device: torch.device, form: Literal["mean", "sum"], ragged: bool) -> None:
    """Columns beyond the rank hold NaN: nobody may read them."""
    batch, heads, rank = 3, 5, 20
    energy = torch.rand(batch, heads, 2, stored_rank(rank), device=device)
    energy[..., rank:] = float("nan")
    root, trace = torch.randn(heads, rank, device=device), torch.randn(heads, device=device)
    tokens = torch.tensor([4, 0, 9], device=device) if ragged else 7
    e, r, wide_root, wide_trace = (
        t.double().requires_grad_() for t in (energy[:, :, 0, :rank], energy[:, :, 1, :rank], root, trace)
    )
    j = eq.objective(e, r, wide_root, wide_trace[None], tokens, form)
    assert_close(objective.objective_forward(energy, root, trace, tokens, form == "sum"), j, SAME, "J")
    grad = torch.randn(batch, device=device)
    expected = torch.autograd.grad(j, [e, r, wide_root, wide_trace], grad.double())
    grad_energy, grad_root, grad_trace = objective.objective_backward(grad, energy, root, tokens, form == "sum")
    found = (grad_energy[:, :, 0, :rank], grad_energy[:, :, 1, :rank], grad_root, grad_trace)
    for name, value, true in zip(("energy of e", "energy of r", "√Λ", "trace"), found, expected, strict=True):
        assert_close(value, true, SAME, name)


@pytest.mark.usefixtures("short_chunks")
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("decayed", [False, True])
def test_carries_run_over_many_groups_of_chunks(device: torch.device, reverse: bool, decayed: bool) -> None:
    """The scan takes 64 chunks at a time: 70 chunks of 64 rows need a second round, whose last chunk is short."""
    heads, p, lengths = 1, 20, [70 * 64 - 5, 0, 3]
    bounds = torch.tensor([0, *lengths]).cumsum(0)
    seqs = sequences.packed(bounds.to(device), int(bounds[-1]))
    rate = torch.full((heads,), -0.01, device=device)  # slow enough for one group to reach into the next
    qk, wx = torch.empty(1, 2 * heads * p, device=device), torch.empty(1, heads, 2, p, 8, device=device)
    plan = scan.Plan(qk, wx, rate if decayed else None, seqs, 5, running_tiles(qk.dtype, p, 5))
    sums = torch.randn(seqs.chunk_start.shape[0], heads, 2, p, device=device)
    found = plan.carries(sums, reverse, None, None)

    count = int(seqs.first_chunk[-1])
    rows = (seqs.chunk_end - seqs.chunk_start)[:count]
    expected = torch.zeros(count, heads, 2, p, dtype=torch.float64, device=device)
    for b, (first, last) in enumerate(pairwise(seqs.first_chunk.tolist())):
        assert last - first == -(-lengths[b] // 64)
        carry = torch.zeros(heads, 2, p, dtype=torch.float64, device=device)
        for chunk in reversed(range(first, last)) if reverse else range(first, last):
            expected[chunk] = carry
            kept = float((rate[0].double() * rows[chunk]).exp()) if decayed else 1.0
            carry = kept * carry + sums[chunk].double()
    assert_close(found[:count], expected, SAME)
