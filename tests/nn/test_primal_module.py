"""The layer as a module: adapters, hooks, recorded objectives, meta device, export, calls as nn.MultiheadAttention."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, prune
from torch.utils.checkpoint import checkpoint

from closeness import assert_close
from primal_attention import PrimalAttention, ksvd_loss, record_objective
from primal_attention.nn.objective import primal_layers
from primal_attention.ops.primal import device_problem
from primal_cases import CAUSAL, EMBED, HEADS, MAX_LENGTH, MODES, MODES_AND_DECAYS, gradients, inputs, make

MAPS = ("qk_proj", "score_proj", "out_proj")
SAME = {torch.float64: 1e-12, torch.float32: 1e-5}  # the same sums in another order

every_mode = pytest.mark.parametrize("mode", MODES)
every_case = pytest.mark.parametrize(("mode", "decay"), MODES_AND_DECAYS)


def fused_device() -> torch.device:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if (problem := device_problem(device)) is not None:
        pytest.skip(problem)
    return device


def place(backend: str) -> dict[str, Any]:
    """The keywords and the input options of a backend."""
    if backend == "fused":
        return {"backend": "fused", "dtype": torch.float32, "device": fused_device()}
    if backend == "cpu" and find_spec("primal_attention.ops.cpu") is None:
        pytest.skip("this build has no CPU backend")
    return {"backend": backend, "dtype": torch.float64 if backend == "reference" else torch.float32, "device": "cpu"}


# Maps that are not plain linear maps. Each function changes a map in place of the layer and returns the weight that a
# plain map with the same result has.


class ScaledLinear(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, 1.5 * self.weight, self.bias)


class QuantisedWeight(Tensor):
    """An int8 weight that only F.linear can read, like the tensor subclasses of torchao."""

    @staticmethod
    def __new__(cls, codes: Tensor, scale: Tensor) -> QuantisedWeight:
        return Tensor._make_wrapper_subclass(cls, codes.shape, dtype=scale.dtype, device=codes.device)

    def __init__(self, codes: Tensor, scale: Tensor) -> None:
        self.codes, self.scale = codes, scale

    def dequantise(self) -> Tensor:
        return self.codes * self.scale

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is F.linear:
            x, weight, *bias = args
            return F.linear(x, weight.dequantise(), *bias)
        with torch._C.DisableTorchFunctionSubclass():
            return function(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert function is torch.ops.aten.detach.default, f"{function} cannot read a quantised weight"
        return QuantisedWeight(args[0].codes, args[0].scale)


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
    module = layer.get_submodule(name)
    scale = module.weight.detach().abs().max() / 7
    weight = QuantisedWeight((module.weight / scale).round().to(torch.int8), scale)
    module.weight = nn.Parameter(weight, requires_grad=False)
    return weight.dequantise()


def hook(layer: PrimalAttention, name: str) -> Tensor:
    module = layer.get_submodule(name)
    module.register_forward_hook(lambda module, _, y: y + F.linear(_[0], module.weight) / 2)
    return 1.5 * module.weight


CHANGES: dict[str, Callable[[PrimalAttention, str], Tensor]] = {
    "lora": add_lora,
    "subclass": subclass,
    "weight_norm": parametrise,
    "pruned": prune_half,
    "quantised": quantise,
    "hooked": hook,
}


def changed_pair(kind: str, names: tuple[str, ...], mode: str, **keywords: Any) -> tuple[PrimalAttention, ...]:
    """A layer with changed maps, and the plain layer with the same weights."""
    layer = make(mode, **keywords)
    plain = copy.deepcopy(layer)
    for name in names:
        weight = CHANGES[kind](layer, name)
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


def layouts(mode: str) -> Iterator[str]:
    yield from ("full", "padded", "packed")
    if mode in CAUSAL:
        yield "streaming"


@pytest.mark.parametrize("kind", CHANGES)
@every_mode
def test_changed_maps_take_effect_in_outputs_objective_and_gradients(mode: str, kind: str) -> None:
    layer, plain = changed_pair(kind, MAPS, mode)
    for layout in layouts(mode):
        x = inputs(2, 12).requires_grad_()
        y, expected = call(layer, layout, x), call(plain, layout, x)
        assert_close(y, expected, SAME[x.dtype], layout)
        assert_close(layer.objective, plain.objective, SAME[x.dtype], layout)
        of_x, of_plain_x = (
            torch.autograd.grad(out.square().sum() + ksvd_loss(m), x, retain_graph=True)[0]
            for m, out in ((layer, y), (plain, expected))
        )
        assert_close(of_x, of_plain_x, 1e-11, layout)
        for name, grad in gradients(layer, y.square().sum() + ksvd_loss(layer)).items():
            assert grad.abs().sum() > 0, name


@pytest.mark.parametrize("kind", CHANGES)
@pytest.mark.parametrize("name", MAPS)
def test_one_changed_map_takes_effect(name: str, kind: str) -> None:
    layer, plain = changed_pair(kind, (name,), "data_dependent")
    x = inputs(2, 9)
    assert_close(layer(x), plain(x), SAME[x.dtype])


@every_mode
def test_fused_kernels_serve_layers_with_changed_maps(mode: str) -> None:
    layer, reference = changed_pair("lora", MAPS, mode, **place("fused"))
    reference.backend = "reference"
    x = torch.randn(2, 12, EMBED, device=reference.w_e.device, requires_grad=True)
    for layout in layouts(mode):
        streams = layout == "streaming"
        if streams and mode == "causal_data_dependent":
            continue  # streams through the equations only
        with torch.no_grad() if streams else nullcontext():
            y, expected = (call(m, layout, x) for m in (layer, reference))
        assert_close(y, expected, SAME[x.dtype], layout)
        assert_close(layer.objective, reference.objective, SAME[x.dtype], layout)
        if not streams:
            of_x, of_expected_x = (
                torch.autograd.grad(out.square().sum() + ksvd_loss(m), x, retain_graph=True)[0]
                for m, out in ((layer, y), (reference, expected))
            )
            assert_close(of_x, of_expected_x, SAME[x.dtype], layout)
            grads = gradients(layer, y.square().sum() + ksvd_loss(layer))
            assert all(grad.abs().sum() > 0 for name, grad in grads.items() if "lora" in name)


@pytest.mark.parametrize("backend", ["reference", "fused"])
@every_mode
def test_hooks_on_the_maps_fire_with_the_shapes_of_the_maps(mode: str, backend: str) -> None:
    options = place(backend)
    layer = make(mode, **options)
    fired: dict[tuple[str, str], tuple[int, ...]] = {}

    def note(name: str, event: str, tensors: Any) -> None:
        fired[name, event] = tuple((tensors[0] if isinstance(tensors, tuple) else tensors).shape)

    for name in MAPS:
        module = layer.get_submodule(name)
        module.register_forward_pre_hook(lambda _, x, n=name: note(n, "input", x))
        module.register_forward_hook(lambda _, x, y, n=name: note(n, "output", y))
        module.register_full_backward_pre_hook(lambda _, g, n=name: note(n, "grad_output", g))
        module.register_full_backward_hook(lambda _, gi, go, n=name: note(n, "grad_input", gi))
    x = torch.randn(2, 9, EMBED, dtype=options["dtype"], device=options["device"], requires_grad=True)
    layer(x).square().sum().backward()
    heads, p = (2, HEADS, 9), EMBED // HEADS
    shapes = {
        "qk_proj": ((2, 9, EMBED), (2, 9, 2 * EMBED)),
        "score_proj": ((*heads, 2 * layer.rank), (*heads, p)),
        "out_proj": ((2, 9, EMBED), (2, 9, EMBED)),
    }
    expected = {}
    for name, (before, after) in shapes.items():
        expected |= {(name, "input"): before, (name, "grad_input"): before}
        expected |= {(name, "output"): after, (name, "grad_output"): after}
    assert fired == expected


class TestPEFT:
    @staticmethod
    def adapted(mode: str, **keywords: Any) -> Any:
        peft = pytest.importorskip("peft", reason="the LoRA tests need PEFT")
        model = nn.Sequential(make(mode), nn.Linear(EMBED, 2, dtype=torch.float64))
        return peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=list(MAPS), **keywords))

    @every_mode
    def test_a_new_adapter_changes_nothing_and_so_does_merging_a_trained_one(self, mode: str) -> None:
        model = self.adapted(mode)
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

    def test_copies_of_modules_to_save_do_not_count(self) -> None:
        peft = pytest.importorskip("peft", reason="the LoRA tests need PEFT")
        model = nn.Sequential(make("data_dependent"), nn.Linear(EMBED, EMBED, dtype=torch.float64))
        config = peft.LoraConfig(r=2, target_modules=["1"], modules_to_save=["0"])
        model = peft.get_peft_model(model, config)
        x = inputs(2, 9)
        model(x)
        (layer,) = primal_layers(model).values()
        assert_close(ksvd_loss(model), layer.objective.square().mean(), SAME[x.dtype])
        ksvd_loss(model).backward()
        assert layer.w_e.grad.abs().sum() > 0
        with record_objective(model.eval()):
            model(x)
            assert_close(ksvd_loss(model), layer.objective.square().mean(), SAME[x.dtype])


class Shared(nn.Module):
    """One layer applied several times, as in models that share parameters over depth."""

    def __init__(self, mode: str = "data_dependent", calls: int = 2) -> None:
        super().__init__()
        self.layer, self.calls = make(mode), calls

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.calls):
            x = x + self.layer(x)
        return x


class TestRecordObjective:
    @every_mode
    @pytest.mark.parametrize("reduction", ["sample", "batch"])
    def test_every_call_of_a_shared_layer_counts(self, mode: str, reduction: Any) -> None:
        layer = make(mode)
        xs = [inputs(3, 9), inputs(2, 7)]
        each, grads = [], []
        for x in xs:
            layer(x)
            each.append(ksvd_loss(layer, reduction))
            grads.append(gradients(layer, each[-1], keep_graph=True))
        with record_objective(layer):
            for x in xs:
                layer(x)
            loss = ksvd_loss(layer, reduction)
            total = ksvd_loss(layer, reduction, layers="sum")
            for name, grad in gradients(layer, loss).items():
                assert_close(grad, (grads[0][name] + grads[1][name]) / 2, 1e-11, name)
        assert_close(loss, sum(each) / 2, 1e-12)
        assert_close(total, sum(each), 1e-12)
        assert_close(ksvd_loss(layer, reduction), each[-1], 1e-12)  # the record is gone: the last call counts

    @every_mode
    def test_j_is_available_in_evaluation_mode(self, mode: str) -> None:
        layer = make(mode)
        x = inputs(2, 9)
        layer(x)
        j = layer.objective
        layer.eval()
        with torch.no_grad(), record_objective(layer):
            layer(2 * x)
            layer(x)
            assert torch.equal(layer.objective, j)
            assert ksvd_loss(layer) > 0
        assert layer.objective is j

    @pytest.mark.parametrize("backend", ["reference", "fused"])
    @pytest.mark.parametrize("mode", CAUSAL)
    def test_streamed_tokens_are_recorded(self, mode: str, backend: str) -> None:
        if (mode, backend) == ("causal_data_dependent", "fused"):
            pytest.skip("this mode streams through the equations")
        options = place(backend)
        layer = make(mode, **options).eval()
        x = torch.randn(2, 4, EMBED, dtype=options["dtype"], device=options["device"])
        state = layer.initial_state(2)
        with torch.no_grad(), record_objective(layer):
            for t in range(4):
                _, state = layer.step(x[:, t], state)
                assert torch.isfinite(layer.objective).all()
            assert ksvd_loss(layer) > 0

    def test_checkpointing_does_not_count_recomputation(self) -> None:
        model, x = Shared(), inputs(2, 9)
        with record_objective(model):
            expected = gradients(model, model(x).square().mean() + ksvd_loss(model))
        with record_objective(model):
            y = checkpoint(model, x, use_reentrant=False)
            before = ksvd_loss(model)
            found = gradients(model, y.square().mean() + before)
            assert_close(ksvd_loss(model), before, 1e-12)
        for name, grad in found.items():
            assert_close(grad, expected[name], 1e-12, name)

    @pytest.mark.parametrize("is_outside", [True, False])
    def test_accumulated_gradients_are_those_of_the_whole_batch(self, is_outside: bool) -> None:
        model, x = Shared(), inputs(6, 9)
        with record_objective(model):
            expected = gradients(model, model(x).square().mean() + ksvd_loss(model))
        with record_objective(model) if is_outside else nullcontext():
            for part in x.split(2):
                with nullcontext() if is_outside else record_objective(model):
                    ((model(part).square().mean() + ksvd_loss(model)) / 3).backward()
        for name, parameter in model.named_parameters():
            assert_close(parameter.grad, expected[name], 1e-12, name)

    @pytest.mark.parametrize("is_training", [True, False])
    def test_compiled_models_are_recorded_without_recompilation(self, is_training: bool) -> None:
        torch.compiler.reset()
        model, x = Shared().train(is_training), inputs(2, 9)
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
        with record_objective(model):
            expected = gradients(model, model(x).square().mean() + ksvd_loss(model))
        with record_objective(model):
            y = compiled(x)
            found = gradients(model, y.square().mean() + ksvd_loss(model))
            with torch.compiler.set_stance("fail_on_recompile"):
                for _ in range(10):
                    y = compiled(x)
                assert_close(ksvd_loss(model, layers="sum"), 20 * ksvd_loss(model), 1e-12)
        for name, grad in found.items():
            assert_close(grad, expected[name], 1e-12, name)

    def test_layers_that_were_not_called_do_not_count(self) -> None:
        model = nn.ModuleList([make("plain"), make("plain")])
        model[1](inputs(2, 9))
        with record_objective(model):
            with pytest.raises(RuntimeError, match="no layer was called inside record_objective"):
                ksvd_loss(model)
            model[0](inputs(2, 9))
            assert_close(ksvd_loss(model), model[0].objective.square().mean(), 1e-12)

    def test_an_exception_and_an_inner_context_leave_the_outer_record(self) -> None:
        layer = make("plain")

        def fail_inside() -> None:
            with record_objective(layer):
                layer(inputs(2, 9))
                raise KeyError

        with record_objective(layer):
            layer(inputs(2, 9))
            loss = ksvd_loss(layer)
            with pytest.raises(KeyError):
                fail_inside()
            assert torch.equal(ksvd_loss(layer), loss)
        with pytest.raises(KeyError):
            fail_inside()
        layer.eval()(inputs(2, 9))
        assert layer._last_call is None


@pytest.mark.parametrize("feature_map", ["cosine", "softmax"])
@pytest.mark.parametrize(
    ("mode", "decay"), [*MODES_AND_DECAYS, ("two_sided", 0.5), *((mode, (0.5, 0.9, 1.0)) for mode in CAUSAL)]
)
def test_reset_parameters_restores_a_layer_that_was_built_on_meta(mode: str, decay: Any, feature_map: str) -> None:
    layer = make(mode, decay, feature_map=feature_map, device="meta").to_empty(device="cpu")
    with torch.no_grad():
        for tensor in (*layer.parameters(), *layer.buffers()):
            tensor.fill_(torch.nan)
    layer.reset_parameters()
    fresh = make(mode, decay, feature_map=feature_map)
    if layer.decay is not None:
        assert torch.equal(layer.decay, fresh.decay)
    if feature_map == "softmax":
        assert 0.5 < layer.frequencies.std() < 1.5
    assert torch.isfinite(layer(inputs(2, 9))).all()


@pytest.mark.parametrize("feature_map", ["cosine", "softmax"])
@every_case
def test_forward_works_on_the_meta_device(mode: str, decay: Any, feature_map: str) -> None:
    layer = make(mode, decay, feature_map=feature_map, device="meta")
    x = inputs(2, 9).to("meta")
    assert layer(x).shape == x.shape
    assert layer(x, torch.zeros(2, 9, dtype=torch.bool, device="meta")).is_meta
    bounds = torch.zeros(3, dtype=torch.int32, device="meta")
    assert layer(x.flatten(0, 1), cu_seqlens=bounds, max_seqlen=9).shape == (18, EMBED)
    if mode in CAUSAL:
        y, _ = layer.step(x[:, 0], layer.initial_state(2))
        assert y.is_meta


@pytest.mark.parametrize(
    ("mode", "decay"), [*((mode, None) for mode in MODES), ("causal", 0.9), ("causal_data_dependent", "learned")]
)
def test_an_exported_program_survives_saving_and_serves_other_shapes(mode: str, decay: Any, tmp_path: Path) -> None:
    layer = make(mode, decay).eval()
    shape = {0: torch.export.Dim("batch", min=1), 1: torch.export.Dim("tokens", min=2, max=MAX_LENGTH)}
    masks = [torch.arange(n) >= torch.randint(1, n, (b, 1)) for b, n in ((2, 9), (5, 20))]
    program = torch.export.export(layer, (inputs(2, 9), masks[0]), dynamic_shapes=(shape, shape))
    torch.export.save(program, tmp_path / "layer.pt2")
    loaded = torch.export.load(tmp_path / "layer.pt2").module()
    for mask in masks:
        x = inputs(*mask.shape)
        assert_close(loaded(x, mask), layer(x, mask), SAME[x.dtype])


@pytest.mark.parametrize("backend", ["reference", "fused"])
@pytest.mark.parametrize("mode", [*CAUSAL, "two_sided"])
def test_one_token_leaves_a_learned_decay_in_the_graph(mode: str, backend: str) -> None:
    options = place(backend)
    layer = make(mode, "learned", **options)
    layer(torch.randn(2, 1, EMBED, dtype=options["dtype"], device=options["device"])).sum().backward()
    assert layer.decay_logit.grad is not None
    assert (layer.decay_logit.grad == 0).all()


class TestMultiheadAttentionCall:
    @every_mode
    def test_three_equal_tensors_return_a_pair_and_one_returns_the_output(self, mode: str) -> None:
        layer, x = make(mode).eval(), inputs(2, 9)
        mask = torch.zeros(2, 9, dtype=torch.bool)
        mask[0, 5:] = True
        y = layer(x, mask)
        assert torch.equal(layer(x, key_padding_mask=mask), y)
        pair = layer(x, x, x, key_padding_mask=mask, need_weights=False)
        assert torch.equal(pair[0], y)
        assert pair[1] is None
        floats = torch.zeros(2, 9).masked_fill(mask, -torch.inf)
        assert torch.equal(layer(x, x, x, floats)[0], y)

    @pytest.mark.parametrize("mode", ["data_dependent", "two_sided", *CAUSAL])
    @pytest.mark.parametrize("depth", [None, 2])
    def test_encoder_layers_train_and_evaluate(self, mode: str, depth: int | None) -> None:
        options = {"dim_feedforward": 8, "dropout": 0.0, "batch_first": True, "dtype": torch.float64}
        encoder: Any = nn.TransformerEncoderLayer(EMBED, HEADS, **options)
        encoder.self_attn = make(mode)
        if depth is not None:
            encoder = nn.TransformerEncoder(encoder, depth, enable_nested_tensor=False)
        x = inputs(2, 9).requires_grad_()
        mask = torch.zeros(2, 9, dtype=torch.bool)
        mask[0, 5:] = True
        keywords: dict[str, Any] = {"src_key_padding_mask": mask}
        expected = encoder(x, **keywords)
        if mode in CAUSAL:
            causal = nn.Transformer.generate_square_subsequent_mask(9, dtype=torch.float64)
            keywords |= {"mask" if depth else "src_mask": causal, "is_causal": True}
        y = encoder(x, **keywords)
        assert torch.equal(y, expected)
        (y[~mask].square().mean() + ksvd_loss(encoder)).backward()
        assert all(p.grad is not None for p in encoder.parameters())
        with torch.no_grad():
            assert_close(encoder.eval()(x, **keywords)[~mask], y[~mask], 1e-12)

    CAUSAL_MASK = torch.ones(5, 5).triu(1).bool()

    @pytest.mark.parametrize(
        ("mode", "keywords", "message"),
        [
            (
                "plain",
                {"key": inputs(2, 5)},
                "key and value must be the same tensor as x: cross-attention is not defined",
            ),
            (
                "plain",
                {"value": inputs(2, 5)},
                "key and value must be the same tensor as x: cross-attention is not defined",
            ),
            ("plain", {"need_weights": True}, "need_weights=True is not supported"),
            ("plain", {"is_causal": True}, "is_causal=True needs a layer with causal=True"),
            ("plain", {"attn_mask": CAUSAL_MASK}, "attn_mask must hide nothing for a layer with causal=False"),
            ("causal", {"attn_mask": ~CAUSAL_MASK}, "attn_mask must be the causal mask for a layer with causal=True"),
            ("causal", {"attn_mask": torch.randn(5, 5)}, "attn_mask must be the causal mask"),
            ("causal", {"attn_mask": CAUSAL_MASK[:4]}, r"attn_mask must have shape \(5, 5\) \(got \(4, 5\)\)"),
        ],
    )
    def test_what_the_layer_cannot_do_is_refused_by_name(self, mode: str, keywords: Any, message: str) -> None:
        x = inputs(2, 5)
        with pytest.raises(ValueError, match=message):
            make(mode)(x, **{"key": x, "value": x, **keywords})

    def test_a_mask_that_hides_nothing_is_accepted_without_causality(self) -> None:
        layer, x = make("data_dependent"), inputs(2, 5)
        assert torch.equal(layer(x, x, x, attn_mask=torch.zeros(5, 5))[0], layer(x))


@pytest.mark.parametrize(
    ("mode", "other"),
    [
        ("causal", {"num_heads": 2}),
        ("causal", {"rank": 3}),
        ("causal", {"feature_map": "softmax"}),
        ("causal_data_dependent", {"max_length": MAX_LENGTH + 1}),
        ("causal_data_dependent", {"rank": 3}),
    ],
)
def test_a_state_of_another_layer_is_refused_by_name(mode: str, other: dict[str, Any]) -> None:
    layer = make(mode)
    heads = other.pop("num_heads", HEADS)
    options = {"rank": 4, "landmarks": 6, "dtype": torch.float64, **MODES[mode], **other}
    stranger = PrimalAttention(EMBED, heads, **options)
    changed = f"num_heads={heads}" if heads != HEADS else "=".join(map(str, next(iter(other.items()))))
    _, state = stranger(inputs(2, 3), return_state=True)
    with pytest.raises(ValueError, match=f"state belongs to another kind of layer .*{changed}.*; this layer is causal"):
        layer.step(inputs(2), state)


@pytest.mark.parametrize("backend", ["reference", "cpu", "fused"])
@every_mode
def test_huge_inputs_do_not_overflow(mode: str, backend: str) -> None:
    if backend == "cpu" and mode in ("two_sided", "causal_data_dependent"):
        pytest.skip("the CPU backend does not serve this mode")
    options = place(backend) | {"dtype": torch.float32}
    layer = make(mode, **options).eval()
    exact = copy.deepcopy(layer).double()
    exact.backend = "reference"
    x = 1e20 * torch.randn(2, 12, EMBED, device=options["device"])
    with torch.no_grad():
        y, scores = layer(x, return_scores=True)
        expected, expected_scores = exact(x.double(), return_scores=True)
    assert_close(y, expected, 1e-5, "y")
    for ours, theirs in zip(scores, expected_scores, strict=True):
        assert_close(ours, theirs, 1e-5, "scores")


@every_mode
def test_packed_input_works_in_inference_mode(mode: str) -> None:
    layer, x = make(mode).eval(), inputs(9)
    expected = layer(x, cu_seqlens=torch.tensor([0, 4, 9], dtype=torch.int32))
    with torch.inference_mode():
        bounds = torch.tensor([0, 4, 9], dtype=torch.int32)
        assert_close(layer(x, cu_seqlens=bounds), expected, 1e-12)
        assert_close(layer(x, cu_seqlens=bounds), expected, 1e-12)


@pytest.mark.parametrize("decay", ["learned", 0.7])
def test_decay_in_both_directions_is_the_dense_formula(decay: Any) -> None:
    layer, x = make("two_sided", decay), inputs(2, 11)
    i = torch.arange(11)
    weights = layer.decay[:, None, None] ** (i[:, None] - i).abs()  # (H, N, N)
    q, k = (z.unflatten(-1, (HEADS, -1)).transpose(1, 2) for z in layer.qk_proj(x).chunk(2, dim=-1))
    scores = [F.normalize(weights @ z, dim=-1) @ w for z, w in ((q, layer.w_e), (k, layer.w_r))]
    heads = layer.score_proj(torch.cat(scores, dim=-1))
    y, found = layer(x, return_scores=True)
    for ours, theirs in zip(found, scores, strict=True):
        assert_close(ours, theirs, 1e-12)
    assert_close(y, layer.out_proj(heads.transpose(1, 2).flatten(2)), 1e-12)
    reached = torch.autograd.functional.jacobian(lambda x: layer(x)[0].sum(-1), x)[:, 0].abs().sum(-1)
    assert (reached > 0).all()  # every token reaches every output
