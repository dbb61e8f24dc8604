"""Padded and packed input on the kernels equals the equations, with NaN at padding and in unwritten memory."""

from __future__ import annotations

import pytest
import torch

from kernel_cases import MODES, assert_as_truth, make, tokens
from primal_attention.ops.triton import causal_sum
from primal_cases import padding_mask

pytestmark = pytest.mark.usefixtures("unwritten_memory_is_nan", "short_chunks")

# A fixed decay takes the kernels of a learned one; tests of sizes compare it.
LAYOUT_MODES = [mode for mode in MODES if mode != "fixed_decay"]
PLACES = [(mode, "gaps") for mode in LAYOUT_MODES]
SIDES = ("data_dependent", "learned_decay", "causal_landmarks")
if torch.cuda.is_available():  # the interpreter is slow, and gaps may be on both sides
    PLACES += [(mode, where) for mode in SIDES for where in ("right", "left")]


@pytest.mark.parametrize(("mode", "where"), PLACES)
def test_padded_input_matches_and_values_at_padding_are_not_read(device: torch.device, mode: str, where: str) -> None:
    """Sequences of two chunks, without tokens, and with fewer tokens than landmarks."""
    layer = make(mode, heads=1).to(device)
    mask = padding_mask([70, 0, 5], 75, where).to(device)
    x = tokens(layer, *mask.shape)
    x[mask] = float("nan")
    outputs = assert_as_truth(layer, x, mask)
    for name in ("y", "gradient of x"):
        assert not outputs[name][mask].any(), name
    for name in ("e", "r"):
        assert not outputs[name].transpose(1, 2)[mask].any(), name


@pytest.mark.parametrize("mode", ["causal", "learned_decay"])
def test_sequences_of_one_chunk_need_no_scan_over_chunks(
    monkeypatch: pytest.MonkeyPatch, device: torch.device, mode: str
) -> None:
    """Left padding as in reinforcement learning; one of the sequences is empty."""
    for kernel in ("_chunk_sums_kernel", "_carries_kernel"):
        monkeypatch.setattr(causal_sum, kernel, None)
    layer = make(mode, rank=24).to(device)
    mask = padding_mask([60, 0, 5, 33], 60, "left").to(device)
    x = tokens(layer, *mask.shape)
    x[mask] = float("nan")
    assert_as_truth(layer, x, mask, scored=False)


@pytest.mark.parametrize("mode", LAYOUT_MODES)
def test_packed_input_matches(device: torch.device, mode: str) -> None:
    """Empty sequences at both ends and in between, one of exactly a chunk, one of several."""
    layer = make(mode, heads=1).to(device)
    cu_seqlens = torch.tensor([0, 0, 70, 70, 134, 139, 139], dtype=torch.int32, device=device)
    assert_as_truth(layer, tokens(layer, 139), cu_seqlens=cu_seqlens)
