"""The trained weights that the package includes: they load by name, and their cards state what they do."""

import copy
import math
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torchao.quantization as torchao
import yaml
from aeon.datasets import load_japanese_vowels
from transformers import AutoModelForCausalLM, AutoTokenizer

import primal_attention
from primal_attention import pretrained_names, pretrained_path
from primal_attention.cli import main as cli
from primal_attention.cli.train import parse_run
from primal_attention.hf import PrimalForCausalLM
from primal_attention.train import registry
from primal_attention.train.lm import network
from primal_attention.utils.pretrained import FOLDER, WEIGHTS

ROOT = Path(__file__).parents[2]
LM, CLASSIFIER = "primal-lm-tiny", "primal-uea-japanesevowels"
TEXT = (
    "The bridge was built in the nineteenth century and crosses the river near the centre of the town. "
    "It was designed by an engineer who had worked on several railways in the north of the country. "
    "After the war, the bridge was repaired, and since then it has been one of the most important roads of the region."
)


def stated_score(name: str) -> float:
    """The score of a model card, whose fields are between two lines of dashes."""
    _, fields, text = (FOLDER / name / "README.md").read_text(encoding="utf-8").split("---\n", 2)
    for part in ("Training data", "Command", "commit", "Intended use", "Limits", "Licence"):
        assert part in text, part
    (model,) = yaml.safe_load(fields)["model-index"]
    assert model["name"] == name
    return model["results"][0]["metrics"][0]["value"]


def test_all_models_have_cards_and_are_small() -> None:
    assert pretrained_names() == [LM, CLASSIFIER]
    assert all(stated_score(name) > 0 for name in pretrained_names())
    assert sum(file.stat().st_size for file in FOLDER.rglob("*") if file.is_file()) < 10e6


def test_a_path_wins_over_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert pretrained_path(LM) == FOLDER / LM
    monkeypatch.chdir(tmp_path)
    Path(LM).mkdir()
    assert pretrained_path(LM) == Path(LM)


def test_an_unknown_name_is_one_line_with_the_names(capsys: pytest.CaptureFixture[str]) -> None:
    names = f"{LM}, {CLASSIFIER}"
    expected = f"no-such-model does not exist, and the package includes no model of this name: it has {names}"
    for load in (pretrained_path, PrimalForCausalLM.from_pretrained, primal_attention.PrimalClassifier.load):
        with pytest.raises(ValueError, match=f"^{expected}$"):
            load("no-such-model")
    assert cli.main(["generate", "no-such-model", "--prompt", "The"]) == 2
    assert capsys.readouterr() == ("", f"primal: {expected}\n")


# The language model


@pytest.fixture(scope="module")
def model() -> torch.nn.Module:
    return PrimalForCausalLM.from_pretrained(LM).eval()


@pytest.fixture(scope="module")
def tokens(model: torch.nn.Module) -> torch.Tensor:
    return AutoTokenizer.from_pretrained(pretrained_path(LM))(TEXT, return_tensors="pt").input_ids


def bits_per_byte(model: torch.nn.Module, tokens: torch.Tensor) -> float:
    with torch.no_grad():
        loss = model(tokens, labels=tokens).loss
    return loss.item() / math.log(2) * (tokens.shape[1] - 1) / len(TEXT.encode())


def test_the_language_model_predicts_english(model: torch.nn.Module, tokens: torch.Tensor) -> None:
    torch.manual_seed(0)
    untrained = type(model)(model.config).eval()
    assert model.dtype == torch.float32  # float16 in the file
    assert bits_per_byte(model, tokens) < 1.5  # it is 1.24
    by_path = AutoModelForCausalLM.from_pretrained(pretrained_path(LM)).eval()
    assert bits_per_byte(by_path, tokens) == bits_per_byte(model, tokens)
    assert bits_per_byte(untrained, tokens) > 3  # equal probabilities have 11 bits per token, 3.2 per byte


def test_int8_weights_hardly_change_its_score(model: torch.nn.Module, tokens: torch.Tensor) -> None:
    rounded = copy.deepcopy(model)
    torchao.quantize_(rounded, torchao.Int8WeightOnlyConfig())
    assert 0 < abs(bits_per_byte(rounded, tokens) - bits_per_byte(model, tokens)) < 0.01


def test_the_command_generates_what_transformers_generates(
    model: torch.nn.Module, capsys: pytest.CaptureFixture[str]
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(pretrained_path(LM))
    prompt = "The river is"
    tokens = model.generate(**tokenizer(prompt, return_tensors="pt"), max_new_tokens=20, do_sample=False)
    text = tokenizer.decode(tokens[0], skip_special_tokens=True)
    assert len(text) > len(prompt) + 20
    capsys.readouterr()
    assert cli.main(["generate", LM, "--prompt", prompt, "--greedy", "--tokens", "20", "--device", "cpu"]) == 0
    assert capsys.readouterr().out == f"{text}\n"


def test_the_command_of_the_card_trains_this_architecture(model: torch.nn.Module) -> None:
    card = (FOLDER / LM / "README.md").read_text(encoding="utf-8")
    train, convert = card.split("```sh\n")[1].split("```")[0].replace("\\\n", "").splitlines()
    program, command, name, *flags = shlex.split(train)
    assert (program, command) == ("primal", "train")
    recipe, *_ = parse_run(name, registry.get(name), flags)
    assert recipe.label() in convert
    assert network(recipe.resolved(), recipe.data.vocabulary).resolved() == model.config.language()


# The classifier


def test_the_classifier_has_the_accuracy_of_its_card() -> None:
    X, y = load_japanese_vowels(split="test")
    accuracy = (primal_attention.PrimalClassifier.load(CLASSIFIER).predict(X) == y).mean()
    assert accuracy == pytest.approx(stated_score(CLASSIFIER), abs=1.5 / len(y))  # rounding may move one of 370 series
    assert accuracy > 0.9


def test_the_script_makes_a_classifier_and_its_card(tmp_path: Path) -> None:
    environment = {**os.environ, "PRIMAL_SMALL": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT / "src")}
    command = [sys.executable, ROOT / "examples" / "make_pretrained.py", "classifier", "--out", tmp_path]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "of 370 right" in done.stdout
    assert {file.name for file in (tmp_path / CLASSIFIER).iterdir()} == {"README.md", WEIGHTS}
