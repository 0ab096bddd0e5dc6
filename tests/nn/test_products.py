"""Products by oneDNN and by torch are the same, and a row's bits are its own in either."""

import pytest
import torch

from domainpar.nn import products
from domainpar.nn.products import linear, outer

SHAPES = [(32, 16, 16), (96, 64, 64), (4608, 64, 64), (320, 192, 64), (64, 64, 128), (32, 64, 16), (0, 16, 16)]


def _operands(rows, columns, out, dtype):
    generator = torch.Generator().manual_seed(rows + columns)
    drawn = [
        torch.randn(*shape, generator=generator, dtype=torch.float64) for shape in ((rows, columns), (out, columns))
    ]
    return [one.to(dtype) for one in drawn]


@pytest.mark.parametrize("onednn", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize(("rows", "columns", "out"), SHAPES)
def test_a_product_is_that_of_its_definition_in_all_types(rows, columns, out, dtype, onednn, monkeypatch):
    monkeypatch.setattr(products, "HAS_ONEDNN", onednn and products.HAS_ONEDNN)
    block, weight = _operands(rows, columns, out, dtype)
    expected = block.double() @ weight.double().t()
    bound = {torch.float32: 1e-5, torch.float64: 1e-13, torch.bfloat16: 2e-2}[dtype] * columns**0.5 * 4
    for given in (weight, weight.t().contiguous().t()):
        found = linear(block, given, lambda: torch.empty(rows, out, dtype=dtype))
        assert (found.dtype, found.shape) == (dtype, (rows, out))
        assert rows == 0 or (found.double() - expected).abs().max() <= bound


def test_rows_keep_their_bits_in_any_company():
    block, weight = _operands(4608, 64, 64, torch.float32)
    whole = linear(block, weight)
    for first, count in ((0, 32), (32, 64), (512, 1024), (32, 4576)):
        assert torch.equal(linear(block[first : first + count], weight), whole[first : first + count])


def test_onednn_is_used_where_it_is_there():
    assert torch.backends.mkldnn.is_available() == products.HAS_ONEDNN


def test_the_gradient_of_a_weight_is_the_sum_over_rows():
    gradient, operand = _operands(77, 32, 77, torch.float64)[0], _operands(77, 48, 77, torch.float64)[0]
    expected = sum(torch.outer(one, other) for one, other in zip(gradient, operand, strict=True))
    assert torch.allclose(outer(gradient, operand), expected, rtol=1e-12)
    assert torch.equal(outer(gradient[:0], operand[:0]), torch.zeros(32, 48, dtype=torch.float64))
