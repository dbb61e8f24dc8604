"""Blocks whose second half is one kernel train as blocks as written."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
import torch
from torch import Tensor

from closeness import assert_close
from primal_attention.models.lra import LRABlock, LRAClassifier
from primal_attention.ops import backends

ON_GPU = torch.cuda.is_available()
pytestmark = pytest.mark.skipif(
    find_spec("triton") is None or not (ON_GPU or backends.interpreting()), reason="needs a GPU or Triton's interpreter"
)
# On a GPU bfloat16, rounded in other places; else float32, in another order.
ROUNDED = 3e-2 if ON_GPU else 1e-5


def losses(model: LRAClassifier, ids: Tensor) -> dict[str, Tensor]:
    model.zero_grad(set_to_none=True)
    with torch.autocast("cuda", torch.bfloat16, enabled=ON_GPU):
        logits = model(ids, ids == 0)
    logits.float().square().sum().backward()
    return {"logits": logits.float()} | {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def test_the_kernel_is_the_block(monkeypatch: pytest.MonkeyPatch):
    device = torch.device("cuda" if ON_GPU else "cpu")
    model = LRAClassifier(16, 10, 64, attention="softmax", embed_dim=32, ffn_dim=64, dropout=0.0).to(device)
    ids = torch.randint(0, 16, (3, 40), device=device)
    ids[:, 0] = 1
    with monkeypatch.context() as as_written:
        as_written.setattr(LRABlock, "fused", False)
        wanted = losses(model, ids)
    asked = []
    if not ON_GPU:
        monkeypatch.setattr(LRABlock, "has_kernel", lambda self, x: asked.append(1) or True)
        monkeypatch.setattr(torch, "get_autocast_dtype", lambda kind: torch.float32)
    found = losses(model, ids)
    assert ON_GPU or len(asked) == 2
    for name, value in wanted.items():
        assert_close(found[name], value, ROUNDED, name)
    if ON_GPU:
        model.compile(any_length=True)
        for length in (40, 32):
            compiled = losses(model, ids[:, :length])
        torch.compiler.reset()
        assert all(value.isfinite().all() for value in compiled.values())


def test_on_a_cpu_and_in_evaluations_blocks_run_as_written():
    block = LRABlock(32, 2, "softmax", ffn_dim=64)
    assert not block.has_kernel(torch.randn(2, 8, 32))
    assert not block.eval().has_kernel(torch.randn(2, 8, 32))
