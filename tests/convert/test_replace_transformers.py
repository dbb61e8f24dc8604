"""primalize on transformers: weights kept, masks obeyed, generation, saving."""

import pickle
import re
from concurrent.futures import ThreadPoolExecutor

import peft
import pytest
import torch
import torchao.quantization as torchao
import transformers as hf

from closeness import assert_close
from convert.hf_models import DECODERS, ENCODERS, IMAGE, IMAGES, OTHERS, ROTARY, SMALL, TEXT, inputs, make, output
from primal_attention import PrimalAttention, ksvd_loss, load_primalized, primalize
from primal_attention.nn.objective import primal_layers

ALL = ENCODERS + DECODERS + IMAGES + OTHERS
TWO_SIDED = {"data_dependent": False, "decay": 0.9}
DECAYS = [("gpt2", {"decay": 0.9, "max_length": 64}), ("gpt2", {"decay": "learned"}), ("bert", TWO_SIDED)]
EXACT = 2e-5  # float32, another order of sums


def replaced(kind, layers="all", **keywords):
    """A model with Primal-Attention layers."""
    return primalize(make(kind), layers, **SMALL, **keywords).model


def adapted(kind, maps):
    """A model with LoRA on the maps of these names."""
    return peft.get_peft_model(make(kind), peft.LoraConfig(r=2, target_modules=maps)).base_model.model


def quantised(kind):
    """A model with int8 weights."""
    torchao.quantize_(model := make(kind), torchao.Int8WeightOnlyConfig())
    return model


@pytest.mark.parametrize("kind", ALL)
def test_model_runs_and_trains(kind) -> None:
    model, call = make(kind), inputs(kind)
    before = output(model, **call)
    replaced = primalize(model, "all", **SMALL)
    assert len(replaced) == (6 if kind == "whisper" else 3)  # encoder and decoder; cross-attention stays
    assert [f"{name}.primal" for name in replaced] == list(primal_layers(model))
    assert output(model, **call).shape == before.shape
    assert not model.training
    model.train()
    result = model(**call)
    assert isinstance(result, hf.utils.ModelOutput)
    (result[0].square().mean() + ksvd_loss(model)).backward()
    layer = next(iter(primal_layers(model).values()))
    assert all(p.grad is not None and p.grad.isfinite().all() for p in layer.parameters())


MAPS = {
    **dict.fromkeys(("bert", "roberta", "electra"), ("self.query", "self.key", "output.dense")),
    "distilbert": ("q_lin", "k_lin", "out_lin"),
    **dict.fromkeys(("llama", "mistral", "qwen2", "vit", "deit"), ("q_proj", "k_proj", "o_proj")),
    **dict.fromkeys(("cliptext", "clipvision", "whisper"), ("q_proj", "k_proj", "out_proj")),
}


@pytest.mark.parametrize(("kind", "settings"), [*((kind, {}) for kind in ALL), ("vit", {"qkv_bias": False})])
def test_query_key_and_output_weights_are_kept(kind, settings) -> None:
    original, model = make(kind, **settings), make(kind, **settings)
    (name,) = primalize(model, **SMALL)
    old, new = original.get_submodule(name), model.get_submodule(name).primal
    x = torch.randn(2, 5, 32)
    if kind in ("gpt2", "modernbert"):
        stacked, out = (old.c_attn, old.c_proj) if kind == "gpt2" else (old.Wqkv, old.Wo)
        (q, k, _), out = stacked(x).chunk(3, dim=-1), out(x)
    else:
        q, k, out = (old.get_submodule(part)(x) for part in MAPS[kind])
    if kind in ("llama", "mistral", "qwen2"):  # two key heads for four query heads: 0, 0, 1, 1
        k = k.unflatten(-1, (2, 8)).repeat_interleave(2, dim=-2).flatten(-2)
    assert_close(new.qk_proj(x), torch.cat([q, k], dim=-1), EXACT)
    assert_close(new.out_proj(x), out, EXACT)


PADDED = [(kind, "right") for kind in ENCODERS + DECODERS] + [(kind, "left") for kind in DECODERS]


