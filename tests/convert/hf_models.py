"""Tiny transformers models with random weights, and their inputs."""

from typing import Any

import torch
import transformers as hf

TEXT = {"vocab_size": 50, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 48}
IMAGE = {k: v for k, v in TEXT.items() if k != "vocab_size"} | {"image_size": 16, "patch_size": 4}
SMALL: dict[str, Any] = {"rank": 5, "landmarks": 6}


DISTIL = {"vocab_size": 50, "dim": 32, "n_layers": 3, "n_heads": 4, "hidden_dim": 48}
GPT2 = {"vocab_size": 50, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 64}
IDS = {"bos_token_id": 0, "eos_token_id": 49}
SPECIAL = IDS | {"pad_token_id": 0, "cls_token_id": 1, "sep_token_id": 2}
WHISPER = {"vocab_size": 50, "d_model": 32, "num_mel_bins": 8, "max_source_positions": 12, "max_target_positions": 16}
for side in ("encoder", "decoder"):
    WHISPER |= {f"{side}_layers": 3, f"{side}_attention_heads": 4, f"{side}_ffn_dim": 48}
WHISPER |= IDS | {"decoder_start_token_id": 0, "pad_token_id": 0}
MISTRAL = TEXT | IDS | {"num_key_value_heads": 2, "sliding_window": None}
MODELS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "bert": (hf.BertModel, hf.BertConfig, TEXT),
    "roberta": (hf.RobertaModel, hf.RobertaConfig, TEXT | {"pad_token_id": 1}),
    "distilbert": (hf.DistilBertModel, hf.DistilBertConfig, DISTIL),
    "gpt2": (hf.GPT2LMHeadModel, hf.GPT2Config, GPT2 | IDS),
    "llama": (hf.LlamaForCausalLM, hf.LlamaConfig, TEXT | IDS | {"num_key_value_heads": 2}),
    "mistral": (hf.MistralForCausalLM, hf.MistralConfig, MISTRAL),
    "qwen2": (hf.Qwen2ForCausalLM, hf.Qwen2Config, TEXT | IDS | {"num_key_value_heads": 2}),
    "electra": (hf.ElectraModel, hf.ElectraConfig, TEXT | {"embedding_size": 16}),
    "modernbert": (hf.ModernBertModel, hf.ModernBertConfig, TEXT | SPECIAL | {"global_attn_every_n_layers": 1}),
    "cliptext": (hf.CLIPTextModel, hf.CLIPTextConfig, TEXT | IDS),
    "clipvision": (hf.CLIPVisionModel, hf.CLIPVisionConfig, IMAGE),
    "whisper": (hf.WhisperModel, hf.WhisperConfig, WHISPER),
    "vit": (hf.ViTModel, hf.ViTConfig, IMAGE),
    "deit": (hf.DeiTModel, hf.DeiTConfig, IMAGE),
}


def make(kind: str, **changes: Any) -> Any:
    """Return a model in evaluation mode; `changes` go to its configuration."""
    torch.manual_seed(1)
    model, config, sizes = MODELS[kind]
    return model(config(**(sizes | changes))).eval()


ENCODERS = ("bert", "roberta", "distilbert", "electra", "modernbert")
DECODERS = ("gpt2", "llama", "mistral", "qwen2")
IMAGES = ("vit", "deit", "clipvision")
OTHERS = ("cliptext", "whisper")
ROTARY = ("llama", "mistral", "qwen2", "modernbert")


def inputs(kind: str, batch: int = 2, tokens: int = 9) -> dict[str, torch.Tensor]:
    if kind in IMAGES:
        return {"pixel_values": torch.randn(batch, 3, 16, 16)}
    if kind == "whisper":
        decoder_ids = torch.randint(2, 48, (batch, tokens))
        return {"input_features": torch.randn(batch, 8, 24), "decoder_input_ids": decoder_ids}
    return {"input_ids": torch.randint(2, 48, (batch, tokens))}


def output(model: Any, **call: Any) -> torch.Tensor:
    """Hidden states or logits."""
    with torch.no_grad():
        return model(**call)[0]
