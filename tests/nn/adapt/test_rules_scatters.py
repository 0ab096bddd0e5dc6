"""Sums of edges at nodes, of rows at graphs, and rows written over."""

import pytest
import torch
from torch import nn
from torch_geometric.utils import degree, scatter, softmax
from whole_and_split import ODD, cases, check, covering, refusals, sample


def wide(index, like):
    return index.view(-1, 1).expand_as(like)


def sums(x, src, dst, e):
    return x.new_zeros(x.size(0), 4).index_add(0, dst, x[src] * e)


@pytest.fixture(scope="module")
def scatter_ops():
    """Operators of torch_scatter as it declares them; the library itself has no wheel here."""
    library = torch.library.Library("torch_scatter", "DEF")

    def extreme(how):
        def run(src, index, dim, out, dim_size):
            assert out is None
            shape = list(src.shape)
            shape[dim] = int(index.max()) + 1 if dim_size is None else dim_size
            found = src.new_zeros(shape).scatter_reduce(dim, index, src, how, include_self=False)
            return found, torch.zeros_like(found, dtype=torch.int64)

        return run

    for name, how in (("scatter_max", "amax"), ("scatter_min", "amin")):
        library.define(f"{name}(Tensor src, Tensor index, int dim, Tensor? out, int? dim_size) -> (Tensor, Tensor)")
        library.impl(name, extreme(how), "CompositeImplicitAutograd")

    def products(src, index, dim, out, dim_size):
        shape = list(src.shape)
        shape[dim] = dim_size
        return src.new_ones(shape).scatter_reduce(dim, index, src, "prod")

    library.define("scatter_mul(Tensor src, Tensor index, int dim, Tensor? out, int? dim_size) -> Tensor")
    library.impl("scatter_mul", products, "CompositeImplicitAutograd")
    yield torch.ops.torch_scatter
    library._destroy()


def test_the_extremes_of_torch_scatter_are_exact_and_do_not_tell_which_it_was(scatter_ops):
    def both(x, e, dst):
        wide = dst.view(-1, 1).expand_as(e)
        top = scatter_ops.scatter_max(e, wide, 0, None, x.size(0))[0]
        low, _ = scatter_ops.scatter_min(e, wide, 0, None, x.size(0))
        weight = (e - top.gather(0, wide)).exp()
        return top - low, weight / x.new_zeros(x.size(0), 4).scatter_add(0, wide, weight).gather(0, wide)

    check(both)
    check(lambda e, dst: scatter_ops.scatter_max(e, dst.view(-1, 1).expand_as(e), 0, None, 13)[0])
    which = lambda e, dst: e[scatter_ops.scatter_max(e, dst.view(-1, 1).expand_as(e), 0, None, 13)[1]]  # noqa: E731
    check(which, refused="gives on a split graph the largest number, but not its row")

    def without_edges(e, dst):
        top, which = scatter_ops.scatter_max(e, dst.view(-1, 1).expand_as(e), 0, None, 13)
        return top + 1.0 * (which == e.size(0))

    check(without_edges, refused="but not its row")


def test_products_of_torch_scatter_are_exact(scatter_ops):
    check(lambda e, dst: scatter_ops.scatter_mul(1 + e, dst.view(-1, 1).expand_as(e), 0, None, 13))
    given = lambda e, dst: scatter_ops.scatter_mul(e, dst.view(-1, 1).expand_as(e), 0, e.new_ones(13, 4), 13)  # noqa: E731
    check(given, refused="into a given tensor")


NO_NODE_WITHOUT_EDGES = sample(12, 40, edges=covering(12, 40))
GUESSED = {
    "softmax": lambda w, dst: softmax(w, dst),
    "sums": lambda e, dst: scatter(e, dst),
    "maxima": lambda e, dst: scatter(e, dst, reduce="max"),
    "degrees": lambda e, dst: (degree(dst), e.sum()),
    "zeros of the largest number": lambda e, dst: e.new_zeros(int(dst.max()) + 1, 4).index_add_(0, dst, e),
}


