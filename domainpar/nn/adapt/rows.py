"""The rows of a tensor: nodes, edges, or a selection of them, and whether the rows of ghost nodes are up to date.

Every tensor of a watched forward pass is one of two things. Either it is *the same on every rank*: weights, constants,
sums over all ranks. Or one of its dimensions is divided among the ranks; a `Rows` says which, and what its rows are. A
`Rows` is attached to a tensor where the tensor is made (`mark`). It is never guessed from a length.
"""

from __future__ import annotations

import copy
import itertools
import operator
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from domainpar.nn.adapt.across import GroupRank, payload_of, tensor_of

MARK_IT = "mark it with part.nodes or part.edges (a parameter: parallelize(..., node_parameters=[its name]))"
APART = (
    "a module that is streamed combines edges, of which it is given a block at a time, or nodes, or asks how many "
    "edges it has selected; stream what treats each edge by itself, and take sums, norms over rows and softmax outside."
)
BITS_OF_KEY = 40  # a joined axis numbers its pieces above the ids of each


def unwatched() -> Any:
    """A context in which torch calls do not go through rules."""
    return torch._C.DisableTorchFunction()


@contextmanager
def counting() -> Iterator[None]:
    """A context in which new tensors count their changes, which tensors of inference mode do not."""
    gradients = torch.is_grad_enabled()  # which leaving inference mode turns on
    with torch.inference_mode(False), torch.set_grad_enabled(gradients):
        yield


class NotExact(Exception):
    """A model makes a call that has no exact form on a split graph, or none that is known here. The message names it.

    It is no RuntimeError, because libraries catch those in order to explain them, and would explain this one wrongly.
    """


class Unhashable(NotExact, TypeError):
    """A number of rows was used as a key. It is a TypeError: libraries that cache by shape then do not cache."""