@pytest.mark.parametrize(("kind", "side"), PADDED)  # encoders number their positions from the left
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_padded_equals_single(kind, implementation, side) -> None:
    model = make(kind)
    model.set_attn_implementation(implementation)
    primalize(model, "all", **SMALL)
    ids = inputs(kind)["input_ids"]
    mask, valid = torch.zeros_like(ids), slice(0, 6) if side == "right" else slice(3, None)
    mask[0], mask[1, valid] = 1, 1
    call = {"position_ids": (mask.cumsum(1) - 1).clamp(min=0)} if kind in DECODERS else {}
    both = output(model, input_ids=ids, attention_mask=mask, **call)
    assert_close(both[:1], output(model, input_ids=ids[:1]), EXACT)
    assert_close(both[1:, valid], output(model, input_ids=ids[1:, valid]), EXACT)


@pytest.mark.parametrize("kind", DECODERS)
@pytest.mark.parametrize("keywords", [{}, {"max_length": 32}, {"decay": "learned"}], ids=["mean", "landmarks", "decay"])
def test_decoders_are_causal(kind, keywords) -> None:
    model, ids = replaced(kind, **keywords), inputs(kind)["input_ids"]
    changed = ids.clone()
    changed[:, 5:] = (changed[:, 5:] + 7) % 48
    before, after = output(model, input_ids=ids), output(model, input_ids=changed)
    assert_close(after[:, :5], before[:, :5], EXACT)
    assert (after[:, 5:] - before[:, 5:]).abs().max() > 1e-3


