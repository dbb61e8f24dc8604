"""Recipes: nested frozen dataclasses, one per concern, made by functions and edited by flags.

A benchmark inherits from `Recipe` (see `uea.py`). Every field is a flag; the string below it is the flag's help. Values
are checked when the object is made.
"""

from __future__ import annotations

import dataclasses
import json
import math
import types
import typing
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeVar

from primal_attention.utils.errors import RunError

if TYPE_CHECKING:
    from primal_attention.train.task import Experiment

T = TypeVar("T")
FORMAT = 1  # of config.yaml and summary.json
# Fields of earlier versions: replaced by a flag; removed, with the value that still holds; ignored, whatever the value.
RENAMED = {
    "trainer.tensorboard": "--trainer.logger csv tensorboard",
    "trainer.schedule": "--optim.schedule",
    "data.kinds": "--data.length-buckets",
}
REMOVED = {
    "augment.crop": 0.1,
    "augment.unequal": True,
    "data.held": "random",
    "evaluation.streaming": "off",
    "model.conv_place": "beside",
    "model.differences": False,
    "trainer.accumulate": 1,
}
IGNORED = ("data.cache", "data.strict", "evaluation.video", "trainer.deterministic", "trainer.early_stop")
MAY_BE_ZERO = ("conv", "local_kernel", "tokens")  # sizes of a network that 0 leaves out


def require(holds: bool, message: str) -> None:
    """Raise a one-line error for a value out of range."""
    if not holds:
        raise RunError(message)


RANGES: dict[str, Callable[[float], bool]] = {
    "be at least 1": lambda value: value >= 1,
    "be positive": lambda value: value > 0,
    "not be negative": lambda value: value >= 0,
    "lie in [0, 1)": lambda value: 0 <= value < 1,
    "lie between 0 and 1": lambda value: 0 < value < 1,
}


def require_range(config: Any, group: str, names: str, rule: str) -> None:
    """Raise a one-line error if one of a configuration's fields is not in its range, a key of `RANGES`."""
    for name in names.split():
        value = getattr(config, name)
        require(RANGES[rule](value), f"{group}.{name.replace('_', '-')} must {rule} (got {value})")


@dataclass(frozen=True)
class OptimConfig:
    """Optimizer and learning-rate schedule."""

    name: Literal["radam", "adam", "adamw"] = "radam"
    lr: float = 1e-3
    """Learning rate; the peak of a schedule."""
    weight_decay: float = 0.0
    """Weight decay of matrices (decoupled in adamw); biases and norms have none."""
    eps: float = 1e-8
    """Added to the square root of the second moment."""
    beta2: float = 0.999
    """Decay of the second moment."""
    schedule: Literal["constant", "warmup", "inverse-sqrt", "onecycle", "onecycle-linear"] = "constant"
    """warmup: linear rise over `warmup` of the steps, then constant. inverse-sqrt: the same rise, then decay with the
    square root of the step. onecycle: rise over `warmup` of the steps and fall to zero, as a cosine or linear."""
    warmup: float = 0.3
    """Part of all steps in which a schedule rises."""
    clip: float = 4.0
    """Largest norm of the gradient; 0 does not clip."""

    def __post_init__(self) -> None:
        require_range(self, "optim", "lr eps", "be positive")
        require_range(self, "optim", "beta2 warmup", "lie in [0, 1)")
        require_range(self, "optim", "weight_decay clip", "not be negative")


