"""Runs a function of torch calls on a whole graph and on parts of it, and compares: `check(function, ...)`.

A function takes what it wants by the names of its arguments: fields of a `Sample`, `src` and `dst` (the two rows of
`edge_index`), `net`, a module made once and given to every rank, and `part`. It knows nothing of ranks.
"""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np
import pytest
import torch
from proving import check_no_rank_holds_all
from torch import Tensor, nn

from domainpar import NotExact, parallelize, split_graph
from domainpar.placed.moves import whole
from domainpar.testing import run_ranks

TOLERANCE = 1e-12
NUM_RANKS = 4
REACH = 2  # of an edge, around a ring of parts one behind the other: each part has nodes that no other one touches
SECONDS = 20.0  # a rank that waits so long for another one has been left alone
NODES = {"x": 0, "z": 0, "v": 0, "u": 0, "series": 1, "batch": 0, "mask": 0, "vectors": 0, "square": 0}
CONSTANTS = ("c", "table")
EDGES = {"e": 0, "w": 0, "kind": 0, "edge_mask": 0, "columns": 1}


@contextmanager
def threads(count):
    """That many threads of torch."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


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


def sums(x: Tensor, src: Tensor, dst: Tensor, e: Tensor) -> Tensor:
    """Sums of edges at the nodes where they end."""
    return x.new_zeros(x.size(0), 4).index_add(0, dst, x[src] * e)


def wide(index: Tensor, like: Tensor) -> Tensor:
    """An index of rows as one of all their numbers."""
    return index.view(-1, 1).expand_as(like)


def seed(number: int) -> None:
    """Seed the generator of CPUs alone: torch.manual_seed also keeps a stack trace for each kind of GPU."""
    torch.default_generator.manual_seed(number)


class WholeGraph:
    """Stands for a part where nothing is split."""

    def __init__(self, edge_index: Tensor) -> None:
        self.edge_index = edge_index

    def nodes(self, x: Tensor, dim: int = 0) -> Tensor:
        return x

    edges = nodes

    def whole(self, x: Tensor) -> Tensor:
        return x


@dataclass
class Left:
    """What a run leaves, all of it whole.

    Attributes:
        results: Tensors and other values that were returned.
        gradients: Of leaves and parameters, by name.
        buffers: Buffers of the module, and its parameters.
        refused: The refusal, None if it came to its end.
        forward: How often ranks exchanged rows, and how often they summed or compared, in the forward pass.
        talks: How often ranks called each other in all.
    """

    results: list[Any] = field(default_factory=list)
    gradients: dict[str, Tensor | None] = field(default_factory=dict)
    buffers: dict[str, Tensor] = field(default_factory=dict)
    refused: NotExact | None = None
    forward: tuple[int, int] = (0, 0)
    talks: int = 0


def flat(value: Any) -> list[Any]:
    """All that is in nested lists, tuples and dictionaries."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        return [item for one in value for item in flat(one)]
    return [value]


def loss_of(results: Sequence[Any]) -> Tensor | None:
    """A number that depends on every number of the results, each in a way of its own; None if none has a gradient."""
    terms = []
    for number, result in enumerate(results):
        if isinstance(result, Tensor) and result.requires_grad and result.numel():
            weights = torch.sin(torch.arange(1.0, 1 + math.prod(result.shape), dtype=torch.float64) + number)
            real = torch.view_as_real(result.resolve_conj()).sum(-1) if result.is_complex() else result
            terms.append((real * weights.view(result.shape).to(real.dtype)).sum())
    return sum(terms[1:], terms[0]) if terms else None


Call = Callable[[Any, Any, Mapping[str, Tensor]], Any]


def run_one(part: Any, call: Call, module: nn.Module | None, leaves: Mapping[str, Tensor], backward: bool) -> Left:
    """Call, learn, and take down what is left."""
    mine = {name: leaf.detach().clone().requires_grad_() for name, leaf in leaves.items()}
    results = flat(call(part, module, mine))
    if backward and (loss := loss_of(results)) is not None:
        loss.backward()
    kept = [whole(one.detach()).clone() if isinstance(one, Tensor) else one for one in results]
    named = {} if module is None else dict(module.named_parameters())
    gradients = {
        name: None if one.grad is None else whole(one.grad.detach()).to_dense().clone()
        for name, one in {**mine, **named}.items()
    }
    state = {} if module is None else {**dict(module.named_buffers()), **named}
    return Left(kept, gradients, {name: whole(one.detach()).clone() for name, one in state.items()})