@dataclass(eq=False)
class Axis:
    """A set of rows that is divided among the ranks: the nodes of a graph, its edges, or what a layer made of them.

    Two tensors have the same rows if their axis is the same object. Equal lengths do not make rows the same.

    Attributes:
        part: This rank's part of the graph.
        name: Its name in messages.
        counted: Which rows this rank counts, bool [length]; None for all. Each row is counted on exactly one rank.
        keys: A number for each row that is the same on every rank that has the row, int64 [length].
        pieces: The axes that it was joined from, in order; empty if it was not joined.
        each: If each row of another axis was split into several: that axis, and into how many.
        leaves: Keys are below `leaves << BITS_OF_KEY`.
        selected_from: If it was selected: the axis that it was selected from, and which rows, bool [its length] or a
            slice.
        number: Number of the mask that selected it: see `ValueNumbers`.
        apart: Whether it belongs to a block. Ranks have different numbers of blocks, so nothing may be collective
            there.
        length: Number of rows that this rank computes on: owned nodes, local edges.
    """

    part: GroupRank
    name: str
    counted: Tensor | None
    keys: Tensor
    pieces: tuple[Axis, ...] = ()
    each: tuple[Axis, int] | None = None
    leaves: int = 1
    selected_from: tuple[Axis, Tensor | slice] | None = None
    number: int | None = None
    apart: bool = False
    length: int = field(init=False)
    _total: int | None = field(default=None, init=False)
    _places: Tensor | None = field(default=None, init=False)
    _split: dict[int, Axis] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        self.length = self.keys.size(0)

    @property
    def total(self) -> int:
        """Number of rows of the whole graph, each counted once.

        *Collective* the first time, for rows that were selected. For rows that were joined or split it is computed from
        others: such an axis may outlive a pass on some ranks only.
        """
        if self.pieces:
            return sum(piece.total for piece in self.pieces)
        if self.each is not None:
            return self.each[0].total * self.each[1]
        if self.apart and self._total is None:
            raise NotExact(APART)
        if self._total is None:  # no cached_property: until Python 3.12 it locks the other ranks' threads out
            with unwatched():
                self._total = sum(map(int, self.part.gather(self.counted_rows.sum().view(1))))
        return self._total

    @property
    def places(self) -> Tensor:
        """The place of each row among the rows of the whole graph, int64 [length].

        *Collective* the first time, for rows that were selected. The keys of nodes and edges are their places.
        """
        if self._places is None:
            with unwatched():
                self._places = self._find_places()
        return self._places

    def _find_places(self) -> Tensor:
        if self.pieces:
            firsts = itertools.accumulate((piece.total for piece in self.pieces), initial=0)
            return torch.cat([piece.places + first for first, piece in zip(firsts, self.pieces)])
        if self.each is not None:
            return _split_keys(self.each[0].places, self.each[1])
        if self.selected_from is None:
            return self.keys
        if self.apart:
            raise NotExact(APART)
        parent, mask = self.selected_from
        there = parent.places[mask]
        payloads = self.part.transport.all_gather(payload_of(there[self.counted_rows]))
        everyone = torch.cat([tensor_of(payload, there) for payload in payloads])
        return torch.searchsorted(everyone.sort().values, there)

    @property
    def counted_rows(self) -> Tensor:
        """`counted`, also where that is all, bool [length]."""
        return torch.ones_like(self.keys, dtype=torch.bool) if self.counted is None else self.counted

    @property
    def counted_keys(self) -> Tensor:
        """`keys` of the rows that this rank counts."""
        return self.keys if self.counted is None else self.keys[self.counted]

    def selected(self, mask: Tensor) -> Axis:
        """The rows where a mask is set, bool [length]."""
        name = f"selected {self.name.removeprefix('selected ')}"
        counted = None if self.counted is None else self.counted[mask]
        keys, origin = self.keys[mask], (self, mask)
        return Axis(self.part, name, counted, keys, leaves=self.leaves, selected_from=origin, apart=self.apart)

    def block(self, start: int, length: int) -> Axis:
        """Some of the rows that lie side by side here, for a while; numbers of the whole graph are those of all rows.

        *Collective* where asking for these is.
        """
        rows = slice(start, start + length)
        counted = None if self.counted is None else self.counted[rows]
        name = f"a block of the {self.name}"
        block = Axis(self.part, name, counted, self.keys[rows], leaves=self.leaves, apart=True)
        block.selected_from, block._total, block._places = (self, rows), self.total, self.places[rows]
        return block

    def split(self, count: int) -> Axis:
        """Rows that are k pieces of each of these rows, side by side: `[N, k F]` seen as `[N k, F]`.

        The same object each time, as two tensors that are split alike have the same rows.
        """
        if count not in self._split:
            name = f"{count} pieces of each of the {self.name}"
            counted = None if self.counted is None else self.counted.repeat_interleave(count)
            keys = _split_keys(self.keys, count)
            pieces = Axis(self.part, name, counted, keys, each=(self, count), leaves=self.leaves * count)
            pieces.apart = self.apart
            self._split[count] = pieces
        return self._split[count]

    @staticmethod
    def joined(pieces: tuple[Axis, ...]) -> Axis:
        """The rows of several axes, one behind the other."""
        counted = None
        if any(piece.counted is not None for piece in pieces):
            counted = torch.cat([piece.counted_rows for piece in pieces])
        # Keys of different pieces are kept apart by the number of the piece, above the bits of their own keys.
        *firsts, leaves = itertools.accumulate((piece.leaves for piece in pieces), initial=0)
        if leaves >= 1 << (63 - BITS_OF_KEY):
            raise NotExact(f"{leaves} kinds of rows are joined behind each other, more than their keys can tell apart.")
        keys = torch.cat([piece.keys + (first << BITS_OF_KEY) for first, piece in zip(firsts, pieces)])
        name, apart = " + ".join(piece.name for piece in pieces), any(piece.apart for piece in pieces)
        return Axis(pieces[0].part, name, counted, keys, pieces, leaves=leaves, apart=apart)

    def __repr__(self) -> str:
        return f"<{self.name}: {self.length} here>"


def places_of(axis: Axis, keys: Tensor, part: GroupRank) -> Tensor:
    """The places of some rows among those of the whole graph, by their keys, the same on every rank. *Collective*."""
    if axis.selected_from is None and not axis.pieces and axis.each is None:
        return keys  # nodes and edges: their numbers are their places
    below = torch.searchsorted(axis.counted_keys.sort().values, keys)
    return part.sum_over_ranks(below)


def nothing_like(tensor: Tensor) -> Tensor:
    """What sums with anything to that, bit by bit: of floats -0.0, for 0.0 would turn -0.0 into itself."""
    return torch.full_like(tensor, -0.0) if tensor.is_floating_point() else torch.zeros_like(tensor)


def _split_keys(keys: Tensor, count: int) -> Tensor:
    return (keys.unsqueeze(1) * count + torch.arange(count, device=keys.device)).view(-1)


