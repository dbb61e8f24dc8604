"""Train a causal language model and stream text from it with a state of constant size.

    pip install -e .
    python examples/stream_language_model.py

The text is that of Python's `help()` topics, in bytes, which every Python installation has. Replace `text` by your own.
The model has Primal-Attention with a learned decay in every layer. PRIMAL_SMALL=1 runs a few steps only.
"""

# %%
from __future__ import annotations

import os
from pydoc_data.topics import topics

import torch

from primal_attention import ksvd_loss
from primal_attention.models.lm import LanguageConfig, LanguageModel, Sampling, generate

SMALL = bool(os.environ.get("PRIMAL_SMALL"))
STEPS, BATCH, WINDOW = (5, 4, 32) if SMALL else (400, 16, 128)
ETA = 1e-3  # weight of the KSVD loss

torch.manual_seed(0)
text = "\n\n".join(topics.values()).encode()
data = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
train_data, test_data = data[:-20_000], data[-20_000:]
print(f"{len(train_data):,} bytes to train on")

# %% [markdown]
# ## The model
# `attention` takes one name for all layers or one per layer. `primal_mode="decay"` uses decayed running sums of queries
# and keys; `conv` adds a short causal convolution beside each layer.

# %%
config = LanguageConfig(
    vocabulary=256, attention=("primal",), embed_dim=128, num_heads=4, layers=3, ffn_dim=256,
    primal_mode="decay", rank=16, conv=4, gate=True,
)  # fmt: skip
model = LanguageModel(config)
print(f"{sum(p.numel() for p in model.parameters()):,} parameters")


# %%
def windows(source: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Random windows of the text and, for each byte, the next one."""
    start = torch.randint(len(source) - WINDOW - 1, (count, 1))
    rows = source[start + torch.arange(WINDOW + 1)]
    return rows[:, :-1], rows[:, 1:]


def cross_entropy(tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())


optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.01)
schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=STEPS)
for step in range(STEPS):
    loss = cross_entropy(*windows(train_data, BATCH))
    optimizer.zero_grad()
    (loss + ETA * ksvd_loss(model)).backward()
    optimizer.step()
    schedule.step()
    if step % 100 == 99:
        print(f"step {step + 1}: {loss.item() / 0.6931:.2f} bits per byte in training")

model.eval()
with torch.no_grad():
    bits = cross_entropy(*windows(test_data, 64)).item() / 0.6931
print(f"test: {bits:.2f} bits per byte")

# %% [markdown]
# ## Streaming
# Read the prompt in one call, then continue byte by byte. The state does not grow, and step t gives row t of the full
# pass.

# %%
prompt = test_data[None, :200]
with torch.no_grad():
    logits, state = model(prompt[:, :100], return_state=True, only_last=True)
    for token in prompt[0, 100:]:
        logits, state = model.step(token[None], state)
    error = (logits - model(prompt)[:, -1]).abs().max().item()
assert error < 1e-4, error


def count_numbers(part: object) -> int:
    """Numbers in a state: a nested tuple of tensors."""
    if isinstance(part, torch.Tensor):
        return part.numel()
    return sum(map(count_numbers, part)) if isinstance(part, tuple) else 0


print(f"byte by byte equals the full pass to {error:.0e}")
print(f"state: {count_numbers(state):,} numbers after 200 bytes")
with torch.no_grad():
    _, longer = model(test_data[None, :4000], return_state=True, only_last=True)
print(f"state: {count_numbers(longer):,} numbers after 4,000 bytes")

# %% [markdown]
# ## Generation
# `generate` reads the prompt, then yields one token per prompt and step.

# %%
stream = generate(model, [list(b"The statement ")], 20 if SMALL else 200, Sampling(temperature=0.7, top_p=0.9, seed=1))
written = bytes(tokens[0] for tokens in stream)
print("The statement " + written.decode(errors="replace"))
