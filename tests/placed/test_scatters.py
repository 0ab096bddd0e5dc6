"""Sums of edges at nodes, of rows at graphs, and rows written over."""

import pytest
import torch
from torch import nn
from torch_geometric.utils import degree, scatter, softmax
from whole_and_split import ODD, check, sums, wide


def put(tensor, where, values):
    """A copy that is written into."""
    tensor = tensor * 1
    tensor[where] = values
    return tensor


def put_in_view(x, mask, src):
    y = x * 1
    y[:, 0][mask] = 0.0
    return y[src]


def base_changes_under_view(x, src, dst, e):
    y = x * 1
    view = y[:, :2]
    y += sums(x, src, dst, e)
    return view[src]


def base_summed_into_under_view(x, src, dst, e):
    y = x * 1
    view = y.view(y.size(0), 2, 2)
    y.index_add_(0, dst, e)
    return view[src]


def view_summed_into(x, src, dst, e):
    y = x * 1
    y[:, :2].index_add_(0, dst, e[:, :2])
    return y[src]


def view_scattered_into(x, src, dst, e):
    y = x * 1
    y.view(y.size(0), 4).scatter_add_(0, wide(dst, e), e)
    return y[src]


def sums_changed_after_read(x, src, dst, e):
    h = sums(x, src, dst, e)
    first = h[src]
    h.mul_(2.0)
    return first + h[src]


def sums_changed_through_view(x, src, dst, e):
    h = sums(x, src, dst, e)
    first = h[src]
    h[:, :2].mul_(2.0)
    h.t().add_(1.0)
    return first + h[src]


def changed_without_telling(x, src, dst, e):
    with torch.no_grad():
        h = sums(x, src, dst, e)
        first = h[src]
        h.data.mul_(2.0)
        return first + h[src]


def changed_detached(x, src, dst, e):
    with torch.no_grad():
        h = sums(x, src, dst, e)
        first = h[src]
        h.detach().mul_(2.0)
        return first + h[src]


def alias(x, src, dst, e):
    y = h = sums(x, src, dst, e)
    first = h[src]
    y += x
    return first + h[src] + y[src]


def put_index(index, where):
    index = index.clone()
    index[where] = 0
    return index