@dataclass(frozen=True, eq=False)
class RowIndex:
    """The rows that the integers of a tensor refer to, as far as this rank knows.

    Attributes:
        of: The axis of these rows.
        complete: Whether every entry that refers to an owned row is on this rank, so that a sum at that row is
            complete.
        only_owned: Whether they refer to owned rows only, so that no ghost row has to be up to date.
    """

    of: Axis
    complete: bool
    only_owned: bool

    def joined_with(self, other: RowIndex) -> RowIndex:
        """The rows that the entries of both number."""
        return RowIndex(self.of, self.complete and other.complete, self.only_owned and other.only_owned)


class CachedResult(NamedTuple):
    """A result kept for a tensor, with the version of the tensor and whether gradients were on."""

    result: Tensor
    version: object
    with_gradient: bool

    @classmethod
    def of(cls, tensor: Tensor, result: Tensor) -> CachedResult:
        """A result that was made of a tensor just now."""
        return cls(result, version_of(tensor), torch.is_grad_enabled())

    def holds_for(self, tensor: Tensor) -> bool:
        """Whether the same would be made of the tensor now, gradients included."""
        return self.version == version_of(tensor) and (self.with_gradient or not torch.is_grad_enabled())


@dataclass(eq=False)
class Rows:
    """How a tensor is divided among the ranks: the mark that it carries.

    A table of nodes has one of two lengths: with ghost rows that are all up to date (`fresh`), or with owned rows only.
    A sum at nodes makes the second kind. Reading it at the ends of edges makes the first kind, by an exchange.

    Attributes:
        axis: What the rows are.
        dim: The dimension along which they lie, counted from 0.
        fresh: Whether ghost rows have the values of their owners. It has a meaning for the nodes of the graph only.
        names: For integers that are numbers of rows: which rows they refer to. One entry; or, if there are two
            dimensions, one for each index of the dimension that is not that of the rows ([2, E] and [E, 2]). None for
            all other values.
        equal_ends: Of a mask of edges that compared their two ends: the value that only edges with equal ends have.
    """

    axis: Axis
    dim: int
    fresh: bool = True
    names: tuple[RowIndex, ...] | None = None
    equal_ends: bool | None = None
    with_ghosts: CachedResult | None = field(default=None, repr=False)
    selections: dict[object, Axis] = field(default_factory=dict, repr=False)  # by the version of a mask
    number: tuple[int, object] | None = field(default=None, repr=False)
    used: bool = field(default=False, repr=False)  # by a tensor: what is kept here is of that one

    def without_numbers(self, does: str) -> Rows:
        """These rows, of which the content is to be computed with.

        Raises:
            NotExact: If it is row numbers: each rank has others.
        """
        if self.names is not None:
            raise NotExact(
                f"{does} computes with row numbers, which are others on each rank; whether two are equal is all that "
                "may be asked of them."
            )
        return self

    def but(self, **changes: Any) -> Rows:
        """These rows with something changed; what belongs to one tensor only is left out."""
        rows = Rows(self.axis, self.dim, self.fresh, self.names)
        for name, value in changes.items():
            setattr(rows, name, value)
        return rows

    def __deepcopy__(self, memo: Any) -> Rows:
        return self.but()

    def __reduce__(self) -> Any:
        # Of a tensor that is saved the numbers are kept: elsewhere its rows are of no part. In place of this an empty
        # OrderedDict, which `torch.load` reads without being told to trust the file.
        return OrderedDict, ()

    @property
    def named(self) -> RowIndex:
        """The rows that an index numbers.

        Raises:
            NotExact: If it numbers several kinds of rows, or ends of edges of both kinds.
        """
        assert self.names is not None
        if len(self.names) > 1:
            raise NotExact(
                "row numbers of both ends of edges are used as one index; take edge_index[0] and edge_index[1]."
            )
        return self.names[0]

    def names_at(self, dim: int, at: int) -> tuple[RowIndex, ...] | None:
        """The rows numbered by an entry of a dimension that is not that of the rows."""
        return self.names if self.names is None or len(self.names) == 1 else (self.names[at],)


def check_enough_rows(table: Tensor, dim: int, by: Rows) -> None:
    """Refuse a table that is too short for row numbers on every rank, not only where a number is too large."""
    most = max((names.of.total for names in by.names or ()), default=0)
    if table.size(dim) < most:
        raise NotExact(
            f"a tensor of shape {tuple(table.shape)}, the same on every rank, is read by numbers of {most} "
            f"rows, and has fewer rows; {MARK_IT} if it holds a row for each, pass num_nodes=x.size(0) if its size "
            "was guessed from edge_index."
        )


