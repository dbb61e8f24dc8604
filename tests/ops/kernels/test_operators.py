"""Every kernel is a well-behaved operator: schema, shapes without data, gradients, dynamic shapes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from primal_attention.ops.fused import cast, score_operators, wide
from primal_attention.ops.fused import operators as ops
from primal_attention.ops.fused.operator import Operator
from primal_attention.ops.kernels import sequences

ROWS, HEADS, P, RANK, STORED, LANDMARKS = 10, 2, 16, 5, 8, 3
WIDTH = HEADS * P


class Inputs:
    """Small arguments, on one device, of two sequences of four and six tokens."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.seqs = sequences.packed(torch.tensor([0, 4, 10], device=device), ROWS)
        self.tables, self.rows = list(self.seqs[:-1]), sequences.landmark_table(self.seqs, LANDMARKS)
        self.grid = torch.tensor([0, 2, 4], device=device)
        self.growing_rows = torch.where(
            self.grid < self.seqs.lengths[:, None], self.seqs.starts[:, None] + self.grid, -1
        )
        self.decay = torch.tensor([-0.1, -0.5], device=device)

    def draw(self, *shape: int, grad: bool = True) -> Tensor:
        return torch.randn(*shape, device=self.device, requires_grad=grad)

    def weights(self, rows: int, grad: bool = True) -> tuple[Tensor, Tensor]:
        return self.draw(HEADS, rows, RANK, grad=grad), self.draw(HEADS, rows, RANK, grad=grad)

    def wx(self, batch: int, grad: bool = True) -> Tensor:
        return self.draw(batch, HEADS, 2, P, STORED, grad=grad)

    def side(self, grad: bool = True) -> Tensor:
        """wx of one side."""
        return self.draw(2, HEADS, 1, P, STORED, grad=grad)

    def scores(self, grad: bool = True) -> Tensor:
        return self.draw(ROWS, HEADS, 2, STORED, grad=grad)

    def energy(self, grad: bool = True) -> Tensor:
        return self.draw(2, HEADS, 2, STORED, grad=grad)

    def qk(self, grad: bool = True) -> Tensor:
        return self.draw(ROWS, 2 * WIDTH, grad=grad)


def project(i: Inputs) -> tuple[Any, ...]:
    given = i.draw(ROWS, WIDTH), i.draw(2 * WIDTH, WIDTH), i.draw(2 * WIDTH, grad=False)
    return *given, *i.weights(LANDMARKS), i.rows, True, 0, True


def project_backward(i: Inputs) -> tuple[Any, ...]:
    x, weight, _, w_e, w_r, rows = (t.detach() for t in project(i)[:-3])
    return x, weight, w_e, w_r, rows, i.qk(False), i.side(False), i.side(False), i.draw(HEADS, grad=False), 0


def origin(i: Inputs) -> list[Tensor]:
    """What wx is rebuilt from."""
    x, _, _, w_e, w_r, rows = (t.detach() for t in project(i)[:-3])
    return [x, rows, w_e, w_r]


def score(i: Inputs) -> tuple[Any, ...]:
    return i.qk(), i.wx(2), i.draw(2 * WIDTH), origin(i), i.tables, False, RANK, True


def score_backward(i: Inputs) -> tuple[Any, ...]:
    return i.qk(False), [i.wx(1, False)], i.scores(False), i.energy(False), i.tables, False, RANK, True, True


def running_score(i: Inputs) -> tuple[Any, ...]:
    return i.qk(), i.wx(1), i.draw(2 * WIDTH), i.decay.clone().requires_grad_(), None, i.tables, False, RANK, True


def running_score_backward(i: Inputs) -> tuple[Any, ...]:
    carries = i.draw(i.tables[4].shape[0], HEADS, 2, P, grad=False)
    given = (i.qk(False), i.wx(1, False), i.decay, carries, i.scores(False), i.energy(False))
    return *given, i.tables, False, RANK, True


def growing_score(i: Inputs) -> tuple[Any, ...]:
    given = (i.draw(ROWS, WIDTH), i.draw(2 * WIDTH, WIDTH), i.draw(2 * WIDTH), *i.weights(LANDMARKS))
    return *given, i.decay.clone().requires_grad_(), i.growing_rows, i.grid, i.tables, False, True


def growing_score_backward(i: Inputs) -> tuple[Any, ...]:
    x, weight, _, w_e, w_r, decay, rows, grid, *rest = growing_score(i)
    saved = (x.detach(), weight.detach(), w_e.detach(), w_r.detach(), decay.detach(), rows, grid)
    return *saved, i.qk(False), i.scores(False), i.scores(False), i.energy(False), *rest


