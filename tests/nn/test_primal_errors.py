"""Bad input: one line that names the argument, the value and what is accepted."""

from __future__ import annotations

import re
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

from primal_attention import PrimalAttention
from primal_cases import EMBED, HEADS, MAX_LENGTH, MODES, backend_options, inputs, make

CAUSAL_SUM = {"causal": True, "data_dependent": False}
BAD_ARGUMENTS: list[tuple[dict[str, Any], str]] = [
    ({"embed_dim": 100, "num_heads": 8}, "embed_dim must be divisible by num_heads (embed_dim=100, num_heads=8)"),
    ({"embed_dim": 0}, "embed_dim must be at least 1 (got 0)"),
    ({"num_heads": -2}, "num_heads must be at least 1 (got -2)"),
    ({"embed_dim": 12.0}, "embed_dim must be an integer (got 12.0)"),
    ({"rank": 0}, "rank must be at least 1 (got 0)"),
    ({"rank": True}, "rank must be an integer (got True)"),
    ({"landmarks": 0}, "landmarks must be at least 1 (got 0)"),
    ({"dropout": 1.0}, "dropout must be in [0, 1) (got 1.0)"),
    ({"dropout": -0.1}, "dropout must be in [0, 1) (got -0.1)"),
    ({"dropout": "0.1"}, "dropout must be in [0, 1) (got '0.1')"),
    ({"causal": "no"}, "causal must be True or False (got 'no')"),
    ({"backend": "lean"}, "backend='lean' is now called 'cpu'"),
    ({"backend": "gpu"}, "backend must be one of 'auto', 'reference', 'compiled', 'cpu', 'fused' (got 'gpu')"),
    ({"feature_map": "relu"}, "feature_map must be one of 'cosine', 'softmax' (got 'relu')"),
    ({"objective_form": "max"}, "objective_form must be one of 'mean', 'sum' (got 'max')"),
    ({"objective_trace": "none"}, "objective_trace must be one of 'weights', 'projections' (got 'none')"),
    ({"sampling": "odd"}, "sampling must be one of 'even', 'random' (got 'odd')"),
    (
        {"sampling": "random", "data_dependent": False},
        "sampling='random' needs data_dependent=True and causal=False (got data_dependent=False, causal=False)",
    ),
    (
        {"sampling": "random", "causal": True, "max_length": 8},
        "sampling='random' needs data_dependent=True and causal=False (got data_dependent=True, causal=True)",
    ),
    ({"decay": 0.9}, "decay needs causal=True or data_dependent=False (got decay=0.9)"),
    ({"decay": 1e-50, "data_dependent": False}, "decay underflows in float32 (got 1e-50): use at least 1.2e-38"),
    ({"decay": "fast", **CAUSAL_SUM}, "decay must be one of 'learned' (got 'fast')"),
    ({"decay": True, **CAUSAL_SUM}, "decay must be one of 'learned' (got True)"),
    ({"decay": ["a"], **CAUSAL_SUM}, "decay must be None, 'learned', a number or a number per head (got ['a'])"),
    ({"decay": 1.5, **CAUSAL_SUM}, "decay must lie in (0, 1] (got 1.5)"),
    ({"decay": [0.5, 0.9], **CAUSAL_SUM}, "decay must be one number or num_heads=3 numbers (got [0.5, 0.9])"),
    ({"causal": True}, "max_length is required when causal and data_dependent: the landmark grid spans it"),
    ({"causal": True, "max_length": 0}, "max_length must be at least 1 (got 0)"),
    ({"max_length": 64}, "max_length=64 is used only if causal and data_dependent are both True"),
    (
        {"causal": True, "max_length": 8, "objective_trace": "projections"},
        "objective_trace='projections' is not defined in the causal data-dependent mode",
    ),
]


@pytest.mark.parametrize(("keywords", "message"), BAD_ARGUMENTS, ids=[message[:40] for _, message in BAD_ARGUMENTS])
def test_a_bad_argument_is_refused_at_construction(keywords: dict[str, Any], message: str) -> None:
    arguments = {"embed_dim": EMBED, "num_heads": HEADS, "rank": 4, "landmarks": 6, **keywords}
    with pytest.raises((ValueError, TypeError), match=rf"^{re.escape(message)}\Z"):
        PrimalAttention(**arguments)


def bounds(*positions: int) -> Tensor:
    return torch.tensor(positions, dtype=torch.int32)