def _kept_by(neutral: int, operation: Callable[[int, Any], Any]) -> Any:
    def operate(count: RowCount, other: Any) -> Any:
        return count if type(other) is int and other == neutral else operation(int(count), other)

    return operate


class RowCount(int):
    """A number of rows of the whole graph, each counted once, that remembers which rows it counts.

    It can be computed and compared with. As a size it makes a tensor with such rows, of which this rank has its own.
    *Collective* to make for rows that were selected, so all ranks have to ask for sizes alike.
    """

    axis: Axis

    def __new__(cls, axis: Axis) -> RowCount:
        self = super().__new__(cls, axis.total)
        self.axis = axis
        return self

    # It stays what it is in sums that begin with 0 and products that begin with 1, as libraries compute shapes.
    __add__ = __radd__ = _kept_by(0, operator.add)
    __sub__ = _kept_by(0, operator.sub)
    __mul__ = __rmul__ = _kept_by(1, operator.mul)
    __floordiv__ = _kept_by(1, operator.floordiv)

    def __hash__(self) -> int:
        # What is found under 83 rows need not be of these 83 rows.
        raise Unhashable("something is looked up by a number of rows; use int(x.size(0)) if only the number matters.")


_ATTRIBUTE = "_domainpar_rows"
UNKNOWN = object()


def rows_of(tensor: Tensor) -> Any:
    """The `Rows` of a tensor; None if it is the same on every rank, `UNKNOWN` if it is not marked."""
    rows = tensor.__dict__.get(_ATTRIBUTE, UNKNOWN)
    return rows if rows is None or isinstance(rows, Rows) else UNKNOWN


def version_of(tensor: Tensor) -> object:
    """Changes when a tensor's values do; tensors of inference mode do not know, so nothing equals theirs."""
    return object() if tensor.is_inference() else tensor._version


class _Noted:
    """The version of a tensor at which its mark was true. A copy of one that was written since is late, too.

    Args:
        version: Of the tensor.
        tensor: The tensor; None of a copy.
    """

    def __init__(self, version: object, tensor: weakref.ref[Tensor] | None = None) -> None:
        self.version, self._tensor = version, tensor

    def __deepcopy__(self, memo: Any) -> _Noted:
        tensor = None if self._tensor is None else self._tensor()
        version = copy.deepcopy(torch.zeros(1, device="cpu"))._version  # with which copies begin
        return _Noted(NEVER if tensor is not None and was_written(tensor) else version)

    def __reduce__(self) -> Any:
        return OrderedDict, ()  # as of `Rows`


NEVER = -1  # no tensor has this version
_NOTED = "_domainpar_noted"


def note_version(tensor: Tensor, version: object = None) -> Tensor:
    """Note that the mark of a tensor is true of it as it is now, or was at a version. Returns the tensor."""
    tensor.__dict__[_NOTED] = _Noted(version_of(tensor) if version is None else version, weakref.ref(tensor))
    return tensor


def last_noted(tensor: Tensor) -> object:
    """The version that `note_version` left; None where it left none."""
    noted = tensor.__dict__.get(_NOTED)
    return noted.version if isinstance(noted, _Noted) else None


def was_written(tensor: Tensor) -> bool:
    """Whether a tensor, or a view of it, was written in place since `note_version`."""
    version = last_noted(tensor)
    return version is not None and version != version_of(tensor)


def check_written(tensor: Tensor, rows: Rows) -> None:
    """Refuse a tensor that was written since it was marked, if fetching its ghosts does not make it right.

    Raises:
        NotExact: If there are copies of its rows that nothing fetches, or it names rows.
    """
    if rows.names is not None:
        raise NotExact(
            f"the row numbers of a tensor of shape {tuple(tensor.shape)} (part.edge_index, part.src, part.dst) were "
            "written in place since they were marked; split the new graph with split_graph."
        )
    if rows.axis.counted is not None:
        raise NotExact(
            f"a tensor of {rows.axis.name} of shape {tuple(tensor.shape)} was written in place since it was marked, "
            "and other ranks hold copies of its rows (edge_policy='incident'); keep what changes of edges in the model "
            "or mark it anew with part.edges or part.edges_from_local, the copies alike."
        )


def mark(tensor: Tensor, rows: Rows | None) -> Tensor:
    """Attach to a tensor what its rows are; None: it is the same on every rank. Returns the tensor."""
    if rows is not None:
        # Each tensor has `Rows` of its own: what they keep was made of its values.
        rows = rows.but() if rows.used else rows
        rows.used = True
    tensor.__dict__[_ATTRIBUTE] = rows
    return tensor
