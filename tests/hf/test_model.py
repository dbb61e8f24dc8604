"""The language model in transformers: the same logits and loss, saved and loaded, trained and resized."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
import transformers as hf
from transformers import AutoConfig, AutoModelForCausalLM

from hf.small_models import MODES, batch, make
from primal_attention import ksvd_loss
from primal_attention.hf import PrimalCache, PrimalConfig, PrimalForCausalLM, PrimalModel, from_model
from primal_attention.models.lm import LanguageConfig, LanguageModel


def test_the_configuration_converts_both_ways() -> None:
    config = LanguageConfig(50, attention=("softmax", "primal"), layers=2, primal_mode="delta", conv=3, max_length=77)
    assert from_model(LanguageModel(config)).config.language() == config.resolved()
    default = LanguageConfig().resolved()
    assert PrimalConfig().language() == default
    assert (default.primal_mode, default.conv, default.gate) == ("delta", 4, True)
    made = AutoConfig.for_model("primal", vocab_size=50, hidden_size=64, attention="primal+")
    assert isinstance(made, PrimalConfig)
    assert (made.language().vocabulary, made.language().embed_dim, made.language().attention) == (50, 64, ("primal+",))


@pytest.mark.parametrize("mode", MODES)
@torch.no_grad()
def test_a_saved_model_loads_unchanged(mode: str, tmp_path: Path) -> None:
    model, (tokens, mask) = make(mode), batch()
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(loaded) is PrimalForCausalLM
    assert not loaded.training
    assert torch.equal(loaded(tokens, mask).logits, model(tokens, mask).logits)
    narrow = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert narrow.generate(tokens, attention_mask=mask, max_new_tokens=2, pad_token_id=0).shape == (3, 11)


@torch.no_grad()
def test_logits_are_those_of_the_language_model() -> None:
    torch.manual_seed(0)
    inner = LanguageModel(LanguageConfig(30, ("primal",), 16, 2, 2, 16, rank=4, primal_mode="decay")).eval()
    model, (tokens, mask) = from_model(inner), batch()
    full = model(tokens, mask).logits
    assert torch.equal(full, inner(tokens, mask == 0))
    torch.testing.assert_close(model(tokens, mask, logits_to_keep=1).logits, full[:, -1:])
    torch.testing.assert_close(model(tokens, mask, logits_to_keep=torch.tensor([2, 5])).logits, full[:, [2, 5]])
    logits, cache = model(tokens, mask, return_dict=False)
    assert logits.shape == (3, 9, 30)
    assert isinstance(cache, PrimalCache)
    assert cache.get_seq_length() == 9


def test_parameters_missing_in_a_checkpoint_are_initialised(tmp_path: Path) -> None:
    model = make("delta-conv-gate")
    weights = model.state_dict()
    missing = "model.blocks.0.attention.decay_logit"  # initialised without random numbers
    with torch.no_grad():
        weights[missing].fill_(9.0)
    model.save_pretrained(tmp_path, state_dict={k: v for k, v in weights.items() if k != missing})
    loaded, info = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert set(info["missing_keys"]) == {missing}
    state = loaded.state_dict()
    assert torch.equal(state[missing], make("delta-conv-gate").state_dict()[missing])
    assert all(torch.equal(state[k], v) for k, v in weights.items() if k != missing)


def test_the_loss_is_shifted_and_includes_the_objective_in_training() -> None:
    model, (tokens, mask) = make("decay-conv-gate", eta=0.5), batch()
    labels = tokens.masked_fill(mask == 0, -100)
    output = model(tokens, mask, labels=labels)
    plain = F.cross_entropy(output.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
    torch.testing.assert_close(output.loss, plain)
    model.train()
    loss = model(tokens, mask, labels=labels).loss
    torch.testing.assert_close(loss, plain + 0.5 * ksvd_loss(model))
    # Accumulated over single rows, the losses add up to that of one batch.
    items = (labels[:, 1:] != -100).sum()
    total = objective = torch.zeros(())
    for row, row_mask, row_labels in zip(tokens.split(1), mask.split(1), labels.split(1), strict=True):
        total = total + model(row, row_mask, labels=row_labels, num_items_in_batch=items).loss
        objective = objective + ksvd_loss(model) * (row_labels[:, 1:] != -100).sum() / items
    torch.testing.assert_close(total, plain + 0.5 * objective)


def test_gradient_checkpointing_gives_the_same_gradients() -> None:
    gradients = []
    for checkpointing in (False, True):
        model, (tokens, mask) = make("decay-conv-gate").train(), batch()
        if checkpointing:
            model.gradient_checkpointing_enable()
            assert model.model.gradient_checkpointing
        calls = []
        model.model.blocks[0].attention.register_forward_hook(lambda *_, calls=calls: calls.append(0))
        model(tokens, mask, labels=tokens).loss.backward()
        assert len(calls) == 1 + checkpointing  # the backward pass computes the block again
        gradients.append([p.grad for p in model.parameters()])
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("mode", ["default", "hybrid"])
def test_a_model_with_a_mask_compiles_into_one_graph(mode: str) -> None:
    model, (tokens, mask) = make(mode).train(), batch()
    call = {"input_ids": tokens, "attention_mask": mask, "labels": tokens}
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(**call).loss, model(**call).loss)


def test_the_vocabulary_can_be_extended(tmp_path: Path) -> None:
    model, (tokens, mask) = make("mean"), batch()
    before = model(tokens, mask).logits
    model.resize_token_embeddings(35, mean_resizing=False)
    torch.testing.assert_close(model(tokens, mask).logits[..., :30], before)
    model(torch.tensor([[34]]))
    model.save_pretrained(tmp_path)
    assert AutoModelForCausalLM.from_pretrained(tmp_path).model.config.vocabulary == 35


def test_the_trainer_reduces_the_loss(tmp_path: Path) -> None:
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


BAD_INPUT = [
    (lambda m: m(), "exactly one of input_ids and inputs_embeds is required"),
    (lambda m: m(inputs_embeds=torch.zeros(1, 3, 15)), "embeddings must have shape"),
    (lambda m: PrimalModel(m.config)(batch()[0], labels=batch()[0]), "PrimalModel takes no labels"),
    (lambda m: PrimalConfig(num_attention_heads=0), "num_heads must be at least 1"),
    (lambda m: PrimalConfig(positions="rotary"), "positions='rotary' needs a softmax layer"),
    (lambda m: m(batch()[0], output_attentions=True), "output_attentions is not supported"),
    (lambda m: m(batch()[0], past_key_values=hf.DynamicCache()), "must be a PrimalCache .got DynamicCache"),
    (lambda m: m(batch()[0], batch()[1][:, :4]), "attention_mask must have shape"),
    (lambda m: m(batch()[0], position_ids=torch.arange(batch()[0].shape[1])[None] % 4), "packed sequences are not"),
    (lambda m: make("flow").generate(inputs_embeds=torch.zeros(1, 3, 16), max_new_tokens=2), "from input_ids only"),
    (lambda m: PrimalConfig(tie_word_embeddings=False), "tie_word_embeddings must be True"),
    (lambda m: PrimalConfig(primal_mode="median"), "primal_mode must be one of"),
    (lambda m: m.generate(batch()[0], max_new_tokens=2, cache_implementation="static"), "'static' is not supported"),
    (lambda m: m.generate(batch()[0], max_new_tokens=40), "max_length=40 is exceeded by a sequence of 41 tokens"),
    (lambda m: m.generate(batch()[0][:1], max_new_tokens=2, assistant_model=make("mean")), "stateful"),
]


@pytest.mark.parametrize(("call", "message"), BAD_INPUT, ids=[message for _, message in BAD_INPUT])
def test_bad_input_is_one_line(call, message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        call(make("landmarks"))