SHAPE = "x must have shape (batch, tokens, embed_dim) with embed_dim=12"
BOUNDARIES = "cu_seqlens must be a 1-D int32 tensor of at least two boundaries"
STREAMS = "state needs a causal layer (causal=False): only the causal modes stream"
CROSS = "key and value must be x itself: cross-attention is not defined"
MASK = "key_padding_mask must"
PACKED, HIDDEN, X = bounds(0, 4, 9), torch.ones(5, 5).triu(1).bool(), inputs(2, 5)
# (mode, x, keywords, start of the message)
BAD_CALLS: list[tuple[str, Any, dict[str, Any], str]] = [
    ("plain", torch.zeros(2, 5, 11).double(), {}, f"{SHAPE} (got (2, 5, 11))"),
    ("plain", inputs(5), {}, f"{SHAPE} (got (5, 12))"),
    ("plain", inputs(2, 0), {}, "x must have at least one token (got 0)"),
    ("plain", X.tolist(), {}, "x must be a tensor (got list)"),
    ("plain", X.to("meta"), {}, "x must be on the device of the layer, cpu (got meta)"),
    ("plain", torch.nested.nested_tensor([X[0]]), {}, "x must be padded or packed (got a nested tensor; enc"),
    ("plain", torch.nested.nested_tensor([X[0]], layout=torch.jagged), {}, "x must be padded or packed (got a nested"),
    ("plain", X.float(), {}, "x must have the dtype of the layer's parameters, torch.float64 (got torch.float32)"),
    ("plain", X, {"key_padding_mask": X[..., 0].long()}, f"{MASK} be a bool tensor, True at padding (got torch.int64)"),
    ("plain", X, {"key_padding_mask": X[..., 0]}, f"{MASK} be bool, or −inf at padding and 0 elsewhere"),
    ("plain", X, {"key_padding_mask": HIDDEN[:2, :4]}, f"{MASK} have shape (2, 5), as x (got (2, 4))"),
    ("plain", X, {"key_padding_mask": HIDDEN[:2].to("meta")}, f"{MASK} be on the device of the layer, cpu (got meta)"),
    ("plain", inputs(1, 9), {"cu_seqlens": PACKED}, "x must have shape (total, embed_dim) with embed_dim=12 (got (1,"),
    ("plain", inputs(9), {"cu_seqlens": PACKED, "key_padding_mask": HIDDEN}, "key_padding_mask and cu_seqlens exclude"),
    ("plain", inputs(9), {"cu_seqlens": bounds(1, 9)}, "cu_seqlens must start at 0 (got 1)"),
    ("plain", inputs(9), {"cu_seqlens": bounds(0, 5, 4, 9)}, "cu_seqlens must not decrease (got 4 after 5)"),
    ("plain", inputs(9), {"cu_seqlens": bounds(0, 8)}, "cu_seqlens must end at the number of tokens, 9 (got 8)"),
    ("plain", inputs(9), {"cu_seqlens": PACKED.float()}, f"{BOUNDARIES} (got torch.float32, shape (3,))"),
    ("plain", inputs(9), {"cu_seqlens": [0, 9]}, "cu_seqlens must be a tensor (got list)"),
    ("plain", inputs(9), {"cu_seqlens": PACKED.to("meta")}, "cu_seqlens must be on the device of the layer, cpu (got"),
    ("plain", inputs(9), {"cu_seqlens": bounds(0)}, f"{BOUNDARIES} (got torch.int32, shape (1,))"),
    ("plain", inputs(9), {"cu_seqlens": PACKED, "max_seqlen": 4}, "max_seqlen must be at least 5, the longest of cu_s"),
    ("plain", inputs(9), {"cu_seqlens": PACKED, "max_seqlen": 5.0}, "max_seqlen must be an integer (got 5.0)"),
    ("plain", X, {"max_seqlen": 5}, "max_seqlen=5 is used only with cu_seqlens"),
    ("plain", X, {"return_state": True}, STREAMS),
    ("plain", X, {"state": make("causal").initial_state(2)}, STREAMS),
    ("causal", inputs(9), {"cu_seqlens": PACKED, "return_state": True}, "state and cu_seqlens exclude each other"),
    ("causal", inputs(9), {"cu_seqlens": PACKED, "state": make("causal").initial_state(2)}, "state and cu_seqlens exc"),
    ("plain", X, {"key": X + 1}, CROSS),
    ("plain", X, {"key": [X]}, "key must be a tensor (got list)"),
    ("plain", X, {"attn_mask": [HIDDEN]}, "attn_mask must be a tensor (got list)"),
    ("plain", X, {"value": X + 1}, CROSS),
    ("plain", X, {"need_weights": True}, "need_weights=True is not supported: the layer forms no N×N matrix"),
    ("plain", X, {"is_causal": True}, "is_causal=True needs a layer with causal=True"),
    ("plain", X, {"attn_mask": HIDDEN}, "attn_mask must hide nothing for a layer with causal=False"),
    ("causal", X, {"attn_mask": ~HIDDEN}, "attn_mask must be the causal mask for a layer with causal=True"),
    ("causal", X, {"attn_mask": torch.ones(5, 5)}, "attn_mask must be the causal mask for a layer with causal=True"),
    ("causal", X, {"attn_mask": HIDDEN[:4]}, "attn_mask must have shape (5, 5) (got (4, 5))"),
]


