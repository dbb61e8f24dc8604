"""Classifiers of token sequences: padding is invisible, pairs share one encoder, compilation changes nothing."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounter, CompileCounterWithBackend
from torch._dynamo.utils import counters

from closeness import assert_close
from primal_attention.models.lra import Lookup, LRAClassifier
from primal_attention.nn.baselines import attention_names
from primal_attention.nn.objective import ksvd_loss, primal_layers

SETTINGS = {"primal": {"rank": 4, "landmarks": 6}, "linformer": {"max_length": 24, "projected_length": 8}}


def make(**changes: Any) -> LRAClassifier:
    settings = {"embed_dim": 16, "ffn_dim": 32, "dropout": 0.0, "attention_kwargs": SETTINGS, **changes}
    return LRAClassifier(11, 3, 24, **settings).double()


def tokens(samples: int = 2, length: int = 24) -> torch.Tensor:
    return torch.randint(1, 11, (samples, length))


TWO_SIDED = {"primal": {"rank": 4, "data_dependent": False, "decay": "learned"}}
MODERN = {"local_kernel": 5, "activation": "glu", "attention_kwargs": TWO_SIDED}


@pytest.mark.parametrize(
    ("attention", "changes"),
    [*((name, {}) for name in (*attention_names(), "primal+")), *((n, MODERN) for n in ("primal", "softmax", "none"))],
)
def test_padding_changes_nothing_and_may_be_dropped(attention: str, changes: dict[str, Any]):
    model = make(attention=attention, **changes).eval()
    ids = tokens()
    ids[1, 9:] = 0
    assert_close(model(ids, ids == 0)[1:], model(ids[1:, :9]), 1e-9)
    ids = tokens(3) * (torch.rand(3, 24) < torch.tensor([[0.3], [0.6], [0.0]]))
    expected = model(ids, ids == 0)
    model.max_tokens = int((ids != 0).sum(dim=1).max())
    assert_close(model(ids, ids == 0), expected, 1e-9, "padding between tokens dropped")


def test_positions_may_start_as_a_line_or_a_grid():
    tables = {}
    for positions in ("line", "grid"):
        model = LRAClassifier(4, 2, 64, attention="softmax", embed_dim=16, positions=positions)
        tables[positions] = table = model.stem.positions.weight
        assert table.requires_grad
        assert_close(table.square().mean().sqrt(), torch.tensor(0.02), 1e-3)
        assert ((table @ table.T).argmax(dim=1) == torch.arange(64)).all()
    near = tables["line"] @ tables["line"].T
    assert_close(near[10, 11:15], near[30, 31:35], 1e-5)  # the distance counts, not the place
    assert near[10, 11] > near[10, 20]
    near = (tables["grid"] @ tables["grid"].T)[8 * 3 + 4].view(8, 8)  # from the pixel in row 3, column 4
    assert near[3, 5] > near[3, 7]
    assert near[4, 4] > near[7, 4]
    assert_close(near[3, 5], near[4, 4], 1e-5)  # rows count as columns do
    for positions, length, width in (("grid", 60, 16), ("grid", 64, 18), ("line", 50, 15)):
        with pytest.raises(ValueError, match=f"positions='{positions}' needs"):
            LRAClassifier(4, 2, length, embed_dim=width, num_heads=1, positions=positions)


def test_the_one_hot_gradient_of_a_lookup_is_torchs():
    ids, table = tokens(3), torch.randn(11, 16, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(3, 24, 16, dtype=torch.float64)
    theirs = torch.nn.functional.embedding(ids, table)
    (expected,) = torch.autograd.grad((theirs * weight).sum(), table)
    compiled = torch.compile(Lookup.apply, backend="aot_eager", fullgraph=True)
    for lookup in (Lookup.apply, compiled):
        for dtype, error in ((torch.float64, 1e-12), (torch.bfloat16, 2**-8)):  # bfloat16 rounds to 2⁻⁹
            ours = lookup(ids, table, dtype)
            assert torch.equal(ours, theirs)
            assert_close(torch.autograd.grad((ours * weight).sum(), table)[0], expected, error)


def test_what_cannot_work_is_one_clear_line():
    ids, published = tokens(), {"published_padding": True}
    for call, message in (
        (lambda: make()(tokens(length=30)), "the sequences have 30 tokens and the model was built for 24"),
        (lambda: make(pairs=True)(ids), "takes two sequences"),
        (lambda: make()(ids, None, ids), "takes one sequence"),
        (lambda: make(pairs=True)(ids, ids == 0, ids), "come together"),
        (lambda: make(attention="linear", **published), r"primal and softmax layers only \(got LinearAttention\)"),
        (lambda: make(attention="nystrom+", **published), "primal and softmax layers only"),
        (lambda: make(attention="softmax", local_kernel=5, **published), "got a layer with local_kernel"),
    ):
        with pytest.raises(ValueError, match=message):
            call()


def test_a_modern_block_is_attention_beside_convolution_and_a_gated_network():
    for attention in ("primal", "softmax", "none"):
        model = make(attention=attention, **MODERN)
        block, x = model.encoder.blocks[0], torch.randn(2, 24, 16, dtype=torch.float64)
        h = block.norm1(x)
        mixed = block.local(h) if attention == "none" else block.local(h) + block.attention(h)
        up, down = block.feed_forward[0], block.feed_forward[3]
        a, b = up(block.norm2(x + mixed)).chunk(2, dim=-1)
        assert_close(block(x), x + mixed + down(a * b.sigmoid()), 1e-12)
        model(tokens()).square().mean().backward()
        trained = [p for name, p in model.named_parameters() if not name.endswith("sqrt_lambda")]  # only J has it
        assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in trained)


# Compilation. That every attention compiles as one graph is tested in tests/nn/baselines/test_contract.py.


@pytest.fixture
def _new_compiler() -> Iterator[None]:
    torch.compiler.reset()
    counters.clear()
    yield
    torch.compiler.reset()


def step(model: LRAClassifier, ids: Tensor) -> dict[str, Tensor]:
    """Logits, J and gradients of a training step."""
    model.zero_grad(set_to_none=True)
    logits = model(ids, ids == 0)
    loss = logits.square().mean()
    results = {"logits": logits.detach()}
    if primal_layers(model):
        ksvd = ksvd_loss(model, "batch")
        loss, results["ksvd"] = loss + ksvd, ksvd.detach()
    loss.backward()
    return results | {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def batch(length: int, samples: int = 3) -> Tensor:
    ids = torch.randint(1, 11, (samples, length), generator=torch.Generator().manual_seed(length))
    ids[0, length // 2 :] = 0
    return ids


@pytest.mark.usefixtures("_new_compiler")
@pytest.mark.parametrize(("attention", "variants", "max_tokens"), [("softmax", 1, None), ("primal+", 2, 24)])
def test_a_compiled_step_is_the_step(attention: str, variants: int, max_tokens: int | None):
    plain = make(attention=attention).train()
    plain.max_tokens = max_tokens
    compiled, compiler = copy.deepcopy(plain), CompileCounterWithBackend("aot_eager")
    compiled.compile(backend=compiler)
    assert list(compiled.state_dict()) == list(plain.state_dict())
    expected, results = step(plain, batch(24)), step(compiled, batch(24))
    assert expected.keys() == results.keys()
    for name, value in expected.items():
        assert_close(results[name], value, 1e-9, name)
    assert not counters["graph_break"]
    assert compiler.frame_count == 2 + variants, "stem, mean, and a block of each kind"


@pytest.mark.usefixtures("_new_compiler")
@pytest.mark.parametrize("autocast", [False, True])
def test_all_lengths_share_one_graph_of_each_part(autocast: bool):
    model, compiler = make(attention="primal+", dropout=0.1).float(), CompileCounter()
    model.compile(backend=compiler, any_length=True)
    with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=False, enabled=autocast):
        for length in (24, 20, 12, 24):
            step(model, batch(length))
    assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in model.parameters())
    assert compiler.frame_count == 4
    assert not counters["graph_break"]
