"""A sequence classifier to edit: copy this file, replace `load_data`, and run it.

    pip install -e . safetensors    # in a clone of primal-attention
    python classifier.py

A Transformer encoder with Primal-Attention, a plain PyTorch loop, and the KSVD loss. Sequences may differ in length.
PRIMAL_SMALL=1 trains for a few steps only.
"""

from __future__ import annotations

import os

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from primal_attention import PrimalAttention, ksvd_loss

SMALL = bool(os.environ.get("PRIMAL_SMALL"))
EPOCHS, BATCH, LEARNING_RATE = (2 if SMALL else 20), 32, 1e-3
WIDTH, HEADS, LAYERS, RANK, LANDMARKS = 64, 4, 2, 8, 32
ETA = 1e-2  # weight of the KSVD loss
DEVICE = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"


def load_data(count: int) -> list[tuple[Tensor, int]]:
    """REPLACE THIS. Return pairs of a sequence (length, channels) and its class."""
    samples = []
    for i in range(count):
        time = torch.linspace(0, 6.28, int(torch.randint(30, 60, ())))[:, None]
        phase = torch.tensor([0.0, 1.5]) if i % 2 else torch.tensor([1.5, 0.0])
        samples.append((torch.sin(3 * time + phase) + 0.5 * torch.randn(len(time), 2), i % 2))
    return samples


def collate(samples: list[tuple[Tensor, int]]) -> tuple[Tensor, Tensor, Tensor]:
    """Pad to the longest sequence; the mask is True at padding."""
    x = nn.utils.rnn.pad_sequence([series for series, _ in samples], batch_first=True)
    lengths = torch.tensor([len(series) for series, _ in samples])
    mask = torch.arange(x.shape[1]) >= lengths[:, None]
    return x.to(DEVICE), mask.to(DEVICE), torch.tensor([label for _, label in samples], device=DEVICE)


class Classifier(nn.Module):
    def __init__(self, channels: int, classes: int) -> None:
        super().__init__()
        self.embed = nn.Linear(channels, WIDTH)
        layers = [nn.TransformerEncoderLayer(WIDTH, HEADS, 2 * WIDTH, batch_first=True, norm_first=True)
                  for _ in range(LAYERS)]  # fmt: skip
        for layer in layers:
            layer.self_attn = PrimalAttention(WIDTH, HEADS, rank=RANK, landmarks=LANDMARKS)
        self.layers = nn.ModuleList(layers)
        self.head = nn.Linear(WIDTH, classes)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x, src_key_padding_mask=mask)
        x = x.masked_fill(mask[..., None], 0.0).sum(dim=1) / (~mask).sum(dim=1, keepdim=True)
        return self.head(x)


def accuracy(model: Classifier, samples: list[tuple[Tensor, int]]) -> float:
    model.eval()
    with torch.no_grad():
        x, mask, labels = collate(samples)
        return (model(x, mask).argmax(dim=1) == labels).float().mean().item()


def main() -> None:
    torch.manual_seed(0)
    train_data, test_data = load_data(64 if SMALL else 512), load_data(64)
    model = Classifier(channels=train_data[0][0].shape[1], classes=1 + max(label for _, label in train_data)).to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), LEARNING_RATE)
    loader = torch.utils.data.DataLoader(train_data, BATCH, shuffle=True, collate_fn=collate)
    for epoch in range(EPOCHS):
        model.train()
        for x, mask, labels in loader:
            loss = nn.functional.cross_entropy(model(x, mask), labels)
            optimizer.zero_grad()
            (loss + ETA * ksvd_loss(model)).backward()
            optimizer.step()
        print(f"epoch {epoch + 1}: loss {loss.item():.3f}, test accuracy {accuracy(model, test_data):.3f}")
    save_file(model.state_dict(), "classifier.safetensors")
    print("saved classifier.safetensors")


if __name__ == "__main__":
    main()
