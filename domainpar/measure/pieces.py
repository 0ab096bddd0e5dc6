"""`forecast`: whether a step of any model fits on a graph that is split, and how long it computes."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from domainpar.common.agreement import gather, on_all
from domainpar.measure.forecast import (
    EDGE,
    EDGES_OF_PIECES,
    GAPS,
    GHOST,
    OF_TORCH,
    OWNED,
    Forecast,
    Kinds,
    Line,
    PartMemory,
    Piece,
    forecast_of,
    held_bytes,
    weigh,
    weighed_pass,
)
from domainpar.measure.rates import seconds_of
from domainpar.parallel.world import World
from domainpar.placed.layer_record import flat, rebuilt
from domainpar.placed.parallelize import parallelize
from domainpar.placed.part import GraphPart
from domainpar.placed.sets import EDGES, NODES
from domainpar.placed.split import split_graph
from domainpar.placed.tensor import Placed, is_rows, settle

EDGES_OF_SECONDS = (20_000, 80_000)
"""Of the pieces that are timed: what fits into a processor's caches takes less time for an edge."""

MOMENTS = 2
"""Numbers that an optimiser such as Adam keeps for each parameter, from its first step on."""


def forecast(model: nn.Module, part: GraphPart, *args: Any, **kwargs: Any) -> Forecast:
    """Forecast the memory and seconds of a step of a model on a part of a graph. *Collective* over the part's ranks.

        domainpar.forecast(model, part, part.nodes(x), part.edge_index).check()

    Copies of the model run on two small pieces of the graph, forward and backward; under `torch.no_grad()` forward
    alone. What they take is scaled to the part of each rank. The model, its gradients and the random numbers of the
    program stay as they are. Targets and the loss are not counted. The numbers of a piece are rows of your tensors,
    joined by other edges: a model whose tensors depend on values, as masks do, is weighed with what these select.

    Args:
        model: The model, before or after `parallelize`.
        part: This rank's part.
        *args, **kwargs: The arguments of the model's call.

    Returns:
        The forecast, the same on every rank. Its `check()` refuses what does not fit.

    Raises:
        Refused: On all ranks alike, if the model cannot be run on a piece.
    """
    transport, device, trains = part.transport, part.device, torch.is_grad_enabled()
    for value in flat([args, kwargs]):
        if isinstance(value, Placed):
            settle(value)
    nodes, edges = ([part.axes[kind] for kind in kinds] for kinds in (part.sets.nodes, part.sets.edges))
    sizes = (
        sum(axis.length for axis in nodes), sum(axis.num_ghosts for axis in nodes), sum(axis.length for axis in edges),
    )  # fmt: skip
    of_ranks = gather(transport, sizes)
    fullest = max(range(transport.size), key=lambda rank: of_ranks[rank][2])
    # As threads, two ranks share a piece where ranks share the graph: a table with room for ghosts is another one.
    ranks = 2 if transport.size > 1 and device.type == "cpu" else 1

    def on_rank(world: World, run: _PieceRun) -> Piece:
        passes = run.on(world)
        return weighed_pass(passes.both, device, passes.num_edges, passes.kinds)

    def runs(ranks: int, pieces: Sequence[int]) -> list[_PieceRun]:
        """Pieces of so many edges for each of some ranks: of a small part, a quarter and all of it."""
        few, many = (min(1.0, ranks * size / max(sizes[2], 1)) for size in pieces)
        return [
            _PieceRun(part, [copy.deepcopy(model) for _ in range(ranks)], share, (args, kwargs), trains)
            for share in (min(few, many / 4), many)
        ]

    def made(what: Callable[[], Any]) -> Any:
        """What is made of pieces on this rank; whatever the model raises is a ValueError."""
        try:
            with torch.random.fork_rng(devices=[]):
                return what()
        except Exception as error:  # a user's own code may raise anything
            text = f"{type(error).__name__}: {error}"
            raise ValueError(f"the model cannot be run on a piece of the graph: {text}") from error

    def weight() -> Any:
        return made(lambda: asdict(weigh(on_rank, [(run,) for run in runs(ranks, EDGES_OF_PIECES)], ranks)))

    def seconds() -> Any:
        """Of this rank's part, alone while the others do the same."""
        passes = made(lambda: [run.on(World.alone()) for run in runs(1, EDGES_OF_SECONDS)]) if sizes[2] else []
        points = [(one.num_edges, made(partial(seconds_of, one.both, device))) for one in passes]
        line = Line.through(*points) if points else Line(0.0, 0.0)
        return line.fixed + line.of_edge * sizes[2]

    found = gather(transport, on_all(transport, lambda: weight() if transport.rank == fullest else None))[fullest]
    slowest = max(gather(transport, on_all(transport, seconds)))
    learned = sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)
    beside = MOMENTS * learned if trains else 0
    on_cpu = {"fixed": OF_TORCH + beside, "times": GAPS} if device.type == "cpu" else {"fixed": beside}
    expected = int(PartMemory.from_record(found).plus(**on_cpu).of(*sizes, 0))
    return forecast_of(transport, device, sizes, expected, held_bytes(device), seconds=slowest)


