"""Ways to damage a file, and small valid data files of every kind that the package reads.

    kind = DATA_KINDS["listops"]
    kind.make(folder)                       # a valid set in an empty folder
    kind.damages["truncated"](file)         # `file` matches kind.file; reading the set must then be one DataError line

`Payload` is an object whose unpickling creates a file, so that a test can prove that nothing was unpickled.
"""

import copy
import io
import json
import lzma
import pickle
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import PIL.Image
import pyarrow.parquet
import yaml

import image_files
from primal_attention.data import d4rl, lm, uea
from primal_attention.data import image as images
from primal_attention.data.lra import listops, pathfinder, tokens
from primal_attention.train.image import ImageBatches

Damage = Callable[[Path], object]
Damages = Mapping[str, Damage]
MARK = "executed"


class Payload:
    """Creates a file in the working directory when it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return open, (MARK, "w")


@dataclass(frozen=True)
class Kind:
    """A kind of file.

    Args:
        make: Fill an empty folder with valid files.
        file: Path of the files to damage there, a pattern.
        read: The command that reads them, or a function of the folder.
        damages: What makes them invalid.
        layout: Of a data set: what the message about an empty folder names.
        recipe: Of a data set: the words of `primal train` that read it.
    """

    make: Callable[[Path], object]
    file: str
    read: str | Callable[[Path], object]
    damages: Damages
    layout: str = ""
    recipe: str = ""


# Damages that any file can suffer


def replace_by_folder(file: Path) -> None:
    file.unlink()
    file.mkdir()


def content(data: bytes | str) -> Damage:
    return lambda file: file.write_bytes(data if isinstance(data, bytes) else data.encode())


def archive(**arrays: Any) -> bytes:
    out = io.BytesIO()
    np.savez(out, **arrays)
    return out.getvalue()


COMMON: Damages = {
    "truncated": lambda file: file.write_bytes(file.read_bytes()[: file.stat().st_size // 2 - 3]),
    "empty": content(b""),
    "random-bytes": content(np.random.default_rng(0).bytes(4096)),
    "zero-bytes": content(bytes(4096)),
    "deep-nesting": content(b"[" * 5_000),
    "other-text": content("@data\nIt was: a dark,\tand stormy {night\n\n"),
    "foreign-image": lambda file: PIL.Image.new("L", (30, 20)).save(file, "PNG"),
    "latin-1": content("Schrödinger, naïve\n".encode("latin-1") * 30),
    "compressed": content(b"\x1f\x8b\x08" + bytes(40)),
    "archive": content(archive(other=np.zeros(3))),
    "pickle": content(pickle.dumps(Payload())),
    "folder": replace_by_folder,
}


def without(damages: Damages, *names: str) -> Damages:
    """All damages but those that leave a valid file."""
    return {name: damage for name, damage in damages.items() if name not in names}


def edit(change: Callable[[Any], Any], file: Path) -> None:
    """Apply a change to the content of a JSON or YAML file; what it returns, if anything, takes the content's place."""
    is_yaml = file.suffix == ".yaml"
    before = (yaml.safe_load if is_yaml else json.loads)(file.read_text())
    after = change(before)
    after = before if after is None else after
    file.write_text(yaml.safe_dump(after, sort_keys=False) if is_yaml else json.dumps(after))


def put(path: str, value: Any) -> Damage:
    """Set, or with `...` remove, the field of a dotted path; numbers are places in lists."""

    def change(fields: Any) -> None:
        *way, last = [int(key) if key.isdecimal() else key for key in path.split(".")]
        for key in way:
            fields = fields[key]
        if value is ...:
            del fields[last]
        else:
            fields[last] = copy.deepcopy(value)

    return partial(edit, change)


def rows(change: Callable[[list[str]], list[str]]) -> Damage:
    return lambda file: file.write_text("\n".join(change(file.read_text().splitlines())) + "\n")


def line(text: str, number: int = 2) -> Damage:
    return rows(lambda lines: [*lines[: number - 1], text, *lines[number:]])


# Columns of numbers or text, in the formats that the package reads