@pytest.mark.parametrize(("mode", "x", "keywords", "message"), BAD_CALLS, ids=[call[-1][:50] for call in BAD_CALLS])
def test_a_bad_call_is_refused(mode: str, x: Any, keywords: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=rf"^{re.escape(message)}.*\Z"):
        make(mode)(x, **keywords)


def test_autocast_does_not_hide_a_dtype_that_it_leaves() -> None:
    for x in (X, X.long()):
        with torch.autocast("cpu"), pytest.raises(TypeError, match="x must have the dtype of the layer's parameters"):
            make("plain", dtype=torch.float32)(x)


def test_changed_boundaries_are_checked_again() -> None:
    layer, x, cu_seqlens = make("data_dependent"), inputs(9), bounds(0, 4, 9)
    layer(x, cu_seqlens=cu_seqlens)
    cu_seqlens[1] = 10
    with pytest.raises(ValueError, match="cu_seqlens must not decrease"):
        layer(x, cu_seqlens=cu_seqlens)


def test_streaming_calls_are_checked() -> None:
    layer, causal = make("data_dependent"), make("causal")
    with pytest.raises(ValueError, match="state needs a causal layer"):
        layer.step(inputs(2), causal.initial_state(2))
    with pytest.raises(ValueError, match="initial_state needs a causal layer"):
        layer.initial_state(2)
    with pytest.raises(ValueError, match=r"x_t must have shape \(batch, 12\) \(got \(2, 1, 12\)\)"):
        causal.step(inputs(2, 1), causal.initial_state(2))
    with pytest.raises(TypeError, match=r"state must be a RunningState, .* \(got LandmarkState\)"):
        causal.step(inputs(2), make("causal_data_dependent").initial_state(2))
    with pytest.raises(ValueError, match=r"state must have as many sequences as x, 2 \(got 3\)"):
        causal.step(inputs(2), causal.initial_state(3))
    with pytest.raises(ValueError, match="state must be on the device of the layer, cpu"):
        causal.step(inputs(2), make("causal", device="meta").initial_state(2))
    with pytest.raises(ValueError, match=r"batch_size must be an integer of at least 0 \(got -1\)"):
        causal.initial_state(-1)


@pytest.mark.parametrize(
    ("mode", "other"),
    [
        ("causal", {"num_heads": 2}),
        ("causal", {"feature_map": "softmax"}),
        ("causal_data_dependent", {"max_length": MAX_LENGTH + 1}),
        ("causal_data_dependent", {"rank": 3}),
    ],
)
def test_a_state_of_another_layer_is_refused_by_name(mode: str, other: dict[str, Any]) -> None:
    options = {"num_heads": HEADS, "rank": 4, "landmarks": 6, "dtype": torch.float64, **MODES[mode], **other}
    _, state = PrimalAttention(EMBED, **options)(inputs(2, 3), return_state=True)
    ((name, value),) = other.items()
    with pytest.raises(ValueError, match=f"another kind of layer .*{name}={value}.*; this layer is causal"):
        make(mode).step(inputs(2), state)


