"""The Auto classes, folders that load without importing the library, PEFT, int8 weights, and earlier folders."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import torchao.quantization as torchao
import transformers as hf

from hf.small_models import MODES, batch, make, train
from primal_attention import PrimalAttention
from primal_attention.hf import PrimalConfig, PrimalForCausalLM
from primal_attention.hf.configuration import AUTO_CLASSES
from primal_attention.models.lm import LanguageModel

HEADS = ["AutoModelForSequenceClassification", "AutoModelForTokenClassification"]


@pytest.mark.parametrize("mode", [mode for mode in MODES if mode != "flow"])
@torch.no_grad()
def test_embeddings_give_the_logits_of_their_tokens_and_hidden_states_of_every_layer(mode: str) -> None:
    model, (tokens, mask) = make(mode), batch()
    plain = model(tokens, mask, output_hidden_states=True)
    embeds = model.get_input_embeddings()(tokens).masked_fill(mask[..., None] == 0, float("nan"))
    for use_cache in (False, True):
        same = model(inputs_embeds=embeds, attention_mask=mask, output_hidden_states=True, use_cache=use_cache)
        valid = mask.bool()
        torch.testing.assert_close(same.logits[valid], plain.logits[valid])
        assert len(same.hidden_states) == 3  # two layers
        for a, b in zip(same.hidden_states, plain.hidden_states, strict=True):
            torch.testing.assert_close(a, b)
    block = model.model.blocks[1](plain.hidden_states[1], mask == 0)
    last = torch.nn.functional.linear(model.model.norm(block), model.model.embedding.weight)
    if mode != "hybrid":  # of the bare blocks, softmax and convolutions need the padding behind the tokens
        torch.testing.assert_close(last[2], plain.logits[2])
    assert model(tokens).hidden_states is None


@pytest.mark.parametrize("mode", ["default", "hybrid"])
def test_the_auto_classes_share_a_folder_and_classifiers_ignore_padding_and_train(mode: str, tmp_path: Path) -> None:
    model, (tokens, mask) = make(mode), batch()
    model.save_pretrained(tmp_path)
    base = hf.AutoModel.from_pretrained(tmp_path)
    hidden = base(tokens, mask).last_hidden_state
    assert torch.equal(hidden, model(tokens, mask, output_hidden_states=True).hidden_states[-1])
    base.save_pretrained(tmp_path / "base")
    again = hf.AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    assert torch.equal(again(tokens, mask).logits, model(tokens, mask).logits)
    for name in HEADS:
        torch.manual_seed(0)
        classifier = getattr(hf, name).from_pretrained(tmp_path, num_labels=3, eta=0.1)
        together = classifier(tokens, mask).logits
        right = [row[row_mask == 1] for row, row_mask in zip(tokens, mask, strict=True)]
        right_mask = torch.arange(9) < torch.tensor([len(row) for row in right])[:, None]
        rows = torch.nn.utils.rnn.pad_sequence(right, batch_first=True)
        moved = classifier(rows, right_mask.long()).logits
        is_sequence = "Sequence" in name
        assert together.shape == ((3, 3) if is_sequence else (3, 9, 3))
        torch.testing.assert_close(*((moved, together) if is_sequence else (moved[right_mask], together[mask.bool()])))
        labels = torch.tensor([0, 1, 2]) if is_sequence else (tokens % 3).masked_fill(mask == 0, -100)
        losses = train(classifier, 30, 0.02, input_ids=tokens, attention_mask=mask, labels=labels)
        assert losses[-1] < 0.3 * losses[0]
        classifier.save_pretrained(tmp_path / name)
        loaded = getattr(hf, name).from_pretrained(tmp_path / name)
        assert torch.equal(loaded(tokens, mask).logits, classifier(tokens, mask).logits)


# Each load is the first of its process. The processes are forks of one that has imported transformers alone.
LOAD = """
import os, sys
import torch, transformers
folder, *names = sys.argv[1:]
for name in [*names, "none"]:
    if (process := os.fork()) == 0:
        try:
            assert "primal_attention" not in sys.modules
            if name == "none":
                sys.modules["primal_attention"] = None
            auto = getattr(transformers, name if name != "none" else names[0])
            model = auto.from_pretrained(f"{folder}/model", trust_remote_code=True)
            model.save_pretrained(f"{folder}/{name}")
            print(type(model).__name__, flush=True)
        except Exception as error:
            print(f"{type(error).__name__}: {error}", flush=True)
        os._exit(0)
    os.waitpid(process, 0)
