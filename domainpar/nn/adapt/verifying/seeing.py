"""A tensor as one rank saw it, and as the whole graph has it: the rows that ranks counted, in the order of keys."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from domainpar.nn.adapt.rows import NotExact, Rows
from domainpar.nn.adapt.watch import Watch

COARSE = (torch.float32, torch.float16, torch.bfloat16, torch.complex64)


@dataclass(frozen=True)
class Seen:
    """A tensor as one rank saw it.

    Attributes:
        value: Its values, of the rows that this rank counts, float64.
        rows: What its rows are; `graph` if it is the same on every rank.
        dim: Where the rows lie; None if it has none that are dealt.
        keys: Of each row.
        copies: Rows that another rank counts and this one computes with.
        keys_of_copies: Of each of them.
        problem: Why it cannot be compared; empty if it can.
        coarse: Whether it is of less than float64.
    """

    value: Tensor
    rows: str = "graph"
    dim: int | None = None
    keys: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int64))
    copies: Tensor | None = None
    keys_of_copies: Tensor | None = None
    problem: str = ""
    coarse: bool = False


def see(tensor: Tensor, watch: Watch | None) -> Seen:
    """What a tensor is now; without a watch, as it is on the whole graph."""
    if tensor.layout is not torch.strided:
        return _unseen("a sparse tensor")
    try:
        rows = None if watch is None else watch.rows(tensor)
    except NotExact:
        return _unseen("nobody knows what its rows are")
    coarse = tensor.dtype in COARSE
    if watch is None or rows is None:
        return Seen(as_numbers(tensor), coarse=coarse)
    if rows.names is None:
        return replace(_see_rows(tensor, rows, watch), coarse=coarse)
    return _see_names(tensor, rows, watch)


def _unseen(problem: str, rows: str = "graph") -> Seen:
    return Seen(torch.zeros(0), rows, problem=problem)


def _see_names(tensor: Tensor, rows: Rows, watch: Watch) -> Seen:
    """Numbers of rows, as the keys of what they number."""
    nodes, edges = watch.part.node_axis, watch.part.edge_axis
    numbered = {id(names.of) for names in rows.names or ()}
    if numbered == {id(nodes)}:
        return _see_rows(watch.part.local_ids[tensor], rows, watch)
    if numbered == {id(edges)}:
        return _see_rows(edges.keys[tensor], rows, watch)
    return _unseen("numbers of rows that were made inside the model", rows.axis.name)


def _see_rows(tensor: Tensor, rows: Rows, watch: Watch) -> Seen:
    axis, plan, dim = rows.axis, watch.part.plan, rows.dim
    if axis is watch.part.node_axis:
        seen = Seen(as_numbers(tensor.narrow(dim, 0, plan.num_owned)), axis.name, dim, axis.keys)
        if not rows.fresh or tensor.size(dim) != plan.num_local:
            return seen
        ghosts = as_numbers(tensor.narrow(dim, plan.num_owned, plan.num_ghosts))
        return replace(seen, copies=ghosts, keys_of_copies=watch.part.local_ids[plan.num_owned :])
    if axis.counted is None:
        return Seen(as_numbers(tensor), axis.name, dim, axis.keys)
    ours, others = axis.counted.nonzero().view(-1), (~axis.counted).nonzero().view(-1)
    seen = Seen(as_numbers(tensor.index_select(dim, ours)), axis.name, dim, axis.keys[ours])
    return replace(seen, copies=as_numbers(tensor.index_select(dim, others)), keys_of_copies=axis.keys[others])


def as_numbers(tensor: Tensor) -> Tensor:
    """A copy of the values, float64; of complex ones both parts."""
    tensor = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return tensor.detach().to(torch.float64, copy=True)


def merged(ranks: Sequence[Seen]) -> Seen:
    """The tensor of the whole graph, its rows in the order of their keys, from what ranks counted of it."""
    first = ranks[0]
    problem = next((seen.problem for seen in ranks if seen.problem), "")
    if problem or (len(ranks) == 1 and first.dim is None):
        return replace(first, problem=problem)
    if any((seen.rows, seen.dim) != (first.rows, first.dim) for seen in ranks):
        return replace(first, problem="its rows are not the same kind of rows on every rank")
    if first.dim is None:
        return first
    keys, order = torch.cat([seen.keys for seen in ranks]).sort()
    if len({_without(seen.value.shape, first.dim) for seen in ranks}) > 1:
        return replace(first, value=first.value.new_zeros(0))
    value = torch.cat([seen.value for seen in ranks], first.dim).index_select(first.dim, order)
    return Seen(value, first.rows, first.dim, keys, coarse=first.coarse)


def _without(shape: torch.Size, dim: int) -> tuple[int, ...]:
    return tuple(shape[:dim]) + tuple(shape[dim + 1 :])