@pytest.mark.parametrize("kind", DECODERS)
@pytest.mark.parametrize("layers", [0, "all"])
@pytest.mark.parametrize("search", [{}, {"num_beams": 3}], ids=["greedy", "beams"])
def test_generation_with_the_state_equals_generation_without(kind, layers, search) -> None:
    model, ids = replaced(kind, layers), inputs(kind, tokens=5)["input_ids"]
    mask = torch.ones_like(ids)
    mask[1, :2] = 0
    call = {"input_ids": ids, "attention_mask": mask, "max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    with_state = model.generate(**call, **search, use_cache=True)
    assert torch.equal(with_state, model.generate(**call, **search, use_cache=False))


ROTARY_MODES = [("llama", {}), ("llama", {"max_length": 32}), ("mistral", {"decay": "learned"}), ("modernbert", {})]


@pytest.mark.parametrize(("kind", "keywords"), ROTARY_MODES)
def test_rotary_positions_are_applied_to_q_and_k(kind, keywords) -> None:
    """The layer equals one without positions whose q and k are those that the replaced attention compares."""
    original, model = make(kind), make(kind)
    (name,) = primalize(model, **SMALL, **keywords)
    primal, compared = model.get_submodule(name).primal, {}

    def compare(module, query, key, value, mask, **rest):  # stands in for the softmax of the original
        groups = query.shape[1] // key.shape[1]
        compared["qk"] = torch.cat([query, key.repeat_interleave(groups, dim=1)], dim=1).transpose(1, 2).flatten(2)
        return torch.zeros_like(query).transpose(1, 2), None

    hf.AttentionInterface.register("compare", compare)
    x = torch.randn(2, 9, 32)
    base = getattr(model, "model", model)
    layer_type = {"layer_type": "full_attention"} if kind == "modernbert" else {}
    positions = base.rotary_emb(x, torch.arange(3, 12)[None], **layer_type)
    original.set_attn_implementation("compare")
    original.get_submodule(name)(x, position_embeddings=positions, attention_mask=None)
    modes = {"causal": primal.causal, "data_dependent": primal.data_dependent}
    plain = PrimalAttention(32, 4, bias=False, **modes, **SMALL, **keywords)
    plain.load_state_dict(primal.state_dict())
    plain.qk_proj.register_forward_hook(lambda *_: compared["qk"])
    assert_close(model.get_submodule(name)(x, position_embeddings=positions)[0], plain(x), EXACT)


def test_calls_of_other_threads_do_not_change_the_rotation() -> None:
    model, ids = replaced("llama"), inputs("llama")["input_ids"]
    expected = output(model, input_ids=ids)

    def call_in_another_thread(*_) -> None:
        handle.remove()
        ThreadPoolExecutor(1).submit(output, model, input_ids=ids[:, :4]).result()

    handle = next(iter(primal_layers(model).values())).qk_proj.register_forward_hook(call_in_another_thread)
    assert_close(output(model, input_ids=ids), expected, EXACT)


@pytest.mark.parametrize("kind", [*ENCODERS, *DECODERS, "cliptext"])
def test_order_matters_after_all_layers_are_replaced(kind) -> None:
    # One layer where it can be: a second causal layer sees the order of the first one's prefixes without positions.
    sizes = {"num_hidden_layers": 1} if kind in ROTARY else {}
    model, ids = primalize(make(kind, **sizes), "all", **SMALL).model, inputs(kind)["input_ids"]
    swapped = ids[:, [1, 0, *range(2, 9)]]
    assert (output(model, input_ids=ids)[:, -1] - output(model, input_ids=swapped)[:, -1]).abs().max() > 1e-3
    if kind in ROTARY:
        with pytest.raises(ValueError, match=r"rotary positions, and its call has none \(position_embeddings\)"):
            next(iter(primal_layers(model).values()))(torch.randn(2, 9, 32))


@pytest.mark.parametrize(("kind", "keywords"), [*((kind, {}) for kind in ALL), *DECAYS])
def test_a_saved_folder_loads_unchanged_and_the_plain_classes_refuse_it(kind, keywords, tmp_path) -> None:
    model, call = replaced(kind, [0, 2], **keywords), inputs(kind)
    model.save_pretrained(tmp_path)
    loaded = load_primalized(type(model), tmp_path)
    assert type(loaded) is type(model)
    for copied in (loaded, pickle.loads(pickle.dumps(model))):
        assert_close(output(copied, **call), output(model, **call), EXACT)
    for plain in (type(model), hf.AutoModel):
        with pytest.raises(RuntimeError, match="ignore_mismatched_sizes"):
            plain.from_pretrained(tmp_path)
    if kind == "bert":
        with_head = load_primalized(hf.BertForSequenceClassification, tmp_path).eval()
        with_head.save_pretrained(tmp_path / "head")
        for one in (with_head.bert, load_primalized(hf.BertModel, tmp_path / "head")):
            assert_close(output(one, **call), output(model, **call), EXACT)
        more = {"num_labels": 7, "ignore_mismatched_sizes": True}
        assert load_primalized(type(with_head), tmp_path / "head", **more)(**call).logits.shape == (2, 7)


@pytest.mark.parametrize("kind", ["bert", "roberta", "electra"])
def test_lora_by_name_finds_linear_maps_only(kind) -> None:
    model = replaced(kind)
    names = [name for name, _ in model.named_modules() if name.endswith("dense")]
    peft.inject_adapter_in_model(peft.LoraConfig(r=2, target_modules=["dense", "qk_proj"]), model)
    assert sum("lora_A" in name for name, _ in model.named_parameters()) == len(names) + 3


def test_a_checkpoint_that_does_not_fit_is_one_line(tmp_path) -> None:
    model = make("bert")
    model.save_pretrained(tmp_path / "plain")
    with pytest.raises(ValueError, match="names no Primal-Attention layers"):
        load_primalized(type(model), tmp_path / "plain")
    with pytest.raises(ValueError, match=r"no config\.json"):
        load_primalized(type(model), tmp_path / "nothing")
    primalize(model, **SMALL)
    model.save_pretrained(tmp_path / "saved")
    with pytest.raises(TypeError, match=r"a model's own class such as BertModel \(got AutoModel\)"):
        load_primalized(hf.AutoModel, tmp_path / "saved")
    with pytest.raises(ValueError, match=r"names the layer encoder\.layer\.2\.attention, which GPT2"):
        load_primalized(hf.GPT2Model, tmp_path / "saved")
    model.encoder.layer[2].attention.primal.w_e = None
    model.save_pretrained(tmp_path / "short")
    with pytest.raises(ValueError, match=r"do not fit BertModel: 1 names, first encoder\.layer\.2\S+w_e"):
        load_primalized(type(model), tmp_path / "short")


def test_cross_attention_is_left() -> None:
    model = make("bert", is_decoder=True, add_cross_attention=True)
    replaced = primalize(model, "all", **SMALL)
    assert len(replaced) == 3
    assert [name for name, _ in replaced.report.left] == [f"encoder.layer.{i}.crossattention" for i in range(3)]
    assert next(iter(primal_layers(model).values())).causal


@pytest.mark.parametrize(
    ("kind", "windowed", "full"),
    [
        ("mistral", {"sliding_window": 4}, {"sliding_window": None}),
        ("modernbert", {"global_attn_every_n_layers": 3}, {"layer_types": ["full_attention"] * 3}),
    ],
)
def test_layers_with_a_window_are_replaced_after_the_window_is_switched_off(kind, windowed, full, tmp_path) -> None:
    model, call = make(kind, **windowed), inputs(kind)
    window = "it attends within a window of .* tokens.*" + re.escape(f"from_pretrained(…, {next(iter(full))}=")
    with pytest.raises(ValueError, match=window):
        primalize(model, lambda *_: True, **SMALL)
    if kind == "modernbert":  # every third layer is global
        replaced = primalize(model, "all", copy=True, **SMALL)
        assert replaced == ["layers.0.attn"]
        assert [name for name, _ in replaced.report.left] == ["layers.1.attn", "layers.2.attn"]
        assert output(replaced.model, **call).shape == (2, 9, 32)
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path, **full)
    assert len(primalize(loaded, "all", **SMALL)) == 3
    swapped = {"input_ids": call["input_ids"][:, [1, 0, *range(2, 9)]]}
    assert (output(loaded, **call) - output(loaded, **swapped))[:, -1].abs().max() > 1e-3  # beyond the window


