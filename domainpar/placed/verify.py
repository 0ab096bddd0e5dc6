"""Does a model give the same results on a split graph as on the whole one? If not, which layer differs first?

Placed tensors see calls of torch. They do not see Python: a counter in a global, a value kept from an earlier call, the
number of a rank. `verify` compares the results themselves, on a small graph, before a long run.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from domainpar.common import timeouts
from domainpar.parallel.errors import RanksFailed
from domainpar.parallel.thread_ranks import run_threads
from domainpar.parallel.world import World
from domainpar.placed.layer_record import COARSE, Check, LayerRecord, compare_records, flat, rebuilt
from domainpar.placed.moves import whole
from domainpar.placed.parallelize import parallelize
from domainpar.placed.part import GraphPart
from domainpar.placed.ranks import NotExact
from domainpar.placed.replicas import check_sizes
from domainpar.placed.sets import Kind
from domainpar.placed.split import split_graph
from domainpar.placed.tensor import mapped

__all__ = ["Check", "Verification", "verify"]

DRAWS = "It draws random numbers: compared with itself on one rank"


def verify(
    module: nn.Module,
    graph: tuple[Tensor | Mapping[Kind, Tensor], int | Mapping[Kind, int]],
    parts: int = 3,
    *,
    inputs: Callable[[GraphPart], Any],
    backward: bool = True,
    tolerance: float = 1e-10,
    seed: int = 0,
) -> Verification:
    """Run a model whole and split, with threads of this process as ranks, and compare every call of every layer.

    Copies of the model run in float64 on the CPU; the model itself does not change. Each node gets a random part. No
    real split does so: it cuts as many edges as possible. With more than two parts one more rank runs, which owns
    nothing. A split graph draws other dropout masks than torch. So a model with dropout is compared in training with
    itself on one rank, and in evaluation with the plain module.

    Args:
        module: The model, in the mode (`train` or `eval`) in which it is to be compared.
        graph: `(edge_index, num_nodes)`, with `edge_index` int64 [2, E]; of several kinds two dictionaries, as for
            `split_graph`.
        parts: Number of parts with nodes.
        inputs: A function that makes the model's arguments from a part, by part.nodes(x) and so on: a tuple, a
            dictionary by name, or the only argument. It is called for the whole graph as one part, then on each rank.
        backward: Whether to compare gradients as well: those of parameters, and of arguments that require one. The loss
            is a sum over the results with weights of many sizes.
        tolerance: The largest difference, relative to the largest value, that counts as rounding.
        seed: Seed of the parts of nodes and of dropout.

    Returns:
        The comparison. Print it; its `check()` raises if the model is not exact.

    Raises:
        ValueError: If the graph or the number of parts is not valid.
        Exception: Whatever the module raises on the whole graph.
    """
    if not (isinstance(graph, tuple) and len(graph) == 2 and isinstance(graph[0], (Tensor, Mapping))):
        raise ValueError(
            f"a graph is a tuple (edge_index, num_nodes), not {type(graph).__name__}; of a PyG Data give "
            "(data.edge_index, data.num_nodes), inputs=lambda part: (part.nodes(data.x), part.edge_index)."
        )
    if parts < 1:
        raise ValueError(f"a graph cannot be split into {parts} parts; pass 1 or more.")
    check_sizes(module)
    # Random parts cut most edges. With more than two parts there is one more rank, which no node is given to.
    draw = torch.Generator().manual_seed(seed)
    counts = dict(graph[1]) if isinstance(graph[1], Mapping) else int(graph[1])
    assignment = mapped(counts, int, lambda n: torch.randint(0, parts, (n,), generator=draw, device="cpu"))
    trial = Trial(module, graph[0], assignment, inputs, backward, tolerance, seed, parts + (parts > 2))
    with _on_our_terms():
        bare = trial.alone()
        if not bare.draws:
            return _compared(trial, bare)
        # A model that draws random numbers: against itself on one rank, and in evaluation against the plain module.
        try:
            alone = trial.alone(placed=True)
        except NotExact as error:
            return Verification(False, refused=str(error))
        training = _compared(trial, alone, True)
        trial = replace(trial, module=copy.deepcopy(module).eval())
        bare = trial.alone()
        if bare.draws:
            return replace(training, remarks=(*training.remarks, f"{DRAWS} only, as it draws them in evaluation too."))
        calm = _compared(trial, bare)
    compared, shown = (training, "training") if calm.exact else (calm, "evaluation")
    remark = f"{DRAWS}; in evaluation (eval) with the module alone. This is the table in {shown}."
    return replace(compared, remarks=(*compared.remarks, remark))


@contextmanager
def _on_our_terms() -> Iterator[None]:
    """A context with float64 as default type, one thread and a seeded generator; all are restored."""
    dtype, num_threads = torch.get_default_dtype(), torch.get_num_threads()
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(1)
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        torch.set_default_dtype(dtype)
        torch.set_num_threads(num_threads)


@dataclass(frozen=True)
class Verification:
    """The comparison of a model whole and split. Print it.

    Attributes:
        exact: Whether results, gradients and buffers agree within the tolerance.
        rows: Every call of every layer, inner layers before those that contain them. Where all of them agree, also the
            gradient that differs most (of parameters, and of fields of the graph that require one), and the buffer or
            parameter after the pass.
        first_difference: The layer in whose code the two differ first, or else the gradient or buffer; None if there is
            none. Layers after it may be right and have been given wrong values.
        refused: Why the model has no exact form (`NotExact`); None if it was not refused.
        failed: Any other error of the model on the split graph, and where; None if there was none.
        exchanges, sums: How often one forward pass fetched rows of other ranks, and summed something over ranks.
        tolerance: The largest relative difference that counts as rounding.
        ranks: The ranks that the graph was split over, in words.
        remarks: Further remarks, one sentence each.
    """

    exact: bool
    rows: tuple[Check, ...] = ()
    first_difference: Check | None = None
    refused: str | None = None
    failed: str | None = None
    exchanges: int = 0
    sums: int = 0
    tolerance: float = 0.0
    ranks: str = ""
    remarks: tuple[str, ...] = ()

    def check(self) -> Verification:
        """Return this if the model is exact, raise otherwise.

        Raises:
            NotExact: If the model was refused.
            RuntimeError: If it is not exact. The text is the whole table.
        """
        if self.refused is not None:
            raise NotExact(self.refused)
        if not self.exact:
            raise RuntimeError(str(self))
        return self

    @property
    def conclusion(self) -> str:
        """The finding, in one line."""
        first, ended = self.first_difference, ""
        if self.refused is not None:
            ended = f"is refused: {self.refused}"
        elif self.failed is not None:
            ended = f"fails where the graph is split: {self.failed}"
        if first is not None:
            where, behind = f", {first.note}" if first.note else "", f" Behind it the model {ended}" if ended else ""
            return f"not exact: the first difference, {first.size}, is in {first}{where}.{behind}"
        if ended:
            return f"not exact: it {ended}"
        if not self.exact:
            return "not known: the model returns nothing that could be compared."
        return (
            f"exact on {self.ranks}: no layer, gradient or buffer differs by more than {self.tolerance:g}; "
            f"{self.exchanges} exchanges and {self.sums} sums over ranks in a forward pass."
        )

    @property
    def advice(self) -> str:
        """What to do next, in one line."""
        if self.exact:
            return "Next: domainpar.parallelize(model, world)."
        if (first := self.first_difference) is None and self.failed is None:
            return "Next: change the layer as said, and verify again."
        if first is not None and "arguments" in first.note:
            return "Next: look at `inputs`: rows must be taken by part.nodes and part.edges from tensors of all rows."
        if first is not None and not first.number:
            return (
                "Next: look for .data, .detach(), hooks and autograd.Functions of your own on the way back to a "
                "gradient, and where the model changes its buffers."
            )
        return (
            f"Next: look in the code of {first or 'the layer that failed'} for what torch cannot see: globals, "
            "counters, what was kept from an earlier call, x.local, part.plan, .data, numpy, ids of ranks or threads. "
            "If it only calls torch functions, the fault is ours: send us this table."
        )

    def __str__(self) -> str:
        lines = [("layer", "class", "rows", "difference", ""), *map(self._line, self.rows)]
        widths = [max(map(len, column)) for column in zip(*lines)]
        table = ["  ".join(text.ljust(width) for text, width in zip(line, widths)).rstrip() for line in lines]
        return "\n".join([*table, *self.remarks, self.conclusion, self.advice])

    def _line(self, row: Check) -> tuple[str, ...]:
        """A line of the table, with a mark at the layer of the first difference."""
        number = f" (call {row.number})" if row.number > 1 else ""
        first, note = self.first_difference, row.note
        if first is not None and row[:3] == first[:3]:
            note = ", ".join(filter(None, ("<- first difference", first.note)))
        return f"{row.name or 'the model'}{number}", row.kind, row.rows, row.size, note


@dataclass(frozen=True)
class Trial:
    """A module to be run, and a graph to run it on: the arguments of `verify`, with the part of each node."""

    module: nn.Module
    edge_index: Any
    assignment: Any
    inputs: Callable[[GraphPart], Any]
    backward: bool
    tolerance: float
    seed: int
    num_ranks: int

    def alone(self, placed: bool = False, against: LayerRecord | None = None) -> LayerRecord:
        """The run on the whole graph, of the plain module, or on one rank.

        Raises:
            Exception: Whatever the module raises.
        """
        torch.manual_seed(self.seed)
        record = LayerRecord(_doubled(self.module), against)
        try:
            self.run(record, World.alone(), placed)
        except Exception as error:
            error.add_note("This was the whole graph, not split; verify takes a copy in float64 on the CPU.")
            raise
        return record

    def on_ranks(self, against: LayerRecord) -> list[LayerRecord]:
        """The runs on a split graph, forward and backward, up to where they fail."""
        runs = [LayerRecord(_doubled(self.module), against) for _ in range(self.num_ranks)]

        def on_rank(world: World) -> None:
            world.transport.board = None  # no marks here: the layer shows where a rank was
            try:
                self.run(runs[world.rank], world, True)
            except BaseException as error:
                runs[world.rank].error = error
                raise

        torch.manual_seed(self.seed)
        try:
            run_threads(on_rank, self.num_ranks, timeout=math.inf, deadline=timeouts.SMALL_GRAPH)
        except Exception:
            if all(run.error is None for run in runs):
                raise
        return runs

    def run(self, record: LayerRecord, world: World, placed: bool) -> None:
        """Forward and backward of the module of a record, on placed tensors or on plain ones. *Collective*."""
        owner = mapped(self.assignment, Tensor, lambda parts: (parts % world.size).numpy())
        part = split_graph(self.edge_index, mapped(self.assignment, Tensor, len), world, partitioner=owner)
        record.log = part.ranks.log
        if placed:
            parallelize(record.module, world)
        arguments = rebuilt(self.inputs(part), lambda value: _float64(value if placed else whole(value)))
        named = arguments if isinstance(arguments, dict) else {}
        args = arguments if isinstance(arguments, tuple) else () if named else (arguments,)
        exchanges, sums, state = part.ranks.num_exchanges, part.ranks.num_sums, torch.get_rng_state()
        result = record.run(*args, **named)
        record.exchanges, record.sums = part.ranks.num_exchanges - exchanges, part.ranks.num_sums - sums
        record.draws = not torch.equal(state, torch.get_rng_state())
        record.log.compare()  # all ranks end their forward pass before one fails in backward
        parameters, buffers = dict(record.module.named_parameters()), dict(record.module.named_buffers())
        if self.backward:
            terms = []  # of a sum of all results, in which each number has a weight of its own
            for number, tensor in enumerate(flat(result)):
                if isinstance(tensor, Tensor) and tensor.requires_grad:
                    weights = torch.sin(1.7 * torch.arange(tensor.numel(), device="cpu") + number + 0.3)
                    weighted = tensor * weights.view(tensor.shape)
                    terms.append(weighted.abs().sum() if tensor.is_complex() else weighted.sum())
            if terms:
                sum(terms[1:], terms[0]).backward()
            tensors = {**parameters, **{f"argument {number}": value for number, value in enumerate(flat(arguments))}}
            leaves = {name: it for name, it in tensors.items() if getattr(it, "requires_grad", False)}
            zero = {name: torch.zeros_like(it) for name, it in leaves.items()}
            record.leave("gradient", {name: zero[name] if it.grad is None else it.grad for name, it in leaves.items()})
        record.leave("buffer", {**buffers, **parameters})
        record.log.compare()


def _doubled(module: nn.Module) -> nn.Module:
    """A copy on the CPU in float64, with tensors that are no parameters or buffers."""
    with torch.no_grad():  # else torch makes the parameters of a scripted copy depend on those of the first
        other = copy.deepcopy(module).cpu().double()
    for first, second in zip(module.parameters(), other.parameters()):
        second.requires_grad_(first.requires_grad)
    for child in other.modules():
        for name, value in list(vars(child).items()):
            if isinstance(value, Tensor):
                setattr(child, name, _float64(value.cpu()))
    return other


def _float64(value: Any) -> Any:
    """A tensor in float64; anything else as it is."""
    if not isinstance(value, Tensor) or not value.is_floating_point() or value.dtype is torch.float64:
        return value
    return value.detach().double().requires_grad_(value.requires_grad)


def _compared(trial: Trial, alone: LayerRecord, placed: bool = False) -> Verification:
    """Runs on ranks against a run on the whole graph, of plain tensors or of placed ones."""
    runs, remarks = trial.on_ranks(alone), []
    refused = failed = None
    if errors := [run for run in runs if run.error is not None]:
        # Refusals first; errors because another rank had failed last.
        run = min(errors, key=lambda run: (not isinstance(run.error, NotExact), isinstance(run.error, RanksFailed)))
        here, places = run.running[-1], [run.running[-1] for run in runs]
        others = ", ".join(f"rank {rank} in {place}" for rank, place in enumerate(places) if place != here)
        if isinstance(run.error, NotExact):
            refused = str(run.error)
        else:
            failed = f"{here}: {type(run.error).__name__}: {run.error}" + (f"; {others} then" if others else "")
    ended = refused is None and failed is None
    rows, first = compare_records(alone, runs, not ended, trial.tolerance)
    if first is not None:  # other possible reasons of the difference
        again = trial.alone(placed, alone)
        _, unsteady = compare_records(alone, [again], False, trial.tolerance)
        if unsteady is not None:
            remarks.append(f"Two runs on the whole graph differ as well, first in {unsteady}: it is not a function.")
        if any(COARSE in row.note for row in rows):
            remarks.append("Some layers compute in less than float64 whatever they are given: that may be rounding.")
    ranks = "1 rank" if len(runs) == 1 else f"{len(runs)} ranks (parts of nodes drawn at random)"
    result = next(row for row in rows if not row.name)
    return Verification(
        exact=ended and first is None and result.difference is not None,
        rows=tuple(rows),
        first_difference=first,
        refused=refused,
        failed=failed,
        exchanges=runs[0].exchanges,
        sums=runs[0].sums,
        tolerance=trial.tolerance,
        ranks=ranks.replace(" (", ", one of which owns nothing (") if len(runs) > 2 else ranks,
        remarks=tuple(remarks),
    )
