"""How far a student is from its teacher: at the replaced layers, and at the output.

The error is

    mean_i ‖y_i − t_i‖² / Var t  +  mean_b ‖ȳ_b − t̄_b‖² / Var t̄,

over tokens i and over the sequences' means t̄_b: what all tokens of a sequence share is little of a token's variance,
but all of a pooled embedding's. A constant output has 1 in each part.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .sites import StandIn
from .spectrum import call

Match = Callable[[Any, Any], Tensor | Sequence[Tensor]]


def relative_error(output: Tensor, target: Tensor, padding: Tensor | None = None) -> Tensor:
    """The error above; (B, N, d) with padding (B, N), or any other shape, whose tokens are then all rows."""
    if output.ndim != 3:
        return _ratio(output.flatten(0, -2), target.flatten(0, -2))
    if padding is None:
        tokens = _ratio(output.flatten(0, 1), target.flatten(0, 1))
        means = output.mean(1), target.mean(1)
    else:
        # Sums over all rows with zeros at padding: picking the valid rows would wait for the device.
        weight = (~padding)[..., None].to(output.dtype)
        output, target = (t.masked_fill(padding[..., None], 0.0) for t in (output, target))
        centre = target.sum((0, 1)) / weight.sum()
        variance = ((target - centre) * weight).square().sum()
        tokens = (output - target).square().sum() / variance.clamp(min=1e-12)
        count = weight.sum(1).clamp(min=1)
        means = output.sum(1) / count, target.sum(1) / count
    return tokens if len(target) < 2 else tokens + _ratio(*means)


def _ratio(output: Tensor, target: Tensor) -> Tensor:
    variance = (target - target.mean(0)).square().mean()
    return (output - target).square().mean() / variance.clamp(min=1e-12)


def block_error(teacher: nn.Module, pairs: dict[str, tuple[StandIn, nn.Module]]) -> Callable[[Any], Tensor]:
    """Of a batch: each new layer gets what the replaced layer got, and is compared with what it gave."""

    def error(batch: Any) -> Tensor:
        seen: dict[str, tuple[Any, Any, Any]] = {}
        with contextlib.ExitStack() as hooks, torch.no_grad():
            for name, (_, original) in pairs.items():
                handle = original.register_forward_hook(_keep(seen, name), with_kwargs=True)
                hooks.callback(handle.remove)
            call(teacher, batch)
        total = []
        for name, (student, _) in pairs.items():
            if name not in seen:
                raise ValueError(f"the teacher did not call {name} on this batch: there is nothing to fit it to")
            args, kwargs, target = seen[name]
            _, padding = student.tokens(*args, **kwargs)
            given = first_tensor(student(*args, **kwargs))
            total.append(relative_error(_batch_first(given, student), _batch_first(target, student), padding))
        return torch.stack(total).mean()

    return error


def end_error(model: nn.Module, teacher: nn.Module, match: Match | None) -> Callable[[Any], Tensor]:
    """Of a batch: the student's output, or what `match` takes of it, is compared with the teacher's."""

    def compared(top: nn.Module, batch: Any) -> Sequence[Tensor]:
        output = call(top, batch)
        given = first_tensor(output) if match is None else match(output, batch)
        return [given] if isinstance(given, Tensor) else given

    def error(batch: Any) -> Tensor:
        with torch.no_grad():
            targets = compared(teacher, batch)
        outputs = compared(model, batch)
        mask = batch.get("attention_mask") if isinstance(batch, Mapping) else None
        parts = []
        for output, target in zip(outputs, targets, strict=True):
            fits = mask is not None and mask.ndim == 2 and output.ndim == 3 and mask.shape == output.shape[:2]
            padding = ~mask.to(output.device).bool() if mask is not None and fits else None
            parts.append(relative_error(output, target, padding))
        return torch.stack(parts).mean()

    return error


def first_tensor(output: Any) -> Tensor:
    if isinstance(output, Tensor):
        return output
    if isinstance(output, Mapping):
        output = list(output.values())
    found = next((value for value in output if isinstance(value, Tensor)), None)
    if found is None:
        raise ValueError("the model's output holds no tensor to compare: say which with match=")
    return found


def _keep(seen: dict[str, Any], name: str) -> Any:
    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        # The teacher's cache of keys belongs to the teacher.
        plain = {key: value for key, value in kwargs.items() if key != "past_key_values"}
        seen[name] = args, plain, first_tensor(result)

    return hook


def _batch_first(t: Tensor, student: StandIn) -> Tensor:
    return t.movedim(student.batch_dim, 0) if t.ndim == 3 else t
