"""Memory for time: torch's checkpoint with ghost rows kept, and networks on edges in blocks."""

from __future__ import annotations

import inspect
import math
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from domainpar.placed.axes import Axis
from domainpar.placed.moves import from_local, to_local
from domainpar.placed.ranks import Kept, NotExact, keeping
from domainpar.placed.tensor import Placed, is_rows, mapped, settle


def kept_ghosts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Contexts for torch's `checkpoint` that keep the ghost rows that arrive, so that nothing is exchanged twice.

        checkpoint(layer, x, edge_index, use_reentrant=False, context_fn=domainpar.kept_ghosts)

    Without them, ghost rows of tensors made inside are fetched again. The numbers are the same either way.
    """
    kept = Kept()
    return keeping(kept, again=False), keeping(kept, again=True)


def in_blocks(module: nn.Module, edges_per_block: int, whole: Sequence[str] | None = None) -> InBlocks:
    """Apply a module to one block of edges after the other, each computed again in the backward pass, to save memory.

    Call the result like the module. The numbers are the same, up to rounding, if the module treats each edge by itself.
    For the backward pass only arguments and results are kept; everything else needs the memory of one block at a time.
    So the module should read the node states itself:

        edge = domainpar.in_blocks(self.edge, edges_per_block=65_536)
        e = edge(x, edge_index, e)  # in self.edge: torch.cat([x[edge_index[0]], x[edge_index[1]], e], 1)

    It works on a split graph and on a plain one. On a split graph dropout takes the same numbers as without blocks, and
    the module sees the number of edges of the whole graph; on a plain one it sees that of a block. If it is made where
    it is called, as here, the names of parameters stay the same.

    Args:
        module: Takes tensors with a row for each edge (`edge_index`: integers [2, E], or one row of it), and tables of
            nodes, [N, ...]. Returns a tensor with a row for each edge, [E, ...], or several.
        edges_per_block: Number of edges of a block on one rank.
        whole: Names of the arguments that each block is given whole; None: `x`, if the module has such an argument.
            Name every other table of nodes: on a plain graph it could not be distinguished from a table of edges.

    Returns:
        The module in blocks.

    Raises:
        ValueError: If `edges_per_block` is below 1, or the module has no such arguments.
    """
    if edges_per_block < 1:
        raise ValueError(f"edges_per_block={edges_per_block}: a block needs at least one edge.")
    takes = inspect.signature(module.forward).parameters
    if strange := sorted(set(whole or ()) - set(takes)):
        raise ValueError(f"whole={strange}: the module takes {list(takes)}; name those of its arguments that are.")
    return InBlocks(module, edges_per_block, ("x",) if whole is None else tuple(whole))


class InBlocks(nn.Module):
    """A module that is applied to blocks of edges: see `in_blocks`."""

    def __init__(self, module: nn.Module, edges_per_block: int, whole: tuple[str, ...]) -> None:
        super().__init__()
        self.module, self.edges_per_block, self.whole = module, edges_per_block, whole
        self._takes = inspect.signature(module.forward)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's result for all edges, in their order. *Collective* on a split graph.

        Raises:
            ValueError: If there is no tensor of edges, or their numbers of edges differ.
            NotExact: On a split graph, if the module does not treat each edge by itself.
        """
        given = self._takes.bind(*args, **kwargs)
        edges: list[Tensor] = []
        for name, value in given.arguments.items():
            if name not in self.whole:
                mapped(value, Tensor, edges.append)
        if not edges:
            raise ValueError("in_blocks: no tensor of edges was given; say whole=[] if what is called x is one.")
        axis = next((x.place.axis for x in edges if isinstance(x, Placed) and is_rows(x)), None)
        blocks = _whole_graph(edges, self.edges_per_block) if axis is None else _split(axis, self.edges_per_block)
        kept = Kept()

        def run(number: int, *tensors: Tensor) -> Any:
            rest = iter(tensors)
            call = OrderedDict(
                (name, value if name in self.whole else mapped(value, Tensor, lambda _: blocks.cut(next(rest), number)))
                for name, value in given.arguments.items()
            )
            bound = inspect.BoundArguments(self._takes, call)
            with keeping(kept, again=number > 0 or kept.complete, ghosts=False):
                result = self.module(*bound.args, **bound.kwargs)
            kept.complete = True
            return result

        results = [
            checkpoint(run, number, *edges, use_reentrant=False, context_fn=kept_ghosts)
            for number in range(blocks.total)
        ]
        if isinstance(results[0], Tensor):
            return blocks.joined(results)
        return type(results[0])(blocks.joined([*each]) for each in zip(*results))


class _Blocks(NamedTuple):
    """Blocks of all edges: their number, the rows of one by its number, and the rows of all together."""

    total: int
    cut: Callable[[Tensor, int], Tensor]
    joined: Callable[[list[Tensor]], Tensor]


def _whole_graph(edges: list[Tensor], length: int) -> _Blocks:
    """Blocks of plain tensors; edges lie along the last dimension of integers [2, E] and the first of all others."""

    def along(x: Tensor) -> int:
        return 1 if x.dim() == 2 and x.size(0) == 2 and not x.is_floating_point() else 0

    counts = {x.size(along(x)) for x in edges}
    if len(counts) != 1:
        raise ValueError(f"in_blocks: tensors of edges have {sorted(counts)} edges; name tables of nodes in whole=.")
    (total,) = counts

    def cut(x: Tensor, number: int) -> Tensor:
        start = number * length
        return x.narrow(along(x), start, min(length, total - start))

    return _Blocks(max(1, -(-total // length)), cut, torch.cat)


def _split(axis: Axis, length: int) -> _Blocks:
    """Blocks of the edges of each rank, the same number on all ranks. *Collective*."""
    if axis.ranks.same_bits:
        raise NotExact("in_blocks, with the same bits asked for: sums over blocks are rounded; use torch's checkpoint")
    count = max(1, axis.ranks.largest(math.ceil(axis.length / length)))
    bounds = [min(axis.length, number * length) for number in range(count + 1)]
    pieces = [axis.part(first, last) for first, last in pairwise(bounds)]

    def cut(x: Tensor, number: int) -> Tensor:
        if not isinstance(x, Placed) or not is_rows(x):
            return x
        place: Any = settle(x).place
        if place.axis is not axis:
            raise NotExact(f"in_blocks was given {place} beside {axis.rows(0)}; name what stays whole in whole=")
        piece = pieces[number]
        rows = to_local(x, axis, place.dim).narrow(place.dim, bounds[number], piece.length)
        block = from_local(rows.clone(), piece, place.dim)
        block.names = x.names
        return block

    def joined(results: list[Tensor]) -> Tensor:
        places: list[Any] = [settle(result).place if isinstance(result, Placed) else None for result in results]
        if any(getattr(place, "axis", None) is not piece for place, piece in zip(places, pieces)):
            raise NotExact("in_blocks: the module returns something that has no row for each edge")
        dim = places[0].dim
        rows = [to_local(result, piece, dim) for result, piece in zip(results, pieces)]
        return from_local(torch.cat(rows, dim), axis, dim)

    return _Blocks(count, cut, joined)
