"""A finished language run in transformers' form: `save_pretrained` of both is a folder that the Auto classes read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerFast

from primal_attention.data.lm import END_OF_DOCUMENT, END_OF_LINE, UNKNOWN, Vocabulary
from primal_attention.hf.configuration import PrimalConfig
from primal_attention.hf.model import PrimalForCausalLM
from primal_attention.models.lm import LanguageModel


def from_run(folder: str | Path) -> tuple[PrimalForCausalLM, PreTrainedTokenizerFast]:
    """The model of a run folder in evaluation mode, and its tokenizer. Needs the extra [language]."""
    from primal_attention.train.lm import load_language

    model, vocabulary = load_language(Path(folder))
    tokenizer = tokenizer_of(vocabulary)
    names = ("bos_token_id", "eos_token_id", "pad_token_id")
    return from_model(model, **{name: getattr(tokenizer, name) for name in names}), tokenizer


def from_model(model: LanguageModel, **settings: Any) -> PrimalForCausalLM:
    """A `LanguageModel` in transformers' form, with the same weights; settings: further fields of the configuration."""
    found = PrimalForCausalLM(PrimalConfig.of(model.config, **settings))
    found.model.load_state_dict(model.state_dict())
    weight = model.embedding.weight
    return found.to(device=weight.device, dtype=weight.dtype).eval()  # type: ignore[call-arg]


def tokenizer_of(vocabulary: Vocabulary) -> PreTrainedTokenizerFast:
    """The vocabulary as a tokenizer that pads on the left and puts the end token before a text, as training did."""
    from tokenizers import Regex, Tokenizer, decoders, processors

    words = vocabulary.is_word_level
    end = END_OF_LINE if words else END_OF_DOCUMENT
    fast = Tokenizer.from_str(vocabulary.tokenizer.to_str())
    if words:
        # Every word brings the space before it: a pipeline puts new words behind a prompt that has none at its end.
        fast.decoder = decoders.Sequence([decoders.Replace(Regex("^"), " "), decoders.Fuse()])
    fast.post_processor = processors.TemplateProcessing(single=f"{end} $A", special_tokens=[(end, vocabulary.end)])
    # The end of a line is no end of a text: with words nothing stops a generation.
    ends = {} if words else {"eos_token": end}
    known = {"unk_token": UNKNOWN} if words and fast.token_to_id(UNKNOWN) is not None else {}
    return PreTrainedTokenizerFast(
        tokenizer_object=fast,
        bos_token=end,
        pad_token=end,
        padding_side="left",
        clean_up_tokenization_spaces=False,
        **ends,
        **known,
    )