"""


def test_a_folder_loads_without_importing_the_library(tmp_path: Path) -> None:
    make("default").save_pretrained(tmp_path / "model")
    names = [name for name in AUTO_CLASSES if name != "AutoConfig"]
    environment = {**os.environ, "HF_MODULES_CACHE": str(tmp_path / "modules"), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-W", "ignore", "-c", LOAD, str(tmp_path), *names]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    *printed, last = done.stdout.splitlines()
    assert printed == [AUTO_CLASSES[name] for name in names], done.stdout + done.stderr
    for name in names:
        files = {file.name for file in (tmp_path / name).iterdir()}
        assert {"config.json", "model.safetensors", "modeling_primal.py"} <= files
        assert not {"model.py", "configuration.py"} & files  # no copy of the library's source
    assert last.startswith("ImportError: this model needs the library primal-attention")
    assert "pip install '.[hf]' in a clone" in last


@pytest.mark.parametrize("mode", MODES)
def test_a_block_on_the_disk_gives_the_same_logits_and_text(mode: str, tmp_path: Path) -> None:
    model, (tokens, mask) = make(mode), batch()
    model.save_pretrained(tmp_path)
    places = {"model.embedding": "cpu", "model.blocks.0": "cpu", "model.blocks.1": "disk", "model.norm": "cpu"}

    def load() -> Any:
        return PrimalForCausalLM.from_pretrained(tmp_path, device_map=places, offload_folder=tmp_path / "blocks").eval()

    settings: Any = {"attention_mask": mask, "max_new_tokens": 3, "pad_token_id": 0, "do_sample": False}
    called = []
    offloaded = load()
    offloaded.model.blocks[0].register_forward_hook(lambda *_: called.append(0))
    torch.testing.assert_close(offloaded(tokens, mask).logits, model(tokens, mask).logits)
    assert torch.equal(offloaded.generate(tokens, **settings), model.generate(tokens, **settings))
    assert len(called) == 4  # hooks of blocks run with and without a cache
    places["model.embedding"] = "disk"
    with pytest.raises(ValueError, match=r"device_map must not offload model\.embedding"):
        load()(tokens)


@pytest.mark.parametrize("mode", MODES)
def test_lora_on_all_linear_maps_and_prompt_tuning_train(mode: str, tmp_path: Path) -> None:
    tokens, mask = batch()
    labels = tokens.masked_fill(mask == 0, -100)
    for settings in (
        peft.LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM"),
        peft.PromptTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM"),
    ):
        # Adapters cannot change the embeddings, so those are as large as after training.
        model = peft.get_peft_model(make(mode, initializer_range=0.5), settings)
        losses = train(model, 15, 0.05, input_ids=tokens, attention_mask=mask, labels=labels)
        assert losses[-1] < losses[0] - 0.1
        trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        assert not [name for name, p in trained.items() if "lora_A" not in name and not p.grad.abs().sum() > 0]
        if mode != "flow":  # without a state, every step would need the embeddings of the text again
            drawn = model.generate(input_ids=tokens, attention_mask=mask, max_new_tokens=4, pad_token_id=0)
            assert drawn.shape == (3, 13)
        if isinstance(settings, peft.LoraConfig):
            maps = [m for m in make(mode).modules() if isinstance(m, torch.nn.Linear)]
            assert len([name for name in trained if "lora_B" in name]) == len(maps)
            expected = model(input_ids=tokens, attention_mask=mask).logits
            model.merge_and_unload().save_pretrained(tmp_path)
            merged = hf.AutoModelForCausalLM.from_pretrained(tmp_path)
            torch.testing.assert_close(merged(tokens, mask).logits, expected, rtol=1e-4, atol=1e-4)  # float32, new sums


def test_a_folder_of_an_earlier_version_keeps_its_meaning(tmp_path: Path) -> None:
    model, (tokens, mask) = make("mean", initializer_range=None), batch()
    model.save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    new = json.loads(file.read_text())
    assert new["initializer_range"] is None
    absent = ("initializer_range", "auto_map", "primal_mode", "conv", "gate", "primal_heads", "attention")
    earlier = {name: value for name, value in new.items() if name not in absent}
    file.write_text(json.dumps({**earlier, "positions": "rotary"}))
    loaded = hf.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert (loaded.config.primal_mode, loaded.config.conv, loaded.config.positions) == ("mean", 0, "none")
    assert torch.equal(loaded(tokens, mask).logits, model(tokens, mask).logits)
    assert torch.equal(loaded(tokens, mask).logits, LanguageModel.forward(model.model, tokens, mask == 0))


@pytest.mark.parametrize("mode", ["default", "decay-conv-gate", "landmarks", "layer"])
@torch.no_grad()
def test_int8_weights_cost_less_than_two_percent(mode: str, tmp_path: Path) -> None:
    """The error of rounding each row to 256 steps is 0.5 % of the layer's output and up to 1.3 % of the logits."""
    torch.manual_seed(0)
    tokens = torch.randint(0, 500, (2, 24))
    if mode == "layer":
        model, inputs = PrimalAttention(64, 4, rank=8, landmarks=8).eval(), torch.randn(2, 24, 64)
    else:
        sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2, "intermediate_size": 128}
        config = PrimalConfig(500, **sizes, **{"rank": 8, "landmarks": 8, **MODES[mode]})
        model, inputs = PrimalForCausalLM(config).eval(), tokens
        model.save_pretrained(tmp_path)
    full = model(inputs) if mode == "layer" else model(inputs).logits
    torchao.quantize_(model, torchao.Int8WeightOnlyConfig())
    assert not [m for m in model.modules() if type(m) is torch.nn.Linear and type(m.weight) is torch.nn.Parameter]
    rounded = model(inputs) if mode == "layer" else model(inputs).logits
    assert 0 < (rounded - full).norm() / full.norm() < 0.02
    if mode != "layer":
        settings = hf.TorchAoConfig(torchao.Int8WeightOnlyConfig())
        loaded = hf.AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=settings)
        assert (loaded(tokens).logits - full).norm() / full.norm() < 0.02
        assert loaded.generate(tokens, max_new_tokens=3, do_sample=False, pad_token_id=0).shape == (2, 27)
