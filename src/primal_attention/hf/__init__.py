"""The language model in transformers. Importing this package registers it with the Auto classes.

    import primal_attention.hf
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder)
    model, tokenizer = primal_attention.hf.from_run("runs/lm/wikipedia/primal-delta-conv4-gate-seed0")

Needs the extra [hf].
"""

from __future__ import annotations

try:
    from transformers import AutoConfig, AutoModelForCausalLM
except ImportError as missing:
    raise ImportError(
        f"primal_attention.hf needs transformers ({missing}): pip install 'primal-attention[hf]'"
    ) from None

from .configuration import PrimalConfig
from .model import PrimalCache, PrimalForCausalLM
from .run import from_model, from_run, make_tokenizer

AutoConfig.register(PrimalConfig.model_type, PrimalConfig)
AutoModelForCausalLM.register(PrimalConfig, PrimalForCausalLM)

__all__ = ["PrimalCache", "PrimalConfig", "PrimalForCausalLM", "from_model", "from_run", "make_tokenizer"]