class _Passes(NamedTuple):
    """Both passes over this rank's part of a piece, its edges, and what its tensors have rows for."""

    both: Callable[[], object]
    num_edges: int
    kinds: Kinds


class _PieceRun(NamedTuple):
    """A piece of a part, to be run.

    Attributes:
        part: The part.
        copies: The model for each rank.
        share: Of the rows of the part.
        arguments: Of the model on the part.
        trains: Whether there is a backward pass.
    """

    part: GraphPart
    copies: list[nn.Module]
    share: float
    arguments: Any
    trains: bool

    def on(self, world: World) -> _Passes:
        """Split the piece over ranks, and place the arguments on it. *Collective*."""
        part, sets, is_one = self.part, self.part.sets, self.part.sets.is_one
        counts = {kind: self._count(axis.length) for kind, axis in part.axes.items()}
        graph = {EDGES: part.edge_index} if is_one else part.edge_index
        ends = {kind: self._ends(kind, index, counts) for kind, index in graph.items()}
        nodes = {kind: counts[kind] for kind in sets.nodes}
        edge_index, num_nodes = (ends[EDGES], nodes[NODES]) if is_one else (ends, nodes)
        piece = split_graph(edge_index, num_nodes, world, partitioner="contiguous")
        of_piece = {EDGES: piece.edge_index} if is_one else piece.edge_index

        def placed(value: Any) -> Any:
            if not isinstance(value, Placed):
                return value
            if not is_rows(value):
                return value.local
            for kind, index in graph.items():  # edges are those of the piece, whole or one end of them
                if value.shape == index.shape and torch.equal(value.local, index.local):
                    return of_piece[kind]
                for end in (0, 1):
                    if value.shape == index.shape[1:] and torch.equal(value.local, index.local[end]):
                        return of_piece[kind][end]
            place: Any = value.place
            kind = next((kind for kind, axis in part.axes.items() if axis is place.axis), None)
            if kind is None:
                raise ValueError(f"an argument has rows of {place.axis}; give rows of nodes or edges of the part")
            rows = value.local.detach().narrow(place.dim, 0, counts[kind]).clone()
            place_rows = piece.nodes if kind in sets.nodes else piece.edges
            return place_rows(rows.requires_grad_(value.requires_grad), kind, place.dim)

        args, kwargs = rebuilt(self.arguments, placed)
        model = parallelize(self.copies[world.rank], world, same_bits=part.ranks.same_bits)

        def both() -> object:
            with torch.set_grad_enabled(self.trains):
                result = model(*args, **kwargs)
                tensors = [value for value in flat(result) if isinstance(value, Tensor) and value.requires_grad]
                if tensors:
                    torch.stack([(x.abs() if x.is_complex() else x).square().mean() for x in tensors]).sum().backward()
            return result

        return _Passes(both, sum(piece.axes[kind].length for kind in sets.edges), _kinds(piece))

    def _count(self, length: int) -> int:
        return min(length, max(1, round(self.share * length)))

    def _ends(self, kind: Any, index: Placed, counts: dict[Any, int]) -> Tensor:
        """The first edges of a kind, between nodes of the piece."""
        first = index.local[:, : counts[kind]]
        return torch.stack([first[end] % max(counts[kind[2 * end]], 1) for end in (0, 1)])


def _kinds(piece: GraphPart) -> Kinds:
    """By the length of a tensor, what it has a row for."""
    found: dict[int, dict[int, float]] = {}
    nodes, edges = ([piece.axes[kind] for kind in kinds] for kinds in (piece.sets.nodes, piece.sets.edges))
    owned, ghosts, all_edges = (
        max(sum(counts), 1)
        for counts in (
            [axis.length for axis in nodes],
            [axis.num_ghosts for axis in nodes],
            [axis.length for axis in edges],
        )
    )
    for axis in nodes:
        assert axis.halo is not None, "each kind of nodes has one"
        plan, of_owned, of_ghosts = axis.halo.plan, axis.length / owned, axis.num_ghosts / ghosts
        found |= {len(plan.send_rows): {GHOST: of_ghosts}, plan.num_ghosts: {GHOST: of_ghosts}}
        found |= {plan.num_local: {OWNED: of_owned, GHOST: of_ghosts}, plan.num_owned: {OWNED: of_owned}}
    found |= {axis.length: {EDGE: axis.length / all_edges} for axis in edges}
    return {length: kinds for length, kinds in found.items() if length > 1}
