"""Labelled collections of multivariate series, and the preprocessing every time-series model here shares.

A series is an array (time, channels). Missing values are interpolated along time, each channel is standardised with the
training set's mean and deviation, and batches are padded on the right, with a mask that is True on padding.

The UEA archive of multivariate time-series classification (Bagnall et al., 2018), read from its `.ts` files.

    data = load("Handwriting", "data/uea")     # data/uea/Handwriting/Handwriting_TRAIN.ts and _TEST.ts
    save_npz(data, "data/uea")                 # data/uea/Handwriting.npz: the same without aeon, and faster

Parsing is aeon's; what is checked here is what a training run relies on. JapaneseVowels and BasicMotions lie inside the
aeon package and need no download.

Principal directions of the channels, each of about unit variance, beside the channels themselves.

Channels of one body or one machine often move together, and what tells two classes apart may be a small difference
between them: a thumb beside its hand. Standardised channel by channel such a difference is tiny, and noise on the
channels covers it; along the principal directions it is as large as everything else.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from primal_attention.data.storage import one_line, read_npz, write_file
from primal_attention.utils.errors import DataError, import_package


@dataclass(frozen=True)
class Split:
    """Cases of one half of a data set: series of shape (time, channels) and integer labels."""

    series: list[np.ndarray]
    labels: np.ndarray  # (cases,) int64

    def __len__(self) -> int:
        return len(self.series)

    def take(self, index: np.ndarray) -> Split:
        return Split([self.series[i] for i in index], self.labels[index])


@dataclass(frozen=True)
class SeriesData:
    """A classification problem: a training half, a test half and the class names that the labels count."""

    name: str
    train: Split
    test: Split
    classes: tuple[str, ...]

    @property
    def channels(self) -> int:
        return self.train.series[0].shape[1]

    @property
    def max_length(self) -> int:
        """Longest series of the training half."""
        return max(len(s) for s in self.train.series)


def drop_missing_tail(series: np.ndarray) -> np.ndarray:
    """Cut the time steps at the end in which no channel has a value: archives pad unequal lengths that way."""
    known = np.flatnonzero(np.isfinite(series).any(axis=1))
    return series[: known[-1] + 1] if len(known) else series


def interpolate_missing(series: np.ndarray) -> np.ndarray:
    """Fill gaps linearly along time; gaps at the ends take the nearest value; a channel without any value stays NaN."""
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
    """Per-channel z-score. Statistics are over all time steps of the training cases (ddof 1)."""

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
        # A constant channel carries nothing: leave its scale alone instead of dividing by zero.
        flat = std <= 1e-12 * np.maximum(np.abs(mean), 1.0)
        return cls(mean, np.where(flat, 1.0, std))

    def __call__(self, series: np.ndarray) -> np.ndarray:
        """Standardised copy; a channel without any value becomes zero, the training mean."""
        return np.nan_to_num((series - self.mean) / self.std, nan=0.0)


def pad(series: Sequence[np.ndarray], *, length: int | None = None, clip: bool = True) -> tuple[np.ndarray, np.ndarray]:
    """Stack to (cases, time, channels) float32 with zeros on the right, and the mask (cases, time), True = padding.

    `length` is the least length of the result; longer series are cut to it, or kept whole when `clip` is off.
    """
    longest = max((len(s) for s in series), default=0)
    if length is None or (not clip and longest > length):
        length = longest
    channels = series[0].shape[1] if len(series) else 0
    values = np.zeros((len(series), length, channels), dtype=np.float32)
    mask = np.ones((len(series), length), dtype=bool)
    for i, s in enumerate(series):
        n = min(len(s), length)
        values[i, :n] = s[:n]
        mask[i, :n] = False
    return values, mask


def stratified_holdout(labels: np.ndarray, fraction: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Indices of (kept, held out): about `fraction` of every class held out, never the only case of a class."""
    if not 0.0 < fraction < 1.0:
        raise DataError(f"the held-out fraction must lie between 0 and 1 (got {fraction})")
    if len(labels) == 0:
        raise DataError("there are no samples to hold any out")
    rng = np.random.default_rng(seed)
    held = []
    for label in np.unique(labels):
        cases = rng.permutation(np.flatnonzero(labels == label))
        count = min(max(1, round(fraction * len(cases))), len(cases) - 1)
        held.append(cases[:count])
    out = np.sort(np.concatenate(held))
    if len(out) == 0:
        raise DataError("every class has one case only: nothing can be held out for validation")
    return np.setdiff1d(np.arange(len(labels)), out), out


