"""distill: errors fall, only what was asked for moves, and everything else is left as it was."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
from torch import nn

from convert.test_torch_and_timm import Block, encoder
from primal_attention import distill, primalize
from primal_attention.convert.errors import relative_error
from primal_attention.convert.fitting import NEW, rate

pytest.importorskip("lightning")
SMALL = {"rank": 5, "landmarks": 6}
SHORT = {"start_batches": 0, "block_steps": 40, "end_steps": 40, "lr": 1e-2, "end_lr": 3e-3, "progress": False}


def text_batches(count: int = 4) -> list[dict[str, torch.Tensor]]:
    batches = []
    for _ in range(count):
        mask = torch.ones(4, 9, dtype=torch.long)
        mask[1, 6:] = 0
        batches.append({"input_ids": torch.randint(2, 48, (4, 9)), "attention_mask": mask})
    return batches


@pytest.mark.parametrize("kind", ["bert", "gpt2", "llama", "vit"])
def test_errors_fall_in_both_stages(kind) -> None:
    pytest.importorskip("transformers", minversion="5")
    from convert.hf_models import inputs, make

    teacher = make(kind)
    student = primalize(teacher, "all", copy=True, **SMALL).model
    data = [inputs(kind) for _ in range(3)] if kind == "vit" else text_batches(3)
    before = {name: p.clone() for name, p in teacher.named_parameters()}
    result = distill(student, teacher, data, **SHORT)
    assert result.model is student
    assert len(result.block_errors) == len(result.end_errors) == 40
    assert sum(result.block_errors[-5:]) < 0.8 * sum(result.block_errors[:5])
    assert sum(result.end_errors[-5:]) < sum(result.end_errors[:5])
    assert all(torch.equal(p, before[name]) for name, p in teacher.named_parameters())


@pytest.mark.parametrize("batch_first", [True, False])
def test_torch_layers_learn_too(batch_first) -> None:
    teacher = encoder(2, batch_first=batch_first)
    student = primalize(teacher, copy=True, **SMALL).model
    result = distill(student, teacher, [torch.randn(4, 9, 32) for _ in range(3)], **SHORT)
    assert sum(result.block_errors[-5:]) < 0.8 * sum(result.block_errors[:5])


def test_the_error_of_a_timm_layer_and_the_ksvd_objective() -> None:
    teacher = nn.Sequential(Block(), Block())
    student = primalize(teacher, "all", copy=True, **SMALL).model
    result = distill(student, teacher, [torch.randn(4, 9, 32) for _ in range(3)], ksvd=0.1, **SHORT)
    assert result.block_errors[-1] < result.block_errors[0]


@pytest.mark.parametrize(("train", "moved"), [("layers", "self_attn"), ("blocks", "layers.1."), ("all", "layers.")])
def test_only_what_was_asked_for_moves(train, moved) -> None:
    teacher = encoder(2).train()
    student = primalize(teacher, copy=True, **SMALL).model
    student.layers[1].linear1.weight.requires_grad_(False)
    before = {name: p.clone() for name, p in student.named_parameters()}
    settings = SHORT | {"block_steps": 0, "end_steps": 3}
    distill(student, teacher, [torch.randn(4, 9, 32)], train=train, **settings)
    changed = {name for name, p in student.named_parameters() if not torch.equal(p, before[name])}
    assert changed
    assert all(moved in name for name in changed)
    assert any("layers.0." in name for name in changed) == (train == "all")
    assert "layers.1.linear1.weight" not in changed
    assert student.training
    assert teacher.training
    frozen = [name for name, p in student.named_parameters() if not p.requires_grad]
    assert frozen == ["layers.1.linear1.weight"]
    assert all(p.requires_grad for p in teacher.parameters())


def test_weights_trained_before_learn_at_the_rate_of_their_name() -> None:
    """Adam's first step is its rate, whatever the gradient's size."""
    teacher = encoder(2)
    student = primalize(teacher, copy=True, **SMALL).model
    before = {name: p.detach().clone() for name, p in student.named_parameters()}
    rates = {"layers.0.linear1.weight": 0.25, "layers.1.linear1.weight": 0.5}
    settings = SHORT | {"block_steps": 0, "end_steps": 1, "end_lr": 1e-2}
    distill(
        student, teacher, [torch.randn(4, 9, 32)], train="all", kept_rate=lambda name: rates.get(name, 0), **settings
    )
    moved = {name: (p.detach() - before[name]).abs() for name, p in student.named_parameters()}
    kept = {name for name, change in moved.items() if change.any() and not any(part in name for part in NEW)}
    assert kept == set(rates)
    for name, part in rates.items():
        assert float(moved[name].median()) == pytest.approx(part * 1e-2, rel=1e-3)


def test_match_says_what_is_compared() -> None:
    teacher = encoder(2)
    student = primalize(teacher, copy=True, **SMALL).model
    seen = []

    def pooled(output, batch):
        seen.append(batch.shape)
        return output.mean(1)

    distill(student, teacher, [torch.randn(4, 9, 32)], match=pooled, **(SHORT | {"end_steps": 2}))
    assert seen == [(4, 9, 32)] * 4


def test_several_tensors_can_be_compared() -> None:
    teacher = encoder(2)
    student = primalize(teacher, copy=True, **SMALL).model
    both = SHORT | {"block_steps": 0}
    result = distill(student, teacher, [torch.randn(4, 9, 32)], match=lambda out, _: (out, out.mean(1)), **both)
    assert result.end_errors[-1] < 0.7 * result.end_errors[0]


@pytest.mark.parametrize(("precision", "around"), [("bf16-mixed", False), ("32-true", True)])
def test_half_precision_learns_as_well(precision, around) -> None:
    """A caller's autocast holds on to the weights it has cast; each step must see those of the step before."""
    teacher = encoder(2)
    student = primalize(teacher, copy=True, **SMALL).model
    data = [torch.randn(4, 9, 32) for _ in range(3)]
    only_end = SHORT | {"block_steps": 0, "train": "all"}
    exact = distill(copy.deepcopy(student), teacher, data, **only_end).end_errors
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=around):
        half = distill(student, teacher, data, precision=precision, **only_end).end_errors
    assert half != exact
    assert half == pytest.approx(exact, rel=0.05)
    assert student.layers[1].self_attn.primal.w_e.dtype == torch.float32


