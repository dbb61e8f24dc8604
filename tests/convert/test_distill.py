"""distill: the initialisation is exact where it can be, errors fall, and nothing else changes."""

import copy
import warnings

import pytest
import torch
from torch import Tensor, nn

from closeness import assert_close
from convert.hf_models import inputs, make
from convert.test_replace import Block, encoder
from primal_attention import distill, primalize
from primal_attention.convert.distill import NEW_PARAMETERS, relative_error

SMALL = {"rank": 5, "landmarks": 6}
SHORT = {"start_batches": 0, "block_steps": 20, "end_steps": 20, "lr": 1e-2, "end_lr": 3e-3, "progress": False}
NO_STEPS = {"block_steps": 0, "end_steps": 0, "progress": False}


def make_pair(layers="last", **encoder_keywords):
    teacher = encoder(2, **encoder_keywords)
    return teacher, primalize(teacher, layers, copy=True, **SMALL).model


def random_batches(count: int = 3) -> list[Tensor]:
    return [torch.randn(4, 9, 32) for _ in range(count)]


# Initialisation


class FromPrimal(Block):
    """A block whose heads are those of a Primal layer."""

    def __init__(self, primal) -> None:
        super().__init__()

        def forward(x, **_):
            _, scores = primal(x, return_scores=True)
            return self.attn.proj(primal.score_proj(torch.cat(scores, -1)).transpose(1, 2).flatten(2))

        self.attn.forward = forward


@pytest.mark.parametrize("rank", [3, 8, 12])
def test_heads_of_a_primal_layer_are_reproduced(rank):
    """A layer of rank 3 and head width 8 is reproduced with rank 3 and above."""
    torch.manual_seed(0)
    probe = primalize(nn.Sequential(Block()), copy=True, rank=3, landmarks=6).model
    primal = probe[0].attn.primal.double().eval()
    teacher = nn.Sequential(FromPrimal(primal)).double().eval()
    with torch.no_grad():
        teacher[0].attn.qkv.weight[:64].copy_(primal.qk_proj.weight)
        teacher[0].attn.qkv.bias[:64].copy_(primal.qk_proj.bias)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # ranks above the head width
        student = primalize(teacher, copy=True, rank=rank, landmarks=6).model.eval()
    data = [torch.randn(64, 9, 32, dtype=torch.float64) for _ in range(4)]
    assert distill(student, teacher, data, **NO_STEPS).started == ["0.attn"]
    # The smallest ridge loses a thousandth of the weakest direction.
    assert_close(student(data[0]), teacher(data[0]), 1e-2, "output")


def test_initialisation_lowers_the_first_error():
    teacher = nn.Sequential(Block(), Block())
    student = primalize(teacher, "all", copy=True, **SMALL).model
    one_step = NO_STEPS | {"block_steps": 1}
    plain = distill(copy.deepcopy(student), teacher, random_batches(), start_batches=0, **one_step)
    result = distill(student, teacher, random_batches(), **one_step)
    assert (plain.started, result.started) == ([], ["0.attn", "1.attn"])
    assert result.block_errors[0] < plain.block_errors[0]


def test_unreadable_heads_are_left_unchanged():
    teacher, student = make_pair()  # nn.MultiheadAttention never calls its output map
    before = copy.deepcopy(student.state_dict())
    assert distill(student, teacher, random_batches(), **NO_STEPS).started == []
    assert all(torch.equal(value, before[name]) for name, value in student.state_dict().items())


# Training


@pytest.mark.parametrize("kind", ["bert", "gpt2", "llama", "vit"])
def test_transformers_are_initialised_and_errors_fall(kind):
    teacher = make(kind, **({"n_layer": 1} if kind == "gpt2" else {"num_hidden_layers": 1}))
    student = primalize(teacher, "all", copy=True, **SMALL).model
    data = [inputs(kind, batch=4) for _ in range(3)]
    if kind != "vit":
        for batch in data:
            batch["attention_mask"] = torch.ones(4, 9, dtype=torch.long)
            batch["attention_mask"][1, 6:] = 0
    before = copy.deepcopy(teacher.state_dict())
    assert len(distill(copy.deepcopy(student), teacher, data, **NO_STEPS).started) == 1
    result = distill(student, teacher, data, **SHORT)
    assert result.model is student
    assert len(result.block_errors) == len(result.end_errors) == 20
    assert sum(result.block_errors[-3:]) < 0.9 * sum(result.block_errors[:3])
    assert sum(result.end_errors[-3:]) < sum(result.end_errors[:3])
    assert all(torch.equal(value, before[name]) for name, value in teacher.state_dict().items())


def test_timm_layers_learn_with_the_ksvd_loss(capsys):
    teacher = nn.Sequential(Block(), Block())
    student = primalize(teacher, "all", copy=True, **SMALL).model
    result = distill(student, teacher, random_batches(), ksvd=0.1, **SHORT | {"progress": True})
    assert result.block_errors[-1] < result.block_errors[0]
    assert "block by block: step 20 of 20, error" in capsys.readouterr().err


