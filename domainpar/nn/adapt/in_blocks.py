"""A network on edges, applied to one block of edges after the other: only its results are kept for backward."""

from __future__ import annotations

import inspect
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from domainpar.nn.adapt.calls import one_axis
from domainpar.nn.adapt.nested import rebuilt, tensors_in
from domainpar.nn.adapt.rows import Axis, NotExact, RowIndex, Rows, mark, unwatched
from domainpar.nn.adapt.watch import Watch, watching

_here = threading.local()
"""Says whether a block is computed in this thread."""


def in_blocks(module: nn.Module, edges_per_block: int, whole: Sequence[str] | None = None) -> InBlocks:
    """Apply a module to one block of edges after the other, each computed again in the backward pass, to save memory.

    Call the result like the module. The numbers are the same, up to rounding, if the module treats each edge by itself.
    For the backward pass only its arguments and its result are kept; all else needs the memory of one block at a time.
    So the module should read the node states itself:

        edge = domainpar.in_blocks(self.edge, edges_per_block=65_536)
        e = edge(x, edge_index, e)  # in self.edge: torch.cat([x[edge_index[0]], x[edge_index[1]], e], 1)

    It works on a split graph and without one. On a split graph dropout takes the same numbers as without blocks, and
    the module sees the number of edges of the whole graph; otherwise it sees that of a block. If it is made where it is
    called, as here, the names of parameters stay as they are.

    Args:
        module: Takes tensors with a row for each edge (`edge_index`: integers [2, E], or one row of it), and tables of
            nodes, [N, ...]. Returns a tensor with a row for each edge, [E, ...], or several.
        edges_per_block: Number of edges of a block on one rank.
        whole: Names of the arguments that each block is given whole; None: `x`, if the module has such an argument.
            Name every other table of nodes: without a split graph nothing tells it from a table of edges.

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

        Args:
            *args: The module's arguments. What is not a tensor is given to each block.
            **kwargs: Arguments by name, in the same way.

        Raises:
            ValueError: If there is no tensor of edges, or their numbers of edges differ.
            NotExact: On a split graph, if a whole argument has rows of edges or another one has not, or if the module
                does not treat each edge by itself.
        """
        given = self._takes.bind(*args, **kwargs)
        whole = {name: value for name, value in given.arguments.items() if name in self.whole}
        edges = {name: value for name, value in given.arguments.items() if name not in self.whole}
        if not tensors_in(edges):
            raise ValueError(f"stream: no tensor of edges was given; {list(whole)} stays whole, say whole=[] if not.")

        def run(edges: Mapping[str, Any], whole: Mapping[str, Any]) -> Any:
            block = inspect.BoundArguments(self._takes, OrderedDict({**given.arguments, **edges, **whole}))
            with _block_of_this_thread():
                return self.module(*block.args, **block.kwargs)

        watch = watching()
        if watch is not None:
            return _watched(watch, run, self.edges_per_block, edges, whole)
        dims, num_edges = _dims_of_edges(tensors_in(edges))
        results, versions = [], _versions((edges, whole))
        for start, length in _blocks(num_edges, self.edges_per_block):
            block = rebuilt(edges, partial(_cut, dims, start, length))
            results.append(checkpoint(run, block, whole, use_reentrant=False))
            if _versions((edges, whole)) != versions:  # backward would change it once more
                raise ValueError("stream: the module changes an argument in place; let it make a new tensor.")
        return _joined(results, [0] * len(tensors_in(results[0])))


def in_a_block() -> bool:
    """Whether this thread computes a block of edges, so that a layer sees only a piece of its rows."""
    return getattr(_here, "is_block", False)


def _watched(
    watch: Watch, run: Callable[..., Any], edges_per_block: int, edges: Mapping[str, Any], whole: Mapping[str, Any]
) -> Any:
    with unwatched():  # ghosts come now, once: ranks have different numbers of blocks
        axis = _axis_of(watch, edges)
        whole = rebuilt(whole, partial(_whole, watch, axis))
    uses, results, dims = watch.uses, [], list[int]()
    for start, length in _blocks(axis.length, edges_per_block):
        with unwatched():
            rows = axis.block(start, length)
            block = rebuilt(edges, partial(_marked, watch, rows, start))
        watch.uses = uses  # of random numbers: those of the block's edges are what they are without blocks
        with watch.rows_apart(), watch.recomputation.segment():
            results.append(run(block, whole))
        with unwatched():
            dims = [_dim_of(watch, tensor, rows) for tensor in tensors_in(results[-1])]
    with unwatched():
        joined = _joined(results, dims)
        for tensor, dim in zip(tensors_in(joined), dims):
            mark(tensor, Rows(axis, dim))
    return joined


