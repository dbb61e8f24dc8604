"""transformers' `generate` on the streaming state: greedy, beams, left padding, chunks, pipelines, converted runs."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

hf = pytest.importorskip("transformers", minversion="5")

from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: E402

from hf.kinds import KINDS, batch, make  # noqa: E402
from primal_attention.data.lm import Vocabulary  # noqa: E402
from primal_attention.hf import PrimalCache, from_run, tokenizer_of  # noqa: E402
from primal_attention.models.lm import (  # noqa: E402
    LanguageConfig,
    LanguageModel,
    generate,
)
from primal_attention.train import lm as language_run  # noqa: E402

PLAIN: dict[str, Any] = {"do_sample": False, "pad_token_id": 0}


@pytest.mark.parametrize("kind", KINDS)
def test_a_padded_batch_generates_what_its_prompts_generate(kind: str) -> None:
    model, (tokens, mask) = make(kind), batch()
    together = model.generate(tokens, attention_mask=mask, max_new_tokens=7, **PLAIN)
    prompts = [row[kept == 1].tolist() for row, kept in zip(tokens, mask, strict=True)]
    ours = torch.tensor(list(generate(model.model, prompts, 7))).T
    assert torch.equal(together[:, 9:], ours)
    for i, prompt in enumerate(prompts):
        alone = model.generate(torch.tensor([prompt]), max_new_tokens=7, **PLAIN)
        assert torch.equal(alone[0, len(prompt) :], together[i, 9:])
    assert torch.equal(
        model.generate(tokens, attention_mask=mask, max_new_tokens=7, use_cache=False, **PLAIN), together
    )


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "flow"])
@torch.no_grad()
def test_the_cache_gives_the_logits_of_the_full_pass(kind: str) -> None:
    model, (tokens, mask) = make(kind), batch()
    full = model(tokens, mask).logits
    first = model(tokens[:, :6], mask[:, :6], use_cache=True)
    rest, cache = [first.logits], first.past_key_values
    for i in range(6, 9):
        output = model(tokens[:, i : i + 1], mask[:, : i + 1], past_key_values=cache)
        rest.append(output.logits)
        assert output.past_key_values is cache
    seen = mask.bool()
    # float32; logits are about 1
    torch.testing.assert_close(torch.cat(rest, dim=1)[seen], full[seen], rtol=0.0, atol=1e-5)
    assert cache.get_seq_length() == 9
    assert cache.state.position.tolist() == [5, 8, 9]


@pytest.mark.parametrize("kind", ["decay-conv-gate", "landmarks", "hybrid"])
def test_beams(kind: str) -> None:
    model, (tokens, mask) = make(kind), batch()
    beams = {"attention_mask": mask, "max_new_tokens": 5, "num_beams": 3, **PLAIN}
    assert torch.equal(model.generate(tokens, **beams), model.generate(tokens, use_cache=False, **beams))
    one = model.generate(tokens, **{**beams, "num_beams": 1})
    assert torch.equal(one, model.generate(tokens, attention_mask=mask, max_new_tokens=5, **PLAIN))


@torch.no_grad()
def test_beams_as_many_as_there_are_texts_find_the_likeliest() -> None:
    model = make("decay-conv-gate", vocab_size=4)
    with torch.no_grad():
        model.model.embedding.weight.mul_(6)  # decided opinions: no near ties
    prompt, count = torch.tensor([[1, 3, 2]]), 3
    found = model.generate(prompt, max_new_tokens=count, num_beams=16, **PLAIN)[0, 3:]

    def likelihood(text: tuple[int, ...]) -> float:
        logits = model(torch.cat([prompt, torch.tensor([text])], dim=1)).logits.log_softmax(dim=-1)[0, 2:-1]
        return float(logits.gather(-1, torch.tensor(text)[:, None]).sum())

    assert tuple(found.tolist()) == max(itertools.product(range(4), repeat=count), key=likelihood)


def test_a_cache_goes_on_and_rows_repeat() -> None:
    model, (tokens, mask) = make("hybrid"), batch()
    whole = model.generate(tokens, attention_mask=mask, max_new_tokens=6, **PLAIN)
    first = model.generate(tokens, attention_mask=mask, max_new_tokens=3, return_dict_in_generate=True, **PLAIN)
    cache = first.past_key_values
    assert isinstance(cache, PrimalCache)
    longer = torch.cat([mask, torch.ones_like(mask[:, :3])], dim=1)
    again = model.generate(first.sequences, attention_mask=longer, past_key_values=cache, max_new_tokens=3, **PLAIN)
    assert torch.equal(again, whole)
    chunks = model.generate(tokens, attention_mask=mask, max_new_tokens=6, prefill_chunk_size=4, **PLAIN)
    assert torch.equal(chunks, whole)
    hf.set_seed(0)
    draw = {"do_sample": True, "num_return_sequences": 2, "pad_token_id": 0}
    many = model.generate(tokens, attention_mask=mask, max_new_tokens=3, **draw)
    assert many.shape == (6, 12)
    cache.batch_select_indices(torch.tensor([2, 0]))
    assert cache.state.position.tolist() == [15 - 1, 11 - 1]  # the last token was never read
    cache.batch_repeat_interleave(2)
    assert cache.state.position.tolist() == [14, 14, 10, 10]
    cache.reset()
    assert cache.state is None


def test_the_state_of_an_all_primal_model_does_not_grow() -> None:
    model = make("decay-conv-gate")

    def numbers(length: int) -> int:
        cache = PrimalCache(model.config)
        model(torch.zeros(1, length, dtype=torch.int64), past_key_values=cache)
        leaves = torch.utils._pytree.tree_leaves(cache.state)
        return sum(t.numel() for t in leaves if isinstance(t, torch.Tensor))

    assert numbers(5) == numbers(50)


def test_what_makes_no_sense_is_refused() -> None:
    model, (tokens, mask) = make("landmarks"), batch()
    with pytest.raises(ValueError, match="cache_implementation='static' has no meaning here"):
        model.generate(tokens, attention_mask=mask, max_new_tokens=2, cache_implementation="static", **PLAIN)
    with pytest.raises(ValueError, match="max_length=40 is exceeded by a sequence of 41 tokens"):
        model.generate(tokens, attention_mask=mask, max_new_tokens=40, **PLAIN)
    with pytest.raises(ValueError, match="stateful"):
        model.generate(tokens[:1], max_new_tokens=2, assistant_model=make("mean"), **PLAIN)


WORDS = ["The cat sat on the mat.", "The dog sat on the cat, and the mat was gone."]


@pytest.fixture(params=["subwords", "words"])
def folder(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> tuple[Path, Vocabulary]:
    """What stands for a finished run: its model and vocabulary."""
    made: Vocabulary = Vocabulary.train_byte_pairs(WORDS, 280)
    if request.param == "words":
        made = Vocabulary.from_words("\n".join([*WORDS, "<unk>", ""]))
    torch.manual_seed(0)
    model = LanguageModel(LanguageConfig(len(made), ("primal",), 16, 2, 2, 16, rank=4, primal_mode="decay")).eval()
    monkeypatch.setattr(language_run, "load_language", lambda folder: (model, made))
    return tmp_path, made


def test_a_run_becomes_a_folder_for_the_auto_classes(folder: tuple[Path, Vocabulary]) -> None:
    place, vocabulary = folder
    model, tokenizer = from_run(place)
    model.save_pretrained(place / "hf")
    tokenizer.save_pretrained(place / "hf")
    model, tokenizer = AutoModelForCausalLM.from_pretrained(place / "hf"), AutoTokenizer.from_pretrained(place / "hf")
    texts = ["The cat sat on the mat.\n", "The dog"]
    numbers = [[vocabulary.end, *tokens] for tokens in vocabulary.encode(texts)]
    assert tokenizer(texts)["input_ids"] == numbers
    together = tokenizer(texts, return_tensors="pt", padding=True)
    assert together["input_ids"].shape == together["attention_mask"].shape
    found = model.generate(**together, max_new_tokens=5, do_sample=False, eos_token_id=None)[:, -5:]
    assert torch.equal(found, torch.tensor(list(generate(model.model, numbers, 5))).T)


def test_a_pipeline_writes(folder: tuple[Path, Vocabulary]) -> None:
    model, tokenizer = from_run(folder[0])
    write = hf.pipeline("text-generation", model=model, tokenizer=tokenizer, device="cpu")
    settings = {"max_new_tokens": 4, "do_sample": False, "eos_token_id": None}
    texts = ["The cat sat on the mat.", "The dog"]
    alone = [write(text, **settings)[0]["generated_text"] for text in texts]
    assert all(found.startswith(text) for found, text in zip(alone, texts, strict=True))
    assert [found[0]["generated_text"] for found in write(texts, batch_size=2, **settings)] == alone
    # The vocabulary's own words; where a line ends transformers writes nothing.
    numbers = [[folder[1].end, *tokens] for tokens in folder[1].encode(texts)]
    for found, prompt, added in zip(alone, numbers, zip(*generate(model.model, numbers, 4), strict=True), strict=True):
        expected = folder[1].decode([*prompt[1:], *(token for token in added if token != folder[1].end)])
        assert found == expected


def test_an_unknown_word_is_the_unknown_token() -> None:
    tokenizer = tokenizer_of(Vocabulary('{"words": ["<eos>", "<unk>", "cat"]}'))
    assert tokenizer("the cat\n")["input_ids"] == [0, 1, 2, 0]
