"""Random projections and hashes: drawn from a seed, stored as buffers, fixed in eval, redrawn in training.

The forward pass does not use torch's global generator: the seed of a layer determines its draws.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from .. import checks
from ..primal import is_recomputing


class RandomBuffers(nn.Module):
    """Mixin of layers with random buffers, made by `draw`.

    Args:
        seed: None draws one from torch's global generator.
        redraw_every: training forwards between two draws; None keeps the first draw. A compiled forward does not count:
            call `redraw` between steps.
    """

    def start_draws(self, seed: int | None, redraw_every: int | None) -> None:
        if redraw_every is not None:
            checks.positive("redraw_every", redraw_every)
        self.seed = int(torch.randint(2**31, (), device="cpu")) if seed is None else seed
        self.redraw_every = redraw_every
        self.draws = 0
        self.redraw()

    def draw(self, generator: torch.Generator) -> dict[str, Tensor]:
        """Return new values of the buffers by name, on the device of the generator."""
        raise NotImplementedError

    def redraw(self) -> None:
        """Draw the random buffers again. The n-th draw of a seed is always the same."""
        like = next(self.parameters())
        self._forwards_since_draw = 0
        self.draws += 1
        # One stream of seeds per layer; the odd factor separates the streams of neighbouring seeds.
        generator = torch.Generator("cpu" if like.is_meta else like.device)
        generator.manual_seed((self.seed * 0x9E3779B1 + self.draws) % 2**63)
        for name, value in self.draw(generator).items():
            # A new tensor, not a copy into the old one: an earlier forward may still be waiting for its backward.
            self.register_buffer(name, value.to(like.device, like.dtype))

    def count_forward(self) -> None:
        # A forward pass that activation checkpointing repeats needs the same draw.
        if not self.training or self.redraw_every is None or torch.compiler.is_compiling() or is_recomputing():
            return
        self._forwards_since_draw += 1
        if self._forwards_since_draw > self.redraw_every:
            self.redraw()
            self._forwards_since_draw = 1


def drawn_buffers(model: nn.Module) -> set[str]:
    """Return the names of all random buffers in the state dict."""
    layers = _random_layers(model).items()
    return {f"{path}.{name}".lstrip(".") for path, layer in layers for name, _ in layer.named_buffers(recurse=False)}


def draw_counts(model: nn.Module) -> dict[str, tuple[int, int]]:
    """Return each layer's number of draws and of forwards since the last draw, for `restore_draw_counts`.

    They are not in the state dict, which has the last draw itself.
    """
    return {path: (layer.draws, layer._forwards_since_draw) for path, layer in _random_layers(model).items()}


def restore_draw_counts(model: nn.Module, counts: Mapping[str, Sequence[int]]) -> None:
    """Continue the draws of another model, whose state dict was loaded."""
    for path, layer in _random_layers(model).items():
        layer.draws, layer._forwards_since_draw = counts.get(path, (layer.draws, 0))


def _random_layers(model: nn.Module) -> dict[str, RandomBuffers]:
    return {path: layer for path, layer in model.named_modules() if isinstance(layer, RandomBuffers)}
