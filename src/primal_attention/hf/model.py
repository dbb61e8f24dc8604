"""The language model in transformers: hidden states, next tokens, and classes of sequences and of tokens.

`generate` has the streaming state as its cache. Padding is ignored: a left-padded batch generates what its prompts
generate one by one. All classes hold the same `LanguageModel` as `model`, so each loads the folders of the others.
"""

from __future__ import annotations

import dataclasses
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import Cache, GenerationMixin, PreTrainedModel
from transformers.modeling_outputs import (
    BaseModelOutputWithPast,
    CausalLMOutputWithPast,
    SequenceClassifierOutputWithPast,
    TokenClassifierOutput,
)

from primal_attention.convert.hf_cache import PrimalSlot
from primal_attention.hf.configuration import PrimalConfig
from primal_attention.models.lm import LanguageModel, LanguageState
from primal_attention.nn.objective import ksvd_loss, primal_layers
from primal_attention.utils.pretrained import pretrained_path


class PrimalCache(Cache):
    """The streaming state of the model, one slot per block. Beam search and repeated or selected rows work on it.

    A slot has the state of its block and the number of tokens that each sequence has read. Its length includes padding.
    Only the keys and values of softmax layers grow with the text.

    Args:
        config: the configuration of the model.
    """

    layers: list[PrimalSlot]  # type: ignore[assignment]

    def __init__(self, config: PrimalConfig) -> None:
        super().__init__(layers=[PrimalSlot() for _ in range(config.num_hidden_layers)])

    @property
    def state(self) -> LanguageState | None:
        """The state as `LanguageModel` takes it; None before the first token."""
        slots: list[Any] = [slot.state for slot in self.layers]
        if slots[0] is None:
            return None
        return LanguageState(tuple(block for block, _ in slots), slots[0][1])

    def store(self, state: LanguageState, columns: int) -> None:
        """Store the state after `columns` more columns of input."""
        for slot, block in zip(self.layers, state.blocks, strict=True):
            slot.state = (block, state.position)
            slot.length += columns