ARCHIVE = "https://www.timeseriesclassification.com"
INSIDE_AEON = ("JapaneseVowels", "BasicMotions")
SETS = (
    "ArticularyWordRecognition", "AtrialFibrillation", "BasicMotions", "CharacterTrajectories", "Cricket",
    "DuckDuckGeese", "EigenWorms", "Epilepsy", "ERing", "EthanolConcentration", "FaceDetection", "FingerMovements",
    "HandMovementDirection", "Handwriting", "Heartbeat", "InsectWingbeat", "JapaneseVowels", "Libras", "LSST",
    "MotorImagery", "NATOPS", "PEMS-SF", "PenDigits", "PhonemeSpectra", "RacketSports", "SelfRegulationSCP1",
    "SelfRegulationSCP2", "SpokenArabicDigits", "StandWalkJump", "UWaveGestureLibrary",
)  # fmt: skip


def default_folder() -> Path:
    """$PRIMAL_UEA, or data/uea under the working directory."""
    return Path(os.environ.get("PRIMAL_UEA", "data/uea"))


def load(name: str, folder: str | Path | None = None) -> SeriesData:
    """Read one set: `<folder>/<name>.npz` if present, else the `.ts` pair; gaps are filled, nothing is standardised."""
    place = default_folder() if folder is None else Path(folder)
    saved = place / f"{name}.npz"
    if saved.is_file():
        return load_npz(saved)
    home = _home_of(name, place, bundled=folder is None)
    train, test = (home / f"{name}_{half}.ts" for half in ("TRAIN", "TEST"))
    for file in (train, test):
        if not file.is_file():
            raise DataError(f"{file} is missing: the archive at {ARCHIVE} has it next to its other half")
    return read_pair(name, train, test)


def available(name: str, folder: str | Path | None = None) -> bool:
    """Whether `load` would find the set."""
    place = default_folder() if folder is None else Path(folder)
    try:
        return (place / f"{name}.npz").is_file() or _home_of(name, place, bundled=folder is None).is_dir()
    except DataError:
        return False


def _home_of(name: str, folder: Path, *, bundled: bool) -> Path:
    """The folder that holds the `.ts` pair of a set. `bundled`: aeon's own copy may stand in for a missing one."""
    for home in (folder / name, folder):
        if (home / f"{name}_TRAIN.ts").is_file() or (home / f"{name}_TEST.ts").is_file():
            return home
    if name in INSIDE_AEON and bundled and (folder.is_dir() or "PRIMAL_UEA" not in os.environ):
        aeon = import_package("aeon", "reading .ts files")
        return Path(aeon.__file__).parent / "datasets" / "data" / name
    known = [p.stem for p in folder.iterdir() if p.is_dir() or p.suffix == ".npz"] if folder.is_dir() else []
    near = difflib.get_close_matches(name, [*known, *SETS], n=1)
    hint = f" (did you mean {near[0]}?)" if near and near[0] != name else ""
    raise DataError(
        f"UEA set {name!r} is not in {folder}{'' if folder.is_dir() else ', which does not exist'}{hint}: get it from "
        f"{ARCHIVE} and unpack it to {folder / name / (name + '_TRAIN.ts')}, or name another folder with --data.folder"
    )


