"""Multivariate time series with class labels: the UEA archive, one's own files, and the preprocessing of both.

    data = load("Handwriting", "data/uea")     # data/uea/Handwriting/Handwriting_TRAIN.ts and _TEST.ts
    data = load_file("mine.parquet")           # one's own data: .npz, .parquet or .ts

A series is an array (time, channels). Missing values are interpolated along time, `Standardizer` scales each channel by
the mean and deviation of the training samples, and `pad` builds batches with a mask that is True at padding.
JapaneseVowels and BasicMotions ship with the aeon package and need no download. The archive is described in Bagnall et
al., "The UEA multivariate time series classification archive", 2018.
"""

from __future__ import annotations

import difflib
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from primal_attention.data.storage import default_folder, one_line, read_npz, reading
from primal_attention.utils.errors import DataError, import_package

ARCHIVE = "https://www.timeseriesclassification.com"
INSIDE_AEON = ("JapaneseVowels", "BasicMotions")
TEST_FRACTION = 0.3  # of one file, for the test split of `load_file`
HEAVY_TAIL = 10.0  # standard deviation of a heavy-tailed channel, in robust standard deviations
VARIANCE_FLOOR = 1e-3  # added to the variance of a principal direction, in units of a channel's variance


@dataclass(frozen=True)
class Split:
    """Samples of one split: series of shape (time, channels) and integer labels."""

    series: list[np.ndarray]
    labels: np.ndarray  # (samples,) int64

    def __len__(self) -> int:
        return len(self.series)

    def take(self, index: np.ndarray) -> Split:
        return Split([self.series[i] for i in index], self.labels[index])


@dataclass(frozen=True)
class SeriesData:
    """A classification problem: a training split, a test split and the names of the classes."""

    name: str
    train: Split
    test: Split
    classes: tuple[str, ...]

    @property
    def channels(self) -> int:
        return self.train.series[0].shape[1]

    @property
    def max_length(self) -> int:
        """Longest series of the training split."""
        return max(len(s) for s in self.train.series)


# Preprocessing


def drop_missing_tail(series: np.ndarray) -> np.ndarray:
    """Cut the final time steps in which no channel has a value: archives pad unequal lengths that way."""
    known = np.flatnonzero(np.isfinite(series).any(axis=1))
    return series[: known[-1] + 1] if len(known) else series


def interpolate_missing(series: np.ndarray) -> np.ndarray:
    """Fill gaps linearly along time, at the ends with the nearest value; a channel without any value stays NaN."""
    finite = np.isfinite(series)
    if finite.all():
        return series
    filled = np.where(finite, series, np.nan)
    time = np.arange(len(series))
    for c in np.flatnonzero(~finite.all(axis=0)):
        known = finite[:, c]
        if known.any():
            filled[:, c] = np.interp(time, time[known], series[known, c])
    return filled


@dataclass(frozen=True)
class Standardizer:
    """Per-channel z-score. Statistics are over all time steps of the training samples (ddof 1)."""

    mean: np.ndarray  # (channels,)
    std: np.ndarray  # (channels,)

    @classmethod
    def fit(cls, series: Sequence[np.ndarray]) -> Standardizer:
        steps = np.concatenate(series).astype(np.float64)  # (total time, channels)
        known = np.isfinite(steps)
        count = known.sum(axis=0)
        mean = np.where(known, steps, 0.0).sum(axis=0) / np.maximum(count, 1)
        square = np.where(known, steps - mean, 0.0) ** 2
        std = np.sqrt(square.sum(axis=0) / np.maximum(count - 1, 1))
        # A constant channel keeps its scale, to avoid a division by zero. Channels may have small units, such as tesla.
        flat = std <= 1e-12 * np.abs(mean)
        return cls(mean, np.where(flat, 1.0, std))

    def __call__(self, series: np.ndarray) -> np.ndarray:
        """Return a standardised copy; a channel without any value becomes zero, the training mean."""
        return np.nan_to_num((series - self.mean) / self.std, nan=0.0)


