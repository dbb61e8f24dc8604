"""ONNX files run in onnxruntime and give what torch gives."""

from __future__ import annotations

import numpy as np
import pytest
import torch

onnxruntime = pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")

from hf import small_models as hf_models  # noqa: E402
from primal_attention import PrimalAttention  # noqa: E402
from primal_attention.models.export import Standardized, export_onnx, export_streaming  # noqa: E402
from primal_attention.nn.baselines.softmax import CachedSoftmaxAttention  # noqa: E402
from primal_attention.ops import reference  # noqa: E402

TYPES = {"tensor(float)": np.float32, "tensor(int64)": np.int64, "tensor(bool)": np.bool_}


def assert_near(actual: np.ndarray, expected: torch.Tensor) -> None:
    """Within 1e-5 of the largest value."""
    expected = expected.detach().numpy()
    assert actual.shape == expected.shape
    assert np.abs(actual - expected).max() <= 1e-5 * np.abs(expected).max()


def stream(file, x: torch.Tensor, lengths: list[int]) -> np.ndarray:
    """Return the outputs for x (B, N, …), which the model reads in pieces of these lengths from a state of zeros."""
    session = onnxruntime.InferenceSession(file)
    first, *parts = session.get_inputs()
    sizes = {part.name: [n if isinstance(n, int) else 0 for n in part.shape[1:]] for part in parts}
    state = {part.name: np.zeros([len(x), *sizes[part.name]], TYPES[part.type]) for part in parts}
    outputs = []
    for piece in x.split(lengths, dim=1):
        y, *after = session.run(None, {first.name: piece.numpy(), **state})
        assert [output.name.removeprefix("next.") for output in session.get_outputs()[1:]] == [
            name.removeprefix("state.") for name in state
        ]
        state = dict(zip(state, after, strict=True))
        outputs.append(y)
    return np.concatenate(outputs, axis=1)


@pytest.mark.supports("ONNX", "cpu")
def test_a_layer_with_a_mask_takes_any_batch_size_and_length(tmp_path) -> None:
    layer = Standardized(PrimalAttention(16, 2, rank=4, landmarks=6, backend="cpu"), [1.0] * 16, [2.0] * 16)
    call = {"x": torch.randn(2, 5, 16), "key_padding_mask": torch.zeros(2, 5, dtype=torch.bool)}
    export_onnx(layer, tmp_path / "layer.onnx", call)
    assert layer.training
    assert layer.model.backend == "cpu"
    session = onnxruntime.InferenceSession(tmp_path / "layer.onnx")
    for batch, tokens in ((1, 1), (3, 4), (2, 70)):
        x, mask = torch.randn(batch, tokens, 16), torch.rand(batch, tokens) < 0.3
        x[0, 0, 0] = torch.nan
        (y,) = session.run(None, {"x": x.numpy(), "key_padding_mask": mask.numpy()})
        assert_near(y, layer(x, mask))


LANDMARKS = {"data_dependent": True, "landmarks": 6, "max_length": 40}
MODES = {
    "mean": ({}, [3, 1, 16]),
    "landmarks": (LANDMARKS, [7, 1, 1, 11]),
    "decay": ({"decay": 0.9}, [1, 2, 17]),
    "decay, single tokens": ({"decay": 0.9}, [1] * 20),
}


@pytest.mark.parametrize("mode", MODES)
def test_a_causal_layer_streams_with_its_state_as_data(mode, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(reference, "CHUNK", 4)  # a call of 17 tokens has chunks of chunks, the exported one has not
    monkeypatch.setattr(reference, "MAX_LEVELS", 3)  # a smaller graph
    keywords, lengths = MODES[mode]
    layer = PrimalAttention(16, 2, rank=4, causal=True, **({"data_dependent": False} | keywords)).eval()
    x, is_single = torch.randn(3, 20, 16), set(lengths) == {1}
    export_streaming(layer, tmp_path / "layer.onnx", x[:2, :3], name="x", single_token=is_single)
    assert_near(stream(tmp_path / "layer.onnx", x, lengths), layer(x))


def test_the_cache_of_softmax_layers_grows_from_length_zero(tmp_path) -> None:
    layer, x = CachedSoftmaxAttention(16, 2, rotary=True).eval(), torch.randn(3, 7, 16)
    parts = export_streaming(layer, tmp_path / "layer.onnx", x[:2, :3], name="x")
    assert parts[:2] == ["state.k", "state.v"]
    assert_near(stream(tmp_path / "layer.onnx", x, [3, 1, 3]), layer(x))


def test_a_causal_model_without_a_state_takes_padding_anywhere(tmp_path) -> None:
    model = hf_models.make("mean", num_hidden_layers=1)
    tokens, mask = torch.randint(0, 30, (3, 9)), (torch.rand(3, 9) < 0.7).long()
    calls = [(model, {"input_ids": tokens, "attention_mask": mask})]
    calls.append((model.model, {"tokens": tokens, "key_padding_mask": mask == 0}))
    for exported, call in calls:
        export_onnx(exported, tmp_path / "model.onnx", {name: t[:2, :5] for name, t in call.items()})
        session = onnxruntime.InferenceSession(tmp_path / "model.onnx")
        logits = session.run(None, {name: t.numpy() for name, t in call.items()})[0]
        assert_near(logits * mask.numpy()[..., None], model(tokens, mask).logits * mask[..., None])
    assert model.config.use_cache
    with pytest.raises(ValueError, match="delta rule are exported by export_streaming only"):
        export_onnx(hf_models.make("default"), tmp_path / "model.onnx", calls[0][1])
