"""The language model as a PreTrainedModel: loss, `generate` with the streaming state for a cache, saving and loading.

Padding is never seen: what a left-padded batch generates is what its prompts generate one by one.
"""

from __future__ import annotations

import dataclasses
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import GenerationMixin, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from primal_attention.hf.cache import PrimalCache
from primal_attention.hf.configuration import PrimalConfig
from primal_attention.models.lm import LanguageModel
from primal_attention.nn.objective import ksvd_loss, primal_layers


class PrimalForCausalLM(PreTrainedModel, GenerationMixin):
    """`LanguageModel` in transformers' clothes; the embeddings serve at both ends."""

    config: PrimalConfig
    config_class = PrimalConfig
    base_model_prefix = "model"
    main_input_name = "input_ids"
    supports_gradient_checkpointing = True
    _no_split_modules = ["DecoderBlock"]  # noqa: RUF012 - as transformers wants it
    _is_stateful = True  # tokens cannot be taken back, which assisted generation would need
    _tied_weights_keys: dict[str, str] = {}  # noqa: RUF012 - one tensor under one name: nothing to tie

    def __init__(self, config: PrimalConfig) -> None:
        super().__init__(config)
        self.model = LanguageModel(config.language())
        self.post_init()
        self._made = True

    def initialize_weights(self) -> None:
        """A new model's layers have started themselves; what a checkpoint lacks is as in a new model."""
        if not getattr(self, "_made", False):
            return
        held = self.state_dict(keep_vars=True)
        lacking = [name for name, tensor in held.items() if not getattr(tensor, "_is_hf_initialized", False)]
        if lacking:
            fresh = LanguageModel(self.config.language()).state_dict(prefix="model.")
            with torch.no_grad():
                for name in lacking:
                    held[name].copy_(fresh[name])

    def get_input_embeddings(self) -> nn.Module:
        return self.model.embedding

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.model.embedding = cast(nn.Embedding, value)
        self.model.config = dataclasses.replace(self.model.config, vocabulary=len(self.model.embedding.weight))

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        past_key_values: PrimalCache | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        return_dict: bool | None = None,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast | tuple[Any, ...]:
        """Logits (B, N, vocabulary), and in training the mean loss plus η times the KSVD loss.

        attention_mask: (B, N), or (B, past + N) as `generate` keeps it; 0 is padding, which may stand anywhere.
        labels: (B, N), the tokens themselves; they are shifted here, and −100 counts for nothing.
        """
        refuse(kwargs)
        if input_ids is None:
            raise ValueError("input_ids is required: this model takes tokens, no inputs_embeds")
        if past_key_values is not None and not isinstance(past_key_values, PrimalCache):
            raise TypeError(f"past_key_values must be a PrimalCache (got {type(past_key_values).__name__})")
        wanted = self.config.use_cache and not self.training if use_cache is None else use_cache
        streams = past_key_values is not None or (wanted and self.model.streams)
        cache = past_key_values or (PrimalCache(self.config) if streams else None)
        hidden, state = self.model.hidden(
            input_ids,
            padding_of(attention_mask, input_ids),
            state=None if cache is None else cache.state,
            return_state=streams,
        )
        if cache is not None and state is not None:
            cache.keep(state, input_ids.shape[1])
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) and logits_to_keep else logits_to_keep
        hidden = hidden if isinstance(kept, int) else hidden[:, kept]
        logits = F.linear(hidden, self.model.embedding.weight)
        loss = None if labels is None else self.loss_of(logits, labels, **kwargs)
        output = CausalLMOutputWithPast(loss=loss, logits=logits, past_key_values=cache)  # type: ignore[arg-type]
        return output if return_dict is not False else output.to_tuple()

    def loss_of(
        self, logits: Tensor, labels: Tensor, num_items_in_batch: Tensor | int | None = None, **kw: Any
    ) -> Tensor:
        """The loss as transformers takes it; in training with the KSVD loss."""
        counted = {} if num_items_in_batch is None else {"num_items_in_batch": num_items_in_batch}
        loss = self.loss_function(logits, labels, vocab_size=self.config.vocab_size, **counted, **kw)
        if not (self.training and self.config.eta and primal_layers(self)):
            return loss
        # Gradients of several batches may be added up, each batch's loss being its part of the whole: so is this one's.
        part = 1.0 if num_items_in_batch is None else (labels[:, 1:] != -100).sum() / num_items_in_batch
        return loss + self.config.eta * part * ksvd_loss(self)

    def prepare_inputs_for_generation(  # type: ignore[override]
        self,
        input_ids: Tensor,
        next_sequence_length: int | None = None,
        past_key_values: PrimalCache | None = None,
        is_first_iteration: bool | None = False,
        **kwargs: Any,
    ) -> dict[str, Any]:
        inputs = super().prepare_inputs_for_generation(  # type: ignore[misc]
            input_ids,  # type: ignore[arg-type]
            next_sequence_length=next_sequence_length,
            past_key_values=past_key_values,
            is_first_iteration=is_first_iteration,
            **kwargs,
        )
        inputs.pop("position_ids", None)  # the tokens are counted by the state
        if past_key_values is not None and next_sequence_length == 1 and not is_first_iteration:
            inputs.pop("attention_mask", None)  # a token that was just generated is no padding
        return inputs

    def _prepare_cache_for_generation(  # type: ignore[override]
        self, generation_config: Any, model_kwargs: dict[str, Any], *rest: Any
    ) -> None:
        asked = generation_config.cache_implementation
        if asked is not None:
            raise ValueError(f"cache_implementation={asked!r} has no meaning here: the cache is the streaming state")
        if model_kwargs.get("past_key_values") is None and generation_config.use_cache is not False:
            if self.model.streams:
                model_kwargs["past_key_values"] = PrimalCache(self.config)
            else:  # a layer without a state: all of the text is read again at every step
                model_kwargs["use_cache"] = False


def padding_of(attention_mask: Tensor | None, input_ids: Tensor) -> Tensor | None:
    """(B, N) bool, True at padding, of the columns that are new; None where it is plain that there is none."""
    if attention_mask is None:
        return None
    if attention_mask.ndim != 2 or attention_mask.shape[1] < input_ids.shape[1]:
        raise ValueError(
            f"attention_mask must have shape (batch, tokens) (got {tuple(attention_mask.shape)} "
            f"for input_ids {tuple(input_ids.shape)})"
        )
    padding = attention_mask[:, -input_ids.shape[1] :] == 0
    if padding.device.type == "cpu" and not padding.any():  # elsewhere a look costs a wait
        return None
    return padding


def refuse(kwargs: dict[str, Any]) -> None:
    """Do not leave out in silence what was asked for."""
    for name in ("inputs_embeds", "output_hidden_states", "output_attentions"):
        value = kwargs.pop(name, None)
        if value is not None and value is not False:
            raise ValueError(f"{name} is not supported by this model")
    kwargs.pop("position_ids", None)