def read_pair(name: str, train_file: Path, test_file: Path) -> SeriesData:
    """Read the two halves and code the labels of both by the training half's classes."""
    train_series, train_labels = _read_ts(train_file)
    test_series, test_labels = _read_ts(test_file)
    classes = tuple(sorted(set(train_labels), key=_natural))
    if len(classes) < 2:
        raise DataError(f"{train_file}: only one class ({classes[0]}); classification needs at least two")
    unknown = sorted(set(test_labels) - set(classes), key=_natural)
    if unknown:
        raise DataError(f"{test_file}: label {unknown[0]!r} does not occur in {train_file.name} (has {_few(classes)})")
    widths = train_series[0].shape[1], test_series[0].shape[1]
    if widths[0] != widths[1]:
        raise DataError(f"{test_file}: {widths[1]} channels where {train_file.name} has {widths[0]}")
    code = {label: i for i, label in enumerate(classes)}
    halves = [
        Split(series, np.array([code[x] for x in labels], dtype=np.int64))
        for series, labels in ((train_series, train_labels), (test_series, test_labels))
    ]
    return SeriesData(name, halves[0], halves[1], classes)


def _read_ts(file: Path) -> tuple[list[np.ndarray], list[str]]:
    """Series (time, channels) and label strings of one `.ts` file, checked."""
    import_package("aeon", "reading .ts files")
    from aeon.datasets import load_from_ts_file

    try:
        cases, labels, meta = load_from_ts_file(str(file), return_meta_data=True)
    except Exception as error:  # aeon raises almost any type for damaged files
        # aeon puts the repr of the open file into its message.
        reason = one_line(error).split("'utf-8'>. ")[-1].removesuffix(".")
        raise DataError(f"{file}: cannot be read, truncated or ragged ({reason})") from error
    if len(cases) == 0:
        raise DataError(f"{file}: no cases (is the file cut off before or right after @data?)")
    if not meta["classlabel"] or len(labels) != len(cases):
        raise DataError(f"{file}: no class labels; the header must say '@classLabel true' and name the classes")
    names = [str(label).strip() for label in labels]
    declared = set(meta["class_values"])
    for i, label in enumerate(names):
        if label not in declared:
            raise DataError(
                f"{file}: case {i + 1} ends in label {label[:40]!r}, which the header does not declare "
                f"(has {_few(sorted(declared, key=_natural))}); is the file truncated?"
            )
    return _fill_gaps([np.asarray(case, dtype=np.float64).T for case in cases], str(file)), names


def _fill_gaps(series: Sequence[np.ndarray], where: str) -> list[np.ndarray]:
    """Cut missing ends, interpolate missing values; refuse series without steps or channels, and values that are all
    missing."""
    if any(0 in s.shape for s in series):
        number = next(i for i, s in enumerate(series) if 0 in s.shape)
        raise DataError(f"{where}: sample {number + 1} has no values (its shape is {series[number].shape})")
    if not any(np.isfinite(s).any() for s in series):
        raise DataError(f"{where}: every value is missing (NaN)")
    return [interpolate_missing(drop_missing_tail(np.ascontiguousarray(s))) for s in series]


def _natural(label: str) -> tuple[int, float, str]:
    """Sort key: numbers by value before other labels by name."""
    try:
        return (0, float(label), label)
    except ValueError:
        return (1, 0.0, label)


def _few(items: Sequence[str], limit: int = 6) -> str:
    return ", ".join(items[:limit]) + (", …" if len(items) > limit else "")


def save_npz(data: SeriesData, folder: str | Path) -> Path:
    """Write `<folder>/<name>.npz`, which `load` prefers over the `.ts` pair and which needs no aeon."""
    arrays: dict[str, np.ndarray] = {"classes": np.array(data.classes)}
    for half, split in (("train", data.train), ("test", data.test)):
        arrays[f"{half}_values"] = np.concatenate(split.series)
        arrays[f"{half}_lengths"] = np.array([len(s) for s in split.series])
        arrays[f"{half}_labels"] = split.labels
    target = Path(folder) / f"{data.name}.npz"
    write_file(target, lambda out: np.savez_compressed(out, **arrays))  # type: ignore[arg-type]
    return target


