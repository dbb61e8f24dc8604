"""Language modelling: the paper's setting on WikiText-103, and a modern one on plain Wikipedia text.

    primal train lm/wikitext-103 --model.attention primal+            the paper's Primal.+
    primal train lm/wikipedia --model.attention softmax               rotary positions
    primal train lm/wikipedia                                         the delta rule in all layers
    primal train lm/wikipedia --model.attention primal primal softmax primal primal softmax --model.primal-mode decay

The last step is evaluated on validation and on test; neither chooses anything. Scores:

    perplexity      exp of the mean loss per token; depends on the vocabulary
    bits_per_byte   the total loss in bits over the bytes of the text; comparable between vocabularies

A batch is (windows (B, context + 1),): the first `context` tokens are read, the last `context` are predicted.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from primal_attention.data import lm as text
from primal_attention.data.lm import TextData, TextSplit, Vocabulary, load_vocabulary
from primal_attention.data.storage import default_folder
from primal_attention.models.lm import LanguageConfig, LanguageModel, primal_defaults
from primal_attention.nn.blocks import attention_names
from primal_attention.ops.landmarks import WITHOUT_FLOAT64
from primal_attention.train.checkpoint import load_weights, read_run, read_summary
from primal_attention.train.config import NetworkConfig, OptimConfig, Recipe, TrainerConfig, require, require_range
from primal_attention.train.task import Batch, Batches, Experiment, TrainingModule, derive_seed, hash_data
from primal_attention.utils.errors import DataError, RunError
from primal_attention.utils.files import check

WIDTH_MULTIPLE = 8  # of the feed-forward width
MIN_VOCABULARY = 257  # one token for each byte, and the end
VOCABULARY = "vocabulary.json"
NO_TOKEN = -1  # behind the last token of a split


@dataclass(frozen=True)
class LanguageData:
    """The text, its tokens, and the length of a window."""

    text: Literal["wikipedia", "wikitext-103"] = "wikipedia"
    folder: Path | None = None
    """Folder of wiki.train.txt (or .tokens) and so on; None is $PRIMAL_LM/TEXT or data/lm/TEXT."""
    vocabulary: int | None = 8192
    """Byte pairs to learn from train; None uses the words of the text. A vocabulary.json in the folder is used."""
    context: int = 1024
    """Tokens in a window."""

    def __post_init__(self) -> None:
        require_range(self, "data", "context", "be at least 1")
        message = f"data.vocabulary must be at least {MIN_VOCABULARY}, one for each byte and the end"
        require((self.vocabulary or MIN_VOCABULARY) >= MIN_VOCABULARY, f"{message} (got {self.vocabulary})")


@dataclass(frozen=True)
class LanguageNetwork(NetworkConfig):
    """The network; see primal_attention.models.lm."""

    layers: int = 6
    rank: int | None = None
    """Directions of the Primal layers; None is 30, with primal-mode None half the head width."""
    ffn_dim: int | None = None
    """Hidden width of the feed-forward networks; None gives as many parameters as softmax with 4 × embed-dim."""
    activation: Literal["gelu", "relu"] = "gelu"
    """Activation of the feed-forward networks."""
    dropout: float = 0.0
    primal_mode: Literal["mean", "landmarks", "decay", "delta"] | None = "mean"
    """mean: the paper's; landmarks: causal and data-dependent; decay: a learned decay; delta: the delta rule; None:
    delta with half the heads, a rank of half the head width, conv 4 and gate: the best without softmax attention."""
    primal_heads: int | None = None
    """Heads of the Primal layers, for more time scales of decay; None is num-heads, half with primal-mode None."""
    landmarks: int = 300
    conv: int | None = None
    """Kernel of a short causal convolution at each Primal layer; 0 is none, None is 4 with primal-mode None, else 0."""
    gate: bool = False
    """A multiplicative gate on each Primal layer's output; always on with primal-mode None."""
    gate_activation: Literal["silu", "sigmoid"] = "silu"
    """Activation of the gates."""
    conv_layers: Literal["primal", "all"] = "primal"
    """Layers with convolution and gate: the Primal ones, or all; layers without attention (none) always have them."""
    positions: Literal["rotary", "sinusoidal", "none"] | None = None
    """None: rotary in softmax layers; sinusoidal where nothing else in the model encodes the order of the tokens."""
    initializer_range: float | None = None  # as in runs from before this field; lm/wikipedia has 0.02
    """Standard deviation of new embeddings; None is embed-dim^-0.5, and the model scales them to unit variance."""

    @property
    def has_primal_layers(self) -> bool:
        return any(name.startswith("primal") for name in self.attention)

    @property
    def has_convolution(self) -> bool:
        is_used = self.has_primal_layers or self.conv_layers == "all" or "none" in self.attention
        return bool(self.conv) and is_used


