"""Bad input: one line that names the argument, what came, and what would work."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

from primal_attention import PrimalAttention
from primal_cases import EMBED, MAX_LENGTH, inputs, make


def one_line(error: pytest.ExceptionInfo[Exception], message: str) -> None:
    assert str(error.value) == message
    assert "\n" not in message


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
    (
        {"feature_map": "relu"},
        "feature_map must be one of 'cosine', 'softmax' (got 'relu')",
    ),
    (
        {"objective_form": "max"},
        "objective_form must be one of 'mean', 'sum' (got 'max')",
    ),
    (
        {"objective_trace": "none"},
        "objective_trace must be one of 'weights', 'projections' (got 'none')",
    ),
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
    ({"causal": "no"}, "causal must be True or False (got 'no')"),
    ({"decay": 1e-50, "data_dependent": False}, "decay underflows in float32 (got 1e-50): use at least 1.2e-38"),
    ({"backend": "lean"}, "backend='lean' is now called 'cpu'"),
    (
        {"decay": "fast", "causal": True, "data_dependent": False},
        "decay must be one of 'learned' (got 'fast')",
    ),
    (
        {"decay": 1.5, "causal": True, "data_dependent": False},
        "decay must lie in (0, 1] (got 1.5)",
    ),
    (
        {"decay": [0.5, 0.9], "causal": True, "data_dependent": False},
        "decay must be one number or num_heads=3 numbers (got [0.5, 0.9])",
    ),
    (
        {"causal": True},
        "max_length is required when causal and data_dependent: the landmark grid spans it",
    ),
    ({"causal": True, "max_length": 0}, "max_length must be at least 1 (got 0)"),
    (
        {"max_length": 64},
        "max_length=64 has a meaning only when causal and data_dependent are both True",
    ),
    (
        {"causal": True, "max_length": 8, "objective_trace": "projections"},
        "objective_trace='projections' needs one W_{e|X} per sequence: not in the causal data-dependent mode",
    ),
]


@pytest.mark.parametrize(("keywords", "message"), BAD_ARGUMENTS, ids=[message[:40] for _, message in BAD_ARGUMENTS])
def test_a_bad_argument_is_refused_at_construction(keywords: dict[str, Any], message: str) -> None:
    arguments = {"embed_dim": EMBED, "num_heads": 3, "rank": 4, "landmarks": 6, **keywords}
    with pytest.raises((ValueError, TypeError)) as error:
        PrimalAttention(**arguments)
    one_line(error, message)


def test_an_unknown_backend_is_refused_with_the_list_of_known_ones() -> None:
    with pytest.raises(ValueError, match=r"backend must be one of 'auto', 'reference'.* \(got 'cuda'\)"):
        make("plain", backend="cuda")


BOUNDARIES = torch.tensor([0, 4, 9], dtype=torch.int32)

BAD_CALLS: dict[str, tuple[tuple[Any, ...], dict[str, Any], str]] = {
    "width": (
        (torch.zeros(2, 5, 11, dtype=torch.float64),),
        {},
        "x must have shape (batch, tokens, embed_dim) with embed_dim=12 (got (2, 5, 11))",
    ),
    "dimensions": (
        (torch.zeros(5, 12, dtype=torch.float64),),
        {},
        "x must have shape (batch, tokens, embed_dim) with embed_dim=12 (got (5, 12))",
    ),
    "no tokens": ((torch.zeros(2, 0, 12, dtype=torch.float64),), {}, "x must hold at least one token (got 0)"),
    "mask dtype": (
        (inputs(2, 5), torch.ones(2, 5, dtype=torch.int64)),
        {},
        "key_padding_mask must be a bool tensor, True at padding (got torch.int64)",
    ),
    "mask numbers": (
        (inputs(2, 5), torch.ones(2, 5)),
        {},
        "key_padding_mask must be bool, or −inf at padding and 0 elsewhere (got other numbers)",
    ),
    "dtype": (
        (inputs(2, 5, dtype=torch.float32),),
        {},
        "x must have the dtype of the layer's parameters, torch.float64 (got torch.float32)",
    ),
    "mask shape": (
        (inputs(2, 5), torch.zeros(2, 4, dtype=torch.bool)),
        {},
        "key_padding_mask must have shape (2, 5), as x (got (2, 4))",
    ),
    "packed dimensions": (
        (inputs(1, 9),),
        {"cu_seqlens": BOUNDARIES},
        "x must have shape (total, embed_dim) with embed_dim=12 (got (1, 9, 12))",
    ),
    "mask and boundaries": (
        (inputs(9), torch.zeros(9, dtype=torch.bool)),
        {"cu_seqlens": BOUNDARIES},
        "key_padding_mask and cu_seqlens exclude each other: packed input has no padding",
    ),
    "boundaries start": (
        (inputs(9),),
        {"cu_seqlens": torch.tensor([1, 9], dtype=torch.int32)},
        "cu_seqlens must start at 0 (got 1)",
    ),
    "boundaries decrease": (
        (inputs(9),),
        {"cu_seqlens": torch.tensor([0, 5, 4, 9], dtype=torch.int32)},
        "cu_seqlens must not decrease (got 4 after 5)",
    ),
    "boundaries end": (
        (inputs(9),),
        {"cu_seqlens": torch.tensor([0, 5, 8], dtype=torch.int32)},
        "cu_seqlens must end at the number of tokens, 9 (got 8)",
    ),
    "boundaries dtype": (
        (inputs(9),),
        {"cu_seqlens": torch.tensor([0.0, 9.0])},
        "cu_seqlens must be a 1-D int32 tensor of at least two boundaries (got torch.float32, shape (2,))",
    ),
    "boundaries too few": (
        (inputs(9),),
        {"cu_seqlens": torch.tensor([0], dtype=torch.int32)},
        "cu_seqlens must be a 1-D int32 tensor of at least two boundaries (got torch.int32, shape (1,))",
    ),
    "longest too short": (
        (inputs(9),),
        {"cu_seqlens": BOUNDARIES, "max_seqlen": 4},
        "max_seqlen must be at least 5, the longest of cu_seqlens (got 4)",
    ),
    "longest without boundaries": (
        (inputs(2, 5),),
        {"max_seqlen": 5},
        "max_seqlen=5 has a meaning only with cu_seqlens",
    ),
    "state of a layer that does not stream": (
        (inputs(2, 5),),
        {"return_state": True},
        "state needs a causal layer (causal=False): only the causal modes stream",
    ),
}


@pytest.mark.parametrize("case", BAD_CALLS)
def test_a_bad_call_is_refused(case: str) -> None:
    args, keywords, message = BAD_CALLS[case]
    with pytest.raises((ValueError, TypeError)) as error:
        make("data_dependent")(*args, **keywords)
    one_line(error, message)


def test_good_boundaries_are_looked_at_once_but_not_after_a_change() -> None:
    layer = make("data_dependent")
    x, cu_seqlens = inputs(9), BOUNDARIES.clone()
    layer(x, cu_seqlens=cu_seqlens)
    layer(x, cu_seqlens=cu_seqlens)
    cu_seqlens[1] = 10
    with pytest.raises(ValueError, match="cu_seqlens must not decrease"):
        layer(x, cu_seqlens=cu_seqlens)


def test_streaming_needs_a_causal_layer() -> None:
    layer = make("data_dependent")
    state = make("causal").initial_state(2)
    with pytest.raises(ValueError, match="step needs a causal layer"):
        layer.step(inputs(2), state)
    with pytest.raises(ValueError, match="initial_state needs a causal layer"):
        layer.initial_state(2)
    with pytest.raises(ValueError, match="state needs a causal layer"):
        layer(inputs(2, 3), state=state)


def test_a_step_takes_one_token_of_the_right_width() -> None:
    layer = make("causal")
    with pytest.raises(ValueError, match=r"x_t must have shape \(batch, 12\) \(got \(2, 1, 12\)\)"):
        layer.step(inputs(2, 1), layer.initial_state(2))


def test_a_state_of_another_mode_or_batch_is_refused() -> None:
    layer = make("causal")
    with pytest.raises(TypeError, match=r"state must be a RunningState, .* \(got LandmarkState\)"):
        layer.step(inputs(2), make("causal_data_dependent").initial_state(2))
    with pytest.raises(ValueError, match=r"state must hold as many sequences as x, 2 \(got 3\)"):
        layer.step(inputs(2), layer.initial_state(3))


def test_state_and_packing_exclude_each_other() -> None:
    with pytest.raises(ValueError, match="state and cu_seqlens exclude each other"):
        make("causal")(inputs(9), cu_seqlens=BOUNDARIES, return_state=True)


class TestMaxLength:
    message = f"max_length={MAX_LENGTH} is exceeded by a sequence of {MAX_LENGTH + 1} tokens"
    layer = staticmethod(lambda: make("causal_data_dependent"))

    def test_a_longer_sequence_is_refused(self) -> None:
        with pytest.raises(ValueError, match=self.message):
            self.layer()(inputs(2, MAX_LENGTH + 1))

    def test_padding_does_not_count(self) -> None:
        mask = torch.zeros(2, MAX_LENGTH + 1, dtype=torch.bool)
        mask[:, 3] = True
        self.layer()(inputs(2, MAX_LENGTH + 1), mask)
        mask[1, 3] = False
        with pytest.raises(ValueError, match=self.message):
            self.layer()(inputs(2, MAX_LENGTH + 1), mask)

    def test_packed_sequences_count_one_by_one(self) -> None:
        lengths = torch.tensor([0, MAX_LENGTH, 2 * MAX_LENGTH], dtype=torch.int32)
        self.layer()(inputs(2 * MAX_LENGTH), cu_seqlens=lengths)
        with pytest.raises(ValueError, match=self.message):
            self.layer()(inputs(2 * MAX_LENGTH + 1), cu_seqlens=torch.tensor([0, MAX_LENGTH, 2 * MAX_LENGTH + 1]))

    def test_the_kernel_matrix_keeps_to_it(self) -> None:
        with pytest.raises(ValueError, match=self.message):
            self.layer().kernel_matrix(inputs(1, MAX_LENGTH + 1))


def test_a_feature_map_that_changes_the_width_is_refused() -> None:
    layer = make("plain", feature_map=lambda z: torch.cat([z, -z], -1))
    with pytest.raises(ValueError, match="feature_map must keep the head width 4"):
        layer(inputs(1, 3))


@pytest.mark.parametrize(
    ("keywords", "independent", "source"),
    [
        ({"rank": 10, "landmarks": 50}, 4, "head width 4, landmarks 50"),
        ({"rank": 4, "landmarks": 3}, 3, "head width 4, landmarks 3"),
        ({"rank": 5, "data_dependent": False}, 4, "head width 4"),
    ],
)
def test_a_rank_beyond_the_independent_directions_warns_once(
    keywords: dict[str, Any], independent: int, source: str
) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        layer = PrimalAttention(EMBED, 3, **keywords)
        layer(torch.randn(1, 5, EMBED))
    assert [str(w.message) for w in caught] == [
        f"rank={keywords['rank']} is above what the layer can keep independent: "
        f"{independent} directions at most ({source})"
    ]
    assert caught[0].filename == __file__


def test_a_rank_within_the_independent_directions_does_not_warn() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        PrimalAttention(EMBED, 3, rank=4, landmarks=4)
