"""The UEA archive of multivariate time-series classification (Bagnall et al., 2018), read from its `.ts` files.

    data = load("Handwriting", "data/uea")     # data/uea/Handwriting/Handwriting_TRAIN.ts and _TEST.ts
    save_npz(data, "data/uea")                 # data/uea/Handwriting.npz: the same without aeon, and faster

Parsing is aeon's; what is checked here is what a training run relies on. JapaneseVowels and BasicMotions lie inside the
aeon package and need no download.
"""

from __future__ import annotations

import difflib
import os
import zipfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from primal_attention.data.errors import DataError
from primal_attention.data.series import SeriesData, Split, drop_missing_tail, interpolate_missing

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
    folder = default_folder() if folder is None else Path(folder)
    cached = folder / f"{name}.npz"
    if cached.is_file():
        return load_npz(cached)
    home = _home_of(name, folder)
    train, test = (home / f"{name}_{half}.ts" for half in ("TRAIN", "TEST"))
    for file in (train, test):
        if not file.is_file():
            raise DataError(f"{file} is missing: the archive at {ARCHIVE} has it next to its other half")
    return read_pair(name, train, test)


def available(name: str, folder: str | Path | None = None) -> bool:
    """Whether `load` would find the set."""
    folder = default_folder() if folder is None else Path(folder)
    try:
        return (folder / f"{name}.npz").is_file() or _home_of(name, folder).is_dir()
    except DataError:
        return False


def _home_of(name: str, folder: Path) -> Path:
    """The folder that holds the `.ts` pair of a set."""
    for home in (folder / name, folder):
        if (home / f"{name}_TRAIN.ts").is_file() or (home / f"{name}_TEST.ts").is_file():
            return home
    if name in INSIDE_AEON:
        aeon = _import_aeon()
        return Path(aeon.__file__).parent / "datasets" / "data" / name
    known = [p.stem for p in folder.iterdir() if p.is_dir() or p.suffix == ".npz"] if folder.is_dir() else []
    near = difflib.get_close_matches(name, [*known, *SETS], n=1)
    hint = f" (did you mean {near[0]}?)" if near and near[0] != name else ""
    raise DataError(
        f"UEA set {name!r} is not in {folder}{hint}: get it from {ARCHIVE} and unpack it to "
        f"{folder / name / (name + '_TRAIN.ts')}, or name another folder with --data.folder"
    )


def _import_aeon():  # type: ignore[no-untyped-def]
    try:
        import aeon
    except ImportError:
        raise DataError("reading .ts files needs aeon: pip install 'primal-attention[timeseries]'") from None
    return aeon


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
        Split([interpolate_missing(s) for s in series], np.array([code[x] for x in labels], dtype=np.int64))
        for series, labels in ((train_series, train_labels), (test_series, test_labels))
    ]
    return SeriesData(name, halves[0], halves[1], classes)


def _read_ts(file: Path) -> tuple[list[np.ndarray], list[str]]:
    """Series (time, channels) and label strings of one `.ts` file, checked."""
    _import_aeon()
    from aeon.datasets import load_from_ts_file

    try:
        cases, labels, meta = load_from_ts_file(str(file), return_meta_data=True)
    except (OSError, ValueError, IndexError) as error:
        raise DataError(f"{file}: cannot be read, truncated or ragged ({_one_line(error)})") from error
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
    series = [drop_missing_tail(np.ascontiguousarray(np.asarray(case, dtype=np.float64).T)) for case in cases]
    if not any(np.isfinite(s).any() for s in series):
        raise DataError(f"{file}: every value is missing (NaN)")
    return series, names


def _natural(label: str) -> tuple[int, float, str]:
    """Sort key: numbers by value before other labels by name."""
    try:
        return (0, float(label), label)
    except ValueError:
        return (1, 0.0, label)


def _few(items: Sequence[str], limit: int = 6) -> str:
    return ", ".join(items[:limit]) + (", …" if len(items) > limit else "")


def _one_line(error: Exception) -> str:
    # aeon puts the open file object's repr into its message; the path already stands in ours.
    text = " ".join(str(error).split())
    return text.split("'utf-8'>. ")[-1].removesuffix(".")


def save_npz(data: SeriesData, folder: str | Path) -> Path:
    """Write `<folder>/<name>.npz`, which `load` prefers over the `.ts` pair and which needs no aeon."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    arrays: dict[str, np.ndarray] = {"classes": np.array(data.classes)}
    for half, split in (("train", data.train), ("test", data.test)):
        arrays[f"{half}_values"] = np.concatenate(split.series)
        arrays[f"{half}_lengths"] = np.array([len(s) for s in split.series])
        arrays[f"{half}_labels"] = split.labels
    target, temporary = folder / f"{data.name}.npz", folder / f".{data.name}.partial.npz"
    np.savez_compressed(temporary, **arrays)  # type: ignore[arg-type]
    temporary.replace(target)
    return target


def load_npz(file: str | Path) -> SeriesData:
    """Read what `save_npz` wrote."""
    file = Path(file)
    try:
        with np.load(file, allow_pickle=False) as arrays:
            halves = []
            for half in ("train", "test"):
                ends = np.cumsum(arrays[f"{half}_lengths"])[:-1]
                halves.append(Split(np.split(arrays[f"{half}_values"], ends), arrays[f"{half}_labels"]))
            return SeriesData(file.stem, halves[0], halves[1], tuple(str(c) for c in arrays["classes"]))
    except (KeyError, ValueError, OSError, EOFError, zipfile.BadZipFile) as error:
        raise DataError(f"{file}: not a cached data set of this library ({_one_line(error)})") from error