def load_columns(file: Path) -> dict[str, Any]:
    if file.suffix == ".npy":
        return {"array": np.load(file)}
    if file.suffix == ".npz":
        with np.load(file) as arrays:
            return dict(arrays)
    if file.suffix == ".hdf5":
        with h5py.File(file) as arrays:
            return {key: value[()] for key, value in arrays.items()}
    return pyarrow.parquet.read_table(file).to_pydict()


def save_columns(file: Path, columns: Mapping[str, Any]) -> None:
    if file.suffix == ".npy":
        np.save(file, columns["array"], allow_pickle=True)
    elif file.suffix == ".npz":
        np.savez(file, **columns)
    elif file.suffix == ".hdf5":
        with h5py.File(file, "w") as out:
            for key, value in columns.items():
                out[key] = value
    else:
        pyarrow.parquet.write_table(pyarrow.table(columns), file)


def columns(**changes: Any) -> Damage:
    """Set columns, apply functions to them, or with `...` remove them."""

    def damage(file: Path) -> None:
        table = load_columns(file)
        for key, change in changes.items():
            if change is ...:
                del table[key]
            else:
                table[key] = change(table[key]) if callable(change) else change
        save_columns(file, table)

    return damage


PICKLED = np.empty(1, dtype=object)
PICKLED[0] = Payload()
DATA: Damages = {
    **COMMON,
    "missing": lambda file: file.unlink(),
    "deep-objects": content(b'{"words":' * 100_000),
    "huge-number": content(b"9" * 10_000),
}


# Data sets of every kind


def make_uea(ending: str, folder: Path) -> None:
    for part in ("TRAIN", "TEST"):
        file = folder / f"Toy_{part}{ending}"
        if ending == ".ts":
            samples = [f"{i},2,{i}:4,5,6:{'ab'[i % 2]}" for i in range(6)]
            file.write_text("\n".join([*TS_HEADER, "@classLabel true a b", "@data", *samples]) + "\n")
        elif ending == ".npz":
            save_columns(file, {"X": np.random.default_rng(0).normal(size=(8, 2, 5)), "y": np.arange(8) % 2})
        else:
            sample, time = np.divmod(np.arange(24), 3)
            names = np.array(["a", "b"])[sample % 2]
            save_columns(file, {"sample": sample, "time": time, "x": time * 1.0, "label": names})


def make_d4rl(ending: str, folder: Path) -> None:
    draw = np.random.default_rng(0)
    table = {
        "observations": draw.normal(size=(20, 11)),
        "actions": draw.uniform(-1, 1, (20, 3)),
        "rewards": draw.normal(size=20),
        "terminals": np.arange(20) % 5 == 4,
        "timeouts": np.zeros(20, bool),
    }
    save_columns(folder / f"hopper-medium{ending}", table)


def make_lines(names: Mapping[str, str], lines: list[str], folder: Path) -> None:
    for name in names.values():
        (folder / name).write_text("\n".join(lines) + "\n")


def make_reviews(folder: Path) -> None:
    for part in ("train", "test"):
        table = {"text": [f"review {i}" for i in range(12)], "label": ["neg", "pos"] * 6}
        save_columns(folder / f"{part}.parquet", table)


def make_wiki(folder: Path) -> None:
    for split in lm.SPLITS:
        text = f" = {split} = \n the <unk> words of {split} \n"
        (folder / f"wiki.{split}.txt.xz").write_bytes(lzma.compress(text.encode()))


def make_cifar(folder: Path) -> np.ndarray:
    """Six files of four random images."""
    records = np.random.default_rng(0).integers(0, 256, (6, 4, tokens.RECORD), dtype=np.uint8)
    records[:, :, 0] %= 10
    for name, part in zip((*tokens.BINARY["train"], *tokens.BINARY["test"]), records, strict=True):
        part.tofile(folder / name)
    return records


def make_gray(folder: Path) -> None:
    for part in ("train", "test"):
        np.save(folder / f"{part}_images.npy", np.zeros((20, 32, 32), dtype=np.uint8))
        np.save(folder / f"{part}_labels.npy", np.arange(20) % 10)


