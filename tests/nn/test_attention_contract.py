"""The attention contract: what every attention by name must do, Primal included. One battery, all names."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from closeness import assert_close
from primal_attention.nn.baselines import attention_names, attention_traits, make_attention
from primal_attention.nn.baselines.softmax import CachedSoftmaxAttention

DIM, HEADS = 16, 2
NAMES = attention_names()
CAUSAL = tuple(name for name in NAMES if attention_traits(name).supports_causal)
STREAMING = tuple(name for name in NAMES if attention_traits(name).streams)
MODES = [(name, False) for name in NAMES] + [(name, True) for name in CAUSAL]

# Small enough that short test sequences exercise the approximations: several landmarks, chunks, windows and buckets.
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


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Tensors this small lose more to threads than they gain."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def build(name: str, causal: bool = False, dtype: torch.dtype = torch.float64, **settings: Any) -> nn.Module:
    settings = {**SMALL.get(name, {}), **settings}
    if name == "primal" and causal:
        settings = {"data_dependent": False, "rank": 3}
    return make_attention(name, DIM, HEADS, causal=causal, dtype=dtype, **settings).eval()


def mode_id(value: object) -> str:
    return value if isinstance(value, str) else ("causal" if value else "full")


def batch_of_lengths(lengths: list[int], size: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """Sequences whose padding stands to the right, to the left and in holes, filled with what must not matter."""
    x = torch.randn(len(lengths), size, DIM, dtype=dtype)
    mask = torch.ones(len(lengths), size, dtype=torch.bool)
    for row, length in enumerate(lengths):
        slots = [torch.arange(length), torch.arange(size - length, size), torch.randperm(size)[:length]][row % 3]
        mask[row, slots] = False
    garbage = torch.tensor([torch.nan, torch.inf, -torch.inf, 1e30], dtype=dtype)
    x[mask] = garbage[torch.arange(int(mask.sum())) % 4].unsqueeze(-1)
    return x, mask


each_mode = pytest.mark.parametrize(("name", "causal"), MODES, ids=mode_id)
each_name = pytest.mark.parametrize("name", NAMES)


@each_mode
@pytest.mark.parametrize("length", [1, 2, 3, 7, 37])
def test_any_length_any_batch(name: str, causal: bool, length: int) -> None:
    attn = build(name, causal)
    for batch in (0, 1, 3):
        y = attn(torch.randn(batch, length, DIM, dtype=torch.float64))
        assert y.shape == (batch, length, DIM)
        assert torch.isfinite(y).all()


@each_mode
def test_any_length_at_the_default_settings(name: str, causal: bool) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Primal says that rank 30 is above the head width 8
        settings = {"data_dependent": False} if name == "primal" and causal else {}
        attn = make_attention(name, DIM, HEADS, causal=causal, **settings)
    for length in (1, 63, 200):
        y = attn(torch.randn(2, length, DIM))
        assert torch.isfinite(y).all()


@each_mode
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_dtype_is_kept_and_nothing_is_lost_to_it(name: str, causal: bool, dtype: torch.dtype) -> None:
    attn = build(name, causal)
    x = torch.randn(2, 23, DIM).to(torch.bfloat16).double()
    mask = torch.zeros(2, 23, dtype=torch.bool)
    mask[1, 19:] = True
    # Weights that all dtypes hold exactly, so that the difference is the arithmetic's alone.
    for p in attn.state_dict().values():
        if p.is_floating_point():
            p.copy_(p.to(torch.bfloat16))
    expected = attn(x, mask)
    y = copy.deepcopy(attn).to(dtype)(x.to(dtype), mask)
    assert y.dtype == dtype
    assert torch.isfinite(y).all()
    # Some five times what was seen over five seeds.
    ratio = {torch.float64: 1e-12, torch.float32: 1e-6, torch.bfloat16: 0.02}[dtype]
    assert_close(y, expected, ratio, name)


@each_mode
def test_gradients_are_finite_in_bfloat16(name: str, causal: bool) -> None:
    attn = build(name, causal, torch.bfloat16).train()
    x = (5 * torch.randn(2, 41, DIM)).bfloat16().requires_grad_()
    mask = torch.zeros(2, 41, dtype=torch.bool)
    mask[0, 30:] = mask[1] = True
    attn(x, mask).square().mean().backward()
    for parameter in (x, *attn.parameters()):
        assert parameter.grad is None or torch.isfinite(parameter.grad).all()


@each_mode
def test_runs_under_autocast(name: str, causal: bool) -> None:
    attn = build(name, causal, torch.float32).train()
    x = torch.randn(2, 23, DIM, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        y = attn(x)
    y.float().square().mean().backward()
    assert torch.isfinite(y).all()
    assert x.grad is not None
    assert torch.isfinite(x.grad).all()


@each_mode
def test_padded_equals_single(name: str, causal: bool) -> None:
    attn = build(name, causal)
    lengths = [29, 17, 23, 3, 1, 4, 33]
    x, mask = batch_of_lengths(lengths, 33)
    y = attn(x, mask)
    for row, length in enumerate(lengths):
        single = attn(x[row][~mask[row]][None])
        assert single.shape[1] == length
        assert_close(y[row][~mask[row]][None], single, 1e-9, f"{name}, sequence of {length}")
    assert (y[mask] == 0).all()


@each_mode
def test_padding_never_matters_for_gradients(name: str, causal: bool) -> None:
    attn = build(name, causal)
    x, mask = batch_of_lengths([11, 7, 9, 0], 13)
    gradients = []
    for filler in (x, x.masked_fill(mask[..., None], 0.0)):
        leaf = filler.clone().requires_grad_()
        attn.zero_grad()
        attn(leaf, mask).square().sum().backward()
        assert leaf.grad is not None
        gradients.append([leaf.grad, *(p.grad.clone() for p in attn.parameters() if p.grad is not None)])
    assert (gradients[0][0][mask] == 0).all()
    for with_garbage, with_zeros in zip(*gradients, strict=True):
        assert_close(with_garbage, with_zeros, 1e-12, name)


@each_mode
def test_a_sequence_of_padding_alone_gives_zeros(name: str, causal: bool) -> None:
    attn = build(name, causal)
    x, mask = batch_of_lengths([0, 5], 9)
    y = attn(x, mask)
    assert (y[0] == 0).all()
    assert torch.isfinite(y).all()


@each_mode
def test_gradients_are_derivatives(name: str, causal: bool) -> None:
    if not attention_traits(name).exact_gradient:
        pytest.skip(f"{name} defines its own gradient; it is checked against an outside implementation")
    attn = build(name, causal)
    x, mask = batch_of_lengths([9, 6], 9)
    x = x.masked_fill(mask[..., None], 0.0).requires_grad_()
    names, weights = zip(*attn.named_parameters(), strict=True)

    def run(x: Tensor, *weights: Tensor) -> Tensor:
        return torch.func.functional_call(attn, dict(zip(names, weights, strict=True)), (x, mask))

    assert torch.autograd.gradcheck(run, (x, *weights), fast_mode=True, check_undefined_grad=False)


@pytest.mark.parametrize("name", CAUSAL)
def test_causal_attention_has_no_derivative_with_respect_to_the_future(name: str) -> None:
    attn = build(name, causal=True)
    x = torch.randn(1, 19, DIM, dtype=torch.float64)
    jacobian = torch.autograd.functional.jacobian(lambda t: attn(t).sum(-1), x)[0, :, 0].abs().sum(-1)  # (i, j)
    assert (jacobian.triu(1) == 0).all()
    assert (jacobian.diagonal() > 0).sum() > 0
    assert (jacobian.tril(-1) > 0).any()


@pytest.mark.parametrize("name", [n for n in CAUSAL if n != "reformer"])  # its chunks depend on how many hash alike
def test_causal_prefix_stays_when_the_sequence_grows(name: str) -> None:
    attn = build(name, causal=True)
    x = torch.randn(2, 300, DIM, dtype=torch.float64)
    assert_close(attn(x)[:, :131], attn(x[:, :131]), 1e-11, name)


@pytest.mark.parametrize("name", [*CAUSAL, "softmax with cache"])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf], ids=str)
@pytest.mark.parametrize("masked", [False, True], ids=["whole", "padded"])
def test_a_non_finite_token_leaves_earlier_outputs_and_gradients_unchanged(name: str, bad: float, masked: bool) -> None:
    attn = CachedSoftmaxAttention(DIM, HEADS, dtype=torch.float64) if " " in name else build(name, causal=True)
    length = 9 if masked else 13
    mask = (torch.arange(13) >= length).expand(2, -1) if masked else None
    x = torch.randn(2, 13, DIM, dtype=torch.float64)
    for t in range(length):
        results = []
        for value in (0.0, bad):
            leaf = x.clone()
            leaf[:, t] = 0.0
            leaf[:, t, t % DIM] = value  # one element is enough
            leaf.requires_grad_()
            y = attn(leaf, mask)
            y[:, :t].square().sum().backward()
            assert leaf.grad is not None
            results.append((y.detach(), leaf.grad[:, :t]))
        (expected, expected_grad), (y, grad) = results
        assert torch.isnan(y[:, t:length]).all(), "the output of the token itself and of later ones says so"
        assert torch.equal(y[:, :t], expected[:, :t])
        if name != "primal":  # its backward pass multiplies the zero gradient of the later output by the token
            assert torch.equal(grad, expected_grad)


@pytest.mark.parametrize("name", [*STREAMING, "softmax with cache"])
def test_a_state_remembers_a_non_finite_token(name: str) -> None:
    attn = CachedSoftmaxAttention(DIM, HEADS, dtype=torch.float64) if " " in name else build(name, causal=True)
    x = torch.randn(2, 7, DIM, dtype=torch.float64)
    x[0, 5, 3] = torch.nan
    for start in (None, attn.initial_state(2)):
        _, state = attn(x, state=start, return_state=True)
        y, _ = attn.step(torch.randn(2, DIM, dtype=torch.float64), state)
        assert torch.isnan(y[0]).all()
        assert torch.isfinite(y[1]).all()


@pytest.mark.parametrize("name", [n for n in NAMES if n not in CAUSAL])
def test_causal_where_there_is_none_is_refused_by_name(name: str) -> None:
    with pytest.raises(ValueError, match=name):
        make_attention(name, DIM, HEADS, causal=True)


@pytest.mark.parametrize("name", STREAMING)
def test_steps_equal_one_pass(name: str) -> None:
    attn = build(name, causal=True)
    x = torch.randn(2, 17, DIM, dtype=torch.float64)
    state, rows = attn.initial_state(2), []
    for t in range(17):
        y_t, state = attn.step(x[:, t], state)
        rows.append(y_t)
    assert_close(torch.stack(rows, dim=1), attn(x), 1e-10, name)


@pytest.mark.parametrize("name", STREAMING)
def test_resuming_equals_one_pass(name: str) -> None:
    attn = build(name, causal=True)
    x = torch.randn(2, 300, DIM, dtype=torch.float64)
    x[:, 200] *= 50  # the largest key may come late: what was summed before must be kept relative to it
    head, state = attn(x[:, :141], return_state=True)
    tail, state = attn(x[:, 141:280], state=state, return_state=True)
    y_t, _ = attn.step(x[:, 280], state)
    whole = attn(x)
    assert_close(torch.cat([head, tail, y_t[:, None]], dim=1), whole[:, :281], 1e-10, name)


@pytest.mark.parametrize("name", STREAMING)
def test_state_counts_valid_tokens_only(name: str) -> None:
    attn = build(name, causal=True)
    x, mask = batch_of_lengths([6, 3, 5, 0], 8)
    _, state = attn(x, mask, return_state=True)
    following = torch.randn(4, DIM, dtype=torch.float64)
    y, _ = attn.step(following, state)
    for row in range(4):
        alone = torch.cat([x[row][~mask[row]], following[row : row + 1]])[None]
        assert_close(y[row], attn(alone)[0, -1], 1e-10, name)


@pytest.mark.parametrize("name", STREAMING)
def test_state_does_not_grow(name: str) -> None:
    attn = build(name, causal=True)

    def size(length: int) -> int:
        _, state = attn(torch.randn(1, length, DIM, dtype=torch.float64), return_state=True)
        return sum(t.numel() for t in state if isinstance(t, Tensor))

    assert size(5) == size(200)


@each_mode
def test_eval_is_deterministic_whatever_the_global_seed(name: str, causal: bool) -> None:
    attn = build(name, causal)
    x = torch.randn(2, 21, DIM, dtype=torch.float64)
    torch.manual_seed(1)
    first = attn(x)
    torch.manual_seed(2)
    assert torch.equal(first, attn(x))


@each_name
def test_one_seed_gives_one_layer(name: str) -> None:
    x = torch.randn(2, 21, DIM, dtype=torch.float64)

    def run() -> Tensor:
        torch.manual_seed(7)
        attn = build(name).train()
        return torch.stack([attn(x) for _ in range(3)])  # training forwards may redraw: still the same sequence

    assert torch.equal(run(), run())


@each_name
def test_dropout_acts_in_training_only(name: str) -> None:
    torch.manual_seed(0)
    attn = build(name, dropout=0.5)
    torch.manual_seed(0)
    plain = build(name)
    plain.load_state_dict(attn.state_dict())
    x = torch.randn(2, 21, DIM, dtype=torch.float64)
    assert torch.equal(attn(x), plain(x))
    attn.train()
    assert not torch.allclose(attn(x), attn(x))


@each_mode
def test_activation_checkpointing_changes_nothing(name: str, causal: bool) -> None:
    x = torch.randn(2, 21, DIM, dtype=torch.float64)
    gradients = []
    for wrap in (False, True):
        torch.manual_seed(0)
        attn = build(name, causal).train()
        leaf = x.clone().requires_grad_()
        for _ in range(3):  # layers that redraw do so before the second and third
            y = checkpoint(attn, leaf, use_reentrant=False) if wrap else attn(leaf)
            y.square().sum().backward()
        assert leaf.grad is not None
        gradients.append(leaf.grad)
    assert_close(gradients[1], gradients[0], 1e-12, name)


@each_mode
def test_compiles_as_one_graph_and_back(name: str, causal: bool) -> None:
    attn = build(name, causal, torch.float32)
    x, mask = batch_of_lengths([21, 13, 16], 21, torch.float32)
    torch._dynamo.reset()
    compiled = torch.compile(attn, backend="aot_eager", fullgraph=True)
    leaf = x.clone().requires_grad_()
    y = compiled(leaf, mask)
    assert_close(y, attn(x, mask), 1e-5, name)
    y.square().sum().backward()
    eager = x.clone().requires_grad_()
    attn(eager, mask).square().sum().backward()
    assert leaf.grad is not None
    assert eager.grad is not None
    assert_close(leaf.grad, eager.grad, 1e-4, name)


@each_mode
def test_state_dict_round_trip(name: str, causal: bool) -> None:
    torch.manual_seed(1)
    attn = build(name, causal, **({"seed": None} if "seed" in SMALL.get(name, {}) else {}))
    torch.manual_seed(2)
    other = build(name, causal, **({"seed": None} if "seed" in SMALL.get(name, {}) else {}))
    x = torch.randn(2, 21, DIM, dtype=torch.float64)
    assert not torch.allclose(attn(x), other(x))
    other.load_state_dict(attn.state_dict())
    assert torch.equal(attn(x), other(x))
    assert torch.equal(attn(x), copy.deepcopy(attn)(x))


@each_name
def test_parameters_do_not_depend_on_the_input_length(name: str) -> None:
    attn = build(name)
    before = {key: value.shape for key, value in attn.state_dict().items()}
    attn(torch.randn(1, 5, DIM, dtype=torch.float64))
    attn(torch.randn(1, 50, DIM, dtype=torch.float64))
    assert before == {key: value.shape for key, value in attn.state_dict().items()}


@each_name
def test_without_bias(name: str) -> None:
    attn = build(name, bias=False)
    assert not any(key.endswith("bias") for key in attn.state_dict())
    assert torch.isfinite(attn(torch.randn(2, 9, DIM, dtype=torch.float64))).all()


def saved_bytes(attn: nn.Module, length: int) -> int:
    """Bytes that the backward pass keeps, each storage once, parameters and buffers left out."""
    own = {t.untyped_storage().data_ptr() for t in (*attn.parameters(), *attn.buffers())}
    kept: list[Tensor] = []  # holding them keeps their addresses apart

    def keep(t: Tensor) -> Tensor:
        kept.append(t)
        return t

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        attn(torch.randn(1, length, DIM, requires_grad=True))
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in kept}
    return sum(size for address, size in storages.items() if address not in own)


def test_the_measure_of_memory_sees_a_square() -> None:
    attn = build("softmax", dtype=torch.float32)
    with sdpa_kernel(SDPBackend.MATH):
        assert saved_bytes(attn, 2048) > 12 * saved_bytes(attn, 512)


@pytest.mark.parametrize(
    ("name", "causal"), [(n, c) for n, c in MODES if attention_traits(n).linear_memory], ids=mode_id
)
def test_memory_for_backward_grows_linearly(name: str, causal: bool) -> None:
    settings = {"max_length": 4096} if name == "linformer" else {}
    if name == "reformer":
        settings = {"chunk": 16}
    if name == "longformer":
        settings = {"window": 32}
    attn = build(name, causal, torch.float32, **settings).train()
    small, large = saved_bytes(attn, 1024), saved_bytes(attn, 4096)
    assert small > 0
    # Four times the tokens, four times the bytes; a little more where a scan over chunks adds a logarithm.
    assert large <= 4.4 * small, f"{name}: {small} bytes at 1024 tokens, {large} at 4096"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
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
    assert leaf.grad is not None
    assert torch.isfinite(leaf.grad).all()


@each_name
def test_bad_arguments_are_named(name: str) -> None:
    with pytest.raises(ValueError, match=r"embed_dim must be divisible by num_heads \(embed_dim=100, num_heads=8\)"):
        make_attention(name, 100, 8)
    with pytest.raises(ValueError, match=r"num_heads .*0"):
        make_attention(name, 16, 0)
    with pytest.raises(ValueError, match=r"dropout .*1\.5"):
        build(name, dropout=1.5)
    with pytest.raises(TypeError, match="landmark_count"):
        build(name, landmark_count=3)
    attn = build(name)
    with pytest.raises(ValueError, match="embed_dim=16"):
        attn(torch.randn(2, 5, DIM + 1, dtype=torch.float64))
    with pytest.raises(TypeError, match="key_padding_mask must be a bool tensor"):
        attn(torch.randn(2, 5, DIM, dtype=torch.float64), key_padding_mask=torch.zeros(2, 5, dtype=torch.int64))
    with pytest.raises(ValueError, match="key_padding_mask must have shape"):
        attn(torch.randn(2, 5, DIM, dtype=torch.float64), key_padding_mask=torch.zeros(5, 2, dtype=torch.bool))


def test_unknown_name_suggests_the_nearest() -> None:
    with pytest.raises(ValueError, match="'perfomer': did you mean 'performer'"):
        make_attention("perfomer", DIM, HEADS)
    with pytest.raises(ValueError, match="known are softmax, primal"):
        make_attention("zzz", DIM, HEADS)


def test_names_are_those_of_the_paper() -> None:
    assert set(NAMES) == {
        *("softmax", "primal", "linear", "performer", "reformer", "longformer"),
        *("linformer", "nystrom", "yoso", "cosformer", "soft", "flow"),
    }
