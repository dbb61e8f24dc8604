"""Swap nn.MultiheadAttention for PrimalAttention in a Transformer encoder.

    pip install -e .
    python examples/swap_attention.py

The data are noisy sine waves of four frequencies, cut into tokens of eight values. Two encoders learn to classify the
frequency: torch's own, and the same one with `self_attn` replaced. One seed of a toy task shows that both train, not
which one is better. PRIMAL_SMALL=1 runs a few steps only.
"""

# %%
from __future__ import annotations

import os
import time

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from primal_attention import PrimalAttention, ksvd_loss, primalize

SMALL = bool(os.environ.get("PRIMAL_SMALL"))
STEPS, BATCH, TOKENS = (10, 16, 16) if SMALL else (150, 32, 64)
WIDTH, HEADS, LAYERS, VALUES = 64, 4, 2, 8
FREQUENCIES = torch.tensor([0.05, 0.06, 0.07, 0.08])  # cycles per value


# %% [markdown]
# ## The encoder
# `PrimalAttention` accepts the call of `nn.MultiheadAttention(batch_first=True)`, so it can be assigned to `self_attn`.


# %%
class Classifier(nn.Module):
    """A Transformer encoder, the mean over the tokens, and a linear map."""

    def __init__(self, use_primal: bool) -> None:
        super().__init__()
        self.embed = nn.Linear(VALUES, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 2 * WIDTH, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
        if use_primal:
            for block in self.encoder.layers:
                block.self_attn = PrimalAttention(WIDTH, HEADS, rank=16, landmarks=32)
        self.classify = nn.Linear(WIDTH, len(FREQUENCIES))

    def forward(self, x: Tensor, key_padding_mask: Tensor | None = None) -> Tensor:
        hidden = self.encoder(self.embed(x), src_key_padding_mask=key_padding_mask)
        return self.classify(hidden.mean(dim=1))


# %%
def make_batch(size: int) -> tuple[Tensor, Tensor]:
    """Waves of random phase with noise, (size, tokens, values), and the number of their frequency."""
    label = torch.randint(len(FREQUENCIES), (size,))
    time_steps = torch.arange(TOKENS * VALUES)
    phase = FREQUENCIES[label, None] * time_steps + torch.rand(size, 1)
    x = torch.sin(2 * torch.pi * phase) + torch.randn(size, TOKENS * VALUES)
    return x.view(size, TOKENS, VALUES), label


def train(model: nn.Module, eta: float) -> float:
    """Train and return the accuracy on new sequences."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for _ in range(STEPS):
        x, label = make_batch(BATCH)
        loss = F.cross_entropy(model(x), label)
        if eta:
            loss = loss + eta * ksvd_loss(model)  # after the forward pass, in training mode
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.eval()
    with torch.no_grad():
        x, label = make_batch(500)
        return (model(x).argmax(dim=1) == label).double().mean().item()


# %%
for name, use_primal, eta in (("softmax", False, 0.0), ("Primal", True, 0.1)):
    torch.manual_seed(0)
    start = time.perf_counter()
    accuracy = train(Classifier(use_primal), eta)
    print(f"{name:8s} accuracy {accuracy:.3f}, {time.perf_counter() - start:.0f} s")

# %% [markdown]
# ## Let primalize do it
# `primalize` replaces the attention of an existing model in place and keeps its query, key and output weights.

# %%
model = Classifier(use_primal=False)
replaced = primalize(model, layers="last", rank=16, landmarks=32)
print("replaced:", *replaced)
