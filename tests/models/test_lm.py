"""The language model: padding, streaming and generation equal the full pass; bad input is one line."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

import pytest
import torch
from torch.utils._pytree import tree_leaves

from primal_attention import ksvd_loss
from primal_attention.models import lm
from primal_attention.models.lm import GREEDY, STOPPED, LanguageConfig, LanguageModel, Sampling, generate, probabilities

SIZES = {"embed_dim": 16, "num_heads": 2, "layers": 2, "ffn_dim": 16, "rank": 4, "landmarks": 6, "max_length": 40}
SMALL = LanguageConfig(50, **SIZES, primal_mode="mean", positions="none")
EXACT = {"rtol": 0.0, "atol": 1e-10}  # float64, some ten layers deep
KINDS = {
    "softmax": {"attention": ("softmax",), "positions": "rotary"},
    "softmax-sinusoidal": {"attention": ("softmax",), "positions": "sinusoidal"},
    "mean": {"attention": ("primal",)},
    "landmarks-conv": {"attention": ("primal",), "primal_mode": "landmarks", "conv": 4},
    "decay-conv-gate": {"attention": ("primal",), "primal_mode": "decay", "conv": 4, "gate": True, "primal_heads": 4},
    "delta": {"attention": ("primal",), "primal_mode": "delta", "conv": 4, "gate": True},
    "delta-bare": {"attention": ("primal",), "primal_mode": "delta"},
    "primal+": {"attention": ("primal+",), "positions": "rotary"},
    "hybrid": {"attention": ("primal", "softmax"), "primal_mode": "delta", "conv": 3, "positions": "rotary"},
    "decay-sigmoid": {"primal_mode": "decay", "conv": 4, "gate": True, "gate_activation": "sigmoid"},
    "delta-sigmoid": {"primal_mode": "delta", "conv": 4, "gate": True, "gate_activation": "sigmoid"},
    "softmax-conv-gate": {"attention": ("softmax",), "conv": 4, "gate": True, "conv_layers": "all"},
    "none": {"attention": ("none",), "conv": 4, "gate": True, "gate_activation": "sigmoid", "activation": "glu"},
    "linear": {"attention": ("linear",)},
    "performer": {"attention": ("performer",)},
    "cosformer": {"attention": ("cosformer",)},
    "flow": {"attention": ("flow",), "positions": "sinusoidal"},  # no state: generation reads the whole text again
}
STREAMING = [kind for kind in KINDS if kind != "flow"]
PRIMAL = ["mean", "landmarks-conv", "decay-conv-gate", "delta"]
PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6, 5], [7], [2, 7, 1, 8]]


def make(kind: str) -> LanguageModel:
    torch.manual_seed(0)
    return LanguageModel(dataclasses.replace(SMALL, **KINDS[kind])).double().eval()


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    """Three sequences, padded on the left, on the right, and with holes."""
    generator = torch.Generator().manual_seed(1)
    mask = torch.zeros(3, 12, dtype=torch.bool)
    mask[0, :5] = mask[1, 8:] = mask[2, [3, 6]] = True
    return torch.randint(0, 50, (3, 12), generator=generator), mask


def texts(model: LanguageModel, prompts: list[list[int]], count: int, *args, **keywords) -> list[list[int]]:
    steps = list(generate(model, prompts, count, *args, **keywords))
    return [[t for t in row if t != STOPPED] for row in zip(*steps, strict=True)]


def count_numbers(state: object) -> int:
    return sum(leaf.numel() for leaf in tree_leaves(state) if isinstance(leaf, torch.Tensor))


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_padded_equals_alone_and_nothing_is_seen_early(kind: str) -> None:
    model, (tokens, mask) = make(kind), batch()
    together, last = model(tokens, mask), model(tokens, mask, only_last=True)
    for row, padding, logits, final in zip(tokens, mask, together, last, strict=True):
        unpadded = model(row[~padding][None])[0]
        torch.testing.assert_close(logits[~padding], unpadded, **EXACT)
        torch.testing.assert_close(final, unpadded[-1], **EXACT)
    changed = tokens.clone()
    changed[:, 8] = (tokens[:, 8] + 1) % 50
    a, b = model(tokens), model(changed)
    torch.testing.assert_close(a[:, :8], b[:, :8], **EXACT)
    assert not torch.allclose(a[:, 8], b[:, 8])


@pytest.mark.parametrize("kind", STREAMING)
@torch.no_grad()
def test_continuing_from_a_padded_prompt_equals_one_pass(kind: str) -> None:
    model, (tokens, mask) = make(kind), batch()
    following = tokens[:, :3].flip(0)
    _, state = model(tokens, mask, state=model.initial_state(3), return_state=True)
    at_once, _ = model(following, state=state, return_state=True)
    stepped, size = [], count_numbers(state)
    for i, token in enumerate(following.T):
        if i == 2:  # a step in which no sequence has a token changes nothing
            _, state = model.step(token, state, torch.ones(3, dtype=torch.bool))
        logits, state = model.step(token, state)
        stepped.append(logits)
    for i in range(3):
        unpadded = model(torch.cat([tokens[i][~mask[i]], following[i]])[None])[0, -3:]
        torch.testing.assert_close(at_once[i], unpadded, **EXACT)
        torch.testing.assert_close(torch.stack(stepped, dim=1)[i], unpadded, **EXACT)
    assert state.position.tolist() == ((~mask).sum(dim=1) + 3).tolist()
    if kind in PRIMAL:
        assert count_numbers(state) == size, "the state does not grow"


@pytest.mark.parametrize("kind", [*PRIMAL, "hybrid"])
def test_every_parameter_has_a_gradient(kind: str) -> None:
    model, (tokens, _) = make(kind).train(), batch()
    loss = torch.nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
    torch.testing.assert_close(model(tokens, targets=tokens), loss, **EXACT)
    (loss + 0.1 * ksvd_loss(model)).backward()
    missing = [name for name, p in model.named_parameters() if p.grad is None or not p.grad.abs().sum() > 0]
    assert missing == []


@pytest.mark.parametrize("kind", ["default", *KINDS])
@torch.no_grad()
def test_a_new_model_knows_the_order_of_its_tokens_and_starts_near_the_uniform_loss(kind: str) -> None:
    torch.manual_seed(0)
    options = {} if kind == "default" else {"primal_mode": "mean", **KINDS[kind], "positions": None}
    # One layer: a second causal layer sees the order of the first one's prefixes, also without positions.
    layers = len(options.get("attention", ("primal",)))
    sizes = {**SIZES, "embed_dim": 128, "rank": 16, "landmarks": 16, "layers": layers}
    model, tokens = LanguageModel(LanguageConfig(2000, **{**sizes, **options})).eval(), torch.randint(2000, (8, 33))
    loss = model(tokens[:, :-1], targets=tokens[:, 1:])
    assert abs(loss.item() - math.log(2000)) < 0.3
    swapped = tokens[:, [*reversed(range(32)), 32]]
    difference = (model(tokens, only_last=True) - model(swapped, only_last=True)).abs().max()
    assert difference > 1e-3  # logits are about 0.2; without order it is below 1e-6


def test_the_default_is_the_best_stored_setting_without_softmax_attention() -> None:
    names = ("attention", "primal_mode", "primal_heads", "rank", "conv", "gate")
    files = Path(__file__).parents[2].glob("results/lm-unit-variance/wikipedia/*.json")
    runs = [json.loads(file.read_text()) for file in files]
    runs = [run for run in runs if run["config"]["model"]["attention"] == ["primal"]]
    best = min(runs, key=lambda run: run["test"]["bits_per_byte"])
    assert f"{best['test']['bits_per_byte']:.4f}" in LanguageConfig.__doc__
    config = LanguageConfig().resolved()
    assert {name: getattr(config, name) for name in names[1:]} == {n: best["config"]["model"][n] for n in names[1:]}
    assert (list(config.attention), config.positions) == (["primal"], "none")
    plain = LanguageConfig(primal_mode="mean").resolved()  # a mode unpadded has no convolution and no gate
    assert [getattr(plain, name) for name in (*names[2:], "positions")] == [None, 30, 0, False, "sinusoidal"]


def test_bad_input_is_one_line() -> None:
    model, ids = make("landmarks-conv"), torch.zeros(1, 41, dtype=torch.int64)
    _, full = model(ids[:, :40], return_state=True)
    too_long = "max_length=40 is exceeded by a sequence of 41 tokens"
    for call, message in (
        (lambda: model(ids), too_long),
        (lambda: model.step(ids[:, 0], full), too_long),
        (lambda: model(ids[:, :0]), r"at least one token\) \(got \(1, 0\)\)"),
        (lambda: model(torch.tensor([[3, 50]])), r"tokens must lie in 0 … 49.*got 3 … 50"),
        (lambda: model(ids[:, :3], torch.zeros(1, 3)), "key_padding_mask must be a bool tensor"),
        (lambda: model.step(ids[0, :2], full), "state holds 1 sequences and tokens 2"),
        (lambda: model.hidden(torch.zeros(1, 3, 15)), r"embeddings must have shape \(batch, at least one token, 16\)"),
        (lambda: make("flow").initial_state(1), "attention flow has no streaming state"),
    ):
        with pytest.raises(ValueError, match=message):
            call()
    for changes, message in (
        ({"primal_mode": "selective"}, "attention 'selective' was removed; use 'decay' or 'delta'"),
        ({"attention": ("sofmax",)}, "unknown attention 'sofmax'"),
        ({"attention": ("nystrom",)}, "causal=True is not defined for attention 'nystrom'"),
        ({"attention": ("none",)}, "a block without attention needs conv"),
        ({"positions": "rotary"}, r"positions='rotary' needs a softmax layer.*use 'sinusoidal', 'none' or None"),
        ({"initializer_range": 0.0}, "initializer_range must be positive or None"),
        ({"gate_activation": "tanh"}, "gate_activation must be one of 'silu', 'sigmoid'"),
    ):
        with pytest.raises(ValueError, match=message):
            LanguageModel(dataclasses.replace(SMALL, **changes))


# Generation


@pytest.mark.parametrize("kind", ["mean", "delta", "landmarks-conv", "hybrid", "linear", "flow"])
@torch.no_grad()
def test_greedy_generation_is_the_argmax_of_the_full_pass(kind: str) -> None:
    model = make(kind)
    for prompt, added in zip(PROMPTS, texts(model, PROMPTS, 5), strict=True):
        text = list(prompt)
        for token in added:
            assert token == int(model(torch.tensor([text]))[0, -1].argmax())
            text.append(token)


@pytest.mark.parametrize("kind", ["mean", "decay-conv-gate", "delta", "landmarks-conv", "linear"])
@torch.no_grad()
def test_a_long_prompt_is_read_in_chunks(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make(kind)
    expected = lm.Stream(model).read(*lm.pad(PROMPTS))
    monkeypatch.setattr(lm, "PROMPT_CHUNK", 2)
    torch.testing.assert_close(lm.Stream(model).read(*lm.pad(PROMPTS)), expected, **EXACT)


def test_a_batch_stops_row_by_row_and_one_seed_draws_one_text() -> None:
    model = make("decay-conv-gate")
    stop = texts(model, PROMPTS[:1], 3)[0][2]
    together = texts(model, PROMPTS, 8, stop=stop)
    assert together == [texts(model, [prompt], 8, stop=stop)[0] for prompt in PROMPTS]
    assert together[0][-1] == stop
    assert len(together[0]) <= 3
    first, again, other = (texts(model, PROMPTS, 8, Sampling(seed=seed)) for seed in (5, 5, 6))
    assert first == again != other


def test_the_distribution_that_a_token_is_drawn_from() -> None:
    logits = torch.tensor([[0.1, 0.5, 0.2, 0.15, 0.05]]).log()
    squared = logits.exp().square()
    for sampling, expected in (
        (Sampling(), logits.exp()),
        (Sampling(top_k=2), torch.tensor([[0.0, 5 / 7, 2 / 7, 0.0, 0.0]])),
        (Sampling(top_p=0.75), torch.tensor([[0.0, 0.5, 0.2, 0.15, 0.0]]) / 0.85),  # 0.5 + 0.2 are too few
        (Sampling(temperature=0.5), squared / squared.sum()),
        (Sampling(top_k=3, top_p=0.5), torch.tensor([[0.0, 1.0, 0.0, 0.0, 0.0]])),  # of the three, 0.5 / 0.85 suffices
    ):
        torch.testing.assert_close(probabilities(logits, sampling), expected)
    cold = probabilities(1e4 * logits, Sampling(temperature=1e-30))
    torch.testing.assert_close(cold, torch.tensor([[0.0, 1.0, 0.0, 0.0, 0.0]]))
    logits = torch.tensor([0.6, 0.3, 0.1]).log().expand(4000, 3)
    counts = lm.choose(logits, Sampling(seed=1), torch.Generator().manual_seed(1)).bincount(minlength=3) / 4000
    assert (counts - torch.tensor([0.6, 0.3, 0.1])).abs().max() < 0.03  # four standard deviations
    assert lm.choose(logits, GREEDY, torch.Generator()).eq(0).all()


def test_bad_input_of_generation_is_refused_before_the_first_token() -> None:
    model = make("landmarks-conv")
    for prompts, count, message in (
        (PROMPTS, 33, r"9 tokens and 33 new ones are more than max_length=40 .*: at most 32"),
        ([[1] * 41], 1, "max_length=40 of this model: a shorter prompt"),
        ([[1], []], 1, "every prompt must have at least one token"),
        ([], 1, "prompts must not be empty"),
        ([[1, 50]], 1, r"tokens must lie in 0 … 49.*got 1 … 50"),
        (PROMPTS, 0, r"count must be at least 1 \(got 0\)"),
    ):
        with pytest.raises(ValueError, match=message):
            generate(model, prompts, count)
    with pytest.raises(ValueError, match="training mode"):
        generate(make("mean").train(), PROMPTS, 1)
    for wrong in ({"temperature": -1.0}, {"temperature": float("nan")}, {"top_k": 0}, {"top_p": 0.0}, {"top_p": 1.5}):
        with pytest.raises(ValueError, match=f"{next(iter(wrong))} must"):
            Sampling(**wrong)
