"""Export models as ONNX files, which run in onnxruntime without torch.

    export_onnx(classifier, "model.onnx", {"x": x, "key_padding_mask": mask})    # any batch size and length
    export_streaming(language_model, "model.onnx", tokens)                       # the state is input and output

The layers are exported by the equations of `ops/reference.py`, whatever their backend is. Models are copied to the CPU
in evaluation mode first, so the original does not change.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_flatten_with_path, tree_map_only, tree_unflatten

from primal_attention.nn.delta import DeltaPrimalAttention
from primal_attention.nn.objective import primal_layers
from primal_attention.utils.files import write_atomically

MAX_BYTES = 2**31 - 2**20  # of the weights: a protobuf file ends at 2 GiB


def export_onnx(
    model: nn.Module, file: str | Path, inputs: Mapping[str, Tensor], outputs: Sequence[str] = ("output",)
) -> None:
    """Write a model whose calls are independent of each other, such as a classifier.

    Args:
        model: called with the inputs as keywords. Layers with the delta rule need `export_streaming`.
        file: the ONNX file.
        inputs: an example of each input, (B, N, …), by the name of the argument. B and N, both at least 2 here, are
            dynamic in the file.
        outputs: names of the outputs.
    """
    if any(isinstance(layer, DeltaPrimalAttention) for layer in model.modules()):
        raise ValueError("layers with the delta rule are exported by export_streaming only, one token per call")
    model = _prepare(model)
    if hasattr(getattr(model, "config", None), "use_cache"):  # of transformers, whose caches cannot be outputs
        model.config.use_cache = False  # type: ignore[union-attr]
    shapes = {name: dict.fromkeys((0, 1), torch.export.Dim.DYNAMIC) for name in inputs}
    _write(Path(file), model, ((), dict(inputs)), shapes, list(inputs), outputs)


def export_streaming(
    model: nn.Module, file: str | Path, tokens: Tensor, *, name: str = "tokens", single_token: bool = False
) -> list[str]:
    """Write a causal model with its state as inputs and outputs.

    The inputs are the tokens and one tensor per part of the state, named `state.…`; the outputs are `output` and the
    state after the tokens, named `next.…`. Before the first token every part of the state is zero. The batch size is
    dynamic, and so is the number of tokens of a call, unless `single_token` is set.

    Args:
        model: a causal model with `initial_state` and `model(tokens, state=…, return_state=True)`, such as
            `LanguageModel` or a causal `PrimalAttention`.
        file: the ONNX file.
        tokens: an example of the first input, (B, N, …), with B and N at least 2.
        name: name of the first input.
        single_token: read one token per call, which is a smaller graph. Models with the delta rule always do.

    Returns:
        The names of the inputs that are parts of the state.
    """
    model = _prepare(model)
    single_token = single_token or any(isinstance(layer, DeltaPrimalAttention) for layer in model.modules())
    parts, examples, shapes = _describe_state(model, tokens)
    step = StatefulStep(model, model.initial_state(len(tokens)))  # type: ignore[operator]
    token_shape = dict.fromkeys((0,) if single_token else (0, 1), torch.export.Dim.DYNAMIC)
    example = tokens[:, :1] if single_token else tokens
    names, after = [f"state.{part}" for part in parts], ["output", *(f"next.{part}" for part in parts)]
    _write(Path(file), step, ((example, examples), {}), (token_shape, shapes), [name, *names], after)
    return names


class Standardized(nn.Module):
    """A classifier of raw series: they are standardised in double precision, as in training.

    Args:
        model: called with the standardised series and the mask.
        mean: mean of each channel.
        std: standard deviation of each channel.
        basis: directions along which the standardised steps are added as further channels; None for none.
    """

    mean: Tensor
    std: Tensor
    basis: Tensor | None

    def __init__(self, model: nn.Module, mean: Any, std: Any, basis: Any = None) -> None:
        super().__init__()
        self.model = model
        for name, values in (("mean", mean), ("std", std), ("basis", basis)):
            self.register_buffer(name, None if values is None else torch.as_tensor(values, dtype=torch.float64))

    def forward(self, x: Tensor, key_padding_mask: Tensor | None = None) -> Tensor:
        z = (x.double() - self.mean) / self.std
        z = z.masked_fill(z.isnan(), 0.0)  # a missing value is the mean
        z = z if self.basis is None else torch.cat([z, z @ self.basis], dim=-1)
        return self.model(z.float(), key_padding_mask)  # type: ignore[no-any-return]


class StatefulStep(nn.Module):
    """A causal model whose state is a list of tensors."""

    def __init__(self, model: nn.Module, initial: Any) -> None:
        super().__init__()
        self.model = model
        self.leaves, self.spec = tree_flatten(initial)
        self.places = [i for i, leaf in enumerate(self.leaves) if isinstance(leaf, Tensor)]

    def forward(self, tokens: Tensor, state: list[Tensor]) -> tuple[Tensor, ...]:
        leaves = list(self.leaves)
        for i, tensor in zip(self.places, state, strict=True):
            leaves[i] = tensor
        y, after = self.model(tokens, state=tree_unflatten(leaves, self.spec), return_state=True)
        leaves, _ = tree_flatten(after)
        return y, *(leaves[i] for i in self.places)


@torch.no_grad()
def _describe_state(model: nn.Module, tokens: Tensor) -> tuple[list[str], list[Tensor], list[dict[int, Any]]]:
    """Return names, examples and dynamic dimensions of the parts of a state: those that change with B or N."""

    def state_after(batch: int, length: int) -> dict[str, Tensor]:
        part = tokens[:1, :1].expand(batch, length, *tokens.shape[2:])
        leaves, _ = tree_flatten_with_path(model(part, return_state=True)[1])
        return {_join(path): t for path, t in leaves if isinstance(t, Tensor)}

    batch, length = tokens.shape[:2]
    examples, others = state_after(batch, length), (state_after(batch + 1, length), state_after(batch, length + 1))
    shapes = [
        {i: torch.export.Dim.DYNAMIC for other in others for i, n in enumerate(other[part].shape) if n != t.shape[i]}
        for part, t in examples.items()
    ]
    return list(examples), list(examples.values()), shapes


def _join(path: Sequence[Any]) -> str:
    """Return the name of a part of a state: fields and numbers, such as blocks.0.attention.query_sum."""
    return ".".join(str(getattr(key, "name", getattr(key, "idx", key))) for key in path)


def _prepare(model: nn.Module) -> nn.Module:
    """Return a copy for the export: on the CPU, in evaluation mode, by the equations."""
    if sum(p.numel() * p.element_size() for p in model.parameters()) > MAX_BYTES:
        raise ValueError("the model has more than 2 GB of weights, which an ONNX file cannot hold")
    model = copy.deepcopy(model).cpu().eval()
    for layer in primal_layers(model).values():
        layer.backend = "reference"
    return model


def _write(
    file: Path, model: nn.Module, call: tuple[Any, Any], shapes: Any, inputs: Sequence[str], outputs: Sequence[str]
) -> None:
    # The strides of a slice would become operators that ONNX does not have.
    args, kwargs = tree_map_only(Tensor, lambda t: t.clone(memory_format=torch.contiguous_format), call)
    table: dict[Any, Any] = {torch.ops.aten.searchsorted.Tensor: _searchsorted, torch.ops.aten.sort.stable: _sort}
    with torch.no_grad(), _quiet():
        program = torch.onnx.export(
            model, args, kwargs=kwargs, dynamo=True, dynamic_shapes=shapes, input_names=inputs, output_names=outputs,
            custom_translation_table=table, verbose=False,
        )  # fmt: skip
    proto = program.model_proto  # type: ignore[union-attr]
    proto.graph.ClearField("value_info")  # torch 2.6 writes the sizes of the example there
    write_atomically(file, lambda target: target.write(proto.SerializeToString()))


def _searchsorted(sorted_sequence: Any, self: Any, **options: Any) -> Any:
    """torch.searchsorted(a, v), left: the number of entries of a below v. ONNX has no such operator."""
    from onnxscript import opset18

    op: Any = opset18
    is_less = op.Less(op.Unsqueeze(sorted_sequence, [-2]), op.Unsqueeze(self, [-1]))
    return op.ReduceSum(op.Cast(is_less, to=7), [-1], keepdims=0)  # 7 is int64


def _sort(self: Any, *, stable: bool = True, dim: int = -1, descending: bool = False) -> Any:
    """torch.sort(a, stable=True): TopK of ONNX puts the lower index first among equal values."""
    from onnxscript import opset18

    op: Any = opset18
    values = op.Cast(self, to=7)  # of a mask; 7 is int64
    return op.TopK(values, op.Slice(op.Shape(values, start=dim), [0], [1]), axis=dim, largest=int(descending), sorted=1)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Suppress the exporter's messages about packages that are not installed."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)
