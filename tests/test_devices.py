"""No CUDA assumption outside the CUDA parts: the equations run on any device that torch knows."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils import backend_registration
from torch.utils._pytree import tree_leaves

from kernel_cases import MODES, make, make_delta
from primal_attention.models.lm import LanguageConfig, LanguageModel
from primal_attention.ops import landmarks, primal

SOURCE = Path(__file__).parents[1] / "src" / "primal_attention"
# What is about CUDA devices by its purpose.
CUDA_PARTS = ("ops/triton/", "bench/", "train/step.py")
# Uses of CUDA, except questions that torch answers on every machine.
USE = re.compile(r"torch\.cuda\.(?!is_available\b|device_count\b)\w+|\.cuda\(\)")
GUARD = re.compile(r"""type [=!]= ["']cuda["']|is_cuda|cuda\.is_available\(\)|cuda\.device_count\(\)""")
# Functions that are called for CUDA devices only.
GUARDED_BY_CALLER = {"_capability_problem"}
LAYERS: dict[str, Callable[..., Any]] = {
    # A fixed decay is checked by its value, which a fake tensor does not have.
    **{mode: partial(make, mode, backend="auto") for mode in MODES if mode != "fixed_decay"},
    "softmax map": partial(make, "data_dependent", backend="auto", feature_map="softmax"),
    "delta": partial(make_delta, 2, backend="auto", conv=0),
}


def unguarded(path: Path) -> list[str]:
    """Uses of torch.cuda.* or .cuda() in a function that has not asked for the kind of device before."""
    text = path.read_text(encoding="utf-8")
    lines = text.splitlines()
    uses = [line for line in lines if not line.startswith(" ") and USE.search(line)]  # outside of functions
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef) and node.name not in GUARDED_BY_CALLER:
            body = lines[node.lineno - 1 : node.end_lineno]
            first = next((i for i, line in enumerate(body) if USE.search(line)), None)
            if first is not None and not GUARD.search("\n".join(body[: first + 1])):
                uses.append(f"{path.relative_to(SOURCE)}:{node.lineno + first}: {body[first].strip()}")
    return uses


def test_cuda_is_used_only_where_the_device_is_one() -> None:
    files = sorted(SOURCE.rglob("*.py"))
    general = [path for path in files if not str(path.relative_to(SOURCE)).startswith(CUDA_PARTS)]
    assert len(general) > 100
    assert [use for path in general for use in unguarded(path)] == []


@pytest.mark.parametrize("primal_mode", ["mean", "decay", "landmarks", "delta"])
def test_language_models_stay_on_their_device(primal_mode: str) -> None:
    config = LanguageConfig(9, ("primal", "softmax"), 16, 2, 2, 16, primal_mode=primal_mode, rank=4, conv=3, gate=True)
    model = LanguageModel(config).to("meta")
    tokens = torch.empty(2, 8, dtype=torch.int64, device="meta")
    model(tokens, targets=tokens).backward()
    logits, state = model(tokens, return_state=True)
    logits, state = model.step(tokens[:, 0], state)
    assert logits.is_meta
    assert all(leaf.is_meta for leaf in tree_leaves(state) if isinstance(leaf, Tensor))


FAKE_DEVICE = """
import torch
from test_devices import LAYERS
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from primal_attention import ksvd_loss
from primal_attention.ops import landmarks

_setup_privateuseone_for_python_backend("fake")
torch.fake.get_amp_supported_dtype = lambda: [torch.float16]
landmarks.WITHOUT_FLOAT64.add("fake")


class RefuseFloat64(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and leaf.device.type == "fake":
                assert leaf.dtype != torch.float64, function
        return result


for mode, make in LAYERS.items():
    with FakeTensorMode(), RefuseFloat64():
        layer = make(device="fake")
        x = torch.empty(2, 8, layer.embed_dim, device="fake", requires_grad=True)
        for padding in (None, torch.empty(2, 8, dtype=torch.bool, device="fake")):
            (layer(x, key_padding_mask=padding).sum() + ksvd_loss(layer)).backward()
        assert x.grad.device.type == "fake"
        if layer.causal:
            y_t, state = layer.step(x[:, 0], layer.initial_state(2))
            assert y_t.device.type == "fake"
    print(mode)
"""


def test_layers_run_on_a_fake_device_without_float64_as_apple_mps_is() -> None:
    if not hasattr(backend_registration, "_setup_privateuseone_for_python_backend"):
        pytest.skip("this torch cannot register a device in Python")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(SOURCE.parent), str(Path(__file__).parent)])}
    done = subprocess.run([sys.executable, "-c", FAKE_DEVICE], env=environment, capture_output=True, text=True)
    assert done.stdout.splitlines() == [*LAYERS], done.stderr[-3000:]


@pytest.mark.parametrize("mode", LAYERS)
def test_compiled_layers_run_on_any_device(mode: str) -> None:
    torch._dynamo.reset()
    layer = LAYERS[mode](device="meta")
    x = torch.empty(2, 8, layer.embed_dim, device="meta", requires_grad=True)
    padding = torch.empty(2, 8, dtype=torch.bool, device="meta")
    y = torch.compile(layer, backend="eager", fullgraph=True)(x, key_padding_mask=padding)
    y.sum().backward()
    assert y.is_meta
    assert x.grad.is_meta


def test_landmarks_without_float64_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths, shift = torch.tensor([1, 197, 300, 1000]), landmarks.random_shift(100)
    expected = [landmarks.ragged_landmark_indices(lengths, 100, jitter) for jitter in (None, shift)]
    monkeypatch.setattr(landmarks, "WITHOUT_FLOAT64", {"cpu"})
    for jitter, indices in zip((None, shift), expected, strict=True):
        assert torch.equal(landmarks.ragged_landmark_indices(lengths, 100, jitter), indices)


def test_amd_and_apple_devices_use_the_equations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(primal, "HAS_TRITON", True)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert primal.device_problem(torch.device("mps")) == "x is on 'mps', the kernels run on 'cuda'"
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert primal.device_problem(torch.device("cuda")) == "the kernels are untested on AMD GPUs"
    for page in ("README.md", "docs/guide/install.md"):
        text = " ".join((SOURCE.parents[1] / page).read_text(encoding="utf-8").split())
        assert re.search("Apple MPS and AMD are untested|AMD GPUs and Apple MPS are untested", text), page