def _axis_of(watch: Watch, edges: Mapping[str, Any]) -> Axis:
    """The edges that all tensors are of."""
    axes = []
    for tensor in tensors_in(edges):
        rows = watch.rows(tensor)
        if rows is None or rows.axis is watch.part.node_axis:
            what = "nodes" if rows else "what is the same on every rank"
            raise NotExact(f"stream is given a tensor of {what} among those of edges; name it in whole=[...].")
        axes.append(rows.axis)
    axis = one_axis(axes, "stream")
    _ = axis.places, axis.total  # asked now, together
    return axis


def _whole(watch: Watch, axis: Axis, tensor: Any) -> Any:
    if not isinstance(tensor, Tensor):
        return tensor
    rows = watch.rows(tensor)
    if rows is not None and rows.axis is axis:
        raise NotExact("stream is given a tensor of edges that is to stay whole; take its name out of whole=[...].")
    return watch.with_ghosts(tensor)


def _marked(watch: Watch, block: Axis, start: int, tensor: Any) -> Any:
    """The rows of a block. A sum at the nodes that they number would be one of this block only."""
    if not isinstance(tensor, Tensor):
        return tensor
    rows = watch.known(tensor)
    names = rows.names and tuple(RowIndex(it.of, complete=False, only_owned=it.only_owned) for it in rows.names)
    return mark(tensor.narrow(rows.dim, start, block.length), Rows(block, rows.dim, names=names))


def _dim_of(watch: Watch, tensor: Tensor, block: Axis) -> int:
    rows = watch.rows(tensor)
    if rows is not None and rows.names is not None:
        raise NotExact("stream: the module returned numbers of rows; they are known without it.")
    if rows is None or rows.axis is not block:
        what = rows.axis.name if rows else "nothing: it is the same on every rank"
        raise NotExact(f"stream: the module returned a tensor with rows of {what}; return a row for each edge.")
    return rows.dim


@contextmanager
def _block_of_this_thread() -> Iterator[None]:
    before, _here.is_block = in_a_block(), True
    try:
        yield
    finally:
        _here.is_block = before


def _blocks(num_edges: int, edges_per_block: int) -> Iterator[tuple[int, int]]:
    """The first edge and the length of each block; one where there is no edge, as every rank runs the module."""
    for start in range(0, max(num_edges, 1), edges_per_block):
        yield start, min(edges_per_block, num_edges - start)


def _cut(dims: Mapping[int, int], start: int, length: int, tensor: Any) -> Any:
    return tensor.narrow(dims[id(tensor)], start, length) if isinstance(tensor, Tensor) else tensor


def _dims_of_edges(tensors: Sequence[Tensor]) -> tuple[dict[int, int], int]:
    """Where the edges of tensors of a whole graph lie, by their `id`, and how many there are.

    In the second dimension of an `edge_index`: integers [2, E].

    Raises:
        ValueError: If they are not as many in each.
    """
    others = {tensor.size(0) for tensor in tensors if not _may_be_edge_index(tensor)}
    # Integers of two edges are none, where all else is of two edges.
    dims = {id(it): int(_may_be_edge_index(it) and (others != {2} or it.size(1) == 2)) for it in tensors}
    lengths = sorted({tensor.size(dims[id(tensor)]) for tensor in tensors})
    if len(lengths) > 1:
        raise ValueError(f"stream: tensors of edges have {lengths} rows; name in whole=[...] what is no edge's.")
    return dims, lengths[0]


def _may_be_edge_index(tensor: Tensor) -> bool:
    whole_numbers = not tensor.is_floating_point() and not tensor.is_complex() and tensor.dtype is not torch.bool
    return tensor.dim() == 2 and tensor.size(0) == 2 and whole_numbers


def _versions(values: Any) -> list[int]:
    """Counts of changes in place; tensors of inference mode have none, and no backward."""
    return [0 if tensor.is_inference() else tensor._version for tensor in tensors_in(values)]


def _joined(results: Sequence[Any], dims: Sequence[int]) -> Any:
    """The results of all blocks as one."""
    columns = [torch.cat(column, dim) for column, dim in zip(zip(*map(tensors_in, results)), dims)]
    tensors = iter(columns)
    return rebuilt(results[0], lambda it: next(tensors) if isinstance(it, Tensor) else it)
