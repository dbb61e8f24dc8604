"""The authors' attention layer computes the losses of this library's layer."""

from __future__ import annotations

import copy

import torch

from primal_attention.models.lra import LRAClassifier
from primal_attention.nn.objective import ksvd_loss
from primal_attention.official.attention import AuthorsPrimal, use_authors_layers


def test_authors_layers_give_the_same_outputs_losses_and_gradients_without_padding() -> None:
    torch.manual_seed(0)
    keywords = {"primal": {"rank": 6, "landmarks": 20}}
    ours = LRAClassifier(20, 3, 32, embed_dim=16, num_heads=2, dropout=0.0, attention_kwargs=keywords)
    theirs = copy.deepcopy(ours)
    use_authors_layers(theirs)
    assert sum(isinstance(module, AuthorsPrimal) for module in theirs.modules()) == 2
    ids = torch.randint(1, 20, (4, 32))
    results = []
    for model in (ours, theirs):
        logits = model.train()(ids)
        (logits.square().sum() + ksvd_loss(model, "batch")).backward()
        gradients = {name: weight.grad for name, weight in model.named_parameters()}
        results.append((logits, ksvd_loss(model, "batch"), gradients))
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-5)  # float32 in another order of sums
