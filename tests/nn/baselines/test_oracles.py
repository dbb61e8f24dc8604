"""Each baseline against an independent implementation with copied weights, in float64.

The packages are in requirements-oracles.txt; a test whose package is missing is skipped.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from closeness import assert_close
from primal_attention.nn.baselines import make_attention
from primal_attention.nn.baselines.base import BaselineAttention
from primal_attention.ops.padding import Tokens

DIM, HEADS = 16, 2
EXACT = 1e-10  # float64, the same operations in another order


def need(module: str) -> ModuleType:
    return pytest.importorskip(module, reason=f"{module} is not installed: pip install -r requirements-oracles.txt")


def build(name: str, **settings: Any) -> Any:
    return make_attention(name, DIM, settings.pop("heads", HEADS), dtype=torch.float64, **settings).eval()


def tokens(batch: int, length: int) -> Tensor:
    return torch.randn(batch, length, DIM, dtype=torch.float64)


def set_rows(linear: nn.Linear, sources: list[nn.Linear]) -> None:
    """Fill a joint projection with separate ones, without bias where they have none."""
    with torch.no_grad():
        linear.weight.copy_(torch.cat([s.weight for s in sources]))
        linear.bias.copy_(torch.cat([torch.zeros(len(s.weight)) if s.bias is None else s.bias for s in sources]))


def heads_of(attn: BaselineAttention, x: Tensor) -> Tensor:
    """The heads' outputs side by side, (B, N, d), before the output projection, which other modules may lack."""
    return attn.mix(x, Tokens()).transpose(1, 2).flatten(2)


class TestSoftmax:
    @pytest.mark.parametrize("causal", [False, True])
    def test_torch_multihead_attention(self, causal: bool) -> None:
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


class TestLinear:
    @pytest.mark.parametrize("causal", [False, True])
    @pytest.mark.parametrize("length", [40, 300])
    def test_performer_pytorch(self, causal: bool, length: int) -> None:
        outside = need("performer_pytorch.performer_pytorch")
        x, ours = tokens(2, length), build("linear", causal=causal)
        ours.eps = 0.0
        q, k, v = ours.project_in(x)
        q, k = F.elu(q) + 1, F.elu(k) + 1
        if causal:
            expected = outside.causal_linear_attention_noncuda(q, k, v, eps=0.0)
        else:
            expected = outside.linear_attention(q, k, v)
        assert_close(ours.mix(x, Tokens()), expected, EXACT)


class TestPerformer:
    @pytest.mark.parametrize("causal", [False, True])
    def test_performer_pytorch_features(self, causal: bool) -> None:
        outside = need("performer_pytorch.performer_pytorch")
        x = 2 * tokens(2, 300)
        ours = build("performer", features=32, causal=causal, seed=0)
        q, k, v = ours.project_in(x)
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