EXACT = {
    "softmax": lambda w, dst: softmax(w, dst),
    "sums": lambda e, dst: scatter(e, dst),
    "maxima": lambda e, dst: scatter(e, dst, reduce="max"),
    "degrees": lambda e, dst: (degree(dst), e.sum()),
    "how often numbers occur": lambda batch, dst, w, x: (
        torch.bincount(batch, minlength=7),
        torch.bincount(dst, minlength=x.size(0)),
        torch.bincount(dst, minlength=x.size(0), weights=w.detach()),
        torch.bincount(dst, minlength=len(x))[:, None] * x,
        torch.bincount(x.new_ones(x.size(0), dtype=torch.int64), minlength=13),
        x.new_zeros(int(batch[-1]) + 1, 4).index_add(0, batch, x),
    ),
    "how often, by weights and of small integers": lambda kind, w, batch, x: (
        torch.bincount(kind, w.detach()),
        torch.bincount(kind.int()),
        torch.bincount(batch.to(torch.uint8)),
        x.sum(),
    ),
    "how often, by weights in single precision": (
        lambda kind, w, dst, x: (
            torch.bincount(kind, w.detach().float()),
            torch.bincount(dst, w.detach().float(), x.size(0)),
            x.sum(),
        ),
        {"tolerance": 1e-6},
    ),
    "sums at graphs by small integers, of many features": lambda kind, e: e.new_zeros(3, 32).index_add(
        0, kind.int(), e.repeat(1, 8)
    ),
    "extremes that are no number": lambda x, batch: (
        x.sum(),
        torch.zeros(3, 4, dtype=x.dtype).scatter_reduce(
            0, batch.view(-1, 1).expand(-1, 4), x.detach().log(), "amax", include_self=False
        ),
    ),
    "values, how often and where": lambda batch, kind, x: (
        *torch.unique(batch, return_counts=True),
        *torch.unique(kind, return_inverse=True),
        x.sum(),
    ),
    "bools summed at graphs": lambda mask, batch, x: (x.sum(), mask.new_ones(3).index_add(0, batch, mask)),
    "sums into what is there": lambda x, e, dst: x.index_add(0, dst, e) + (x * 1).scatter_add_(0, wide(dst, e), e),
    "twice": lambda x, src, dst, e: sums(sums(x, src, dst, e), src, dst, e),
    "means with what is there": lambda x, e, dst: x.scatter_reduce(0, wide(dst, e), e, "mean"),
    "extremes at dst": lambda x, e, dst: (
        x.scatter_reduce(0, wide(dst, e), e, "amax"),
        x.new_zeros(x.size(0), 4).scatter_reduce_(0, wide(dst, e), e, reduce="amin", include_self=False),
    ),
    "products at dst": lambda x, e, dst: x.scatter_reduce(0, wide(dst, e), e, "prod"),
    "softmax at dst": lambda x, e, dst, src: (lambda a: a / x.new_zeros(x.size(0), 4).index_add(0, dst, a)[dst])(
        (e - x.new_zeros(x.size(0), 4).scatter_reduce(0, wide(dst, e), e, "amax", include_self=False)[dst]).exp()
    ),
    "columns at dst": lambda x, columns, dst: x.new_zeros(4, x.size(0)).index_add(1, dst, columns),
    "at graphs": lambda x, batch, src: x.new_zeros(3, 4).index_add(0, batch, x)[batch][src],
    "at graphs, of sums": lambda x, src, dst, e, batch: x.new_zeros(3, 4).scatter_add(
        0, wide(batch, x), sums(x, src, dst, e)
    ),
    "at graphs, in place": lambda x, batch: (
        x.new_zeros(3, 4).index_add_(0, batch, x) * x.new_zeros(3).index_add_(0, batch, x[:, 0]).view(3, 1)
    ),
    "counts of graphs": lambda x, batch: x.new_zeros(3).index_add(0, batch, x.new_ones(x.size(0))),
    "largest of graphs": lambda x, batch: x.new_zeros(3, 4).scatter_reduce(
        0, wide(batch, x), x, "amax", include_self=False
    ),
    "products at graphs": lambda z, batch, table: (
        (table + 1).scatter_reduce(0, wide(batch, z), z - 1, "prod"),
        z.new_ones(3, 4).scatter_reduce(0, wide(batch, z), z, "prod"),
    ),
    "values that occur": lambda batch, edge_index, kind, z: (batch.unique(), kind.unique() + 1, z.detach().unique()),
    "columns by own numbers": lambda x, batch: (
        x.scatter_add(1, batch.view(-1, 1), x[:, :1]) + x.scatter(1, batch.view(-1, 1), 0.5)
    ),
    "columns by a constant index": lambda x, c: x.index_add(1, (c[:2] > 99).long(), x[:, :2]),
    "written by a mask": lambda x, z, mask, src: put(x, mask, 0.0)[src] + put(x, mask, z[mask])[src],
    "written by a mask, every rank's": lambda x, c, mask: put(x, mask, c),
    "written columns": lambda x, v, src: put(x, (slice(None), 0), v)[src] + put(x, (..., 1), 3.0)[src],
    "written steps": lambda series, x: put(series, 0, x[:, :3]) + put(series, (1, ..., 0), 2.0),
    "written sums": lambda x, src, dst, e, mask: put(sums(x, src, dst, e), mask, 1.0)[src],
    "sums changed after they were read": sums_changed_after_read,
    "sums changed through a view": sums_changed_through_view,
    "sums changed under another name": alias,
    "sums changed without gradient": changed_detached,
    "at nodes that nobody named": lambda x, batch: x.new_zeros(x.size(0), 4).index_add(0, batch, x),
    "means at graphs": lambda x, batch: x.new_zeros(3, 4).scatter_reduce(0, wide(batch, x), x, "mean"),
    "the last at graphs": lambda x, batch: x.new_zeros(3, 4).index_copy(0, batch, x),
    "rows by a constant index": lambda x: x.index_add(0, torch.zeros(13, dtype=torch.long), x),
    "rows from a slice written": lambda x: put(x, slice(0, 3), 1.0),
    "written by computed numbers": lambda x, batch: put(x, batch, 1.0),
    "runs": lambda batch: batch.unique_consecutive(),
    "a histogram": lambda v: v.detach().histc(5),
    "smallest of graphs": lambda x, z, batch: z.new_zeros(4, 4).scatter_reduce(
        0, wide(batch, z), z, "amin", include_self=False
    ),
    "times alpha at graphs": lambda x, batch: x.new_zeros(3, 4).index_add(0, batch, x, alpha=2.0),
    "the largest of graphs and of what is there": lambda x, batch: x.new_zeros(3, 4).scatter_reduce(
        0, wide(batch, x), -x.abs(), "amax"
    ),
    "the smallest of graphs and of a table": lambda x, batch, table: table.scatter_reduce(0, wide(batch, x), x, "amin"),
    "the largest of graphs besides a table": lambda x, batch, table: table.scatter_reduce(
        0, wide(batch % 2, x), x, "amax", include_self=False
    ),
    "the largest integers of graphs": lambda kind, batch: torch.zeros(3, dtype=torch.long).scatter_reduce(
        0, kind, kind * 5 - 7, "amax", include_self=False
    ),
    "sums at graphs into a table": lambda x, batch, table: table.index_add(0, batch, x),
    "reduced at graphs by index_reduce": lambda x, batch: x.new_zeros(3, 4).index_reduce(
        0, batch, x, "amax", include_self=False
    ),
    "columns of a longer constant": lambda x, batch: x.scatter_add(
        1, batch.view(-1, 1), torch.arange(13.0, dtype=x.dtype).view(-1, 1)
    ),
    "one row by a made constant index": lambda x, c: x.scatter(1, (c[:2] > 99).long().view(1, 2), 0.0),
    "a mask in a view": put_in_view,
    "a base changed under a view": base_changes_under_view,
    "a base summed into under a view": base_summed_into_under_view,
    "a view summed into": view_summed_into,
    "a view scattered into": view_scattered_into,
    "changed behind the back": changed_without_telling,
    "written into row numbers": lambda x, src, edge_mask: x[put_index(src, edge_mask)],
    "filled into row numbers": lambda x, src, edge_mask: x[src.clone().index_fill_(0, edge_mask.nonzero().view(-1), 0)],
    "the first row of each step": lambda series: put(series, (slice(None), 0), 1.0),
    "the first rows of each step": lambda series: put(series, (slice(None), slice(0, 3)), 1.0),
    "all rows of each step": lambda series, x: put(series, (slice(None), slice(None), 0), x[:, 0]),
    "the other way round": lambda square: put(square, slice(None), square.t()),
    "the other way round, behind dots": lambda square: put(square, ..., square.t()),
    "a column by a row": lambda square, v: put(square, slice(None), v),
    "fresh values into sums": lambda x, src, dst, e: put(sums(x, src, dst, e), (slice(None), 0), x[:, 0])[src],
    "sums into fresh values": lambda x, src, dst, e: put(x, (slice(None), 0), sums(x, src, dst, e)[:, 0])[src],
    "a mask and a column": lambda x, mask: put(x, (mask, 0), 0.0),
    "a mask of all entries": lambda x: put(x, x > 0, 0.0),
}
REFUSED = {
    "masked_scatter": (lambda x, mask: x.masked_scatter(mask.view(-1, 1), x), "no exact form that is known here"),
    "unique rows": (lambda x: x.unique(dim=0), "an order of all rows"),
    "segment_reduce": (
        lambda x, batch: torch.segment_reduce(x, "sum", lengths=batch),
        "write index_add with the number of each row's segment",
    ),
}


