"""Generation: token by token is the full pass, a batch is its prompts one by one, drawing obeys its limits."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from primal_attention.models import lm as generation
from primal_attention.models.lm import (
    GREEDY,
    STOPPED,
    LanguageConfig,
    LanguageModel,
    Sampler,
    Sampling,
    generate,
    probabilities,
)

SMALL = LanguageConfig(
    23, embed_dim=16, num_heads=2, layers=2, ffn_dim=16, rank=4, landmarks=6, max_length=40, positions="none"
)
KINDS = {
    "mean": {"attention": ("primal",)},
    "decay": {"attention": ("primal",), "primal_mode": "decay"},
    "decay-conv-gate": {"attention": ("primal",), "primal_mode": "decay", "conv": 4, "gate": True},
    "delta-conv-gate": {"attention": ("primal",), "primal_mode": "delta", "conv": 4, "gate": True},
    "landmarks": {"attention": ("primal",), "primal_mode": "landmarks"},
    "hybrid": {"attention": ("primal", "softmax"), "primal_mode": "decay", "positions": "rotary"},
    "linear": {"attention": ("linear",)},
    "flow": {"attention": ("flow",), "positions": "sinusoidal"},  # no state: the whole text again
}
PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6, 5], [7], [2, 7, 1, 8]]


def make(kind: str) -> LanguageModel:
    torch.manual_seed(0)
    return LanguageModel(dataclasses.replace(SMALL, **KINDS[kind])).eval()


def texts(model: LanguageModel, prompts: list[list[int]], count: int, *args, **keywords) -> list[list[int]]:
    steps = list(generate(model, prompts, count, *args, **keywords))
    return [[t for t in row if t != STOPPED] for row in zip(*steps, strict=True)]


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_greedy_is_the_argmax_of_the_full_pass(kind: str) -> None:
    model = make(kind)
    for prompt, added in zip(PROMPTS, texts(model, PROMPTS, 8), strict=True):
        text = list(prompt)
        for token in added:
            assert token == int(model(torch.tensor([text]))[0, -1].argmax())
            text.append(token)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "flow"])
@torch.no_grad()
def test_logits_of_a_batch_equal_the_full_pass_of_each(kind: str) -> None:
    model, following = make(kind), torch.tensor([[4, 4, 2], [9, 0, 1], [5, 5, 5]])
    reader = generation.Stream(model)
    found = [reader.read(*generation.pad(PROMPTS))]
    found += [reader.read(token[:, None], None) for token in following.T]
    for i, prompt in enumerate(PROMPTS):
        full = model(torch.tensor([prompt + following[i].tolist()]))[0, -4:]
        # float32, as the promise is made; logits are about 1
        torch.testing.assert_close(torch.stack(found)[:, i], full, rtol=0.0, atol=1e-5)


@torch.no_grad()
def test_the_papers_size_over_some_hundred_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "0")  # interpreted kernels are slow at this size
    config = LanguageConfig(200, ("primal",), primal_mode="delta", primal_heads=4, rank=64, conv=4, gate=True)
    model, text = LanguageModel(config).eval(), torch.randint(200, (2, 130))
    reader = generation.Stream(model)
    found = [reader.read(*generation.pad([text[0, :125].tolist(), text[1, :37].tolist()]))]
    found += [reader.read(token[:, None], None) for token in torch.stack([text[0, 125:], text[1, 37:42]]).T]
    for row, length, logits in zip(text, (130, 42), torch.stack(found, dim=1), strict=True):
        full = model(row[None, :length])[0, -6:]
        torch.testing.assert_close(logits, full, rtol=1e-5, atol=1e-5)  # logits are up to 20


@pytest.mark.parametrize("kind", ["mean", "decay-conv-gate", "delta-conv-gate", "landmarks", "linear"])
@torch.no_grad()
def test_a_long_prompt_is_read_in_stretches(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make(kind)
    whole = generation.Stream(model).read(*generation.pad(PROMPTS))
    monkeypatch.setattr(generation, "STRETCH", 2)
    torch.testing.assert_close(generation.Stream(model).read(*generation.pad(PROMPTS)), whole, rtol=0.0, atol=1e-5)


def test_a_batch_stops_row_by_row() -> None:
    model = make("decay-conv-gate")
    stop = texts(model, PROMPTS[:1], 3)[0][2]
    together = texts(model, PROMPTS, 12, stop=stop)
    assert together == [texts(model, [prompt], 12, stop=stop)[0] for prompt in PROMPTS]
    assert together[0][-1] == stop
    assert len(together[0]) <= 3


def test_one_seed_draws_one_text() -> None:
    model = make("decay")
    draw = Sampling(temperature=1.0, seed=5)
    assert texts(model, PROMPTS, 12, draw) == texts(model, PROMPTS, 12, draw)
    assert texts(model, PROMPTS, 12, draw) != texts(model, PROMPTS, 12, dataclasses.replace(draw, seed=6))


def test_what_is_drawn_from() -> None:
    logits = torch.tensor([[0.1, 0.5, 0.2, 0.15, 0.05]]).log()
    torch.testing.assert_close(probabilities(logits, Sampling()), logits.exp())
    torch.testing.assert_close(probabilities(logits, Sampling(top_k=2)), torch.tensor([[0.0, 5 / 7, 2 / 7, 0.0, 0.0]]))
    torch.testing.assert_close(  # 0.5 + 0.2 are too few, 0.15 more suffice
        probabilities(logits, Sampling(top_p=0.75)), torch.tensor([[0.0, 0.5, 0.2, 0.15, 0.0]]) / 0.85
    )
    squared = logits.exp().square()
    torch.testing.assert_close(probabilities(logits, Sampling(temperature=0.5)), squared / squared.sum())
    both = probabilities(logits, Sampling(top_k=3, top_p=0.5))  # of the three, 0.5 / 0.85 suffices
    torch.testing.assert_close(both, torch.tensor([[0.0, 1.0, 0.0, 0.0, 0.0]]))
    cold = probabilities(1e4 * logits, Sampling(temperature=1e-30))
    torch.testing.assert_close(cold, torch.tensor([[0.0, 1.0, 0.0, 0.0, 0.0]]))


def test_a_thousand_draws_follow_the_probabilities() -> None:
    logits = torch.tensor([0.6, 0.3, 0.1]).log().expand(4000, 3)
    counts = Sampler(Sampling(seed=1), torch.device("cpu"))(logits).bincount(minlength=3) / 4000
    assert (counts - torch.tensor([0.6, 0.3, 0.1])).abs().max() < 0.03  # four standard deviations
    assert Sampler(GREEDY, torch.device("cpu"))(logits).eq(0).all()


def test_bad_input_is_told_before_the_first_token() -> None:
    model = make("landmarks")
    with pytest.raises(ValueError, match=r"9 tokens and 33 new ones are more than max_length=40 .*: at most 32"):
        generate(model, PROMPTS, 33)
    assert len(texts(model, PROMPTS, 32)[0]) == 32
    with pytest.raises(ValueError, match="max_length=40 of this model: a shorter prompt"):
        generate(model, [[1] * 41], 1)
    with pytest.raises(ValueError, match="every prompt must have at least one token"):
        generate(model, [[1], []], 1)
    with pytest.raises(ValueError, match="prompts must not be empty"):
        generate(model, [], 1)
    with pytest.raises(ValueError, match=r"tokens must lie in 0 … 22.*got 1 … 23"):
        generate(model, [[1, 23]], 1)
    with pytest.raises(ValueError, match=r"count must be at least 1 \(got 0\)"):
        generate(model, PROMPTS, 0)
    with pytest.raises(ValueError, match="training mode"):
        generate(make("mean").train(), PROMPTS, 1)
    for wrong in ({"temperature": -1.0}, {"temperature": float("nan")}, {"top_k": 0}, {"top_p": 0.0}, {"top_p": 1.5}):
        with pytest.raises(ValueError, match=f"{next(iter(wrong))} must"):
            Sampling(**wrong)
