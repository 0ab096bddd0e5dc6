"""Rows that change hands: ghosts, whole tensors, and the ways between plain tensors and placed ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from domainpar.placed.axes import Axis, Rows
from domainpar.placed.ranks import GraphRanks, NotExact, kept_now
from domainpar.placed.tensor import OnlyShapes, Placed, is_rows, settle


def table_of(x: Placed, halo: Any) -> Tensor:
    """Owned rows, then the rows that an exchange brings, which are kept. *Collective* the first time."""
    axis, dim = x.place.axis, x.place.dim
    local = x.local
    if halo is None or axis.ranks.size == 1:
        return local
    again = kept_now()
    keeps = again is not None and again.with_ghosts
    ghosts = again.next(lambda: _ghosts_of(x, halo)) if again and keeps else _ghosts_of(x, halo)
    return torch.cat([local, ghosts.movedim(0, dim)], dim)


def _ghosts_of(x: Placed, halo: Any) -> Tensor:
    """Rows that an exchange brings, kept as long as the tensor does not change. *Collective* the first time."""
    kept = x.cell.ghosts.get(halo)
    if kept is None or kept[0] != x.memory.generation:
        x.ranks.num_exchanges += 1
        rows = x.local.movedim(x.place.dim, 0).contiguous()
        as_bytes = rows.view(torch.uint8) if rows.dtype is torch.bool else rows
        kept = x.memory.generation, halo.fill_ghosts(as_bytes).view(rows.dtype)
        x.cell.ghosts[halo] = kept
    return kept[1]


def whole_local(x: Any) -> Tensor:
    """The whole tensor as a plain one, without history. *Collective* if its rows are divided."""
    if not isinstance(x, Placed):
        return x  # type: ignore[no-any-return]
    place = settle(x).place
    if type(place) is not Rows or place.ranks.size == 1:
        return x.local
    return gathered_at(x.local, place.axis.ids, place.axis.total, place.dim, place.ranks)


def gathered_at(local: Tensor, places: Tensor, total: int, dim: int, ranks: GraphRanks) -> Tensor:
    """The rows of all ranks along a dimension, each at its place among so many, on every rank. *Collective*."""
    ranks.num_sums += 1
    rows = torch.cat(ranks.gathered_rows(local.movedim(dim, 0).contiguous()))
    out = rows.new_empty(total, *rows.shape[1:])
    out[torch.cat(ranks.gathered_rows(places))] = rows
    return out.movedim(0, dim)


def rows_in(tensor: Tensor, axis: Axis, dim: int) -> Tensor:
    """This rank's rows of a tensor that every rank holds."""
    if axis.ranks.size == 1:
        return tensor
    if tensor.stride(dim) == 0 and tensor.size(dim):
        return tensor.narrow(dim, 0, 1).expand(*tensor.shape[:dim], axis.length, *tensor.shape[dim + 1 :])
    return tensor.index_select(dim, axis.ids)


def plain(x: Any, ranks: GraphRanks) -> Tensor:
    """A tensor that every rank holds, as a plain one; a user's tensor is noted, to be compared between ranks."""
    if isinstance(x, Placed):
        if type(x.place) is Rows:
            raise NotExact(f"{x.place} where every rank needs the whole tensor; part.whole(x) is that")
        return settle(x).local
    if x.device.type == "meta":
        raise OnlyShapes
    if ranks.size > 1 and not ranks.in_backward:
        ranks.log.remember(x)
    return x  # type: ignore[no-any-return]


def local_rows(x: Any, axis: Axis, dim: int) -> Tensor:
    """This rank's rows of an axis, of a tensor of any placement. *Collective* if other ranks hold them."""
    if not is_rows(x):
        return rows_in(plain(x, axis.ranks), axis, dim)
    place = settle(x).place
    if place.dim != dim:
        raise NotExact(
            f"a table of all rows against all rows: {place} meets {axis.rows(dim)}. Write it for one of the two "
            "dimensions, or pool one first."
        )
    if place.axis is axis:
        return x.local  # type: ignore[no-any-return]
    if place.axis.total != axis.total:
        raise RuntimeError(
            f"The size of tensor a ({axis.total}) must match the size of tensor b ({place.axis.total}) at "
            f"dimension {dim}: rows of {axis} meet rows of {place.axis}."
        )
    return moved_to(x, axis)


