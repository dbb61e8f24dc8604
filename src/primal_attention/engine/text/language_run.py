"""A finished language run, ready to be asked: its model and the vocabulary that its tokens come from."""

from __future__ import annotations

from pathlib import Path

from primal_attention.data.vocabulary import Vocabulary, load_vocabulary
from primal_attention.engine import folder as run_folder
from primal_attention.engine.errors import RunError
from primal_attention.engine.readers import check_fields, read_weights
from primal_attention.engine.runner import load_weights, read_summary
from primal_attention.engine.text.language import LanguageRecipe, network
from primal_attention.engine.text.perplexity import VOCABULARY
from primal_attention.models.language import LanguageModel


def load_language(folder: Path) -> tuple[LanguageModel, Vocabulary]:
    """The model of a run folder in evaluation mode, and its vocabulary; one that is not the run's own is refused."""
    summary = read_summary(folder)
    _, recipe = run_folder.read(folder)
    if not isinstance(recipe, LanguageRecipe):
        raise RunError(f"{folder} is a run of {recipe.benchmark}, not of a language model")
    vocabulary = load_vocabulary(folder / VOCABULARY)
    weights = read_weights(folder / "model.safetensors")
    if "embedding.weight" not in weights:
        raise RunError(f"{folder / 'model.safetensors'} has no tensor embedding.weight: it is not a language model's")
    rows = len(weights["embedding.weight"])
    if len(vocabulary) != rows:
        raise RunError(
            f"{folder / VOCABULARY} has {len(vocabulary)} tokens and the checkpoint {rows}: not the run's own"
        )
    check_fields(summary, {"data.vocabulary_sha256": str}, folder / "summary.json")
    if vocabulary.digest != summary["data"]["vocabulary_sha256"]:
        raise RunError(f"{folder / VOCABULARY} is not the vocabulary that the run was trained with")
    model = LanguageModel(network(recipe.resolved(), len(vocabulary)))
    load_weights(model, folder / "model.safetensors")
    return model.eval(), vocabulary
