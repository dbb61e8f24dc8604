"""The language model in transformers' hands: the same logits and loss, saved and loaded, trained and resized."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

hf = pytest.importorskip("transformers", minversion="5")

from transformers import AutoConfig, AutoModelForCausalLM  # noqa: E402

from hf.kinds import KINDS, batch, make  # noqa: E402
from primal_attention import ksvd_loss  # noqa: E402
from primal_attention.hf import PrimalCache, PrimalConfig, PrimalForCausalLM  # noqa: E402
from primal_attention.hf.run import from_model  # noqa: E402
from primal_attention.models.lm import LanguageConfig, LanguageModel  # noqa: E402


def test_the_configuration_goes_there_and_back() -> None:
    config = LanguageConfig(50, attention=("softmax", "primal"), layers=2, primal_mode="delta", conv=3, max_length=77)
    assert PrimalConfig.of(config).language() == config
    made = AutoConfig.for_model("primal", vocab_size=50, hidden_size=64, attention="primal+")
    assert isinstance(made, PrimalConfig)
    assert (made.language().vocabulary, made.language().embed_dim, made.language().attention) == (50, 64, ("primal+",))


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_saved_and_loaded_is_the_same(kind: str, tmp_path: Path) -> None:
    model, (tokens, mask) = make(kind), batch()
    model.save_pretrained(tmp_path)
    assert (tmp_path / "model.safetensors").is_file()
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(loaded) is PrimalForCausalLM
    assert not loaded.training
    assert torch.equal(loaded(tokens, mask).logits, model(tokens, mask).logits)


@torch.no_grad()
def test_logits_are_the_language_models() -> None:
    torch.manual_seed(0)
    inner = LanguageModel(LanguageConfig(30, ("primal",), 16, 2, 2, 16, rank=4, primal_mode="decay")).eval()
    model, (tokens, mask) = from_model(inner), batch()
    assert torch.equal(model(tokens, mask).logits, inner(tokens, mask == 0))
    last = model(tokens, mask, logits_to_keep=1).logits
    torch.testing.assert_close(last, model(tokens, mask).logits[:, -1:])
    logits, cache = model(tokens, mask, return_dict=False)
    assert logits.shape == (3, 9, 30)
    assert isinstance(cache, PrimalCache)
    assert cache.get_seq_length() == 9


def test_what_a_checkpoint_lacks_is_as_in_a_new_model(tmp_path: Path) -> None:
    model = make("delta-conv-gate")
    weights = model.state_dict()
    lost = "model.blocks.0.attention.decay_logit"  # starts at its own places, not at random
    with torch.no_grad():
        weights[lost].fill_(9.0)
    model.save_pretrained(tmp_path, state_dict={k: v for k, v in weights.items() if k != lost})
    loaded, info = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert set(info["missing_keys"]) == {lost}
    found = loaded.state_dict()
    assert torch.equal(found[lost], make("delta-conv-gate").state_dict()[lost])
    assert all(torch.equal(found[k], v) for k, v in weights.items() if k != lost)


def test_the_loss_is_shifted_and_has_the_objective_in_training() -> None:
    model, (tokens, mask) = make("decay-conv-gate", eta=0.5), batch()
    labels = tokens.masked_fill(mask == 0, -100)
    output = model(tokens, mask, labels=labels)
    plain = F.cross_entropy(output.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
    torch.testing.assert_close(output.loss, plain)
    model.train()
    loss = model(tokens, mask, labels=labels).loss
    torch.testing.assert_close(loss, plain + 0.5 * ksvd_loss(model))
    # Two batches whose gradients are added up weigh as much as one.
    items = (labels[:, 1:] != -100).sum()
    total = objective = torch.zeros(())
    for row, seen, wanted in zip(tokens.split(1), mask.split(1), labels.split(1), strict=True):
        total = total + model(row, seen, labels=wanted, num_items_in_batch=items).loss
        objective = objective + ksvd_loss(model) * (wanted[:, 1:] != -100).sum() / items
    torch.testing.assert_close(total, plain + 0.5 * objective)


def test_checkpointing_changes_no_gradient() -> None:
    gradients = []
    for checkpointing in (False, True):
        model, (tokens, mask) = make("decay-conv-gate").train(), batch()
        if checkpointing:
            model.gradient_checkpointing_enable()
            assert model.model.gradient_checkpointing
        model(tokens, mask, labels=tokens).loss.backward()
        gradients.append([p.grad for p in model.parameters()])
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(a, b)


def test_the_vocabulary_can_grow(tmp_path: Path) -> None:
    model, (tokens, mask) = make("mean"), batch()
    before = model(tokens, mask).logits
    model.resize_token_embeddings(35, mean_resizing=False)
    assert model.config.vocab_size == 35
    torch.testing.assert_close(model(tokens, mask).logits[..., :30], before)
    model(torch.tensor([[34]]))
    model.save_pretrained(tmp_path)
    assert AutoModelForCausalLM.from_pretrained(tmp_path).model.config.vocabulary == 35


def test_the_trainer_trains(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    model, generator = make("decay-conv-gate", eta=0.1).train(), torch.Generator().manual_seed(0)
    rows = torch.randint(0, 30, (8, 1), generator=generator) + torch.arange(9)  # each token is the last one plus one
    data = [{"input_ids": row % 30, "labels": row % 30} for row in rows]
    arguments = hf.TrainingArguments(
        output_dir=str(tmp_path), max_steps=12, per_device_train_batch_size=4, gradient_accumulation_steps=2,
        learning_rate=1e-2, report_to=[], use_cpu=True, disable_tqdm=True, logging_steps=1, gradient_checkpointing=True,
    )  # fmt: skip
    trainer = hf.Trainer(model=model, args=arguments, train_dataset=data, eval_dataset=data)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert losses[-1] < 0.8 * losses[0]
    assert trainer.evaluate()["eval_loss"] < losses[0]
    trainer.save_model(str(tmp_path / "last"))
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "last")
    assert all(torch.equal(v.cpu(), loaded.state_dict()[k]) for k, v in model.state_dict().items())


def test_bad_input_is_one_line() -> None:
    model, (tokens, mask) = make("landmarks"), batch()
    with pytest.raises(ValueError, match="max_length=40 is exceeded by a sequence of 41 tokens"):
        model(torch.zeros(1, 41, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"tokens must lie in 0 … 29"):
        model(torch.tensor([[30]]))
    with pytest.raises(ValueError, match="at least one token"):
        model(torch.zeros(1, 0, dtype=torch.int64))
    with pytest.raises(ValueError, match="input_ids is required"):
        model()
    with pytest.raises(ValueError, match="output_attentions is not supported"):
        model(tokens, output_attentions=True)
    with pytest.raises(TypeError, match=r"past_key_values must be a PrimalCache \(got DynamicCache\)"):
        model(tokens, past_key_values=hf.DynamicCache())
    with pytest.raises(ValueError, match="attention_mask must have shape"):
        model(tokens, mask[:, :4])
    with pytest.raises(ValueError, match="tie_word_embeddings must be True"):
        PrimalConfig(tie_word_embeddings=False)
    with pytest.raises(ValueError, match="unknown attention 'sofmax'"):
        PrimalForCausalLM(PrimalConfig(attention="sofmax"))
    with pytest.raises(ValueError, match="primal_mode must be one of"):
        PrimalConfig(primal_mode="median")