class PrimalPreTrainedModel(PreTrainedModel):
    """Base class of the models: the language model, loading, the forward pass and the loss."""

    config: PrimalConfig
    config_class = PrimalConfig
    base_model_prefix = "model"
    main_input_name = "input_ids"
    supports_gradient_checkpointing = True
    output_class: type[Any] = BaseModelOutputWithPast
    has_score = False  # a linear map from hidden states to `num_labels` classes
    _no_split_modules = ["DecoderBlock"]  # noqa: RUF012 - the type that transformers expects
    _is_stateful = True  # the state cannot be rolled back, which assisted generation needs
    _tied_weights_keys: dict[str, str] = {}  # noqa: RUF012 - one tensor under one name: nothing to tie

    def __init__(self, config: PrimalConfig) -> None:
        super().__init__(config)
        self.model = LanguageModel(config.language())
        self.output_names = [field.name for field in dataclasses.fields(self.output_class)]
        if self.has_score:
            self.num_labels = cast(int, config.num_labels)
            self.score = nn.Linear(config.hidden_size, self.num_labels)
        self.post_init()
        self._is_built = True

    def initialize_weights(self) -> None:
        """Initialise what a checkpoint lacks as in a new model. The layers of a new model initialise themselves."""
        if not getattr(self, "_is_built", False):
            return
        state = self.state_dict(keep_vars=True)
        missing = [name for name, tensor in state.items() if not getattr(tensor, "_is_hf_initialized", False)]
        if missing:
            initial = type(self)(self.config).state_dict()
            with torch.no_grad():
                for name in missing:
                    state[name].copy_(initial[name])

    def get_input_embeddings(self) -> nn.Module:
        return self.model.embedding

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.model.embedding = cast(nn.Embedding, value)
        self.model.config = dataclasses.replace(self.model.config, vocabulary=len(self.model.embedding.weight))

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, *args: Any, **kwargs: Any) -> Any:
        """Load a folder, a model of the Hub ("owner/name"), or a model that the package includes, by its name."""
        source = pretrained_model_name_or_path
        if isinstance(source, str) and "/" not in source:
            source = pretrained_path(source)
        return super().from_pretrained(source, *args, **kwargs)

    @classmethod
    def register_for_auto_class(cls, auto_class: Any = "AutoModel") -> None:
        """Do nothing: the configuration writes the code file, no copy of this module."""

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        past_key_values: PrimalCache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
        position_ids: Tensor | None = None,
        return_dict: bool | None = None,
        **kwargs: Any,
    ) -> Any:
        """Return logits and, with labels, the mean loss; in training plus η times the KSVD loss.

        Args:
            input_ids: Tokens (B, N).
            attention_mask: (B, N), or (B, past + N) as in `generate`; 0 is padding, anywhere in a row.
            past_key_values: State after earlier tokens; it is updated.
            inputs_embeds: Rows of the input embeddings (B, N, hidden_size) instead of tokens.
            labels: Causal: the tokens (B, N), which are shifted here. Classes of tokens (B, N) or of sequences (B,).
                −100 is ignored. `PrimalModel` takes none.
            use_cache: Return the state; None takes the configuration's value outside training.
            logits_to_keep: Number of last positions, or their indices, with logits; 0 is all, 1 each row's last token.
            output_hidden_states: Return the input of each layer and the last hidden state; None takes the
                configuration's value.
            output_attentions: Not supported.
            position_ids: Ignored, because the state counts the tokens, but those of packed sequences are refused.
            return_dict: False returns a tuple.
            **kwargs: Arguments of the loss function.
        """
        if output_attentions:
            raise ValueError("output_attentions is not supported by this model: its layers form no attention matrices")
        tokens = input_ids if inputs_embeds is None else inputs_embeds
        if tokens is None or (input_ids is not None and inputs_embeds is not None):
            raise ValueError("exactly one of input_ids and inputs_embeds is required")
        if past_key_values is not None and not isinstance(past_key_values, PrimalCache):
            raise TypeError(f"past_key_values must be a PrimalCache (got {type(past_key_values).__name__})")
        many = position_ids is not None and position_ids.shape[-1] > 1 and not torch.compiler.is_compiling()
        if many and attention_mask is None and bool((position_ids.diff() < 0).any()):  # type: ignore[union-attr]
            raise ValueError("position_ids of packed sequences are not supported: pad the batch instead")
        use_cache = self.config.use_cache and not self.training if use_cache is None else use_cache
        streams = past_key_values is not None or (use_cache and self.model.streams)
        cache = past_key_values or (PrimalCache(self.config) if streams else None)
        every_layer = bool(self.config.output_hidden_states if output_hidden_states is None else output_hidden_states)
        padding = padding_mask(attention_mask, tokens)
        past = None if cache is None else cache.state
        hidden, state = self.model.hidden(tokens, padding, state=past, return_state=streams, every_layer=every_layer)
        if cache is not None and state is not None:
            cache.store(state, tokens.shape[1])
        if self.has_score and attention_mask is None and input_ids is not None and self.config.pad_token_id is not None:
            attention_mask = input_ids.ne(self.config.pad_token_id)  # to find the last token
        logits = self.compute_logits(hidden[-1], attention_mask, logits_to_keep)
        if labels is not None and logits is None:
            raise ValueError(f"{type(self).__name__} takes no labels: it has no loss")
        values: dict[str, Any] = {
            "loss": None if labels is None else self.compute_loss(logits, labels, **kwargs),
            "logits": logits,
            "last_hidden_state": hidden[-1],
            "past_key_values": cache,
            "hidden_states": hidden if every_layer else None,
        }
        output = self.output_class(**{name: values.get(name) for name in self.output_names})
        return output if return_dict is not False else output.to_tuple()

    def compute_logits(self, hidden: Tensor, attention_mask: Tensor | None, logits_to_keep: int | Tensor) -> Any:
        """Return the logits of the last hidden state; None without any."""

    def compute_loss(
        self, logits: Tensor, labels: Tensor, num_items_in_batch: Tensor | int | None = None, **kwargs: Any
    ) -> Tensor:
        """Return the loss of transformers; in training plus the KSVD loss."""
        if num_items_in_batch is not None:
            kwargs["num_items_in_batch"] = num_items_in_batch
        kwargs = {**kwargs, "vocab_size": self.config.vocab_size, "config": self.config, "pooled_logits": logits}
        loss = self.loss_function(logits=logits, labels=labels, **kwargs)
        if not (self.training and self.config.eta and primal_layers(self)):
            return loss
        # With gradient accumulation, each batch contributes its share of the labels.
        counted = labels[:, 1:] if isinstance(self, PrimalForCausalLM) else labels
        share = 1.0 if num_items_in_batch is None else (counted != -100).sum() / num_items_in_batch
        return loss + self.config.eta * share * ksvd_loss(self)


class PrimalModel(PrimalPreTrainedModel):
    """The hidden states (B, N, hidden_size) of the tokens: `AutoModel`.

    Args:
        config: the configuration.
    """