@pytest.mark.parametrize(("train", "moved"), [("layers", "self_attn"), ("blocks", "layers.1."), ("all", "layers.")])
def test_only_the_requested_weights_change(train, moved):
    teacher, student = make_pair()
    teacher.train()
    student.train().layers[1].linear1.weight.requires_grad_(False)
    before = copy.deepcopy(student.state_dict())
    distill(student, teacher, random_batches(1), train=train, **SHORT | {"block_steps": 0, "end_steps": 3})
    changed = {name for name, p in student.named_parameters() if not torch.equal(p, before[name])}
    assert changed
    assert all(moved in name for name in changed)
    assert any("layers.0." in name for name in changed) == (train == "all")
    assert "layers.1.linear1.weight" not in changed
    assert student.training
    assert teacher.training
    assert [name for name, p in student.named_parameters() if not p.requires_grad] == ["layers.1.linear1.weight"]
    assert all(p.requires_grad for p in teacher.parameters())


def test_pretrained_weights_learn_at_the_rate_of_their_name():
    """The first step of Adam is the learning rate, whatever the gradient."""
    teacher, student = make_pair()
    before = copy.deepcopy(student.state_dict())
    rates = {"layers.0.linear1.weight": 0.25, "layers.1.linear1.weight": 0.5}
    settings = SHORT | {"block_steps": 0, "end_steps": 1, "end_lr": 1e-2, "train": "all"}
    distill(student, teacher, random_batches(1), kept_rate=lambda name: rates.get(name, 0), **settings)
    moved = {name: (p.detach() - before[name]).abs() for name, p in student.named_parameters()}
    pretrained = {n for n, change in moved.items() if change.any() and not any(part in n for part in NEW_PARAMETERS)}
    assert pretrained == set(rates)
    for name, rate in rates.items():
        assert float(moved[name].median()) == pytest.approx(rate * 1e-2, rel=1e-3)


def test_match_selects_one_or_several_tensors():
    teacher, student = make_pair()
    shapes = []

    def match(output, batch):
        shapes.append(batch.shape)
        return output, output.mean(1)

    settings = SHORT | {"block_steps": 0, "end_steps": 40}
    result = distill(student, teacher, random_batches(1), match=match, **settings)
    assert shapes == [(4, 9, 32)] * 80
    assert result.end_errors[-1] < 0.7 * result.end_errors[0]


@pytest.mark.parametrize(("precision", "around"), [("bf16-mixed", False), ("32-true", True)])
def test_half_precision_learns_as_well(precision, around):
    """The autocast of a caller caches cast weights; each step must see those of the step before."""
    teacher, student = make_pair()
    data, settings = random_batches(), SHORT | {"block_steps": 0, "train": "all"}
    exact = distill(copy.deepcopy(student), teacher, data, **settings).end_errors
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=around):
        half = distill(student, teacher, data, precision=precision, **settings).end_errors
    assert half != exact
    assert half == pytest.approx(exact, rel=0.05)
    assert student.layers[1].self_attn.primal.w_e.dtype == torch.float32


def test_weights_are_restored_if_the_error_is_not_finite():
    teacher, student = make_pair()
    before = copy.deepcopy(student.state_dict())
    data = random_batches(1) * 12 + [torch.full((4, 9, 32), torch.nan)] * 8
    with pytest.raises(ValueError, match="no longer a finite number at step 13 block by block: lower lr"):
        distill(student, teacher, data, **SHORT)
    assert all(torch.equal(value, before[name]) for name, value in student.state_dict().items())
    assert all(p.requires_grad for p in student.parameters())


def test_relative_error_counts_valid_tokens_and_their_means():
    target, padding = torch.randn(3, 5, 4), torch.zeros(3, 5, dtype=torch.bool)
    padding[1, 3:] = True
    output = target.clone()
    output[1, 3:] = 99.0
    assert float(relative_error(output, target, padding)) == 0
    constant = target[~padding].mean(0).expand_as(target)
    assert float(relative_error(constant, target, padding)) == pytest.approx(2, rel=0.3)
    assert float(relative_error(target[:, 0] + 1, target[:, 0])) > 0


def test_bad_input_is_one_line():
    teacher, student = make_pair()
    data = random_batches(1)
    for model, other, batches, keywords, message in (
        (encoder(2), teacher, data, {}, "model has no layer that primalize replaced"),
        (student, student, data, {}, r"teacher's layers\.1\.self_attn is Primal-Attention too"),
        (student, encoder(1), data, {}, r"teacher has no module layers\.1\.self_attn"),
        (student, teacher, data, {"train": "some"}, "train must be 'layers', 'blocks' or 'all'"),
        (student, teacher, data, {"precision": "64"}, "precision must be '32-true' or 'bf16-mixed'"),
        (student, teacher, iter(data), {}, "data gave no batch after 1 of 20 steps"),
    ):
        with pytest.raises(ValueError, match=message):
            distill(model, other, batches, **SHORT, **keywords)