T5 = {"vocab_size": 50, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
WINDOW = torch.ones(2, 1, 9, 9, dtype=torch.bool).tril().triu(-3)
PACKED = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2, 3]])
LEFT = torch.ones(2, 9, dtype=torch.int64).index_fill(1, torch.tensor([0]), 0)  # padding at the left
STATIC = {"max_new_tokens": 2, "cache_implementation": "static", "pad_token_id": 0, "attention_mask": LEFT}
REFUSED = [
    (
        lambda: primalize(make("bert", is_decoder=True, add_cross_attention=True), lambda name, _: "cross" in name),
        r"encoder\.layer\.0\.crossattention .* cannot be replaced: it is cross-attention",
    ),
    (
        lambda: primalize(hf.T5EncoderModel(hf.T5Config(**T5))),
        r"SelfAttention \(T5Attention\) cannot be replaced: it adds a bias .*relative",
    ),
    (lambda: primalize(hf.SiglipVisionModel(hf.SiglipVisionConfig(**IMAGE))), "no adapter supports SiglipAttention"),
    (lambda: primalize(make("llama", head_dim=16)), "heads have 64 features and its input 32"),
    (lambda: primalize(hf.Qwen3Model(hf.Qwen3Config(**TEXT))), "no adapter supports Qwen3Attention"),
    (lambda: primalize(adapted("bert", ["query"]), "all"), r"a map of peft.*: merge adapters before primalize"),
    (lambda: primalize(quantised("llama"), "all"), r"a weight of \w+Tensor: quantise or shard after primalize"),
    (lambda: primalize(make("bert"), causal=True), r"causal=True contradicts encoder\.layer\.2"),
    (lambda: primalize(make("bert"), decay=0.9), r"encoder\.layer\.2\.attention: decay needs causal=True"),
    (lambda: replaced("gpt2").generate(**inputs("gpt2"), **STATIC), "needs a dynamic cache"),
    (lambda: output(replaced("bert"), **inputs("bert"), attention_mask=WINDOW), "neither padding nor the causal order"),
    (lambda: replaced("llama")(**inputs("llama"), position_ids=PACKED, use_cache=False), "packed sequences"),
    (lambda: replaced("gpt2")(**inputs("gpt2"), position_ids=PACKED, use_cache=False), r"\(packed"),
]


@pytest.mark.parametrize(("call", "message"), REFUSED, ids=[message for _, message in REFUSED])
def test_what_cannot_be_replaced_or_computed_is_refused(call, message) -> None:
    with pytest.raises(ValueError, match=message):
        call()
