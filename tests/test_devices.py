"""No CUDA assumption outside the CUDA parts: the equations run on any device that torch knows."""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils import backend_registration
from torch.utils._pytree import tree_leaves

from primal_attention import PrimalAttention
from primal_attention.models.lm import LanguageConfig, LanguageModel
from primal_attention.nn.delta import DeltaPrimalAttention
from primal_attention.ops import landmarks, primal

SOURCE = Path(__file__).parents[1] / "src" / "primal_attention"
# What is about CUDA devices by its purpose.
CUDA_PARTS = ("ops/triton/", "bench/", "train/cuda_graph.py")
# What torch answers on every machine is not a use.
USE = re.compile(r"torch\.cuda\.(?!is_available|device_count)\w+\(|\w\.cuda\(")
# The named function is called for CUDA devices only.
GUARD = re.compile(r"""type [=!]= ["']cuda["']|is_cuda|cuda\.(is_available|device_count)\(|def _capability_problem""")

MODES: dict[str, dict[str, Any]] = {
    "data-dependent": {},
    "data-independent": {"data_dependent": False},
    "two-sided decay": {"data_dependent": False, "decay": "learned"},
    "causal": {"data_dependent": False, "causal": True},
    "causal decay": {"data_dependent": False, "causal": True, "decay": "learned"},
    "causal landmarks": {"causal": True, "max_length": 20},
    "softmax map": {"feature_map": "softmax"},
}


def make(mode: str, **keywords: Any) -> PrimalAttention:
    if mode == "delta":
        return DeltaPrimalAttention(16, 2, rank=4, **keywords)
    return PrimalAttention(16, 2, rank=4, landmarks=6, **MODES[mode], **keywords)


def unguarded(path: Path) -> list[str]:
    """Uses of torch.cuda.* or .cuda() in a function that has not asked for the kind of device before."""
    lines, start, uses = path.read_text(encoding="utf-8").splitlines(), 0, []
    for number, line in enumerate(lines):
        if line.lstrip().startswith("def "):
            start = number
        if USE.search(line) and not GUARD.search("\n".join(lines[start : number + 1])):
            uses.append(f"{path.relative_to(SOURCE)}:{number + 1}: {line.strip()}")
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
from test_devices import MODES, make
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


for mode in [*MODES, "delta"]:
    with FakeTensorMode(), RefuseFloat64():
        layer = make(mode, device="fake", **({"conv": 0} if mode == "delta" else {}))
        x = torch.empty(2, 8, 16, device="fake", requires_grad=True)
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
    assert done.stdout.splitlines() == [*MODES, "delta"], done.stderr[-3000:]


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
