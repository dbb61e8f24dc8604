"""Published Long-Range Arena models give the published numbers: losses and every gradient, in float64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import golden_files
from closeness import assert_close
from primal_attention.nn.objective import ksvd_loss
from primal_attention.official import load_official

TIGHT = 1e-11  # float64 through two layers; the stored arrays are float64 or exact
NAMES = ("full_lra_primalformer_dual", "full_lra_primalplus")


@pytest.fixture(scope="module", params=NAMES, ids=["PrimalFormer on pairs", "Primal.+"])
def published(request: pytest.FixtureRequest):
    return golden_files.load(request.param)


def part(arrays, prefix: str) -> dict[str, torch.Tensor]:
    return {k.removeprefix(prefix): v for k, v in arrays.items() if k.startswith(prefix)}


def inputs(arrays) -> list[torch.Tensor]:
    """Tokens and padding masks, in the order in which the model takes them."""
    return [t for name in ("ids0", "ids1") if name in arrays for t in (arrays[name], arrays[name] == 0)]


def without_dropout(model: torch.nn.Module) -> torch.nn.Module:
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    return model


def test_losses_and_gradients_are_the_published_ones(published):
    arrays, meta = published
    model = without_dropout(load_official(part(arrays, "sd/"), "lra")).train()
    assert any(mask.any() for mask in inputs(arrays)[1::2]), "the stored case has padding"
    task = F.cross_entropy(model(*inputs(arrays)), arrays["y"], reduction="none")
    ksvd = ksvd_loss(model, "batch")
    loss = task.mean() + meta["eta"] * ksvd
    loss.backward()
    assert_close(task, arrays["ce_per_sample"], TIGHT, "cross-entropy")
    assert_close(ksvd, arrays["ksvd"], TIGHT, "KSVD loss")
    assert_close(loss, arrays["loss_total"], TIGHT, "loss")
    mapped = dict(load_official(part(arrays, "grad/"), "lra").named_parameters())
    for name, weight in model.named_parameters():
        assert_close(weight.grad, mapped[name].detach(), TIGHT, f"gradient of {name}")


def test_the_loaded_model_sees_padding_only_as_long_as_it_is_told_to(published):
    arrays, _ = published
    model = load_official(part(arrays, "sd/"), "lra").eval()
    given = inputs(arrays)
    moved = [t.masked_fill(given[i + 1], 5) if i % 2 == 0 else t for i, t in enumerate(given)]
    assert not torch.allclose(model(*given), model(*moved))
    model.published_padding = False
    assert_close(model(*given), model(*moved), 1e-14)


def test_what_is_no_published_model_is_one_clear_line():
    with pytest.raises(ValueError, match="not one of the published LRA models"):
        load_official({"weight": torch.zeros(1)}, "lra")
