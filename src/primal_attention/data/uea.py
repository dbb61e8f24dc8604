"""The UEA archive of multivariate time-series classification (Bagnall et al., 2018), read from its `.ts` files.

    data = load("Handwriting", "data/uea")     # data/uea/Handwriting/Handwriting_TRAIN.ts and _TEST.ts
    save_npz(data, "data/uea")                 # data/uea/Handwriting.npz: the same without aeon, and faster

Parsing is aeon's; what is checked here is what a training run relies on. JapaneseVowels and BasicMotions lie inside the
aeon package and need no download.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from primal_attention.data.errors import DataError, import_package
from primal_attention.data.series import SeriesData, Split, drop_missing_tail, interpolate_missing
from primal_attention.data.storage import one_line, read_npz, write_file

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
