"""`generate` of transformers on the streaming state: greedy, beams, left padding, pipelines, converted runs."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf.small_models import MODES, batch, make
from primal_attention.data.lm import Vocabulary
from primal_attention.hf import PrimalCache, from_run, make_tokenizer
from primal_attention.models.lm import LanguageConfig, LanguageModel, generate
from primal_attention.train import lm as language

GREEDY: dict[str, Any] = {"do_sample": False, "pad_token_id": 0}


@pytest.mark.parametrize("mode", MODES)
def test_a_padded_batch_generates_what_its_prompts_generate(mode: str) -> None:
    model, (tokens, mask) = make(mode), batch()
    together = model.generate(tokens, attention_mask=mask, max_new_tokens=5, **GREEDY)
    prompts = [row[row_mask == 1].tolist() for row, row_mask in zip(tokens, mask, strict=True)]
    assert torch.equal(together[:, 9:], torch.tensor(list(generate(model.model, prompts, 5))).T)
    alone = model.generate(torch.tensor([prompts[0]]), max_new_tokens=5, **GREEDY)
    assert torch.equal(alone[0, len(prompts[0]) :], together[0, 9:])
    uncached = model.generate(tokens, attention_mask=mask, max_new_tokens=5, use_cache=False, **GREEDY)
    assert torch.equal(uncached, together)
    order = mask.argsort(dim=1, descending=True, stable=True)
    right = model.generate(tokens.gather(1, order), attention_mask=mask.gather(1, order), max_new_tokens=5, **GREEDY)
    assert torch.equal(right[:, 9:], together[:, 9:])


@pytest.mark.parametrize("mode", [mode for mode in MODES if mode != "flow"])
@torch.no_grad()
def test_the_cache_gives_the_logits_of_the_full_pass(mode: str) -> None:
    model, (tokens, mask) = make(mode), batch()
    full = model(tokens, mask).logits
    first = model(tokens[:, :6], mask[:, :6], use_cache=True)
    logits, cache = [first.logits], first.past_key_values
    for i in range(6, 9):
        logits.append(model(tokens[:, i : i + 1], mask[:, : i + 1], past_key_values=cache).logits)
    valid = mask.bool()
    # float32; logits are about 1
    torch.testing.assert_close(torch.cat(logits, dim=1)[valid], full[valid], rtol=0.0, atol=1e-5)
    assert cache.get_seq_length() == 9
    assert cache.state.position.tolist() == [5, 8, 9]


@pytest.mark.parametrize("mode", ["default", "decay-conv-gate", "landmarks", "hybrid"])
@pytest.mark.parametrize("search", [{"num_beams": 3, "do_sample": False}, {"do_sample": True, "top_k": 5}])
def test_beams_and_samples_with_and_without_the_cache_agree(mode: str, search: dict[str, Any]) -> None:
    model, (tokens, mask) = make(mode), batch()
    settings = {"attention_mask": mask, "max_new_tokens": 5, "pad_token_id": 0, **search}
    texts = []
    for use_cache in (True, False):
        torch.manual_seed(0)
        texts.append(model.generate(tokens, use_cache=use_cache, **settings))
    assert torch.equal(*texts)


def test_a_cache_can_be_continued_chunked_and_repeated_and_filled_by_embeddings() -> None:
    model, (tokens, mask) = make("hybrid"), batch()
    expected = model.generate(tokens, attention_mask=mask, max_new_tokens=6, **GREEDY)
    first = model.generate(tokens, attention_mask=mask, max_new_tokens=3, return_dict_in_generate=True, **GREEDY)
    cache = first.past_key_values
    assert isinstance(cache, PrimalCache)
    longer = torch.cat([mask, torch.ones_like(mask[:, :3])], dim=1)
    again = model.generate(first.sequences, attention_mask=longer, past_key_values=cache, max_new_tokens=3, **GREEDY)
    assert torch.equal(again, expected)
    chunks = model.generate(tokens, attention_mask=mask, max_new_tokens=6, prefill_chunk_size=4, **GREEDY)
    assert torch.equal(chunks, expected)
    embeds = model.get_input_embeddings()(tokens)
    of_embeds = model.generate(inputs_embeds=embeds, attention_mask=mask, max_new_tokens=6, **GREEDY)
    assert torch.equal(of_embeds, expected[:, 9:])
    draw = {"do_sample": True, "num_return_sequences": 2, "pad_token_id": 0}
    assert model.generate(tokens, attention_mask=mask, max_new_tokens=3, **draw).shape == (6, 12)
    cache.batch_select_indices(torch.tensor([2, 0]))
    assert cache.state.position.tolist() == [14, 10]  # the last token is not read
    cache.batch_repeat_interleave(2)
    assert cache.state.position.tolist() == [14, 14, 10, 10]
    cache.reset()
    assert cache.state is None


TEXTS = ["The cat sat on the mat.", "The dog sat on the cat, and the mat was gone."]


@pytest.fixture(params=["subwords", "words"])
def vocabulary(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Vocabulary:
    """The vocabulary of a run; `load_language` returns it with a model."""
    made: Vocabulary = Vocabulary.train_byte_pairs(TEXTS, 280)
    if request.param == "words":
        made = Vocabulary.from_words("\n".join([*TEXTS, "<unk>", ""]))
    torch.manual_seed(0)
    model = LanguageModel(LanguageConfig(len(made), ("primal",), 16, 2, 2, 16, rank=4, primal_mode="decay")).eval()
    monkeypatch.setattr(language, "load_language", lambda folder: (model, made))
    return made


def test_a_run_becomes_a_folder_for_the_auto_classes(vocabulary: Vocabulary, tmp_path: Path) -> None:
    for part in from_run("run"):
        part.save_pretrained(tmp_path)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    texts = ["The cat sat on the mat.\n", "The dog"]
    prompts = [[vocabulary.end, *tokens] for tokens in vocabulary.encode(texts)]
    assert tokenizer(texts)["input_ids"] == prompts
    inputs = tokenizer(texts, return_tensors="pt", padding=True)
    new = model.generate(**inputs, max_new_tokens=5, do_sample=False, eos_token_id=None)[:, -5:]
    assert torch.equal(new, torch.tensor(list(generate(model.model, prompts, 5))).T)


def test_a_pipeline_continues_texts(vocabulary: Vocabulary) -> None:
    model, tokenizer = from_run("run")
    pipeline = hf.pipeline("text-generation", model=model, tokenizer=tokenizer, device="cpu")
    prompts = [[vocabulary.end, *tokens] for tokens in vocabulary.encode(TEXTS)]
    outputs = pipeline(TEXTS, batch_size=2, max_new_tokens=4, do_sample=False, eos_token_id=None)
    steps = zip(*generate(model.model, prompts, 4), strict=True)
    for output, prompt, new in zip(outputs, prompts, steps, strict=True):  # transformers drops the ends of lines
        expected = vocabulary.decode([*prompt[1:], *(token for token in new if token != vocabulary.end)])
        assert output[0]["generated_text"] == expected


def test_an_unknown_word_is_the_unknown_token() -> None:
    tokenizer = make_tokenizer(Vocabulary(json.dumps({"words": ["<eos>", "<unk>", "cat"]})))
    assert tokenizer("the cat\n")["input_ids"] == [0, 1, 2, 0]
