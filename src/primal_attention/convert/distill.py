"""distill: new Primal-Attention layers learn from the model whose attention they replaced, on unlabelled inputs.

The start is a regression in closed form (`start`). Block by block, each new layer gets what the replaced layer got and
is fitted to what it gave; all layers at once, since none sees another's output. Then end to end, the student's output
is fitted to the teacher's. The error is

    mean_i ‖y_i − t_i‖² / Var t  +  mean_b ‖ȳ_b − t̄_b‖² / Var t̄,

over tokens i and over the sequences' means t̄_b: what all tokens of a sequence share is little of a token's variance,
but all of a pooled embedding's.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ..nn.objective import ksvd_loss, primal_layers
from .sites import StandIn
from .spectrum import call
from .start import start

NEW = ("w_e", "w_r", "sqrt_lambda", "score_proj", "decay_logit")
KEPT_RATE = 0.3  # weights that were trained before move more slowly than those that start from nothing
CLIP = 1.0


@dataclass
class Distilled:
    """The student, and its error at every step of the two stages (1 is what a constant output has)."""

    model: nn.Module
    started: list[str] = field(default_factory=list)
    """The layers that started from a regression on the replaced heads' outputs."""
    block_errors: list[float] = field(default_factory=list)
    end_errors: list[float] = field(default_factory=list)


def distill(
    model: nn.Module,
    teacher: nn.Module,
    data: Iterable[Any],
    *,
    start_batches: int = 16,
    block_steps: int = 200,
    end_steps: int = 200,
    lr: float = 1e-3,
    end_lr: float = 5e-4,
    train: Literal["layers", "blocks", "all"] = "blocks",
    match: Callable[[Any, Any], Tensor | Sequence[Tensor]] | None = None,
    ksvd: float = 0.0,
    progress: bool = True,
) -> Distilled:
    """Fit the Primal layers of a primalized model to the model it was made from. Changes `model` in place.

    Args:
        model: the student, a primalized copy of the teacher.
        teacher: the original; it is not changed.
        data: batches of inputs (a tensor, a tuple of arguments or a dict of keywords each), read as often as needed.
        start_batches: what the new weights' start is computed from; fewer than 2 leave them as they are.
        block_steps, end_steps: of the two stages; 0 leaves a stage out.
        lr, end_lr: highest learning rates of the new weights in the two stages, one cycle each; kept ones: 0.3 of it.
        train: what the second stage trains: the replaced layers, the blocks around them, or all.
        match: the tensor to compare, or several, from a model's output and the batch; None takes the first tensor.
        ksvd: weight of the KSVD objective J² beside the error.
    """
    pairs = matched(model, teacher)
    last = _trained(model, pairs, train)
    result = Distilled(model)
    modes = {m: m.training for top in (model, teacher) for m in top.modules()}
    grads = {p: p.requires_grad for top in (model, teacher) for p in top.parameters()}
    teacher.eval()
    model.eval()  # dropout would be noise on top of a target that has none
    if ksvd:
        for layer in primal_layers(model).values():
            layer.train()  # J is kept in training mode only
    try:
        teacher.requires_grad_(False)
        if start_batches > 1:
            result.started = start(teacher, pairs, _repeated(data, start_batches))
        chosen = nn.ModuleList(student for student, _ in pairs.values())
        errors = _block_errors(model, teacher, pairs, ksvd)
        result.block_errors = _fit(model, chosen, grads, data, errors, block_steps, lr, "block by block", progress)
        errors = _end_errors(model, teacher, match, ksvd)
        result.end_errors = _fit(model, last, grads, data, errors, end_steps, end_lr, "end to end", progress)
    finally:
        for module, training in modes.items():
            module.training = training
        for parameter, needed in grads.items():
            parameter.requires_grad_(needed)
    return result


def matched(model: nn.Module, teacher: nn.Module) -> dict[str, tuple[StandIn, nn.Module]]:
    """The replaced layers by name, each with what stood in its place."""
    students = {name: module for name, module in model.named_modules() if isinstance(module, StandIn)}
    if not students:
        raise ValueError(
            f"model has no layer that primalize replaced ({type(model).__name__}): there is nothing to fit"
        )
    originals = dict(teacher.named_modules())
    pairs = {}
    for name, student in students.items():
        original = originals.get(name)
        if original is None:
            raise ValueError(f"teacher has no module {name}, which model has: it must be the model before primalize")
        if isinstance(original, StandIn):
            raise ValueError(f"teacher's {name} is Primal-Attention too: it must be the model before primalize")
        pairs[name] = (student, original)
    return pairs


def relative_error(output: Tensor, target: Tensor, padding: Tensor | None = None) -> Tensor:
    """The error above; (B, N, d) with padding (B, N), or any other shape, whose tokens are then all rows."""
    if output.ndim != 3:
        return _ratio(output.flatten(0, -2), target.flatten(0, -2))
    valid = torch.ones_like(output[..., 0], dtype=torch.bool) if padding is None else ~padding
    weight = valid[..., None].to(output.dtype)
    count = weight.sum(1).clamp(min=1)
    means = [(t * weight).sum(1) / count for t in (output, target)]
    tokens = _ratio(output[valid], target[valid])
    return tokens if len(target) < 2 else tokens + _ratio(*means)


