"""Axes: rows that are divided among ranks, and the placements of tensors that have them.

A row is named by its number in the whole graph. An axis says which numbers each rank owns; a `Reach` says where the
rows of an index lie on this rank, and by which exchange those of other ranks come.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from domainpar.parallel.halo import Halo, exchange_tables
from domainpar.placed.ranks import GraphRanks, OneBlock
from domainpar.plan import PartitionPlan

MOST_KEPT = 64  # axes selected from one that are kept; one more clears them


class Axis:
    """Rows that are divided among ranks: each row of the whole graph is owned by exactly one rank.

    Args:
        name: Its name in messages.
        ids: Number of each owned row in the whole graph, int64 [length], ascending.
        total: Number of rows of the whole graph.
        ranks: The ranks.
        halo: The exchange with ghost rows that belongs to the axis; None where there is none.
        family: The axes of one graph, in which `zeros(N)` finds its rows.
        pieces: The axes that it joins, one after the other.
        product: (axis, outer, inner): it is `outer` copies of that axis, each row split into `inner`.

    Attributes:
        length: Number of owned rows.
    """

    def __init__(
        self,
        name: str,
        ids: Tensor,
        total: int,
        ranks: GraphRanks,
        halo: Halo | None = None,
        family: list[Axis] | None = None,
        pieces: tuple[Axis, ...] = (),
        product: tuple[Axis, int, int] | None = None,
    ) -> None:
        self.name, self.ids, self.total, self.ranks, self.halo = name, ids, total, ranks, halo
        self.length = len(ids)
        self.family, self.pieces, self.base = [self] if family is None else family, pieces, product
        self._rows: dict[tuple[int, bool], Rows] = {}
        self._kept: dict[Any, tuple[Axis, Any]] = {}
        self._fetches: dict[Axis, Reach] = {}
        self._alike: dict[Axis, bool] = {self: True}
        self._table: Tensor | None = None

    def __repr__(self) -> str:
        return f"{self.total} {self.name}"

    def rows(self, dim: int, pending: bool = False) -> Rows:
        """Its rows along a dimension; the same object each time."""
        if (dim, pending) not in self._rows:
            self._rows[dim, pending] = Rows(self, dim, pending)
        return self._rows[dim, pending]

    @property
    def alike_pieces(self) -> bool:
        """Whether each rank owns the same rows of all axes that it joins. *Collective* the first time."""
        return all(piece.is_like(self.pieces[0]) for piece in self.pieces)

    @property
    def num_ghosts(self) -> int:
        return 0 if self.halo is None else self.halo.plan.num_ghosts

    @property
    def table(self) -> Tensor:
        """The local row of each number, int64 [total]: owned rows, then ghost rows; -1 elsewhere."""
        if self._table is None:
            device = self.ids.device
            self._table = torch.full((self.total,), -1, dtype=torch.int64, device=device)
            self._table[self.ids] = torch.arange(self.length, device=device)
            if self.halo is not None and self.num_ghosts:
                ghosts = torch.from_numpy(self.halo.plan.ghost_ids).to(device)
                self._table[ghosts] = torch.arange(self.length, self.length + self.num_ghosts, device=device)
        return self._table

    def _once(self, key: Any, make: Callable[[], Axis], beside: Any = None) -> Axis:
        """An axis made from this one: the same object each time for a key, as long as there are few."""
        if key not in self._kept:
            axis = make()
            if len(self._kept) >= MOST_KEPT:
                self._kept.clear()
            self._kept[key] = axis, beside  # objects whose `id` is in a key are kept, so that no other gets it
        return self._kept[key][0]

    def select(self, mask: Tensor, key: Any, beside: Any = None) -> Axis:
        """The axis of the rows where a mask [length] is true. *Collective* the first time for each key."""

        def selected() -> Axis:
            ids = self.ids[mask]
            if self.ranks.size == 1:
                places, total = torch.arange(len(ids), device=ids.device), len(ids)
            else:
                order = torch.cat(self.ranks.gathered_rows(ids)).sort().values
                places, total = torch.searchsorted(order, ids), len(order)
            name = self.name if self.name.startswith("selected ") else f"selected {self.name}"
            return Axis(name, places, total, self.ranks, family=self.family)

        return self._once(key, selected, beside)

    def part(self, first: int, last: int) -> Axis:
        """A block of this rank's rows as an axis, with their numbers in the whole graph."""
        name, ids, ranks = f"{self.name} in blocks", self.ids[first:last], OneBlock(self.ranks)
        return self._once(("part", first, last), lambda: Axis(name, ids, self.total, ranks, family=self.family))

    def dealt(self, count: int) -> Axis:
        """An axis for rows that every rank holds, in one block per rank; an axis of the graph if the length fits."""
        if fitting := [axis for axis in self.family if axis.total == count]:
            return fitting[0]

        def made() -> Axis:
            first, last = (count * rank // self.ranks.size for rank in (self.ranks.rank, self.ranks.rank + 1))
            ids = torch.arange(first, last, device=self.ids.device)
            return Axis("rows", ids, count, self.ranks, family=self.family)

        return self._once(("dealt", count), made)

    def times(self, outer: int, inner: int) -> Axis:
        """The axis of `outer` copies of all rows, one after the other, in which each row is split into `inner`."""
        if self.base is not None:
            axis, more_outer, more_inner = self.base
            return axis.times(outer * more_outer, inner * more_inner)
        if outer == inner == 1:
            return self

        def made() -> Axis:
            of_outer, of_inner = (torch.arange(count, device=self.ids.device) for count in (outer, inner))
            ids = ((of_outer.view(-1, 1, 1) * self.total + self.ids.view(1, -1, 1)) * inner + of_inner).view(-1)
            total = self.total * outer * inner
            return Axis(self.name, ids, total, self.ranks, family=self.family, product=(self, outer, inner))

        return self._once(("times", outer, inner), made)

    def is_like(self, other: Axis) -> bool:
        """Whether each rank owns the same rows of both. *Collective* the first time for two axes."""
        if other not in self._alike:
            alike = self.total == other.total
            if alike:
                here = self.length == other.length and torch.equal(self.ids, other.ids)
                alike = not self.ranks.largest(int(not here))
            self._alike[other] = other._alike[self] = alike
        return self._alike[other]

    def fetch_for(self, other: Axis) -> Reach:
        """The reach of this axis's rows from the ranks that own the same numbers of another. *Collective*."""
        if other not in self._fetches:
            self._fetches[other] = self.reach(other.ids)
        return self._fetches[other]

    def reach(self, numbers: Tensor, known: str = "") -> Reach:
        """Where rows lie by their numbers, and the exchange for those of other ranks. *Collective* unless known.

        Args:
            numbers: Rows in the whole graph, int64, any shape.
            known: `owned` or `held`: every rank names only rows that it owns, or that it owns or has as ghosts.

        Raises:
            IndexError: On all ranks alike, if a number is no row of the axis.
        """
        if self.ranks.size == 1:
            return Reach(numbers, None)
        if known and (known == "owned" or self.halo is None):
            return Reach(self.table[numbers], None)
        if known:
            return Reach(self.table[numbers], self.halo)
        inside = not numbers.numel() or (int(numbers.min()) >= 0 and int(numbers.max()) < self.total)
        rows = self.table[numbers] if inside else numbers
        worst = 3
        if inside:
            held = not rows.numel() or int(rows.min()) >= 0
            worst = int(bool(rows.numel()) and int(rows.max()) >= self.length) if held else 2
        worst = self.ranks.largest(worst)
        if worst == 3:
            raise IndexError(f"an index names a row that does not exist: there are {self}.")
        if worst < 2:
            return Reach(rows, self.halo if worst else None)
        flat = numbers.reshape(-1)
        wanted = flat[self.table[flat].ge(self.length) | self.table[flat].lt(0)].unique()
        halo, ghost_ids = self._borrowed(wanted.cpu().numpy())
        order = ghost_ids.argsort()
        table = self.table.clone()
        table[ghost_ids[order]] = self.length + order
        return Reach(table[numbers], halo)

    def _borrowed(self, wanted: Any) -> tuple[Halo, Tensor]:
        """An exchange that brings some rows of other ranks, and their numbers in order of arrival. *Collective*."""
        ranks = self.ranks
        everyone = ranks.gathered_rows(torch.from_numpy(wanted))
        table = self.table.cpu()
        needed = [ids[(table[ids] >= 0) & (table[ids] < self.length)].numpy() for ids in everyone]
        received = exchange_tables([ids.reshape(-1, 1) for ids in needed], ranks.transport)
        ghosts = np.concatenate([ids[:, 0] for ids in received])
        send = np.concatenate(needed)
        plan = PartitionPlan(
            part=ranks.rank,
            num_parts=ranks.size,
            owned_ids=self.ids.cpu().numpy(),
            ghost_ids=ghosts,
            send_rows=table[torch.from_numpy(send)].numpy(),
            send_counts=np.array([len(ids) for ids in needed], np.int64),
            recv_counts=np.array([len(ids) for ids in received], np.int64),
        )
        return Halo(plan, ranks.transport, self.ids.device), torch.from_numpy(ghosts).to(self.ids.device)


def joined(pieces: Sequence[Axis]) -> Axis:
    """The axis of the rows of several axes, one after the other; the same object for the same axes."""
    first = pieces[0]

    def made() -> Axis:
        starts = np.cumsum([0] + [axis.total for axis in pieces]).tolist()
        ids = torch.cat([start + axis.ids for start, axis in zip(starts, pieces)])
        name = " and ".join(dict.fromkeys(axis.name for axis in pieces))
        return Axis(name, ids, starts[-1], first.ranks, family=first.family, pieces=tuple(pieces))

    if not (len(set(pieces)) == len(pieces) > 1 and all(piece.halo is not None for piece in pieces)):
        return first._once(("joined", *map(id, pieces)), made)
    # Kinds of nodes as one set, of which there are few: `zeros(N)` of them has rows, too.
    if all(axis.pieces != tuple(pieces) for axis in first.family):
        first.family.append(made())
    return next(axis for axis in first.family if axis.pieces == tuple(pieces))


class Rows:
    """A placement: rows of an axis along a dimension.

    Attributes:
        axis: The axis.
        dim: The dimension.
        pending: Whether there are ghost rows behind the owned ones, with shares that their owners have not added yet.
        ranks: The ranks.
    """

    __slots__ = ("axis", "dim", "forms", "pending", "ranks")

    def __init__(self, axis: Axis, dim: int, pending: bool) -> None:
        self.axis, self.dim, self.pending, self.ranks = axis, dim, pending, axis.ranks
        self.forms: dict[Any, Any] = {}  # of tensors that lie so

    def __repr__(self) -> str:
        return f"rows of {self.axis} along dimension {self.dim}"


@dataclass(frozen=True)
class Names:
    """A statement about the values of an index: they are numbers of rows of an axis.

    Attributes:
        axis: The axis.
        known: As in `Axis.reach`; it decides what is fetched from other ranks, never the result.
    """

    axis: Axis
    known: str


@dataclass(frozen=True, eq=False)
class Reach:
    """Where the rows of an index lie on this rank.

    Attributes:
        rows: Places among the owned rows and, behind them, those that an exchange brings, int64.
        halo: The exchange; None if all ranks need owned rows only.
    """

    rows: Tensor
    halo: Halo | None
