"""Random buffers: the seed determines them, the state dict stores them, training redraws them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from closeness import assert_close
from primal_attention.nn.baselines import make_attention
from primal_attention.nn.baselines.random_buffers import draw_counts, restore_draw_counts
from primal_attention.ops.feature_maps import orthogonal_gaussian

BUFFERS = {"performer": "frequencies", "reformer": "coarse_rotations"}
each_name = pytest.mark.parametrize("name", BUFFERS)


def build(name: str, **settings: Any) -> Any:
    return make_attention(name, 16, 2, **settings)


def drawn(attn: Any, name: str) -> torch.Tensor:
    return getattr(attn, BUFFERS[name])


@each_name
def test_the_seed_determines_the_draws(name: str) -> None:
    torch.manual_seed(1)
    seeded, first, second = build(name, seed=5), build(name), build(name)
    assert torch.equal(drawn(seeded, name), drawn(build(name, seed=5), name))
    assert not torch.equal(drawn(seeded, name), drawn(build(name, seed=6), name))
    assert not torch.equal(drawn(first, name), drawn(second, name))  # layers of one model draw differently
    torch.manual_seed(1)
    build(name, seed=5)
    assert torch.equal(drawn(first, name), drawn(build(name), name))  # without a seed torch's generator decides


@each_name
def test_training_forwards_redraw_at_the_interval(name: str) -> None:
    attn, x = build(name, seed=0, redraw_every=2), torch.randn(1, 80, 16, requires_grad=True)
    start = drawn(attn, name).clone()
    attn.eval()
    for _ in range(3):
        attn(x)
    attn.train()
    outputs = [attn(x), attn(x)]
    assert torch.equal(drawn(attn, name), start)
    outputs.append(attn(x))
    assert not torch.equal(drawn(attn, name), start)
    torch.stack(outputs).sum().backward()  # a redraw between forward and backward is allowed
    assert torch.isfinite(x.grad).all()


def test_without_an_interval_only_redraw_draws() -> None:
    attn, x = build("performer", seed=0, redraw_every=None).train(), torch.randn(1, 4, 16)
    start = attn.frequencies.clone()
    attn(x), attn(x)
    assert torch.equal(attn.frequencies, start)
    attn.redraw()
    assert not torch.equal(attn.frequencies, start)
    with pytest.raises(ValueError, match="redraw_every"):
        build("performer", redraw_every=0)


@each_name
def test_a_restored_model_continues_the_draws(name: str) -> None:
    model, restored = (torch.nn.Sequential(build(name, seed=0, redraw_every=2)) for _ in range(2))
    x, names = torch.randn(1, 4, 16), set(model.state_dict())
    for _ in range(4):
        model(x)
    restored.load_state_dict(model.state_dict())
    restore_draw_counts(restored, draw_counts(model))
    for _ in range(3):
        model(x), restored(x)
        assert torch.equal(drawn(model[0], name), drawn(restored[0], name))
    assert set(model.state_dict()) == names, "counts are not part of the weights"


def test_the_meta_device_draws_nothing() -> None:
    assert build("performer", device="meta").frequencies.is_meta


def test_orthogonal_in_blocks_with_gaussian_lengths() -> None:
    omega = orthogonal_gaussian(torch.Generator().manual_seed(0), 4000, 16)
    block = torch.nn.functional.normalize(omega[:16], dim=-1)
    assert_close(block @ block.T, torch.eye(16), 1e-5)
    # Each row is a Gaussian vector: mean 0, covariance I, within the noise of 4000 rows.
    assert omega.mean(0).abs().max() < 0.1
    assert_close(omega.T @ omega / 4000, torch.eye(16), 0.1)
