"""Compiled classifiers: the same numbers, one graph for blocks of one kind, and few for many lengths.

That every attention compiles as one graph is tested in `tests/nn/baselines/test_contract.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo import lookup_backend
from torch._dynamo.utils import counters

from closeness import assert_close
from primal_attention.models.lra import LRAClassifier
from primal_attention.nn.objective import ksvd_loss, primal_layers

SETTINGS = {"primal": {"rank": 4, "landmarks": 6}, "linformer": {"max_length": 24, "projected_length": 8}}
LENGTHS = (24, 20, 12)


@pytest.fixture
def graphs() -> Iterator[list[torch.fx.GraphModule]]:
    """The graphs that were compiled since the test began."""
    torch.compiler.reset()
    counters.clear()
    yield []
    torch.compiler.reset()


def counting(graphs: list[torch.fx.GraphModule], backend: str) -> Callable[..., Any]:
    def compiler(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        graphs.append(graph)
        return lookup_backend(backend)(graph, inputs)

    return compiler


def make(attention: str, **changes: Any) -> LRAClassifier:
    torch.manual_seed(0)
    settings = {"embed_dim": 16, "ffn_dim": 32, "dropout": 0.0, "attention_kwargs": SETTINGS, **changes}
    return LRAClassifier(11, 3, 24, attention=attention, **settings).double().train()


def step(model: LRAClassifier, ids: Tensor) -> dict[str, Tensor]:
    """Logits, J and gradients of a training step."""
    model.zero_grad(set_to_none=True)
    logits = model(ids, ids == 0)
    loss = logits.square().mean()
    found = {"logits": logits.detach()}
    if primal_layers(model):
        ksvd = ksvd_loss(model, "batch")
        loss, found["ksvd"] = loss + ksvd, ksvd.detach()
    loss.backward()
    return found | {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def batch(length: int, cases: int = 3) -> Tensor:
    ids = torch.randint(1, 11, (cases, length), generator=torch.Generator().manual_seed(length))
    ids[0, length // 2 :] = 0
    return ids


@pytest.mark.parametrize(("attention", "kinds", "room"), [("softmax", 1, 24), ("primal+", 2, None), ("primal+", 2, 24)])
def test_a_compiled_step_is_the_step(attention: str, kinds: int, room: int | None, graphs):
    plain, compiled = make(attention), make(attention)
    plain.room = compiled.room = room
    compiled.compile(backend=counting(graphs, "aot_eager"))
    assert list(compiled.state_dict()) == list(plain.state_dict())
    expected, found = step(plain, batch(24)), step(compiled, batch(24))
    assert expected.keys() == found.keys()
    for name, value in expected.items():
        assert_close(found[name], value, 1e-9, name)
    assert not counters["graph_break"]
    assert len(graphs) == 2 + kinds, "stem, mean, and a block of each kind"


@pytest.mark.parametrize(("attention", "kinds"), [("primal+", 2), ("reformer", 1)])
def test_all_lengths_share_one_graph_of_each_part(attention: str, kinds: int, graphs):
    model = make(attention, dropout=0.1)
    model.compile(backend=counting(graphs, "eager"), any_length=True)
    for length in (*LENGTHS, *LENGTHS):
        step(model, batch(length))
    assert len(graphs) == 2 + kinds
    assert not counters["graph_break"]


def test_autocast_does_not_break_the_graphs(graphs):
    model = make("primal", dropout=0.1).float()
    model.compile(backend=counting(graphs, "eager"))
    with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=False):
        step(model, batch(24))
    assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in model.parameters())
    assert len(graphs) == 3
    assert not counters["graph_break"]
