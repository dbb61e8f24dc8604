"""An image classifier to edit: copy this file, replace `load_data`, and run it.

    pip install -e . safetensors    # in a clone of primal-attention
    python vision.py

A vision Transformer over patches with Primal-Attention, a plain PyTorch loop, and the KSVD loss.
PRIMAL_SMALL=1 trains for a few steps only.
"""

from __future__ import annotations

import os

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from primal_attention import PrimalAttention, ksvd_loss

SMALL = bool(os.environ.get("PRIMAL_SMALL"))
EPOCHS, BATCH, LEARNING_RATE = (1 if SMALL else 10), 64, 1e-3
SIZE, PATCH, CHANNELS, CLASSES = 32, 4, 3, 4
WIDTH, HEADS, LAYERS, RANK, LANDMARKS = 96, 4, 2 if SMALL else 4, 8, 32
ETA = 1e-2  # weight of the KSVD loss
DEVICE = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"


def load_data(count: int) -> Dataset:
    """REPLACE THIS, for example by `torchvision.datasets.ImageFolder` with a transform to (3, SIZE, SIZE)."""
    labels = torch.arange(count) % CLASSES
    images = 0.5 * torch.randn(count, CHANNELS, SIZE, SIZE)
    half = SIZE // 2
    for image, label in zip(images, labels.tolist(), strict=True):  # the class is the bright quarter
        top, left = half * (label // 2), half * (label % 2)
        image[:, top : top + half, left : left + half] += 0.3
    return TensorDataset(images, labels)


class VisionTransformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(CHANNELS, WIDTH, PATCH, stride=PATCH)
        self.positions = nn.Parameter(0.02 * torch.randn(1, (SIZE // PATCH) ** 2, WIDTH))
        layers = [nn.TransformerEncoderLayer(WIDTH, HEADS, 4 * WIDTH, activation="gelu", batch_first=True,
                                             norm_first=True) for _ in range(LAYERS)]  # fmt: skip
        for layer in layers:
            layer.self_attn = PrimalAttention(WIDTH, HEADS, rank=RANK, landmarks=LANDMARKS)
        self.layers = nn.Sequential(*layers)
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2) + self.positions
        return self.head(self.norm(self.layers(x)).mean(dim=1))


@torch.no_grad()
def accuracy(model: VisionTransformer, loader: DataLoader) -> float:
    model.eval()
    correct = [model(images.to(DEVICE)).argmax(dim=1).cpu() == labels for images, labels in loader]
    return torch.cat(correct).float().mean().item()


def main() -> None:
    torch.manual_seed(0)
    train_loader = DataLoader(load_data(128 if SMALL else 2048), BATCH, shuffle=True)
    test_loader = DataLoader(load_data(64), BATCH)
    model = VisionTransformer().to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), LEARNING_RATE, weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, LEARNING_RATE, total_steps=EPOCHS * len(train_loader))
    for epoch in range(EPOCHS):
        model.train()
        for images, labels in train_loader:
            loss = nn.functional.cross_entropy(model(images.to(DEVICE)), labels.to(DEVICE), label_smoothing=0.1)
            optimizer.zero_grad()
            (loss + ETA * ksvd_loss(model)).backward()
            optimizer.step()
            schedule.step()
        print(f"epoch {epoch + 1}: loss {loss.item():.3f}, test accuracy {accuracy(model, test_loader):.3f}")
    save_file(model.state_dict(), "vision.safetensors")
    print("saved vision.safetensors")


if __name__ == "__main__":
    main()
