"""What is measured: sizes, precision, device. Checked once, before anything runs."""

from __future__ import annotations

import math
import re
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32, "float64": torch.float64}
DEFAULT_WIDTHS = ((512, 8),)


class BenchError(Exception):
    """What the user can mend, in one line."""


@dataclass(frozen=True)
class Case:
    """One point of the grid: a layer and the shape of its input."""

    embed_dim: int
    num_heads: int
    batch: int
    length: int
    dtype: torch.dtype = torch.float32
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    causal: bool = False
    data_dependent: bool = True
    decay: str | float | None = None
    rank: int = 30
    landmarks: int = 300

    @property
    def tokens(self) -> int:
        return self.batch * self.length


class OnDevice:
    """Settings that say where they run and in which dtype; None is what suits."""

    device: str | None
    dtype: str | None

    @property
    def on(self) -> torch.device:
        if self.device is None:
            return torch.device("cuda" if torch.cuda.is_available() else "cpu")
        return torch.device(self.device)

    @property
    def torch_dtype(self) -> torch.dtype:
        default = "bfloat16" if self.on.type == "cuda" else "float32"
        return DTYPES[self.dtype or default]


@dataclass(frozen=True)
class Settings(OnDevice):
    """A run of `primal bench attention`. None means: what suits the device."""

    lengths: tuple[int, ...] | None = None
    widths: tuple[tuple[int, int], ...] | None = None  # (embed_dim, num_heads)
    tokens: int | None = None  # per step: the batch is tokens // length, at least 1
    batch: int | None = None  # instead of tokens
    dtype: str | None = None
    device: str | None = None
    causal: bool = False
    data_dependent: bool = True
    decay: str | float | None = None
    rank: int = 30
    landmarks: int = 300
    baselines: bool = False
    only: tuple[str, ...] = ()
    eager: bool = False
    repeats: int = 20
    seconds: float = 0.5
    limit: float = 2.0
    seed: int = 0
    out: Path = Path("results/bench")
    name: str | None = None
    plot: bool = True
    commit: str | None = None
    command: str | None = None

    @property
    def file_name(self) -> str:
        """Runs of different kinds do not overwrite one another."""
        parts = [("causal", self.causal), ("baselines", self.baselines), ("eager", self.eager)]
        return self.name or "-".join(["attention", *(part for part, there in parts if there)])

    def cases(self) -> list[list[Case]]:
        """The grid: one list per width, by length."""
        gpu = self.on.type == "cuda"
        default = (256, 1024, 4096, 16384, 65536) if gpu else (256, 1024, 4096)
        lengths = tuple(sorted(set(self.lengths or default)))
        tokens = self.tokens or (65536 if gpu else None)
        return [
            [
                Case(
                    embed_dim=width,
                    num_heads=heads,
                    batch=self.batch or (max(1, tokens // n) if tokens else 1),
                    length=n,
                    dtype=self.torch_dtype,
                    device=self.on,
                    causal=self.causal,
                    data_dependent=self.data_dependent and not self.causal,
                    decay=self.decay,
                    rank=self.rank,
                    landmarks=self.landmarks,
                )
                for n in lengths
            ]
            for width, heads in self.widths or DEFAULT_WIDTHS
        ]

    def check(self) -> None:
        """Raise BenchError for what cannot run at all."""
        check_device(self.device)
        if self.dtype is not None and self.dtype not in DTYPES:
            raise BenchError(f"--dtype must be one of {', '.join(DTYPES)} (got {self.dtype!r})")
        for flag, values in (
            ("lengths", self.lengths),
            ("tokens", self.tokens),
            ("batch", self.batch),
            ("repeats", self.repeats),
            ("seconds", self.seconds),
            ("limit", self.limit),
        ):
            for value in values if isinstance(values, tuple) else (values,):
                if value is not None:
                    check_positive(flag, value)
        if self.tokens is not None and self.batch is not None:
            raise BenchError("--tokens and --batch exclude each other: one follows from the other and the length")
        self._check_layer()
        check_out(self.out, self.name)

    def _check_layer(self) -> None:
        from primal_attention import PrimalAttention

        for width, heads in self.widths or DEFAULT_WIDTHS:
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # a large rank is odd, not wrong
                    PrimalAttention(width, heads, **primal_keywords(self.cases()[0][0]))
            except (ValueError, TypeError) as error:
                raise BenchError(f"a Primal layer of width {width}:{heads} cannot be made: {error}") from None


def primal_keywords(case: Case) -> dict[str, Any]:
    """What makes PrimalAttention the layer of the case, but for its width, backend, device and dtype."""
    return {
        "rank": case.rank,
        "landmarks": case.landmarks,
        "data_dependent": case.data_dependent,
        "causal": case.causal,
        "decay": case.decay,
    }


def check_device(device: str | None) -> None:
    if device is None:
        return
    try:
        kind = torch.device(device).type
    except RuntimeError:
        raise BenchError(f"--device must be cpu, cuda or cuda:N (got {device!r})") from None
    if kind not in ("cpu", "cuda"):
        raise BenchError(f"--device must be cpu, cuda or cuda:N (got {device!r})")
    if kind == "cuda" and not torch.cuda.is_available():
        raise BenchError("--device cuda: torch finds no CUDA device here (primal info says more)")


def check_positive(flag: str, value: float) -> None:
    if not math.isfinite(value):
        raise BenchError(f"--{flag} must be finite (got {value})")
    if value <= 0:
        raise BenchError(f"--{flag} must be above 0 (got {value})")


def check_out(out: Path, name: str | None) -> None:
    """Find out before an hour of measuring, not after it, that nothing can be written."""
    if name is not None and (not name or Path(name).name != name):
        raise BenchError(f"--name must be a file's name without a folder (got {name!r}): --out names the folder")
    try:
        out.mkdir(parents=True, exist_ok=True)
        probe = out / ".probe"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise BenchError(f"--out {out} cannot be written to ({error.strerror})") from None


def read_length(text: str) -> int:
    """A number of tokens: 4096, 4K or 1M."""
    found = re.fullmatch(r"(\d+)([KkMm]?)", text)
    if not found or not int(found[1]):
        raise BenchError(f"a length must be a number of tokens such as 4096, 4K or 1M (got {text!r})")
    return int(found[1]) * {"": 1, "k": 1024, "m": 1024**2}[found[2].lower()]


def show_length(n: int) -> str:
    for unit, letter in ((1024**2, "M"), (1024, "K")):
        if n % unit == 0:
            return f"{n // unit}{letter}"
    return str(n)


def read_width(text: str) -> tuple[int, int]:
    """embed_dim:num_heads; heads of 64 when only the first is given."""
    found = re.fullmatch(r"(\d+)(?::(\d+))?", text)
    if not found:
        raise BenchError(f"a width must be embed_dim:num_heads such as 512:8 (got {text!r})")
    width = int(found[1])
    return width, int(found[2]) if found[2] else max(1, width // 64)


def read_decay(text: str) -> str | float:
    if text == "learned":
        return text
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value <= 1:
        raise BenchError(f"--decay must be 'learned' or a number in (0, 1] (got {text!r})")
    return value
