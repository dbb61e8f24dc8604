"""Batches: an order that follows from seed and epoch, epochs of steps, shares of ranks."""

import torch

from primal_attention.train.task import Batches, derive_seed


def epochs(batches: Batches, count: int) -> list[list[int]]:
    found = []
    for epoch in range(count):
        batches.epoch = epoch
        found += [rows.tolist() for (rows,) in batches]
    return found


def test_the_order_depends_on_seed_and_epoch_alone():
    batches = Batches([torch.arange(10)], 4, shuffle_seed=3)
    first, second = epochs(batches, 1), epochs(batches, 2)
    assert second[:3] == first
    assert second[3:] != first
    assert sorted(row for batch in first for row in batch) == list(range(10))
    assert [len(batch) for batch in first] == [4, 4, 2], "one pass with its rest"


def test_ranks_share_every_batch_between_them():
    shares = []
    for rank in range(2):
        batches = Batches([torch.arange(11)], 4, shuffle_seed=0)
        batches.rank, batches.world = rank, 2
        shares.append([b[0].tolist() for b in batches])
    assert all(a for a in shares[0] + shares[1])
    assert sorted({x for share in shares for batch in share for x in batch}) == list(range(11))
    assert len(shares[0]) == len(shares[1]) == 3


def test_an_epoch_of_steps_goes_on_where_the_last_one_ended():
    short = Batches([torch.arange(10)], 3, shuffle_seed=0, steps=2)
    long = Batches([torch.arange(10)], 3, shuffle_seed=0, steps=6)
    assert len(short) == 2
    assert epochs(short, 3) == epochs(long, 1)


def test_every_sample_comes_once_per_pass_and_batches_are_whole():
    batches = epochs(Batches([torch.arange(12)], 4, shuffle_seed=1, steps=3), 2)
    assert all(len(batch) == 4 for batch in batches)
    for turn in (batches[:3], batches[3:]):
        assert sorted(row for batch in turn for row in batch) == list(range(12))
    assert batches[:3] != batches[3:]
    few = Batches([torch.arange(5)], 8, shuffle_seed=0, steps=3)
    assert [len(batch) for batch in epochs(few, 1)] == [5, 5, 5], "a batch larger than the set takes the set"


def test_batches_gathered_at_once_are_the_same():
    plain, grouped = (Batches([torch.arange(22), torch.arange(22) * 2], 4, shuffle_seed=1) for _ in range(2))
    grouped.group = 4
    assert len(grouped) == len(plain) == 6
    for a, b in zip(plain, grouped, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def test_seeds_give_unrelated_streams():
    assert len({derive_seed("epoch", s, e) for s in range(20) for e in range(20)}) == 400
