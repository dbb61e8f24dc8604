"""distill: new Primal-Attention layers learn from the model whose attention they replaced, on unlabelled inputs.

The start is a regression in closed form (`start`). Block by block, each new layer gets what the replaced layer got and
is fitted to what it gave; all layers at once, since none sees another's output. Then end to end, the student's output
is fitted to the teacher's (`errors`). Each stage is a short Lightning run (`fitting`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import Tensor, nn

from ..nn.objective import ksvd_loss, primal_layers
from .errors import Match, block_error, end_error
from .fitting import fit, repeated
from .sites import StandIn
from .start import start


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
    kept_rate: float | Callable[[str], float] = 0.3,
    train: Literal["layers", "blocks", "all"] = "blocks",
    match: Match | None = None,
    ksvd: float = 0.0,
    precision: Literal["32-true", "bf16-mixed"] = "32-true",
    graph: bool = True,
    progress: bool = True,
) -> Distilled:
    """Fit the Primal layers of a primalized model to the model it was made from. Changes `model` in place.

    Args:
        model: the student, a primalized copy of the teacher.
        teacher: the original; it is not changed.
        data: batches of inputs (a tensor, a tuple of arguments or a dict of keywords each), read as often as needed.
        start_batches: what the new weights' start is computed from; fewer than 2 leave them as they are.
        block_steps, end_steps: of the two stages; 0 leaves a stage out.
        lr, end_lr: highest learning rates of the new weights in the two stages.
        kept_rate: the rate of weights that were trained before, as a part of these: one number, or a function of a
            weight's name in the model, where 0 leaves a weight as it is.
        train: what the second stage trains: the replaced layers, the blocks around them, or all.
        match: the tensor to compare, or several, from a model's output and the batch; None takes the first tensor.
        ksvd: weight of the KSVD objective J² beside the error.
        precision: of the two stages, as Lightning names it; "bf16-mixed" is much faster on a GPU.
        graph: on a GPU, record the steps of the first four batch shapes as CUDA graphs. Where a model cannot be
            recorded, since it looks at its numbers on the way, a warning says why and the steps run as usual.
    """
    pairs = matched(model, teacher)
    last = _trained(model, pairs, train)
    result = Distilled(model)
    names = {parameter: name for name, parameter in model.named_parameters()}
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
            result.started = start(teacher, pairs, repeated(data, start_batches))

        def kept(parameter: nn.Parameter) -> float:
            return kept_rate(names[parameter]) if callable(kept_rate) else kept_rate

        def stage(what: str, chosen: nn.Module, error: Callable[[Any], Tensor], steps: int, lr: float) -> list[float]:
            model.requires_grad_(False)  # nothing is kept for the way back but for what is trained
            whole = error if not ksvd else lambda batch: error(batch) + ksvd * ksvd_loss(model)
            how: dict[str, Any] = {"precision": precision, "graph": graph, "progress": progress}
            return fit(chosen, grads, data, whole, steps, lr=lr, kept_rate=kept, what=what, **how)

        layers = nn.ModuleList(student for student, _ in pairs.values())
        blocks, end = block_error(teacher, pairs), end_error(model, teacher, match)
        result.block_errors = stage("block by block", layers, blocks, block_steps, lr)
        result.end_errors = stage("end to end", last, end, end_steps, end_lr)
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


def _trained(model: nn.Module, pairs: dict[str, Any], train: str) -> nn.Module:
    if train == "all":
        return model
    if train == "layers":
        return nn.ModuleList(student for student, _ in pairs.values())
    if train == "blocks":
        return nn.ModuleList(model.get_submodule(name.rpartition(".")[0]) for name in pairs)
    raise ValueError(f"train must be 'layers', 'blocks' or 'all' (got {train!r})")