@dataclass(frozen=True)
class TrainerConfig:
    """How the training runs: length, batches, devices, averaging and logs."""

    epochs: int = 100
    steps_per_epoch: int = 0
    """Batches that count as one epoch, for benchmarks that count steps; 0 is one pass over the data."""
    batch_size: int = 16
    accelerator: Literal["auto", "cpu", "gpu", "mps"] = "auto"
    devices: int = 1
    """Devices per run; more than one needs strategy ddp or fsdp."""
    context: int = 1
    """Devices that share each sequence (context parallelism). Needs Primal-Attention in every layer."""
    strategy: Literal["auto", "ddp", "fsdp"] = "auto"
    precision: Literal["32-true", "bf16-mixed", "16-mixed"] = "32-true"
    tf32: bool = False
    """Compute float32 matrix products on a GPU in TF32, which is several times faster."""
    ema: float = 0.0
    """Decay of the averaged weights that are evaluated and saved; 0 uses the weights as they are."""
    evaluate_every: int = 1
    """Epochs between two evaluations; the last epoch is always evaluated."""
    checkpoint_every: int = 1
    """Epochs between two checkpoints; a killed run resumes from the last one."""
    checkpoint_steps: int = 0
    """Batches between two checkpoints within an epoch; 0 writes none there."""
    graph: Literal["auto", "on", "off"] = "auto"
    """Record a training step as one CUDA graph and replay it; auto: on one GPU, if the other settings allow it."""
    compile: Literal["auto", "on", "off"] = "off"
    """Run the model through torch.compile; auto: on one GPU, because elsewhere compilation costs more than it saves."""
    progress: bool = True
    """Show a progress bar."""
    logger: tuple[Literal["csv", "tensorboard", "wandb", "mlflow"], ...] = ("csv",)
    """Where losses, J per layer, learning rate and scores are logged. metrics.csv is always written; the others also
    get the throughput."""

    def __post_init__(self) -> None:
        counts = "epochs batch_size devices context evaluate_every checkpoint_every"
        require_range(self, "trainer", counts, "be at least 1")
        require_range(self, "trainer", "steps_per_epoch checkpoint_steps", "not be negative")
        require_range(self, "trainer", "ema", "lie in [0, 1)")
        is_even = self.devices % self.context == 0
        require(is_even, f"trainer.context must divide trainer.devices (got {self.context} and {self.devices})")


@dataclass(frozen=True)
class Recipe:
    """Settings of all benchmarks. A subclass adds data and model, and builds them."""

    benchmark: ClassVar[str] = ""

    seed: int = 0
    """Determines all random numbers of a run."""
    eta: float | None = None
    """Weight η of the KSVD loss; None takes the published setting for this recipe."""
    test: bool = True
    """Compute scores on test. Turn it off in runs that choose settings."""
    optim: OptimConfig = field(default_factory=OptimConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)

    def __post_init__(self) -> None:
        require(self.eta is None or self.eta >= 0, f"eta must not be negative (got {self.eta})")
        require(0 <= self.seed < 2**63, f"seed must be a non-negative 63-bit number (got {self.seed})")

    def resolved(self: T) -> T:
        """Return the recipe with every None that stands for the published setting replaced by its value."""
        return self

    def phases(self) -> list[tuple[str, Recipe]]:
        """Return the trainings of a run, each with its folder under the run folder ("" is the run folder)."""
        return [("", self)]

    def label(self) -> str:
        """Return the short name of the variant, for the default run folder."""
        return "-".join(self.model.attention) if hasattr(self, "model") else "run"

    def build(self) -> Experiment:
        """Read the data and make the model, ready to train."""
        raise NotImplementedError


@dataclass(frozen=True)
class NetworkConfig:
    """What the networks of all benchmarks share."""

    attention: tuple[str, ...] = ("primal",)
    """One name for all layers, a name with a plus for the last layer only, or one name per layer."""
    embed_dim: int = 512
    num_heads: int = 8
    layers: int = 2
    rank: int | None = None
    """Directions s of Primal-Attention; None takes the paper's."""

    def __post_init__(self) -> None:
        require(len(self.attention) > 0, "model.attention must name at least one attention")
        for f in dataclasses.fields(self):
            value = getattr(self, f.name)
            if isinstance(value, float):
                require_range(self, "model", f.name, "lie in [0, 1)")
            elif isinstance(value, int) and not isinstance(value, bool):
                require_range(self, "model", f.name, "not be negative" if f.name in MAY_BE_ZERO else "be at least 1")

    @property
    def is_primal_plus(self) -> bool:
        """Softmax attention in the first layers, which the paper tunes separately."""
        return self.attention[-1].endswith("+") or "softmax" in self.attention


