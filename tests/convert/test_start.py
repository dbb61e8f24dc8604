"""The closed-form start of a distillation: exact where Primal-Attention can be exact, never worse than a constant."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import Tensor, nn

from closeness import assert_close
from convert.test_torch_and_timm import Block, encoder
from primal_attention import distill, primalize
from primal_attention.convert.distill import matched
from primal_attention.convert.start import Moments, best_ridge, start


def test_a_regression_finds_the_maps_and_the_constants() -> None:
    torch.manual_seed(0)
    z, maps, constants = torch.randn(500, 2, 5), torch.randn(2, 5, 3), torch.randn(2, 3)
    o = torch.einsum("thf,hfp->thp", z, maps) + constants
    fit = Moments.of(z, o).solve(torch.full((2,), 1e-9, dtype=torch.float64))
    assert_close(fit[:, :-1].float(), maps, 1e-5, "maps")
    assert_close(fit[:, -1].float(), constants, 1e-5, "constants")


def test_noise_gets_a_large_ridge_and_signal_a_small_one() -> None:
    torch.manual_seed(0)
    z, maps = torch.randn(2, 60, 2, 40), torch.randn(40, 3)
    signal, noise = z[:, :, :1] @ maps, torch.randn(2, 60, 1, 3)
    o = torch.cat([signal, noise], dim=2)
    ridge = best_ridge((Moments.of(z[0], o[0]), Moments.of(z[1], o[1])))
    assert float(ridge[0]) <= 1e-2
    assert float(ridge[1]) >= 10


class FromPrimal(Block):
    """A block whose heads are those of a Primal layer: what the start must find again exactly."""

    def __init__(self, primal: nn.Module) -> None:
        super().__init__()
        attention = self.attn
        attention.forward = lambda x, **_: attention.proj(_heads(primal, x))  # type: ignore[method-assign]


def _heads(primal, x: Tensor) -> Tensor:
    _, scores = primal(x, return_scores=True)
    return primal.score_proj(torch.cat(scores, -1)).transpose(1, 2).flatten(2)


@pytest.mark.parametrize("rank", [3, 8, 12])
def test_a_primal_layer_is_found_again(rank: int) -> None:
    """Of head width 8; a layer of rank 3 is found by one of rank 3 and by larger ones."""
    torch.manual_seed(0)
    probe = primalize(nn.Sequential(Block()), copy=True, rank=3, landmarks=6).model
    hidden = next(m for m in probe.modules() if hasattr(m, "w_e")).double().eval()
    teacher = nn.Sequential(FromPrimal(hidden)).double().eval()
    attention = teacher[0].attn
    with torch.no_grad():
        attention.qkv.weight[:64].copy_(hidden.qk_proj.weight)
        attention.qkv.bias[:64].copy_(hidden.qk_proj.bias)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # larger ranks than can be independent are part of the test
        student = primalize(teacher, copy=True, rank=rank, landmarks=6).model.eval()
    data = [torch.randn(64, 9, 32, dtype=torch.float64) for _ in range(4)]
    assert start(teacher, matched(student, teacher), data)
    # The smallest ridge leaves a thousandth of the weakest direction.
    assert_close(student(data[0]), teacher(data[0]), 1e-2, "output")


def test_distill_starts_with_it_and_says_where() -> None:
    teacher = nn.Sequential(Block(), Block())
    data = [torch.randn(8, 9, 32) for _ in range(4)]
    student = primalize(teacher, "all", copy=True, rank=5, landmarks=6).model
    result = distill(student, teacher, data, block_steps=1, end_steps=0, progress=False)
    assert result.started == ["0.attn", "1.attn"]
    other = primalize(teacher, "all", copy=True, rank=5, landmarks=6).model
    plain = distill(other, teacher, data, start_batches=0, block_steps=1, end_steps=0, progress=False)
    assert plain.started == []
    assert result.block_errors[0] < plain.block_errors[0]


def test_heads_that_cannot_be_read_are_left_as_they_are() -> None:
    teacher = encoder(2)  # torch's attention never calls its output map
    student = primalize(teacher, copy=True, rank=5, landmarks=6).model
    before = {name: p.clone() for name, p in student.named_parameters()}
    assert start(teacher, matched(student, teacher), [torch.randn(4, 9, 32)] * 2) == []
    assert all(torch.equal(p, before[name]) for name, p in student.named_parameters())


@pytest.mark.parametrize("kind", ["bert", "gpt2", "vit"])
def test_transformers_heads_are_read(kind: str) -> None:
    pytest.importorskip("transformers", minversion="5")
    from convert.hf_models import inputs, make

    teacher = make(kind).eval()
    student = primalize(teacher, "all", copy=True, rank=5, landmarks=6).model
    pairs = matched(student, teacher)
    assert start(teacher, pairs, [inputs(kind) for _ in range(4)]) == list(pairs)
    assert all(torch.isfinite(p).all() for p in student.parameters())