def on_rank(
    world: Any, modules: Sequence[Any], edge_index: Tensor, owner: Any, call: Call, leaves: Any, backward: bool
) -> Left:
    """The run of one rank."""
    owner = np.asarray(owner, np.int32) if world.size > 1 else np.zeros(len(owner), np.int32)
    part = split_graph(edge_index, len(owner), world, partitioner=owner)
    module = modules[world.rank]
    if module is not None:
        parallelize(module, world)
    forward = (0, 0)

    def counted(part: Any, module: Any, leaves: Any) -> Any:
        nonlocal forward
        before = part.ranks.num_exchanges, part.ranks.num_sums
        result = call(part, module, leaves)
        forward = part.ranks.num_exchanges - before[0], part.ranks.num_sums - before[1]
        return result

    before = world.transport.num_calls
    try:
        left = run_one(part, counted, module, leaves, backward)
    except NotExact as refused:
        left = Left(refused=refused)
    left.forward, left.talks = forward, world.transport.num_calls - before
    return left


def gap(ours: Any, theirs: Any, least: float = 0.0) -> float:
    """The largest difference of two values, relative to the largest number of the second one, or to `least`."""
    if not (isinstance(ours, Tensor) and isinstance(theirs, Tensor)):
        only = ours if theirs is None else theirs if ours is None else None  # no gradient is one of zeros
        alike = not only.any() if isinstance(only, Tensor) else type(ours) is type(theirs) and np.all(ours == theirs)
        return 0.0 if alike else math.inf
    if ours.shape != theirs.shape or ours.dtype != theirs.dtype:
        return math.inf
    if theirs.is_complex():
        return gap(*(torch.view_as_real(one.resolve_conj()) for one in (ours, theirs)), least)
    if not theirs.is_floating_point():
        return 0.0 if torch.equal(ours, theirs) else math.inf
    same = (ours == theirs) | (ours.isnan() & theirs.isnan())
    # Not a plain difference: of two infinities it is no number.
    gaps = (ours.double() - theirs.double()).abs().nan_to_num(nan=math.inf, posinf=math.inf).masked_fill(same, 0.0)
    finite = theirs[theirs.isfinite()].double().abs()
    largest = max(float(finite.max()) if finite.numel() else 0.0, least) or 1.0
    return float(gaps.max()) / largest if gaps.numel() else 0.0


def difference(ours: Left, theirs: Left) -> tuple[float, str]:
    """The largest difference of two runs and where it is: of gradients and buffers relative to all of their kind."""
    if len(ours.results) != len(theirs.results):
        return math.inf, "the number of results"
    found = [(gap(*pair), f"result {number}") for number, pair in enumerate(zip(ours.results, theirs.results))]
    for mine, yours in ((ours.gradients, theirs.gradients), (ours.buffers, theirs.buffers)):
        sizes = [one[one.isfinite()].abs().double() for one in yours.values() if one is not None and one.numel()]
        largest = max((float(one.max()) for one in sizes if one.numel()), default=0.0)
        found += [(gap(mine.get(name), one, largest), name) for name, one in yours.items()]
    return max(found, default=(0.0, ""))


@dataclass
class Runs:
    """Runs of one function: on the whole graph, or on one rank where random numbers are drawn, and on ranks.

    Attributes:
        ranks: The runs of all ranks, by their number.
        whole: What they are compared with; None if it is refused there.
    """

    ranks: dict[int, list[Left]]
    whole: Left | None

    def worst(self) -> tuple[float, str]:
        """The largest difference, and where it is."""
        assert self.whole is not None
        found = [(difference(left, self.whole), size) for size, lefts in self.ranks.items() for left in lefts]
        (off, where), size = max(found)
        return off, f"{where} on {size} ranks"


def runs_of(
    call: Call,
    edge_index: Tensor,
    owner: Sequence[int],
    *,
    module: nn.Module | None = None,
    leaves: Mapping[str, Tensor] | None = None,
    ranks: Sequence[int] = (1, NUM_RANKS),
    against: str = "whole",
    backward: bool = True,
    transport: Any = "threads",
) -> Runs:
    """Run a function of a part, a module and leaves whole and on ranks; all ranks have to make the same calls.

    Args:
        call: The function.
        edge_index, owner: The graph, and the part of each node.
        module: Copied for each run.
        leaves: Whole tensors whose gradients are compared.
        ranks: Numbers of ranks.
        against: What they are compared with: the `whole` graph, one rank (`alone`), or nothing.
        backward: Whether to compute gradients.
        transport: How ranks talk.
    """
    given = (edge_index, owner, call, leaves or {}, backward)

    def on(size: int) -> list[Left]:
        seed(0)
        copies = [copy.deepcopy(module) for _ in range(size)]
        return run_ranks(on_rank, size, copies, *given, timeout=SECONDS, transport=transport)

    found = {size: on(size) for size in ranks}
    for size, lefts in found.items():
        ends = [("a refusal" if left.refused else "a result", *left.forward, left.talks) for left in lefts]
        assert len(set(ends)) == 1, f"{size} ranks came to different ends: {ends}"
    if against == "alone":
        (alone,) = found[1] if 1 in found else on(1)
        return Runs(found, None if alone.refused else alone)
    if not against or all(left.refused for lefts in found.values() for left in lefts):
        return Runs(found, None)
    seed(0)
    return Runs(found, run_one(WholeGraph(edge_index), call, copy.deepcopy(module), leaves or {}, backward))