@dataclass(frozen=True)
class PrincipalChannels(Standardizer):
    """Per-channel z-score, followed by the same steps along the principal directions of the training samples' steps.

    (time, channels) → (time, 2 · channels). Channels of one body or machine often move together, and the classes may
    differ by a small difference between channels. Along the principal directions it has about unit variance.
    """

    basis: np.ndarray  # (channels, channels): one direction per column, divided by its deviation

    @classmethod
    def fit(cls, series: Sequence[np.ndarray]) -> PrincipalChannels:
        plain = Standardizer.fit(series)
        steps = np.concatenate([plain(s) for s in series])  # (total time, channels)
        variance, directions = np.linalg.eigh(steps.T @ steps / max(len(steps) - 1, 1))
        basis = fix_signs(directions) / np.sqrt(variance.clip(min=0.0) + VARIANCE_FLOOR)
        return cls(plain.mean, plain.std, basis)

    def __call__(self, series: np.ndarray) -> np.ndarray:
        plain = super().__call__(series)
        return np.concatenate([plain, plain @ self.basis], axis=1)


@dataclass(frozen=True)
class CompressedChannels(PrincipalChannels):
    """PrincipalChannels of series whose heavy-tailed channels are compressed: x → arcsinh((x − median) / deviation).

    A channel is heavy-tailed if its standard deviation is more than `HEAVY_TAIL` times that of a normal distribution
    with the same median absolute deviation. A z-score would map almost all of its values close to zero.
    """

    median: np.ndarray  # (channels,)
    deviation: np.ndarray  # (channels,): 0 leaves a channel as it is

    @classmethod
    def fit(cls, series: Sequence[np.ndarray]) -> CompressedChannels:
        steps = np.concatenate(series).astype(np.float64)  # (total time, channels)
        steps[:, ~np.isfinite(steps).any(axis=0)] = 0.0  # a channel without any value
        median = np.nanmedian(steps, axis=0)
        deviation = 1.4826 * np.nanmedian(np.abs(steps - median), axis=0)
        deviation = np.where(np.nanstd(steps, axis=0) > HEAVY_TAIL * deviation, deviation, 0.0)
        plain = PrincipalChannels.fit([compress(s, median, deviation) for s in series])
        return cls(plain.mean, plain.std, plain.basis, median, deviation)

    def __call__(self, series: np.ndarray) -> np.ndarray:
        return super().__call__(compress(series, self.median, self.deviation))


def compress(series: np.ndarray, median: np.ndarray, deviation: np.ndarray) -> np.ndarray:
    """Return arcsinh((series − median) / deviation), and channels with deviation 0 unchanged."""
    has_heavy_tail = deviation > 0
    return np.where(has_heavy_tail, np.arcsinh((series - median) / np.where(has_heavy_tail, deviation, 1.0)), series)


def fix_signs(directions: np.ndarray) -> np.ndarray:
    """Flip unit vectors (columns) so that their signs do not depend on the machine or on rounding.

    The first large entry becomes positive. The largest entry would not do: another may have the same size.
    """
    size = np.abs(directions)
    first = (size > 0.5 * size.max(axis=0)).argmax(axis=0, keepdims=True)
    return directions * np.where(np.take_along_axis(directions, first, axis=0) < 0, -1.0, 1.0)


def pad(series: Sequence[np.ndarray], *, length: int | None = None, clip: bool = True) -> tuple[np.ndarray, np.ndarray]:
    """Stack to float32 (samples, time, channels) with zeros on the right, and the mask (samples, time), True = padding.

    `length` is the least length of the result; longer series are cut to it unless `clip` is off.
    """
    longest = max((len(s) for s in series), default=0)
    if length is None or (not clip and longest > length):
        length = longest
    channels = series[0].shape[1] if len(series) else 0
    values: np.ndarray = np.zeros((len(series), length, channels), dtype=np.float32)
    mask = np.ones((len(series), length), dtype=bool)
    for i, s in enumerate(series):
        n = min(len(s), length)
        values[i, :n] = s[:n]
        mask[i, :n] = False
    return values, mask


