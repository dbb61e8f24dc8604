"""Imports the classes of this model from the library primal-attention."""

try:
    from primal_attention.hf import PrimalConfig, PrimalModel, PrimalForCausalLM, PrimalForSequenceClassification, PrimalForTokenClassification
except ImportError as missing:
    raise ImportError(
        f"this model needs the library primal-attention ({missing}): run pip install '.[hf]' in a clone of it"
    ) from None
