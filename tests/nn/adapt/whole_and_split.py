"""Runs a function of torch calls on a whole graph and on parts of it, and compares: `check(function, ...)`.

A function takes what it wants by the names of its arguments: fields of a `Sample`, `src` and `dst` (the two rows of
`edge_index`), and `net`, a module made once and given to every rank. It knows nothing of ranks.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import pytest
import torch
from proving import check_no_rank_holds_all
from torch import Tensor, nn

from domainpar.nn.adapt.differences import compare_runs
from domainpar.nn.adapt.part import GraphPart
from domainpar.nn.adapt.trial import Trial, TrialRun
from domainpar.plan import EdgePolicy

TOLERANCE = 1e-12
NUM_RANKS = 4
REACH = 2  # of an edge, around a ring of parts one behind the other: each part has nodes that no other one touches
POLICIES: tuple[EdgePolicy, ...] = ("incoming", "incident")
SECONDS = 5.0  # a rank that waits so long for another one has been left alone
NODES = {"x": 0, "z": 0, "v": 0, "u": 0, "series": 1, "batch": 0, "mask": 0, "vectors": 0, "square": 0}
CONSTANTS = ("c", "table")
EDGES = {"e": 0, "w": 0, "kind": 0, "edge_mask": 0, "columns": 1}


@dataclass(frozen=True, eq=False)
class Sample:
    """A graph and tensors of it; numbers are drawn and mean nothing.

    Attributes:
        num_nodes, edge_index, assignment: The graph, and the part of each node.
        x, z: Of nodes, float64 [N, 4]. `z` has few different values, so that there are ties.
        v, u: Of nodes, [N]; `u` positive.
        vectors: Of nodes, [N, 3, 2].
        series: Of nodes, [2, N, 3].
        square: Of nodes, as many features as nodes, [N, N].
        batch, mask: Of nodes, int64 in [0, 3) and bool, [N].
        e, w, kind, edge_mask: Of edges, [E, 4], [E] positive, int64 in [0, 3) and bool.
        columns: Of edges, [4, E].
        c: The same on every rank, [4].
        table: The same on every rank, [3, 4].
        tiny: Small or without ghosts on purpose, so that ranks may hold all nodes.
    """

    num_nodes: int
    edge_index: Tensor
    assignment: tuple[int, ...]
    x: Tensor
    z: Tensor
    v: Tensor
    u: Tensor
    vectors: Tensor
    series: Tensor
    square: Tensor
    batch: Tensor
    mask: Tensor
    e: Tensor
    w: Tensor
    kind: Tensor
    edge_mask: Tensor
    columns: Tensor
    c: Tensor
    table: Tensor
    tiny: bool = False

    def of(self, dtype: torch.dtype) -> Sample:
        """The same with floats of another type."""
        return replace(self, **{name: one.to(dtype) for name, one in self.floats().items()})

    def floats(self) -> dict[str, Tensor]:
        """Every tensor that a gradient may flow to."""
        tensors = {one.name: getattr(self, one.name) for one in fields(self)}
        return {name: one for name, one in tensors.items() if isinstance(one, Tensor) and one.is_floating_point()}


def dealt_parts(num_nodes: int) -> tuple[int, ...]:
    """The part of each node, where a sample names none."""
    return tuple(3 if node == 4 else (node * 7 // 3) % 2 for node in range(num_nodes))


def covering(num_nodes: int, num_edges: int) -> Tensor:
    """Edges around the ring of parts, so many that one ends at every node."""
    number = torch.arange(num_edges)
    ring = torch.tensor(dealt_parts(num_nodes)).argsort(stable=True)
    return ring[torch.stack([number + 1 + number // num_nodes % REACH, number]) % num_nodes]


def sample(
    num_nodes: int = 13, num_edges: int = 40, assignment: tuple[int, ...] | None = None, edges: Tensor | None = None
) -> Sample:
    """A random graph with self-loops, duplicates and a node without edges; part 2 owns nothing, part 3 one node."""
    draw = torch.Generator().manual_seed(num_nodes * 1000 + num_edges)

    def floats(*size: int) -> Tensor:
        return torch.randn(size, generator=draw, dtype=torch.float64)

    def integers(high: int, size: int) -> Tensor:
        return torch.randint(0, high, (size,), generator=draw)

    if assignment is None:
        assignment = dealt_parts(num_nodes)
    if edges is None:
        linked = max(num_nodes - 1, 1)
        at = integers(linked, num_edges)
        to = (at + integers(2 * REACH + 1, num_edges) - REACH) % linked
        ends = torch.tensor(assignment[:linked]).argsort(stable=True)[torch.stack([at, to])]
        if num_edges > 6:
            ends[:, 1], ends[1, 2] = ends[:, 0], ends[0, 2]
        edges = ends
    num_edges = edges.size(1)
    n, m = num_nodes, num_edges
    return Sample(
        n,
        edges,
        assignment,
        x=floats(n, 4),
        z=integers(3, 4 * n).view(n, 4).double(),
        v=floats(n),
        u=floats(n).abs() + 0.1,
        vectors=floats(n, 3, 2),
        series=floats(2, n, 3),
        square=floats(n, n),
        batch=integers(3, n).sort().values,
        mask=floats(n) > 0,
        e=floats(m, 4),
        w=floats(m).abs() + 0.1,
        kind=integers(3, m),
        edge_mask=floats(m) > 0,
        columns=floats(4, m),
        c=floats(4),
        table=floats(3, 4),
    )


USUAL = sample()
_ODD = {
    "as many local rows as features": sample(8, 8, (0, 0, 0, 0, 1, 1, 1, 1)),
    "no edges": sample(5, 0),
    "one edge": sample(5, 1, edges=torch.tensor([[0], [1]])),
    "one node": sample(1, 3, (1,)),
    "one node without edges": sample(1, 0, (3,)),
    "as many nodes as features": sample(4, 9, (0, 1, 3, 3)),
    "all on one rank": sample(6, 20, (1,) * 6),
    "as many edges as nodes": sample(7, 7),
    "no ghosts": sample(6, 6, (0, 0, 1, 1, 3, 3), torch.tensor([[0, 1, 2, 3, 4, 5], [1, 0, 3, 2, 5, 4]])),
}
ODD = {name: replace(one, tiny=True) for name, one in _ODD.items()}


class Called(nn.Module):
    """A function as a module, so that its calls are watched."""

    def __init__(self, function: Callable[..., Any], net: nn.Module | None) -> None:
        super().__init__()
        self.net, self.function = net, function

    def forward(self, edge_index: Tensor, **tensors: Tensor) -> Any:
        given: dict[str, Any] = {"edge_index": edge_index, "net": self.net, **tensors}
        wanted = inspect.signature(self.function).parameters
        if "src" in wanted or "dst" in wanted:
            given["src"], given["dst"] = edge_index[0], edge_index[1]
        return self.function(*(given[name] for name in wanted))


def trial_of(
    function: Callable[..., Any],
    sample: Sample = USUAL,
    net: nn.Module | None = None,
    policy: EdgePolicy = "incoming",
    calls: int = 1,
    recompute_every: int | None = None,
) -> Trial:
    """A function of a sample's fields, to be run whole and split; gradients flow to all of them."""
    wanted = inspect.signature(function).parameters
    asked = {name: getattr(sample, name) for name in sorted({*NODES, *EDGES, *CONSTANTS}) if name in wanted}

    def inputs(part: GraphPart, leaves: Any) -> dict[str, Tensor]:
        tensors = {**asked, **leaves}
        arguments = {name: part.nodes(tensors[name], NODES[name]) for name in tensors if name in NODES}
        arguments |= {name: part.edges(tensors[name], EDGES[name]) for name in tensors if name in EDGES}
        constants = {name: part.replicate(tensors[name]) for name in tensors if name in CONSTANTS}
        return {"edge_index": part.edge_index, **arguments, **constants}

    return Trial(
        Called(function, net),
        sample.edge_index,
        sample.num_nodes,
        inputs,
        np.asarray(sample.assignment),
        policy,
        leaves={name: one for name, one in asked.items() if one.is_floating_point()},
        patience=SECONDS,
        calls=calls,
        recompute_every=recompute_every,
    )


