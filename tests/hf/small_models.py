"""Small models of every mode, and a batch that is padded on the left."""

from typing import Any

import torch

from primal_attention.hf import PrimalConfig, PrimalForCausalLM

MODES: dict[str, dict[str, Any]] = {
    "default": {},
    "mean": {"primal_mode": "mean"},
    "decay": {"primal_mode": "decay"},
    "decay-conv-gate": {"primal_mode": "decay", "conv": 4, "gate": True},
    "delta-conv-gate": {"primal_mode": "delta", "conv": 4, "gate": True},
    "landmarks": {"primal_mode": "landmarks"},
    "hybrid": {"primal_mode": "decay", "attention": ("primal", "softmax"), "positions": "rotary"},
    "linear": {"attention": "linear"},
    "performer": {"attention": "performer"},
    "flow": {"attention": "flow", "positions": "sinusoidal"},
}


def make(mode: str, **settings: Any) -> PrimalForCausalLM:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    sizes = {"vocab_size": 30, "hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 2}
    small = {"intermediate_size": 16, "rank": 4, "landmarks": 6, "max_context": 40, "positions": "none"}
    return PrimalForCausalLM(PrimalConfig(**{**sizes, **small, **MODES[mode], **settings})).eval()


def train(model: torch.nn.Module, steps: int, lr: float, **call: torch.Tensor) -> list[float]:
    """Take steps on one batch and return the losses."""
    optimizer = torch.optim.Adam([p for p in model.train().parameters() if p.requires_grad], lr=lr)
    losses = []
    for _ in range(steps):
        loss = model(**call).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss))
    model.eval()
    return losses


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens (3, 9) and their attention mask: five, eight and nine tokens."""
    tokens = torch.randint(0, 30, (3, 9), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(tokens)
    mask[0, :4] = mask[1, :1] = 0
    return tokens, mask
