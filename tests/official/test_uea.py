"""Published checkpoints give the published numbers: logits, losses and every gradient, in float64."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from closeness import assert_close
from primal_attention.nn.objective import ksvd_loss
from primal_attention.official import load_official

TIGHT = 1e-11  # float64 through two layers; the stored arrays are float64 or exact


@pytest.fixture(scope="module")
def published(request: pytest.FixtureRequest):
    with np.load(Path(__file__).parents[1] / "golden" / "full_uea_primalformer.npz") as arrays:
        return {name: arrays[name] for name in arrays}


@pytest.fixture
def state(published):
    return {k.removeprefix("sd/"): torch.from_numpy(v).double() for k, v in published.items() if k.startswith("sd/")}


def test_the_uea_primalformer_is_reproduced(published, state):
    model = load_official(state, "uea").train()
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    eta = json.loads(str(published["meta"]))["eta"]
    x = torch.from_numpy(published["X"]).double()
    padding = ~torch.from_numpy(published["padding_mask"])  # theirs is True at values
    y = torch.from_numpy(published["y"]).squeeze(1)
    logits = model(x, padding)
    task = F.cross_entropy(logits, y, reduction="none")
    loss = task.mean() + eta * ksvd_loss(model)
    loss.backward()
    assert_close(logits, torch.from_numpy(published["logits"]), TIGHT, "logits")
    assert_close(task, torch.from_numpy(published["ce_per_sample"]), TIGHT, "cross-entropy")
    assert_close(ksvd_loss(model), torch.from_numpy(published["ksvd_per_sample"]).mean(), TIGHT, "KSVD loss")
    assert_close(loss, torch.tensor(float(published["loss_total"]), dtype=torch.float64), TIGHT, "loss")
    theirs = {k.removeprefix("grad/"): torch.from_numpy(v) for k, v in published.items() if k.startswith("grad/")}
    mapped = dict(load_official(theirs, "uea").named_parameters())
    for name, weight in model.named_parameters():
        assert_close(weight.grad, mapped[name].detach(), TIGHT, f"gradient of {name}")


def test_the_loaded_model_sees_padding_only_as_long_as_it_is_told_to(published, state):
    model = load_official(state, "uea").eval()
    x = torch.from_numpy(published["X"]).double()
    padding = ~torch.from_numpy(published["padding_mask"])
    moved = x.masked_fill(padding.unsqueeze(-1), 3.0)
    assert not torch.allclose(model(x, padding), model(moved, padding))
    model.attend_to_padding = False
    assert torch.equal(model(x, padding), model(moved, padding))


def test_what_is_no_published_model_is_one_clear_line(state):
    with pytest.raises(ValueError, match="kind must be one of uea"):
        load_official(state, "speech")
    with pytest.raises(ValueError, match="not one of the published UEA models"):
        load_official({"weight": torch.zeros(1)}, "uea")
