"""`primal export`: the ONNX file gives what the run's model gives; user errors are one line with exit code 2."""

from pathlib import Path

import numpy as np
import onnxruntime
import test_lm
import torch
import toy

from models.test_export import assert_near, stream
from primal_attention.train import loop
from primal_attention.train.checkpoint import read_run
from primal_attention.train.lm import load_language

texts = test_lm.folder


def test_a_classifier_takes_raw_series(workplace: Path, primal) -> None:
    assert primal("train", "uea/Toy", *toy.FLAGS, "--out", "run")[0] == 0
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


def test_a_language_model_is_exported_with_its_state(texts: Path, tmp_path: Path, primal) -> None:
    loop.train(test_lm.small(texts, model__layers=1, trainer__steps_per_epoch=1), tmp_path / "run", name="lm/wikipedia")
    code, out, _ = primal("export", str(tmp_path / "run"), str(tmp_path / "model.onnx"))
    assert code == 0
    assert "tokens and 4 parts of the state" in out
    names = [part.name for part in onnxruntime.InferenceSession(tmp_path / "model.onnx").get_inputs()]
    layer = [f"state.blocks.0.attention.{part}" for part in ("w_e_x", "w_r_x", "conv")]
    assert names == ["tokens", *layer, "state.position"]
    model, vocabulary = load_language(tmp_path / "run")
    tokens = torch.randint(len(vocabulary), (3, 5))
    with torch.no_grad():
        assert_near(stream(tmp_path / "model.onnx", tokens, [1] * 5), model(tokens))
