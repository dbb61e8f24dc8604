"""Random features and hashes: the seed's, kept in the state dict, redrawn in training only."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from closeness import assert_close
from primal_attention.nn.baselines import make_attention
from primal_attention.nn.baselines.random_buffers import draw_counts, orthogonal_gaussian, restore_draw_counts

BUFFERS = {"performer": "frequencies", "reformer": "coarse_rotations", "yoso": "planes"}
each = pytest.mark.parametrize("name", BUFFERS)


def build(name: str, **settings: Any) -> Any:
    extra = {"yoso": {"estimator": "sampled", "hashes": 2}}.get(name, {})
    return make_attention(name, 16, 2, **extra, **settings)


def drawn(attn: Any, name: str) -> torch.Tensor:
    return getattr(attn, BUFFERS[name])


@each
def test_seed_alone_decides(name: str) -> None:
    torch.manual_seed(1)
    first = build(name, seed=5)
    torch.manual_seed(2)
    assert torch.equal(drawn(first, name), drawn(build(name, seed=5), name))
    assert not torch.equal(drawn(first, name), drawn(build(name, seed=6), name))


@each
def test_global_seed_decides_without_one(name: str) -> None:
    torch.manual_seed(1)
    first = build(name)
    second = build(name)  # layers of one model do not share their draws
    torch.manual_seed(1)
    assert torch.equal(drawn(first, name), drawn(build(name), name))
    assert not torch.equal(drawn(first, name), drawn(second, name))


@each
def test_redraw_every_counts_training_forwards(name: str) -> None:
    attn, x = build(name, seed=0, redraw_every=2), torch.randn(1, 4, 16)
    start = drawn(attn, name).clone()
    attn.eval()
    for _ in range(5):
        attn(x)
    assert torch.equal(drawn(attn, name), start)
    attn.train()
    attn(x), attn(x)
    assert torch.equal(drawn(attn, name), start)
    attn(x)
    assert not torch.equal(drawn(attn, name), start)


@each
def test_redrawing_between_forward_and_backward_does_no_harm(name: str) -> None:
    attn = build(name, seed=0, redraw_every=1)
    x = torch.randn(1, 80, 16, requires_grad=True)
    (attn(x).sum() + attn(x).sum()).backward()
    assert x.grad is not None


@each
def test_redraw_can_be_turned_off_and_called(name: str) -> None:
    attn, x = build(name, seed=0, redraw_every=None).train(), torch.randn(1, 4, 16)
    start = drawn(attn, name).clone()
    attn(x), attn(x), attn(x)
    assert torch.equal(drawn(attn, name), start)
    attn.redraw()
    assert not torch.equal(drawn(attn, name), start)


@each
def test_a_copy_goes_on_with_the_same_draws(name: str) -> None:
    model, again = (torch.nn.Sequential(build(name, seed=0, redraw_every=2)) for _ in range(2))
    x = torch.randn(1, 4, 16)
    names = set(model.state_dict())
    for _ in range(4):
        model(x)
    again.load_state_dict(model.state_dict())
    restore_draw_counts(again, draw_counts(model))
    for _ in range(3):
        model(x), again(x)
        assert torch.equal(drawn(model[0], name), drawn(again[0], name))
    assert set(model.state_dict()) == names, "files of weights have no counts"


@each
def test_bad_interval_is_named(name: str) -> None:
    with pytest.raises(ValueError, match="redraw_every"):
        build(name, redraw_every=0)


def test_meta_device_draws_nothing() -> None:
    assert build("performer", device="meta").frequencies.is_meta


def test_orthogonal_in_blocks_with_gaussian_lengths() -> None:
    omega = orthogonal_gaussian(torch.Generator().manual_seed(0), 4000, 16)
    block = torch.nn.functional.normalize(omega[:16], dim=-1)
    assert_close(block @ block.T, torch.eye(16), 1e-5)
    # Marginally each row is a Gaussian vector: mean 0, covariance I, within the noise of 4000 rows.
    assert omega.mean(0).abs().max() < 0.1
    assert_close(omega.T @ omega / 4000, torch.eye(16), 0.1)
