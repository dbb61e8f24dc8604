"""distill with recorded steps: the numbers of plain steps, whatever the batch shapes; and what is not recorded runs.

Without a GPU there is no graph to record: there a replay does the recorded work again on the recording's inputs.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

from convert.test_torch_and_timm import encoder
from primal_attention import distill, primalize
from primal_attention.utils import cuda_graph as recording

pytest.importorskip("lightning")
GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
STAGES = {"start_batches": 0, "block_steps": 12, "end_steps": 24, "lr": 1e-2, "end_lr": 3e-3, "progress": False}


class Again:
    """A graph without a GPU. As a graph's, the work runs in replays, not while it is recorded."""

    made = 0

    def __init__(self, work: Callable[[], Any], stream: Any, pool: Any = None) -> None:
        Again.made += 1
        self.replay = work


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    Again.made = 0
    monkeypatch.setattr(recording, "recordable", lambda device: True)
    monkeypatch.setattr(recording, "capture", Again)


def batches(form: str) -> list[Any]:
    torch.manual_seed(1)
    found = [torch.randn(4, tokens, 32) for tokens in (9, 9, 7, 9, 7)]
    return {"tensor": found, "tuple": [(x,) for x in found], "dict": [{"src": x} for x in found]}[form]


def both(student, teacher, data, **changes) -> tuple[Any, Any]:
    """The same distillation without recordings and with them."""
    plain = distill(copy.deepcopy(student), teacher, data, graph=False, **(STAGES | changes))
    return plain, distill(student, teacher, data, **(STAGES | changes))


@pytest.mark.parametrize("form", ["tensor", "tuple", "dict"])
@pytest.mark.usefixtures("recorded")
def test_a_replay_is_a_step(form) -> None:
    teacher = encoder(2)
    student = primalize(teacher, copy=True, rank=5, landmarks=6, dropout=0.0).model
    plain, replayed = both(student, teacher, batches(form), train="all", ksvd=0.1)
    assert Again.made == 4, "two shapes in each of two stages"
    assert replayed.block_errors == plain.block_errors
    assert replayed.end_errors == plain.end_errors
    assert replayed.end_errors[-1] < replayed.end_errors[0]
    for a, b in zip(replayed.model.parameters(), plain.model.parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.usefixtures("recorded")
def test_transformers_and_half_precision_are_recorded() -> None:
    pytest.importorskip("transformers", minversion="5")
    from convert.hf_models import make

    teacher = make("bert")
    student = primalize(teacher, "all", copy=True, rank=5, landmarks=6, dropout=0.0).model
    data = [{"input_ids": torch.randint(2, 48, (4, 9))} for _ in range(3)]
    plain, replayed = both(student, teacher, data, precision="bf16-mixed")
    assert Again.made == 2
    assert replayed.block_errors + replayed.end_errors == plain.block_errors + plain.end_errors


def test_what_is_recorded_of_an_encoder_has_no_mask_where_none_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers", minversion="5")
    from transformers import masking_utils

    from convert.hf_models import make

    seen: list[tuple[Any, Any, Any]] = []
    x, padding = torch.randn(2, 5, 32), torch.tensor([[1, 1, 1, 1, 0], [1, 1, 1, 1, 1]])

    def masks() -> tuple[Any, Any, Any]:
        encoder = masking_utils.create_bidirectional_mask
        decoder = masking_utils.create_causal_mask(teacher.config, x, None, past_key_values=None)
        return encoder(teacher.config, x, None), encoder(teacher.config, x, padding), decoder

    class Looks(Again):
        def __init__(self, work: Callable[[], Any], stream: Any, pool: Any = None) -> None:
            super().__init__(work, stream, pool)
            seen.append(masks())

    teacher = make("bert")
    student = primalize(teacher, copy=True, rank=5, landmarks=6, dropout=0.0).model
    monkeypatch.setattr(recording, "recordable", lambda device: True)
    monkeypatch.setattr(recording, "capture", Looks)
    # What a recording is to transformers 5.17: a trace, in which no mask is left out.
    for name in ("_ignore_bidirectional_mask_sdpa", "_ignore_causal_mask_sdpa"):
        monkeypatch.setattr(masking_utils, name, lambda *args: False)
    distill(student, teacher, [{"input_ids": torch.randint(2, 48, (4, 9))}], **(STAGES | {"block_steps": 0}))
    [(none, padded, causal)] = seen
    assert none is None
    written, usual, order = masks()
    assert written is not None, "as before, afterwards"
    assert torch.equal(padded, usual)
    assert torch.equal(causal, order)


@pytest.mark.usefixtures("recorded")
def test_shapes_that_never_come_again_are_not_recorded() -> None:
    teacher = encoder(2)
    student = primalize(teacher, copy=True, rank=5, landmarks=6, dropout=0.0).model
    data = [torch.randn(4, tokens, 32) for tokens in range(5, 41)]
    distill(student, teacher, data, **STAGES)
    assert Again.made == 0


@pytest.mark.usefixtures("recorded")
def test_what_cannot_be_recorded_runs_as_usual_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(work: Callable[[], Any], stream: Any, pool: Any = None) -> Any:
        raise RuntimeError("operation not permitted when stream is capturing\nmore of it")

    monkeypatch.setattr(recording, "capture", fail)
    teacher = encoder(2)
    student = primalize(teacher, copy=True, rank=5, landmarks=6, dropout=0.0).model
    with pytest.warns(UserWarning, match="steps run without a CUDA graph: operation not permitted .* capturing$"):
        plain, unrecorded = both(student, teacher, batches("tensor"), block_steps=0)
    assert unrecorded.end_errors == plain.end_errors


@pytest.mark.parametrize("marked", [pytest.param(None, marks=GPU)], ids=["gpu"])
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_on_a_gpu_recorded_steps_give_the_numbers_of_plain_ones(precision, marked) -> None:
    pytest.importorskip("transformers", minversion="5")
    import warnings

    from convert.hf_models import make

    teacher = make("bert").cuda()
    student = primalize(teacher, "all", copy=True, rank=5, landmarks=6, dropout=0.0).model
    data = [{"input_ids": torch.randint(2, 48, (4, tokens))} for tokens in (9, 9, 7)]
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="steps run without a CUDA graph.*")
        plain, replayed = both(student, teacher, data, precision=precision, train="all")
    # The same kernels, sums in another order; in bfloat16 a rounding that tips over costs 2⁻⁸ of an activation.
    tolerance = 1e-3 if precision == "32-true" else 3e-2
    assert replayed.block_errors == pytest.approx(plain.block_errors, rel=tolerance)
    assert replayed.end_errors == pytest.approx(plain.end_errors, rel=tolerance)
