"""Small valid data files of every kind that the package reads, and ways to damage them.

    for kind in KINDS.values():
        file = kind.write(folder)                  # a valid set in an empty folder; `file` is the one to damage
        kind.load(folder)                          # what reads it
        damages(kind)["truncated"](file)           # after this, kind.load(folder) must be one DataError line
        kind.command                               # the same through the command line, where there is one

`Payload` is an object whose unpickling creates a file, so that a test can prove that nothing was unpickled.
"""

from __future__ import annotations

import functools
import io
import json
import lzma
import os
import pickle
import signal
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import image_files
from primal_attention.data import d4rl, lm, uea
from primal_attention.data import image as images
from primal_attention.data.lra import image as pixels
from primal_attention.data.lra import listops, pathfinder, retrieval
from primal_attention.data.lra import text as reviews

Damage = Callable[[Path], object]


class Payload:
    """Creates the file `<folder>/executed` when it is unpickled."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> tuple[Any, ...]:
        return open, (str(self.folder / "executed"), "w")


@dataclass(frozen=True)
class Kind:
    """A kind of data file.

    Args:
        write: Fill an empty folder with a valid set and return the file to damage.
        load: Read the set of that folder.
        command: Words of `primal` before the folder that read the same set; empty where there are none.
        damages: Beside `GENERIC`, for this kind alone.
        harmless: Names of `GENERIC` that leave a valid file of this kind.
        needs: Packages without which the kind cannot be written or read.
    """

    write: Callable[[Path], Path]
    load: Callable[[Path], object]
    command: tuple[str, ...] = ()
    damages: Mapping[str, Damage] = field(default_factory=dict)
    harmless: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()


def damages(kind: Kind) -> dict[str, Damage]:
    """Every way to damage a file of this kind."""
    return {**{name: damage for name, damage in GENERIC.items() if name not in kind.harmless}, **kind.damages}


# Damages that any file can suffer


def replace_by_folder(file: Path) -> None:
    file.unlink()
    file.mkdir()


def archive(**arrays: Any) -> bytes:
    out = io.BytesIO()
    np.savez(out, **arrays)
    return out.getvalue()


GENERIC: dict[str, Damage] = {
    "truncated": lambda file: file.write_bytes(file.read_bytes()[: file.stat().st_size // 2 - 3]),
    "missing": lambda file: file.unlink(),
    "empty": lambda file: file.write_bytes(b""),
    "random-bytes": lambda file: file.write_bytes(np.random.default_rng(0).bytes(4096)),
    "zero-bytes": lambda file: file.write_bytes(bytes(4096)),
    "deep-nesting": lambda file: file.write_bytes(b"[" * 200_000),
    "deep-objects": lambda file: file.write_bytes(b'{"words":' * 100_000),
    "huge-number": lambda file: file.write_bytes(b"9" * 10_000),
    "other-text": lambda file: file.write_text("@data\nit: was, a dark\tand stormy night\n\n"),
    "foreign-image": lambda file: file.write_bytes(pathfinder.to_png(np.zeros((20, 30), dtype=np.uint8))),
    "foreign-archive": lambda file: file.write_bytes(archive(other=np.zeros(3))),
    "pickle": lambda file: file.write_bytes(pickle.dumps(Payload(file.parent))),
    "folder": replace_by_folder,
}


# Arrays: saved series, one's own series, trajectories


def write_npz(make: Callable[[], Mapping[str, np.ndarray]], name: str, folder: Path) -> Path:
    np.savez(folder / name, **make())
    return folder / name


def edit_npz(change: Callable[[dict[str, Any]], object], file: Path) -> None:
    with np.load(file) as content:
        arrays = dict(content)
    change(arrays)
    np.savez(file, **arrays)


def object_array(file: Path) -> np.ndarray:
    array = np.empty(1, dtype=object)
    array[0] = Payload(file.parent)
    return array


def pickled_array(key: str, file: Path) -> None:
    edit_npz(lambda arrays: arrays.update({key: object_array(file)}), file)


def _drop(key: str) -> Damage:
    return partial(edit_npz, lambda arrays: arrays.pop(key))


def _set(**values: Any) -> Damage:
    return partial(edit_npz, lambda arrays: arrays.update({k: np.asarray(v) for k, v in values.items()}))


def _apply(key: str, change: Callable[[np.ndarray], np.ndarray]) -> Damage:
    return partial(edit_npz, lambda arrays: arrays.update({key: change(arrays[key])}))


def series() -> dict[str, np.ndarray]:
    draw = np.random.default_rng(0)
    arrays: dict[str, np.ndarray] = {"classes": np.array(["a", "b"])}
    for part in ("train", "test"):
        lengths = np.array([4, 3, 5, 4, 3, 5])
        arrays[f"{part}_lengths"] = lengths
        arrays[f"{part}_values"] = draw.normal(size=(lengths.sum(), 2))
        arrays[f"{part}_labels"] = np.array([0, 1, 0, 1, 0, 1])
    return arrays


SERIES_DAMAGES: dict[str, Damage] = {
    "without-values": _drop("test_values"),
    "lengths-that-cancel": _set(train_lengths=[24, -2, 2, -2, 1, 1]),
    "huge-lengths": _set(train_lengths=[2**62, 2**62, 2**62, 2**62, 12, 12]),
    "float-lengths": _apply("train_lengths", lambda a: a.astype(float)),
    "no-samples": _set(test_lengths=np.zeros(0, int), test_labels=np.zeros(0, int), test_values=np.zeros((0, 2))),
    "infinity-only": _apply("test_values", lambda a: np.full_like(a, np.inf)),
    "complex-values": _apply("train_values", lambda a: a.astype(complex)),
    "flat-values": _apply("train_values", np.ravel),
    "no-channels": _apply("train_values", lambda a: a[:, :0]),
    "other-channels": _apply("test_values", lambda a: np.hstack([a, a])),
    "one-class": _set(train_labels=[0] * 6),
    "equal-class-names": _set(classes=["a", "a"]),
    "scalar-classes": _set(classes="a"),
    "negative-label": _set(test_labels=[0, 1, 0, 1, 0, -1]),
    "string-labels": _set(train_labels=list("ababab")),
    "too-few-labels": _set(train_labels=[0, 1]),
    "pickled-classes": partial(pickled_array, "classes"),
}


def own_series() -> dict[str, np.ndarray]:
    return {"X": np.random.default_rng(0).normal(size=(8, 2, 5)), "y": np.arange(8) % 2}


def transitions() -> dict[str, np.ndarray]:
    draw = np.random.default_rng(0)
    return {
        "observations": draw.normal(size=(20, 11)),
        "actions": draw.uniform(-1, 1, (20, 3)),
        "rewards": draw.normal(size=20),
        "terminals": np.arange(20) % 5 == 4,
        "timeouts": np.zeros(20, bool),
    }


TRANSITION_DAMAGES: dict[str, Damage] = {
    "without-rewards": _drop("rewards"),
    "other-lengths": _apply("actions", lambda a: a[:-1]),
    "not-finite": _apply("observations", lambda a: np.where(a > a.mean(), a, np.nan)),
    "no-end": _apply("terminals", np.zeros_like),
    "string-terminals": _apply("terminals", lambda a: a.astype(str).astype(bytes)),
    "numbered-terminals": _apply("terminals", lambda a: np.arange(len(a))),
    "nan-terminals": _apply("terminals", lambda a: np.where(a, np.nan, 0.0)),
    "wide-terminals": _apply("terminals", lambda a: np.stack([a, a], axis=1)),
    "no-width": _apply("actions", lambda a: a[:, :0]),
    "scalar-rewards": _apply("rewards", lambda a: np.float64(1.0)),
    "beyond-float32": _apply("rewards", lambda a: a + 1e300),
    "complex-actions": _apply("actions", lambda a: a.astype(complex)),
    "boolean-observations": _apply("observations", lambda a: a > 0),
    "no-rows": partial(edit_npz, lambda c: c.update({key: value[:0] for key, value in c.items()})),
    "pickled-rewards": partial(pickled_array, "rewards"),
}


def write_hdf5(folder: Path) -> Path:
    import h5py

    with h5py.File(folder / "hopper-medium.hdf5", "w") as out:
        for key, value in transitions().items():
            out[key] = value
    return folder / "hopper-medium.hdf5"


def _hdf5(key: str, replace: Callable[[Any], object]) -> Damage:
    def damage(file: Path) -> None:
        import h5py

        with h5py.File(file, "a") as out:
            del out[key]
            replace(out)

    return damage


# Text tables


def write_lines(names: Mapping[str, str], lines: list[str], folder: Path) -> Path:
    """The same lines in the file of every split; the training file is the one to damage."""
    for name in names.values():
        (folder / name).write_text("\n".join(lines) + "\n")
    return folder / names["train"]


def _line(text: str, number: int = 2) -> Damage:
    def damage(file: Path) -> None:
        lines = file.read_text().splitlines()
        lines[number - 1] = text
        file.write_text("\n".join(lines) + "\n")

    return damage


LISTOPS = ["Source\tTarget", *(f"[MAX {i} {i + 1} ]\t{i + 1}" for i in range(8))]
write_listops = partial(write_lines, listops.FILES, LISTOPS)
PAIRS = [f"{i % 2}\tP{i}\tQ{i}\tone text\tother text" for i in range(6)]
TS_FILES = {"test": "Toy_TEST.ts", "train": "Toy_TRAIN.ts"}
TS_HEADER = "@problemName Toy\n@timeStamps false\n@missing true\n@univariate false\n@equalLength false"
TS = [*TS_HEADER.splitlines(), "@classLabel true a b", "@data", *(f"{i},2,{i}:4,5,6:{'ab'[i % 2]}" for i in range(6))]


def write_parquet(folder: Path, changes: Mapping[str, Any] | None = None) -> Path:
    import pyarrow
    import pyarrow.parquet

    for part in ("test", "train"):
        table = {"text": [f"review {i}" for i in range(12)], "label": [("neg", "pos")[i % 2] for i in range(12)]}
        file = folder / f"{part}.parquet"
        pyarrow.parquet.write_table(pyarrow.table({**table, **(changes or {})}), file)
    return file


def _parquet(**changes: Any) -> Damage:
    return lambda file: write_parquet(file.parent, changes)


def write_own_parquet(folder: Path) -> Path:
    import pyarrow
    import pyarrow.parquet

    table = {"t0": np.arange(8.0), "t1": np.arange(8.0), "label": ["a", "b"] * 4}
    pyarrow.parquet.write_table(pyarrow.table(table), folder / "own.parquet")
    return folder / "own.parquet"


def write_wiki(folder: Path) -> Path:
    for split in ("valid", "test", "train"):
        file = folder / f"wiki.{split}.txt.xz"
        file.write_bytes(lzma.compress(f" = {split} = \n the <unk> words of {split} \n".encode()))
    return file


# Images


@functools.cache
def pathfinder_files() -> dict[Path, bytes]:
    """Drawing takes a moment, so that it is done once."""
    with tempfile.TemporaryDirectory() as place:
        folder = pathfinder.write(Path(place) / "set", train=6, valid=3, test=3)
        return {file.relative_to(folder): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def write_pathfinder(file: str, folder: Path) -> Path:
    for name, content in pathfinder_files().items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return folder / file


def write_cifar(folder: Path) -> Path:
    records = np.random.default_rng(0).integers(0, 256, (6, 4, pixels.RECORD), dtype=np.uint8)
    records[:, :, 0] %= 10
    for name, part in zip((*pixels.BINARY["train"], *pixels.BINARY["test"]), records, strict=True):
        part.tofile(folder / name)
    return folder / "data_batch_3.bin"


def write_gray(damaged: str, folder: Path) -> Path:
    for part in ("train", "test"):
        np.save(folder / f"{part}_images.npy", np.zeros((20, 32, 32), dtype=np.uint8))
        np.save(folder / f"{part}_labels.npy", np.arange(20) % 10)
    return folder / damaged


def _array(change: Callable[[np.ndarray], np.ndarray]) -> Damage:
    return lambda file: np.save(file, change(np.load(file)))


def _npy_objects(file: Path) -> None:
    np.save(file, object_array(file), allow_pickle=True)


def _npy_claim(file: Path) -> None:
    header = b"{'descr': '|u1', 'fortran_order': False, 'shape': (99999999999, 32, 32), }"
    file.write_bytes(b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header)


def write_images(folder: Path) -> Path:
    image_files.write(folder, train=2, val=1)
    return folder / "train" / "n02" / "1.jpg"


def load_images(folder: Path) -> object:
    data = images.load(folder)
    return [images.decode_once(folder, "train", split, 16, strict=True) for split in (data.train, data.test)]


# Vocabularies


def write_vocabulary(make: Callable[[], lm.Vocabulary], folder: Path) -> Path:
    make().save(folder / "vocabulary.json")
    return folder / "vocabulary.json"


def _json(change: Callable[[dict[str, Any]], object]) -> Damage:
    def damage(file: Path) -> None:
        content = json.loads(file.read_text())
        change(content)
        file.write_text(json.dumps(content))

    return damage


def run_and_kill(words: list[str], errors: Path, kill_at: int = -1, largest: int = -1) -> None:
    """Run `primal` in this process, which is killed when its rename with the number `kill_at` begins.

    Args:
        errors: File for what goes to stderr.
        largest: Limit of a file's size in bytes, after which writing fails as on a full disk.
    """
    from primal_attention.cli import main as cli

    sys.stderr = errors.open("w")
    pathfinder.FOLDER_SIZE, pathfinder.DRAWN_AT_ONCE = 10, 32  # several folders and batches for few images
    rename, left = Path.replace, [kill_at]

    def replace(self: Path, target: Path) -> Path:
        if left[0] == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        left[0] -= 1
        return rename(self, target)

    Path.replace = replace  # type: ignore[method-assign]
    if largest >= 0:
        import resource

        resource.setrlimit(resource.RLIMIT_FSIZE, (largest, resource.RLIM_INFINITY))
    code = cli.main(words)
    if largest >= 0:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    sys.stderr.close()
    os._exit(code)


def _train(recipe: str) -> tuple[str, ...]:
    return ("train", recipe, "--trainer.accelerator", "cpu", "--data.folder")


KINDS: dict[str, Kind] = {
    "uea-npz": Kind(partial(write_npz, series, "Toy.npz"), partial(uea.load, "Toy"), _train("uea/Toy"), SERIES_DAMAGES),
    "uea-ts": Kind(
        partial(write_lines, TS_FILES, TS),
        partial(uea.load, "Toy"),
        _train("uea/Toy"),
        {
            "one-class": _line("@classLabel true a", 6),
            "no-data": _line("", 7),
            "bad-number": _line("1,x:2,3:a", 8),
            "ragged-channels": _line("1,2,3:4,5:a", 8),
            "a-channel-more": _line("1,2:4,5:6,7:a", 8),
            "no-label": _line("1,2,3:4,5,6", 8),
            "nothing-but-gaps": lambda file: file.write_text("\n".join([*TS[:7], "?,?:?,?:a", "?,?:?,?:b", ""])),
        },
        needs=("aeon",),
    ),
    "own-npz": Kind(
        partial(write_npz, own_series, "own.npz"),
        lambda folder: uea.load_file(folder / "own.npz"),
        damages={"pickled-values": partial(pickled_array, "X"), "pickled-labels": partial(pickled_array, "y")},
    ),
    "own-parquet": Kind(
        write_own_parquet, lambda folder: uea.load_file(folder / "own.parquet"), needs=("pyarrow.parquet",)
    ),
    "d4rl-hdf5": Kind(
        write_hdf5,
        partial(d4rl.load, "hopper-medium"),
        _train("d4rl/hopper-medium"),
        {
            "string-timeouts": _hdf5("timeouts", lambda out: out.update(timeouts=np.array([b"false"] * 20))),
            "group-for-column": _hdf5("actions", lambda out: out.create_group("actions").update(x=np.zeros(3))),
            "huge-claim": _hdf5(
                "observations",
                lambda out: out.create_dataset("observations", shape=(10**13, 11), dtype="f8", chunks=(1000, 11)),
            ),
        },
        needs=("h5py",),
    ),
    "d4rl-npz": Kind(
        partial(write_npz, transitions, "hopper-medium.npz"),
        partial(d4rl.load, "hopper-medium"),
        damages=TRANSITION_DAMAGES,
    ),
    "word-vocabulary": Kind(
        partial(write_vocabulary, partial(lm.Vocabulary.from_words, "a b <unk>\n")),
        lambda folder: lm.load_vocabulary(folder / "vocabulary.json"),
        damages={
            "list": lambda file: file.write_text('["a", "b"]'),
            "numbers": _json(lambda c: c.update(words=[1, 2])),
            "no-list": _json(lambda c: c.update(words="a b <eos>")),
            "no-end": _json(lambda c: c.update(words=["a", "b"])),
            "word-twice": _json(lambda c: c.update(words=["<eos>", "a", "a"])),
            "half-a-letter": _json(lambda c: c.update(words=["<eos>", "\ud800"])),
        },
        needs=("tokenizers",),
    ),
    "pair-vocabulary": Kind(
        partial(write_vocabulary, partial(lm.Vocabulary.train_byte_pairs, ["some text to learn from"] * 3, 270)),
        lambda folder: lm.load_vocabulary(folder / "vocabulary.json"),
        damages={
            "no-model": _json(lambda c: c.pop("model")),
            "model-of-wrong-type": _json(lambda c: c.update(model=3)),
            "unknown-model": _json(lambda c: c["model"].update(type="Exec")),
            "no-end": _json(lambda c: c.update(added_tokens=[], model={**c["model"], "vocab": {"a": 0}, "merges": []})),
            "huge-token-number": _json(lambda c: c["model"]["vocab"].update({next(iter(c["model"]["vocab"])): 2**31})),
            "negative-token-number": _json(lambda c: c["model"]["vocab"].update(zzz=-1)),
            "merge-of-unknown": _json(lambda c: c["model"].update(merges=[["qq", "zz"]])),
        },
        needs=("tokenizers",),
    ),
    "listops": Kind(
        write_listops,
        listops.load,
        _train("lra/listops"),
        {
            "not-closed": _line("[MAX 1 2\t2"),
            "wrong-label": _line("[MAX 1 2 ]\t12"),
            "unknown-operator": _line("[MAP 1 2 ]\t2"),
            "deep-brackets": _line("[MAX " * 100_000 + "\t1"),
            "huge-label": _line("[MAX 1 2 ]\t" + "9" * 10_000),
        },
    ),
    "retrieval": Kind(
        partial(write_lines, retrieval.FILES, PAIRS),
        retrieval.load,
        _train("lra/retrieval"),
        {"label-2": _line("2\ta\tb\tc\td"), "open-quote": _line('1\ta\tb\t"c\td')},
        harmless=("truncated",),  # a text may end anywhere
    ),
    "parquet": Kind(
        write_parquet,
        reviews.load,
        _train("lra/text"),
        {
            "numbers-for-texts": _parquet(text=list(range(12))),
            "missing-texts": _parquet(text=[None] * 12),
            "lists-for-labels": _parquet(label=[[1]] * 12),
            "label-2": _parquet(label=[0, 1, 2] * 4),
            "fractional-labels": _parquet(label=[0.5] * 12),
            "one-class": _parquet(label=["pos"] * 12),
            "no-rows": _parquet(text=[], label=[]),
        },
        needs=("pyarrow.parquet",),
    ),
    "wiki-xz": Kind(write_wiki, lm.load, _train("lm/wikitext-103"), needs=("tokenizers",)),
    "cifar-bin": Kind(
        write_cifar,
        pixels.load,
        _train("lra/image"),
        {
            "one-byte-more": lambda file: file.write_bytes(file.read_bytes() + b"\0"),
            "label-10": lambda file: file.write_bytes(b"\x0a" + file.read_bytes()[1:]),
        },
    ),
    "gray-images": Kind(
        partial(write_gray, "train_images.npy"),
        pixels.load,
        damages={
            "other-dtype": _array(lambda a: a.astype(np.float32)),
            "other-size": _array(lambda a: a[:, :28, :28]),
            "colour": _array(lambda a: np.stack([a] * 3, axis=-1)),
            "fewer": _array(lambda a: a[:5]),
            "none": _array(lambda a: a[:0]),
            "pickled": _npy_objects,
            "huge-claim": _npy_claim,
        },
    ),
    "gray-labels": Kind(
        partial(write_gray, "train_labels.npy"),
        pixels.load,
        damages={
            "fractions": _array(lambda a: a + 0.5),
            "nan": _array(lambda a: np.full(len(a), np.nan)),
            "words": _array(lambda a: a.astype(str)),
            "label-10": _array(lambda a: a + 1),
            "two-columns": _array(lambda a: np.stack([a, a], axis=1)),
            "pickled": _npy_objects,
        },
    ),
    "pathfinder-image": Kind(
        partial(write_pathfinder, "imgs/0/sample_3.png"), pathfinder.load, _train("lra/pathfinder"), needs=("PIL",)
    ),
    "pathfinder-metadata": Kind(
        partial(write_pathfinder, "metadata/0.npy"),
        pathfinder.load,
        damages={"label-2": _line("imgs/0 sample_1.png 1 2"), "missing-image": _line("imgs/0 sample_99.png 1 1")},
        needs=("PIL",),
    ),
    "pathfinder-splits": Kind(
        partial(write_pathfinder, "splits.json"),
        pathfinder.load,
        damages={
            "list": lambda file: file.write_text("[6, 3, 3]"),
            "missing-split": _json(lambda c: c.pop("valid")),
            "words": _json(lambda c: c.update(train="6")),
            "infinity": _json(lambda c: c.update(train=float("inf"))),
            "booleans": _json(lambda c: c.update(train=True)),
            "other-sum": _json(lambda c: c.update(train=7)),
            "negative": _json(lambda c: c.update(train=12, valid=-3)),
            "huge": _json(lambda c: c.update(train=10**400)),
        },
        harmless=("missing",),
        needs=("PIL",),
    ),
    "image-folder": Kind(
        write_images,
        load_images,
        ("train", "image/imagenette", "--trainer.accelerator", "cpu", "--data.strict", "--data.folder"),
        harmless=("foreign-image", "missing"),
        needs=("PIL",),
    ),
}
