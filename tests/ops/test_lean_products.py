"""The lean path's matrix products: the same numbers from either engine, and who is asked."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from closeness import assert_close
from primal_attention.ops.lean import products
from primal_attention.ops.lean.products import add_product, product, turned

ROUNDING = {torch.float32: 2e-6, torch.float64: 1e-14}  # the same sums in another order
missing = pytest.mark.skipif(not hasattr(torch.ops.mkldnn, "_linear_pointwise"), reason="this PyTorch has no oneDNN")


@pytest.fixture(params=[pytest.param(True, marks=missing), False], ids=["oneDNN", "torch"])
def engine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Small products go to the engine too."""
    monkeypatch.setattr(products, "_onednn_is_quicker", lambda: request.param)
    monkeypatch.setattr(products, "LARGE", 1)
    monkeypatch.setattr(products, "WIDE", 1)
    return request.param


def laid_out(rows: int, columns: int, transposed: bool, dtype: torch.dtype) -> Tensor:
    return torch.randn(columns, rows, dtype=dtype).t() if transposed else torch.randn(rows, columns, dtype=dtype)


@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize("turned_b", [False, True])
@pytest.mark.parametrize("turned_a", [False, True])
@pytest.mark.parametrize(
    "sizes", [(1, 1, 1), (7, 13, 5), (130, 257, 64), (64, 3, 300), (3, 64, 300), (0, 5, 3)], ids=str
)
@pytest.mark.usefixtures("engine")
def test_products_in_every_layout(
    sizes: tuple[int, int, int], turned_a: bool, turned_b: bool, dtype: torch.dtype
) -> None:
    m, n, k = sizes
    a, b = laid_out(m, k, turned_a, dtype), laid_out(n, k, turned_b, dtype)
    bias, total = torch.randn(n, dtype=dtype), torch.randn(m, n, dtype=dtype)
    exact = a.double() @ b.double().t()
    assert_close(product(a, b), exact, ROUNDING[dtype])
    assert_close(product(a, b, bias), exact + bias, ROUNDING[dtype])
    assert_close(add_product(None, a, b), exact, ROUNDING[dtype])
    assert_close(add_product(total.clone(), a, b), exact + total, ROUNDING[dtype])


@pytest.mark.usefixtures("engine")
def test_a_matrix_with_gaps_between_its_rows() -> None:
    a, b = torch.randn(40, 30)[:, :20], torch.randn(50, 60)[:, 10:30]
    assert_close(product(a, b), a.double() @ b.double().t(), ROUNDING[torch.float32])


@pytest.mark.usefixtures("engine")
def test_half_precision_adds_up_in_float32() -> None:
    a, b = torch.randn(20, 30).bfloat16(), torch.randn(10, 30).bfloat16()
    total = add_product(add_product(None, a, b), a, b)
    assert total.dtype == torch.float32
    assert torch.equal(total, 2 * torch.nn.functional.linear(a, b).float())


@missing
def test_the_default_precision_is_that_of_float32() -> None:
    # 16-bit factors would be off by 1e-3.
    a, b = torch.randn(300, 512), torch.randn(1024, 512)
    found = torch.ops.mkldnn._linear_pointwise(a, b, None, "none", [], "")
    assert_close(found, a.double() @ b.double().t(), ROUNDING[torch.float32])


@missing
@pytest.mark.filterwarnings("ignore:TF32")
def test_torchs_switch_turns_it_off(engine: bool) -> None:
    a, b = torch.randn(4, 5), torch.randn(6, 5)
    assert products._for_onednn(a, b) == engine
    assert not products._for_onednn(a.double(), b.double())
    with torch.backends.mkldnn.flags(enabled=False):
        assert not products._for_onednn(a, b)


@pytest.mark.parametrize(("maker", "quicker"), [("AuthenticAMD", True), ("GenuineIntel", False), ("", False)])
def test_the_processors_maker_decides(maker: str, quicker: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    here = torch.backends.mkl.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    monkeypatch.setattr(products, "_maker", lambda: maker)
    assert products._onednn_is_quicker.__wrapped__() == (quicker and here)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(1, 1, 1), (1, 480, 37), (3, 16, 100), (2, 5, 1), (0, 3, 4), (2, 0, 4)], ids=str)
def test_turned_is_a_contiguous_transposition(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    matrices = torch.randn(shape).to(dtype)
    found = turned(matrices)
    assert found.is_contiguous()
    assert torch.equal(found, matrices.mT)
    assert torch.equal(turned(matrices.mT), matrices)