@pytest.mark.parametrize("name", GUESSED)
def test_a_size_guessed_from_row_numbers_is_that_of_the_nodes_or_refused(name):
    check(GUESSED[name], sample=NO_NODE_WITHOUT_EDGES)
    check(GUESSED[name], refused="num_nodes=x.size(0)")


def test_a_constant_into_which_rows_were_summed_in_place_is_not_read_again():
    def again(e, dst):
        into = e.new_zeros(13, 4)
        into.index_add_(0, dst, e)
        return into[:, 0]

    check(again, refused="after rows were summed")
    check(
        lambda x, dst, w, net: net.running_mean.index_add_(0, dst, w),
        refused="sum into a new",
        net=lambda: nn.BatchNorm1d(13),
    )
    check(lambda e, dst: e.new_zeros(13, 4).index_add_(0, dst, e))


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


EXACT = {
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
    "index_add at dst": lambda x, e, dst: x.new_zeros(x.size(0), 4).index_add(0, dst, e, alpha=2.0),
    "index_add in place": lambda x, e, dst: x.new_zeros(x.size(0), 4).index_add_(0, dst, e) * 2,
    "scatter_add at dst": lambda x, e, dst: x.new_zeros(x.size(0), 4).scatter_add(0, wide(dst, e), e),
    "scatter_add of a vector": lambda x, w, dst: x.new_zeros(x.size(0)).scatter_add_(0, dst, w),
    "sums into what is there": lambda x, e, dst: x.index_add(0, dst, e) + (x * 1).scatter_add_(0, wide(dst, e), e),
    "twice": lambda x, src, dst, e: sums(sums(x, src, dst, e), src, dst, e),
    "means at dst": lambda x, e, dst: x.new_zeros(x.size(0), 4).scatter_reduce(
        0, wide(dst, e), e, "mean", include_self=False
    ),
    "means with what is there": lambda x, e, dst: x.scatter_reduce(0, wide(dst, e), e, "mean"),
    "extremes at dst": lambda x, e, dst: (
        x.scatter_reduce(0, wide(dst, e), e, "amax"),
        x.new_zeros(x.size(0), 4).scatter_reduce_(0, wide(dst, e), e, reduce="amin", include_self=False),
    ),
    "products at dst": lambda x, e, dst: x.scatter_reduce(0, wide(dst, e), e, "prod"),
    "softmax at dst": lambda x, e, dst, src: (lambda a: a / x.new_zeros(x.size(0), 4).index_add(0, dst, a)[dst])(
        (e - x.new_zeros(x.size(0), 4).scatter_reduce(0, wide(dst, e), e, "amax", include_self=False)[dst]).exp()
    ),
    "degrees": lambda x, dst, src: x.new_zeros(x.size(0)).index_add(0, dst, torch.ones(dst.size(0), dtype=x.dtype))[
        src
    ],
    "along another dimension": lambda series, dst, src: series.new_zeros(2, series.size(1), 3).index_add(
        1, dst, series[:, src]
    ),
    "columns at dst": lambda x, columns, dst: x.new_zeros(4, x.size(0)).index_add(1, dst, columns),
    "integers": lambda x, kind, dst: torch.zeros(x.size(0), dtype=torch.long).index_add(0, dst, kind),
    "at graphs": lambda x, batch, src: x.new_zeros(3, 4).index_add(0, batch, x)[batch][src],
    "at graphs, of sums": lambda x, src, dst, e, batch: x.new_zeros(3, 4).scatter_add(
        0, wide(batch, x), sums(x, src, dst, e)
    ),
    "at graphs, in place": lambda x, batch: (
        x.new_zeros(3, 4).index_add_(0, batch, x) * x.new_zeros(3).index_add_(0, batch, x[:, 0]).view(3, 1)
    ),
    "counts of graphs": lambda x, batch: x.new_zeros(3).index_add(0, batch, x.new_ones(x.size(0))),
    "at types of edges": lambda e, kind: e.new_zeros(3, 4).index_add(0, kind, e),
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
    "written by a mask, edges": lambda e, w, edge_mask: put(e, edge_mask, w[edge_mask].view(-1, 1)),
    "written by a mask, every rank's": lambda x, c, mask: put(x, mask, c),
    "written by numbers": lambda x, z, mask, src: put(x, mask.nonzero().view(-1), z[mask])[src],
    "written columns": lambda x, v, src: put(x, (slice(None), 0), v)[src] + put(x, (..., 1), 3.0)[src],
    "written everywhere": lambda x, z: put(x, slice(None), z) + put(x, ..., 2.0),
    "written steps": lambda series, x: put(series, 0, x[:, :3]) + put(series, (1, ..., 0), 2.0),
    "written sums": lambda x, src, dst, e, mask: put(sums(x, src, dst, e), mask, 1.0)[src],
    "filled by numbers": lambda x, mask, src: x.index_fill(0, mask.nonzero().view(-1), 2.0)[src],
    "copied by numbers": lambda x, z, mask: x.index_copy(0, mask.nonzero().view(-1), z[mask]),
    "sums changed after they were read": sums_changed_after_read,
    "sums changed through a view": sums_changed_through_view,
    "sums changed under another name": alias,
    "sums changed without gradient": changed_detached,
    "into something that has other rows": lambda x, e, dst: torch.zeros(13, 4, dtype=x.dtype).index_add(0, dst, e),
    "row numbers summed": lambda x, src, dst: torch.zeros(x.size(0), dtype=torch.long).index_add(0, dst, src),
    "bincount": lambda batch: batch.bincount(minlength=3),
}

