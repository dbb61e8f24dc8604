"""The lean path in C against the equations: outputs, J, scores and every gradient; and what happens without it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import gradcheck
from torch.nn import functional as F

from closeness import assert_close
from lean_cases import SAME, assert_same, holes, make, results
from primal_attention import info, ksvd_loss
from primal_attention.ops.lean import attention, native
from primal_attention.ops.lean.native import build, library

needs_compiler = pytest.mark.skipif(native.missing() is not None, reason=str(native.missing()))
both_modes = pytest.mark.parametrize("mode", ["plain", "data_dependent"])


@pytest.fixture
def _with_nothing_but_nan() -> Iterator[None]:
    """Memory that nobody has written yet holds NaN: what a pass reads too early shows."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


some_threads = pytest.mark.parametrize("threads", [1, 2, 3], indirect=True)


@needs_compiler
@pytest.mark.usefixtures("_with_nothing_but_nan")
class TestEquations:
    @pytest.fixture(autouse=True)
    def _served(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        """The C passes themselves are met, not those that they fall back to."""
        calls = []

        def noted(*given: object) -> tuple[Tensor, Tensor | None, Tensor | None]:
            calls.append(given)
            return native.attention.native_attention(*given)  # type: ignore[arg-type]

        monkeypatch.setattr(attention.native, "native_attention", noted)
        yield
        assert calls

    @pytest.mark.parametrize("dtype", SAME)
    @pytest.mark.parametrize("masked", [False, True])
    @pytest.mark.parametrize("shape", [(2, 1), (3, 7), (2, 65), (2, 500), (70, 2)], ids=str)
    @both_modes
    def test_every_shape(self, mode: str, shape: tuple[int, int], masked: bool, dtype: torch.dtype) -> None:
        mask = holes(*shape) if masked else None
        if mask is not None:
            mask[0, 0] = False
        assert_same(make(mode, dtype=dtype), torch.randn(*shape, 24, dtype=dtype), mask)

    @pytest.mark.parametrize(
        ("d", "heads", "rank"), [(48, 1, 30), (60, 5, 3), (32, 4, 16), (24, 8, 1), (66, 2, 40), (21, 3, 19)], ids=str
    )
    @some_threads
    @both_modes
    def test_every_width(self, mode: str, d: int, heads: int, rank: int, threads: int) -> None:
        layer = make(mode, d, heads, rank=rank, landmarks=50)
        assert_same(layer, torch.randn(2, 150, d, dtype=torch.float64))  # both maps as one, or
        assert_same(layer, torch.randn(1, 3, d, dtype=torch.float64))  # apart

    @some_threads
    @both_modes
    def test_tokens_beyond_a_stretch(self, mode: str, threads: int) -> None:
        assert_same(make(mode, dtype=torch.float64), torch.randn(2, 1700, 24, dtype=torch.float64))

    @pytest.mark.parametrize("form", ["mean", "sum"])
    @pytest.mark.parametrize("trace", ["weights", "projections"])
    @pytest.mark.parametrize("masked", [False, True])
    @both_modes
    def test_every_form_of_the_objective(self, mode: str, form: str, trace: str, masked: bool) -> None:
        layer = make(mode, objective_form=form, objective_trace=trace)
        assert_same(layer, torch.randn(3, 40, 24, dtype=torch.float64), holes(3, 40) if masked else None)

    @both_modes
    def test_without_bias(self, mode: str) -> None:
        assert_same(make(mode, bias=False), torch.randn(2, 90, 24, dtype=torch.float64))

    @both_modes
    def test_packed_sequences(self, mode: str) -> None:
        cu_seqlens = torch.tensor([0, 5, 5, 47, 48], dtype=torch.int32)
        assert_same(make(mode), torch.randn(48, 24, dtype=torch.float64), cu_seqlens=cu_seqlens)

    @both_modes
    def test_padding_may_hold_anything(self, mode: str) -> None:
        layer, x, mask = make(mode), torch.randn(3, 50, 24, dtype=torch.float64), holes(3, 50)
        expected = results(layer, "lean", x, mask)
        for junk in (float("nan"), float("inf")):
            for name, value in results(layer, "lean", x.masked_fill(mask[..., None], junk), mask).items():
                assert torch.equal(value, expected[name]), name

    def test_a_row_of_zeros(self) -> None:
        # ‖z‖ is then below the floor of the cosine map, where the divisor is a constant.
        x = torch.randn(1, 6, 24, dtype=torch.float64)
        x[:, 2] = 0.0
        x[:, 3] *= 1e-14
        assert_same(make("plain", bias=False), x)

    @both_modes
    def test_gradcheck(self, mode: str) -> None:
        layer = make(mode, 8, 2, rank=2, landmarks=3)
        mask = torch.tensor([[False, True, False, False], [False, False, True, True]])

        def function(x: Tensor) -> tuple[Tensor, ...]:
            y, scores = layer(x, mask, return_scores=True)
            return y, layer.objective, *scores

        assert gradcheck(function, torch.randn(2, 4, 8, dtype=torch.float64, requires_grad=True))

    @pytest.mark.parametrize("which", ["qk_proj.weight", "qk_proj.bias", "w_e", "score_proj.bias", "sqrt_lambda", "x"])
    @pytest.mark.parametrize("length", [5, 200])
    def test_only_what_is_asked_for_gets_a_gradient(self, which: str, length: int) -> None:
        layer = make("data_dependent", 48, 3).requires_grad_(False)
        x = torch.randn(2, length, 48, dtype=torch.float64)
        wanted = (x if which == "x" else layer.get_parameter(which)).requires_grad_()
        found = []
        for layer.backend in ("reference", "lean"):
            found += torch.autograd.grad(layer(x).square().sum() + ksvd_loss(layer), wanted)
        assert_close(found[1], found[0], SAME[torch.float64], which)

    @both_modes
    def test_the_objective_alone_trains(self, mode: str) -> None:
        layer, x, found = make(mode), torch.randn(2, 30, 24, dtype=torch.float64), []
        for layer.backend in ("reference", "lean"):
            layer(x)
            found.append(
                torch.autograd.grad(
                    ksvd_loss(layer), list(layer.parameters()), allow_unused=True, materialize_grads=True
                )
            )
        for ours, theirs in zip(*reversed(found), strict=True):
            assert_close(ours, theirs, SAME[torch.float64])

    @some_threads
    def test_the_same_again_bit_for_bit(self, threads: int) -> None:
        layer, x = make("data_dependent", 64, 4, rank=9, dtype=torch.float32), torch.randn(3, 300, 64)
        first, second = (results(layer, "lean", x) for _ in range(2))
        assert all(torch.equal(first[name], second[name]) for name in first)

    def test_inference_is_the_same(self) -> None:
        layer, x = make("data_dependent"), torch.randn(3, 200, 24, dtype=torch.float64)
        y = layer(x)
        with torch.inference_mode():
            assert torch.equal(layer(x), y)
        assert torch.equal(layer.eval()(x), y)


class SoftmaxAttention(nn.Module):
    """Multi-head attention on PyTorch's fused softmax."""

    def __init__(self, embed_dim: int, num_heads: int) -> None:
        super().__init__()
        self.heads, self.qkv, self.out = num_heads, nn.Linear(embed_dim, 3 * embed_dim), nn.Linear(embed_dim, embed_dim)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, dim=-1))
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


