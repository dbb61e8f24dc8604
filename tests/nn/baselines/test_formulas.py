"""Baselines against their published formulas, written out with N×N matrices and loops, and their known limits."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from closeness import assert_close, rms_ratio
from primal_attention.nn.baselines import make_attention
from primal_attention.nn.baselines.nystrom import iterative_pinv, means
from primal_attention.nn.baselines.soft import gaussian_kernel, newton_inverse
from primal_attention.ops.padding import Tokens

DIM, HEADS, WIDTH = 16, 2, 8
EXACT = 1e-10  # float64, the same sums in another order


def build(name: str, **settings: Any) -> Any:
    return make_attention(name, DIM, HEADS, dtype=torch.float64, **settings).eval()


def tokens(batch: int, length: int) -> Tensor:
    return torch.randn(batch, length, DIM, dtype=torch.float64)


def through_weights(attn: Any, x: Tensor, weights: Tensor) -> Tensor:
    """The layer's output if its heads mix the values by these weights, (B, H, N, N)."""
    v = attn.project_in(x)[-1]
    return attn.project_out(weights @ v)


class TestCosformer:
    @pytest.mark.parametrize("causal", [False, True])
    def test_cosine_of_the_distance(self, causal: bool) -> None:
        length, horizon = 150, 200
        attn = build("cosformer", causal=causal, max_length=horizon)
        x = tokens(2, length)
        q, k, _ = attn.project_in(x)
        i = torch.arange(length, dtype=torch.float64)
        weights = q.relu() @ k.relu().mT * torch.cos(math.pi / 2 * (i[:, None] - i) / horizon)
        weights = weights.tril() if causal else weights
        weights = weights / weights.sum(-1, keepdim=True).clamp(min=1e-6)
        assert_close(attn(x), through_weights(attn, x, weights), EXACT)

    def test_horizon_is_the_sequence_itself_unless_given(self) -> None:
        attn, fixed = build("cosformer"), build("cosformer", max_length=21)
        fixed.load_state_dict(attn.state_dict())
        x = tokens(2, 21)
        assert_close(attn(x), fixed(x), EXACT)

    def test_longer_input_than_max_length_is_refused(self) -> None:
        with pytest.raises(ValueError, match="max_length=8 is exceeded by an input of 9 tokens"):
            build("cosformer", causal=True, max_length=8)(tokens(1, 9))


class TestSoft:
    def kernel(self, a: Tensor, b: Tensor) -> Tensor:
        return torch.exp(-torch.cdist(a, b).square() / (2 * math.sqrt(WIDTH)))

    def test_nystrom_form_of_the_gaussian_kernel(self) -> None:
        attn = build("soft", landmarks=5, newton_iterations=60)
        x = tokens(2, 40)
        q, _ = attn.project_in(x)
        landmarks = q.unflatten(2, (5, 8)).mean(3)
        left, middle = self.kernel(q, landmarks), self.kernel(landmarks, landmarks)
        weights = left @ torch.linalg.pinv(middle) @ left.mT
        assert_close(attn(x), through_weights(attn, x, weights), 1e-8)

    def test_newton_inverse_converges_to_the_pinv(self) -> None:
        points = torch.randn(3, 12, 4, dtype=torch.float64)
        kernel = gaussian_kernel(points, points)
        errors = [rms_ratio(newton_inverse(kernel, n), torch.linalg.pinv(kernel)) for n in (3, 8, 40)]
        assert errors == sorted(errors, reverse=True)
        assert errors[-1] < 1e-9
        twice = gaussian_kernel(*(points[0, :6].repeat(2, 1) for _ in range(2)))  # rank 6 of 12
        assert_close(newton_inverse(twice, 40), torch.linalg.pinv(twice, rtol=1e-10), 1e-6)


class TestFlow:
    @pytest.fixture(autouse=True)
    def no_eps(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("primal_attention.nn.baselines.flow.EPS", 0.0)

    def test_formula(self) -> None:
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

    def test_causal_formula_token_by_token(self) -> None:
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


class TestYoso:
    def test_blocks_of_queries_equal_one_block(self, monkeypatch: pytest.MonkeyPatch) -> None:
        attn, x = build("yoso"), tokens(2, 40)
        one_block = attn(x)
        monkeypatch.setattr("primal_attention.nn.baselines.yoso.BLOCK", 7)
        assert_close(attn(x), one_block, EXACT)


class TestLandmarks:
    @pytest.mark.parametrize("length", [6, 7, 11, 12, 50])
    def test_segments_cover_each_token_once_and_differ_by_one_at_most(self, length: int) -> None:
        t = torch.eye(length, dtype=torch.float64)[None, None]
        member = means(t, 6, Tokens())[0, 0] > 0  # (m, N)
        assert (member.sum(0) == 1).all()
        sizes = member.sum(1)
        assert sizes.max() - sizes.min() <= 1
        assert (member.float().argmax(0).diff() >= 0).all()

    def test_iterative_pinv_converges(self) -> None:
        a = torch.randn(2, 3, 10, 10, dtype=torch.float64).mul(4).softmax(-1)
        errors = [rms_ratio(iterative_pinv(a, n), torch.linalg.pinv(a)) for n in (2, 6, 20)]
        assert errors == sorted(errors, reverse=True)
        assert errors[-1] < 1e-8

    def test_sequences_with_a_landmark_per_token_get_exact_attention(self) -> None:
        x, softmax, nystrom = tokens(2, 20), build("softmax"), build("nystrom", landmarks=20, conv_kernel=None)
        nystrom.load_state_dict(softmax.state_dict())
        assert_close(nystrom(x), softmax(x), EXACT)
        soft = build("soft", landmarks=20)
        q, _ = soft.project_in(x)
        assert_close(soft(x), through_weights(soft, x, gaussian_kernel(*(2 * [q * WIDTH**-0.25]))), EXACT)