class TestReformer:
    @pytest.mark.parametrize("causal", [False, True])
    @pytest.mark.parametrize("buckets", [16, [4, 8]], ids=["one-hash", "two-hashes"])
    def test_transformers(self, causal: bool, buckets: int | list[int]) -> None:
        outside = need("transformers.models.reformer.modeling_reformer")
        config = need("transformers").ReformerConfig(
            hidden_size=DIM,
            num_attention_heads=HEADS,
            attention_head_size=DIM // HEADS,
            num_hashes=2,
            num_buckets=buckets,
            lsh_attn_chunk_length=8,
            lsh_attention_probs_dropout_prob=0.0,
            hash_seed=5,
            is_decoder=causal,
        )
        length = 64 if buckets == 16 else 128  # 2 · 64 / 8 = 16 buckets; 2 · 128 / 8 = 32, above 2 · 8: two hashes
        theirs = outside.LSHSelfAttention(config).double().eval()
        ours = build("reformer", hashes=2, chunk=8, causal=causal)
        set_rows(ours.in_proj, [theirs.query_key, theirs.value])
        factors = [buckets] if isinstance(buckets, int) else buckets
        torch.manual_seed(5)
        rotations = torch.randn(HEADS, DIM // HEADS, 2, sum(factors) // 2, dtype=torch.float64)
        ours.coarse_rotations[..., : factors[0] // 2] = rotations[..., : factors[0] // 2]
        if len(factors) == 2:
            ours.fine_rotations[..., : factors[1] // 2] = rotations[..., factors[0] // 2 :]
        x = tokens(3, length)
        # Their key's length has 1e-6 added to its mean square.
        assert_close(heads_of(ours, x), theirs(x).hidden_states, 1e-5)


class TestLongformer:
    @pytest.mark.parametrize("global_tokens", [0, 1, 3])
    def test_transformers(self, global_tokens: int) -> None:
        outside = need("transformers.models.longformer.modeling_longformer")
        config = need("transformers").LongformerConfig(
            hidden_size=DIM,
            num_attention_heads=HEADS,
            attention_window=[8],
            attention_probs_dropout_prob=0.0,
        )
        theirs = outside.LongformerSelfAttention(config, layer_id=0).double().eval()
        ours = build("longformer", window=8, global_tokens=global_tokens)
        set_rows(ours.in_proj, [theirs.query, theirs.key, theirs.value])
        if global_tokens:
            set_rows(ours.global_proj, [theirs.query_global, theirs.key_global, theirs.value_global])
        x = tokens(3, 40)
        padding = torch.arange(40) >= torch.tensor([40, 29, 5])[:, None]
        is_global = torch.zeros_like(padding)
        is_global[:, :global_tokens] = True
        mask = torch.zeros(3, 40, dtype=torch.float64).masked_fill(padding, -10000.0).masked_fill(is_global, 10000.0)
        (expected,) = theirs(
            x,
            attention_mask=mask,
            is_index_masked=padding,
            is_index_global_attn=is_global,
            is_global_attn=global_tokens > 0,
        )
        # Their softmax is in float32.
        assert_close(ours(x, padding)[~padding], ours.out_proj(expected)[~padding], 1e-6)


class TestLinformer:
    @pytest.mark.parametrize("length", [48, 31])
    def test_linformer(self, length: int) -> None:
        outside = need("linformer")
        theirs = outside.LinformerSelfAttention(DIM, seq_len=48, k=12, heads=HEADS).double().eval()
        ours = build("linformer", projected_length=12, max_length=48)
        set_rows(ours.in_proj, [theirs.to_q, theirs.to_k, theirs.to_v])
        with torch.no_grad():
            ours.key_rows.copy_(theirs.proj_k)
            ours.value_rows.copy_(theirs.proj_v)
        ours.out_proj.load_state_dict(theirs.to_out.state_dict())
        x = tokens(3, length)
        assert_close(ours(x), theirs(x), EXACT)


class TestNystrom:
    def test_transformers(self) -> None:
        outside = need("transformers.models.nystromformer.modeling_nystromformer")
        config = need("transformers").NystromformerConfig(
            hidden_size=DIM,
            num_attention_heads=HEADS,
            num_landmarks=6,
            segment_means_seq_len=48,
            conv_kernel_size=5,
            attention_probs_dropout_prob=0.0,
        )
        theirs = outside.NystromformerSelfAttention(config).double().eval()
        theirs.init_option = "exact"  # each matrix by its own norm, not by the largest of the batch
        ours = build("nystrom", landmarks=6, conv_kernel=5)
        set_rows(ours.in_proj, [theirs.query, theirs.key, theirs.value])
        ours.conv.load_state_dict(theirs.conv.state_dict())
        x = tokens(3, 48)
        assert_close(heads_of(ours, x), theirs(x)[0], EXACT)


class TestYoso:
    def test_transformers_expectation_and_its_gradient(self) -> None:
        outside = need("transformers.models.yoso.modeling_yoso")
        config = need("transformers").YosoConfig(
            hidden_size=DIM,
            num_attention_heads=HEADS,
            use_expectation=True,
            hash_code_len=5,
            conv_window=None,
            attention_probs_dropout_prob=0.0,
        )
        theirs = outside.YosoSelfAttention(config).double().eval()
        ours = build("yoso", bits=5)
        set_rows(ours.in_proj, [theirs.query, theirs.key, theirs.value])
        with torch.no_grad():
            ours.out_proj.weight.copy_(torch.eye(DIM))
            ours.out_proj.bias.zero_()
        padding = torch.arange(30) >= torch.tensor([30, 17])[:, None]
        x = tokens(2, 30)
        gradients = []
        for run in (
            lambda t: ours(t, padding),
            lambda t: theirs(t, -10000.0 * padding.double())[0].masked_fill(padding[..., None], 0.0),
        ):
            leaf = x.clone().requires_grad_()
            y = run(leaf)
            (y * torch.linspace(-1, 1, DIM, dtype=torch.float64)).sum().backward()
            assert leaf.grad is not None
            gradients.append((y, leaf.grad))
        (y, grad), (expected_y, expected_grad) = gradients
        assert_close(y, expected_y, EXACT)
        assert_close(grad, expected_grad, EXACT)