class PrimalForSequenceClassification(PrimalPreTrainedModel):
    """A classifier of sequences, by the hidden state of the last token. Logits are (B, num_labels).

    Args:
        config: the configuration.
    """

    output_class = SequenceClassifierOutputWithPast
    has_score = True

    def compute_logits(self, hidden: Tensor, attention_mask: Tensor | None, logits_to_keep: int | Tensor) -> Tensor:
        return self.score(last_tokens(hidden, attention_mask))


class PrimalForTokenClassification(PrimalPreTrainedModel):
    """A classifier of tokens, by the tokens up to each of them. Logits are (B, N, num_labels).

    Args:
        config: the configuration.
    """

    output_class = TokenClassifierOutput
    has_score = True

    def compute_logits(self, hidden: Tensor, attention_mask: Tensor | None, logits_to_keep: int | Tensor) -> Tensor:
        return self.score(hidden)


class PrimalForCausalLM(PrimalPreTrainedModel, GenerationMixin):
    """A language model: logits (B, N, vocab_size) of the next token. Input and output embeddings are one tensor.

    Args:
        config: the configuration.
    """

    output_class = CausalLMOutputWithPast

    def compute_logits(self, hidden: Tensor, attention_mask: Tensor | None, logits_to_keep: int | Tensor) -> Tensor:
        if not isinstance(logits_to_keep, int):
            hidden = hidden[:, logits_to_keep]
        elif logits_to_keep == 1:  # of `generate`, whose prompts may be padded on the right
            hidden = last_tokens(hidden, attention_mask)[:, None]
        elif logits_to_keep:
            hidden = hidden[:, -logits_to_keep:]
        weight = self.model.embedding.weight
        if weight.is_meta and not hidden.is_meta:  # the product would have undefined values
            raise ValueError("the embeddings are also the output map: device_map must not offload model.embedding")
        return F.linear(hidden.to(weight.device), weight)

    def prepare_inputs_for_generation(  # type: ignore[override]
        self, input_ids: Tensor, inputs_embeds: Tensor | None = None, **kwargs: Any
    ) -> dict[str, Any]:
        # transformers reads from the signature that generation from `inputs_embeds` is supported.
        inputs = super().prepare_inputs_for_generation(input_ids, inputs_embeds=inputs_embeds, **kwargs)  # type: ignore[misc, arg-type]
        is_one_token = kwargs.get("next_sequence_length") == 1 and not kwargs.get("is_first_iteration")
        if is_one_token and kwargs.get("past_key_values") is not None:
            inputs.pop("attention_mask", None)  # a generated token is never padding
        return inputs

    def _prepare_cache_for_generation(  # type: ignore[override]
        self, generation_config: Any, model_kwargs: dict[str, Any], *rest: Any
    ) -> None:
        name = generation_config.cache_implementation
        if name is not None:
            raise ValueError(f"cache_implementation={name!r} is not supported: the cache is the streaming state")
        if model_kwargs.get("past_key_values") is None and generation_config.use_cache is not False:
            if self.model.streams:
                model_kwargs["past_key_values"] = PrimalCache(self.config)
            else:  # a layer without a streaming state: every step reads the complete text again
                if model_kwargs.get("inputs_embeds") is not None:
                    raise ValueError("a model with a layer without a state generates from input_ids only")
                generation_config.use_cache = False


def last_tokens(hidden: Tensor, attention_mask: Tensor | None) -> Tensor:
    """Return the hidden state of the last token of each sequence, (B, hidden_size)."""
    if attention_mask is None:
        return hidden[:, -1]
    places = torch.arange(hidden.shape[1], device=hidden.device)
    last = (places * (attention_mask[:, -hidden.shape[1] :] != 0)).argmax(dim=1)
    return hidden[torch.arange(len(hidden), device=hidden.device), last]


def padding_mask(attention_mask: Tensor | None, tokens: Tensor) -> Tensor | None:
    """Return (B, N) bool, True at padding, for the new columns; None if there is none."""
    if attention_mask is None:
        return None
    if attention_mask.ndim != 2 or attention_mask.shape[1] < tokens.shape[1]:
        raise ValueError(
            f"attention_mask must have shape (batch, tokens) (got {tuple(attention_mask.shape)} "
            f"for input {tuple(tokens.shape[:2])})"
        )
    padding = attention_mask[:, -tokens.shape[1] :] == 0
    can_read = padding.device.type == "cpu" and not torch.compiler.is_compiling()  # a GPU would synchronise
    return None if can_read and not padding.any() else padding
