"""A stream of tokens cut into windows of one length: shuffled and cut anew in every pass, or one after the other.

A batch is (windows (B, context + 1),): the first `context` tokens are read, the last `context` are predicted. Measured
splits are covered so that every token but the first, which stands for no text, is predicted exactly once.

Training of language models: the loss of the next token, J squared per sequence, and how well a text is predicted.

perplexity      exp of the mean loss per token: depends on the vocabulary
bits_per_byte   the whole loss in bits over the bytes of the text: comparable between vocabularies

Language modelling: the paper's setting on WikiText-103, and a modern one on plain Wikipedia text.

primal train lm/wikitext-103 --model.attention primal+            the paper's Primal.+
primal train lm/wikipedia --model.attention softmax               rotary positions
primal train lm/wikipedia --model.primal-mode delta --model.rank 32 --model.conv 4 --model.gate
primal train lm/wikipedia --model.attention primal primal softmax primal primal softmax --model.primal-mode decay

The last step is measured, on validation and on test; nothing is chosen by either.

A finished language run, ready to be asked: its model and the vocabulary that its tokens come from.
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor, nn

from primal_attention.data.lm import TextSplit, Vocabulary, load_vocabulary
from primal_attention.models.lm import LanguageModel
from primal_attention.train.batches import Batches, derive_seed
from primal_attention.train.checkpoint import read_run, read_weights
from primal_attention.train.config import OptimConfig, Recipe, TrainerConfig, require
from primal_attention.train.loop import load_weights, read_summary
from primal_attention.train.task import Batch, TrainingModule
from primal_attention.utils.errors import DataError, RunError
from primal_attention.utils.files import check, write_text

if TYPE_CHECKING:
    from primal_attention.data.lm import TextData
    from primal_attention.models.lm import LanguageConfig
    from primal_attention.train.task import Experiment


NOTHING = -1  # behind the last token of a split


class Windows:
    """Rows of `context` + 1 tokens of a stream, taken by their first token."""

    def __init__(self, stream: Tensor, context: int, count: int) -> None:
        self.stream, self.context, self.count = stream, context, count

    @property
    def device(self) -> torch.device:
        return self.stream.device

    def to(self, device: torch.device) -> Windows:
        return Windows(self.stream.to(device), self.context, self.count)

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, starts: Tensor) -> Tensor:
        rows = self.stream[starts[:, None] + torch.arange(self.context + 1, device=self.device)].long()
        return rows & 0xFFFF if self.stream.dtype == torch.int16 else rows


class TrainingWindows(Batches):
    """Windows in random order; every pass starts cutting at another token."""

    def __init__(self, split: TextSplit, context: int, batch_size: int, seed: int, steps: int = 0) -> None:
        tokens = split.tokens
        count = (len(tokens) - 1) // context - 1
        if count < 1:
            raise DataError(
                f"train has {len(tokens)} tokens: windows of {context} need {2 * context + 1} (--data.context)"
            )
        # torch can do little with unsigned numbers of 16 bits: they travel as signed ones; `Windows` turns them back.
        stream = torch.from_numpy(tokens.view(np.int16) if tokens.dtype == np.uint16 else tokens)
        super().__init__([Windows(stream, context, count)], batch_size, seed, steps)  # type: ignore[list-item]
        self.context = context

    def order(self, turn: int) -> Tensor:
        generator = torch.Generator().manual_seed(derive_seed("windows", self.shuffle_seed, turn))
        first = torch.randint(self.context, (1,), generator=generator)
        return first + self.context * torch.randperm(self.cases, generator=generator)


class MeasuredWindows(Batches):
    """A whole split in order. `tokens` are predicted, and they stand for `bytes` of text.

    The last batch is filled up with windows that hold nothing, so that all batches have one shape.
    """

    def __init__(self, split: TextSplit, context: int, batch_size: int) -> None:
        self.tokens, self.bytes = len(split.tokens) - 1, split.bytes
        count = -(-self.tokens // context)
        count += -count % batch_size
        stream = torch.full((count * context + 1,), NOTHING, dtype=torch.int32)
        stream[: len(split.tokens)] = torch.from_numpy(split.tokens.astype(np.int32))
        super().__init__([Windows(stream, context, count)], batch_size)  # type: ignore[list-item]
        self.context = context

    def order(self, turn: int) -> Tensor:
        return torch.arange(self.cases) * self.context


VOCABULARY = "vocabulary.json"


class LanguageModule(TrainingModule):
    """A language model in training. The run folder gets the vocabulary, without which the weights mean nothing."""

    splits_sequences: ClassVar[bool] = True
    headline: ClassVar[str] = "bits_per_byte"

    def __init__(self, model: nn.Module, recipe: Recipe, vocabulary: Vocabulary) -> None:
        super().__init__(model, recipe)
        self.vocabulary = vocabulary

    def write_files(self, folder: Path) -> None:
        write_text(folder / VOCABULARY, self.vocabulary.text())

    def task_loss(self, batch: Batch) -> Tensor:
        (windows,) = batch
        seen, targets = self.tokens(windows[:, :-1], windows[:, 1:])
        return self.model(seen, targets=targets)

    def scores(self, model: nn.Module, batch: Batch) -> Mapping[str, Tensor]:
        (windows,) = batch
        tokens = (windows[:, 1:] >= 0).sum()
        # What stands behind the text is no token; it is read as one, and nothing before it sees it.
        seen, targets = self.tokens(windows[:, :-1].clamp(min=0), windows[:, 1:])
        loss = model(seen, targets=targets)
        return {"loss": loss.double() * tokens, "cases": tokens.double()}

    def evaluate(self, batches: Batches) -> dict[str, float]:
        means = super().evaluate(batches)
        assert isinstance(batches, MeasuredWindows)
        bits = means["loss"] / math.log(2)
        return {**means, "perplexity": math.exp(means["loss"]), "bits_per_byte": bits * batches.tokens / batches.bytes}


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
    """The network; see primal_attention.models.lm."""

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
    from primal_attention.data import lm as text
    from primal_attention.data.lm import load_vocabulary

    folder = config.folder or default_folder(config.text)
    file = folder / "vocabulary.json"
    given = load_vocabulary(file) if file.exists() else None
    if given is not None and config.vocabulary is not None and len(given) != config.vocabulary:
        require(False, f"{file} has {len(given)} tokens, not {config.vocabulary}: set --data.vocabulary {len(given)}")
    return text.load(folder, config.vocabulary, vocabulary=given)


def network(recipe: LanguageRecipe, vocabulary: int) -> LanguageConfig:
    """The model's own configuration, with the feed-forward width that makes parameters equal."""
    from primal_attention.models.lm import LanguageConfig

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

    from primal_attention.models.lm import LanguageModel

    with torch.device("meta"):
        return sum(p.numel() for p in LanguageModel(config).parameters())


def build_from(recipe: LanguageRecipe, data: TextData) -> Experiment:
    """The experiment of a resolved recipe on text that is already read."""
    from primal_attention.models.lm import LanguageModel
    from primal_attention.train.task import Experiment

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


def load_language(folder: Path) -> tuple[LanguageModel, Vocabulary]:
    """The model of a run folder in evaluation mode, and its vocabulary; one that is not the run's own is refused."""
    summary = read_summary(folder)
    _, recipe = read_run(folder)
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
    check(summary, {"data": {"vocabulary_sha256": str}}, folder / "summary.json")
    if vocabulary.digest != summary["data"]["vocabulary_sha256"]:
        raise RunError(f"{folder / VOCABULARY} is not the vocabulary that the run was trained with")
    model = LanguageModel(network(recipe.resolved(), len(vocabulary)))
    load_weights(model, folder / "model.safetensors")
    return model.eval(), vocabulary
