"""`primal bench generate`: one more token of a whole language model after N tokens were read, and the state's size.

The all-Primal models read N random tokens for real, in stretches, and go on from the state that this leaves. Reading
would be quadratic for softmax, and what its keys are does not change the time: its cache is random.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from primal_attention.bench.decode import DecodeSettings, Reader, Stream, chosen, run_streams, state_bytes
from primal_attention.bench.settings import BenchError, Case
from primal_attention.models import lm as generation
from primal_attention.models.lm import LanguageConfig, LanguageModel, LanguageState
from primal_attention.nn.baselines.softmax import CacheState
from primal_attention.nn.blocks import BlockState

VOCABULARY = 8192
LENGTHS = tuple(1024 * 4**k for k in range(6))  # 1K … 1M
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "softmax": ("softmax (KV cache)", {"attention": ("softmax",)}),
    "primal-mean": ("Primal, mean", {"primal_mode": "mean", "positions": "sinusoidal"}),
    "primal-decay": ("Primal, decay + conv + gate", {"primal_mode": "decay", "conv": 4, "gate": True}),
    "primal-delta": ("Primal, delta + conv + gate", {"primal_mode": "delta", "conv": 4, "gate": True}),
}


@dataclass(frozen=True)
class GenerateSettings(DecodeSettings):
    """A run of `primal bench generate`."""

    layers: int = 6

    @property
    def file_name(self) -> str:
        return self.name or "generate"

    def cases(self) -> list[list[Case]]:
        fields: dict[str, Any] = {"dtype": self.torch_dtype, "device": self.on, "rank": self.rank, "causal": True}
        return [
            [Case(width, heads, self.batch, n, **fields) for n in sorted(set(self.lengths or LENGTHS))]
            for width, heads in self.widths
        ]

    def check(self) -> None:
        super().check()
        if self.layers < 1:
            raise BenchError(f"--layers must be above 0 (got {self.layers})")


@torch.no_grad()
def run(settings: GenerateSettings) -> dict[str, Any]:
    settings.check()
    field = [
        Stream(name, label, name.partition("-")[0], lambda cases, keywords=keywords: read(settings, keywords, cases))  # type: ignore[misc]
        for name, (label, keywords) in MODELS.items()
    ]
    return run_streams(settings, chosen(field, settings.only) if settings.only else field, "generate")


def read(settings: GenerateSettings, keywords: dict[str, Any], cases: list[Case]) -> Reader:
    model = build(settings, keywords, cases[0])
    reader, length = generation.Stream(model), 0
    for case in cases:
        if model.config.attention == ("softmax",):
            state = random_cache(model, case)
        else:
            while length < case.length:
                tokens = torch.randint(VOCABULARY, (case.batch, min(generation.PROMPT_CHUNK, case.length - length)))
                reader.read(tokens.to(case.device), None)
                length += tokens.shape[1]
            assert reader.state is not None
            state = reader.state
        token = torch.randint(VOCABULARY, (case.batch,)).to(case.device)

        def step(token: torch.Tensor = token, state: LanguageState = state) -> Any:
            logits, after = model.step(token, state)
            return logits.argmax(dim=-1), after

        _, after = step()
        yield step, state_bytes(after) // case.batch


def build(settings: GenerateSettings, keywords: dict[str, Any], case: Case) -> LanguageModel:
    fields = {"attention": ("primal",), "layers": settings.layers, "rank": case.rank, **keywords}
    config = LanguageConfig(
        VOCABULARY, embed_dim=case.embed_dim, num_heads=case.num_heads, ffn_dim=4 * case.embed_dim, **fields
    )
    return LanguageModel(config).to(case.device, case.dtype).eval()


def random_cache(model: LanguageModel, case: Case) -> LanguageState:
    """The state of a softmax model after `case.length` tokens that nobody has read."""
    position = torch.full((case.batch,), case.length, device=case.device)
    valid = torch.ones(case.batch, case.length, dtype=torch.bool, device=case.device)
    shape = (case.batch, case.num_heads, case.length, case.embed_dim // case.num_heads)

    def keys() -> torch.Tensor:
        return torch.randn(shape, device=case.device, dtype=case.dtype)

    blocks = [BlockState(CacheState(keys(), keys(), valid, position), None) for _ in model.blocks]
    return LanguageState(tuple(blocks), position)