def stratified_holdout(labels: np.ndarray, fraction: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return indices of training and of holdout samples: `fraction` of every class, never the only one of a class."""
    rng = np.random.default_rng(seed)
    parts = []
    for label in np.unique(labels):
        members = rng.permutation(np.flatnonzero(labels == label))
        parts.append(members[: min(max(1, round(fraction * len(members))), len(members) - 1)])
    holdout = np.sort(np.concatenate(parts))
    if len(holdout) == 0:
        raise DataError("every class has one sample only: no sample can be held out")
    return np.setdiff1d(np.arange(len(labels)), holdout), holdout


def folds(labels: np.ndarray, count: int, seed: int) -> np.ndarray:
    """Return the fold of each sample, 0 … count − 1; sizes are nearly equal, and every class is spread over all."""
    rng, fold, start = np.random.default_rng(seed), np.empty(len(labels), dtype=np.int64), 0
    for label in np.unique(labels):
        members = rng.permutation(np.flatnonzero(labels == label))
        fold[members] = (start + np.arange(len(members))) % count
        start += len(members)
    return fold


# The archive


def load(name: str, folder: str | Path | None = None) -> SeriesData:
    """Read a set of the archive: `<name>_TRAIN` and `_TEST`, `.npz` or `.ts`, in the folder or in `<folder>/<name>`."""
    train = find(name, folder)
    if train is None:
        root = Path(folder or default_folder("uea"))
        known = [place.stem.removesuffix("_TRAIN") for place in root.iterdir()] if root.is_dir() else []
        near = difflib.get_close_matches(name, [*known, *INSIDE_AEON], n=1)
        hint = f" (did you mean {near[0]}?)" if near else ""
        state = "" if root.is_dir() else ", which is a file" if root.exists() else ", which does not exist"
        raise DataError(
            f"UEA set {name!r} is not in {root}{state}{hint}: get it from "
            f"{ARCHIVE} and unpack it to {root / name / name}_TRAIN.ts, or name another folder with --data.folder"
        )
    test = train.with_name(f"{name}_TEST{train.suffix}")
    if not test.is_file():
        raise DataError(f"{test} is missing: the archive at {ARCHIVE} has both files of a set")
    return load_file(train, test)


def find(name: str, folder: str | Path | None = None) -> Path | None:
    """Return the training file of a set. The default folder may lack a set that aeon has."""
    root = Path(folder or default_folder("uea"))
    for file in (home / f"{name}_TRAIN{ending}" for home in (root / name, root) for ending in (".npz", ".ts")):
        if file.is_file():
            return file
    if name in INSIDE_AEON and folder is None and (root.is_dir() or "PRIMAL_UEA" not in os.environ):
        aeon = import_package("aeon", "reading .ts files")
        return Path(aeon.__file__).parent / "datasets" / "data" / name / f"{name}_TRAIN.ts"
    return None


# One's own files


def load_file(path: str | Path, test_path: str | Path | None = None, *, seed: int = 0) -> SeriesData:
    """Read labelled series from a file of one's own.

    Args:
        path: One of
            `.npz`: arrays X, (samples, channels, time) or (samples, time), NaN behind shorter series, and y (samples,).
            `.parquet`: columns `sample`, `time` and `label`, and one column per channel.
            `.ts`: the text format of aeon and sktime, unequal lengths included.
        test_path: A file of the same kind for the test split; without it, 30 % of every class become the test split.
        seed: Seed of that split.

    Returns:
        Both splits with gaps filled; nothing is standardised.
    """
    path = Path(path)
    series, names = _read_file(path)
    classes = tuple(sorted(set(names), key=_natural_order))
    if len(classes) < 2:
        raise DataError(f"{path}: only one class ({classes[0]}); classification needs at least two")
    codes = {name: i for i, name in enumerate(classes)}
    train = Split(series, np.array([codes[name] for name in names], dtype=np.int64))
    if test_path is None:
        try:
            remaining, holdout = stratified_holdout(train.labels, TEST_FRACTION, seed)
        except DataError as error:
            raise DataError(f"{path}: {error}; pass a test file instead") from None
        train, test = train.take(remaining), train.take(holdout)
    else:
        series, names = _read_file(Path(test_path))
        if unknown := sorted(set(names) - set(classes), key=_natural_order):
            raise DataError(
                f"{test_path}: label {unknown[0]!r} does not occur in {path.name} (has {_shorten(classes)})"
            )
        test = Split(series, np.array([codes[name] for name in names], dtype=np.int64))
        widths = train.series[0].shape[1], series[0].shape[1]
        if widths[0] != widths[1]:
            raise DataError(f"{test_path}: {widths[1]} channels where {path.name} has {widths[0]}")
    return SeriesData(path.stem.removesuffix("_TRAIN"), train, test, classes)


def _read_file(file: Path) -> tuple[list[np.ndarray], list[str]]:
    """Return the series of a file with gaps filled, and their labels."""
    if file.suffix not in _READERS:
        raise DataError(f"{file}: expected a file that ends in {', '.join(_READERS)}")
    if not file.is_file():
        raise DataError(f"{file} is {'not a file' if file.exists() else 'missing'}")
    series, values = _READERS[file.suffix](file)
    if len(series) == 0:
        raise DataError(f"{file}: no samples; is the file truncated?")
    return _fill_gaps(series, file), _label_names(values, file)


def _read_ts(file: Path) -> tuple[list[np.ndarray], list[Any]]:
    import_package("aeon", "reading .ts files")
    from aeon.datasets import load_from_ts_file

    try:
        series, labels, meta = load_from_ts_file(str(file), return_meta_data=True)
    except Exception as error:  # aeon raises almost any type for damaged files
        # aeon puts the repr of the open file into its message.
        reason = one_line(error).split("'utf-8'>. ")[-1].removesuffix(".")
        raise DataError(f"{file}: cannot be read, truncated or ragged ({reason})") from error
    if len(series) and (not meta["classlabel"] or len(labels) != len(series)):
        raise DataError(f"{file}: no class labels; the header must say '@classLabel true' and name the classes")
    declared = set(meta["class_values"])
    names = [str(label).strip() for label in labels]
    for i, label in enumerate(names):
        if label not in declared:
            raise DataError(
                f"{file}: sample {i + 1} ends in label {label[:40]!r}, which the header does not declare "
                f"(has {_shorten(sorted(declared, key=_natural_order))}); is the file truncated?"
            )
    return [np.asarray(sample, dtype=np.float64).T for sample in series], names


def _read_arrays(file: Path) -> tuple[list[np.ndarray], list[Any]]:
    arrays = read_npz(file, "a .npz file of plain arrays X (samples, channels, time) and y (samples,)", ("X", "y"))
    x, y = arrays["X"], arrays["y"]
    if x.dtype.kind not in "fiu" or x.ndim not in (2, 3):
        raise DataError(
            f"{file}: X must be numbers of shape (samples, channels, time) or (samples, time) "
            f"(got {x.dtype} of shape {x.shape})"
        )
    if y.shape != x.shape[:1]:
        raise DataError(f"{file}: y must have one label for each of the {len(x)} samples of X (got shape {y.shape})")
    if x.ndim == 2:
        x = x[:, None]
    return [sample.T.astype(np.float64) for sample in x], y.tolist()


def _read_parquet(file: Path) -> tuple[list[np.ndarray], list[Any]]:
    parquet = import_package("pyarrow.parquet", f"reading {file}")
    with reading(file, "a parquet file"):
        table = parquet.read_table(file)
        for key in ("label", "sample", "time"):
            if key not in table.column_names:
                raise DataError(f"{file}: lacks the column {key!r} (has {_shorten(table.column_names)})")
        others = [name for name in table.column_names if name not in ("sample", "time", "label")]
        columns = {name: table[name] for name in others if not name.startswith("__index_level_")}  # pandas' row numbers
        if not columns or len(table) == 0:
            raise DataError(f"{file}: no values: expected columns of numbers beside {_shorten(table.column_names)}")
        channels = [column.to_numpy() for column in columns.values()]
        for name, channel in zip(columns, channels, strict=True):
            if channel.dtype.kind not in "fiu":
                raise DataError(f"{file}: column {name!r} must hold numbers (got {columns[name].type})")
        if "string" in str(table["time"].type):
            raise DataError(f"{file}: column 'time' must hold numbers or times: text has another order")
        values, labels = np.stack(channels, axis=1).astype(np.float64), table["label"].to_pylist()
        return _split_rows(values, labels, table["sample"].to_pylist(), table["time"].to_numpy(), file)


def _split_rows(
    values: np.ndarray, labels: list[Any], samples: list[Any], time: np.ndarray, file: Path
) -> tuple[list[np.ndarray], list[Any]]:
    """Cut the rows of a table into samples, each ordered by time."""
    has_gaps = any(sample is None or sample != sample for sample in samples)  # NaN and NaT differ from themselves
    if has_gaps or np.any(time != time):
        raise DataError(f"{file}: the columns 'sample' and 'time' must have a value in every row")
    groups: dict[Any, list[int]] = {}
    for row in np.argsort(time, kind="stable"):
        groups.setdefault(samples[row], []).append(row)
    for sample, rows in groups.items():
        repeated = time[rows][1:][time[rows][1:] == time[rows][:-1]]
        if len(repeated):
            raise DataError(f"{file}: sample {sample!r} has two rows with time {repeated[0]}")
        if len({str(labels[row]) for row in rows}) > 1:
            raise DataError(f"{file}: sample {sample!r} has more than one label")
    order = dict.fromkeys(samples)
    return [values[groups[sample]] for sample in order], [labels[groups[sample][0]] for sample in order]


_READERS = {".npz": _read_arrays, ".parquet": _read_parquet, ".ts": _read_ts}


def _label_names(values: Sequence[Any], file: Path) -> list[str]:
    """Return labels as text. Integers and floats of one value give one text, so that two files agree."""
    names = []
    for i, value in enumerate(values):
        if value is None or (isinstance(value, float) and not math.isfinite(value)):
            raise DataError(f"{file}: the label of sample {i + 1} is missing ({value})")
        is_integer = isinstance(value, float) and value.is_integer()
        name = value.decode(errors="replace") if isinstance(value, bytes) else str(int(value) if is_integer else value)
        if not name.strip():
            raise DataError(f"{file}: the label of sample {i + 1} is missing (empty text)")
        names.append(name.strip())
    return names


def _fill_gaps(series: Sequence[np.ndarray], file: Path) -> list[np.ndarray]:
    """Cut missing tails and interpolate; refuse series without steps or channels, and values that are all missing."""
    empty = next((i for i, s in enumerate(series) if 0 in s.shape), None)
    if empty is not None:
        raise DataError(f"{file}: sample {empty + 1} has no values (its shape is {series[empty].shape})")
    if not any(np.isfinite(s).any() for s in series):
        raise DataError(f"{file}: every value is missing (NaN)")
    return [interpolate_missing(drop_missing_tail(np.ascontiguousarray(s))) for s in series]


def _natural_order(label: str) -> tuple[int, float, str]:
    """Sort key: numbers by value before other labels by name."""
    try:
        return (0, float(label), label)
    except ValueError:
        return (1, 0.0, label)


def _shorten(items: Sequence[str], limit: int = 6) -> str:
    return ", ".join(items[:limit]) + (", …" if len(items) > limit else "")