def check(
    function: Callable[..., Any],
    sample: Sample = USUAL,
    *,
    net: Callable[[], nn.Module] | None = None,
    refused: str | None = None,
    or_refused: bool = False,
    policies: tuple[EdgePolicy, ...] | None = None,
    against: str = "whole",
    tolerance: float = TOLERANCE,
    calls: int = 1,
    gradients: bool = True,
    recompute_every: int | None = None,
) -> TrialRun:
    """Run a function whole, on one rank and on four; results and gradients have to be the same, or all ranks refuse.

    Args:
        function: What to run; see this file's docstring.
        sample: The graph.
        net: Makes its module; the same seed is set before.
        refused: Part of the message of `NotExact` that every rank has to raise; None if the result has to be exact.
        or_refused: Whether it may be refused instead, under any policy, by all ranks alike.
        policies: Which edges a part computes on; None for both, of which one will do for a refusal, and for a function
            that takes nothing of edges: to it they are other numbers of ghosts, of which the second has more.
        against: `whole`, or `alone`: one rank under the watch, for random numbers.
        tolerance: For max |difference| / max |value|.
        calls: How often to call it; the last one counts.
        gradients: Whether to compare them.
        recompute_every: Of the runs on ranks, as for `parallelize`.
    """
    of_edges = {"edge_index", "src", "dst", *EDGES}.intersection(inspect.signature(function).parameters)
    policies = policies or (POLICIES[:1] if refused is not None else POLICIES if of_edges else POLICIES[1:])
    torch.manual_seed(1)
    module = None if net is None else net().double()
    trials = [trial_of(function, sample, module, policy, calls, recompute_every) for policy in policies]
    if not sample.tiny:
        for policy in policies:
            check_no_rank_holds_all(sample.edge_index, sample.assignment, NUM_RANKS, policy)
    splits = [trial.split(NUM_RANKS) for trial in trials]
    for policy, split in zip(policies, splits):
        assert split.uneven is None, f"{policy}: {split.uneven}"
        if refused is not None:
            check_refused(split, refused, policy)
    if refused is not None:
        return splits[0]
    alone = trials[0].split(1)
    may_refuse = or_refused and alone.refused is not None
    if against == "alone" and may_refuse:
        return splits[0]
    whole = alone if against == "alone" else trials[0].bare()[0]
    if not may_refuse:
        check_same("one rank", alone, whole, tolerance, gradients)
    for policy, split in zip(policies, splits):
        if not (or_refused and split.refused is not None):
            check_same(policy, split, whole, tolerance, gradients)
    return splits[0]


