"""The configuration of the language model under the names of transformers, as stored in config.json."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig

from primal_attention.models.lm import LanguageConfig
from primal_attention.nn.blocks import attention_names

# Fields of LanguageConfig that have another name in transformers.
RENAMED = {
    "vocabulary": "vocab_size",
    "embed_dim": "hidden_size",
    "num_heads": "num_attention_heads",
    "layers": "num_hidden_layers",
    "ffn_dim": "intermediate_size",
    "activation": "hidden_act",
    "max_length": "max_context",  # max_length is an argument of `generate` there
}
NAMES = {f.name: RENAMED.get(f.name, f.name) for f in dataclasses.fields(LanguageConfig)}

# What a config.json without `initializer_range` means: the defaults of the version that wrote it.
EARLIER_DEFAULTS = {
    "attention": ["primal"],
    "primal_mode": "mean",
    "positions": "rotary",
    "initializer_range": None,
}

# The classes of the Auto classes, written to config.json: `trust_remote_code=True` finds them in `CODE_FILE`.
AUTO_CLASSES = {
    "AutoConfig": "PrimalConfig",
    "AutoModel": "PrimalModel",
    "AutoModelForCausalLM": "PrimalForCausalLM",
    "AutoModelForSequenceClassification": "PrimalForSequenceClassification",
    "AutoModelForTokenClassification": "PrimalForTokenClassification",
}
CODE_FILE = "modeling_primal.py"
CODE = f'''"""Imports the classes of this model from the library primal-attention."""

try:
    from primal_attention.hf import {", ".join(AUTO_CLASSES.values())}
except ImportError as missing:
    raise ImportError(
        f"this model needs the library primal-attention ({{missing}}): run pip install '.[hf]' in a clone of it"
    ) from None
'''


class PrimalConfig(PreTrainedConfig):
    """Configuration of the models: the fields of `LanguageConfig` under the names of transformers.

    Without `primal_mode` the Primal layers use the delta rule with convolution 4, a gate, half the heads and a rank of
    half the head width (see `LanguageConfig`).
    Attributes whose argument is None are set to the value that it stands for.

    Args:
        vocab_size: number of tokens.
        attention: one name for all layers, a name with a plus for the last layer only, or one name per layer.
        hidden_size: width of the tokens.
        num_attention_heads: heads of each layer.
        num_hidden_layers: number of layers.
        intermediate_size: hidden width of the MLPs.
        hidden_act: activation of the MLPs, "gelu", "relu" or "glu".
        dropout: as in `LanguageConfig`.
        primal_mode: "mean", "landmarks", "decay" or "delta"; None is the setting above.
        primal_heads: heads of the Primal layers; None is `num_attention_heads` if `primal_mode` is set.
        rank: directions of the Primal layers; None is 30 if `primal_mode` is set.
        landmarks: landmarks of the mode "landmarks".
        max_context: the longest text of the mode "landmarks"; the other modes have no limit.
        conv: kernel of a short causal convolution at each Primal layer; 0 is none, None too if `primal_mode` is set.
        gate: multiply each Primal layer's output by a gate; None is no gate if `primal_mode` is set.
        gate_activation: "silu" or "sigmoid".
        conv_layers: layers with convolution and gate, "primal" or "all".
        positions: "rotary" (needs a softmax layer), "sinusoidal" or "none"; None is what the layers need.
        initializer_range: standard deviation of new embeddings; None is as in `LanguageConfig`.
        eta: weight of the KSVD loss, which is added to the loss in training.
        use_cache: return the streaming state.
        bos_token_id: token that begins a text.
        eos_token_id: token that ends a text.
        pad_token_id: token at padding.
        tie_word_embeddings: must be True.
        kwargs: arguments of `PreTrainedConfig`.
    """

    model_type = "primal"

    def __init__(
        self,
        vocab_size: int = 8192,
        attention: str | Sequence[str] = "primal",
        *,
        eta: float = 5e-5,
        use_cache: bool = True,
        bos_token_id: int | None = None,
        eos_token_id: int | None = None,
        pad_token_id: int | None = None,
        tie_word_embeddings: bool = True,
        **kwargs: Any,
    ) -> None:
        if not tie_word_embeddings:
            raise ValueError("tie_word_embeddings must be True: input and output embeddings are one tensor here")
        if kwargs.pop("conv_place", "beside") != "beside":  # of an earlier version
            raise ValueError("conv_place='before' was removed: convolutions are added to the output of a layer")
        fields = {own: kwargs.pop(name) for own, name in NAMES.items() if name in kwargs}
        names = (attention,) if isinstance(attention, str) else tuple(attention)
        language = LanguageConfig(vocab_size, names, **fields).resolved()  # raises for wrong values
        for own, name in NAMES.items():
            setattr(self, name, getattr(language, own))
        self.attention = list(names)
        self.eta, self.use_cache, self.tie_word_embeddings = eta, use_cache, tie_word_embeddings
        self.bos_token_id, self.eos_token_id, self.pad_token_id = bos_token_id, eos_token_id, pad_token_id
        super().__init__(**kwargs)
        self.auto_map = {name: f"{Path(CODE_FILE).stem}.{value}" for name, value in AUTO_CLASSES.items()}

    def language(self) -> LanguageConfig:
        """Return the configuration of `LanguageModel`."""
        fields: dict[str, Any] = {own: getattr(self, name) for own, name in NAMES.items()}
        return LanguageConfig(**{**fields, "attention": tuple(self.attention)})

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """Return the configuration of a config.json, also of one that an earlier version wrote."""
        if "initializer_range" not in config_dict:
            config_dict = {**EARLIER_DEFAULTS, **config_dict}
            names = attention_names(tuple(config_dict["attention"]), config_dict.get("num_hidden_layers", 6))
            if config_dict["positions"] == "rotary" and "softmax" not in names:
                config_dict["positions"] = "none"  # without softmax layers it had no effect
        return super().from_dict(config_dict, **kwargs)

    def save_pretrained(self, save_directory: str | os.PathLike[str], push_to_hub: bool = False, **kwargs: Any) -> None:
        """Write config.json and the file that lets `trust_remote_code=True` import the library."""
        super().save_pretrained(save_directory, push_to_hub=push_to_hub, **kwargs)
        Path(save_directory, CODE_FILE).write_text(CODE, encoding="utf-8")

    @classmethod
    def register_for_auto_class(cls, auto_class: Any = "AutoConfig") -> None:
        """Do nothing: `save_pretrained` writes the code file itself, no copy of this module."""
