"""Tiny transformers models with random weights, and their inputs."""

from __future__ import annotations

from typing import Any

import torch
import transformers as hf

TEXT = {"vocab_size": 50, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 48}
IMAGE = {k: v for k, v in TEXT.items() if k != "vocab_size"} | {"image_size": 16, "patch_size": 4}
SMALL: dict[str, Any] = {"rank": 5, "landmarks": 6}


def make(kind: str, **changes: Any) -> Any:
    """A model in evaluation mode; `changes` go to its configuration."""
    torch.manual_seed(1)
    if kind == "bert":
        model = hf.BertModel(hf.BertConfig(**(TEXT | changes)))
    elif kind == "roberta":
        model = hf.RobertaModel(hf.RobertaConfig(**(TEXT | {"pad_token_id": 1} | changes)))
    elif kind == "distilbert":
        sizes = {"vocab_size": 50, "dim": 32, "n_layers": 3, "n_heads": 4, "hidden_dim": 48}
        model = hf.DistilBertModel(hf.DistilBertConfig(**(sizes | changes)))
    elif kind == "gpt2":
        sizes = {"vocab_size": 50, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 64}
        model = hf.GPT2LMHeadModel(hf.GPT2Config(**(sizes | {"bos_token_id": 0, "eos_token_id": 49} | changes)))
    elif kind == "llama":
        sizes = TEXT | {"num_key_value_heads": 2, "max_position_embeddings": 64}
        model = hf.LlamaForCausalLM(hf.LlamaConfig(**(sizes | {"bos_token_id": 0, "eos_token_id": 49} | changes)))
    elif kind == "vit":
        model = hf.ViTModel(hf.ViTConfig(**(IMAGE | changes)))
    else:
        model = hf.DeiTModel(hf.DeiTConfig(**(IMAGE | changes)))
    return model.eval()


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
