"""Text for language models: three splits in one folder, encoded once into a memory-mapped stream of tokens.

    data = load("data/wikipedia", 8192)      # wiki.train.txt, wiki.valid.txt, wiki.test.txt, plain or .xz
    data = load("data/wikitext-103")         # wiki.train.tokens, …: words between spaces, as the release has them
    data.vocabulary.decode(data.valid.tokens[:50])

A line ` = Title = ` begins a document. No document may be in two splits, and the vocabulary is made of train alone.
Every split's stream begins with the vocabulary's end token, so that the first word is predicted too.
"""

from __future__ import annotations

import hashlib
import json
import lzma
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from primal_attention.data.storage import Arrays, cached, one_line, reading
from primal_attention.utils.errors import DataError, import_package
from primal_attention.utils.files import read_text, write_text

END_OF_LINE, UNKNOWN = "<eos>", "<unk>"
END_OF_DOCUMENT = "<|end|>"
SPLITS = ("train", "valid", "test")
DOCUMENT = re.compile(r"^(?= = [^=\n].* = $)", re.MULTILINE)
BATCH = 256  # documents encoded at once: the library's results take far more memory than the tokens


class Vocabulary:
    """Words between spaces with <eos> after every line, or byte pairs, both by the tokenizers library.

    Args:
        text: The vocabulary as JSON: {"words": […]}, or the library's own.

    Attributes:
        text: The vocabulary as JSON.
        end: The token before every beginning.
        is_word_level: True for words. Byte pairs encode any text and decode to the same bytes.
        tokenizer: The library's tokenizer.
    """

    def __init__(self, text: str) -> None:
        library = import_package("tokenizers", "a vocabulary")
        try:
            content = json.loads(text)
            self.is_word_level = "words" in content
            self.tokenizer = (
                _word_tokenizer(content["words"]) if self.is_word_level else library.Tokenizer.from_str(text)
            )
            numbers = self.tokenizer.get_vocab().values()
        except Exception as error:  # the library raises Exception itself
            raise DataError(f"not a vocabulary of words or of the tokenizers library ({one_line(error)})") from None
        if sorted(numbers) != list(range(len(numbers))):
            raise DataError(f"the {len(numbers)} tokens of the vocabulary must have the numbers 0 … {len(numbers) - 1}")
        name = END_OF_LINE if self.is_word_level else END_OF_DOCUMENT
        self.end = self.tokenizer.token_to_id(name)
        if self.end is None:
            raise DataError(f"the vocabulary lacks its end token {name}")
        self.text = text if self.is_word_level else self.tokenizer.to_str()

    @classmethod
    def from_words(cls, text: str) -> Vocabulary:
        """Take all words of a text, the most frequent first; equally frequent ones in alphabetical order."""
        counts = Counter(text.split())
        counts[END_OF_LINE] += len(text.splitlines())
        words = sorted(counts, key=lambda word: (-counts[word], word))
        return cls(json.dumps({"words": words}, ensure_ascii=False))

    @classmethod
    def train_byte_pairs(cls, documents: Iterable[str], size: int) -> Vocabulary:
        """Learn `size` tokens by merging the most frequent pairs."""
        library = import_package("tokenizers", "a vocabulary")
        alphabet = library.pre_tokenizers.ByteLevel.alphabet()
        if size <= len(alphabet):
            raise DataError(f"a vocabulary needs more than {len(alphabet)} tokens, one for each byte (got {size})")
        tokenizer = library.Tokenizer(library.models.BPE())
        tokenizer.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = library.decoders.ByteLevel()
        trainer = library.trainers.BpeTrainer(
            vocab_size=size, initial_alphabet=sorted(alphabet), special_tokens=[END_OF_DOCUMENT], show_progress=False
        )
        tokenizer.train_from_iterator(documents, trainer)
        return cls(tokenizer.to_str())

    def __len__(self) -> int:
        return self.tokenizer.get_vocab_size()

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the tokens of each text, without an end token."""
        if self.is_word_level and self.tokenizer.token_to_id(UNKNOWN) is None and (unknown := self.unknown(texts)):
            raise DataError(f"the word {unknown[0]!r} is not in the vocabulary, and the vocabulary has no {UNKNOWN}")
        return [encoding.ids for encoding in self.tokenizer.encode_batch(list(texts), add_special_tokens=False)]

    def unknown(self, texts: Sequence[str]) -> list[str]:
        """Return the words that are not in the vocabulary, each once; none for byte pairs."""
        words = dict.fromkeys(" ".join(texts).split()) if self.is_word_level else ()
        return [word for word in words if self.tokenizer.token_to_id(word) is None]

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of the tokens."""
        wrong = next((t for t in tokens if not 0 <= t < len(self)), None)
        if wrong is not None:
            raise DataError(f"token {wrong} is not in the vocabulary, which has 0 … {len(self) - 1}")
        text = self.tokenizer.decode(list(tokens), skip_special_tokens=True)
        return re.sub(f" ?{END_OF_LINE} ?", "\n", text) if self.is_word_level else text

    def save(self, file: Path) -> None:
        write_text(file, self.text)

    @property
    def digest(self) -> str:
        """Hash that identifies a vocabulary; a checkpoint stores that of its own."""
        return hashlib.sha256(self.text.encode()).hexdigest()