def _ratio(output: Tensor, target: Tensor) -> Tensor:
    variance = (target - target.mean(0)).square().mean()
    return (output - target).square().mean() / variance.clamp(min=1e-12)


def _block_errors(
    model: nn.Module, teacher: nn.Module, pairs: dict[str, tuple[StandIn, nn.Module]], ksvd: float
) -> Callable[[Any], Tensor]:
    def errors(batch: Any) -> Tensor:
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
            given = _first(student(*args, **kwargs))
            total.append(relative_error(_batch_first(given, student), _batch_first(target, student), padding))
        loss = torch.stack(total).mean()
        return loss + ksvd * ksvd_loss(model) if ksvd else loss

    return errors


def _keep(seen: dict[str, Any], name: str) -> Any:
    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        # The teacher's cache of keys belongs to the teacher.
        plain = {key: value for key, value in kwargs.items() if key != "past_key_values"}
        seen[name] = args, plain, _first(result)

    return hook


def _end_errors(
    model: nn.Module, teacher: nn.Module, match: Callable[[Any, Any], Tensor | Sequence[Tensor]] | None, ksvd: float
) -> Callable[[Any], Tensor]:
    def compared(top: nn.Module, batch: Any) -> Sequence[Tensor]:
        output = call(top, batch)
        given = _first(output) if match is None else match(output, batch)
        return [given] if isinstance(given, Tensor) else given

    def errors(batch: Any) -> Tensor:
        with torch.no_grad():
            targets = compared(teacher, batch)
        outputs = compared(model, batch)
        mask = batch.get("attention_mask") if isinstance(batch, Mapping) else None
        parts = []
        for output, target in zip(outputs, targets, strict=True):
            fits = mask is not None and mask.ndim == 2 and output.ndim == 3 and mask.shape == output.shape[:2]
            padding = ~mask.to(output.device).bool() if mask is not None and fits else None
            parts.append(relative_error(output, target, padding))
        loss = torch.stack(parts).mean()
        return loss + ksvd * ksvd_loss(model) if ksvd else loss

    return errors


def _fit(
    model: nn.Module,
    chosen: nn.Module,
    allowed: Mapping[nn.Parameter, bool],
    data: Iterable[Any],
    errors: Callable[[Any], Tensor],
    steps: int,
    lr: float,
    what: str,
    progress: bool,
) -> list[float]:
    if steps < 1:
        return []
    model.requires_grad_(False)  # nothing is kept for the way back but for what is trained
    new: list[nn.Parameter] = []
    kept: list[nn.Parameter] = []
    for name, parameter in chosen.named_parameters():
        if allowed.get(parameter):
            parameter.requires_grad_(True)
            (new if any(part in NEW for part in name.split(".")) else kept).append(parameter)
    groups = [{"params": new, "lr": lr}, {"params": kept, "lr": KEPT_RATE * lr}]
    optimiser = torch.optim.AdamW(groups, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, [g["lr"] for g in groups], total_steps=steps + 1)  # type: ignore[misc]
    history: list[float] = []
    with _shown(steps, what, progress) as show:
        for batch in _repeated(data, steps):
            loss = errors(batch)
            if not torch.isfinite(loss):
                raise ValueError(f"the error is no longer a finite number at step {len(history) + 1} {what}: lower lr")
            optimiser.zero_grad(set_to_none=True)
            loss.backward()
            torch.nn.utils.clip_grad_norm_([*new, *kept], CLIP)
            optimiser.step()
            schedule.step()
            history.append(float(loss.detach()))
            show(history)
    return history


@contextlib.contextmanager
def _shown(steps: int, what: str, progress: bool) -> Iterator[Callable[[list[float]], None]]:
    """Ten lines, or a bar that moves ten times: a line per step would fill a log."""
    if not progress:
        yield lambda history: None
        return
    from ..bench.progress import Progress

    marks = sorted({max(1, steps * i // 10) for i in range(1, 11)})
    with Progress(len(marks), what) as bar:

        def show(history: list[float]) -> None:
            if len(history) in marks:
                bar.advance(f"{what}: step {len(history)} of {steps}, error {history[-1]:.4f}")

        yield show


def _repeated(data: Iterable[Any], steps: int) -> Iterator[Any]:
    done = 0
    while done < steps:
        before = done
        for batch in data:
            yield batch
            done += 1
            if done == steps:
                return
        if done == before:
            raise ValueError(
                f"data gave no batch after {done} of {steps} steps: give a list or a loader, to read again"
            )


def _trained(model: nn.Module, pairs: dict[str, Any], train: str) -> nn.Module:
    if train == "all":
        return model
    if train == "layers":
        return nn.ModuleList(student for student, _ in pairs.values())
    if train == "blocks":
        return nn.ModuleList(model.get_submodule(name.rpartition(".")[0]) for name in pairs)
    raise ValueError(f"train must be 'layers', 'blocks' or 'all' (got {train!r})")


def _first(output: Any) -> Tensor:
    if isinstance(output, Tensor):
        return output
    if isinstance(output, Mapping):
        output = list(output.values())
    found = next((value for value in output if isinstance(value, Tensor)), None)
    if found is None:
        raise ValueError("the model's output holds no tensor to compare: say which with match=")
    return found


def _batch_first(t: Tensor, student: StandIn) -> Tensor:
    return t.movedim(student.batch_dim, 0) if t.ndim == 3 else t