@dataclass(frozen=True)
class LanguageRecipe(Recipe):
    """A decoder-only language model of one text."""

    benchmark: ClassVar[str] = "lm"

    data: LanguageData = field(default_factory=LanguageData)
    model: LanguageNetwork = field(default_factory=LanguageNetwork)

    def resolved(self) -> LanguageRecipe:
        model = self.model
        if model.primal_mode is None and not model.has_primal_layers:
            model = replace(model, primal_mode="mean")  # not used
        unset = [name for name, value in vars(model).items() if value is None or value is False]
        model = replace(model, **{name: value for name, value in primal_defaults(model).items() if name in unset})
        if model.positions is None:
            names = ("attention", "layers", "primal_mode", "conv", "conv_layers")
            chosen = LanguageConfig(**{name: getattr(model, name) for name in names}).resolved().positions
            model = replace(model, positions="sinusoidal" if chosen == "sinusoidal" else "rotary")
        # The published weight is 0.1 over the tokens of a batch, which is this.
        return replace(self, model=model, eta=5e-5 if self.eta is None else self.eta)

    def label(self) -> str:
        """Return the attention, the mode of its Primal layers, and their convolution and gate."""
        model, words = self.resolved().model, [super().label()]
        words += [str(model.primal_mode)] if model.has_primal_layers else []
        words += [f"conv{model.conv}"] if model.has_convolution else []
        if model.gate and (model.has_primal_layers or model.has_convolution):
            words.append("gate" if model.gate_activation == "silu" else model.gate_activation)
        return "-".join(words)

    def build(self) -> Experiment:
        recipe = self.resolved()
        default = replace(recipe, model=replace(recipe.model, positions=None)).resolved().model.positions
        message = "model.positions rotary needs a softmax layer, and nothing else in this model encodes the order"
        require(default == "rotary" or recipe.model.positions != "rotary", f"{message}: use sinusoidal or none")
        return build_from(recipe, load(self.data))


RECIPES = {
    # A little over two passes through the bundled text: 1640 steps of 32 windows, 204 million bytes.
    "wikipedia": LanguageRecipe(
        optim=OptimConfig("adamw", lr=1.5e-3, weight_decay=0.1, beta2=0.98, schedule="onecycle", warmup=0.1, clip=1.0),
        model=LanguageNetwork(primal_mode=None, initializer_range=0.02),  # the loss starts near ln(vocabulary)
        trainer=TrainerConfig(epochs=4, steps_per_epoch=410, batch_size=32, precision="bf16-mixed"),
    ),
    # The paper's settings: windows of 512 words, 150,000 updates after 6,000 of warm-up, Primal in the last layer.
    "wikitext-103": LanguageRecipe(
        data=LanguageData("wikitext-103", vocabulary=None, context=512),
        model=LanguageNetwork(
            ("primal+",),
            ffn_dim=2048,
            activation="relu",
            dropout=0.1,
            positions="sinusoidal",
            initializer_range=None,  # as in fairseq, which the authors' code uses
        ),
        optim=OptimConfig("adam", lr=1e-3, beta2=0.98, schedule="inverse-sqrt", warmup=6 / 156, clip=0.0),
        trainer=TrainerConfig(epochs=156, steps_per_epoch=1000, batch_size=64, precision="bf16-mixed"),
    ),
}


def load(config: LanguageData) -> TextData:
    """Read the text as tokens, with the vocabulary of its folder if there is one."""
    folder = config.folder or default_folder("lm", config.text)
    file = folder / VOCABULARY
    vocabulary = load_vocabulary(file) if file.exists() else None
    if vocabulary is not None and config.vocabulary not in (None, len(vocabulary)):
        size = len(vocabulary)
        raise RunError(f"{file} has {size} tokens, not {config.vocabulary}: set --data.vocabulary {size}")
    return text.load(folder, config.vocabulary, vocabulary=vocabulary)


def network(recipe: LanguageRecipe, vocabulary: int) -> LanguageConfig:
    """Return the model's own configuration, with the feed-forward width that makes parameters equal."""
    values = dict(vars(recipe.model))
    width = values.pop("ffn_dim")
    if values["positions"] == "rotary" and "softmax" not in attention_names(recipe.model.attention, values["layers"]):
        values["positions"] = "none"  # the recipes' "rotary" means: in softmax layers, if there are any
    config = LanguageConfig(
        vocabulary,
        **values,
        ffn_dim=width or WIDTH_MULTIPLE,
        max_length=recipe.data.context,
    )
    return config if width else replace(config, ffn_dim=equal_width(config))


def equal_width(config: LanguageConfig) -> int:
    """Return the feed-forward width that gives as many parameters as softmax with a width of 4 × embed_dim has."""
    softmax = replace(config, attention=("softmax",), conv_layers="primal", ffn_dim=4 * config.embed_dim)
    count, next_count = parameters(config), parameters(replace(config, ffn_dim=config.ffn_dim + WIDTH_MULTIPLE))
    steps = round((parameters(softmax) - count) / (next_count - count))
    require(steps >= 0, "the attention alone has more parameters than softmax's model: set --model.ffn-dim")
    return config.ffn_dim + WIDTH_MULTIPLE * steps


def parameters(config: LanguageConfig) -> int:
    """Count a model's parameters without allocating them."""
    with torch.device("meta"):
        return sum(p.numel() for p in LanguageModel(config).parameters())


