"""Language modelling: the paper's setting on WikiText-103, and a modern one on plain Wikipedia text.

primal train lm/wikitext-103 --model.attention primal+            the paper's Primal.+
primal train lm/wikipedia --model.attention softmax               rotary positions
primal train lm/wikipedia --model.primal-mode delta --model.rank 32 --model.conv 4 --model.gate
primal train lm/wikipedia --model.attention primal primal softmax primal primal softmax --model.primal-mode decay

The last step is measured, on validation and on test; nothing is chosen by either.
"""

from __future__ import annotations

import dataclasses
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from primal_attention.engine.config import OptimConfig, Recipe, TrainerConfig, require

if TYPE_CHECKING:
    from primal_attention.data.text import TextData
    from primal_attention.engine.experiment import Experiment
    from primal_attention.models.language import LanguageConfig

SETS = ("wikipedia", "wikitext-103")
SHARED = 8  # the feed-forward width is a multiple of it


@dataclass(frozen=True)
class LanguageData:
    """Which text, in which tokens, and how much of it at once."""

    text: Literal["wikipedia", "wikitext-103"] = "wikipedia"
    folder: Path | None = None
    """Folder of wiki.train.txt (or .tokens) and so on; None is $PRIMAL_LM/TEXT or data/lm/TEXT."""
    vocabulary: int | None = 8192
    """Byte pairs to learn from train; None takes the words as they stand. A vocabulary.json beside the text is used."""
    context: int = 1024
    """Tokens in a window."""

    def __post_init__(self) -> None:
        require(self.context >= 1, f"data.context must be at least 1 (got {self.context})")
        least = 257
        good = self.vocabulary is None or self.vocabulary >= least
        require(
            good, f"data.vocabulary must be at least {least}, one for each byte and the end (got {self.vocabulary})"
        )


@dataclass(frozen=True)
class LanguageNetwork:
    """The network; see primal_attention.models.language."""

    attention: tuple[str, ...] = ("primal",)
    """One name for all layers, a name with a plus for the last layer only, or one name per layer."""
    embed_dim: int = 512
    num_heads: int = 8
    layers: int = 6
    ffn_dim: int | None = None
    """Hidden width of the feed-forward networks; None makes the parameters as many as softmax's with 4 × embed-dim."""
    activation: Literal["gelu", "relu"] = "gelu"
    """Of the feed-forward networks."""
    dropout: float = 0.0
    primal_mode: Literal["mean", "landmarks", "decay", "delta"] = "mean"
    """mean: the paper's; landmarks: causal and data-dependent; decay: a learned decay; delta: the delta rule."""
    primal_heads: int | None = None
    """Heads of the Primal layers, for more time scales of fading; None is num-heads."""
    rank: int = 30
    landmarks: int = 300
    conv: int = 0
    """Kernel of a short causal convolution at each Primal layer; 0 is none."""
    conv_place: Literal["beside", "before"] = "beside"
    """Where the convolution stands."""
    gate: bool = False
    """A multiplicative gate on each Primal layer's output."""
    positions: Literal["rotary", "sinusoidal", "none"] | None = None
    """None: rotary in softmax layers; sinusoidal where nothing else in the model tells the order of the tokens."""

    def __post_init__(self) -> None:
        for name in ("embed_dim", "num_heads", "layers", "ffn_dim", "primal_heads", "rank", "landmarks"):
            value = getattr(self, name)
            require(value is None or value >= 1, f"model.{name.replace('_', '-')} must be at least 1 (got {value})")
        require(self.conv >= 0, f"model.conv must not be negative (got {self.conv})")
        require(0 <= self.dropout < 1, f"model.dropout must lie in [0, 1) (got {self.dropout})")
        require(len(self.attention) > 0, "model.attention must name at least one kind")

    @property
    def tells_order(self) -> bool:
        """Whether softmax layers (by rotation), fading or a convolution let the model know what came first."""
        kinds = {name for name in self.attention if name != "cosformer"}
        fades = self.primal_mode in ("decay", "delta") or self.conv > 0
        return "softmax" in kinds or any(name.endswith("+") for name in kinds) or ("primal" in kinds and fades)


@dataclass(frozen=True)
class LanguageRecipe(Recipe):
    """A decoder-only language model of one text."""

    benchmark: ClassVar[str] = "lm"

    data: LanguageData = field(default_factory=LanguageData)
    model: LanguageNetwork = field(default_factory=LanguageNetwork)

    def resolved(self) -> LanguageRecipe:
        model = self.model
        if model.positions is None:
            model = dataclasses.replace(model, positions="rotary" if model.tells_order else "sinusoidal")
        # The published weight is 0.1 over the tokens of a batch, which comes to this.
        return dataclasses.replace(self, model=model, eta=5e-5 if self.eta is None else self.eta)

    def label(self) -> str:
        return variant(self.model)

    def build(self) -> Experiment:
        recipe = self.resolved()
        return build_from(recipe, load(recipe.data))


def variant(model: LanguageNetwork) -> str:
    """The model in a few words: attention, mode, and what stands beside it."""
    words = ["-".join(model.attention)]
    if any(name.startswith("primal") for name in model.attention):
        words.append(model.primal_mode)
        if model.conv:
            before = model.conv_place == "before" and model.primal_mode != "delta"
            words.append(f"conv{model.conv}" + ("-before" if before else ""))
        words += ["gate"] if model.gate else []
    return "-".join(words)


