"""Each baseline against an independent implementation with copied weights, or its published formula, in float64.

The packages are in requirements-oracles.txt; a test whose package is missing is skipped.
"""

from __future__ import annotations

import math
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from closeness import assert_close, rms_ratio
from primal_attention.nn.baselines import make_attention
from primal_attention.nn.baselines.base import BaselineAttention
from primal_attention.nn.baselines.nystrom import iterative_pinv, means
from primal_attention.nn.baselines.soft import gaussian_kernel, newton_inverse
from primal_attention.ops.padding import Tokens

DIM, HEADS, WIDTH = 16, 2, 8
EXACT = 1e-10  # float64, the same operations in another order

full_and_causal = pytest.mark.parametrize("causal", [False, True])


def build(name: str, **settings: Any) -> Any:
    return make_attention(name, DIM, HEADS, dtype=torch.float64, **settings).eval()


def tokens(batch: int, length: int) -> Tensor:
    return torch.randn(batch, length, DIM, dtype=torch.float64)


def need(module: str) -> ModuleType:
    return pytest.importorskip(module, reason=f"{module} is not installed: pip install -r requirements-oracles.txt")


def transformers_layer(model: str, layer: str, *args: Any, **settings: Any) -> nn.Module:
    """A self-attention layer of transformers, of the named model and class."""
    config = getattr(need("transformers"), f"{model}Config")
    layers = need(f"transformers.models.{model.lower()}.modeling_{model.lower()}")
    settings = {"hidden_size": DIM, "num_attention_heads": HEADS, **settings}
    return getattr(layers, layer)(config(**settings), *args).double().eval()


def set_rows(linear: nn.Linear, sources: list[nn.Linear]) -> None:
    """Fill a joint projection with separate ones, without bias where they have none."""
    with torch.no_grad():
        linear.weight.copy_(torch.cat([s.weight for s in sources]))
        linear.bias.copy_(torch.cat([torch.zeros(len(s.weight)) if s.bias is None else s.bias for s in sources]))


def heads_of(attn: BaselineAttention, x: Tensor) -> Tensor:
    """The heads' outputs side by side, (B, N, d), before the output projection, which other modules may lack."""
    return attn.mix(x, Tokens()).transpose(1, 2).flatten(2)


def through_weights(attn: Any, x: Tensor, weights: Tensor) -> Tensor:
    """The layer's output if its heads mix the values by these weights, (B, H, N, N)."""
    v = attn.project_in(x)[-1]
    return attn.project_out(weights @ v)


@full_and_causal
def test_softmax_equals_torch_multihead_attention(causal: bool) -> None:
    ours = build("softmax", causal=causal)
    theirs = nn.MultiheadAttention(DIM, HEADS, batch_first=True, dtype=torch.float64)
    with torch.no_grad():
        theirs.in_proj_weight.copy_(ours.in_proj.weight)
        theirs.in_proj_bias.copy_(ours.in_proj.bias)
    theirs.out_proj.load_state_dict(ours.out_proj.state_dict())
    x = tokens(3, 21)
    padding = torch.arange(21) >= torch.tensor([21, 13, 1])[:, None]
    future = torch.ones(21, 21, dtype=torch.bool).triu(1) if causal else None
    expected, _ = theirs(x, x, x, key_padding_mask=padding, attn_mask=future)
    assert_close(ours(x, padding)[~padding], expected[~padding], EXACT)


@full_and_causal
@pytest.mark.parametrize("length", [40, 300])
@pytest.mark.parametrize("name", ["linear", "performer"])
def test_linear_and_performer_equal_performer_pytorch(name: str, length: int, causal: bool) -> None:
    outside = need("performer_pytorch.performer_pytorch")
    x, ours = 2 * tokens(2, length), build(name, causal=causal, **({"seed": 0} if name == "performer" else {}))
    q, k, v = ours.project_in(x)
    if name == "linear":
        ours.eps = 0.0
        phi_q, phi_k = F.elu(q) + 1, F.elu(k) + 1
    else:
        # Without the constant that their features have added, the scales they divide by cancel.
        phi_q, phi_k = (
            outside.softmax_kernel(t, projection_matrix=ours.frequencies, is_query=is_query, eps=0.0)
            for t, is_query in ((q, True), (k, False))
        )
    if causal:
        expected = outside.causal_linear_attention_noncuda(phi_q, phi_k, v, eps=0.0)
    else:
        expected = outside.linear_attention(phi_q, phi_k, v)
    assert_close(ours.mix(x, Tokens()), expected, EXACT)


