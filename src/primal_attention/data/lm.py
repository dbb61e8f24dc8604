"""Vocabularies of language models: words as they stand in a tokenised text, or byte pairs learned from plain text.

    vocabulary = WordVocabulary.build(text)            # WikiText-103: words and <eos> at the end of each line
    vocabulary = SubwordVocabulary.train(documents, 8192)
    vocabulary.save(file);  load_vocabulary(file)

Either one turns text into numbers and back; byte pairs give back every byte.

Text for language models: three splits in one folder, turned once into a stream of tokens that is memory-mapped.

    data = load("data/wikipedia", 8192)      # wiki.train.txt, wiki.valid.txt, wiki.test.txt, plain or .xz
    data = load("data/wikitext-103")         # wiki.train.tokens, …: words between spaces, as the release has them

A line ` = Title = ` begins a document. No document may stand in two splits, and the vocabulary is made of train alone.
Every split's stream begins with the vocabulary's end token, so that the first word is predicted too.
"""

from __future__ import annotations

import hashlib
import json
import lzma
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from primal_attention.data.storage import Arrays, cached, one_line, reading, write_file
from primal_attention.utils.errors import DataError, import_package

END_OF_LINE, UNKNOWN = "<eos>", "<unk>"
END_OF_DOCUMENT = "<|end|>"


class Vocabulary:
    """What a model must know of its tokens. `end` is the token before every beginning."""

    end: int

    def __len__(self) -> int:
        raise NotImplementedError

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """The tokens of each text, without an end."""
        raise NotImplementedError

    def unknown(self, texts: Sequence[str]) -> list[str]:
        """The words that the vocabulary does not have, each once; byte pairs have them all."""
        return []

    def decode(self, tokens: Sequence[int]) -> str:
        raise NotImplementedError

    def text(self) -> str:
        """All of it, as `save` writes and `read` reads it."""
        raise NotImplementedError

    def save(self, file: Path) -> None:
        write_file(file, lambda out: out.write(self.text().encode()))

    @property
    def digest(self) -> str:
        """Tells two vocabularies apart: a checkpoint belongs to one of them."""
        return hashlib.sha256(self.text().encode()).hexdigest()

    def _check(self, tokens: Sequence[int]) -> None:
        wrong = next((t for t in tokens if not 0 <= t < len(self)), None)
        if wrong is not None:
            raise DataError(f"token {wrong} is not in the vocabulary, which has 0 … {len(self) - 1}")


class WordVocabulary(Vocabulary):
    """Words between spaces, the most frequent first; every line ends with <eos>."""

    def __init__(self, words: Sequence[str]) -> None:
        self.words = list(words)
        self._number = {word: i for i, word in enumerate(self.words)}
        if END_OF_LINE not in self._number or len(self._number) != len(self.words):
            raise DataError(f"a vocabulary of words needs {END_OF_LINE} and no word twice")
        self.end = self._number[END_OF_LINE]

    @classmethod
    def build(cls, text: str) -> WordVocabulary:
        """All words of a text; equally frequent ones in the order of the alphabet."""
        lines = text.splitlines()
        counts = Counter(word for line in lines for word in line.split())
        counts[END_OF_LINE] += len(lines)
        return cls(sorted(counts, key=lambda word: (-counts[word], word)))

    def __len__(self) -> int:
        return len(self.words)

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        return [[n for line in text.splitlines(keepends=True) for n in self._line(line)] for text in texts]

    def unknown(self, texts: Sequence[str]) -> list[str]:
        return [word for word in dict.fromkeys(" ".join(texts).split()) if word not in self._number]

    def _line(self, line: str) -> list[int]:
        words = line.split() + ([END_OF_LINE] if line.endswith("\n") else [])
        try:
            return [self._number[word] for word in words]
        except KeyError:
            return [self._number[word] if word in self._number else self._unknown(word) for word in words]

    def _unknown(self, word: str) -> int:
        if UNKNOWN not in self._number:
            raise DataError(f"the word {word!r} is not in the vocabulary, and the vocabulary has no {UNKNOWN}")
        return self._number[UNKNOWN]

    def decode(self, tokens: Sequence[int]) -> str:
        self._check(tokens)
        words = " ".join("\n" if t == self.end else self.words[t] for t in tokens)
        return words.replace(" \n ", "\n").replace(" \n", "\n").replace("\n ", "\n")

    def text(self) -> str:
        return json.dumps({"words": self.words}, ensure_ascii=False)


class SubwordVocabulary(Vocabulary):
    """Byte pairs, through the tokenizers library. No text is unknown: every byte is a token."""

    def __init__(self, text: str) -> None:
        library = _library()
        try:
            self._tokenizer = library.Tokenizer.from_str(text)
            numbers = self._tokenizer.get_vocab().values()
        except Exception as error:  # the library raises Exception itself
            raise DataError(f"this is no vocabulary of the tokenizers library ({one_line(error)})") from None
        if sorted(numbers) != list(range(len(numbers))):
            raise DataError(f"the {len(numbers)} tokens of the vocabulary must have the numbers 0 … {len(numbers) - 1}")
        end = self._tokenizer.token_to_id(END_OF_DOCUMENT)
        if end is None:
            raise DataError(f"the vocabulary has no {END_OF_DOCUMENT}, which stands between documents")
        self.end = end

    @classmethod
    def train(cls, documents: Iterable[str], size: int) -> SubwordVocabulary:
        """The `size` most useful pieces of the documents, found by merging the most frequent pairs."""
        library = _library()
        alphabet = library.pre_tokenizers.ByteLevel.alphabet()
        if size <= len(alphabet):
            raise DataError(
                f"the vocabulary must hold more than {len(alphabet)} tokens, one for each byte (got {size})"
            )
        tokenizer = library.Tokenizer(library.models.BPE())
        tokenizer.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = library.decoders.ByteLevel()
        trainer = library.trainers.BpeTrainer(
            vocab_size=size, initial_alphabet=sorted(alphabet), special_tokens=[END_OF_DOCUMENT], show_progress=False
        )
        tokenizer.train_from_iterator(documents, trainer)
        return cls(tokenizer.to_str())

    def __len__(self) -> int:
        return self._tokenizer.get_vocab_size()

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        return [found.ids for found in self._tokenizer.encode_batch(list(texts), add_special_tokens=False)]

    def decode(self, tokens: Sequence[int]) -> str:
        self._check(tokens)
        return self._tokenizer.decode(list(tokens), skip_special_tokens=True)

    def text(self) -> str:
        return self._tokenizer.to_str()


def read_vocabulary(text: str) -> Vocabulary:
    """A vocabulary from what its `text` gave."""
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DataError(f"a vocabulary is JSON ({one_line(error)})") from None
    if not isinstance(content, dict):
        raise DataError(f"a vocabulary is a JSON object (got {type(content).__name__})")
    if "words" not in content:
        return SubwordVocabulary(text)
    words = content["words"]
    if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
        raise DataError("words must be a list of strings")
    if any("\ud800" <= letter <= "\udfff" for word in words for letter in word):
        raise DataError("words must be valid Unicode (one holds half of a surrogate pair)")
    return WordVocabulary(words)


def load_vocabulary(file: Path) -> Vocabulary:
    """A vocabulary from its file; one that cannot be read is one clear line."""
    with reading(file, "a vocabulary"):
        text = file.read_bytes().decode("utf-8")
    try:
        return read_vocabulary(text)
    except DataError as error:
        raise DataError(f"{file}: {error}") from None


def _library() -> Any:
    return import_package("tokenizers", "a byte-pair vocabulary")


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