def recipe_of(text: str) -> LanguageRecipe:
    return {"wikipedia": wikipedia, "wikitext-103": wikitext}[text]()


def wikipedia() -> LanguageRecipe:
    """Two passes and a little over the bundled text: 1640 steps of 32 windows, 204 million bytes."""
    return LanguageRecipe(
        optim=OptimConfig("adamw", lr=1.5e-3, weight_decay=0.1, beta2=0.98, schedule="onecycle", warmup=0.1, clip=1.0),
        trainer=TrainerConfig(epochs=4, steps_per_epoch=410, batch_size=32, precision="bf16-mixed"),
    )


def wikitext() -> LanguageRecipe:
    """The paper's settings: windows of 512 words, 150,000 updates after 6,000 of warm-up, Primal in the last layer."""
    return LanguageRecipe(
        data=LanguageData("wikitext-103", vocabulary=None, context=512),
        model=LanguageNetwork(("primal+",), ffn_dim=2048, activation="relu", dropout=0.1, positions="sinusoidal"),
        optim=OptimConfig("adam", lr=1e-3, beta2=0.98, schedule="inverse-sqrt", warmup=6 / 156, clip=0.0),
        trainer=TrainerConfig(epochs=156, steps_per_epoch=1000, batch_size=64, precision="bf16-mixed"),
    )


def default_folder(text: str) -> Path:
    """$PRIMAL_LM/<text>, or data/lm/<text> under the working directory."""
    return Path(os.environ.get("PRIMAL_LM", "data/lm")) / text


def load(config: LanguageData) -> TextData:
    """The text as tokens, with the vocabulary beside it where there is one."""
    from primal_attention.data import text
    from primal_attention.data.vocabulary import load_vocabulary

    folder = config.folder or default_folder(config.text)
    file = folder / "vocabulary.json"
    given = load_vocabulary(file) if file.exists() else None
    if given is not None and config.vocabulary is not None and len(given) != config.vocabulary:
        require(False, f"{file} has {len(given)} tokens, not {config.vocabulary}: set --data.vocabulary {len(given)}")
    return text.load(folder, config.vocabulary, vocabulary=given)


def network(recipe: LanguageRecipe, vocabulary: int) -> LanguageConfig:
    """The model's own configuration, with the feed-forward width that makes parameters equal."""
    from primal_attention.models.language import LanguageConfig

    fields: dict[str, Any] = {f.name: getattr(recipe.model, f.name) for f in dataclasses.fields(recipe.model)}
    width = fields.pop("ffn_dim")
    config = LanguageConfig(vocabulary, **fields, ffn_dim=width or SHARED, max_length=recipe.data.context)
    return config if width else dataclasses.replace(config, ffn_dim=equal_width(config))


def equal_width(config: LanguageConfig) -> int:
    """The feed-forward width with which the model has as many parameters as softmax's with four times its own width."""
    softmax = dataclasses.replace(config, attention=("softmax",), ffn_dim=4 * config.embed_dim)
    here, wider = parameters(config), parameters(dataclasses.replace(config, ffn_dim=config.ffn_dim + SHARED))
    steps = round((parameters(softmax) - here) / (wider - here))
    require(steps >= 0, "the attention alone has more parameters than softmax's model: set --model.ffn-dim")
    return config.ffn_dim + SHARED * steps


def parameters(config: LanguageConfig) -> int:
    """How many parameters a model would have, without making it."""
    import torch

    from primal_attention.models.language import LanguageModel

    with torch.device("meta"):
        return sum(p.numel() for p in LanguageModel(config).parameters())


def build_from(recipe: LanguageRecipe, data: TextData) -> Experiment:
    """The experiment of a resolved recipe on text that is already read."""
    from primal_attention.engine.experiment import Experiment
    from primal_attention.engine.text.perplexity import LanguageModule
    from primal_attention.engine.text.text_windows import MeasuredWindows, TrainingWindows
    from primal_attention.models.language import LanguageModel

    context, batch, steps = recipe.data.context, recipe.trainer.batch_size, recipe.trainer.steps_per_epoch
    config = network(recipe, len(data.vocabulary))
    train = TrainingWindows(data.train, context, batch, recipe.seed, steps)
    tokens_per_epoch = context * (batch * steps if steps else train.cases)
    bytes_per_token = data.train.bytes / (len(data.train.tokens) - 1)
    return Experiment(
        module=LanguageModule(LanguageModel(config), recipe, data.vocabulary),
        train=train,
        test=MeasuredWindows(data.test, context, batch),
        watched={"val": MeasuredWindows(data.valid, context, batch)},
        facts={
            "set": recipe.data.text,
            "vocabulary": len(data.vocabulary),
            "vocabulary_sha256": data.vocabulary.digest,
            "train_bytes": data.train.bytes,
            "validation_bytes": data.valid.bytes,
            "test_bytes": data.test.bytes,
            "tokens_per_epoch": tokens_per_epoch,
            "bytes_seen": round(tokens_per_epoch * recipe.trainer.epochs * bytes_per_token),
            "max_length": context,
            "ffn_dim": config.ffn_dim,
        },
    )
