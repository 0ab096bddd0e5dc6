"""Runs a function of torch calls on a whole graph and on parts of it, and compares: `check(function, ...)`.

A function takes what it wants by the names of its arguments: fields of a `Sample`, `src` and `dst` (the two rows of
`edge_index`), and `net`, a module made once and given to every rank. It knows nothing of ranks.
"""

from __future__ import annotations

import copy
import inspect
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from domainpar import World
from domainpar.nn.adapt.parallelize import Parallel, parallelize
from domainpar.nn.adapt.part import GraphPart, split_graph
from domainpar.nn.adapt.rows import NotExact, Rows, rows_of
from domainpar.plan import EdgePolicy, PartitionPlan
from domainpar.testing import run_ranks

TOLERANCE = 1e-12
NUM_RANKS = 4
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

    def of(self, dtype: torch.dtype) -> Sample:
        """The same with floats of another type."""
        return replace(self, **{name: one.to(dtype) for name, one in self.floats().items()})

    def floats(self) -> dict[str, Tensor]:
        """Every tensor that a gradient may flow to."""
        tensors = {one.name: getattr(self, one.name) for one in fields(self)}
        return {name: one for name, one in tensors.items() if isinstance(one, Tensor) and one.is_floating_point()}


def sample(
    num_nodes: int = 13, num_edges: int = 40, assignment: tuple[int, ...] | None = None, edges: Tensor | None = None
) -> Sample:
    """A random graph with self-loops, duplicates and a node without edges; part 2 owns nothing, part 3 one node."""
    draw = torch.Generator().manual_seed(num_nodes * 1000 + num_edges)

    def floats(*size: int) -> Tensor:
        return torch.randn(size, generator=draw, dtype=torch.float64)

    def integers(high: int, size: int) -> Tensor:
        return torch.randint(0, high, (size,), generator=draw)

    if edges is None:
        ends = torch.stack([integers(max(num_nodes - 1, 1), num_edges), integers(max(num_nodes - 1, 1), num_edges)])
        if num_edges > 6:
            ends[:, 1], ends[1, 2] = ends[:, 0], ends[0, 2]
        edges = ends
    num_edges = edges.size(1)
    if assignment is None:
        assignment = tuple(3 if node == 4 else (node * 7 // 3) % 2 for node in range(num_nodes))
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
ODD = {
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


class Called(nn.Module):
    """A function as a module, so that its calls are watched; remembers what the rows of its results were."""

    def __init__(self, function: Callable[..., Any], net: nn.Module | None) -> None:
        super().__init__()
        self.net, self.function = net, function
        self.rows: list[Rows | None] = []

    def forward(self, edge_index: Tensor, **tensors: Tensor) -> Any:
        given: dict[str, Any] = {"edge_index": edge_index, "net": self.net, **tensors}
        wanted = _wanted(self.function)
        if "src" in wanted or "dst" in wanted:
            given["src"], given["dst"] = edge_index[0], edge_index[1]
        result = self.function(*(given[name] for name in wanted))
        self.rows = [rows_of(one) for one in tensors_of(result)]
        return result


def tensors_of(value: Any) -> Iterator[Tensor]:
    """Tensors in nested tuples, lists and dictionaries, in order."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from tensors_of(item)
    elif isinstance(value, dict):
        yield from tensors_of(list(value.values()))


@dataclass
class Outcome:
    """What one rank, or a run on the whole graph, came to.

    Attributes:
        outputs: Results, rows of this rank.
        keys: For each result the global numbers of its rows and the dimension they lie along; None: replicated.
        gradients: Of parameters, summed over ranks, and this rank's share of those of inputs, by name.
        error: What was raised instead.
        counts: Exchanges and sums of the forward pass.
    """

    outputs: list[Tensor]
    keys: list[tuple[Tensor, int] | None]
    gradients: dict[str, Tensor]
    error: BaseException | None = None
    counts: tuple[int, int] = (0, 0)
    state: dict[str, Tensor] | None = None

    @property
    def how(self) -> str:
        """What has to be the same on every rank: whether it failed, of what, and after how many collective calls."""
        return f"{type(self.error).__name__} {self.counts}"


def _weights(shape: torch.Size, dtype: torch.dtype) -> Tensor:
    return torch.sin(torch.arange(1.0, shape.numel() + 1, dtype=torch.float64) ** 1.5).view(shape).to(dtype)


def _wanted(function: Callable[..., Any]) -> list[str]:
    return list(inspect.signature(function).parameters)


def _given(function: Callable[..., Any], sample: Sample) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The fields that a function asks for, and those of them that gradients may flow to."""
    asked = {name for name in _wanted(function) if name in NODES or name in EDGES or name in CONSTANTS}
    leaves = {name: one.clone().requires_grad_() for name, one in sample.floats().items() if name in asked}
    return {name: leaves.get(name, getattr(sample, name)) for name in sorted(asked)}, leaves


def _gradients(module: nn.Module, leaves: dict[str, Tensor]) -> dict[str, Tensor]:
    named = [*leaves.items(), *((name, one) for name, one in module.named_parameters())]
    return {name: torch.zeros_like(one) if one.grad is None else one.grad for name, one in named}


def _loss(outputs: list[Tensor], weights: list[Tensor]) -> Tensor | None:
    terms = [
        (one * weight).abs().sum() if one.is_complex() else (one * weight).sum()
        for one, weight in zip(outputs, weights)
        if one.requires_grad
    ]
    return sum(terms[1:], terms[0]) if terms else None


def run_whole(function: Callable[..., Any], sample: Sample, net: nn.Module | None, calls: int = 1) -> Outcome:
    """The function on the whole graph, without any watch."""
    tensors, leaves = _given(function, sample)
    module = Called(function, net)
    for _ in range(calls):
        result = module(sample.edge_index, **{name: one.clone() for name, one in tensors.items()})
    outputs = list(tensors_of(result))
    loss = _loss(outputs, [_weights(one.shape, one.dtype) for one in outputs])
    if loss is not None:
        loss.backward()
    return Outcome([one.detach() for one in outputs], [], _gradients(module, leaves), state=_state(module))


def _state(module: nn.Module) -> dict[str, Tensor]:
    named = [*module.named_buffers(), *module.named_parameters()]
    return {name: one.detach().clone() for name, one in named}


_KEPT: list[Sample] = []
_PLANS: dict[tuple[int, EdgePolicy, int, int], PartitionPlan] = {}


def _part_of(world: World, sample: Sample, policy: EdgePolicy) -> GraphPart:
    """This rank's part of a sample that lives as long as the tests; its plan is made once."""
    key = id(sample), policy, world.size, world.rank
    if key in _PLANS:
        return GraphPart(_PLANS[key], world.domain, world.device)
    assignment = np.asarray(sample.assignment if world.size > 1 else [0] * sample.num_nodes)
    part = split_graph(sample.edge_index, sample.num_nodes, world, edges=policy, partitioner=assignment)
    _KEPT.append(sample)  # so that nobody gets its id
    _PLANS[key] = part.plan
    return part


def run_part(
    world: World,
    function: Callable[..., Any],
    sample: Sample,
    net: nn.Module | None,
    policy: EdgePolicy,
    calls: int = 1,
) -> Outcome:
    """The same on this rank's part."""
    part = _part_of(world, sample, policy)
    tensors, leaves = _given(function, sample)
    marked = {name: part.nodes(one, NODES[name]) for name, one in tensors.items() if name in NODES}
    marked |= {name: part.edges(one, EDGES[name]) for name, one in tensors.items() if name in EDGES}
    marked |= {name: part.same_everywhere(one) for name, one in tensors.items() if name in CONSTANTS}
    parallel = parallelize(Called(function, copy.deepcopy(net)), world)
    try:
        for _ in range(calls):
            result = parallel(edge_index=part.edge_index, **marked)
        return _learn(world, part, parallel, result, leaves)
    except Exception as error:
        return Outcome([], [], {}, error=error, counts=(part.num_exchanges, part.num_sums))


def _learn(world: World, part: GraphPart, parallel: Parallel, result: Any, leaves: dict[str, Tensor]) -> Outcome:
    called: Any = parallel.module
    outputs = list(tensors_of(result))
    keys = [None if rows is None else (_keys(rows), rows.dim) for rows in called.rows]
    counts = (part.num_exchanges, part.num_sums)
    weights = [_my_weights(world, part, rows, one) for rows, one in zip(called.rows, outputs)]
    loss = _loss(outputs, weights)
    if loss is not None:
        loss.backward()
    if called.net is not None:
        parallel.sum_gradients()
    outputs = [one.detach() for one in outputs]
    return Outcome(outputs, keys, _gradients(called, leaves), counts=counts, state=_state(called))


def _keys(rows: Rows) -> Tensor:
    counted = rows.axis.counted
    return rows.axis.keys if counted is None else rows.axis.keys[counted]


def _my_weights(world: World, part: GraphPart, rows: Rows | None, output: Tensor) -> Tensor:
    """This rank's rows of the weights that the whole result has."""
    if rows is None:
        return _weights(output.shape, output.dtype)
    keys, total = _keys(rows), rows.axis.total
    if rows.axis not in (part.node_axis, part.edge_axis):  # there, global numbers are places
        payloads = world.domain.all_gather(keys.numpy().tobytes())
        everyone = np.sort(np.concatenate([np.frombuffer(payload, dtype=np.int64) for payload in payloads]))
        keys = torch.from_numpy(np.searchsorted(everyone, keys.numpy()))
    shape = torch.Size([total if at == rows.dim else size for at, size in enumerate(output.shape)])
    return _weights(shape, output.dtype).index_select(rows.dim, keys)


def merged(split: list[Outcome]) -> list[Tensor]:
    """Results of all ranks in global order; replicated ones must be the same on every rank, to the bit."""
    found = []
    for number, key in enumerate(split[0].keys):
        pieces = [one.outputs[number] for one in split]
        if key is None:
            for piece in pieces[1:]:
                assert _equal(piece, pieces[0]), "ranks differ"
            found.append(pieces[0])
            continue
        keys = torch.cat([one.keys[number][0] for one in split])  # type: ignore[index]
        assert len(keys.unique()) == len(keys), "a row is counted twice"
        found.append(torch.cat(pieces, key[1]).index_select(key[1], keys.argsort()))
    return found


def difference(mine: Tensor, yours: Tensor, scale: float | None = None) -> float:
    """max |difference| / max |value|; infinite where shapes differ, and where one of the two is not finite."""
    if mine.shape != yours.shape:
        return float("inf")
    if not mine.numel():
        return 0.0
    both_nan = torch.isnan(mine) & torch.isnan(yours) | (mine == yours)
    apart = (mine - yours).abs().masked_fill(both_nan, 0) if mine.dtype is not torch.bool else (mine ^ yours)
    wide = torch.complex128 if mine.is_complex() else torch.float64
    scale = float(torch.nan_to_num(yours).to(wide).abs().max()) if scale is None else scale
    worst = float(apart.double().max())
    return float("inf") if worst != worst else worst / (scale or 1.0)


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
) -> list[Outcome]:
    """Run a function whole, on one rank and on four; results and gradients have to be the same, or all ranks refuse.

    Args:
        function: What to run; see this file's docstring.
        sample: The graph.
        net: Makes its module; the same seed is set before.
        refused: Part of the message of `NotExact` that every rank has to raise; None if the result has to be exact.
        or_refused: Whether it may be refused instead, under any policy, by all ranks alike.
        policies: Which edges a part computes on; None for both, of which one will do for a refusal.
        against: `whole`, or `alone`: one rank under the watch, for random numbers.
        tolerance: For max |difference| / max |value|.
        calls: How often to call it; the last one counts.
        gradients: Whether to compare them.
    """
    policies = policies or (POLICIES if refused is None else POLICIES[:1])
    torch.manual_seed(1)
    module = None if net is None else net().double()
    everyone = threading.Barrier(NUM_RANKS)
    splits = run_ranks(
        _run_policies, NUM_RANKS, everyone, [""] * NUM_RANKS, function, sample, module, policies, calls, timeout=SECONDS
    )
    if refused is not None:
        for number, policy in enumerate(policies):
            _check_refused([rank[number] for rank in splits], refused, policy)
        return splits[0]
    if against == "whole":
        whole = run_whole(function, sample, copy.deepcopy(module), calls)
        alone = run_part(World.alone(), function, sample, module, "incoming", calls)
        if not (or_refused and isinstance(alone.error, NotExact)):
            _compare("one rank", alone, whole, tolerance, gradients)
    else:
        whole = run_part(World.alone(), function, sample, module, policies[0], calls)
        if or_refused and isinstance(whole.error, NotExact):
            policies = ()
        elif whole.error is not None:
            raise AssertionError(f"one rank: {whole.error}") from whole.error
    for number, policy in enumerate(policies):
        of_all = [rank[number] for rank in splits]
        if or_refused and all(isinstance(outcome.error, NotExact) for outcome in of_all):
            continue
        for outcome in of_all:
            if outcome.error is not None:
                raise AssertionError(f"{policy}: {type(outcome.error).__name__}: {outcome.error}") from outcome.error
        assert len({outcome.counts for outcome in of_all}) == 1
        _compare(policy, _together(of_all), whole, tolerance, gradients)
    return splits[0]


def _together(of_all: list[Outcome]) -> Outcome:
    """One outcome of all ranks'; what belongs to the module has to be the same on each, to the bit."""
    first = of_all[0]
    for outcome in of_all[1:]:
        for name, one in (outcome.state or {}).items():
            assert _equal(one, (first.state or {})[name]), f"ranks have another {name} after the call"
    found = {}
    for name, one in first.gradients.items():
        shares = [outcome.gradients[name] for outcome in of_all]
        if name.startswith("net."):
            assert all(_equal(one, share) for share in shares), f"ranks have another gradient of {name}"
        found[name] = one if name.startswith("net.") else torch.stack(shares).sum(0)
    return replace(first, outputs=merged(of_all), gradients=found)


def _equal(one: Tensor, other: Tensor) -> bool:
    return torch.equal(torch.nan_to_num(one), torch.nan_to_num(other))


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


def _run_policies(
    world: World,
    everyone: threading.Barrier,
    seen: list[str],
    function: Callable[..., Any],
    sample: Sample,
    net: nn.Module | None,
    policies: tuple[EdgePolicy, ...],
    calls: int,
) -> list[Outcome]:
    outcomes = []
    for policy in policies:
        outcomes.append(run_part(world, function, sample, net, policy, calls))
        everyone.wait(2 * SECONDS)
        seen[world.rank] = f"{outcomes[-1].how} {world.domain.num_calls}"
        everyone.wait(2 * SECONDS)
        if len(set(seen)) > 1:  # ranks are no longer at the same call
            raise RuntimeError(f"{policy}: ranks came to different ends: {seen}") from outcomes[-1].error
    return outcomes


def _check_refused(outcomes: list[Outcome], text: str, policy: str) -> None:
    for rank, outcome in enumerate(outcomes):
        if not isinstance(outcome.error, NotExact):
            found = "no error" if outcome.error is None else f"{type(outcome.error).__name__}: {outcome.error}"
            raise AssertionError(f"{policy}, rank {rank}: {found}") from outcome.error
        assert text in str(outcome.error), outcome.error


def _compare(where: str, found: Outcome, whole: Outcome, tolerance: float, gradients: bool = True) -> None:
    if found.error is not None:
        raise AssertionError(f"{where}: {type(found.error).__name__}: {found.error}") from found.error
    assert len(found.outputs) == len(whole.outputs)
    for number, (mine, yours) in enumerate(zip(found.outputs, whole.outputs)):
        assert mine.dtype == yours.dtype, f"{where}: result {number} is {mine.dtype}, not {yours.dtype}"
        apart = difference(mine, yours)
        assert apart <= tolerance, f"{where}: result {number} differs by {apart:.1e}, {mine.shape} and {yours.shape}"
    for name, buffer in (whole.state or {}).items():
        apart = difference((found.state or {})[name], buffer)
        assert apart <= tolerance, f"{where}: buffer {name} differs by {apart:.1e}"
    if not gradients:
        return
    finite = [torch.nan_to_num(one, 0.0, 0.0, 0.0) for one in whole.gradients.values() if one.numel()]
    scale = max([float(one.abs().max()) for one in finite], default=0.0) or 1.0
    for name, one in whole.gradients.items():
        apart = difference(found.gradients[name], one, scale)
        assert apart <= tolerance, f"{where}: gradient of {name} differs by {apart:.1e}"