def check_refused(run: TrialRun, text: str, where: str) -> None:
    """Every rank refuses, and says so."""
    for failure in run.failures:
        if not failure.refuses:
            raise AssertionError(f"{where}, rank {failure.rank}: {failure}") from failure.error
        assert text in str(failure.error), failure.error
    assert len(run.failures) == len(run.ranks), f"{where}: not all ranks refuse"


def check_same(where: str, split: TrialRun, whole: TrialRun, tolerance: float, gradients: bool = True) -> None:
    """A run came to its end on all ranks alike and left what the run on the whole graph leaves."""
    if split.failure is not None:
        raise AssertionError(f"{where}: {split.failure}") from split.failure.error
    assert split.uneven is None, f"{where}: {split.uneven}"
    differences = compare_runs(whole, split)
    compared = [*differences.results, *differences.state, *(differences.gradients if gradients else ())]
    for size, name, note in compared:
        assert size <= tolerance, f"{where}: {name} differs by {size:.1e} {note}"


def cases(them: dict[str, Any], waiting: dict[str, str] | None = None) -> pytest.MarkDecorator:
    """Parametrise a test with functions, or with functions and what else `check` takes, by name.

    Args:
        them: The cases.
        waiting: Why a case cannot pass yet, by its name.
    """
    params = []
    for name, case in them.items():
        marks = [pytest.mark.xfail(strict=True, reason=waiting[name])] if waiting and name in waiting else []
        params.append(pytest.param(*(case if isinstance(case, tuple) else (case, {})), id=name, marks=marks))
    return pytest.mark.parametrize(("function", "more"), params)


def refusals(them: dict[str, Any]) -> pytest.MarkDecorator:
    """Parametrise a test with functions and the text they are refused with."""
    params = [pytest.param(*(case if len(case) == 3 else (*case, {})), id=name) for name, case in them.items()]
    return pytest.mark.parametrize(("function", "text", "more"), params)
