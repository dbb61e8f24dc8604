"""Text for language models: three splits in one folder, turned once into a stream of tokens that is memory-mapped.

    data = load("data/wikipedia", 8192)      # wiki.train.txt, wiki.valid.txt, wiki.test.txt, plain or .xz
    data = load("data/wikitext-103")         # wiki.train.tokens, …: words between spaces, as the release has them

A line ` = Title = ` begins a document. No document may stand in two splits, and the vocabulary is made of train alone.
Every split's stream begins with the vocabulary's end token, so that the first word is predicted too.
"""

from __future__ import annotations

import hashlib
import lzma
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from primal_attention.data.errors import DataError
from primal_attention.data.storage import Arrays, cached, reading
from primal_attention.data.vocabulary import SubwordVocabulary, Vocabulary, WordVocabulary, read_vocabulary

SPLITS = ("train", "valid", "test")
DOCUMENT = re.compile(r"^(?= = [^=\n].* = $)", re.MULTILINE)
BATCH = 256  # documents encoded at once: what the library returns takes far more room than the tokens


@dataclass(frozen=True)
class TextSplit:
    """One split: its tokens in a row, and how much text they stand for."""

    tokens: np.ndarray  # uint16 or int32
    bytes: int
    documents: int


@dataclass(frozen=True)
class TextData:
    vocabulary: Vocabulary
    train: TextSplit
    valid: TextSplit
    test: TextSplit


def load(
    folder: str | Path, size: int | None = None, *, vocabulary: Vocabulary | None = None, cache: Path | None = None
) -> TextData:
    """Read a folder's splits.

    Args:
        size: of a byte-pair vocabulary to learn from train; None takes the words as they stand.
        vocabulary: one that exists already, instead of a new one.
        cache: folder for the tokens; None keeps them beside the text, or in memory where that cannot be written.
    """
    folder = Path(folder)
    files = [find(folder, split) for split in SPLITS]
    settings = vocabulary.digest if vocabulary is not None else size
    name = "words" if settings is None else f"pairs-{str(settings)[:12]}"
    arrays = cached(cache or folder, name, files, settings, partial(_encode_all, files, size, vocabulary))
    return TextData(
        read_vocabulary(arrays["vocabulary"].tobytes().decode()),
        *(TextSplit(arrays[split], *map(int, arrays[f"{split}_sizes"])) for split in SPLITS),
    )


def find(folder: Path, split: str) -> Path:
    """The file of a split, by the names that releases use."""
    names = [f"wiki.{split}{ending}" for ending in (".tokens", ".txt", ".txt.xz", ".tokens.xz")]
    for name in names:
        if (folder / name).is_file():
            return folder / name
    raise DataError(f"{folder}: no {split} split; expected {names[0]}, {names[1]} or {names[2]}")


def read(file: Path) -> str:
    """A file's text, unpacked if need be."""
    with reading(file, "a text file" + (" packed by xz" if file.suffix == ".xz" else "")):
        data = lzma.decompress(file.read_bytes()) if file.suffix == ".xz" else file.read_bytes()
        return data.decode("utf-8")


def documents(text: str) -> list[str]:
    """The text cut before every title; together they are the text again."""
    return [piece for piece in DOCUMENT.split(text) if piece]


def check_no_leak(splits: Sequence[Sequence[str]]) -> None:
    """Refuse a document that stands in two splits, whatever its title there."""
    seen: dict[bytes, str] = {}
    for name, pieces in zip(SPLITS, splits, strict=True):
        own = {}
        for piece in pieces:
            title, body = _title_and_body(piece)
            key = hashlib.sha256(body.encode()).digest()
            if body and key in seen:
                raise DataError(
                    f"the document {title!r} stands in {seen[key]} and in {name}: splits must not share text"
                )
            own[key] = name
        seen |= own


def _title_and_body(piece: str) -> tuple[str, str]:
    """A document's title, or its first words where it has none, and the text below."""
    first, _, rest = piece.partition("\n")
    if DOCUMENT.match(first):
        return first.strip(" =")[:60], rest.strip()
    return first.strip()[:60], piece.strip()


def _encode_all(files: Sequence[Path], size: int | None, vocabulary: Vocabulary | None) -> Arrays:
    splits = [documents(read(file)) for file in files]
    for file, pieces in zip(files, splits, strict=True):
        if not any(piece.strip() for piece in pieces):
            raise DataError(f"{file} holds no text")
    check_no_leak(splits)
    if vocabulary is None:
        train = splits[0]
        vocabulary = WordVocabulary.build("".join(train)) if size is None else SubwordVocabulary.train(train, size)
    arrays = {"vocabulary": np.frombuffer(vocabulary.text().encode(), dtype=np.uint8)}
    for name, pieces in zip(SPLITS, splits, strict=True):
        arrays[name] = encode(pieces, vocabulary)
        arrays[f"{name}_sizes"] = np.array([sum(len(piece.encode()) for piece in pieces), len(pieces)])
    return arrays


def encode(pieces: Sequence[str], vocabulary: Vocabulary) -> np.ndarray:
    """The stream of tokens of some documents, an end token before the first and, for byte pairs, after each."""
    dtype = np.uint16 if len(vocabulary) <= 2**16 else np.int32
    ends = [] if isinstance(vocabulary, WordVocabulary) else [vocabulary.end]  # there every line has its own

    def parts() -> Iterator[np.ndarray]:
        yield np.array([vocabulary.end], dtype=dtype)
        for start in range(0, len(pieces), BATCH):
            for tokens in vocabulary.encode(pieces[start : start + BATCH]):
                yield np.array(tokens + ends, dtype=dtype)

    return np.concatenate(list(parts()))
