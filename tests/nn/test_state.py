"""Saved, forked, batched and split states continue as an unbroken stream does."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from primal_attention import PrimalAttention
from primal_attention.models.lm import LanguageConfig, LanguageModel
from primal_attention.nn.delta import DeltaPrimalAttention
from primal_attention.nn.state import batch_states, fork_state, load_state, save_state, split_state
from primal_attention.utils.errors import FileError

EXACT = {"rtol": 0.0, "atol": 1e-12}  # float64
CAUSAL = {"rank": 3, "causal": True}
LAYERS = {
    "mean": lambda: PrimalAttention(8, 2, data_dependent=False, **CAUSAL),
    "decay": lambda: PrimalAttention(8, 2, data_dependent=False, decay="learned", **CAUSAL),
    "softmax map": lambda: PrimalAttention(8, 2, data_dependent=False, feature_map="softmax", **CAUSAL),
    "landmarks": lambda: PrimalAttention(8, 2, landmarks=5, max_length=20, **CAUSAL),
    "delta": lambda: DeltaPrimalAttention(8, 2, rank=3, conv=3),
    "delta without convolution": lambda: DeltaPrimalAttention(8, 2, rank=3, conv=0),
}
SIZES = {"embed_dim": 8, "num_heads": 2, "layers": 2, "ffn_dim": 8, "rank": 3, "landmarks": 5, "max_length": 20}
MODELS = {
    "lm mean": {"primal_mode": "mean"},
    "lm landmarks": {"primal_mode": "landmarks", "conv": 3},
    "lm decay": {"primal_mode": "decay", "conv": 3, "gate": True, "positions": "sinusoidal"},
    "lm delta": {"primal_mode": "delta", "conv": 3, "gate": True},
    "lm hybrid": {"attention": ("primal", "softmax"), "primal_mode": "delta"},
    "lm softmax": {"attention": ("softmax",)},
    "lm performer": {"attention": ("performer",)},
}


def make(kind: str) -> nn.Module:
    torch.manual_seed(0)
    if kind in LAYERS:
        return LAYERS[kind]().double().eval()
    return LanguageModel(LanguageConfig(11, **{"attention": ("primal",), **SIZES, **MODELS[kind]})).double().eval()


def sequences(model: nn.Module) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    if isinstance(model, LanguageModel):
        return torch.randint(11, (3, 9), generator=generator)
    return torch.randn(3, 9, 8, dtype=torch.float64, generator=generator)


@pytest.mark.parametrize("kind", [*LAYERS, *MODELS])
@torch.no_grad()
def test_every_state_continues_as_the_unbroken_stream(kind: str, tmp_path: Path) -> None:
    model = make(kind)
    x = sequences(model)
    expected = model(x)

    # Streams of different lengths, one file each: load, batch, continue together, split, continue alone.
    read = [3, 5, 4]
    for i, n in enumerate(read):
        save_state(tmp_path / f"{i}.safetensors", model(x[i : i + 1, :n], return_state=True)[1])
    states = [load_state(tmp_path / f"{i}.safetensors", model) for i in range(3)]
    together = batch_states(states)
    nexts = torch.stack([x[i, n : n + 2] for i, n in enumerate(read)])
    y, together = model(nexts, state=together, return_state=True)
    for i, n in enumerate(read):
        torch.testing.assert_close(y[i], expected[i, n : n + 2], **EXACT)
    for i, (n, state) in enumerate(zip(read, split_state(together), strict=True)):
        y, _ = model(x[i : i + 1, n + 2 :], state=state, return_state=True)
        torch.testing.assert_close(y[0], expected[i, n + 2 :], **EXACT)

    # One prefix, many continuations; the prefix's own state does not change.
    _, prefix = model(x[:2, :4], return_state=True)
    ends = x[[0, 1, 2, 0], 4:]
    y, _ = model(ends, state=fork_state(prefix, 2), return_state=True)
    torch.testing.assert_close(y, model(torch.cat([x[[0, 0, 1, 1], :4], ends], dim=1))[:, 4:], **EXACT)
    y, _ = model(x[:2, 4:], state=prefix, return_state=True)
    torch.testing.assert_close(y, expected[:2, 4:], **EXACT)


def test_errors_are_one_line_and_nothing_is_unpickled(tmp_path: Path) -> None:
    mean, landmarks, decay = make("mean"), make("landmarks"), make("lm decay")
    narrow = PrimalAttention(8, 2, rank=2, causal=True, data_dependent=False)
    path = tmp_path / "state.safetensors"
    save_state(path, mean.initial_state(2))
    for other in (landmarks, decay, narrow):
        with pytest.raises(FileError, match="is the state of another kind of layer or model"):
            load_state(path, other)
    torch.save(mean.initial_state(1), tmp_path / "pickled.pt")
    for name in ("pickled.pt", "missing.safetensors"):
        with pytest.raises(FileError, match=f"{name} is not a file that save_state wrote") as caught:
            load_state(tmp_path / name, mean)
        assert "\n" not in str(caught.value)
    with pytest.raises(ValueError, match="states of the same layer or model"):
        batch_states([mean.initial_state(1), landmarks.initial_state(1)])
    with pytest.raises(ValueError, match="must be one or more states"):
        batch_states([])
    with pytest.raises(ValueError, match="same kind of layer"):
        batch_states([mean.initial_state(1), narrow.initial_state(1)])
