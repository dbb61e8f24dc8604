"""Vocabularies of language models: words as they stand in a tokenised text, or byte pairs learned from plain text.

    vocabulary = WordVocabulary.build(text)            # WikiText-103: words and <eos> at the end of each line
    vocabulary = SubwordVocabulary.train(documents, 8192)
    vocabulary.save(file);  load_vocabulary(file)

Either one turns text into numbers and back; byte pairs give back every byte.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from primal_attention.data.errors import DataError, import_package
from primal_attention.data.storage import one_line, reading, write_file

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
