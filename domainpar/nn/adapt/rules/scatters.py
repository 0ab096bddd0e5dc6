"""Sums, means and extremes of edges at nodes, and of rows at graphs: `scatter_add`, `index_add` and similar calls."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from domainpar.nn.adapt.across import largest, multiplied, summed, with_gradient_of
from domainpar.nn.adapt.calls import Call, axis_and_freshness, one_axis, words
from domainpar.nn.adapt.rows import Axis, NotExact, RowCount, Rows, mark
from domainpar.nn.adapt.rules.elementwise import changed
from domainpar.nn.adapt.rules.new_tensors import room
from domainpar.nn.adapt.rules.reductions import Extreme, Untold
from domainpar.nn.adapt.rules.selections import selection_of
from domainpar.nn.adapt.watch import Watch, rule


@rule(
    *words("scatter_add scatter_reduce scatter index_add index_reduce index_copy index_fill"),
    takes="input dim index src|source|value reduce include_self",
    knows_numbers=True,
)
def scatter(watch: Watch, call: Call) -> Any:
    """Rows combined where an index says: `scatter_add(into, dim, index, rows)`."""
    into, index = call.get("input"), call.get("index")
    values, dim = call.get("src"), call.get("dim") % into.dim()
    target, by = watch.rows(into), watch.rows(index)
    if target is not None:
        target.without_numbers(f"torch.{call.name}")
    if by is None or by.dim != (dim if index.dim() > 1 else 0):
        return _into_columns(watch, call, into, dim, target)
    if isinstance(values, Tensor):
        values = watch.as_values(values)
        call = call.but(src=values)
        if (of_values := watch.rows(values)) is not None:
            one_axis([of_values.axis, by.axis], call.name)
        elif values.dim() > 0 and values.size(min(dim, values.dim() - 1)) != 1:
            raise NotExact(
                f"torch.{call.name} sums a tensor that is the same on every rank by an index of {by.axis.name}."
            )
    watch.combines_rows()
    if by.names is None:
        return _at_graphs(watch, call, into, dim, index, values)
    if target is None and by.named.of.total == into.size(dim):
        into = _dealt(watch, call, into, dim, by.named.of)
        target = watch.known(into)
        call = call.but(input=into)
    if target is None or target.dim != dim or by.named.of is not target.axis:
        raise NotExact(
            f"torch.{call.name} sums at the {by.named.of.total} {by.named.of.name} into a tensor of shape "
            f"{tuple(into.shape)} that has other rows. If its size was guessed from the largest number in edge_index, "
            "the last nodes have no edge: pass num_nodes=x.size(0), dim_size=x.size(0), or x.new_zeros(x.size(0), ...)."
        )
    if not by.named.complete:
        raise NotExact(
            "it sums at the node where an edge begins, but a part holds only the edges that end at its nodes; split "
            "the graph with edge_policy='incident'."
        )
    return _at_rows(watch, call, into, target, index, values)


def _dealt(watch: Watch, call: Call, into: Tensor, dim: int, axis: Axis) -> Tensor:
    """This rank's rows of a tensor that is the same on every rank and has a row for each, as row numbers say.

    What changes it in place makes a new tensor here; the one that was given holds no sum and may not be read any more.
    """
    of_nodes = axis is watch.part.node_axis
    ids = watch.part.local_ids[: room(watch)] if of_nodes else axis.places
    result = mark(into.index_select(dim, ids), Rows(axis, dim, watch.starts_fresh(axis)))
    if call.in_place:
        if watch.versions.outlives_the_pass(into):
            raise NotExact(
                f"torch.{call.name}_ sums rows into an argument or a buffer of the model, of which each rank "
                "would have its own sums; sum into a new tensor."
            )
        watch.versions.spoil(into)
    return result


def _at_rows(watch: Watch, call: Call, into: Tensor, target: Rows, index: Tensor, values: Any) -> Tensor:
    """Edges at nodes. All edges of owned nodes are here; what lands on ghosts is not read by anybody."""
    by, plan = watch.known(index), watch.part.plan
    if target.axis is watch.part.node_axis:
        watch.edges_are_summed()
    if by.axis is watch.part.node_axis and isinstance(values, Tensor):  # with ghosts or without: the index has none
        call = call.but(index=watch.owned(index), src=watch.owned(values))
    fresh = watch.starts_fresh(target.axis)
    if by.named.only_owned or fresh:
        result = call.but(input=watch.owned(into))()
    elif into.size(target.dim) == plan.num_local:
        result = call()
    else:  # on a longer tensor, where sums at ghosts have a place
        shape = [plan.num_ghosts if dim == target.dim else size for dim, size in enumerate(into.shape)]
        longer = call.but(input=torch.cat([into, into.new_zeros(shape)], target.dim))
        result = longer().narrow(target.dim, 0, plan.num_owned)
        if call.in_place:
            into.copy_(result)
    return changed(watch, into, fresh) if call.in_place else mark(result, target.but(fresh=fresh))


def _into_columns(watch: Watch, call: Call, into: Tensor, dim: int, target: Rows | None) -> Tensor:
    """Columns by an index: rows stay where they are."""
    others = [tensor for tensor in (call.get("index"), call.get("src")) if isinstance(tensor, Tensor)]
    of_others = [rows for tensor in others if (rows := watch.rows(tensor)) is not None]
    if target is None or target.dim == dim or any(rows.dim != target.dim for rows in of_others):
        raise NotExact(f"torch.{call.name} combines rows by an index that does not number them.")
    # These take as many rows as the index has, not all: of the same tensor each rank would take its first ones.
    if call.name in ("scatter", "scatter_add", "scatter_reduce") and len(of_others) != len(others):
        raise NotExact(f"torch.{call.name} takes one rank's first rows of a tensor that is the same on every rank.")
    for rows in of_others:
        rows.without_numbers(f"torch.{call.name}")
    _, fresh = axis_and_freshness([target, *of_others], call.name)
    result = watch.common(call)()
    return changed(watch, into, fresh) if call.in_place else mark(result, target.but(fresh=fresh))


def _at_graphs(watch: Watch, call: Call, into: Tensor, dim: int, index: Tensor, values: Any) -> Tensor:
    """Rows of all ranks at a few places that every rank has: the graphs of a batch, classes, bins."""
    if watch.rows(into) is not None:
        raise NotExact(
            f"torch.{call.name} combines rows at places that are not known to be numbers of nodes; known are "
            "edge_index as it was given, self-loops, and the results of nonzero."
        )
    how = call.get("reduce") if call.name in ("scatter_reduce", "index_reduce", "scatter") else "sum"
    alpha, include_self = call.kwargs.get("alpha", 1), call.get("include_self", True)
    index, values = watch.counted(index), watch.counted(values) if isinstance(values, Tensor) else values
    if how == "sum" and call.name in ("scatter_add", "index_add"):
        zeros = torch.zeros_like(into, requires_grad=False)
        by_row = index.dim() == 1 and values.dim() > 1
        mine = zeros.index_add(dim, index, values) if by_row else zeros.scatter_add(dim, index, values)
        total = into + summed(mine if alpha == 1 else mine * alpha, watch.part)
    elif how in ("amax", "amin") and not include_self:
        total = _extreme(watch, into, dim, index, values, how)
    elif how == "prod" and call.name == "scatter_reduce" and include_self and values.is_floating_point():
        total = _product(watch, into, dim, index, values)
    else:
        raise NotExact(
            f"torch.{call.name} over all rows with reduce={how!r}, include_self={include_self} has no exact form that "
            "is known here; sums have, and amax and amin with include_self=False."
        )
    return mark(into.copy_(total) if call.in_place else total, None)


def _product(watch: Watch, into: Tensor, dim: int, index: Tensor, values: Tensor) -> Tensor:
    """The product of all ranks, in their order."""
    ones = torch.ones_like(into, requires_grad=False)
    mine = ones.scatter_reduce(dim, index, values, "prod", include_self=True)
    return into.clone() * multiplied(mine, watch.part)  # `into` itself may be written over


def _extreme(watch: Watch, into: Tensor, dim: int, index: Tensor, values: Tensor, how: str) -> Tensor:
    """The largest or smallest of all ranks; ties share the gradient, as in torch."""
    sign = 1 if how == "amax" else -1
    if index.dim() == 1 and values.dim() > 1:
        shape = [-1 if at == dim else 1 for at in range(values.dim())]
        index = index.view(shape).expand_as(values)
    mine, floating = sign * values.detach(), values.is_floating_point()
    lowest = torch.full_like(into, -torch.inf if floating else torch.iinfo(into.dtype).min + 1, requires_grad=False)
    best = largest(lowest.scatter_reduce(dim, index, mine, "amax", include_self=True), watch.part)
    best_there = best.gather(dim, index)
    here = (mine == best_there) | (mine.isnan() & best_there.isnan())
    zeros = torch.zeros_like(into, requires_grad=False)
    ties = summed(zeros.scatter_add(dim, index, here.to(into.dtype)), watch.part)
    value = torch.where(ties > 0, sign * best, into)
    if not floating:
        return value
    shared_by = (ties + (into == value)).clamp(min=1)  # torch counts `into` among the ties in any case
    carrier = summed(zeros.scatter_add(dim, index, torch.where(here, values, 0.0)), watch.part) / shared_by
    return with_gradient_of(value, torch.where(ties > 0, carrier, into))


@rule("setitem", knows_numbers=True)
def write_rows(watch: Watch, call: Call) -> Any:
    """Rows written over by an index or a mask: `x[index] = values`."""
    into, item, values = call.args
    rows = watch.rows(into)
    if rows is None:
        of_values = watch.rows(values) if isinstance(values, Tensor) else None
        if of_values is not None and of_values.names is not None:
            raise NotExact(
                "row numbers are written into a list that every rank has, as to sort edges and take out equal ones "
                "(coalesce, to_undirected); do that before split_graph, or in a transform of the data."
            )
        raise NotExact(
            "rows are written into a tensor that is the same on every rank. Dense batches (to_dense_batch, attention "
            "over all nodes of a graph) need every row on one rank."
        )
    rows.without_numbers("writing into it")
    if isinstance(item, Tensor) and rows.dim == 0 and watch.rows(item) is not None:
        if item.dtype is not torch.bool or rows.axis is watch.part.node_axis:
            watch.combines_rows()
        return _write(watch, into, rows, item, values)
    if any(isinstance(each, (Tensor, list)) for each in (item if isinstance(item, tuple) else (item,))):
        raise NotExact(f"values are written into some columns of some of the {rows.axis.name}; use torch.where.")
    with watch.in_other_words():
        view = into[item]  # refuses places of rows
        if watch.rows(view) is None or view._base is None:
            raise NotExact(f"values are written into some of the {rows.axis.name}; use torch.where.")
        view.copy_(values) if isinstance(values, Tensor) else view.fill_(values)
    return None


def _write(watch: Watch, into: Tensor, rows: Rows, item: Tensor, values: Any) -> None:
    """Rows written over, of a mask or by their numbers; ghosts of a tensor that has some are brought up to date."""
    of_values = watch.rows(values) if isinstance(values, Tensor) else None
    if isinstance(values, Tensor) and of_values is None and values.dim() >= into.dim() and values.size(0) != 1:
        raise NotExact("a tensor that is the same on every rank is written into rows, one for each.")
    target = into.narrow(0, 0, rows.axis.length) if rows.axis is watch.part.node_axis else into
    by, where = watch.known(item), watch.owned(item)
    if item.dtype is torch.bool:
        one_axis([rows.axis, by.axis], "assignment")
        if of_values is not None:
            one_axis([selection_of(watch, where), of_values.axis], "assignment")
    else:
        if by.names is None or by.named.of is not rows.axis:
            raise NotExact("rows are written at integers that are not known to be numbers of rows.")
        if not by.named.complete:
            raise NotExact(
                "rows are written at the nodes where edges begin; split the graph with edge_policy='incident'."
            )
        if of_values is not None:
            one_axis([by.axis, of_values.axis], "assignment")
            values = watch.owned(values)
        if not by.named.only_owned:  # what is written at ghosts is for their owners to write
            here = (where < watch.part.plan.num_owned).nonzero().view(-1)
            where, values = where[here], values if of_values is None else values[here]
    target[where] = values
    changed(watch, into, fresh=False)


@rule("unique", takes="input sorted return_inverse return_counts dim")
def distinct(watch: Watch, call: Call) -> Any:
    """The values that occur in the whole graph, increasing, and how often: the same on every rank."""
    tensor = call.get("input")
    rows = watch.known(tensor)
    inverse, counts = bool(call.get("return_inverse", False)), bool(call.get("return_counts", False))
    if call.get("dim") is not None or (inverse and tensor.dim() != 1):
        raise NotExact("torch.unique of whole rows; only that of numbers is known here.")
    if not watch.alone and not call.get("sorted", True):
        raise NotExact("torch.unique with sorted=False has an order of its own on each rank.")
    mine, number = watch.counted(tensor).unique(return_counts=True)
    watch.part.num_sums += 1
    lengths = [int(length) for length in watch.part.gather(torch.tensor([len(mine)], device="cpu"))]

    def of_everyone(piece: Tensor) -> Tensor:  # ranks gather tensors of one shape
        padded = piece.new_zeros(max(lengths))
        padded[: len(piece)] = piece
        return torch.cat([every[:length] for every, length in zip(watch.part.gather(padded), lengths)])

    values, numbers = of_everyone(mine), of_everyone(number)
    every, place = values.unique(return_inverse=True)
    result: list[Any] = [mark(every, None)]
    if inverse:
        result.append(mark(torch.searchsorted(every, tensor), rows.but()))
    if counts:
        result.append(mark(numbers.new_zeros(len(every)).index_add(0, place, numbers), None))
    return result[0] if len(result) == 1 else tuple(result)


@rule("bincount", takes="input weights minlength", knows_numbers=True)
def bincount(watch: Watch, call: Call) -> Any:
    """How often each number occurs in the whole graph; of row numbers, at its row."""
    tensor, weights, least = call.get("input"), call.get("weights"), call.get("minlength", 0)
    rows, of_weights = watch.rows(tensor), None if weights is None else watch.rows(weights)
    if rows is None or (weights is not None and (of_weights is None or of_weights.axis is not rows.axis)):
        raise NotExact("torch.bincount of numbers that are the same on every rank, or weights that are no such rows.")
    # As torch has it: no gradient, whole numbers without weights, float32 for those, float64 for all others.
    dtype = torch.int64 if weights is None else torch.float32 if weights.dtype is torch.float32 else torch.float64
    each = (torch.ones_like(tensor) if weights is None else weights.detach()).to(dtype)
    mark(each, (of_weights or rows).but(names=None))
    counts_all = type(least) is RowCount or (rows.names is not None and len(rows.names) == 1 and rows.named.complete)
    if rows.names is not None and counts_all and int(least) == rows.named.of.total:
        with watch.in_other_words():  # a number for each of the rows that are numbered
            return each.new_zeros(RowCount(rows.named.of)).index_add(0, tensor, each)
    tensor, each = watch.counted(watch.as_values(tensor)), watch.counted(each)
    nothing = torch.tensor([0, -1], device=tensor.device)
    ends = torch.stack([-tensor.long().min(), tensor.long().max()]) if tensor.numel() else nothing
    lowest, highest = largest(ends, watch.part).tolist()
    if lowest > 0:
        raise ValueError(f"torch.bincount of a negative number, {-lowest}.")
    mine = torch.zeros(max(int(least), highest + 1), dtype=dtype, device=tensor.device)
    return mark(summed(mine.index_add(0, tensor.long(), each), watch.part), None)


_OF_TORCH_SCATTER = {"max": "amax", "min": "amin", "mul": "prod"}


@rule(
    *(f"torch_scatter.scatter_{kind}" for kind in _OF_TORCH_SCATTER),
    takes="src index dim out dim_size",
    knows_numbers=True,
)
def scatter_of_torch_scatter(watch: Watch, call: Call) -> Any:
    """`scatter_max(src, index, dim, out, dim_size)` of torch_scatter, `_min` and `_mul`, in torch's words.

    Of extremes, which it was is not told; a product is 1 where there are no rows.
    """
    source, index, dim = call.get("src"), call.get("index"), call.get("dim", -1) % call.args[0].dim()
    kind, size = call.name[-3:], call.get("dim_size")
    if call.get("out") is not None:
        raise NotExact(f"{call.name} into a given tensor; use torch_geometric.utils.scatter(..., reduce='{kind}').")
    with watch.in_other_words():
        if size is None:
            size = int(index.max()) + 1 if index.numel() else 0
        if index.dim() != source.dim():
            index = index.view([-1 if at == dim else 1 for at in range(source.dim())])
        shape = [size if at == dim else length for at, length in enumerate(source.shape)]
        multiplies = kind == "mul"
        empty = source.new_full(shape, int(multiplies))
        how = _OF_TORCH_SCATTER[kind]
        values = empty.scatter_reduce(dim, index.expand_as(source), source, how, include_self=multiplies)
    return values if multiplies else Extreme(values, Untold(call.name))
