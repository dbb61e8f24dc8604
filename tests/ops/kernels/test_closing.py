"""The second half of a block in one pass: beside its equations in float64, under the same masks."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from closeness import assert_close
from kernel_cases import SAME
from primal_attention.ops import dropping
from primal_attention.ops.fused.closing import CLOSE, Close
from primal_attention.ops.fused.nodes import through
from primal_attention.ops.kernels.config import INTERPRETED

pytestmark = pytest.mark.usefixtures("unwritten_memory_is_nan")

NAMES = ("x", "a", "gain", "shift", "w1", "b1", "w2", "b2")
# Factors of products have 8 bits, and sums of some hundred such products are compared.
ROUNDED = 8e-3


def given(rows: int, d: int, f: int) -> dict[str, Tensor]:
    shapes = {"x": (rows, d), "a": (rows, d), "gain": (d,), "shift": (d,), "w1": (f, d), "b1": (f,), "w2": (d, f)}
    drawn = {name: torch.randn(shape) for name, shape in shapes.items()} | {"b2": torch.randn(d)}
    return drawn | {"w1": drawn["w1"] / d**0.5, "w2": drawn["w2"] / f**0.5, "gain": 1 + 0.2 * drawn["gain"]}


def equations(t: dict[str, Tensor], key: Tensor, p: float) -> Tensor:
    (rows, d), half = t["x"].shape, len(t["b1"]) // 2
    place = torch.arange(rows * (d + half), dtype=torch.int32, device=key.device).view(rows, -1)
    low, high = dropping.kept_pair(key, place, p)
    scale = 1 / (1 - dropping.coarse(p) / 2**16)
    x = t["x"] + t["a"] * low[:, :d] * scale
    h = F.gelu(F.linear(F.layer_norm(x, (d,), t["gain"], t["shift"]), t["w1"], t["b1"]))
    h = h * torch.cat([low[:, d:], high[:, d:]], dim=1) * scale
    return x + F.linear(h, t["w2"], t["b2"]) * high[:, :d] * scale


def everything(function, t: dict[str, Tensor]) -> dict[str, Tensor]:
    leaves = {name: value.detach().requires_grad_() for name, value in t.items()}
    y = function(leaves)
    weight = torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(y.device, y.dtype)
    grads = torch.autograd.grad(y, [leaves[n] for n in NAMES], weight)
    return {"y": y, **{f"gradient of {n}": g for n, g in zip(NAMES, grads, strict=True)}}


@pytest.mark.parametrize(
    ("rows", "d", "f", "p", "dtype"),
    [
        (129, 64, 128, 0.1, torch.float32),
        (150, 32, 64, 0.0, torch.float32),
        (70, 32, 128, 0.5, torch.float32),
        (129, 64, 128, 0.1, torch.bfloat16),
        (70, 32, 64, 0.5, torch.bfloat16),
    ],
    ids=str,
)
def test_as_the_equations(
    device: torch.device, bfloat16_rounds: None, rows: int, d: int, f: int, p: float, dtype: torch.dtype
):
    if dtype == torch.float32 and not INTERPRETED:
        pytest.skip("on a GPU the factors of products have 16 bits: `suits`")
    t = {name: value.to(device) for name, value in given(rows, d, f).items()}
    key = dropping.draw_key(device)
    truth = everything(lambda t: equations(t, key, p), {n: v.double() for n, v in t.items()})
    found = everything(lambda t: closed(t, key, p, dtype), t)
    for name, value in truth.items():
        assert_close(found[name], value, SAME if dtype == torch.float32 else ROUNDED, name)


def closed(t: dict[str, Tensor], key: Tensor, p: float, dtype: torch.dtype) -> Tensor:
    return through(Close, "close", t["x"], t["a"], key, *(t[n] for n in NAMES[2:]), p, 1e-5, dtype)


def test_the_compiler_knows_it(device: torch.device):
    t = {name: value.to(device) for name, value in given(40, 32, 64).items()}
    key, dtype = dropping.draw_key(device), torch.float32 if INTERPRETED else torch.bfloat16
    eager = everything(lambda t: closed(t, key, 0.1, dtype), t)
    compiled = everything(torch.compile(lambda t: closed(t, key, 0.1, dtype), fullgraph=True, backend="aot_eager"), t)
    for name, value in eager.items():
        assert torch.equal(compiled[name], value), name
    args = (t["x"], t["a"], key, *(t[n] for n in NAMES[2:]), 0.1, 1e-5, dtype)
    torch.library.opcheck(CLOSE.registered, args, test_utils=("test_schema", "test_faketensor"))
