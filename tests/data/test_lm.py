"""Text: splits as they are released, vocabularies that give the text back, no document in two splits."""

import json
import lzma
from pathlib import Path

import numpy as np
import pytest

from primal_attention.data import lm as text
from primal_attention.data.lm import Vocabulary, load_vocabulary
from primal_attention.utils.errors import DataError


def article(name: str, lines: int = 3) -> str:
    return f" = {name} = \n\n" + "".join(f"Line {i} of {name}, naïve café № {i}.\n" for i in range(lines))


def write(folder: Path, ending: str = ".txt", **splits: str) -> Path:
    for split in text.SPLITS:
        content = splits.get(split, article(f"A {split}") + article(f"B {split}")).encode()
        file = folder / f"wiki.{split}{ending}"
        file.write_bytes(lzma.compress(content) if ending.endswith(".xz") else content)
    return folder


@pytest.mark.parametrize("ending", [".txt", ".txt.xz"])
def test_byte_pairs_give_every_byte_back(tmp_path: Path, ending: str) -> None:
    data = text.load(write(tmp_path, ending), 280)
    expected = article("A valid") + article("B valid")
    assert len(data.vocabulary) == 280
    assert data.vocabulary.decode(data.valid.tokens.tolist()) == expected
    assert (data.valid.bytes, data.valid.documents) == (len(expected.encode()), 2)
    ends = np.flatnonzero(data.valid.tokens == data.vocabulary.end)
    assert len(ends) == 3  # before the first document and after each
    assert (ends[0], ends[-1]) == (0, len(data.valid.tokens) - 1)
    assert data.valid.tokens.dtype == np.uint16


def test_words_as_wikitext_has_them(tmp_path: Path) -> None:
    train = " = A = \n \n The <unk> cat sat . \n The cat . \n"
    data = text.load(write(tmp_path, ".tokens", train=train, valid=" = B = \n The dog sat \n", test=" = C = \n"))
    words = data.vocabulary
    assert words.is_word_level
    assert json.loads(words.text)["words"] == ["<eos>", ".", "=", "The", "cat", "<unk>", "A", "sat"]
    names = [words.tokenizer.id_to_token(t) for t in data.valid.tokens]
    assert " ".join(names) == "<eos> = <unk> = <eos> The <unk> sat <eos>"
    assert words.decode(words.encode(["The cat\nsat .\n\n."])[0]) == "The cat\nsat .\n\n."
    assert words.unknown(["The dog sat\non the dog"]) == ["dog", "on", "the"]


def test_the_vocabulary_knows_train_alone(tmp_path: Path) -> None:
    one = text.load(write(tmp_path), 300).vocabulary
    other = tmp_path / "other"
    other.mkdir()
    two = text.load(write(other, valid=article("xyzzy " * 50), test=article("plugh")), 300).vocabulary
    assert one.digest == two.digest


def test_tokens_are_made_once_and_mapped(tmp_path: Path) -> None:
    write(tmp_path)
    text.load(tmp_path, 300)
    again = text.load(tmp_path, 300)
    assert isinstance(again.train.tokens, np.memmap)
    write(tmp_path, train=article("New") + article("Newer"))
    assert "New" in (changed := text.load(tmp_path, 300)).vocabulary.decode(changed.train.tokens.tolist())


def test_a_document_in_two_splits_is_refused_under_any_title(tmp_path: Path) -> None:
    write(tmp_path, train=article("A") + " = Index = \n", valid=article("B") + " = Index = \n")
    assert text.load(tmp_path, 300).train.documents == 2, "titles alone are not documents"
    twice = article("Twice")
    for title in ("Twice", "Other"):
        again = twice.replace(" = Twice = ", f" = {title} = ", 1)
        write(tmp_path, train=article("A") + twice, test=article("B") + again)
        with pytest.raises(DataError, match=f"the document '{title}' is in train and in test"):
            text.load(tmp_path, 300)


def test_vocabularies_are_saved_and_checked(tmp_path: Path) -> None:
    pairs = Vocabulary.train_byte_pairs([article("A", 20)], 300)
    words = Vocabulary.from_words("a b a\n")
    for vocabulary in (pairs, words):
        vocabulary.save(tmp_path / "vocabulary.json")
        assert load_vocabulary(tmp_path / "vocabulary.json").digest == vocabulary.digest
        with pytest.raises(DataError, match=rf"token {len(vocabulary)} is not in the vocabulary"):
            vocabulary.decode([0, len(vocabulary)])
    with pytest.raises(DataError, match="the word 'c' is not in the vocabulary, and the vocabulary has no <unk>"):
        words.encode(["a c"])
    with pytest.raises(DataError, match="more than 256 tokens, one for each byte"):
        Vocabulary.train_byte_pairs(["a"], 256)
    with pytest.raises(DataError, match=r"missing.json does not exist"):
        load_vocabulary(tmp_path / "missing.json")