def make_vocabulary(make: Callable[[], lm.Vocabulary], folder: Path) -> None:
    make().save(folder / "vocabulary.json")


def load_vocabulary(folder: Path) -> object:
    return lm.load_vocabulary(folder / "vocabulary.json")


def load_images(folder: Path) -> object:
    data = images.load(folder)
    crop = partial(images.crop_centre, size=14)
    return [list(ImageBatches(split, crop, batch_size=4)) for split in (data.train, data.test)]


TS_HEADER = "@problemName Toy\n@timeStamps false\n@missing true\n@univariate false\n@equalLength false".splitlines()
LISTOPS = ["Source\tTarget", *(f"[MAX {i} {i + 1} ]\t{i + 1}" for i in range(8))]
PAIRS = [f"{i % 2}\tP{i}\tQ{i}\tone text\tother text" for i in range(6)]
NPY_HEADER = b"{'descr': '|u1', 'fortran_order': False, 'shape': (99999999999, 32, 32), }"
make_listops = partial(make_lines, listops.FILES, LISTOPS)
make_pathfinder = partial(pathfinder.write, sizes={"train": 6, "valid": 3, "test": 3})
load_uea, load_d4rl = partial(uea.load, "Toy"), partial(d4rl.load, "hopper-medium")
UEA: Damages = {
    "without-values": columns(X=...),
    "without-labels": columns(y=...),
    "no-samples": columns(X=np.zeros((0, 2, 4)), y=np.zeros(0)),
    "infinity-only": columns(X=lambda a: np.full_like(a, np.inf)),
    "complex-values": columns(X=lambda a: a.astype(complex)),
    "flat-values": columns(X=np.ravel),
    "no-channels": columns(X=lambda a: a[:, :0]),
    "other-channels": columns(X=lambda a: np.hstack([a, a])),
    "one-class": columns(y=lambda a: a * 0),
    "negative-label": columns(y=lambda a: -a),  # which the test file does not know
    "too-few-labels": columns(y=lambda a: a[:2]),
    "two-columns": columns(y=lambda a: np.stack([a, a], axis=1)),
    "pickled-values": columns(X=PICKLED),
    "pickled-labels": columns(y=PICKLED),
}
TS: Damages = {
    "one-class": line("@classLabel true a", 6),
    "no-data": line("", 7),
    "bad-number": line("1,x:2,3:a", 8),
    "ragged-channels": line("1,2,3:4,5:a", 8),
    "a-channel-more": line("1,2:4,5:6,7:a", 8),
    "no-label": line("1,2,3:4,5,6", 8),
    "nothing-but-gaps": rows(lambda lines: [*lines[:7], "?,?:?,?:a", "?,?:?,?:b"]),
}
D4RL: Damages = {
    "without-rewards": columns(rewards=...),
    "other-lengths": columns(actions=lambda a: a[:-1]),
    "not-finite": columns(observations=lambda a: np.where(a > a.mean(), a, np.nan)),
    "no-end": columns(terminals=np.zeros_like),
    "string-terminals": columns(terminals=lambda a: a.astype(str).astype(bytes)),
    "string-timeouts": columns(timeouts=np.array([b"false"] * 20)),
    "numbered-terminals": columns(terminals=np.arange(20)),
    "nan-terminals": columns(terminals=lambda a: np.where(a, np.nan, 0.0)),
    "wide-terminals": columns(terminals=lambda a: np.stack([a, a], axis=1)),
    "no-width": columns(actions=lambda a: a[:, :0]),
    "scalar-rewards": columns(rewards=np.float64(1.0)),
    "beyond-float32": columns(rewards=lambda a: a + 1e300),
    "complex-actions": columns(actions=lambda a: a.astype(complex)),
    "boolean-observations": columns(observations=lambda a: a > 0),
    "no-rows": columns(**dict.fromkeys((*d4rl.KEYS, "timeouts"), lambda a: a[:0])),
}