def build_from(recipe: LanguageRecipe, data: TextData) -> Experiment:
    """Return the experiment of a resolved recipe on text in memory."""
    context, batch, steps = recipe.data.context, recipe.trainer.batch_size, recipe.trainer.steps_per_epoch
    config = network(recipe, len(data.vocabulary))
    train = Windows(data.train, context, batch, recipe.seed, steps)
    tokens_per_epoch = context * (batch * steps if steps else train.samples)
    bytes_per_token = data.train.bytes / (len(data.train.tokens) - 1)
    return Experiment(
        module=LanguageModule(LanguageModel(config), recipe),
        train=train,
        test=Windows(data.test, context, batch),
        watched={"val": Windows(data.valid, context, batch)},
        files={VOCABULARY: data.vocabulary.text},
        facts={
            "set": recipe.data.text,
            "sha256": hash_data((data.train, data.valid, data.test)),
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


class Windows(Batches):
    """Windows of `context` + 1 tokens of a split; `order` gives their first tokens.

    With a seed they come in random order, and every pass starts cutting at another token. Without one they come in
    order, for evaluation: every token but the first, which represents no text, is predicted once. Empty windows fill
    the last batch, so that all batches have one shape.

    Args:
        split: Its tokens and the bytes of text that they encode.
        context: Tokens that a window predicts.
        batch_size: Windows per batch, over all ranks.
        shuffle_seed: None for evaluation.
        steps: As in `Batches`.
    """

    def __init__(
        self, split: TextSplit, context: int, batch_size: int, shuffle_seed: int | None = None, steps: int = 0
    ) -> None:
        stream = torch.from_numpy(split.tokens.astype(np.int32))
        self.context, self.tokens, self.bytes = context, len(stream) - 1, split.bytes
        if shuffle_seed is None:
            self.count = -(-self.tokens // (context * batch_size)) * batch_size
            stream = F.pad(stream, (0, self.count * context - self.tokens), value=NO_TOKEN)
        else:
            self.count = self.tokens // context - 1
            if self.count < 1:
                needed = f"windows of {context} need {2 * context + 1} (--data.context)"
                raise DataError(f"train has {len(stream)} tokens: {needed}")
        super().__init__([stream], batch_size, shuffle_seed, steps)

    @property
    def samples(self) -> int:
        return self.count

    def order(self, turn: int) -> Tensor:
        if self.shuffle_seed is None:
            return torch.arange(self.count) * self.context
        generator = torch.Generator().manual_seed(derive_seed("windows", self.shuffle_seed, turn))
        first = torch.randint(self.context, (1,), generator=generator)
        return first + self.context * torch.randperm(self.count, generator=generator)

    def gather(self, rows: Tensor) -> Sequence[Tensor]:
        (stream,) = self.tensors
        return [stream[rows[:, None] + torch.arange(self.context + 1, device=stream.device)].long()]


class LanguageModule(TrainingModule):
    """A language model in training."""

    splits_sequences: ClassVar[bool] = True
    headline: ClassVar[str] = "bits_per_byte"

    def inputs(self, batch: Batch) -> tuple[Any, ...]:
        (windows,) = batch
        return self.tokens(windows[:, :-1])

    def task_loss(self, batch: Batch) -> Tensor:
        (windows,) = batch
        seen, targets = self.tokens(windows[:, :-1], windows[:, 1:])
        return self.model(seen, targets=targets)

    def scores(self, model: nn.Module, batch: Batch) -> Mapping[str, Tensor]:
        (windows,) = batch
        count = (windows[:, 1:] != NO_TOKEN).sum()
        # The positions behind the text are read as token 0, which no earlier position sees.
        seen, targets = self.tokens(windows[:, :-1].clamp(min=0), windows[:, 1:])
        dtype = torch.float32 if windows.device.type in WITHOUT_FLOAT64 else torch.float64
        return {"loss": model(seen, targets=targets).to(dtype) * count, "samples": count.to(dtype)}

    def evaluate(self, batches: Batches) -> dict[str, float]:
        means = super().evaluate(batches)
        assert isinstance(batches, Windows)
        bits = means["loss"] / math.log(2)
        return {**means, "perplexity": math.exp(means["loss"]), "bits_per_byte": bits * batches.tokens / batches.bytes}


def load_language(folder: Path) -> tuple[LanguageModel, Vocabulary]:
    """Read the model of a run folder, in evaluation mode, and its vocabulary; the two must belong together."""
    summary = read_summary(folder)
    _, recipe = read_run(folder)
    if not isinstance(recipe, LanguageRecipe):
        raise RunError(f"{folder} is a run of {recipe.benchmark}, not of a language model")
    vocabulary = load_vocabulary(folder / VOCABULARY)
    check(summary, {"data": {"vocabulary_sha256": str}}, folder / "summary.json")
    if vocabulary.digest != summary["data"]["vocabulary_sha256"]:
        raise RunError(f"{folder / VOCABULARY} is not the vocabulary that the run was trained with")
    model = LanguageModel(network(recipe.resolved(), len(vocabulary)))
    load_weights(model, folder / "model.safetensors")
    return model.eval(), vocabulary