@full_and_causal
@pytest.mark.parametrize(
    ("length", "buckets"),
    [(64, 16), (128, [4, 8])],  # 2 · 64 / 8 = 16 buckets; 2 · 128 / 8 = 32, above 2 · 8: two hashes
    ids=["one-hash", "two-hashes"],
)
def test_reformer_equals_transformers(causal: bool, length: int, buckets: int | list[int]) -> None:
    settings = {"attention_head_size": WIDTH, "num_hashes": 2, "lsh_attn_chunk_length": 8, "hash_seed": 5}
    theirs = transformers_layer("Reformer", "LSHSelfAttention", num_buckets=buckets, is_decoder=causal, **settings)
    ours = build("reformer", hashes=2, chunk=8, causal=causal)
    set_rows(ours.in_proj, [theirs.query_key, theirs.value])
    factors = [buckets] if isinstance(buckets, int) else buckets
    torch.manual_seed(5)
    rotations = torch.randn(HEADS, WIDTH, 2, sum(factors) // 2, dtype=torch.float64)
    ours.coarse_rotations[..., : factors[0] // 2] = rotations[..., : factors[0] // 2]
    if len(factors) == 2:
        ours.fine_rotations[..., : factors[1] // 2] = rotations[..., factors[0] // 2 :]
    x = tokens(3, length)
    # Their key's length has 1e-6 added to its mean square.
    assert_close(heads_of(ours, x), theirs(x).hidden_states, 1e-5)


@pytest.mark.parametrize("global_tokens", [0, 1, 3])
def test_longformer_equals_transformers(global_tokens: int) -> None:
    theirs = transformers_layer("Longformer", "LongformerSelfAttention", 0, attention_window=[8])
    ours = build("longformer", window=8, global_tokens=global_tokens)
    set_rows(ours.in_proj, [theirs.query, theirs.key, theirs.value])
    if global_tokens:
        set_rows(ours.global_proj, [theirs.query_global, theirs.key_global, theirs.value_global])
    x = tokens(3, 40)
    padding = torch.arange(40) >= torch.tensor([40, 29, 5])[:, None]
    is_global = torch.zeros_like(padding)
    is_global[:, :global_tokens] = True
    (expected,) = theirs(
        x,
        attention_mask=torch.zeros_like(x[..., 0]).masked_fill(padding, -10000.0).masked_fill(is_global, 10000.0),
        is_index_masked=padding,
        is_index_global_attn=is_global,
        is_global_attn=global_tokens > 0,
    )
    # Their softmax is in float32.
    assert_close(ours(x, padding)[~padding], ours.out_proj(expected)[~padding], 1e-6)


@pytest.mark.parametrize("length", [48, 31])
def test_linformer_equals_its_package(length: int) -> None:
    theirs = need("linformer").LinformerSelfAttention(DIM, seq_len=48, k=12, heads=HEADS).double().eval()
    ours = build("linformer", projected_length=12, max_length=48)
    set_rows(ours.in_proj, [theirs.to_q, theirs.to_k, theirs.to_v])
    with torch.no_grad():
        ours.key_rows.copy_(theirs.proj_k)
        ours.value_rows.copy_(theirs.proj_v)
    ours.out_proj.load_state_dict(theirs.to_out.state_dict())
    x = tokens(3, length)
    assert_close(ours(x), theirs(x), EXACT)


# Landmarks: Nyström attention and SOFT


def test_nystrom_equals_transformers() -> None:
    settings = {"num_landmarks": 6, "segment_means_seq_len": 48, "conv_kernel_size": 5}
    theirs = transformers_layer("Nystromformer", "NystromformerSelfAttention", **settings)
    theirs.init_option = "exact"  # each matrix by its own norm, not by the largest of the batch
    ours = build("nystrom", landmarks=6, conv_kernel=5)
    set_rows(ours.in_proj, [theirs.query, theirs.key, theirs.value])
    ours.conv.load_state_dict(theirs.conv.state_dict())
    x = tokens(3, 48)
    assert_close(heads_of(ours, x), theirs(x)[0], EXACT)


def test_soft_is_the_nystrom_form_of_the_gaussian_kernel() -> None:
    def kernel(a: Tensor, b: Tensor) -> Tensor:
        return torch.exp(-torch.cdist(a, b).square() / (2 * math.sqrt(WIDTH)))

    attn, x = build("soft", landmarks=5, newton_iterations=60), tokens(2, 40)
    q, _ = attn.project_in(x)
    landmarks = q.unflatten(2, (5, 8)).mean(3)
    left = kernel(q, landmarks)
    weights = left @ torch.linalg.pinv(kernel(landmarks, landmarks)) @ left.mT
    assert_close(attn(x), through_weights(attn, x, weights), 1e-8)


def test_both_iterations_converge_to_the_pseudo_inverse() -> None:
    points = torch.randn(3, 12, 4, dtype=torch.float64)
    kernel = gaussian_kernel(points, points)
    attention = torch.randn(2, 3, 10, 10, dtype=torch.float64).mul(4).softmax(-1)
    for invert, matrix, steps, limit in (
        (newton_inverse, kernel, (3, 8, 40), 1e-9),
        (iterative_pinv, attention, (2, 6, 20), 1e-8),
    ):
        errors = [rms_ratio(invert(matrix, n), torch.linalg.pinv(matrix)) for n in steps]
        assert errors == sorted(errors, reverse=True)
        assert errors[-1] < limit
    twice = gaussian_kernel(*(points[0, :6].repeat(2, 1) for _ in range(2)))  # rank 6 of 12
    assert_close(newton_inverse(twice, 40), torch.linalg.pinv(twice, rtol=1e-10), 1e-6)


@pytest.mark.parametrize("length", [6, 7, 11, 12, 50])
def test_segments_cover_each_token_once_and_differ_by_one_at_most(length: int) -> None:
    t = torch.eye(length, dtype=torch.float64)[None, None]
    member = means(t, 6, Tokens())[0, 0] > 0  # (m, N)
    assert (member.sum(0) == 1).all()
    sizes = member.sum(1)
    assert sizes.max() - sizes.min() <= 1
    assert (member.float().argmax(0).diff() >= 0).all()


def test_sequences_with_a_landmark_per_token_get_exact_attention() -> None:
    x, softmax, nystrom = tokens(2, 20), build("softmax"), build("nystrom", landmarks=20, conv_kernel=None)
    nystrom.load_state_dict(softmax.state_dict())
    assert_close(nystrom(x), softmax(x), EXACT)
    soft = build("soft", landmarks=20)
    q, _ = soft.project_in(x)
    assert_close(soft(x), through_weights(soft, x, gaussian_kernel(*(2 * [q * WIDTH**-0.25]))), EXACT)


# YOSO, cosFormer and Flow


def test_yoso_and_its_gradient_are_the_expectation_of_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {"use_expectation": True, "hash_code_len": 5, "conv_window": None}
    theirs, ours = transformers_layer("Yoso", "YosoSelfAttention", **settings), build("yoso", bits=5)
    set_rows(ours.in_proj, [theirs.query, theirs.key, theirs.value])
    with torch.no_grad():
        ours.out_proj.weight.copy_(torch.eye(DIM))
        ours.out_proj.bias.zero_()
    padding = torch.arange(30) >= torch.tensor([30, 17])[:, None]
    monkeypatch.setattr("primal_attention.nn.baselines.yoso.BLOCK", 7)  # several blocks of queries
    x, results = tokens(2, 30), []
    for run in (
        lambda t: ours(t, padding),
        lambda t: theirs(t, -10000.0 * padding.double())[0].masked_fill(padding[..., None], 0.0),
    ):
        leaf = x.clone().requires_grad_()
        y = run(leaf)
        (y * torch.linspace(-1, 1, DIM, dtype=torch.float64)).sum().backward()
        results.append((y, leaf.grad))
    for actual, expected in zip(*results, strict=True):
        assert_close(actual, expected, EXACT)


@full_and_causal
def test_cosformer_weights_are_the_cosine_of_the_distance(causal: bool) -> None:
    length, horizon = 150, 200
    attn = build("cosformer", causal=causal, max_length=horizon)
    x = tokens(2, length)
    q, k, _ = attn.project_in(x)
    i = torch.arange(length, dtype=torch.float64)
    weights = q.relu() @ k.relu().mT * torch.cos(math.pi / 2 * (i[:, None] - i) / horizon)
    weights = weights.tril() if causal else weights
    weights = weights / weights.sum(-1, keepdim=True).clamp(min=1e-6)
    assert_close(attn(x), through_weights(attn, x, weights), EXACT)


def test_the_horizon_of_cosformer_is_the_sequence_itself_unless_given() -> None:
    attn, fixed = build("cosformer"), build("cosformer", max_length=21)
    fixed.load_state_dict(attn.state_dict())
    x = tokens(2, 21)
    assert_close(attn(x), fixed(x), EXACT)
    with pytest.raises(ValueError, match="max_length=8 is exceeded by an input of 9 tokens"):
        build("cosformer", causal=True, max_length=8)(tokens(1, 9))


def test_flow_is_its_formula(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("primal_attention.nn.baselines.flow.EPS", 0.0)
    attn = build("flow")
    x = tokens(2, 30)
    q, k, v = attn.project_in(x)
    q, k = q.sigmoid(), k.sigmoid()
    attention = q @ k.mT  # (B, H, N, N)
    incoming, outgoing = attention.sum(-1), attention.sum(-2)
    conserved_in = (attention / outgoing.unsqueeze(-2)).sum(-1)
    conserved_out = (attention / incoming.unsqueeze(-1)).sum(-2)
    competing = v * (30 * conserved_out.softmax(-1)).unsqueeze(-1)
    y = conserved_in.sigmoid().unsqueeze(-1) * (attention / incoming.unsqueeze(-1) @ competing)
    assert_close(attn(x), attn.project_out(y), EXACT)


def test_causal_flow_is_its_formula_token_by_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("primal_attention.nn.baselines.flow.EPS", 0.0)
    attn = build("flow", causal=True)
    length = 140
    x = tokens(1, length)
    q, k, v = attn.project_in(x)
    q, k = q.sigmoid()[0], k.sigmoid()[0]
    rows, scaled_in, scaled_out, sources = [], [], [], []
    total = torch.zeros(HEADS, dtype=torch.float64)
    for t in range(length):
        seen = slice(0, t + 1)
        scaled_in.append((t + 1) / (q[:, t] * k[:, seen].sum(1)).sum(-1))
        scaled_out.append((t + 1) / (k[:, t] * q[:, seen].sum(1)).sum(-1))
        weighted_k = sum(k[:, j] * scaled_out[j][:, None] for j in range(t + 1))
        weighted_q = sum(q[:, j] * scaled_in[j][:, None] for j in range(t + 1))
        conserved_in = (q[:, t] * weighted_k).sum(-1) / (t + 1)
        conserved_out = ((k[:, t] * weighted_q).sum(-1) / (t + 1)).exp()
        total = total + conserved_out
        sources.append(v[0, :, t] * (conserved_out / total * (t + 1))[:, None])
        scores = torch.einsum("hp,hjp->hj", q[:, t], k[:, seen]) * (scaled_in[t] / (t + 1))[:, None]
        y = torch.einsum("hj,hjp->hp", scores, torch.stack(sources, dim=1))
        rows.append(conserved_in.sigmoid()[:, None] * y)
    assert_close(attn(x), attn.project_out(torch.stack(rows, dim=1)[None]), EXACT)
