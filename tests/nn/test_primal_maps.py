"""Maps that are not plain linear maps: LoRA, subclassed, parametrised, pruned, quantised and hooked ones."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, prune

from closeness import assert_close
from primal_attention import PrimalAttention, ksvd_loss, record_objective
from primal_attention.nn.objective import primal_layers
from primal_cases import CAUSAL, EMBED, HEADS, MODES, backend_options, gradients, inputs, make

MAPS = ("qk_proj", "score_proj", "out_proj")
SAME = {torch.float64: 1e-12, torch.float32: 1e-5}  # the same sums in another order
GRADIENT = {torch.float64: 1e-11, torch.float32: 1e-5}


class ScaledLinear(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, 1.5 * self.weight, self.bias)


# Each function changes a map of the layer and returns the weight of the plain map with the same result.


def add_lora(layer: PrimalAttention, name: str) -> Tensor:
    peft = pytest.importorskip("peft", reason="the LoRA tests need PEFT")
    config = peft.LoraConfig(r=2, target_modules=[name], init_lora_weights=False)
    peft.inject_adapter_in_model(config, layer)
    lora = layer.get_submodule(name)
    return lora.base_layer.weight + lora.get_delta_weight("default")


def subclass(layer: PrimalAttention, name: str) -> Tensor:
    plain = layer.get_submodule(name)
    scaled = ScaledLinear(plain.in_features, plain.out_features, device=plain.weight.device, dtype=plain.weight.dtype)
    scaled.load_state_dict(plain.state_dict())
    setattr(layer, name, scaled)
    return 1.5 * plain.weight


def parametrise(layer: PrimalAttention, name: str) -> Tensor:
    module = parametrizations.weight_norm(layer.get_submodule(name))
    with torch.no_grad():
        module.parametrizations.weight.original0.mul_(1.5)
    return module.weight


def prune_half(layer: PrimalAttention, name: str) -> Tensor:
    return prune.l1_unstructured(layer.get_submodule(name), "weight", amount=0.5).weight


def quantise(layer: PrimalAttention, name: str) -> Tensor:
    torchao = pytest.importorskip("torchao.quantization", reason="the tests of int8 weights need torchao")
    module = layer.get_submodule(name)
    torchao.quantize_(module, torchao.Int8WeightOnlyConfig())
    return module.weight.dequantize()


def hook(layer: PrimalAttention, name: str) -> Tensor:
    module = layer.get_submodule(name)
    module.register_forward_hook(lambda module, x, y: y + F.linear(x[0], module.weight) / 2)
    return 1.5 * module.weight


CHANGES: dict[str, Callable[[PrimalAttention, str], Tensor]] = {
    "lora": add_lora,
    "subclass": subclass,
    "weight_norm": parametrise,
    "pruned": prune_half,
    "quantised": quantise,
    "hooked": hook,
}


def changed_pair(change: str, names: tuple[str, ...], mode: str, **keywords: Any) -> tuple[PrimalAttention, ...]:
    """A layer with changed maps, and the plain layer with the same weights."""
    layer = make(mode, **keywords)
    plain = copy.deepcopy(layer)
    for name in names:
        weight = CHANGES[change](layer, name)
        with torch.no_grad():
            plain.get_submodule(name).weight.copy_(weight)
    return layer, plain


def call(layer: PrimalAttention, layout: str, x: Tensor) -> Tensor:
    """The outputs of a layer for x of (2, N, d) in a layout."""
    n = x.shape[1]
    if layout == "padded":
        mask = torch.zeros(2, n, dtype=torch.bool, device=x.device)
        mask[0, n // 2 :], mask[1, 1] = True, True
        return layer(torch.where(mask[..., None], torch.nan, x), mask)
    if layout == "packed":
        bounds = torch.tensor([0, n // 2, 2 * n], dtype=torch.int32, device=x.device)
        return layer(x.flatten(0, 1), cu_seqlens=bounds)
    if layout == "streaming":
        y, state = layer(x[:, :-1], return_state=True)
        last, _ = layer.step(x[:, -1], state)
        return torch.cat([y, last[:, None]], dim=1)
    return layer(x)


def assert_same_training(layer: PrimalAttention, plain: PrimalAttention, layout: str, x: Tensor) -> None:
    """Compare outputs, J and the gradient of x; require gradients of all trained parameters of the changed layer."""
    results = []
    for module in (layer, plain):
        y = call(module, layout, x)
        loss = y.square().sum() + ksvd_loss(module)
        (grad,) = torch.autograd.grad(loss, x, retain_graph=True)
        results.append((y, module.objective, grad))
        if module is layer:
            for name, of_parameter in gradients(layer, loss).items():
                assert of_parameter.abs().sum() > 0, name
    ratios = (SAME[x.dtype], SAME[x.dtype], GRADIENT[x.dtype])
    for actual, expected, ratio in zip(*results, ratios, strict=True):
        assert_close(actual, expected, ratio, layout)


@pytest.mark.supports("PEFT", "cpu")
@pytest.mark.supports("quantisation", "cpu")
@pytest.mark.parametrize(
    ("mode", "change", "names"),
    [
        *(("causal", change, MAPS) for change in CHANGES),
        *((mode, "lora", MAPS) for mode in MODES),
        *(("data_dependent", "subclass", (name,)) for name in MAPS),
    ],
)
def test_changed_maps_take_effect_in_outputs_objective_and_gradients(
    mode: str, change: str, names: tuple[str, ...]
) -> None:
    dtype = torch.float32 if change == "quantised" else torch.float64  # torchao has no float64
    layer, plain = changed_pair(change, names, mode, dtype=dtype)
    for layout in ("full", "padded", "packed", *(["streaming"] if mode in CAUSAL else [])):
        assert_same_training(layer, plain, layout, inputs(2, 12, dtype=dtype).requires_grad_())


@pytest.mark.supports("PEFT", "cuda")
@pytest.mark.parametrize(
    ("mode", "backend"), [*((mode, "fused") for mode in MODES), ("data_dependent", "cpu"), ("causal", "cpu")]
)
def test_fast_backends_serve_changed_maps(mode: str, backend: str) -> None:
    options = backend_options(backend)
    layer, reference = changed_pair("lora", MAPS, mode, **options)
    reference.backend = "reference"
    x = torch.randn(2, 5, EMBED, device=options["device"], requires_grad=True)
    assert_same_training(layer, reference, "packed" if mode == "plain" else "padded", x)


@pytest.mark.parametrize(
    ("mode", "backend"), [("data_dependent", "reference"), ("causal", "reference"), ("data_dependent", "fused")]
)
def test_hooks_receive_the_shapes_of_the_maps(mode: str, backend: str) -> None:
    options = backend_options(backend)
    layer = make(mode, **options)
    seen: dict[tuple[str, str], tuple[int, ...]] = {}

    def record(name: str, event: str, tensors: Any) -> None:
        seen[name, event] = tuple((tensors[0] if isinstance(tensors, tuple) else tensors).shape)

    for name in MAPS:
        module = layer.get_submodule(name)
        module.register_forward_pre_hook(lambda _, x, n=name: record(n, "input", x))
        module.register_forward_hook(lambda _, x, y, n=name: record(n, "output", y))
        module.register_full_backward_pre_hook(lambda _, g, n=name: record(n, "grad_output", g))
        module.register_full_backward_hook(lambda _, gi, go, n=name: record(n, "grad_input", gi))
    x = torch.randn(2, 9, EMBED, dtype=options["dtype"], device=options["device"], requires_grad=True)
    layer(x).square().sum().backward()
    heads = (2, HEADS, 9)
    shapes = {
        "qk_proj": ((2, 9, EMBED), (2, 9, 2 * EMBED)),
        "score_proj": ((*heads, 2 * layer.rank), (*heads, EMBED // HEADS)),
        "out_proj": ((2, 9, EMBED), (2, 9, EMBED)),
    }
    assert seen == {
        (name, event): shape
        for name, (before, after) in shapes.items()
        for event, shape in (("input", before), ("output", after), ("grad_output", after), ("grad_input", before))
    }


def test_hooks_of_all_modules_run_for_the_maps() -> None:
    layer, called = make("data_dependent"), []
    with nn.modules.module.register_module_forward_hook(lambda module, x, y: called.append(module)):
        layer(inputs(2, 9))
    assert called == [*(layer.get_submodule(name) for name in MAPS), layer]


def test_a_backward_hook_of_the_layer_accepts_the_call_of_multihead_attention() -> None:
    layer, x, seen = make("data_dependent"), inputs(2, 9).requires_grad_(), []
    (expected,) = torch.autograd.grad(layer(x).square().sum(), x)
    layer.register_full_backward_hook(lambda module, grad_x, grad_y: seen.append(grad_x[0]))  # three views of x
    seen += torch.autograd.grad(layer(x, x, x)[0].square().sum(), x)
    assert [torch.equal(grad, expected) for grad in seen] == [True, True]
    with pytest.raises(ValueError, match="cross-attention is not defined"):
        layer(x, x.detach(), x)


@pytest.mark.parametrize("mode", ["data_dependent", "causal"])
def test_a_new_peft_adapter_changes_nothing_and_a_trained_one_can_be_merged(mode: str) -> None:
    peft = pytest.importorskip("peft", reason="the LoRA tests need PEFT")
    model = nn.Sequential(make(mode), nn.Linear(EMBED, 2, dtype=torch.float64))
    model = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=list(MAPS)))
    x = inputs(2, 9)
    with model.disable_adapter():
        plain = model(x)
    assert torch.equal(model(x), plain)
    optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        (model(x).square().mean() + ksvd_loss(model)).backward()
        optimiser.step()
    trained = model(x)
    assert not torch.allclose(trained, plain)
    merged = model.merge_and_unload()
    assert {type(merged[0].get_submodule(name)) for name in MAPS} == {nn.Linear}
    assert_close(merged(x), trained, SAME[x.dtype])


def test_frozen_copies_of_peft_do_not_count_in_the_loss() -> None:
    peft = pytest.importorskip("peft", reason="the LoRA tests need PEFT")
    model = nn.Sequential(make("data_dependent"), nn.Linear(EMBED, EMBED, dtype=torch.float64))
    model = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["1"], modules_to_save=["0"]))
    x = inputs(2, 9)
    model(x)
    (layer,) = primal_layers(model).values()
    assert_close(ksvd_loss(model), layer.objective.square().mean(), SAME[x.dtype])
    ksvd_loss(model).backward()
    assert layer.w_e.grad.abs().sum() > 0
    with record_objective(model.eval()):
        model(x)
        assert_close(ksvd_loss(model), layer.objective.square().mean(), SAME[x.dtype])
