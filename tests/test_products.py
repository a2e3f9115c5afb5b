"""Products as a CPU computes them quickest are products."""

import pytest
import torch

from lens_gemma4 import products
from lens_gemma4.products import FEW, PIECES, product, product_of_few


@pytest.fixture(autouse=True)
def _every_size(monkeypatch):
    """Small weights, too, are spelled as large ones are."""
    monkeypatch.setattr(products, "MANY", 0)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("out", [PIECES * 5, PIECES * 5 + 3, 1])
@pytest.mark.parametrize(
    "rows", [(1, 1), (1,), (2, 1), (3, 1), (FEW, 1), (1, FEW + 1), (3, 0), (2, 7)]
)
def test_a_product_is_what_linear_gives(rows, out, dtype):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(*rows, 11, generator=generator).to(dtype)
    w = torch.randn(out, 11, generator=generator).to(dtype)
    want = x.double() @ w.double().T
    near = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 0.1}[dtype]
    for spelled in (product, product_of_few):
        got = spelled(x, w)
        assert got.shape == want.shape and got.dtype == dtype
        torch.testing.assert_close(got.double(), want, atol=near, rtol=0.01 if near > 1e-3 else 0)
        assert not want.numel() or (spelled(x, w.flip(1)).double() - want).abs().max() > near


def test_a_row_that_lies_apart_in_memory():
    x, w = torch.randn(4, 9, 16)[:, 3:4], torch.randn(24, 16)
    for row in x:
        torch.testing.assert_close(product_of_few(row, w), row @ w.T)
    torch.testing.assert_close(product_of_few(x.transpose(0, 1), w), x.transpose(0, 1) @ w.T)


def test_small_weights_are_left_to_linear(monkeypatch):
    monkeypatch.setattr(products, "MANY", 24 * 16 + 1)
    x, w = torch.randn(1, 16), torch.randn(24, 16)
    assert torch.equal(product_of_few(x, w), torch.nn.functional.linear(x, w))


@pytest.mark.parametrize("rows", [1, 2, FEW, FEW + 1])
@pytest.mark.parametrize("out, inputs", [(512, 512), (256, 2048), (515, 512)])
def test_it_is_as_exact_as_linear(rows, out, inputs):
    """In float32, against float64; one product added after another is not."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(rows, 1, inputs, generator=generator)
    w = torch.randn(out, inputs, generator=generator)
    want = x.double() @ w.double().T
    one_by_one = torch.zeros(rows, 1, out)
    for i in range(inputs):
        one_by_one += x[..., i : i + 1] * w[:, i]
    few, linear, naive = (
        (got - want).pow(2).mean() ** 0.5
        for got in (product_of_few(x, w), torch.nn.functional.linear(x, w), one_by_one)
    )
    assert few < 1.2 * linear
    assert naive > 1.2 * linear and naive > 1.2 * few