def replace_in_hdf5(key: str, create: Callable[[Any], object]) -> Damage:
    def damage(file: Path) -> None:
        with h5py.File(file, "a") as out:
            del out[key]
            create(out)

    return damage


HDF5: Damages = {
    **D4RL,
    "group-for-column": replace_in_hdf5("actions", lambda out: out.create_group("actions").update(x=np.zeros(3))),
    "huge-claim": replace_in_hdf5(
        "rewards", lambda out: out.create_dataset("rewards", shape=(10**14,), dtype="f8", chunks=(1000,))
    ),
}
WORDS: Damages = {
    "list": content('["a", "b"]'),
    "numbers": put("words", [1, 2]),
    "no-list": put("words", "a b <eos>"),
    "no-end": put("words", ["a", "b"]),
    "word-twice": put("words", ["<eos>", "a", "a"]),
    "half-a-letter": put("words", ["<eos>", "\ud800"]),
}
BYTE_PAIRS: Damages = {
    "no-model": put("model", ...),
    "model-of-wrong-type": put("model", 3),
    "unknown-model": put("model.type", "Exec"),
    "no-end": partial(edit, lambda c: c.update(added_tokens=[]) or c["model"].update(vocab={"a": 0}, merges=[])),
    "huge-token-number": put("model.vocab.a", 2**31),
    "negative-token-number": put("model.vocab.zzz", -1),
    "merge-of-unknown": put("model.merges", [["qq", "zz"]]),
}
LISTOPS_DAMAGES: Damages = {
    "not-closed": line("[MAX 1 2\t2"),
    "wrong-label": line("[MAX 1 2 ]\t12"),
    "unknown-operator": line("[MAP 1 2 ]\t2"),
    "deep-brackets": line("[MAX " * 100_000 + "\t1"),
    "huge-label": line("[MAX 1 2 ]\t" + "9" * 10_000),
}
REVIEWS: Damages = {
    "numbers-for-texts": columns(text=list(range(12))),
    "missing-texts": columns(text=[None] * 12),
    "lists-for-labels": columns(label=[[1]] * 12),
    "label-2": columns(label=[0, 1, 2] * 4),
    "fractional-labels": columns(label=[0.5] * 12),
    "one-class": columns(label=["pos"] * 12),
    "no-rows": columns(text=[], label=[]),
}
IMAGES: Damages = {
    "other-dtype": columns(array=lambda a: a.astype(np.float32)),
    "other-size": columns(array=lambda a: a[:, :28, :28]),
    "colour": columns(array=lambda a: np.stack([a] * 3, axis=-1)),
    "fewer": columns(array=lambda a: a[:5]),
    "none": columns(array=lambda a: a[:0]),
    "pickled": columns(array=PICKLED),
    "huge-claim": content(b"\x93NUMPY\x01\x00" + len(NPY_HEADER).to_bytes(2, "little") + NPY_HEADER),
}
IMAGE_LABELS: Damages = {
    "fractions": columns(array=lambda a: a + 0.5),
    "nan": columns(array=lambda a: np.full(len(a), np.nan)),
    "words": columns(array=lambda a: a.astype(str)),
    "label-10": columns(array=lambda a: a + 1),
    "two-columns": columns(array=lambda a: np.stack([a, a], axis=1)),
    "pickled": columns(array=PICKLED),
}
SPLITS: Damages = {
    "list": content("[6, 3, 3]"),
    "missing-split": put("valid", ...),
    "words": put("train", "6"),
    "infinity": put("train", float("inf")),
    "booleans": put("train", True),
    "other-sum": put("train", 7),
    "negative": partial(edit, lambda c: c.update(train=12, valid=-3)),
    "huge": put("train", 10**400),
}
CIFAR: Damages = {
    "one-byte-more": lambda file: file.write_bytes(file.read_bytes() + b"\0"),
    "label-10": lambda file: file.write_bytes(b"\x0a" + file.read_bytes()[1:]),
}
METADATA: Damages = {"label-2": line("imgs/0 sample_1.png 1 2"), "missing-image": line("imgs/0 sample_99.png 1 1")}
PAIRS_DAMAGES: Damages = {"label-2": line("2\ta\tb\tc\td"), "open-quote": line('1\ta\tb\t"c\td')}
D4RL_NPZ: Damages = {**D4RL, "pickled-rewards": columns(rewards=PICKLED)}
make_words = partial(make_vocabulary, partial(lm.Vocabulary.from_words, "a b <unk>\n"))
make_pairs = partial(make_vocabulary, partial(lm.Vocabulary.train_byte_pairs, ["some text to learn from"] * 3, 270))
make_images = partial(image_files.write, train=2, val=1)
make_retrieval = partial(make_lines, tokens.PAIRS, PAIRS)