REFUSED = {
    "sums of other rows": (lambda x, dst: x.new_zeros(x.size(0), 4).index_add(0, dst, x), "not the same rows"),
    "sums of what every rank has": (
        lambda x, dst, c: x.new_zeros(x.size(0)).index_add(0, dst, torch.ones(40, dtype=x.dtype)),
        "same on every rank",
    ),
    "at nodes that nobody named": (
        lambda x, batch: x.new_zeros(x.size(0), 4).index_add(0, batch, x),
        "not known to be numbers of",
    ),
    "means at graphs": (
        lambda x, batch: x.new_zeros(3, 4).scatter_reduce(0, wide(batch, x), x, "mean"),
        "no exact form",
    ),
    "the last at graphs": (lambda x, batch: x.new_zeros(3, 4).index_copy(0, batch, x), "no exact form"),
    "rows by a constant index": (lambda x: x.index_add(0, torch.zeros(13, dtype=torch.long), x), "does not number"),
    "one row written": (lambda x: put(x, 0, 1.0), "use torch.where"),
    "rows from a slice written": (lambda x: put(x, slice(0, 3), 1.0), "use torch.where"),
    "written by computed numbers": (lambda x, batch: put(x, batch, 1.0), "not known to be numbers of"),
    "row numbers written into a list": (
        lambda src: put(torch.zeros(41, dtype=torch.long), slice(1, None), src),
        "before split_graph",
    ),
    "rows written into a constant": (lambda x, c: put(c, 0, x), "same on every rank"),
    "other rows written": (lambda x, e, mask, edge_mask: put(x, mask, e[edge_mask]), "not the same rows"),
    "masked_scatter": (lambda x, mask: x.masked_scatter(mask.view(-1, 1), x), "masked_scatter"),
    "unique rows": (lambda x: x.unique(dim=0), "whole rows"),
    "runs": (lambda batch: batch.unique_consecutive(), "looks at one rank's rows"),
    "a histogram": (lambda v: v.detach().histc(5), "looks at one rank's rows"),
    "segment_reduce": (lambda x, batch: torch.segment_reduce(x, "sum", lengths=batch), "segment_reduce"),
}