def decode(i: Inputs) -> tuple[Any, ...]:
    """A state of three sequences; there is no way back."""
    sums = (i.draw(3, HEADS, P, grad=False), i.draw(3, HEADS, P, grad=False), i.draw(3, HEADS, grad=False))
    return i.draw(3, 2 * WIDTH, grad=False), *sums, *i.weights(P, False), i.decay


def combine(i: Inputs) -> tuple[Any, ...]:
    return i.scores(), i.draw(P, 2 * RANK), i.draw(P), i.draw(WIDTH, WIDTH), i.draw(WIDTH)


def combine_backward(i: Inputs) -> tuple[Any, ...]:
    scores, *maps = (t.detach() for t in combine(i))
    return i.draw(ROWS, WIDTH, grad=False), scores, *maps[:3]


def mix(i: Inputs) -> tuple[Any, ...]:
    maps = i.draw(P, 2 * RANK), i.draw(P, grad=False), i.draw(2 * WIDTH)
    return i.qk(), i.side(), i.side(), *maps, origin(i), True, i.tables, False, True, True


def mix_backward(i: Inputs) -> tuple[Any, ...]:
    grads = i.draw(P, 2 * RANK, grad=False), i.draw(ROWS, WIDTH, grad=False), i.energy(False)
    return i.qk(False), [*origin(i), i.side(False)], *grads, i.tables, False, True, True


def running_mix(i: Inputs) -> tuple[Any, ...]:
    maps = i.draw(P, 2 * RANK), i.draw(P, grad=False), i.draw(2 * WIDTH)
    return i.qk(), i.wx(1), *maps, i.decay.clone().requires_grad_(), None, i.tables, False, True, True


def running_mix_backward(i: Inputs) -> tuple[Any, ...]:
    carries = i.draw(i.tables[4].shape[0], HEADS, 2, P, grad=False)
    given = (i.qk(False), i.wx(1, False), i.draw(P, 2 * RANK, grad=False), i.decay, carries)
    return *given, i.draw(ROWS, WIDTH, grad=False), i.energy(False), i.tables, False, True


def measure(i: Inputs) -> tuple[Any, ...]:
    return i.energy(), i.draw(HEADS, RANK), i.draw(HEADS), i.seqs.lengths, 0, False


def measure_backward(i: Inputs) -> tuple[Any, ...]:
    return i.draw(2, grad=False), i.energy(False), i.draw(HEADS, RANK, grad=False), i.seqs.lengths, 0, False


def mask(i: Inputs) -> Tensor:
    return torch.tensor([[True, False, True, True], [False, True, False, False]], device=i.device)


def move(i: Inputs) -> tuple[Any, ...]:
    source, place, *_ = ops.COMPACT.run(mask(i))
    return i.draw(2, 4, WIDTH), source, place


# The name of an operator → small arguments for it.
ARGUMENTS: dict[str, Callable[[Inputs], tuple[Any, ...]]] = {
    "CAST": lambda i: ([i.draw(ROWS), i.draw(P, WIDTH)], torch.float16),
    "COMPACT": lambda i: (mask(i),),
    "MOVE": move,
    "PROJECT": project,
    "PROJECT_BACKWARD": project_backward,
    "PACK": lambda i: i.weights(P),
    "PACK_BACKWARD": lambda i: (i.wx(1, False), *i.weights(P, False), i.draw(HEADS, grad=False)),
    "SCORE": score,
    "SCORE_BACKWARD": score_backward,
    "RUNNING_SCORE": running_score,
    "RUNNING_SCORE_BACKWARD": running_score_backward,
    "GROWING_SCORE": growing_score,
    "GROWING_SCORE_BACKWARD": growing_score_backward,
    "DECODE": decode,
    "COMBINE": combine,
    "COMBINE_BACKWARD": combine_backward,
    "MIX": mix,
    "MIX_BACKWARD": mix_backward,
    "RUNNING_MIX": running_mix,
    "RUNNING_MIX_BACKWARD": running_mix_backward,
    "OUTPUT": lambda i: (i.draw(ROWS, WIDTH), i.draw(P), i.draw(WIDTH, WIDTH), i.draw(WIDTH)),
    "MEASURE": measure,
    "MEASURE_BACKWARD": measure_backward,
}


MODULES = (cast, ops, score_operators, wide)
OPERATORS = {name: one for module in MODULES for name, one in vars(module).items() if isinstance(one, Operator)}


def test_every_operator_is_checked() -> None:
    assert OPERATORS.keys() == ARGUMENTS.keys()


@pytest.mark.parametrize("name", ARGUMENTS)
def test_an_operator_passes_the_checks_of_torch(device: torch.device, name: str) -> None:
    from primal_attention.ops import fused  # noqa: F401  (registers the gradients)

    arguments = ARGUMENTS[name](Inputs(device))
    torch.library.opcheck(OPERATORS[name].registered, arguments, atol=1e-5, rtol=1e-5)
