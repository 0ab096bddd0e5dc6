"""What `parallelize(..., same_bits=True)` is made of: calls by rows, sums as integers, products of rows."""

import math

import numpy as np
import pytest
import torch
from torch import nn
from whole_and_split import threads

from domainpar import NotExact
from domainpar.placed import exact
from domainpar.placed.ranks import GraphRanks
from domainpar.testing import run_ranks

aten = torch.ops.aten
ROWS = 2600
COUNTS = (0, 1, 2, 31, 63, 64, 65, 700)
F = nn.functional


def table(*shape, dtype=torch.float32):
    draw = torch.Generator().manual_seed(sum(shape))
    return (
        torch.randn(shape, generator=draw, dtype=dtype)
        * torch.randn(shape[:1] + (1,) * (len(shape) - 1), generator=draw).exp()
    )


MATRICES = table(ROWS, 4, 4) * 0.1 + torch.eye(4)
WIDE, BESIDE, ONE, CUBES = table(ROWS, 17), table(ROWS, 17).flip(0), table(ROWS, 1), table(ROWS, 3, 20)
POSITIVE = WIDE.abs() + 0.01
UNARY = ("exp log1p expm1 sin cos tan tanh sigmoid asinh atan erf erfc sinh cosh exp2 relu silu square hardswish mish "
         "celu elu selu softplus logsigmoid gelu sgn hardtanh leaky_relu").split()  # fmt: skip
POSITIVES = "log log2 log10 sqrt rsqrt reciprocal lgamma digamma".split()
CALLS = {
    **{name: (getattr(torch, name, None) or getattr(F, name), [WIDE]) for name in UNARY},
    **{name: (getattr(torch, name), [POSITIVE]) for name in POSITIVES},
    "pow": (lambda x: x**2.5, [POSITIVE]),
    "pow of two": (torch.pow, [POSITIVE, BESIDE]),
    "atan2": (torch.atan2, [WIDE, BESIDE]),
    "hypot": (torch.hypot, [WIDE, BESIDE]),
    "maximum": (torch.maximum, [WIDE, BESIDE]),
    "addcmul": (lambda x, y: torch.addcmul(x, y, x, value=0.3), [WIDE, BESIDE]),
    "lerp": (lambda x, y: torch.lerp(x, y, 0.3), [WIDE, BESIDE]),
    "add with alpha": (lambda x, y: torch.add(x, y, alpha=0.3), [WIDE, BESIDE]),
    "silu backward": (aten.silu_backward, [WIDE, BESIDE]),
    "gelu backward": (lambda x, y: aten.gelu_backward(x, y), [WIDE, BESIDE]),
    "tanh backward": (aten.tanh_backward, [WIDE, BESIDE]),
    "sigmoid backward": (aten.sigmoid_backward, [WIDE, BESIDE]),
    "softplus backward": (lambda x, y: aten.softplus_backward(x, y, 1, 20), [WIDE, BESIDE]),
    "elu backward": (lambda x, y: aten.elu_backward(x, 1, 1, 1, False, y), [WIDE, BESIDE]),
    "one beside many": (lambda x, y: (x * y).exp(), [WIDE, ONE]),
    "of single numbers": (torch.exp, [ONE]),
    "sum of features": (lambda x: x.sum(1), [WIDE]),
    "sum of vectors": (lambda x: x.sum(1), [CUBES]),
    "sum of features of vectors": (lambda x: x.sum(2), [CUBES]),
    "sum of all of a row": (lambda x: x.sum((1, 2)), [CUBES]),
    "mean": (lambda x: x.mean(-1, True), [CUBES]),
    "var": (lambda x: x.var(1), [WIDE]),
    "std and mean": (lambda x: torch.std_mean(x, 2), [CUBES]),
    "norm": (lambda x: x.norm(dim=1), [CUBES]),
    "third norm": (lambda x: torch.linalg.vector_norm(x, 3, 1), [WIDE]),
    "prod": (lambda x: x.prod(1), [WIDE]),
    "logsumexp": (lambda x: x.logsumexp(1), [WIDE]),
    "cumsum": (lambda x: x.cumsum(1), [WIDE]),
    "logcumsumexp": (lambda x: x.logcumsumexp(1), [WIDE]),
    "softmax": (lambda x: x.softmax(1), [WIDE]),
    "softmax of vectors": (lambda x: x.softmax(1), [CUBES]),
    "log_softmax": (lambda x: x.log_softmax(1), [WIDE]),
    "layer norm": (lambda x: aten.native_layer_norm(x, [17], WIDE[0], WIDE[1], 1e-5), [WIDE]),
    "layer norm backward": (lambda x, y, m, r: aten.native_layer_norm_backward(
        x, y, [17], m, r, WIDE[0], WIDE[1], [True, False, False])[0], [WIDE, BESIDE, ONE, ONE.abs()]),
    "group norm": (lambda x: aten.native_group_norm(
        x.contiguous(), CUBES[0, 0, :3], CUBES[1, 0, :3], len(x), 3, 20, 3, 1e-5), [CUBES]),
    "batch norm": (lambda x: aten.native_batch_norm(
        x, WIDE[0], WIDE[1], WIDE[2], WIDE[3].abs(), False, 0.0, 1e-5)[0], [WIDE]),
    "batch norm of vectors": (lambda x: aten.native_batch_norm(
        x, ONE[:3, 0], ONE[3:6, 0], ONE[6:9, 0], ONE[9:12, 0].abs(), False, 0.0, 1e-5)[0], [CUBES]),
    "small products": (torch.bmm, [MATRICES, MATRICES.flip(0)]),
    "products": (torch.bmm, [CUBES, CUBES.flip(0).mT]),
    "inverse": (lambda x: torch.linalg.inv_ex(x)[0], [MATRICES]),
    "determinant": (torch.linalg.det, [MATRICES]),
    "distances": (torch.cdist, [CUBES, CUBES.flip(0)]),
    "pool": (lambda x: F.avg_pool1d(x, 3), [CUBES]),
    "gated": (lambda x: F.glu(x, 2), [CUBES]),
    "fourier": (lambda x: torch.fft.rfft(x).abs(), [WIDE]),
}  # fmt: skip


