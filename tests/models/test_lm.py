"""The language model: padding and streaming change nothing, nothing is seen early, bad input is told in one line."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from primal_attention import ksvd_loss
from primal_attention.models.lm import LanguageConfig, LanguageModel

SMALL = LanguageConfig(
    50, embed_dim=16, num_heads=2, layers=2, ffn_dim=16, rank=4, landmarks=6, max_length=40, positions="none"
)
EXACT = {"rtol": 0.0, "atol": 1e-10}  # float64, some ten layers deep
KINDS = {
    "softmax": {"attention": ("softmax",), "positions": "rotary"},
    "softmax-sinusoidal": {"attention": ("softmax",), "positions": "sinusoidal"},
    "mean": {"attention": ("primal",)},
    "landmarks-conv": {"attention": ("primal",), "primal_mode": "landmarks", "conv": 4},
    "decay-conv-gate": {"attention": ("primal",), "primal_mode": "decay", "conv": 4, "gate": True, "primal_heads": 4},
    "decay-before": {"attention": ("primal",), "primal_mode": "decay", "conv": 4, "conv_place": "before", "gate": True},
    "delta": {"attention": ("primal",), "primal_mode": "delta", "conv": 4, "gate": True},
    "delta-bare": {"attention": ("primal",), "primal_mode": "delta"},
    "primal+": {"attention": ("primal+",), "positions": "rotary"},
    "hybrid": {"attention": ("primal", "softmax"), "primal_mode": "delta", "conv": 3, "positions": "rotary"},
    "linear": {"attention": ("linear",)},
    "performer": {"attention": ("performer",)},
    "cosformer": {"attention": ("cosformer",)},
    "flow": {"attention": ("flow",), "positions": "sinusoidal"},
}
STREAMING = [kind for kind in KINDS if kind != "flow"]


def make(kind: str) -> LanguageModel:
    torch.manual_seed(0)
    return LanguageModel(dataclasses.replace(SMALL, **KINDS[kind])).double().eval()


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    """Three sequences, padded on the left, on the right, and with holes."""
    generator = torch.Generator().manual_seed(1)
    mask = torch.zeros(3, 12, dtype=torch.bool)
    mask[0, :5] = mask[1, 8:] = mask[2, [3, 6]] = True
    return torch.randint(0, 50, (3, 12), generator=generator), mask


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_padded_equals_alone(kind: str) -> None:
    model, (tokens, mask) = make(kind), batch()
    together, last = model(tokens, mask), model(tokens, mask, only_last=True)
    for row, padding, logits, final in zip(tokens, mask, together, last, strict=True):
        alone = model(row[~padding][None])[0]
        torch.testing.assert_close(logits[~padding], alone, **EXACT)
        torch.testing.assert_close(final, alone[-1], **EXACT)


@pytest.mark.parametrize("kind", STREAMING)
@torch.no_grad()
def test_going_on_from_a_padded_prompt_equals_one_pass(kind: str) -> None:
    model, (tokens, mask) = make(kind), batch()
    following = tokens[:, :3].flip(0)
    _, state = model(tokens, mask, return_state=True)
    at_once, _ = model(following, state=state, return_state=True)
    stepped = []
    for token in following.T:
        logits, state = model.step(token, state)
        stepped.append(logits)
    for i in range(3):
        alone = model(torch.cat([tokens[i][~mask[i]], following[i]])[None])[0, -3:]
        torch.testing.assert_close(at_once[i], alone, **EXACT)
        torch.testing.assert_close(torch.stack(stepped, dim=1)[i], alone, **EXACT)


@pytest.mark.parametrize("kind", STREAMING)
@torch.no_grad()
def test_stepping_equals_one_pass_and_a_pause_changes_nothing(kind: str) -> None:
    model, (tokens, _) = make(kind), batch()
    state = model.initial_state(3)
    for i, token in enumerate(tokens.T):
        if i == 5:  # only the second sequence gets a token
            _, state = model.step(token, state, torch.tensor([True, False, True]))
        logits, state = model.step(token, state)
    full = model(tokens)[:, -1]
    torch.testing.assert_close(logits[[0, 2]], full[[0, 2]], **EXACT)
    repeated = torch.cat([tokens[1, :6], tokens[1, 5:]])[None]
    torch.testing.assert_close(logits[1], model(repeated)[0, -1], **EXACT)
    assert state.position.tolist() == [12, 13, 12]


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_seen_early(kind: str) -> None:
    model, (tokens, _) = make(kind), batch()
    changed = tokens.clone()
    changed[:, 8] = (tokens[:, 8] + 1) % 50
    with torch.no_grad():
        a, b = model(tokens), model(changed)
    torch.testing.assert_close(a[:, :8], b[:, :8], **EXACT)
    assert not torch.allclose(a[:, 8], b[:, 8])


@pytest.mark.parametrize("kind", ["mean", "landmarks-conv", "decay-conv-gate", "decay-before", "delta", "hybrid"])
def test_every_parameter_learns(kind: str) -> None:
    model, (tokens, _) = make(kind).train(), batch()
    loss = torch.nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
    (loss + 0.1 * ksvd_loss(model)).backward()
    silent = [name for name, p in model.named_parameters() if p.grad is None or not p.grad.abs().sum() > 0]
    assert silent == []


def test_the_papers_sizes() -> None:
    with torch.device("meta"):
        model = LanguageModel(LanguageConfig(1000, attention=("primal+",)))
    assert model.attention_names == ("softmax",) * 5 + ("primal",)
    assert not any(name.startswith("head") for name, _ in model.named_parameters())  # tied embeddings
    assert model.blocks[0].feed_forward[0].weight.shape == (2048, 512)


@pytest.mark.parametrize("kind", ["mean", "decay-conv-gate", "landmarks-conv", "decay-before", "delta"])
@torch.no_grad()
def test_the_state_of_a_primal_model_does_not_grow(kind: str) -> None:
    model, (tokens, _) = make(kind), batch()

    def numbers(state: object) -> int:
        if isinstance(state, torch.Tensor):
            return state.numel()
        return sum(map(numbers, state)) if isinstance(state, tuple) else 0

    _, short = model(tokens[:, :5], return_state=True)
    _, long = model(tokens, return_state=True)
    assert numbers(short) == numbers(long) == numbers(model.initial_state(3))


def test_bad_input_is_told_in_one_line() -> None:
    model = make("landmarks-conv")
    with pytest.raises(ValueError, match="max_length=40 is exceeded by a sequence of 41 tokens"):
        model(torch.zeros(1, 41, dtype=torch.int64))
    _, state = model(torch.zeros(1, 40, dtype=torch.int64), return_state=True)
    with pytest.raises(ValueError, match="max_length=40 is exceeded by a sequence of 41 tokens"):
        model.step(torch.zeros(1, dtype=torch.int64), state)
    with pytest.raises(ValueError, match=r"at least one token\) \(got \(1, 0\)\)"):
        model(torch.zeros(1, 0, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"tokens must lie in 0 … 49.*got 3 … 50"):
        model(torch.tensor([[3, 50]]))
    with pytest.raises(ValueError, match="key_padding_mask must be a bool tensor"):
        model(torch.zeros(1, 3, dtype=torch.int64), torch.zeros(1, 3))
    with pytest.raises(ValueError, match="state holds 1 sequences and tokens 2"):
        model.step(torch.zeros(2, dtype=torch.int64), state)
    with pytest.raises(ValueError, match="attention flow has no streaming state"):
        make("flow").initial_state(1)
    with pytest.raises(ValueError, match="attention 'selective' was removed; use 'decay' or 'delta'"):
        LanguageModel(dataclasses.replace(SMALL, attention=("primal",), primal_mode="selective"))
    with pytest.raises(ValueError, match="unknown attention 'sofmax'"):
        LanguageModel(dataclasses.replace(SMALL, attention=("sofmax",)))
    with pytest.raises(ValueError, match="causal=True is not defined for attention 'nystrom'"):
        LanguageModel(dataclasses.replace(SMALL, attention=("nystrom",)))
