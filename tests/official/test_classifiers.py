"""Published UEA and LRA checkpoints give the published numbers: logits, losses and all gradients, in float64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import golden_files
from closeness import assert_close
from primal_attention.nn.objective import ksvd_loss
from primal_attention.official import load_official

TIGHT = 1e-11  # float64 through two layers; the stored arrays are float64 or exact
NAMES = ("full_uea_primalformer", "full_lra_primalformer_dual", "full_lra_primalplus")


@pytest.fixture(params=NAMES)
def published(request: pytest.FixtureRequest) -> tuple[dict[str, Tensor], float, str]:
    """The stored arrays, η, and the kind of checkpoint."""
    arrays, meta = golden_files.load(request.param)
    return arrays, meta["eta"], request.param.split("_")[1]


def part(arrays: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {k.removeprefix(prefix): v for k, v in arrays.items() if k.startswith(prefix)}


def inputs(arrays: dict[str, Tensor]) -> list[Tensor]:
    """Values or tokens and padding masks, in the order of the model's arguments."""
    if "X" in arrays:
        return [arrays["X"], ~arrays["padding_mask"]]  # the published mask is True at values
    return [t for name in ("ids0", "ids1") if name in arrays for t in (arrays[name], arrays[name] == 0)]


def test_losses_and_gradients_are_the_published_ones(published) -> None:
    arrays, eta, kind = published
    model = load_official(part(arrays, "sd/"), kind).train()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    logits = model(*inputs(arrays))
    task = F.cross_entropy(logits, arrays["y"].flatten(), reduction="none")
    ksvd = ksvd_loss(model, "sample" if kind == "uea" else "batch")
    loss = task.mean() + eta * ksvd
    loss.backward()
    if "logits" in arrays:
        assert_close(logits, arrays["logits"], TIGHT, "logits")
    assert_close(task, arrays["ce_per_sample"], TIGHT, "cross-entropy")
    assert_close(ksvd, arrays["ksvd"] if "ksvd" in arrays else arrays["ksvd_per_sample"].mean(), TIGHT, "KSVD loss")
    assert_close(loss, arrays["loss_total"], TIGHT, "loss")
    gradients = dict(load_official(part(arrays, "grad/"), kind).named_parameters())
    for name, weight in model.named_parameters():
        assert_close(weight.grad, gradients[name].detach(), TIGHT, f"gradient of {name}")


def test_padding_is_read_until_that_is_switched_off(published) -> None:
    arrays, _, kind = published
    model = load_official(part(arrays, "sd/"), kind).eval()
    original = inputs(arrays)
    changed = list(original)
    for i in range(0, len(original), 2):
        assert original[i + 1].any(), "the stored batch has padding"
        mask = original[i + 1].view(*original[i + 1].shape, *[1] * (original[i].ndim - 2))
        changed[i] = original[i].masked_fill(mask, 5)
    assert not torch.allclose(model(*original), model(*changed))
    setattr(model, "attend_to_padding" if kind == "uea" else "published_padding", False)
    assert_close(model(*original), model(*changed), 1e-14)


def test_other_checkpoints_are_refused() -> None:
    with pytest.raises(ValueError, match="kind must be one of uea"):
        load_official({}, "speech")
    for kind, name in (("uea", "UEA"), ("lra", "LRA"), ("cv", "image"), ("nlp", "language"), ("rl", "Decision")):
        with pytest.raises(ValueError, match=f"not one of the published {name}"):
            load_official({"weight": torch.zeros(1)}, kind)