def as_rows(x: Any, axis: Axis, dim: int) -> Placed:
    """A tensor with rows as it is, and one that every rank holds as rows of an axis."""
    return x if is_rows(x) else Placed(rows_in(plain(x, axis.ranks), axis, dim), axis.rows(dim))


def moved_to(x: Placed, axis: Axis) -> Tensor:
    """The rows of a tensor on the ranks that own the same numbers of another axis. *Collective*."""
    place = x.place
    assert type(place) is Rows
    if place.axis is axis or place.axis.is_like(axis):
        return x.local
    reach = place.axis.fetch_for(axis)
    return table_of(x, reach.halo).index_select(place.dim, reach.rows)


def place_rows(given: Tensor, axis: Axis, dim: int) -> Placed:
    """A tensor of the whole graph that every rank holds, as rows; its gradient is whole. *Collective* in backward."""

    def there(given: Tensor) -> Tensor:
        local = rows_in(given, axis, dim % given.dim())  # writes into rows must not change the user's tensor
        return Placed((local.clone() if axis.ranks.size == 1 else local).detach(), axis.rows(dim % given.dim()))

    return _between(given, there, whole)  # type: ignore[return-value]


def from_local(local: Tensor, axis: Axis, dim: int) -> Placed:
    """A tensor from this rank's rows, to which its gradient goes."""
    place = axis.rows(dim % local.dim())
    there = lambda local: Placed(local.detach(), place)  # noqa: E731
    return _between(local, there, lambda grad: to_local(grad, axis, place.dim))  # type: ignore[return-value]


def to_local(x: Tensor, axis: Axis, dim: int) -> Tensor:
    """This rank's rows as a plain tensor, from which a gradient goes back to them. *Collective* if others hold them."""
    return _between(x, lambda x: local_rows(x, axis, dim).detach(), lambda grad: from_local(grad, axis, dim))


def whole(x: Tensor) -> Tensor:
    """The whole tensor on every rank, a plain one that has a gradient. *Collective*, backward too."""
    if not isinstance(x, Placed):
        return x
    place = settle(x).place
    back = lambda grad: place_rows(grad, place.axis, place.dim) if type(place) is Rows else grad  # noqa: E731
    return _between(x, lambda x: whole_local(x).clone(), back)


def _between(x: Tensor, there: Callable[[Any], Tensor], back: Callable[[Tensor], Tensor]) -> Tensor:
    """A tensor with another placement, and the backward path of its gradient."""
    out: Tensor = _Between.apply(x, there, back)  # type: ignore[no-untyped-call]
    return out


class _Between(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, there: Callable[[Any], Tensor], back: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.back = back
        return there(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return ctx.back(grads[0]), None, None


def whole_on(x: Tensor, rank: int) -> Tensor | None:
    """The whole tensor on one rank, a plain one without a history; None on all others. *Collective*."""
    if not is_rows(x) or x.place.ranks.size == 1:  # type: ignore[attr-defined]
        local = whole_local(x)
        return local.clone() if not isinstance(x, Placed) or x.ranks.rank == rank else None
    assert isinstance(x, Placed)
    place: Any = settle(x).place
    axis, ranks = place.axis, place.ranks
    tables = [tables_on(x.local.movedim(place.dim, 0), rank, ranks), tables_on(axis.ids, rank, ranks)]
    if ranks.rank != rank:
        return None
    out = tables[0].new_empty(axis.total, *tables[0].shape[1:])
    out[tables[1]] = tables[0]
    return out.movedim(0, place.dim)


def tables_on(rows: Tensor, rank: int, ranks: GraphRanks) -> Tensor:
    """The rows of all ranks, one after the other, on one rank; none on the others. *Collective*."""
    counts = [int(n) for n in ranks.gathered(torch.tensor(len(rows), device="cpu"))]
    send = [len(rows) if peer == rank != ranks.rank else 0 for peer in range(ranks.size)]
    receive = [count if rank == ranks.rank != peer else 0 for peer, count in enumerate(counts)]
    here = rows.contiguous()
    arriving = rows.new_empty(sum(receive), *rows.shape[1:])
    ranks.transport.start(here[: sum(send)], send, arriving, receive).finish()
    pieces = list(arriving.split(receive))
    if rank == ranks.rank:
        pieces[rank] = here
    return torch.cat(pieces)