def bits(out):
    several = list(out) if isinstance(out, (tuple, list)) else [out]
    return [one.contiguous().view(torch.uint8) if one.numel() else one for one in several]


def of_some(call, given, first, last):
    return exact.alike(call, [x[first:last] for x in given], [0] * len(given), 0)


@pytest.mark.parametrize("name", CALLS)
def test_a_row_has_the_same_bits_whatever_other_rows_there_are(name):
    call, given = CALLS[name]
    with threads(1):
        whole = of_some(call, given, 0, ROWS)
    whole = list(whole) if isinstance(whole, tuple) else [whole]
    torch.testing.assert_close(whole[0], next(iter(call(*given))) if len(whole) > 1 else call(*given), equal_nan=True)
    for count in (1, 2, 4):
        with threads(count):
            for first, last in [(7, 7 + rows) for rows in COUNTS] + [(0, ROWS)]:
                found = of_some(call, given, first, last)
                assert all(map(torch.equal, bits(found), bits([one[first:last] for one in whole]))), (
                    count,
                    first,
                    last,
                )


def test_without_that_some_rows_have_other_bits():
    differing = []
    for name, (call, given) in CALLS.items():
        whole = bits(call(*given))
        for rows in COUNTS[1:]:
            found = bits(call(*[x[7 : 7 + rows] for x in given]))
            same = all(torch.equal(ours, theirs[7 : 7 + rows]) for ours, theirs in zip(found, whole))
            differing += [] if same else [name]
    assert {"silu", "products"} & set(differing), differing


def test_calls_that_are_rounded_once_have_the_same_bits_anywhere():
    strange = torch.tensor([0.0, -0.0, math.nan, math.inf, -math.inf, 1e-45, -1e-40, 3e38])
    x = torch.cat([WIDE.reshape(-1), strange]).to(torch.float32)
    y = torch.cat([BESIDE.reshape(-1), strange.flip(0)])
    assert len(exact.ROUNDED_ONCE) > 40
    for func in exact.ROUNDED_ONCE:
        kinds = [argument.type for argument in func._schema.arguments if not argument.has_default_value()]
        given = {"Tensor": [x, y, y], "number": [1.7] * 3, "Scalar": [1.7] * 3}
        bits_only = "bitwise" in func._schema.name
        chosen = []
        for at, kind in enumerate(kinds):
            one = given.get(str(kind), given["number"])[at]
            chosen.append((one > 0) if isinstance(one, torch.Tensor) and (bits_only or (
                at == ("where" not in func._schema.name) and "masked" in func._schema.name) or (
                at == 0 and "where" in func._schema.name)) else one)  # fmt: skip
        if func in (aten.fill.Tensor, aten.masked_fill.Tensor):
            chosen[-1] = torch.tensor(1.7)
        whole = func(*chosen)
        for first in (0, 1, 3, len(x) - 9, len(x) - 1):
            for last in (first + 1, first + 8, len(x)):
                piece = func(
                    *[one[first:last] if isinstance(one, torch.Tensor) and one.dim() else one for one in chosen]
                )
                assert torch.equal(bits(piece)[0], bits(whole[first:last])[0]), func


