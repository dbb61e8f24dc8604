"""Context parallelism equals a single process: outputs, scores, J and all gradients."""

from __future__ import annotations

import copy

import parallel_cases
import parallel_composed
import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from primal_attention import context_parallel
from primal_attention.models.lm import LanguageConfig, LanguageModel
from primal_attention.models.uea import modern_classifier
from primal_attention.ops.reference import running_sum
from primal_attention.parallel import Context, context, shard, unshard
from primal_cases import MODES_AND_DECAYS, inputs, make

# float64, and sums in another order; a gradient passes through some hundred additions of order one.
EXACT = 1e-10
# float32 kernels against float32 kernels with sums in another order.
SINGLE = 1e-5

NAMES = [f"{size} ranks: {name}" for size in (1, 2, 3, 4) for name, _ in parallel_cases.of_size(size, None)]
TOGETHER = [
    "data × context, DDP",
    "data × context, FSDP2 over all ranks",
    "data × context, FSDP2 over context, copies over data",
    "unequal batches, J per sample",
    "unequal batches, J per batch",
]
MODES = [f"{mode}{'' if decay is None else '+decay'}" for mode, decay in MODES_AND_DECAYS]
FUSED = [name for name, _ in parallel_composed.on_two(None)]


@pytest.mark.parametrize("name", NAMES)
def test_shards_equal_whole_sequences(differences, name: str):
    assert max(differences[name].values()) < EXACT, differences[name]
    assert any(key.startswith("∂") for key in differences[name]), "gradients were compared"


@pytest.mark.parametrize("name", TOGETHER)
def test_data_and_context_parallelism_together(differences, name: str):
    assert max(differences[name].values()) < EXACT, differences[name]


@pytest.mark.parametrize("mode", MODES)
def test_bytes_sent_do_not_depend_on_the_length(differences, mode: str):
    assert differences[f"bytes: {mode}"]
    assert set(differences[f"bytes: {mode}"].values()) == {0.0}


@pytest.mark.parametrize("name", FUSED)
def test_fused_kernels_on_shards(differences, name: str):
    assert max(differences[name].values()) < SINGLE, differences[name]


def test_shards_without_a_context_differ(differences):
    assert differences["control"]["y"] > 0.1


# In one process


@pytest.mark.parametrize("from_end", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_the_decayed_total_is_the_last_running_sum(monkeypatch, masked: bool, from_end: bool):
    monkeypatch.setattr(context, "BLOCK", 4)  # several blocks
    z, decay = torch.randn(2, 3, 11, 5, dtype=torch.float64), torch.tensor([0.3, 0.9, 1.0], dtype=torch.float64)
    valid = torch.rand(2, 11) > 0.3 if masked else None
    flipped = (z.flip(2), None if valid is None else valid.flip(1)) if from_end else (z, valid)
    expected = running_sum(flipped[0], decay, flipped[1])[:, :, -1]
    torch.testing.assert_close(context.decayed_total(z, decay, valid, from_end), expected)
    leaves = (z.requires_grad_(), decay.requires_grad_())
    assert torch.autograd.gradcheck(lambda z, decay: context.decayed_total(z, decay, valid, from_end), leaves)


@pytest.fixture
def mesh(alone):
    return init_device_mesh("cpu", (1,), mesh_dim_names=("context",))


def test_context_parallelism_can_be_removed(mesh):
    layer, x = make("data_dependent"), inputs(2, 9)
    y = layer(x)
    context_parallel(layer, mesh, "context")
    assert isinstance(layer.context, Context)
    assert copy.deepcopy(layer).context is layer.context
    context_parallel(layer, None)
    assert layer.context is None
    assert torch.equal(layer(x), y)


def test_unshard_inverts_shard(mesh):
    x = inputs(2, 9)
    assert torch.equal(unshard(shard(x, mesh), mesh), x)


@pytest.mark.parametrize(
    ("model", "layer"),
    [
        (
            lambda: modern_classifier(2, 3, embed_dim=8, num_heads=2, layers=2, attention="primal+"),
            "blocks.0.attention",
        ),
        (lambda: nn.Sequential(nn.MultiheadAttention(8, 2)), "'0'"),
        (lambda: nn.Sequential(nn.Linear(8, 8), nn.Conv1d(8, 8, 3)), "'1'"),
        (lambda: LanguageModel(LanguageConfig(9, ("softmax",), 8, 2, 1, 16)), "blocks.0.attention"),
        (
            lambda: LanguageModel(LanguageConfig(9, ("primal",), 8, 2, 1, 16, primal_mode="delta", rank=2)),
            "blocks.0",
        ),
    ],
)
def test_layers_that_mix_tokens_without_a_context_are_refused_by_name(mesh, model, layer: str):
    with pytest.raises(ValueError, match=rf"{layer}.*mixes tokens"):
        context_parallel(model(), mesh)


def test_calls_that_need_whole_sequences_are_refused(mesh):
    layer = context_parallel(make("causal"), mesh)
    with pytest.raises(ValueError, match="state needs whole sequences"):
        layer(inputs(1, 4), return_state=True)
    with pytest.raises(ValueError, match="cu_seqlens needs whole sequences"):
        layer(inputs(4), cu_seqlens=torch.tensor([0, 4], dtype=torch.int32))
    with pytest.raises(ValueError, match="the kernel needs whole sequences"):
        layer.kernel_matrix(inputs(1, 4))
    layer = context_parallel(make("causal_data_dependent"), mesh)
    with pytest.raises(ValueError, match="max_length=24 is exceeded by a sequence of 25 tokens"):
        layer(inputs(1, 25))


def test_a_mesh_of_several_dimensions_must_be_sliced(alone):
    mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("data", "context"))
    with pytest.raises(ValueError, match=r"mesh must have one dimension \(got 2\)"):
        context_parallel(make("causal"), mesh)
    assert context_parallel(make("causal"), mesh, "context").context.size == 1


def test_more_ranks_than_tokens_are_refused():
    class Four:
        def size(self) -> int:
            return 4

    with pytest.raises(ValueError, match="a sequence of 3 tokens cannot be split over 4 ranks"):
        shard(inputs(1, 3), Four())
