"""`primal generate`: the text of the model; user errors are one line with exit code 2."""

import json
from pathlib import Path

import pytest
import test_lm
import torch

from primal_attention.data.lm import Vocabulary
from primal_attention.train import lm as language
from primal_attention.train import loop
from primal_attention.train.lm import load_language

texts = test_lm.folder


@pytest.fixture(scope="module")
def run(texts: Path) -> Path:
    changes = {"model__primal_mode": "landmarks", "trainer__steps_per_epoch": 1}  # the mode with a longest context
    loop.train(test_lm.small(texts, **changes), texts / "run", name="lm/wikipedia")
    return texts / "run"


def test_the_text_is_the_models(run: Path, primal) -> None:
    code, out, err = primal("generate", str(run), "--prompt", "The cat", "--tokens", "5", "--greedy", "--past-end")
    model, vocabulary = load_language(run)
    (tokens,) = vocabulary.encode(["The cat"])
    text = [vocabulary.end, *tokens]
    with torch.no_grad():
        for _ in range(5):
            text.append(int(model(torch.tensor([text]))[0, -1].argmax()))
    assert (code, out) == (0, vocabulary.decode(text) + "\n")
    assert err.startswith(f"5 tokens after {len(tokens) + 1} in ")


def test_seeds_and_prompt_files(run: Path, primal, tmp_path: Path) -> None:
    def text(*words: str) -> str:
        code, out, _ = primal("generate", str(run), "--tokens", "6", "--past-end", *words)
        assert code == 0
        return out

    draw = ("--prompt", "The", "--temperature", "1.5", "--top-k", "50", "--top-p", "0.9")
    assert text(*draw) == text(*draw, "--seed", "0") != text(*draw, "--seed", "1")
    (tmp_path / "begin.txt").write_text("The")
    greedy = text("--greedy", "--prompt-file", str(tmp_path / "begin.txt"))
    assert greedy == text("--temperature", "0", "--prompt", "The")


def test_characters_of_several_tokens_are_printed_whole(run: Path, primal, monkeypatch) -> None:
    _, vocabulary = load_language(run)
    (tokens,) = vocabulary.encode(["日本語 🙂🙂 é"])  # every byte is a token, and the last character is cut
    monkeypatch.setattr("primal_attention.models.lm.generate", lambda *_, **__: ([token] for token in tokens[:-1]))
    printed: list[str] = []
    monkeypatch.setattr("builtins.print", lambda *parts, **_: printed.extend(parts))
    primal("generate", str(run), "--prompt", "The")
    assert printed[-2] == "\ufffd"  # bytes that never become a character are shown at the end
    assert "".join(printed[:-1]) == "The日本語 🙂🙂 \ufffd"
    assert "\ufffd" not in "".join(printed[:-2])


WRONG = {
    "": "give the beginning of a text, with --prompt",
    "--prompt=": "--prompt is empty",
    "--prompt cat --tokens 100": "more than max_length=16 of this model",
    f"--prompt {20 * 'cat,'}": "more than max_length=16 of this model: a shorter prompt",
    "--prompt a --temperature -1": "--temperature must be at least 0 (got -1.0)",
    "--prompt-file nothing.txt": "nothing.txt does not exist",
}


@pytest.mark.parametrize("words", WRONG)
def test_user_errors_are_one_line(words: str, run: Path, primal) -> None:
    code, out, err = primal("generate", str(run), *words.split())
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert WRONG[words] in err


def test_an_unknown_word_is_one_line(run: Path, primal, monkeypatch) -> None:
    model, _ = load_language(run)
    words = ["<eos>", "cat", "<unk>", *map(str, range(277))]  # as many as the model has tokens
    for vocabulary, prompt, code, message in (
        (["<eos>", "cat"], "the cat", 2, "the word 'the' is not in the vocabulary, and the vocabulary has no <unk>"),
        (words, "the cat the mat", 0, "not in the vocabulary, read as <unk>: the mat\n1 tokens"),
        (words, " ", 2, "the prompt has no token of this vocabulary"),
    ):
        loaded = model, Vocabulary(json.dumps({"words": vocabulary}))
        monkeypatch.setattr(language, "load_language", lambda folder, loaded=loaded: loaded)
        result = primal("generate", str(run), "--prompt", prompt, "--tokens", "1")
        assert result[0] == code
        assert message in result[2]