def to_plain(value: Any) -> Any:
    """Convert dataclasses to dicts, tuples to lists and paths to strings, for YAML and JSON."""
    return json.loads(json.dumps(value, default=lambda v: vars(v) if dataclasses.is_dataclass(v) else str(v)))


def flatten(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield nested fields as pairs of a dotted name and a value."""
    for key, value in table.items():
        if isinstance(value, Mapping):
            yield from flatten(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


def from_plain(kind: type[T], data: Any, where: str = "") -> T:
    """Invert `to_plain` for a dataclass type; fields of earlier versions are mapped, errors name the field."""
    if not isinstance(data, Mapping):
        raise RunError(f"{where or kind.__name__} must be a table of fields (got {data!r})")
    data = _current_fields(data, where)
    hints = typing.get_type_hints(kind)
    names = [f.name for f in dataclasses.fields(typing.cast(Any, kind))]
    for key in data:
        require(key in names, f"{where}{key} is not a field of this version (has {', '.join(names)})")
    return kind(**{key: _convert(hints[key], value, f"{where}{key}") for key, value in data.items()})


def _current_fields(data: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Translate the fields of an earlier version; `where` ends in the group of the fields, after the file if any."""
    file, _, group = where.rpartition(": ")
    current: dict[str, Any] = {}
    for key, value in data.items():
        name = f"{group}{key}"
        if name == "trainer.tensorboard":
            current.setdefault("logger", ("csv", "tensorboard") if value is True else ("csv",))
        elif name == "data.kinds":
            current["length_buckets"] = value
        elif name in IGNORED:
            if file and value:
                warnings.warn(f"{where}{key} is ignored: this version does not have it", stacklevel=2)
        elif name in REMOVED:
            require(value == REMOVED[name], f"{where}{key} {value!r} was removed in this version")
        else:
            current[key] = value
    return current


def _convert(hint: Any, value: Any, where: str) -> Any:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        if value is None and type(None) in args:
            return None
        return _convert(next(a for a in args if a is not type(None)), value, where)
    if origin is Literal:
        if isinstance(value, bool) and {"on", "off"} <= set(args):  # YAML reads the two words as booleans
            value = "on" if value else "off"
        is_choice = isinstance(value, (str, int)) and value in args
        require(is_choice, f"{where} must be one of {', '.join(map(str, args))} (got {value!r})")
        return value
    if origin is tuple:
        require(isinstance(value, (str, list, tuple)), f"{where} must be a list (got {value!r})")
        items = [value] if isinstance(value, str) else list(value)
        return tuple(_convert(args[0], v, where) for v in items)
    if dataclasses.is_dataclass(hint):
        return from_plain(typing.cast(type, hint), value, f"{where}.")
    if hint is float and isinstance(value, float):
        require(math.isfinite(value), f"{where} must be a finite number (got {value})")
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        require(abs(value) < 2**1023, f"{where} must be float (got a larger number)")
        return float(value)
    if hint is Path:
        require(isinstance(value, (str, Path)), f"{where} must be a path (got {value!r})")
        return Path(value)
    is_valid = isinstance(value, hint) and not (hint is int and isinstance(value, bool))
    require(is_valid, f"{where} must be {hint.__name__} (got {value!r})")
    return value


def override(recipe: T, changes: Mapping[str, Any]) -> T:
    """Return a copy with fields changed by dotted name, such as `{"model.attention": ("softmax",), "seed": 3}`."""
    plain = to_plain(recipe)
    for dotted, value in changes.items():
        require(dotted not in RENAMED, f"{dotted} was replaced: use {RENAMED.get(dotted)}")
        *path, last = dotted.split(".")
        table = plain
        for key in path:
            require(isinstance(table.get(key), dict), f"{dotted} is not a field of this recipe")
            table = table[key]
        require(last in table, f"{dotted} is not a field of this recipe")
        table[last] = to_plain(value)
    return from_plain(type(recipe), plain)