def load_npz(file: str | Path) -> SeriesData:
    """Read what `save_npz` wrote; every array is checked."""
    file = Path(file)
    keys = ["classes", *(f"{half}_{part}" for half in ("train", "test") for part in ("values", "lengths", "labels"))]
    arrays = read_npz(file, "a saved data set of this library", keys)
    missing = [key for key in keys if key not in arrays]
    if missing:
        raise DataError(f"{file}: not a saved data set of this library (lacks {', '.join(missing)})")
    classes = tuple(str(name) for name in np.atleast_1d(arrays["classes"]).ravel())
    if arrays["classes"].ndim != 1 or not 2 <= len(classes) == len(set(classes)):
        raise DataError(f"{file}: classes must list at least two different names (got {_few(classes) or 'none'})")
    train, test = (_checked_half(arrays, half, len(classes), file) for half in ("train", "test"))
    if train.series[0].shape[1] != test.series[0].shape[1]:
        raise DataError(
            f"{file}: test_values has {test.series[0].shape[1]} channels where train_values has "
            f"{train.series[0].shape[1]}"
        )
    if len(np.unique(train.labels)) < 2:
        raise DataError(
            f"{file}: train_labels has only one class ({classes[train.labels[0]]}); at least two are needed"
        )
    return SeriesData(file.stem, train, test, classes)


def _checked_half(arrays: Mapping[str, np.ndarray], half: str, classes: int, file: Path) -> Split:
    """The samples of one half: values (total time, channels), cut at the lengths, and labels 0 … classes - 1."""
    values, lengths, labels = (arrays[f"{half}_{part}"] for part in ("values", "lengths", "labels"))
    if values.dtype.kind not in "fiu" or values.ndim != 2:
        raise DataError(
            f"{file}: {half}_values must be numbers of shape (total time, channels) (got {values.dtype} of shape "
            f"{values.shape})"
        )
    for part, array in (("lengths", lengths), ("labels", labels)):
        if array.dtype.kind not in "iu" or array.ndim != 1:
            raise DataError(
                f"{file}: {half}_{part} must be integers, one per sample (got {array.dtype} of shape {array.shape})"
            )
    if len(lengths) == 0:
        raise DataError(f"{file}: {half}_lengths lists no samples")
    if len(labels) != len(lengths):
        raise DataError(f"{file}: {half}_labels has {len(labels)} samples where {half}_lengths has {len(lengths)}")
    total = sum(map(int, lengths))  # Python's integers do not overflow
    if lengths.min() < 1 or total != len(values):
        raise DataError(
            f"{file}: {half}_lengths must be positive and add up to the {len(values)} rows of {half}_values (they add "
            f"up to {total}, the smallest is {lengths.min()})"
        )
    if labels.min() < 0 or labels.max() >= classes:
        raise DataError(
            f"{file}: {half}_labels must lie between 0 and {classes - 1} (got {labels.min()} to {labels.max()})"
        )
    series = np.split(values, np.cumsum(lengths)[:-1])
    return Split(_fill_gaps(series, f"{file}: {half}_values"), labels.astype(np.int64))


FLOOR = 1e-3  # added to a direction's variance, in units of a channel's: directions that carry nothing stay small


@dataclass(frozen=True)
class PrincipalChannels(Standardizer):
    """Per-channel z-score, and beside it the same steps along the principal directions of the training cases' steps.

    (time, channels) → (time, 2 · channels)
    """

    basis: np.ndarray  # (channels, channels): one direction per column, divided by its deviation

    @classmethod
    def fit(cls, series: Sequence[np.ndarray]) -> PrincipalChannels:
        plain = Standardizer.fit(series)
        steps = np.concatenate([plain(s) for s in series])  # (total time, channels)
        variance, directions = np.linalg.eigh(steps.T @ steps / max(len(steps) - 1, 1))
        basis = with_settled_signs(directions) / np.sqrt(variance.clip(min=0.0) + FLOOR)
        return cls(plain.mean, plain.std, basis)

    def __call__(self, series: np.ndarray) -> np.ndarray:
        plain = super().__call__(series)
        return np.concatenate([plain, plain @ self.basis], axis=1)


def with_settled_signs(directions: np.ndarray) -> np.ndarray:
    """Unit vectors in columns, each or its opposite: which of them must not depend on the machine or on rounding.

    So the first large entry is positive; the largest one may have a twin.
    """
    size = np.abs(directions)
    first = (size > 0.5 * size.max(axis=0)).argmax(axis=0, keepdims=True)
    return directions * np.where(np.take_along_axis(directions, first, axis=0) < 0, -1.0, 1.0)
