"""The attention contract: one battery for every attention by name, Primal included."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from closeness import assert_close
from kernel_cases import saved_bytes
from primal_attention.nn.baselines import attention_names, attention_traits, make_attention
from primal_attention.nn.baselines.softmax import CachedSoftmaxAttention
from primal_cases import padding_mask

DIM, HEADS = 16, 2
NAMES = attention_names()
CAUSAL = tuple(name for name in NAMES if attention_traits(name).supports_causal)
STREAMING = tuple(name for name in NAMES if attention_traits(name).streams)
MODES = [(name, False) for name in NAMES] + [(name, True) for name in CAUSAL]

# Small enough that short sequences have several landmarks, chunks, windows and buckets.
SMALL: dict[str, dict[str, Any]] = {
    "primal": {"rank": 3, "landmarks": 5},
    "performer": {"features": 12, "seed": 3},
    "reformer": {"chunk": 4, "seed": 3},
    "longformer": {"window": 6, "global_tokens": 2},
    "linformer": {"projected_length": 5, "max_length": 64},
    "nystrom": {"landmarks": 4, "conv_kernel": 5},
    "soft": {"landmarks": 4, "newton_iterations": 6},
    "yoso": {"bits": 4},
}


def build(name: str, causal: bool = False, dtype: torch.dtype = torch.float64, **settings: Any) -> Any:
    settings = {**SMALL.get(name, {}), **settings}
    if name == "softmax with cache":
        return CachedSoftmaxAttention(DIM, HEADS, dtype=dtype).eval()
    if name == "primal" and causal:
        settings = {"data_dependent": False, "rank": 3}
    return make_attention(name, DIM, HEADS, causal=causal, dtype=dtype, **settings).eval()


def tokens(batch: int, length: int) -> Tensor:
    return torch.randn(batch, length, DIM, dtype=torch.float64)


def batch_of_lengths(lengths: list[int], size: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """A batch with padding on the right, on the left and in gaps; the padding holds NaN, inf and large numbers."""
    x = torch.randn(len(lengths), size, DIM, dtype=dtype)
    places = ("right", "left", "gaps")
    mask = torch.cat([padding_mask([length], size, places[row % 3]) for row, length in enumerate(lengths)])
    garbage = torch.tensor([torch.nan, torch.inf, -torch.inf, 1e30], dtype=dtype)
    x[mask] = garbage[torch.arange(int(mask.sum())) % 4].unsqueeze(-1)
    return x, mask


def mode_id(value: object) -> str:
    return value if isinstance(value, str) else ("causal" if value else "full")


each_mode = pytest.mark.parametrize(("name", "causal"), MODES, ids=mode_id)
each_name = pytest.mark.parametrize("name", NAMES)
each_streaming = pytest.mark.parametrize("name", STREAMING)


@each_mode
def test_any_length_and_batch_at_any_setting(name: str, causal: bool) -> None:
    attn = build(name, causal)
    for batch, length in ((0, 5), (3, 1), (1, 2), (1, 3), (3, 7), (1, 37)):
        y = attn(tokens(batch, length))
        assert y.shape == (batch, length, DIM)
        assert torch.isfinite(y).all()
    settings = {"data_dependent": not causal} if name == "primal" else {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Primal warns that rank 30 is above the head width 8
        default = make_attention(name, DIM, HEADS, causal=causal, **settings)
    for length in (1, 63, 200):
        assert torch.isfinite(default(torch.randn(2, length, DIM))).all()
    if not causal:
        attn = build(name, bias=False)
        assert not any(key.endswith("bias") for key in attn.state_dict())
        assert torch.isfinite(attn(tokens(2, 9))).all()


@each_mode
def test_each_dtype_equals_float64_up_to_rounding(name: str, causal: bool) -> None:
    attn = build(name, causal)
    x = torch.randn(2, 23, DIM).to(torch.bfloat16).double()
    mask = torch.zeros(2, 23, dtype=torch.bool)
    mask[1, 19:] = True
    # Weights that all dtypes hold exactly: the difference is that of the arithmetic alone.
    for p in attn.state_dict().values():
        if p.is_floating_point():
            p.copy_(p.to(torch.bfloat16))
    expected = attn(x, mask)
    # Some five times the largest error of five seeds.
    for dtype, ratio in {torch.float64: 1e-12, torch.float32: 1e-6, torch.bfloat16: 0.02}.items():
        y = copy.deepcopy(attn).to(dtype)(x.to(dtype), mask)
        assert y.dtype == dtype
        assert_close(y, expected, ratio, f"{name}, {dtype}")


@each_mode
@pytest.mark.parametrize("autocast", [False, True])
def test_bfloat16_gradients_are_finite(name: str, causal: bool, autocast: bool) -> None:
    dtype = torch.float32 if autocast else torch.bfloat16
    attn = build(name, causal, dtype).train()
    x = (5 * torch.randn(2, 41, DIM)).to(dtype).requires_grad_()
    mask = torch.zeros(2, 41, dtype=torch.bool)
    mask[0, 30:] = mask[1] = True
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        y = attn(x, mask)
    y.float().square().mean().backward()
    for tensor in (y, x.grad, *(p.grad for p in attn.parameters() if p.grad is not None)):
        assert torch.isfinite(tensor).all()


@each_mode
def test_padded_equals_single_in_outputs_and_gradients(name: str, causal: bool) -> None:
    attn = build(name, causal)
    lengths = [29, 17, 23, 3, 1, 4, 33, 0]
    x, mask = batch_of_lengths(lengths, 33)
    inputs = [x.requires_grad_(), *attn.parameters()]
    y = attn(x, mask)
    singles = [attn(x[row][~mask[row]][None])[0] for row in range(len(lengths) - 1)]
    assert (y[mask] == 0).all()
    for row, single in enumerate(singles):
        assert_close(y[row][~mask[row]], single, 1e-9, f"{name}, sequence of {lengths[row]}")
    grads, expected = (
        torch.autograd.grad(outputs.square().sum(), inputs, allow_unused=True, materialize_grads=True)
        for outputs in (y, torch.cat(singles))
    )
    assert (grads[0][mask] == 0).all()
    for grad, other in zip(grads, expected, strict=True):
        assert_close(grad, other, 1e-9, name)


@each_mode
def test_gradients_are_derivatives(name: str, causal: bool) -> None:
    if not attention_traits(name).exact_gradient:
        pytest.skip(f"{name} defines its own gradient; the oracle tests check it")
    attn = build(name, causal)
    x, mask = batch_of_lengths([9, 6], 9)
    x = x.masked_fill(mask[..., None], 0.0).requires_grad_()
    names, weights = zip(*attn.named_parameters(), strict=True)

    def run(x: Tensor, *weights: Tensor) -> Tensor:
        return torch.func.functional_call(attn, dict(zip(names, weights, strict=True)), (x, mask))

    assert torch.autograd.gradcheck(run, (x, *weights), fast_mode=True, check_undefined_grad=False)


@pytest.mark.parametrize("name", [*CAUSAL, "softmax with cache"])
@pytest.mark.parametrize("masked", [False, True], ids=["full", "padded"])
def test_a_non_finite_token_leaves_earlier_outputs_and_gradients_unchanged(name: str, masked: bool) -> None:
    attn, x = build(name, causal=True), tokens(2, 13)
    length = 9 if masked else 13
    mask = (torch.arange(13) >= length).expand(2, -1) if masked else None
    for t, value in ((0, torch.nan), (1, torch.inf), (5, -torch.inf), (7, torch.nan), (length - 1, torch.inf)):
        results = []
        for element in (0.0, value):
            leaf = x.clone()
            leaf[:, t] = 0.0
            leaf[:, t, t % DIM] = element  # one element is enough
            leaf.requires_grad_()
            y = attn(leaf, mask)
            y[:, :t].square().sum().backward()
            results.append((y.detach(), leaf.grad[:, :t]))
        (expected, expected_grad), (y, grad) = results
        assert torch.isnan(y[:, t:length]).all(), "the output of the token and of later ones is NaN"
        assert torch.equal(y[:, :t], expected[:, :t])
        if name != "primal":  # its backward pass multiplies the zero gradient of the later output by the token
            assert torch.equal(grad, expected_grad)


@pytest.mark.parametrize("name", [*STREAMING, "softmax with cache"])
def test_outputs_after_a_non_finite_token_of_the_state_are_nan(name: str) -> None:
    attn, x = build(name, causal=True), tokens(2, 7)
    x[0, 5, 3] = torch.nan
    for start in (None, attn.initial_state(2)):
        _, state = attn(x, state=start, return_state=True)
        y, _ = attn.step(tokens(2, 1)[:, 0], state)
        assert torch.isnan(y[0]).all()
        assert torch.isfinite(y[1]).all()


@each_streaming
def test_streaming_equals_one_pass_with_a_state_of_constant_size(name: str) -> None:
    attn, x = build(name, causal=True), tokens(2, 300)
    x[:, 200] *= 50  # a late largest key rescales the earlier sums
    state, rows, sizes = attn.initial_state(2), [], set()
    for t in range(12):
        y_t, state = attn.step(x[:, t], state)
        rows.append(y_t[:, None])
        sizes.add(sum(t.numel() for t in state if isinstance(t, Tensor)))
    for part in (x[:, 12:141], x[:, 141:280], x[:, 280:]):
        y, state = attn(part, state=state, return_state=True)
        rows.append(y)
        sizes.add(sum(t.numel() for t in state if isinstance(t, Tensor)))
    assert_close(torch.cat(rows, dim=1), attn(x), 1e-10, name)
    assert len(sizes) == 1


@each_streaming
def test_a_state_counts_valid_tokens_only(name: str) -> None:
    attn = build(name, causal=True)
    x, mask = batch_of_lengths([6, 3, 5, 0], 8)
    _, state = attn(x, mask, return_state=True)
    following = tokens(4, 1)
    y, _ = attn.step(following[:, 0], state)
    for row in range(4):
        single = torch.cat([x[row][~mask[row]], following[row]])[None]
        assert_close(y[row], attn(single)[0, -1], 1e-10, name)


@each_mode
def test_evaluation_is_deterministic_and_one_seed_gives_one_layer(name: str, causal: bool) -> None:
    x = tokens(2, 21)

    def run() -> Tensor:
        torch.manual_seed(7)
        attn = build(name, causal).train()
        return torch.stack([attn(x) for _ in range(3)])  # training forwards may redraw random buffers

    assert torch.equal(run(), run())
    attn = build(name, causal)
    first = attn(x)
    torch.manual_seed(2)
    assert torch.equal(first, attn(x))


@each_name
def test_dropout_acts_in_training_only(name: str) -> None:
    attn, plain, x = build(name, dropout=0.5), build(name), tokens(2, 21)
    plain.load_state_dict(attn.state_dict())
    assert torch.equal(attn(x), plain(x))
    attn.train()
    assert not torch.allclose(attn(x), attn(x))


@each_mode
def test_activation_checkpointing_gives_the_same_gradients(name: str, causal: bool) -> None:
    x, gradients = tokens(2, 21), []
    for wrap in (False, True):
        torch.manual_seed(0)
        attn = build(name, causal).train()
        leaf = x.clone().requires_grad_()
        for _ in range(3):  # layers with random buffers redraw them before the second and third call
            y = checkpoint(attn, leaf, use_reentrant=False) if wrap else attn(leaf)
            y.square().sum().backward()
        gradients.append(leaf.grad)
    assert_close(gradients[1], gradients[0], 1e-12, name)


@pytest.mark.parametrize("name", [name for name in NAMES if name != "primal"])  # tests/nn/test_primal_compile.py
def test_compiles_as_one_graph_with_the_same_gradients(name: str) -> None:
    few = {"soft": {"newton_iterations": 2}, "nystrom": {"pinv_iterations": 2}}  # each iteration adds to the graph
    attn = build(name, name in CAUSAL, torch.float32, **few.get(name, {}))
    x, mask = batch_of_lengths([21, 13, 16], 21, torch.float32)
    torch._dynamo.reset()
    compiled = torch.compile(attn, backend="aot_eager", fullgraph=True)
    results = []
    for call in (compiled, attn):
        leaf = x.clone().requires_grad_()
        y = call(leaf, mask)
        y.square().sum().backward()
        results.append((y, leaf.grad))
    assert_close(results[0][0], results[1][0], 1e-5, name)
    assert_close(results[0][1], results[1][1], 1e-4, name)


@each_mode
def test_state_dict_round_trip(name: str, causal: bool) -> None:
    seed = {"seed": None} if "seed" in SMALL.get(name, {}) else {}
    attn, other, x = build(name, causal, **seed), build(name, causal, **seed), tokens(2, 21)
    y = attn(x)
    assert not torch.allclose(y, other(x))
    other.load_state_dict(attn.state_dict())  # after a call: no shape depends on the length
    assert torch.equal(y, other(x))
    assert torch.equal(y, copy.deepcopy(attn)(x))


@pytest.mark.parametrize(
    ("name", "causal"), [(n, c) for n, c in MODES if attention_traits(n).linear_memory], ids=mode_id
)
def test_memory_saved_for_backward_grows_linearly(name: str, causal: bool) -> None:
    settings = {"linformer": {"max_length": 2048}, "reformer": {"chunk": 16}, "longformer": {"window": 32}}
    attn = build(name, causal, torch.float32, **settings.get(name, {})).train()
    small, large = (saved_bytes(attn, torch.randn(1, length, DIM)) for length in (512, 2048))
    assert small > 0
    # Four times the tokens, four times the bytes; a little more where a scan over chunks adds a logarithm.
    assert large <= 4.4 * small, f"{name}: {small} bytes at 512 tokens, {large} at 2048"


@pytest.mark.gpu
@each_mode
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_cuda_equals_cpu(name: str, causal: bool, dtype: torch.dtype) -> None:
    attn = build(name, causal, torch.float32).to(torch.bfloat16).double()
    x, mask = batch_of_lengths([50, 33, 41, 0], 50)
    x = x.bfloat16().double()
    expected = attn(x, mask)
    leaf = x.to("cuda", dtype).requires_grad_()
    y = attn.to("cuda", dtype)(leaf, mask.cuda())
    assert_close(y, expected, {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 0.05}[dtype], name)
    attn.train()
    attn(leaf, mask.cuda()).square().sum().backward()
    assert torch.isfinite(leaf.grad).all()


@each_name
def test_bad_input_is_refused_by_name(name: str) -> None:
    attn, x = build(name), tokens(2, 5)
    for error, message, call in (
        (ValueError, r"divisible by num_heads \(embed_dim=100, num_heads=8\)", lambda: make_attention(name, 100, 8)),
        (ValueError, r"num_heads .*0", lambda: make_attention(name, 16, 0)),
        (ValueError, r"dropout .*1\.5", lambda: build(name, dropout=1.5)),
        (TypeError, "landmark_count", lambda: build(name, landmark_count=3)),
        (ValueError, "embed_dim=16", lambda: attn(torch.cat([x, x], dim=-1))),
        (TypeError, "x must be a tensor", lambda: attn(x.tolist())),
        (TypeError, "causal must be True or False", lambda: build(name, causal="no")),
        (TypeError, "key_padding_mask must be a bool tensor", lambda: attn(x, key_padding_mask=x[..., 0].long())),
        (ValueError, "key_padding_mask must have shape", lambda: attn(x, key_padding_mask=x[..., 0].mT > 0)),
        *([] if name in CAUSAL else [(ValueError, name, lambda: build(name, causal=True))]),
    ):
        with pytest.raises(error, match=message):
            call()


def test_names() -> None:
    expected = "softmax primal linear performer reformer longformer linformer nystrom yoso cosformer soft flow"
    assert set(NAMES) == set(expected.split())
    with pytest.raises(ValueError, match="'perfomer': did you mean 'performer'"):
        make_attention("perfomer", DIM, HEADS)
    with pytest.raises(TypeError, match="name of an attention must be a text"):
        make_attention(None, DIM, HEADS)
    with pytest.raises(ValueError, match="known are softmax, primal"):
        make_attention("zzz", DIM, HEADS)
