"""The two series classifiers: shapes, masks, lengths, gradients."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from closeness import assert_close
from primal_attention.models.uea import MaskedBatchNorm, modern_classifier, paper_classifier
from primal_attention.nn.objective import ksvd_loss, primal_layers

KEYWORDS = {"primal": {"rank": 4, "landmarks": 6}}
LENGTHS = (12, 7, 1)


def small(kind: str, attention="primal", **changes):
    settings = {"attention": attention, "embed_dim": 16, "num_heads": 2, "attention_kwargs": KEYWORDS, **changes}
    make = partial(paper_classifier, max_length=12, ffn_dim=32) if kind == "paper" else modern_classifier
    return make(3, 5, **settings).double()


@pytest.fixture
def batch():
    x = torch.randn(3, 12, 3, dtype=torch.float64)
    mask = torch.arange(12) >= torch.tensor(LENGTHS).unsqueeze(1)
    return x, mask


@pytest.mark.parametrize("attention", ["primal", "primal+", "softmax", "linear"])
@pytest.mark.parametrize("kind", ["paper", "modern"])
def test_padding_never_matters_nan_included(kind, attention, batch):
    x, mask = batch
    model = small(kind, attention).eval()
    logits = model(x.masked_fill(mask.unsqueeze(-1), 0.0), mask)
    assert logits.shape == (3, 5)
    assert torch.equal(model(x.masked_fill(mask.unsqueeze(-1), torch.nan), mask), logits)
    for i, n in enumerate(LENGTHS):
        assert_close(logits[i], model(x[i : i + 1, :n])[0], 1e-10, f"length {n}")


@pytest.mark.parametrize("kind", ["paper", "modern"])
def test_every_weight_gets_a_gradient_from_the_task_and_the_objective(kind, batch):
    x, mask = batch
    model = small(kind).train()
    loss = model(x, mask).logsumexp(dim=-1).sum() + ksvd_loss(model)
    loss.backward()
    for name, weight in model.named_parameters():
        assert weight.grad is not None, name
        assert torch.isfinite(weight.grad).all(), name


def test_training_statistics_ignore_the_padding(batch):
    x, mask = batch
    models = [small("modern", dropout=0.0).train() for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    models[0](x, mask)
    wider = torch.nn.functional.pad(x, (0, 0, 0, 8), value=77.0)
    models[1](wider, torch.nn.functional.pad(mask, (0, 8), value=True))
    for (name, a), b in zip(models[0].state_dict().items(), models[1].state_dict().values(), strict=True):
        if "running" in name:
            assert_close(a, b, 1e-12, name)


def test_masked_batch_norm_without_a_mask_is_batch_norm():
    ours, torchs = MaskedBatchNorm(4).double(), torch.nn.BatchNorm1d(4).double()
    x = torch.randn(3, 7, 4, dtype=torch.float64)
    for mask in (None, torch.zeros(3, 7, dtype=torch.bool)):
        assert_close(ours(x, mask), torchs(x.transpose(1, 2)).transpose(1, 2), 1e-12)
    assert_close(ours.running_var, torchs.running_var, 1e-12)
    assert_close(ours.eval()(x), torchs.eval()(x.transpose(1, 2)).transpose(1, 2), 1e-12)


def test_the_modern_network_takes_any_length_and_the_paper_network_says_its_own():
    x = torch.randn(2, 40, 3, dtype=torch.float64)
    assert small("modern").eval()(x).shape == (2, 5)
    with pytest.raises(ValueError, match="40 steps and the model was built for 12"):
        small("paper").eval()(x)


def test_primalformer_and_primal_plus():
    assert len(primal_layers(small("paper", "primal"))) == 2
    assert len(primal_layers(small("paper", "primal+"))) == 1
    assert len(primal_layers(small("modern", "primal"))) == 3


def test_the_papers_network_has_its_published_size():
    model = paper_classifier(12, 9, 26, attention_kwargs={"primal": {"rank": 40, "landmarks": 26}})
    attention = 2 * (512 * 512 + 512) + 2 * 8 * 26 * 40 + 8 * 40 + (80 * 64 + 64) + 512 * 512 + 512
    block = attention + 2 * 1024 + 2 * 512 * 2048 + 2048 + 512
    expected = 2 * block + 1024 + 12 * 512 + 512 + 26 * 512 + 26 * 512 * 9 + 9
    assert sum(p.numel() for p in model.parameters()) == expected


def test_bf16_autocast_gives_finite_logits(batch):
    x, mask = batch
    model = small("modern").float().train()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.isfinite(model(x.float(), mask)).all()