def test_max_length_counts_the_tokens_of_each_sequence() -> None:
    layer, n = make("causal_data_dependent").eval(), MAX_LENGTH
    mask = torch.zeros(2, n + 1, dtype=torch.bool)
    mask[:, 3] = True
    layer(inputs(2, n + 1), mask)
    layer(inputs(2 * n), cu_seqlens=bounds(0, n, 2 * n))
    _, state = layer(inputs(1, n - 1), return_state=True)
    for _ in range(3):  # skipped steps do not count
        _, state = layer.step(inputs(1), state, torch.tensor([True]))
    _, full = layer.step(inputs(1), state)
    mask[1, 3] = False
    too_long = (
        lambda: layer(inputs(2, n + 1)),
        lambda: layer(inputs(2, n + 1), mask),
        lambda: layer(inputs(2 * n + 1), cu_seqlens=bounds(0, n, 2 * n + 1)),
        lambda: layer.step(inputs(1), full),
        lambda: layer.kernel_matrix(inputs(1, n + 1)),
    )
    for call in too_long:
        with pytest.raises(ValueError, match=f"max_length={n} is exceeded by a sequence of {n + 1} tokens"):
            call()


def test_a_feature_map_that_changes_the_width_is_refused() -> None:
    layer = make("plain", feature_map=lambda z: torch.cat([z, -z], -1))
    with pytest.raises(ValueError, match=r"feature_map must keep the shape .* of its input"):
        layer(inputs(1, 3))


@pytest.mark.parametrize(
    ("keywords", "independent", "source"),
    [
        ({"rank": 10, "landmarks": 50}, 4, "head width 4, landmarks 50"),
        ({"rank": 4, "landmarks": 3}, 3, "head width 4, landmarks 3"),
        ({"rank": 5, "data_dependent": False}, 4, "head width 4"),
        ({"rank": 4, "landmarks": 4}, None, ""),
    ],
)
def test_a_rank_above_the_independent_directions_warns_once(
    keywords: dict[str, Any], independent: int | None, source: str
) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        layer = PrimalAttention(EMBED, HEADS, **keywords)
        layer(torch.randn(1, 5, EMBED))
    message = f"rank={keywords['rank']} exceeds the number of independent directions, at most {independent} ({source})"
    expected = [] if independent is None else [message]
    assert [str(w.message) for w in caught] == expected
    assert {w.filename for w in caught} <= {__file__}


# Parameters that do not fit together. The fast backends read memory by these shapes.

D, P, RANK, LANDMARKS = 16, 8, 4, 6
WRONG_PARAMETERS: list[tuple[str, str, tuple[int, ...]]] = [
    ("w_e", "w_e", (1, LANDMARKS, RANK)),
    ("w_e", "w_e", (2, LANDMARKS - 1, RANK)),
    ("w_r", "w_r", (2, LANDMARKS + 1, RANK)),
    ("w_r", "w_r", (2, LANDMARKS, RANK + 1)),
    ("qk_proj.weight", "qk_weight", (D, D)),
    ("qk_proj.bias", "qk_bias", (D,)),
    ("score_proj.weight", "score_weight", (P, RANK)),
    ("score_proj.bias", "score_bias", (1,)),
    ("out_proj.weight", "out_weight", (D, P)),
    ("out_proj.bias", "out_bias", (1,)),
    ("sqrt_lambda", "sqrt_lambda", (1, RANK)),
    ("sqrt_lambda", "sqrt_lambda", (2, 3 * RANK)),
]


@pytest.mark.parametrize("backend", ["reference", "cpu", "fused"])
def test_parameters_of_another_shape_are_refused(backend: str) -> None:
    device = backend_options(backend)["device"]

    def build(**keywords: Any) -> PrimalAttention:
        return PrimalAttention(D, 2, rank=RANK, landmarks=LANDMARKS, backend=backend, device=device, **keywords)

    x, layer = torch.randn(2, 9, D, device=device), build()
    for name, argument, shape in WRONG_PARAMETERS:
        with pytest.raises(ValueError, match=rf"^{argument} must have shape \("):
            torch.func.functional_call(layer, {name: torch.zeros(shape, device=device)}, (x,))
    for name, value in {"num_heads": 4, "landmarks": 400}.items():
        layer = build()
        setattr(layer, name, value)
        with pytest.raises(ValueError, match=r"^w_e must have shape \("):
            layer(x)
    layer = build(data_dependent=False, causal=True, decay="learned")
    with pytest.raises(ValueError, match=r"^decay must have shape \("):
        torch.func.functional_call(layer, {"decay_logit": torch.zeros(1, device=device)}, (x,))
