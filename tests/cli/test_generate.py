"""`primal generate`: the text of the model, streamed; bad input is one line with exit code 2."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from primal_attention.cli import main as cli
from primal_attention.cli.generate import TextStream
from primal_attention.data.lm import SubwordVocabulary, WordVocabulary
from primal_attention.train import loop as runner
from primal_attention.train import registry
from primal_attention.train.config import override
from primal_attention.train.lm import load_language

pytest.importorskip("tokenizers")

SMALL = {
    "data.vocabulary": 280,
    "data.context": 16,
    "model.embed_dim": 16,
    "model.num_heads": 2,
    "model.layers": 2,
    "model.ffn_dim": 16,
    "model.rank": 4,
    "model.landmarks": 8,
    "trainer.epochs": 1,
    "trainer.steps_per_epoch": 1,
    "trainer.batch_size": 2,
    "trainer.precision": "32-true",
    "trainer.accelerator": "cpu",
    "trainer.progress": False,
}
ARTICLE = " = {0} {1} = \n\nThe cat {1} sat on the mat of {0}, and sat there for days.\n"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of the landmarks mode, which has a longest context."""
    torch.set_num_threads(1)
    home = tmp_path_factory.mktemp("wikipedia")
    for split, count in (("train", 12), ("valid", 3), ("test", 3)):
        (home / f"wiki.{split}.txt").write_text("".join(ARTICLE.format(split, i) for i in range(count)))
    changes = {**SMALL, "data.folder": home, "model.primal_mode": "landmarks"}
    runner.train(override(registry.get("lm/wikipedia"), changes), home / "run", name="lm/wikipedia")
    return home / "run"


def test_the_text_is_the_models(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["generate", str(run), "--prompt", "The cat", "--tokens", "5", "--greedy", "--past-end"]) == 0
    shown = capsys.readouterr()
    model, vocabulary = load_language(run)
    (tokens,) = vocabulary.encode(["The cat"])
    text = [vocabulary.end, *tokens]
    with torch.no_grad():
        for _ in range(5):
            text.append(int(model(torch.tensor([text]))[0, -1].argmax()))
    assert shown.out == vocabulary.decode(text) + "\n"
    assert shown.err.startswith(f"5 tokens after {len(tokens) + 1} in ")


def test_seeds_and_several_prompts(run: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    def text(*words: str) -> str:
        assert cli.main(["generate", str(run), "--tokens", "6", "--past-end", *words]) == 0
        return capsys.readouterr().out

    draw = ("--prompt", "The", "--temperature", "1.5", "--top-k", "50", "--top-p", "0.9")
    assert text(*draw) == text(*draw, "--seed", "0") != text(*draw, "--seed", "1")
    first, second = text("--greedy", "--prompt", "The", "The cat").split("\n---\n")
    assert first + "\n" == text("--greedy", "--prompt", "The")
    assert second == text("--greedy", "--prompt", "The cat")
    (tmp_path / "begin.txt").write_text("The")
    assert text("--greedy", "--prompt-file", str(tmp_path / "begin.txt")) == first + "\n"


def test_bad_input_is_one_line(run: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    def line(*words: str, of: Path = run) -> str:
        assert cli.main(["generate", str(of), *words]) == 2
        shown = capsys.readouterr()
        assert shown.out == ""
        assert shown.err.count("\n") == 1
        return shown.err

    assert "no prompt: give the beginning of a text" in line()
    assert "the prompt is empty" in line("--prompt", "")
    assert "more than max_length=16 of this model" in line("--prompt", "The cat", "--tokens", "100")
    assert "more than max_length=16 of this model: a shorter prompt" in line("--prompt", "The cat " * 20)
    assert "top_p must lie in (0, 1] (got 2.0)" in line("--prompt", "a", "--top-p", "2")
    assert "temperature must be at least 0 (got -1.0)" in line("--prompt", "a", "--temperature", "-1")
    assert "--tokens must be at least 1 (got 0)" in line("--prompt", "a", "--tokens", "0")
    assert "--device must be cpu, cuda or cuda:N (got 'tpuu')" in line("--prompt", "a", "--device", "tpuu")
    assert "nothing.txt does not exist" in line("--prompt-file", str(tmp_path / "nothing.txt"))
    assert "is not a run folder: it has no config.yaml" in line("--prompt", "a", of=tmp_path)
    assert "did you mean --temperature?" in line("--prompt", "a", "--temperatur", "1")


def test_a_foreign_vocabulary_is_one_line(run: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    other = tmp_path / "run"
    other.mkdir()
    for file in ("config.yaml", "summary.json", "model.safetensors"):
        (other / file).write_bytes((run / file).read_bytes())
    (other / "vocabulary.json").write_text(json.dumps({"words": ["<eos>", "a"]}))
    assert cli.main(["generate", str(other), "--prompt", "a"]) == 2
    assert "vocabulary.json has 2 tokens and the checkpoint 280" in capsys.readouterr().err
    (other / "vocabulary.json").unlink()
    assert cli.main(["generate", str(other), "--prompt", "a"]) == 2
    assert "vocabulary.json is missing" in capsys.readouterr().err


def test_an_unknown_word_is_one_line(run: Path, capsys: pytest.CaptureFixture[str], monkeypatch) -> None:
    from primal_attention.train import lm as language_run

    model, _ = load_language(run)
    monkeypatch.setattr(language_run, "load_language", lambda folder: (model, WordVocabulary(["<eos>", "cat"])))
    assert cli.main(["generate", str(run), "--prompt", "the cat"]) == 2
    assert "the word 'the' is not in the vocabulary, and the vocabulary has no <unk>" in capsys.readouterr().err
    known = WordVocabulary(["<eos>", "cat", "<unk>", "sat"])
    monkeypatch.setattr(language_run, "load_language", lambda folder: (model, known))
    monkeypatch.setattr(known, "decode", lambda tokens: "")  # the model knows more tokens than these words
    assert cli.main(["generate", str(run), "--prompt", "the cat the mat", "--tokens", "1"]) == 0
    assert capsys.readouterr().err.startswith("not in the vocabulary, read as <unk>: the mat\n1 tokens")
    assert cli.main(["generate", str(run), "--prompt", " "]) == 2
    assert "the prompt has no token of this vocabulary" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["naïve café", "日本語 text 🙂🙂 end", "plain"])
def test_pieces_add_up_to_the_text(text: str) -> None:
    vocabulary = SubwordVocabulary.train(["no such letters"], 260)  # every byte of the others is a token of its own
    (tokens,) = vocabulary.encode([text])
    stream = TextStream(vocabulary)
    pieces = [stream.add(token) for token in tokens]
    assert "".join(pieces) + stream.rest() == text
    assert all("\ufffd" not in piece for piece in pieces)


def test_words_come_with_their_spaces() -> None:
    vocabulary = WordVocabulary(["<eos>", "a", "b"])
    stream = TextStream(vocabulary, [1])
    assert [stream.add(token) for token in (2, 0, 0, 1, 2)] == [" b", "\n", "\n", "a", " b"]


def test_bytes_that_are_no_character_do_not_wait_for_ever() -> None:
    vocabulary = SubwordVocabulary.train(["no such letters"], 260)
    (tokens,) = vocabulary.encode(["é"])
    stream = TextStream(vocabulary)
    pieces = [stream.add(tokens[0]) for _ in range(8)]  # first halves only
    assert pieces[:-1] == [""] * 7
    assert set(pieces[-1]) == {"\ufffd"}
