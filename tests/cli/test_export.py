"""`primal export`: the ONNX file gives what the run's model gives; user errors are one line with exit code 2."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import test_lm
import torch
import toy

pytest.importorskip("lightning")
pytest.importorskip("tokenizers")
onnxruntime = pytest.importorskip("onnxruntime")

from models.test_export import assert_near, stream  # noqa: E402
from primal_attention.train import loop  # noqa: E402
from primal_attention.train.checkpoint import read_run  # noqa: E402
from primal_attention.train.lm import load_language  # noqa: E402

texts = test_lm.folder
SMALL = """
--model.embed-dim 8 --model.num-heads 2 --model.layers 1 --model.ffn-dim 16 --model.rank 3 --model.landmarks 4
--trainer.epochs 1 --trainer.batch-size 8 --trainer.accelerator cpu --trainer.no-progress
""".split()  # noqa: SIM905 (reads as it is typed)


def test_a_classifier_takes_raw_series(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, primal) -> None:
    monkeypatch.chdir(tmp_path)
    toy.folder(tmp_path / "data" / "uea")
    assert primal("train", "uea/Toy", *SMALL, "--out", "run")[0] == 0
    code, out, err = primal("export", "run", "model.onnx")
    assert (code, err) == (0, "")
    assert out.startswith("inputs: x (batch, length, ")
    assert out.endswith("written: model.onnx\n")
    _, recipe = read_run(Path("run"))
    experiment = loop.build(recipe.phases()[-1][1])
    model = experiment.module.final_model.eval()
    loop.load_weights(model, Path("run/model.safetensors"))
    session = onnxruntime.InferenceSession("model.onnx")
    for count, length in ((3, 12), (1, 5)):
        x, mask = (tensor[:count, :length] for tensor in experiment.test.tensors[:2])
        raw = (x.double().numpy() * experiment.standardizer.std + experiment.standardizer.mean).astype(np.float32)
        (logits,) = session.run(None, {"x": raw, "key_padding_mask": mask.numpy()})
        with torch.no_grad():
            assert_near(logits, model(x, mask))


def test_a_language_model_has_its_state_as_inputs_and_outputs(texts: Path, tmp_path: Path, primal) -> None:
    changes = {"model__primal_mode": "mean", "model__layers": 1, "trainer__steps_per_epoch": 1}
    loop.train(test_lm.small(texts, **changes), tmp_path / "run", name="lm/wikipedia")
    code, out, _ = primal("export", str(tmp_path / "run"), str(tmp_path / "model.onnx"))
    assert code == 0
    assert "tokens and 4 parts of the state" in out
    model, vocabulary = load_language(tmp_path / "run")
    tokens = torch.randint(0, len(vocabulary), (2, 12))
    assert_near(stream(tmp_path / "model.onnx", tokens, [6, 1, 5]), model(tokens))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("nothing model.onnx", "nothing is not a run folder"),
        ("nothing model.pt", "FILE must end in .onnx (got model.pt)"),
        ("nothing", "the following arguments are required: FILE"),
    ],
)
def test_user_errors_are_one_line(words: str, message: str, tmp_path: Path, monkeypatch, primal) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, err = primal("export", *words.split())
    assert (code, out) == (2, "")
    assert message in err
    assert err.count("\n") == 1