LAW = {
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
    "the largest of graphs with infinities": lambda x, batch: x.new_zeros(3, 4).scatter_reduce(
        0, wide(batch, x), x.masked_fill(x > 1, torch.inf), "amax", include_self=False
    ),
    "sums at graphs into a table": lambda x, batch, table: table.index_add(0, batch, x),
    "reduced at graphs by index_reduce": lambda x, batch: x.new_zeros(3, 4).index_reduce(
        0, batch, x, "amax", include_self=False
    ),
    "columns of a longer constant": lambda x, batch: x.scatter_add(
        1, batch.view(-1, 1), torch.arange(13.0, dtype=x.dtype).view(-1, 1)
    ),
    "one row by a constant index": lambda x: x.scatter(1, torch.tensor([[1, 2]]), 0.0),
    "one row by a made constant index": lambda x, c: x.scatter(1, (c[:2] > 99).long().view(1, 2), 0.0),
    "a mask in a view": put_in_view,
    "a base changed under a view": base_changes_under_view,
    "a base summed into under a view": base_summed_into_under_view,
    "a view summed into": view_summed_into,
    "a view scattered into": view_scattered_into,
    "changed behind the back": changed_without_telling,
    "written into row numbers": lambda x, src, edge_mask: x[put_index(src, edge_mask)],
    "written into all row numbers": lambda x, src: x[put_index(src, slice(None))],
    "filled into row numbers": lambda x, src, edge_mask: x[src.clone().index_fill_(0, edge_mask.nonzero().view(-1), 0)],
    "the first row of each step": lambda series: put(series, (slice(None), 0), 1.0),
    "the first rows of each step": lambda series: put(series, (slice(None), slice(0, 3)), 1.0),
    "all rows of each step": lambda series, x: put(series, (slice(None), slice(None), 0), x[:, 0]),
    "the other way round": lambda square: put(square, slice(None), square.t()),
    "the other way round, behind dots": lambda square: put(square, ..., square.t()),
    "a column by a row": lambda square, v: put(square, slice(None), v),
    "a constant for each of a mask": lambda x, mask: put(
        x, mask, torch.arange(float(mask.sum()), dtype=x.dtype).view(-1, 1)
    ),
    "fresh values into sums": lambda x, src, dst, e: put(sums(x, src, dst, e), (slice(None), 0), x[:, 0])[src],
    "sums into fresh values": lambda x, src, dst, e: put(x, (slice(None), 0), sums(x, src, dst, e)[:, 0])[src],
    "a mask and a column": lambda x, mask: put(x, (mask, 0), 0.0),
    "a mask of all entries": lambda x: put(x, x > 0, 0.0),
    "in place into what came": lambda x, src: x.mul_(2.0)[src],
}


def put_index(index, where):
    index = index.clone()
    index[where] = 0
    return index


WAITING = {}


@cases(EXACT)
def test_sums_and_writes_are_exact(function, more):
    check(function, **more)


@refusals(REFUSED)
def test_sums_and_writes_at_unknown_places_are_refused(function, text, more):
    check(function, refused=text, **more)


@cases(LAW, WAITING)
def test_odd_sums_and_writes_are_exact_or_refused(function, more):
    check(function, or_refused=True, **more)


def test_sums_where_edges_begin():
    def at_src(x, e, src, dst):
        return x.new_zeros(x.size(0), 4).index_add(0, src, e)[dst] * e

    check(at_src, refused="edge_policy='incident'", policies=("incoming",))
    check(at_src, policies=("incident",))


@pytest.mark.parametrize("name", ODD)
def test_lengths_that_coincide_do_not_decide_where_sums_go(name):
    check(lambda x, e, dst, batch: (x.index_add(0, dst, e), x.new_zeros(3, 4).index_add(0, batch, x)), ODD[name])