def test_rows_that_threads_cannot_share_evenly_are_refused():
    with threads(3), pytest.raises(NotExact, match="set_num_threads"):
        exact.alike(torch.exp, [torch.ones(100, 2000)], [0], 0)


class Alone(GraphRanks):
    """Ranks of which there is one."""

    def __init__(self):
        self.size, self.same_bits = 1, True


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_sums_do_not_depend_on_the_order_of_rows_and_are_near_the_right_ones(dtype):
    x, order = table(5000, 7, dtype=torch.float64).to(dtype), torch.randperm(5000)
    x[:, 3] *= 1e-30
    x[:, 4] = 0
    found = exact.summed(x, [0], False, Alone(), 5000)
    assert torch.equal(found, exact.summed(x[order], [0], False, Alone(), 5000))
    size = x.double().abs().sum(0).clamp_min(1e-300)
    assert float(((found.double() - x.double().sum(0)) / size).abs().max()) < torch.finfo(dtype).eps
    a, b = x[:, :4].to(dtype), x[:, [0, 2, 5]]
    product = exact.contracted(a, b, Alone(), 5000)
    assert torch.equal(product, exact.contracted(a[order], b[order], Alone(), 5000))
    left, right = (of.double().numpy().astype(np.longdouble) for of in (a, b))  # not BLAS, which rounds by processor
    off = np.abs(product.double().numpy() - left.T @ right) / (np.abs(left).T @ np.abs(right))
    assert off.max() < 4 * torch.finfo(dtype).eps
    rows = torch.arange(5000) % 11
    at = exact.added_at(x, rows, 11, Alone(), 5000, lambda sums: sums)
    assert torch.equal(at, exact.added_at(x[order], rows[order], 11, Alone(), 5000, lambda sums: sums))
    right = torch.zeros(11, 7, dtype=torch.float64).index_add(0, rows, x.double())
    size = torch.zeros(11, 7, dtype=torch.float64).index_add(0, rows, x.double().abs()).clamp_min(1e-300)
    assert float(((at.double() - right) / size).abs().max()) < torch.finfo(dtype).eps


def test_the_largest_sums_do_not_overflow():
    x = torch.full((70_000, 2), 1.9999)
    for terms in (70_000, 2**40):  # as if other ranks had all others
        assert torch.allclose(exact.summed(x, [0], False, Alone(), terms), x.double().sum(0).float())
    x = torch.full((2**21 + 1000, 1), 1.99999)
    for terms in (len(x), 2**40):
        assert torch.allclose(exact.contracted(x, x, Alone(), terms), (x.double().t() @ x.double()).float(), rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_product_of_a_row_has_the_same_bits_anywhere(dtype):
    for inner, columns in ((1, 1), (17, 3), (64, 64), (200, 33)):
        a, b, bias = table(700, inner, dtype=dtype), table(inner, columns, dtype=dtype), table(columns, dtype=dtype)
        whole = exact.times(a, b, bias=bias)
        torch.testing.assert_close(whole, torch.addmm(bias, a, b), rtol=1e-4, atol=1e-4)
        for first, last in ((0, 1), (3, 8), (5, 5), (190, 400)):
            assert torch.equal(exact.times(a[first:last], b, bias=bias), whole[first:last])
            across = exact.times(b.t(), a[first:last].t(), False)
            assert torch.equal(across, exact.times(a, b)[first:last].t())
    several = table(3, 50, 8, dtype=dtype)
    assert torch.equal(
        exact.times(several[:, 9:11], several.mT[:, :, :5]), exact.times(several, several.mT[:, :, :5])[:, 9:11]
    )


def added(world, share):
    from domainpar.placed.ranks import ranks_of

    ranks = ranks_of(world.transport)
    ranks.same_bits = True
    try:
        ranks.added(share)
    except NotExact as refused:
        return str(refused)
    return "added"


def test_no_share_that_was_rounded_is_added_over_ranks():
    for size in (1, 3):
        assert all("floats over rows" in text for text in run_ranks(added, size, torch.ones(3)))
        assert run_ranks(added, size, torch.ones(3).long()) == ["added"] * size