AT_SRC = {
    f"{how} where edges begin, {'with' if include_self else 'without'} what is there": (
        lambda x, e, src, how=how, include_self=include_self: x.scatter_reduce(
            0, wide(src, e), e, how, include_self=include_self
        )
    )
    for how in ("sum", "mean", "amax", "amin", "prod")
    for include_self in (True, False)
}


@pytest.mark.parametrize("name", AT_SRC)
def test_rows_are_combined_where_edges_begin(name):
    reduce = AT_SRC[name]
    check(lambda x, e, src: reduce(x, e, src))


@pytest.mark.parametrize("name", ODD)
def test_lengths_that_coincide_do_not_decide_where_sums_go(name):
    check(lambda x, e, dst, batch: (x.index_add(0, dst, e), x.new_zeros(3, 4).index_add(0, batch, x)), ODD[name])
    check(lambda x, dst, columns: x.t().index_add(1, dst, columns), ODD[name])


def test_sums_in_place_into_a_buffer_or_a_constant_are_read_again():
    def again(e, dst):
        into = e.new_zeros(13, 4)
        into.index_add_(0, dst, e)
        return into[:, 0]

    def into_a_buffer(w, dst, net):
        net.running_mean.index_add_(0, dst, w.detach())
        return net.running_mean * 2

    check(again)
    check(into_a_buffer, net=lambda: nn.BatchNorm1d(13))


@pytest.fixture(scope="module")
def scatter_ops():
    """Operators of torch_scatter as it declares them; the library itself has no wheel here."""
    library = torch.library.Library("torch_scatter", "DEF")

    def reduced(src, index, dim, size, how):
        shape = [size if at == dim else length for at, length in enumerate(src.shape)]
        return src.new_zeros(shape).scatter_reduce(dim, index, src, how, include_self=False)

    def extreme(src, index, dim, out, size):
        found = reduced(src, index, dim, size, "amax")
        return found, torch.zeros_like(found, dtype=torch.int64)

    library.define("scatter_max(Tensor src, Tensor index, int dim, Tensor? out, int? dim_size) -> (Tensor, Tensor)")
    library.impl("scatter_max", extreme, "CompositeImplicitAutograd")
    library.define("scatter_mul(Tensor src, Tensor index, int dim, Tensor? out, int? dim_size) -> Tensor")
    library.impl(
        "scatter_mul",
        lambda src, index, dim, out, size: reduced(src, index, dim, size, "prod"),
        "CompositeImplicitAutograd",
    )
    yield torch.ops.torch_scatter
    library._destroy()


def test_operators_of_another_library_that_torch_takes_apart_are_exact(scatter_ops):
    def softmax_at_dst(x, e, dst):
        index = wide(dst, e)
        weight = (e - scatter_ops.scatter_max(e, index, 0, None, x.size(0))[0].gather(0, index)).exp()
        return weight / torch.zeros_like(x).scatter_add(0, index, weight).gather(0, index)

    check(softmax_at_dst)
    check(lambda x, e, dst: scatter_ops.scatter_mul(1 + e, wide(dst, e), 0, None, x.size(0)))
