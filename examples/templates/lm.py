"""A language model to edit: copy this file, replace `load_text`, and run it.

    pip install -e . safetensors    # in a clone of primal-attention
    python lm.py

A causal model of bytes with Primal-Attention, a plain PyTorch loop, and text from a streaming state of constant size.
PRIMAL_SMALL=1 trains for a few steps only.
"""

from __future__ import annotations

import os
from pydoc_data.topics import topics

import torch
from safetensors.torch import save_file
from torch import Tensor

from primal_attention import ksvd_loss
from primal_attention.models.lm import LanguageConfig, LanguageModel, Sampling, generate
from primal_attention.nn.state import save_state

SMALL = bool(os.environ.get("PRIMAL_SMALL"))
STEPS, BATCH, WINDOW = (4, 4, 32) if SMALL else (1000, 16, 256)
LEARNING_RATE, CLIP = 2e-3, 1.0
ETA = 1e-3  # weight of the KSVD loss
DEVICE = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
CONFIG = LanguageConfig(
    vocabulary=256,  # bytes
    attention=("primal",),
    primal_mode="delta",
    embed_dim=64 if SMALL else 256,
    num_heads=4,
    layers=2 if SMALL else 4,
    ffn_dim=128 if SMALL else 1024,
    rank=16,
    conv=4,
    gate=True,
    positions="none",
)


def load_text() -> bytes:
    """REPLACE THIS. Return the text to train on: here the topics of Python's help()."""
    return "\n\n".join(topics.values()).encode()


def windows(data: Tensor) -> tuple[Tensor, Tensor]:
    """Random windows of the text and, for each byte, the next one."""
    start = torch.randint(len(data) - WINDOW - 1, (BATCH, 1))
    rows = data[start + torch.arange(WINDOW + 1)].to(DEVICE)
    return rows[:, :-1], rows[:, 1:]


def train(model: LanguageModel, data: Tensor) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), LEARNING_RATE, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, LEARNING_RATE, total_steps=STEPS)
    for step in range(STEPS):
        tokens, targets = windows(data)
        loss = model(tokens, targets=targets)
        optimizer.zero_grad()
        (loss + ETA * ksvd_loss(model)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        schedule.step()
        if step % max(STEPS // 10, 1) == 0:
            print(f"step {step}: {loss.item() / 0.6931:.2f} bits per byte")


def main() -> None:
    torch.manual_seed(0)
    data = torch.frombuffer(bytearray(load_text()), dtype=torch.uint8).long()
    model = LanguageModel(CONFIG).to(DEVICE)
    train(model, data)
    model.eval()
    prompt = list(b"The statement ")
    text = [tokens[0] for tokens in generate(model, [prompt], 100, Sampling(temperature=0.7, top_p=0.9))]
    print(bytes(prompt + text).decode(errors="replace"))
    with torch.no_grad():  # read a prompt once, and continue it any number of times later
        _, state = model(torch.tensor([prompt], device=DEVICE), return_state=True)
    save_state("prompt.safetensors", state)
    save_file(model.state_dict(), "lm.safetensors")
    print("saved lm.safetensors and the state of the prompt")


if __name__ == "__main__":
    main()
