"""distill: train new Primal-Attention layers to imitate the model whose attention they replaced, on unlabelled inputs.

1. Initialisation in closed form. With q, k and the output map kept, a head's output is linear in the products z of its
   features with the landmarks,

       o_i = M_qᵀ z_i^q + M_kᵀ z_i^k + b,    z_i^q = f(X)_h φ(q_i),   z_i^k = f(X)_h φ(k_i),

   so M_q and M_k are a ridge regression of the outputs of the replaced head, cross-validated on batches. Then
   W_e = M_q A, W_r = M_k B and W_o = [A; B]ᵀ, where A and B are the s directions of largest variance of the fitted
   outputs: lossless from rank = head width on.
2. Block by block: every new layer gets the input of the replaced one and is fitted to its output, all at once.
3. End to end: the output of the student is fitted to the teacher's.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ..nn.objective import ksvd_loss, primal_layers
from ..nn.primal import PrimalAttention
from ..utils.progress import Progress
from .adapters import Replacement
from .spectrum import evaluation_mode, run_model

Match = Callable[[Any, Any], Tensor | Sequence[Tensor]]
Error = Callable[[Any], Tensor]
Pairs = dict[str, tuple[Replacement, nn.Module]]
RIDGES = (1e-3, 1e-2, 1e-1, 1.0, 10.0, 100.0, 1e4)  # times the mean variance of the features; the last fits a constant
NEW_PARAMETERS = ("w_e", "w_r", "sqrt_lambda", "score_proj", "decay_logit")
WARM_UP = 0.1  # share of the steps
BETAS = (0.9, 0.98)  # errors fall so fast at first that old squares mislead


@dataclass
class Distilled:
    """The student and its errors; 1 is the error of a constant output.

    Attributes:
        model: the student.
        started: names of the layers that were initialised by regression.
        block_errors: error of every step, block by block.
        end_errors: error of every step, end to end.
    """

    model: nn.Module
    started: list[str] = field(default_factory=list)
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
    progress: bool = True,
) -> Distilled:
    """Fit the Primal layers of a primalized model to the model it was made from. Changes `model` in place.

    Args:
        model: the student, a primalized copy of the teacher.
        teacher: the original; it is not changed.
        data: batches of inputs (a tensor, a tuple of arguments or a dict of keywords each), read as often as needed.
        start_batches: batches for the initialisation; fewer than 2 leave the new weights as they are.
        block_steps: steps block by block; 0 skips this stage.
        end_steps: steps end to end; 0 skips this stage.
        lr: highest learning rate of the new weights, block by block.
        end_lr: highest learning rate of the new weights, end to end.
        kept_rate: learning rate of pretrained weights relative to these: a number, or a function of a weight's name in
            the model; 0 freezes the weight.
        train: the weights that are trained end to end: the replaced layers, the blocks around them, or all weights.
        match: returns the tensor or tensors to compare from a model's output and the batch; None is the first tensor.
        ksvd: weight of the KSVD loss beside the error.
        precision: "bf16-mixed" is much faster on a GPU.
        progress: show the error during training.

    Returns:
        The student and its errors.
    """
    if precision not in ("32-true", "bf16-mixed"):
        raise ValueError(f"precision must be '32-true' or 'bf16-mixed' (got {precision!r})")
    pairs = _match_layers(model, teacher)
    layers = nn.ModuleList(student for student, _ in pairs.values())
    blocks_around = nn.ModuleList(model.get_submodule(name.rpartition(".")[0]) for name in pairs)
    parts = {"layers": layers, "blocks": blocks_around, "all": model}
    if train not in parts:
        raise ValueError(f"train must be 'layers', 'blocks' or 'all' (got {train!r})")
    result = Distilled(model)
    names = {parameter: name for name, parameter in model.named_parameters()}
    grads = {p: p.requires_grad for top in (model, teacher) for p in top.parameters()}

    def fit_stage(stage: str, part: nn.Module, error: Error, steps: int, lr: float) -> list[float]:
        model.requires_grad_(False)
        groups: dict[float, list[nn.Parameter]] = {}  # by learning rate
        for name, parameter in part.named_parameters():
            is_new = any(piece in NEW_PARAMETERS for piece in name.split("."))
            factor = kept_rate(names[parameter]) if callable(kept_rate) else kept_rate
            rate = lr if is_new else lr * factor
            if grads[parameter] and rate > 0:
                parameter.requires_grad_(True)
                groups.setdefault(rate, []).append(parameter)
        if steps > 0 and not groups:
            raise ValueError(f"nothing to train {stage}: every weight has requires_grad False or rate 0")
        loss = error if not ksvd else lambda batch: error(batch) + ksvd * ksvd_loss(model)
        return _fit(groups, data, loss, steps, stage, precision == "bf16-mixed", progress)

    with evaluation_mode(model, teacher):  # the targets have no dropout
        for layer in primal_layers(model).values() if ksvd else ():
            layer.train()  # J exists in training mode only
        try:
            teacher.requires_grad_(False)
            if start_batches > 1:
                result.started = initialise(teacher, pairs, _cycle(data, start_batches))
            blocks, end = block_error(teacher, pairs), end_error(model, teacher, match)
            result.block_errors = fit_stage("block by block", layers, blocks, block_steps, lr)
            result.end_errors = fit_stage("end to end", parts[train], end, end_steps, end_lr)
        finally:
            for parameter, requires_grad in grads.items():
                parameter.requires_grad_(requires_grad)
    return result


def _match_layers(model: nn.Module, teacher: nn.Module) -> Pairs:
    """Return the replaced layers by name, each with the module that it replaced."""
    students = {name: module for name, module in model.named_modules() if isinstance(module, Replacement)}
    if not students:
        raise ValueError(f"model has no layer that primalize replaced ({type(model).__name__}): nothing to fit")
    originals = dict(teacher.named_modules())
    for name in students:
        if name not in originals:
            raise ValueError(f"teacher has no module {name}, which model has: it must be the model before primalize")
        if isinstance(originals[name], Replacement):
            raise ValueError(f"teacher's {name} is Primal-Attention too: it must be the model before primalize")
    return {name: (student, originals[name]) for name, student in students.items()}


def _cycle(data: Iterable[Any], steps: int) -> Iterator[Any]:
    """Yield `steps` batches, starting again when the data end."""
    done = 0
    while done < steps:
        before = done
        for batch in data:
            yield batch
            done += 1
            if done == steps:
                return
        if done == before:
            raise ValueError(f"data gave no batch after {done} of {steps} steps: pass a list or a loader")


# Training


def _fit(
    groups: Mapping[float, list[nn.Parameter]],
    data: Iterable[Any],
    error: Error,
    steps: int,
    stage: str,
    half: bool,
    progress: bool,
) -> list[float]:
    """Minimise the error by AdamW and return it at every step; if it is not finite, restore the weights and raise."""
    if steps < 1:
        return []
    weights = [p for group in groups.values() for p in group]
    before, device = [p.detach().clone() for p in weights], weights[0].device
    optimizer = torch.optim.AdamW([{"params": g, "lr": r} for r, g in groups.items()], betas=BETAS, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: learning_rate_factor(step, steps))
    enabled = half or torch.is_autocast_enabled(device.type)
    dtype = torch.bfloat16 if half else torch.get_autocast_dtype(device.type)
    errors: list[Tensor] = []
    history: list[float] = []
    shown = {max(1, steps * i // 10) for i in range(1, 11)}  # a line per step would fill a log
    bar = Progress(len(shown), stage) if progress else contextlib.nullcontext()
    try:
        with bar as lines:
            for step, batch in enumerate(_cycle(data, steps), 1):
                optimizer.zero_grad(set_to_none=True)
                # A caller's autocast would keep the weights that it cast in an earlier step.
                with torch.autocast(device.type, dtype=dtype, enabled=enabled, cache_enabled=False):
                    loss = error(batch)
                with torch.autocast(device.type, enabled=False):
                    loss.backward()  # type: ignore[no-untyped-call]
                    nn.utils.clip_grad_norm_(weights, 1.0)
                    optimizer.step()
                    schedule.step()
                errors.append(loss.detach())
                if step not in shown:
                    continue
                history = torch.stack(errors).tolist()  # synchronises with a GPU
                if broken := [number for number, value in enumerate(history, 1) if not math.isfinite(value)]:
                    raise ValueError(f"the error is no longer a finite number at step {broken[0]} {stage}: lower lr")
                if lines is not None:
                    lines.advance(f"{stage}: step {step} of {steps}, error {history[-1]:.4f}")
    except ValueError:
        with torch.no_grad():
            for parameter, value in zip(weights, before, strict=True):
                parameter.copy_(value)
        raise
    finally:
        for parameter in weights:
            parameter.grad = None
    return history


def learning_rate_factor(step: int, steps: int) -> float:
    """Return the share of the highest learning rate at a step, from 0: linear warm-up, then a cosine."""
    warm = max(1, round(WARM_UP * steps))
    if step < warm:
        return (step + 1) / warm
    return 0.5 * (1 + math.cos(math.pi * (step - warm + 1) / max(1, steps - warm + 1)))


# Errors


def relative_error(output: Tensor, target: Tensor, padding: Tensor | None = None) -> Tensor:
    """Return mean_i ‖y_i − t_i‖² / Var t + mean_b ‖ȳ_b − t̄_b‖² / Var t̄ over tokens i and sequence means t̄_b.

    The mean of a sequence is little of its tokens' variance, but all of a pooled embedding's. Inputs are (B, N, d) with
    padding (B, N); of other shapes all rows are tokens and there is no second term.
    """
    if output.ndim != 3:
        return _relative_square(output.flatten(0, -2), target.flatten(0, -2))
    if padding is None:
        padding = torch.zeros(output.shape[:2], dtype=torch.bool, device=output.device)
    # Sums with zeros at padding; indexing the valid rows would synchronise with the device.
    weight = (~padding)[..., None].to(output.dtype)
    output, target = (t.masked_fill(padding[..., None], 0.0) for t in (output, target))
    centre = target.sum((0, 1)) / weight.sum()
    variance = ((target - centre) * weight).square().sum()
    tokens = (output - target).square().sum() / variance.clamp(min=1e-12)
    count = weight.sum(1).clamp(min=1)
    means = output.sum(1) / count, target.sum(1) / count
    return tokens if len(target) < 2 else tokens + _relative_square(*means)


def _relative_square(output: Tensor, target: Tensor) -> Tensor:
    variance = (target - target.mean(0)).square().mean()
    return (output - target).square().mean() / variance.clamp(min=1e-12)


def block_error(teacher: nn.Module, pairs: Pairs) -> Error:
    """Return the error of a batch: new layers get the inputs of the replaced ones and are compared by their outputs."""

    def error(batch: Any) -> Tensor:
        calls = _record_calls(teacher, batch, {name: original for name, (_, original) in pairs.items()})
        errors = []
        for name, (student, _) in pairs.items():
            if name not in calls:
                raise ValueError(f"the teacher did not call {name} on this batch: there is nothing to fit it to")
            args, kwargs, target = calls[name]
            _, padding = student.tokens(*args, **kwargs)
            output = first_tensor(student(*args, **kwargs))
            output, target = (t.movedim(student.batch_dim, 0) if t.ndim == 3 else t for t in (output, target))
            errors.append(relative_error(output, target, padding))
        return torch.stack(errors).mean()

    return error


def end_error(model: nn.Module, teacher: nn.Module, match: Match | None) -> Error:
    """Return the error of a batch: the student's output, or what `match` selects, compared with the teacher's."""

    def outputs(network: nn.Module, batch: Any) -> Sequence[Tensor]:
        output = run_model(network, batch)
        selected = first_tensor(output) if match is None else match(output, batch)
        return [selected] if isinstance(selected, Tensor) else selected

    def error(batch: Any) -> Tensor:
        with torch.no_grad():
            targets = outputs(teacher, batch)
        mask = batch.get("attention_mask") if isinstance(batch, Mapping) else None
        errors = []
        for output, target in zip(outputs(model, batch), targets, strict=True):
            has_padding = mask is not None and output.ndim == 3 and mask.shape == output.shape[:2]
            padding = ~mask.to(output.device).bool() if mask is not None and has_padding else None
            errors.append(relative_error(output, target, padding))
        return torch.stack(errors).mean()

    return error


def first_tensor(output: Any) -> Tensor:
    if isinstance(output, Tensor):
        return output
    values = output.values() if isinstance(output, Mapping) else output
    tensor = next((value for value in values if isinstance(value, Tensor)), None)
    if tensor is None:
        raise ValueError("the model's output has no tensor to compare: select one with match=")
    return tensor


@torch.no_grad()
def _record_calls(teacher: nn.Module, batch: Any, modules: Mapping[str, nn.Module]) -> dict[str, Any]:
    """Run the teacher and return arguments, keywords and output of each module's call, without the cache."""
    calls: dict[str, Any] = {}

    def record(name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        own = {key: value for key, value in kwargs.items() if key != "past_key_values"}
        calls[name] = args, own, first_tensor(output)

    with contextlib.ExitStack() as stack:
        for name, module in modules.items():
            stack.callback(module.register_forward_hook(partial(record, name), with_kwargs=True).remove)
        run_model(teacher, batch)
    return calls


# Initialisation


@dataclass(frozen=True)
class Moments:
    """Sums over tokens, per head, of [z; 1][z; 1]ᵀ and [z; 1] oᵀ."""

    zz: Tensor
    zo: Tensor
    count: int

    @classmethod
    def of(cls, z: Tensor, o: Tensor) -> Moments:
        """Return the sums of z (T, H, f) and o (T, H, p)."""
        z = torch.cat([z, torch.ones_like(z[..., :1])], -1).double()
        return cls(torch.einsum("thf,thg->hfg", z, z), torch.einsum("thf,thp->hfp", z, o.double()), z.shape[0])

    def __add__(self, other: Moments) -> Moments:
        return Moments(self.zz + other.zz, self.zo + other.zo, self.count + other.count)

    @property
    def covariance(self) -> Tensor:
        """Covariance of the features, (H, f, f)."""
        mean = self.zz[:, :-1, -1] / self.count
        return self.zz[:, :-1, :-1] / self.count - mean[:, :, None] * mean[:, None, :]

    def solve(self, ridge: Tensor) -> Tensor:
        """Return the regression with one ridge per head, (H, f + 1, p); the last row is the constant."""
        mean_z, mean_o = self.zz[:, :-1, -1] / self.count, self.zo[:, -1] / self.count
        covariance = self.covariance
        cross = self.zo[:, :-1] / self.count - mean_z[:, :, None] * mean_o[:, None, :]
        size = covariance.diagonal(dim1=-2, dim2=-1).mean(-1).clamp(min=1e-12)
        eye = torch.eye(covariance.shape[-1], dtype=covariance.dtype, device=covariance.device)
        factor = torch.linalg.cholesky(covariance + (ridge * size)[:, None, None] * eye)
        maps = torch.cholesky_solve(cross, factor)
        return torch.cat([maps, (mean_o - torch.einsum("hf,hfp->hp", mean_z, maps))[:, None]], 1)

    def error(self, maps: Tensor) -> Tensor:
        """Return the mean square error of a regression on these tokens, per head, up to a constant."""
        square = torch.einsum("hfp,hfg,hgp->h", maps, self.zz, maps)
        return (square - 2 * (maps * self.zo).sum((1, 2))) / self.count


def best_ridge(first: Moments, second: Moments) -> Tensor:
    """Return the ridge of each head whose fit on one half has the least error on the other, (H,).

    Tokens of a sequence share their landmarks, so the effective number of samples is below the number of tokens.
    """
    ridges = first.zz.new_tensor(RIDGES)
    errors = []
    for ridge in ridges:
        each = ridge.expand(len(first.zz))
        errors.append(second.error(first.solve(each)) + first.error(second.solve(each)))
    return ridges[torch.stack(errors).argmin(0)]


@torch.no_grad()
def initialise(teacher: nn.Module, pairs: Pairs, batches: Iterable[Any]) -> list[str]:
    """Set the new weights by regression; return the names of the layers where the teacher shows its heads' outputs."""
    moments: dict[str, dict[int, Moments]] = {name: {} for name in pairs}  # of even and of odd batches
    maps = {name: _find_output_map(original, student.primal) for name, (student, original) in pairs.items()}
    for number, batch in enumerate(batches):
        heads: dict[str, Tensor] = {}
        with contextlib.ExitStack() as stack:
            for name, module in maps.items():
                if module is not None:  # its input is the output of the heads
                    hook = partial(_store_input, heads, name)
                    stack.callback(module.register_forward_pre_hook(hook).remove)
            calls = _record_calls(teacher, batch, {name: original for name, (_, original) in pairs.items()})
        for name in heads.keys() & calls.keys():
            student, (args, kwargs, _) = pairs[name][0], calls[name]
            x, padding = student.tokens(*args, **kwargs)
            if x.shape == heads[name].shape:
                factors = student.kernel_factors(*args, **kwargs)
                half, new = number % 2, _compute_moments(factors, padding, heads[name])
                moments[name][half] = moments[name][half] + new if half in moments[name] else new
    fitted = [name for name, halves in moments.items() if len(halves) == 2]
    for name in fitted:
        both = moments[name][0] + moments[name][1]
        ridge = best_ridge(moments[name][0], moments[name][1])
        _set_weights(pairs[name][0].primal, both.solve(ridge), both.covariance)
    return fitted


def _store_input(inputs: dict[str, Tensor], name: str, module: nn.Module, args: tuple[Any, ...]) -> None:
    inputs[name] = args[0]


def _compute_moments(factors: tuple[Tensor, Tensor], padding: Tensor | None, heads: Tensor) -> Moments:
    features = torch.cat(factors, -1).transpose(1, 2)  # (B, N, H, f)
    valid = torch.ones_like(heads[..., 0], dtype=torch.bool) if padding is None else ~padding
    return Moments.of(features[valid], heads.unflatten(-1, (features.shape[2], -1))[valid])


def _set_weights(layer: PrimalAttention, fit: Tensor, covariance: Tensor) -> None:
    maps, constants = fit[:, :-1], fit[:, -1]
    half, rank = maps.shape[1] // 2, layer.rank
    directions = min(rank, layer.head_dim)
    layer.score_proj.weight.zero_()
    for weights, part, columns in ((layer.w_e, slice(0, half), 0), (layer.w_r, slice(half, None), rank)):
        m, c = maps[:, part], covariance[:, part, part]
        vectors = torch.linalg.eigh(torch.einsum("hfp,hfg,hgq->pq", m, c, m))[1]
        basis = vectors.flip(-1)[:, :directions]  # (p, directions)
        weights[..., :directions].copy_(m @ basis)
        layer.score_proj.weight[:, columns : columns + directions].copy_(basis)
    if layer.score_proj.bias is not None and layer.out_proj.bias is not None:
        # The heads share one bias, so their constants go through the output map into its bias.
        layer.score_proj.bias.zero_()
        layer.out_proj.bias.add_(layer.out_proj.weight @ constants.flatten().to(layer.out_proj.weight))


def _find_output_map(original: nn.Module, layer: PrimalAttention) -> nn.Module | None:
    """Return the output map of the replaced attention: the module whose weight the new layer copied."""
    if isinstance(original, nn.MultiheadAttention):
        return None  # it never calls its output map as a module
    weight = layer.out_proj.weight
    for module in original.modules():
        other: Any = getattr(module, "weight", None)
        has_shape = isinstance(other, Tensor) and other.shape == weight.shape
        if has_shape and (torch.equal(other, weight) or torch.equal(other.T, weight)):
            return module
    return None
