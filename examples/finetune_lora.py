"""Put Primal-Attention into a transformers model and fine-tune it with LoRA (PEFT).

    pip install -e '.[hf]' peft
    python examples/finetune_lora.py

The model is a small BERT with random weights, so that nothing is downloaded. With your own, use
`AutoModelForSequenceClassification.from_pretrained(...)`. PRIMAL_SMALL=1 runs a few steps only.
"""

# %%
from __future__ import annotations

import os

import torch
from peft import LoraConfig, get_peft_model
from transformers import BertConfig, BertForSequenceClassification

from primal_attention import ksvd_loss, primalize

SMALL = bool(os.environ.get("PRIMAL_SMALL"))
STEPS, BATCH, LENGTH = (5, 8, 24) if SMALL else (150, 32, 48)

torch.manual_seed(0)
config = BertConfig(
    vocab_size=100, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128,
    num_labels=2, pad_token_id=0,
)  # fmt: skip
model = BertForSequenceClassification(config)

# %% [markdown]
# ## Replace attention
# `primalize` keeps the query, key and output weights. W_e, W_r, Λ and the map of the scores are new and have to be
# trained, so they are trained in full beside the adapters.

# %%
replaced = primalize(model, layers="last", rank=8, landmarks=16)
print(replaced.report)

# %% [markdown]
# ## Add adapters
# `qk_proj` and `out_proj` are linear maps of the Primal layer, `query` and `value` of the softmax layers below it.
# `modules_to_save` names what is trained in full.

# %%
lora = LoraConfig(
    r=4,
    lora_alpha=8,
    target_modules=["qk_proj", "out_proj", "query", "value"],
    modules_to_save=["score_proj", "classifier"],
)
model = get_peft_model(model, lora)
for name, parameter in model.named_parameters():
    if name.endswith(("w_e", "w_r", "sqrt_lambda")):
        parameter.requires_grad_(True)
model.print_trainable_parameters()


# %%
def make_batch(size: int) -> dict[str, torch.Tensor]:
    """Padded sequences of words; the class is whether words below 50 are the majority."""
    length = torch.randint(LENGTH // 2, LENGTH + 1, (size, 1))
    label = torch.randint(2, (size, 1))
    is_low = torch.rand(size, LENGTH) < torch.where(label == 1, 0.65, 0.35)
    words = torch.where(is_low, torch.randint(1, 50, (size, LENGTH)), torch.randint(50, 100, (size, LENGTH)))
    mask = torch.arange(LENGTH) < length
    return {"input_ids": words * mask, "attention_mask": mask.long(), "labels": label[:, 0]}


def accuracy() -> float:
    model.eval()
    batch = make_batch(400)
    with torch.no_grad():
        right = model(**batch).logits.argmax(dim=1) == batch["labels"]
    return right.double().mean().item()


before = accuracy()
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=5e-3)
model.train()
for _ in range(STEPS):
    loss = model(**make_batch(BATCH)).loss + 0.1 * ksvd_loss(model)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print(f"accuracy before {before:.3f}, after {accuracy():.3f}")

# %% [markdown]
# ## Merge
# After `merge_and_unload` the maps are plain linear maps again, and the fast backends read their weights directly. Save
# the merged model: an adapter file alone would lack W_e, W_r and Λ.

# %%
batch = make_batch(4)
model.eval()
with torch.no_grad():
    expected = model(**batch).logits
    merged = model.merge_and_unload()
    difference = (merged(**batch).logits - expected).abs().max().item()
assert difference < 1e-4, difference
print(f"merged model: largest difference {difference:.0e}")
