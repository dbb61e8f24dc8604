"""The language model in transformers. Importing this package registers it with the Auto classes.

    import primal_attention.hf
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder)
    model, tokenizer = primal_attention.hf.from_run("runs/lm/wikipedia/primal-delta-conv4-gate-seed0")

Needs the extra [hf].
"""

from __future__ import annotations

try:
    import transformers
except ImportError as missing:
    message = f"primal_attention.hf needs transformers ({missing}): pip install 'primal-attention[hf]'"
    raise ImportError(message) from None

from .configuration import AUTO_CLASSES, PrimalConfig
from .model import (
    PrimalCache,
    PrimalForCausalLM,
    PrimalForSequenceClassification,
    PrimalForTokenClassification,
    PrimalModel,
)
from .run import from_model, from_run, make_tokenizer

transformers.AutoConfig.register(PrimalConfig.model_type, PrimalConfig)
for auto_class, name in AUTO_CLASSES.items():
    if auto_class != "AutoConfig":
        getattr(transformers, auto_class).register(PrimalConfig, globals()[name])

__all__ = [
    "PrimalCache",
    "PrimalConfig",
    "PrimalForCausalLM",
    "PrimalForSequenceClassification",
    "PrimalForTokenClassification",
    "PrimalModel",
    "from_model",
    "from_run",
    "make_tokenizer",
]