def test_the_rate_rises_and_falls_to_nothing() -> None:
    rates = [rate(step, 50) for step in range(50)]
    assert rates[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    assert all(a > b > 0 for a, b in itertools.pairwise(rates[4:]))
    assert rates[-1] < 0.01


def test_weights_are_kept_when_the_error_is_not_finite() -> None:
    teacher = encoder(2)
    student = primalize(teacher, copy=True, **SMALL).model
    before = {name: p.clone() for name, p in student.named_parameters()}
    data = [torch.randn(4, 9, 32)] * 24 + [torch.full((4, 9, 32), torch.nan)] * 20
    with pytest.raises(ValueError, match="no longer a finite number at step 25 block by block: lower lr"):
        distill(student, teacher, data, **SHORT)
    assert all(torch.equal(p, before[name]) for name, p in student.named_parameters())


def test_relative_error_counts_valid_tokens_and_their_means() -> None:
    target, padding = torch.randn(3, 5, 4), torch.zeros(3, 5, dtype=torch.bool)
    padding[1, 3:] = True
    output = target.clone()
    output[1, 3:] = 99.0
    assert float(relative_error(output, target, padding)) == 0
    constant = target[~padding].mean(0).expand_as(target)
    assert float(relative_error(constant, target, padding)) == pytest.approx(2, rel=0.3)
    assert float(relative_error(target[:, 0] + 1, target[:, 0])) > 0


def test_bad_input_is_one_line() -> None:
    teacher = encoder(2)
    student = primalize(teacher, copy=True, **SMALL).model
    data = [torch.randn(4, 9, 32)]
    with pytest.raises(ValueError, match="model has no layer that primalize replaced"):
        distill(encoder(2), teacher, data, **SHORT)
    with pytest.raises(ValueError, match=r"teacher's layers\.1\.self_attn is Primal-Attention too"):
        distill(student, student, data, **SHORT)
    with pytest.raises(ValueError, match=r"teacher has no module layers\.1\.self_attn"):
        distill(student, encoder(1), data, **SHORT)
    with pytest.raises(ValueError, match="train must be 'layers', 'blocks' or 'all'"):
        distill(student, teacher, data, train="some", **SHORT)
    with pytest.raises(ValueError, match="data gave no batch after 1 of 40 steps"):
        distill(student, teacher, iter(data), **SHORT)
    with pytest.raises(ValueError, match="no longer a finite number at step 1"):
        distill(student, teacher, [torch.full((4, 9, 32), torch.inf)], **SHORT)
    assert all(p.requires_grad for p in student.parameters())