def bytes_kept(module: nn.Module, x: Tensor) -> int:
    """Of the storages that autograd holds until the way back, the parameters' aside."""
    kept: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        y = module(x.requires_grad_())  # alive until all is noted: no address may come twice
    for parameter in module.parameters():
        kept.pop(parameter.untyped_storage().data_ptr(), None)
    del y
    return sum(kept.values())


@needs_compiler
@pytest.mark.parametrize("tokens", [1, 31, 32, 65, 257, 300, 500, 1000])
def test_memory_kept_for_the_way_back(tokens: int) -> None:
    """x, z, the scores and the norms of the tokens, nothing beside them: less than softmax keeps, at every length."""
    layer = make("data_dependent", 512, 8, rank=30, landmarks=300, dtype=torch.float32)
    kept = bytes_kept(layer, torch.randn(1, tokens, 512))
    assert kept == 4 * tokens * (512 + 2 * 512 + 2 * 8 * 30 + 2 * 8)
    assert kept <= 0.8 * bytes_kept(SoftmaxAttention(512, 8), torch.randn(1, tokens, 512))


@needs_compiler
@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_its_threads_are_pytorchs() -> None:
    """In a process of its own: other packages bring an OpenMP too."""
    code = (
        "import torch, pathlib; from primal_attention import PrimalAttention; "
        "PrimalAttention(24, 2, rank=4, landmarks=9, backend='lean')(torch.randn(1, 40, 24)); "
        "maps = pathlib.Path('/proc/self/maps').read_text().splitlines(); "
        "assert any('lean-float' in line for line in maps); "
        "print(len({line.split()[-1] for line in maps if 'libgomp' in line or 'libomp' in line}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout.strip() in ("0", "1"), done.stdout + done.stderr


class TestWithoutIt:
    @pytest.fixture(autouse=True)
    def _anew(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        monkeypatch.setattr(library, "_found", {})

    def test_the_switch(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("PRIMAL_NATIVE", "0")
        assert native.missing() == "PRIMAL_NATIVE=0 asks for PyTorch's operations"

    def test_no_compiler_is_no_error(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("CC", "no-such-compiler")
        assert native.missing() == "no C compiler (no-such-compiler) on the path"
        assert_same(make("data_dependent"), torch.randn(2, 30, 24, dtype=torch.float64))
        assert any("no-such-compiler" in line for line in info.chosen())

    @needs_compiler
    def test_a_compiler_that_fails_is_no_error(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(build, "FLAGS", (*build.FLAGS, "--no-such-flag"))
        why = native.missing()
        assert why is not None
        assert "failed: " in why
        assert "\n" not in why
        assert_same(make("plain"), torch.randn(2, 30, 24, dtype=torch.float64))

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_half_precision(self, dtype: torch.dtype) -> None:
        assert native.missing(dtype) == f"{dtype} is not one of float32, float64"
        assert make("plain", dtype=dtype)(torch.randn(1, 9, 24, dtype=dtype)).dtype == dtype

    @needs_compiler
    def test_it_is_compiled_once(self, tmp_path: Path) -> None:
        path = build.built("float")
        stamp = path.stat().st_mtime_ns
        assert path.parent == tmp_path / "primal-attention" / "native"
        assert build.built("float") == path
        assert path.stat().st_mtime_ns == stamp
        assert [each.name for each in path.parent.iterdir()] == [path.name]

    @needs_compiler
    def test_processes_may_compile_at_once(self) -> None:
        code = "import sys, torch; from primal_attention.ops.lean import native; sys.exit(native.missing())"
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        started = [subprocess.Popen([sys.executable, "-c", code], env=environment) for _ in range(2)]
        assert [process.wait(120) for process in started] == [0, 0]
