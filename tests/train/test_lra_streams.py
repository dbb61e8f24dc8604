"""Batches of token sequences: the same cases whether held or streamed, padding cut off, kinds by length."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from primal_attention.train import lra as streams
from primal_attention.train.batches import Batches
from primal_attention.train.lra import TokenBatches, kinds_of, lengths_of

FULL = 640


def padded(cases: int = 200) -> torch.Tensor:
    rng = np.random.default_rng(0)
    tokens = rng.integers(1, 20, (cases, FULL)).astype(np.uint8)
    tokens[np.arange(FULL) >= rng.integers(5, FULL, (cases, 1))] = 0
    return torch.from_numpy(tokens)


def by_kind(batch_size: int = 8, seed: int | None = 3, steps: int = 6, kinds: int = 4) -> TokenBatches:
    tokens = padded()
    lengths = lengths_of(tokens.numpy())
    widths = kinds_of(lengths, FULL, kinds, batch_size) if seed is not None else ()
    return TokenBatches([tokens, torch.arange(200)], batch_size, seed, steps, lengths=lengths, widths=widths)


def test_lengths_end_at_the_last_token():
    tokens = np.array([[1, 2, 0, 0], [0, 3, 0, 0], [1, 2, 3, 4], [0, 0, 0, 0]], dtype=np.uint8)
    assert lengths_of(tokens, at_once=3).tolist() == [2, 2, 4, 4]


def test_kinds_halve_what_is_left():
    lengths = torch.arange(1, 1025)
    assert kinds_of(lengths, 1024, 4, 8) == [512, 768, 896, 1024]
    assert kinds_of(lengths, 1024, 1, 8) == [1024]
    assert kinds_of(torch.full((100,), 7), 100, 4, 8) == [100], "one kind where all are alike"
    assert kinds_of(torch.arange(1, 11), 10, 4, 8) == [10], "no kind that cannot fill a batch"


def test_a_kinds_batches_have_one_width_and_lose_no_token():
    batches, whole = by_kind(), padded()
    seen, shapes = [], set()
    for epoch in range(4):
        batches.set_epoch(epoch)
        for tokens, cases in batches:
            shapes.add(tuple(tokens.shape))
            assert torch.equal(torch.nn.functional.pad(tokens, (0, FULL - tokens.shape[1])), whole[cases])
            seen += cases.tolist()
    per_pass = sum(len(m) // 8 * 8 for m in batches.members)
    assert len(set(seen[:per_pass])) == len(seen[:per_pass]), "no case twice in a pass"
    assert len(shapes) == len(batches.widths) > 2


def test_epochs_of_kinds_go_on_where_the_last_one_ended():
    short, long = by_kind(steps=3), by_kind(steps=9)
    found = []
    for epoch in range(3):
        short.set_epoch(epoch)
        found += [cases.tolist() for _, cases in short]
    assert found == [cases.tolist() for _, cases in long]


def test_cases_that_do_not_fill_a_batch_are_one_together():
    batches = by_kind(batch_size=300, steps=2)
    assert batches.widths == [FULL]
    seen = [cases for _, cases in batches]
    assert [sorted(cases.tolist()) for cases in seen] == 2 * [list(range(200))]
    assert not torch.equal(*seen), "each pass has its own order"


def test_grouped_batches_are_the_same_ones():
    one, many = by_kind(), by_kind()
    many.group = 4
    together = [batch for group in many for batch in group]
    for a, b in zip(one, together, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def test_an_evaluation_takes_every_case_once_in_batches_of_so_many_tokens():
    batches = by_kind(seed=None, steps=0)
    seen = []
    for tokens, cases in batches:
        assert tokens.numel() <= 8 * FULL
        assert (tokens != 0).sum(dim=1).max() > tokens.shape[1] - streams.MULTIPLE
        seen += cases.tolist()
    assert sorted(seen) == list(range(200))


def test_without_lengths_the_batches_are_the_plain_ones(tmp_path):
    np.save(tmp_path / "a.npy", np.arange(40, dtype=np.uint8).reshape(20, 2))
    tensors = [torch.from_numpy(np.load(tmp_path / "a.npy", mmap_mode="c")), torch.arange(20)]
    plain, ours = (kind(tensors, 6, 3) for kind in (Batches, TokenBatches))
    ours.to(torch.device("cpu"))
    for a, b in zip(plain, ours, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def test_the_thread_ahead_gives_every_batch_once_and_may_be_left_early(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(streams, "RESIDENT", 0)
    streamed = by_kind().to(torch.device("meta"))
    assert streamed.held is None
    assert [tuple(t.shape) for t, _ in streamed] == [tuple(t.shape) for t, _ in by_kind()]
    assert next(iter(streamed))[0].device.type == "meta"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("resident", [0, streams.RESIDENT])
def test_batches_reach_the_device(resident, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(streams, "RESIDENT", resident)
    for a, b in zip(by_kind(), by_kind().to(torch.device("cuda")), strict=True):
        assert b[0].device.type == "cuda"
        assert all(torch.equal(x, y.cpu()) for x, y in zip(a, b, strict=True))
