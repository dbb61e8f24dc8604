"""Tiny transformers models with random weights, and their inputs."""

from __future__ import annotations

from typing import Any

import torch
import transformers as hf

TEXT = {"vocab_size": 50, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 48}
IMAGE = {k: v for k, v in TEXT.items() if k != "vocab_size"} | {"image_size": 16, "patch_size": 4}
SMALL: dict[str, Any] = {"rank": 5, "landmarks": 6}


DISTIL = {"vocab_size": 50, "dim": 32, "n_layers": 3, "n_heads": 4, "hidden_dim": 48}
GPT2 = {"vocab_size": 50, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 64}
IDS = {"bos_token_id": 0, "eos_token_id": 49}
MODELS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "bert": (hf.BertModel, hf.BertConfig, TEXT),
    "roberta": (hf.RobertaModel, hf.RobertaConfig, TEXT | {"pad_token_id": 1}),
    "distilbert": (hf.DistilBertModel, hf.DistilBertConfig, DISTIL),
    "gpt2": (hf.GPT2LMHeadModel, hf.GPT2Config, GPT2 | IDS),
    "llama": (hf.LlamaForCausalLM, hf.LlamaConfig, TEXT | IDS | {"num_key_value_heads": 2}),
    "vit": (hf.ViTModel, hf.ViTConfig, IMAGE),
    "deit": (hf.DeiTModel, hf.DeiTConfig, IMAGE),
}


def make(kind: str, **changes: Any) -> Any:
    """Return a model in evaluation mode; `changes` go to its configuration."""
    torch.manual_seed(1)
    model, config, sizes = MODELS[kind]
    return model(config(**(sizes | changes))).eval()


ENCODERS = ("bert", "roberta", "distilbert")
DECODERS = ("gpt2", "llama")
IMAGES = ("vit", "deit")


def inputs(kind: str, batch: int = 2, tokens: int = 9) -> dict[str, torch.Tensor]:
    if kind in IMAGES:
        return {"pixel_values": torch.randn(batch, 3, 16, 16)}
    return {"input_ids": torch.randint(2, 48, (batch, tokens))}


def output(model: Any, **call: Any) -> torch.Tensor:
    """Hidden states or logits."""
    with torch.no_grad():
        return model(**call)[0]