def data_kind(make: Any, file: str, read: Any, damages: Damages, harmless: str = "", **names: str) -> Kind:
    """A kind of data file that also suffers all of `DATA` that is not harmless to it."""
    return Kind(make, file, read, {**without(DATA, *harmless.split()), **damages}, **names)


DATA_KINDS = {
    "uea-npz": data_kind(
        partial(make_uea, ".npz"), "Toy_TRAIN.npz", load_uea, UEA, layout="Toy_TRAIN.ts", recipe="uea/Toy"
    ),
    "uea-ts": data_kind(partial(make_uea, ".ts"), "Toy_TRAIN.ts", load_uea, TS, layout="_TRAIN.ts", recipe="uea/Toy"),
    "own-parquet": data_kind(
        partial(make_uea, ".parquet"), "Toy_TRAIN.parquet", lambda home: uea.load_file(home / "Toy_TRAIN.parquet"), {}
    ),
    "d4rl-hdf5": data_kind(
        partial(make_d4rl, ".hdf5"), "hopper-medium.hdf5", load_d4rl, HDF5, layout="hopper-medium.hdf5",
        recipe="d4rl/hopper-medium",
    ),
    "d4rl-npz": data_kind(partial(make_d4rl, ".npz"), "hopper-medium.npz", load_d4rl, D4RL_NPZ),
    "word-vocabulary": data_kind(make_words, "vocabulary.json", load_vocabulary, WORDS),
    "pair-vocabulary": data_kind(make_pairs, "vocabulary.json", load_vocabulary, BYTE_PAIRS),
    "listops": data_kind(
        make_listops, "basic_train.tsv", listops.load, LISTOPS_DAMAGES, layout="basic_train.tsv", recipe="lra/listops"
    ),
    "retrieval": data_kind(
        make_retrieval, tokens.PAIRS["train"], tokens.load_retrieval, PAIRS_DAMAGES, harmless="truncated",
        layout="primal data retrieval --articles", recipe="lra/retrieval",
    ),
    "reviews": data_kind(
        make_reviews, "train.parquet", tokens.load_text, REVIEWS, layout="train.parquet", recipe="lra/text"
    ),
    "wiki-xz": data_kind(
        make_wiki, "wiki.train.txt.xz", lm.load, {}, layout="wiki.train.tokens", recipe="lm/wikitext-103"
    ),
    "cifar-bin": data_kind(
        make_cifar, "data_batch_3.bin", tokens.load_image, CIFAR, layout="train_images.npy", recipe="lra/image"
    ),
    "gray-images": data_kind(make_gray, "train_images.npy", tokens.load_image, IMAGES),
    "gray-labels": data_kind(make_gray, "train_labels.npy", tokens.load_image, IMAGE_LABELS),
    "pathfinder-image": data_kind(
        make_pathfinder, "imgs/0/sample_3.png", pathfinder.load, {}, layout="metadata/*.npy", recipe="lra/pathfinder"
    ),
    "pathfinder-metadata": data_kind(make_pathfinder, "metadata/0.npy", pathfinder.load, METADATA),
    "pathfinder-splits": data_kind(make_pathfinder, "splits.json", pathfinder.load, SPLITS, harmless="missing"),
    "image-folder": data_kind(
        make_images, "train/n02/1.jpg", load_images, {}, harmless="missing foreign-image",
        layout="train/CLASS/*.jpg",
    ),
}  # fmt: skip