def calling(function: Callable[..., Any], sample: Sample, calls: int = 1) -> tuple[Call, dict[str, Tensor]]:
    """A function of a sample's fields as one of a part, a module and leaves; and its leaves."""
    wanted = inspect.signature(function).parameters
    tensors = {name: getattr(sample, name) for name in (*NODES, *EDGES, *CONSTANTS) if name in wanted}

    def call(part: Any, module: Any, leaves: Mapping[str, Tensor]) -> Any:
        given: dict[str, Any] = {"edge_index": part.edge_index, "net": module, "part": part, **tensors, **leaves}
        given |= {name: part.nodes(given[name], NODES[name]) for name in tensors if name in NODES}
        given |= {name: part.edges(given[name], EDGES[name]) for name in tensors if name in EDGES}
        if "src" in wanted or "dst" in wanted:
            given["src"], given["dst"] = part.edge_index[0], part.edge_index[1]
        for _ in range(calls):
            result = function(*(given[name] for name in wanted))
        return result

    return call, {name: one for name, one in tensors.items() if one.is_floating_point()}


def run(
    function: Callable[..., Any],
    sample: Sample = USUAL,
    *,
    net: Callable[[], nn.Module] | None = None,
    calls: int = 1,
    gradients: bool = True,
    **more: Any,
) -> Runs:
    """Run a function of a sample's fields; arguments as for `check`, others as for `runs_of`."""
    seed(1)
    module = None if net is None else net().double()
    call, leaves = calling(function, sample, calls)
    return runs_of(call, sample.edge_index, sample.assignment, module=module, leaves=leaves, backward=gradients, **more)


def check(
    function: Callable[..., Any],
    sample: Sample = USUAL,
    *,
    refused: str | None = None,
    or_refused: bool = False,
    tolerance: float = TOLERANCE,
    **more: Any,
) -> Runs:
    """Run a function whole, on one rank and on four; results, gradients and buffers have to be the same.

    Args:
        function: What to run; see this file's docstring.
        sample: The graph.
        refused: Part of the message of `NotExact` that each of four ranks has to raise; None if it has to be exact.
        or_refused: Whether it may be refused instead, by all ranks alike.
        tolerance: For max |difference| / max |value|.
        **more: `net` makes its module; the same seed is set before. `calls`: how often to call it, of which the last
            one counts. `against="alone"`: one rank is what others are compared with, for random numbers. `gradients`:
            whether to compute them, too.
    """
    if not sample.tiny:
        check_no_rank_holds_all(sample.edge_index, sample.assignment, NUM_RANKS, "incoming")
    found = run(function, sample, **more)
    said = {size: [str(left.refused or "") for left in lefts] for size, lefts in found.ranks.items()}
    if refused is not None:
        assert all(text and refused in text for text in said[NUM_RANKS]), f"{refused!r} was expected, not {said}"
        assert all(not text or refused in text for text in said[1])
    elif not or_refused:
        assert not any(map(any, said.values())), said
    found.ranks = {size: lefts for size, lefts in found.ranks.items() if lefts[0].refused is None}
    if found.ranks and found.whole is not None:
        off, where = found.worst()
        assert off <= tolerance, f"{where} differs by {off:.1e}"
    return found


def check_error(function: Callable[..., Any], **more: Any) -> None:
    """A function fails on the whole graph, and with the same kind of error on any number of ranks."""
    call, leaves = calling(function, USUAL)
    of_torch: type[Exception] | None = None
    try:
        run_one(WholeGraph(USUAL.edge_index), call, None, leaves, True)
    except Exception as error:
        of_torch = type(error)
    assert of_torch is not None, "torch does it on the whole graph"
    for size in (1, NUM_RANKS):
        with pytest.raises(of_torch):
            run(function, ranks=(size,), **more)


def cases(them: Mapping[str, Any], *, of_slow: bool = False) -> pytest.MarkDecorator:
    """Parametrise a test with functions, or with functions and what else `check` takes, by name."""
    marks = [pytest.mark.slow] if of_slow else []
    params = [
        pytest.param(*(case if isinstance(case, tuple) else (case, {})), id=name, marks=marks)
        for name, case in them.items()
    ]
    return pytest.mark.parametrize(("function", "more"), params)


def refusals(them: Mapping[str, Any]) -> pytest.MarkDecorator:
    """Parametrise a test with functions and the text they are refused with."""
    params = [pytest.param(*(case if len(case) == 3 else (*case, {})), id=name) for name, case in them.items()]
    return pytest.mark.parametrize(("function", "text", "more"), params)