def _word_tokenizer(words: Any) -> Any:
    library = import_package("tokenizers", "a vocabulary")
    if not isinstance(words, list) or not all(isinstance(word, str) for word in words) or len(set(words)) < len(words):
        raise ValueError("words must be a list of different texts")
    numbers = {word: i for i, word in enumerate(words)}
    tokenizer = library.Tokenizer(library.models.WordLevel(numbers, unk_token=UNKNOWN))
    tokenizer.normalizer = library.normalizers.Replace("\n", f" {END_OF_LINE} ")
    tokenizer.pre_tokenizer = library.pre_tokenizers.WhitespaceSplit()
    return tokenizer


def load_vocabulary(file: Path) -> Vocabulary:
    """Read a vocabulary from its file."""
    try:
        return Vocabulary(read_text(file))
    except DataError as error:
        raise error if str(file) in str(error) else DataError(f"{file}: {error}") from None


@dataclass(frozen=True)
class TextSplit:
    """One split: its stream of tokens, and the size of the text."""

    tokens: np.ndarray  # uint16 or int32
    bytes: int
    documents: int


@dataclass(frozen=True)
class TextData:
    vocabulary: Vocabulary
    train: TextSplit
    valid: TextSplit
    test: TextSplit


def load(folder: str | Path, size: int | None = None, *, vocabulary: Vocabulary | None = None) -> TextData:
    """Read a folder's splits. The tokens are stored beside the text, or stay in memory where that cannot be written.

    Args:
        folder: Has one file per split; see `find`.
        size: Size of a byte-pair vocabulary to learn from train; None uses the words of the text.
        vocabulary: An existing one, instead of a new one.
    """
    folder = Path(folder)
    files = [find(folder, split) for split in SPLITS]
    settings = vocabulary.digest if vocabulary is not None else size
    name = "words" if settings is None else f"pairs-{str(settings)[:12]}"
    arrays = cached(folder, name, files, settings, partial(_encode_all, files, size, vocabulary))
    return TextData(
        Vocabulary(arrays["vocabulary"].tobytes().decode()),
        *(TextSplit(arrays[split], *map(int, arrays[f"{split}_sizes"])) for split in SPLITS),
    )


def find(folder: Path, split: str) -> Path:
    """Return the file of a split, by the names that releases use."""
    names = [f"wiki.{split}{ending}" for ending in (".tokens", ".txt", ".txt.xz", ".tokens.xz")]
    for name in names:
        if (folder / name).is_file():
            return folder / name
    raise DataError(f"{folder}: no {split} split; expected {names[0]}, {names[1]} or {names[2]}")


def read(file: Path) -> str:
    """Return a file's text, decompressed if it ends in .xz."""
    with reading(file, "a text file" if file.suffix != ".xz" else "a text file packed by xz"):
        content = file.read_bytes()
        return (lzma.decompress(content) if file.suffix == ".xz" else content).decode("utf-8")


def documents(text: str) -> list[str]:
    """Cut the text before every title; the pieces joined are the text again."""
    return [piece for piece in DOCUMENT.split(text) if piece]


def check_no_leak(splits: Sequence[Sequence[str]]) -> None:
    """Raise for a document that is in two splits, even under different titles."""
    origin: dict[bytes, str] = {}
    for name, pieces in zip(SPLITS, splits, strict=True):
        hashes = {}
        for piece in pieces:
            title, body = _title_and_body(piece)
            key = hashlib.sha256(body.encode()).digest()
            if body and key in origin:
                raise DataError(f"the document {title!r} is in {origin[key]} and in {name}: splits must not share text")
            hashes[key] = name
        origin |= hashes


def _title_and_body(piece: str) -> tuple[str, str]:
    """Return a document's title, or its first words where it has none, and the text below."""
    first, _, rest = piece.partition("\n")
    if DOCUMENT.match(first):
        return first.strip(" =")[:60], rest.strip()
    return first.strip()[:60], piece.strip()


def _encode_all(files: Sequence[Path], size: int | None, vocabulary: Vocabulary | None) -> Arrays:
    splits = [documents(read(file)) for file in files]
    for file, pieces in zip(files, splits, strict=True):
        if not any(piece.strip() for piece in pieces):
            raise DataError(f"{file} has no text")
    check_no_leak(splits)
    if vocabulary is None:
        train = splits[0]
        vocabulary = Vocabulary.from_words("".join(train)) if size is None else Vocabulary.train_byte_pairs(train, size)
    arrays = {"vocabulary": np.frombuffer(vocabulary.text.encode(), dtype=np.uint8)}
    for name, pieces in zip(SPLITS, splits, strict=True):
        arrays[name] = encode(pieces, vocabulary)
        arrays[f"{name}_sizes"] = np.array([sum(len(piece.encode()) for piece in pieces), len(pieces)])
    return arrays


def encode(pieces: Sequence[str], vocabulary: Vocabulary) -> np.ndarray:
    """Return the stream of tokens of some documents, an end token before the first and, for byte pairs, after each."""
    dtype = np.uint16 if len(vocabulary) <= 2**16 else np.int32
    ends = [] if vocabulary.is_word_level else [vocabulary.end]  # every line of words has its own
    parts = [np.array([vocabulary.end], dtype=dtype)]
    for start in range(0, len(pieces), BATCH):
        parts += [np.array(tokens + ends, dtype=dtype) for tokens in vocabulary.encode(pieces[start : start + BATCH])]
    return np.concatenate(parts)
