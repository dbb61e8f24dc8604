"""Model and tokenizer of a finished language run; `save_pretrained` of both makes a folder for the Auto classes.

`to_language` reads such a folder for the code that works without transformers.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerFast

from primal_attention.data.lm import END_OF_DOCUMENT, END_OF_LINE, UNKNOWN, Vocabulary, load_vocabulary
from primal_attention.hf.configuration import NAMES, PrimalConfig
from primal_attention.hf.model import PrimalForCausalLM
from primal_attention.models.lm import LanguageModel
from primal_attention.utils.files import read_json


def from_run(folder: str | Path) -> tuple[PrimalForCausalLM, PreTrainedTokenizerFast]:
    """Return the model of a run folder, in evaluation mode, and its tokenizer. Needs the extra [language].

    Args:
        folder: A run folder of `primal train lm/…`.

    Returns:
        The model and the tokenizer.
    """
    from primal_attention.train.lm import load_language

    model, vocabulary = load_language(Path(folder))
    tokenizer = make_tokenizer(vocabulary)
    names = ("bos_token_id", "eos_token_id", "pad_token_id")
    return from_model(model, **{name: getattr(tokenizer, name) for name in names}), tokenizer


def from_model(model: LanguageModel, **settings: Any) -> PrimalForCausalLM:
    """Return a `LanguageModel` for transformers, with the same weights.

    Args:
        model: the language model.
        settings: further fields of `PrimalConfig`.
    """
    fields = {name: getattr(model.config, own) for own, name in NAMES.items()}
    wrapped = PrimalForCausalLM(PrimalConfig(**fields, **settings))
    wrapped.model.load_state_dict(model.state_dict())
    weight = model.embedding.weight
    return wrapped.to(device=weight.device, dtype=weight.dtype).eval()  # type: ignore[call-arg]


def to_language(folder: Path) -> tuple[LanguageModel, Vocabulary]:
    """Return the model of a folder of `save_pretrained`, in evaluation mode, and its vocabulary of byte pairs."""
    read_json(folder / "config.json", {"model_type": frozenset({PrimalConfig.model_type})})
    vocabulary = load_vocabulary(folder / "tokenizer.json")
    return PrimalForCausalLM.from_pretrained(folder).eval().model, vocabulary


def make_tokenizer(vocabulary: Vocabulary) -> PreTrainedTokenizerFast:
    """Return a tokenizer that pads on the left and puts the end token before a text, as in training.

    Args:
        vocabulary: the vocabulary of a run.
    """
    from tokenizers import Regex, Tokenizer, decoders, processors

    has_words = vocabulary.is_word_level
    end = END_OF_LINE if has_words else END_OF_DOCUMENT
    fast = Tokenizer.from_str(vocabulary.tokenizer.to_str())
    if has_words:
        # Every word includes the space before it, because a pipeline appends new words to a prompt without one.
        fast.decoder = decoders.Sequence([decoders.Replace(Regex("^"), " "), decoders.Fuse()])
    fast.post_processor = processors.TemplateProcessing(single=f"{end} $A", special_tokens=[(end, vocabulary.end)])
    tokens = {} if has_words else {"eos_token": end}  # the end of a line does not end a text
    if has_words and fast.token_to_id(UNKNOWN) is not None:
        tokens["unk_token"] = UNKNOWN
    tokens |= {"bos_token": end, "pad_token": end, "padding_side": "left"}
    return PreTrainedTokenizerFast(tokenizer_object=fast, clean_up_tokenization_spaces=False, **tokens)
