"""Does a model give on a split graph what it gives on the whole one? If not: in which layer does it first differ?

The watch over a forward pass sees torch calls. It does not see Python: a counter in a global, what was
kept from an earlier call, the number of a rank. This is the look at the results themselves, on a small graph, before a
long run.
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
import math
import threading
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from domainpar.nn.adapt.parallelize import Parallel, parallelize
from domainpar.nn.adapt.part import GraphPart, split_graph
from domainpar.nn.adapt.rows import UNKNOWN, NotExact, Rows, mark, rows_of, unwatched
from domainpar.nn.adapt.watch import Watch, watching
from domainpar.parallel.threads import Switchboard, ThreadTransport
from domainpar.parallel.transport import RanksFailed
from domainpar.parallel.world import World
from domainpar.plan import EdgePolicy, IntArray

SECONDS_TO_WAIT = 120.0  # of a rank for the others: a small graph, but any model
FLOOR = 1e-3  # of the largest value so far: what cancels to less is judged against this, as it is rounding of that
COARSE = (torch.float32, torch.float16, torch.bfloat16, torch.complex64)

Inputs = Callable[[GraphPart], Any]
When = Literal["given", "made", "left"]


@dataclass(frozen=True)
class LayerCheck:
    """One call of one layer, whole and split.

    Attributes:
        name: The layer's name in the model, as in `named_modules`; empty for the model itself.
        kind: Its class.
        number: Which of its calls, from 1.
        difference: Of its result: the largest, relative to the largest value, `inf` where shapes or calls differ; None
            if it was not compared.
        note: Why not, or where in the layer.
        rows: What its result has rows of: nodes, edges, graph.
        mode: `eval` if the model was set to evaluation for this comparison, else empty.
    """

    name: str
    kind: str
    number: int
    difference: float | None
    note: str = ""
    rows: str = ""
    mode: str = ""

    def __str__(self) -> str:
        which = f", call {self.number}" if self.number > 1 else ""
        return f"{self.name or 'the model'} ({self.kind}{which})"


class Worst(NamedTuple):
    """The parameter or buffer that differs most, relative to its largest value."""

    difference: float
    name: str


@dataclass(frozen=True)
class Verification:
    """What came of running a model whole and split; print it.

    Attributes:
        exact: Whether results, gradients and buffers agree within the tolerance.
        rows: Every call of every layer, inner ones before the ones they are part of.
        first_difference: The layer in whose code the two first differ, None if in none: what follows it may be right
            and only have been given wrong values.
        refused: Why the model has no exact form (`NotExact`), None if it was not refused.
        failed: What else the model raised on the split graph, and where; None if nothing.
        gradients: The worst of the parameters' gradients; None if there are none or they were not compared.
        buffers: The worst of the buffers after the pass, such as running means; None if there are none.
        exchanges: How often ghosts were filled in one forward pass.
        sums: How often something was summed over ranks in one forward pass.
        tolerance: What differences were judged by.
        ranks: Which ranks it was split over, in words.
        remarks: What else there is to know, a sentence each.
    """

    exact: bool
    rows: tuple[LayerCheck, ...]
    first_difference: LayerCheck | None = None
    refused: str | None = None
    failed: str | None = None
    gradients: Worst | None = None
    buffers: Worst | None = None
    exchanges: int = 0
    sums: int = 0
    tolerance: float = 0.0
    ranks: str = ""
    remarks: tuple[str, ...] = ()

    def check(self) -> Verification:
        """Return this if the model is exact.

        Raises:
            NotExact: If it was refused.
            RuntimeError: If it is not exact; the text is the whole table.
        """
        if self.refused is not None:
            raise NotExact(self.refused)
        if not self.exact:
            raise RuntimeError(str(self))
        return self

    @property
    def conclusion(self) -> str:
        """What was found, in one line."""
        first = self.first_difference
        if first is not None:
            where = f", {first.note}" if first.note else ""
            then = "".join(
                f" Behind it the model {what}: {text}"
                for what, text in (("is refused", self.refused), ("fails", self.failed))
                if text is not None
            )
            return f"not exact: the first difference, {_number(first.difference)}, is in {first}{where}.{then}"
        if self.refused is not None:
            return f"refused: {self.refused}"
        if self.failed is not None:
            return f"not exact: it fails where the graph is split: {self.failed}"
        for what, worst in (("gradient", self.gradients), ("buffer", self.buffers)):
            if worst is not None and not worst.difference <= self.tolerance:
                by = _number(worst.difference)
                return f"not exact: all layers agree, but the {what} of {worst.name} differs by {by}."
        if not self.exact:
            return "not known: the model returns nothing that could be compared."
        gradients = f", gradients too ({_number(self.gradients.difference)})" if self.gradients else ""
        return (
            f"exact on {self.ranks}: no layer differs by more than {self.tolerance:g}{gradients}; "
            f"{self.exchanges} exchanges and {self.sums} sums over ranks a forward pass."
        )

    @property
    def advice(self) -> str:
        """What to do next, in one line."""
        if self.exact:
            return "Next: domainpar.parallelize(model, world)."
        if self.first_difference is not None and "arguments" in self.first_difference.note:
            return "Next: look at `inputs`: rows must be taken by part.nodes and part.edges from tensors of all rows."
        if self.first_difference is not None or self.failed is not None:
            where = self.first_difference or "the layer that failed"
            return (
                f"Next: look in the code of {where} for what torch cannot see: globals, counters and what it "
                "kept from an earlier call, .data, numpy, ids of ranks, threads or processes. If it only calls torch "
                "functions, the fault is ours: send us this table."
            )
        if self.refused is not None:
            return "Next: change the layer as said, and verify again."
        if self.gradients is not None and not self.gradients.difference <= self.tolerance:
            return "Next: look for .data, .detach(), hooks and an autograd.Function of your own on the way back to it."
        return "Next: look at where the model changes its buffers, or what it returns."

    def __str__(self) -> str:
        lines = [("layer", "class", "rows", "difference", "")]
        lines += [
            (_name(row), row.kind, row.rows, _number(row.difference), self._pointer(row) or row.note)
            for row in self.rows
        ]
        widths = [max(len(line[at]) for line in lines) for at in range(4)]
        table = [
            "  ".join([*(text.ljust(width) for text, width in zip(line, widths)), line[4]]).rstrip() for line in lines
        ]
        return "\n".join([*table, *self.remarks, self.conclusion, self.advice])

    def _pointer(self, row: LayerCheck) -> str:
        first = self.first_difference
        if first is None or _key(row) != _key(first):
            return ""
        notes = dict.fromkeys(note for note in (first.note, row.note) if note)
        return ", ".join(["<- first difference", *notes])


def verify(
    module: nn.Module,
    graph: Any,
    parts: int = 3,
    *,
    inputs: Inputs | None = None,
    edges: EdgePolicy = "incoming",
    backward: bool = True,
    tolerance: float = 1e-10,
    seed: int = 0,
) -> Verification:
    """Run a model whole and split over threads of this process, and compare every call of every layer.

    Copies of it run in float64 on the CPU; the model itself is left as it is. Nodes are dealt to parts at random, which
    no real split does, so that as many edges as can be are cut; with more than two parts there is one rank more, which
    owns nothing. A model that drops numbers at random, which torch draws in another way, is compared with itself on one
    rank, and in evaluation with the module alone.

    Args:
        module: The model, in the mode in which it is to be compared.
        graph: A PyG `Data`, or `(edge_index, num_nodes)`. Of a `Data`, x, pos, batch, y, z, node_* and *_mask have a
            row for each node, edge_* one for each edge.
        parts: Parts with nodes.
        inputs: Makes the model's arguments from a part, with part.nodes(x) and so on: a tuple, a dictionary of them by
            name, or the only one. Called for the whole graph as one part, then on each rank. None: the fields of
            `graph` that `forward` names, or `graph` itself if the only argument is called data or batch.
        edges: As for `split_graph`.
        backward: Whether to compare gradients too, of a sum of the results with weights of all sizes.
        tolerance: The largest relative difference that is rounding.
        seed: Of the parts of nodes and of dropout.

    Returns:
        The comparison; `.check()` raises if the model is not exact.

    Raises:
        ValueError: If arguments cannot be made from the graph.
        Exception: What the module raises on the whole graph.
    """
    module = module.module if isinstance(module, Parallel) else module
    edge_index, num_nodes = _graph(graph)
    if parts < 1:
        raise ValueError(f"a graph cannot be split into {parts} parts; pass 1 or more.")
    if any(isinstance(one, (UninitializedParameter, UninitializedBuffer)) for one in _state(module)):
        raise ValueError("the module has parameters whose size is not known yet; run it once, so that they get it.")
    drawn = torch.randint(0, parts, (num_nodes,), generator=torch.Generator().manual_seed(seed))
    trial = _Trial(
        module, edge_index, num_nodes, inputs or _from_data(module, graph), edges, backward, seed, drawn.numpy(), parts
    )
    with _on_our_terms():
        return _verified(trial, tolerance)


def _verified(trial: _Trial, tolerance: float) -> Verification:
    bare, draws = trial.bare()
    if not draws:
        return _compared(trial, bare, lambda: trial.bare()[0], tolerance)
    remark = "It draws random numbers: compared with itself on one rank"
    alone = trial.split(1)
    if isinstance(alone.error, NotExact):
        return Verification(False, (), refused=str(alone.error), tolerance=tolerance, ranks=trial.in_words)
    alone.raise_error()
    found = _compared(trial, alone, lambda: trial.split(1), tolerance)
    calm = replace(trial, mode="eval")
    bare, draws = calm.bare()
    if draws:
        return replace(found, remarks=(*found.remarks, f"{remark} only, as it draws them in evaluation too."))
    remark = f"{remark}; in evaluation (eval) with the module alone."
    return _both(_compared(calm, bare, lambda: calm.bare()[0], tolerance), found, remark)


def _both(calm: Verification, found: Verification, remark: str) -> Verification:
    """The comparison in evaluation, then the one in training."""
    worst = [
        max((one for one in pair if one is not None), default=None)
        for pair in ((calm.gradients, found.gradients), (calm.buffers, found.buffers))
    ]
    return replace(
        found,
        exact=calm.exact and found.exact,
        rows=calm.rows + found.rows,
        first_difference=calm.first_difference or found.first_difference,
        refused=calm.refused or found.refused,
        failed=calm.failed or found.failed,
        gradients=worst[0],
        buffers=worst[1],
        remarks=(*dict.fromkeys([*calm.remarks, *found.remarks, remark]),),
    )


# What layers were given and what they made


class _Layer(NamedTuple):
    """One call of a layer."""

    name: str
    number: int


@dataclass(frozen=True)
class _Seen:
    """A tensor as one rank saw it.

    Attributes:
        value: Its values, of the rows that this rank counts, float64.
        rows: What its rows are; `graph` if it is the same on every rank.
        dim: Where the rows lie; None if it has none that are dealt.
        keys: Of each row.
        copies: Rows that another rank counts and this one computes with.
        keys_of_copies: Of each of them.
        problem: Why it cannot be compared; empty if it can.
        coarse: Whether it is of less than float64.
    """

    value: Tensor
    rows: str = "graph"
    dim: int | None = None
    keys: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int64))
    copies: Tensor | None = None
    keys_of_copies: Tensor | None = None
    problem: str = ""
    coarse: bool = False


class _Moment(NamedTuple):
    """What was seen when a layer was called, had made its result, or left its arguments behind."""

    layer: _Layer
    when: When
    inside: _Layer | None
    seen: list[_Seen]


class _Recorder:
    """Writes down what all layers of a module are given and make, in the order of events."""

    def __init__(self, module: nn.Module) -> None:
        self.kinds = {name: type(child).__name__ for name, child in module.named_modules()}
        self.moments: list[_Moment] = []
        self.running: list[_Layer] = []
        self._calls: Counter[str] = Counter()
        self._hooks = []
        for name, child in module.named_modules():
            self._hooks.append(child.register_forward_pre_hook(partial(self._called, name), with_kwargs=True))
            self._hooks.append(child.register_forward_hook(partial(self._returns, name), with_kwargs=True))

    def stop(self) -> None:
        """Write down no more: what is recomputed in backward was seen before."""
        for hook in self._hooks:
            hook.remove()

    def _called(self, name: str, _: nn.Module, args: Any, kwargs: Any) -> None:
        self._calls[name] += 1
        inside = self.running[-1] if self.running else None
        self.running.append(_Layer(name, self._calls[name]))
        self._write("given", inside, (args, kwargs))

    def _returns(self, name: str, _: nn.Module, args: Any, kwargs: Any, result: Any) -> None:
        while self.running[-1].name != name:  # one whose error its caller caught
            self.running.pop()
        inside = self.running[-2] if len(self.running) > 1 else None
        self._write("made", inside, result)
        self._write("left", inside, (args, kwargs))
        self.running.pop()

    def _write(self, when: When, inside: _Layer | None, value: Any) -> None:
        watch = watching()
        with unwatched(), torch.no_grad():
            seen = [_see(tensor, watch) for tensor in _tensors(value)]
        self.moments.append(_Moment(self.running[-1], when, inside, seen))

    def result(self) -> list[_Seen]:
        """What the module itself made."""
        return next(moment.seen for moment in self.moments if moment.layer.name == "" and moment.when == "made")


def _tensors(value: Any) -> Iterator[Tensor]:
    """The tensors in anything that layers hand each other, always in the same order."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)
    elif isinstance(value, Mapping):
        yield from _tensors(tuple(value.values()))
    elif _is_data(value):
        yield from _tensors(value.to_dict())
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        yield from _tensors(tuple(getattr(value, one.name) for one in dataclasses.fields(value)))


def _is_data(value: Any) -> bool:
    return hasattr(value, "to_dict") and hasattr(value, "edge_index")


def _see(tensor: Tensor, watch: Watch | None) -> _Seen:
    coarse = tensor.dtype in COARSE
    if tensor.layout is not torch.strided:
        return _Seen(torch.zeros(0), problem="a sparse tensor")
    if watch is None:
        return _Seen(_numbers(tensor), coarse=coarse)
    try:
        rows = watch.rows(tensor)
    except NotExact:
        return _Seen(torch.zeros(0), problem="nobody knows what its rows are")
    if rows is None:
        return _Seen(_numbers(tensor), coarse=coarse)
    if rows.names is None:
        return replace(_see_rows(tensor, rows, watch), coarse=coarse)
    numbered = {id(names.of): names.of for names in rows.names}
    if not numbered.keys() <= {id(watch.part.node_axis), id(watch.part.edge_axis)} or len(numbered) != 1:
        return _Seen(torch.zeros(0), rows.axis.name, problem="numbers of rows that were made inside the model")
    of_nodes = id(watch.part.node_axis) in numbered
    return _see_rows((watch.part.local_ids if of_nodes else watch.part.edge_axis.keys)[tensor], rows, watch)


def _see_rows(tensor: Tensor, rows: Rows, watch: Watch) -> _Seen:
    axis, plan, dim = rows.axis, watch.part.plan, rows.dim
    if axis is watch.part.node_axis:
        seen = _Seen(_numbers(tensor.narrow(dim, 0, plan.num_owned)), axis.name, dim, axis.keys)
        if not rows.fresh or tensor.size(dim) != plan.num_local:
            return seen
        ghosts = _numbers(tensor.narrow(dim, plan.num_owned, plan.num_ghosts))
        return replace(seen, copies=ghosts, keys_of_copies=watch.part.local_ids[plan.num_owned :])
    if axis.counted is None:
        return _Seen(_numbers(tensor), axis.name, dim, axis.keys)
    ours, others = axis.counted.nonzero().view(-1), (~axis.counted).nonzero().view(-1)
    seen = _Seen(_numbers(tensor.index_select(dim, ours)), axis.name, dim, axis.keys[ours])
    return replace(seen, copies=_numbers(tensor.index_select(dim, others)), keys_of_copies=axis.keys[others])


def _numbers(tensor: Tensor) -> Tensor:
    tensor = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return tensor.detach().to(torch.float64, copy=True)


def _merged(ranks: Sequence[_Seen]) -> _Seen:
    """The tensor of the whole graph, its rows in the order of their keys, from what ranks counted of it."""
    first = ranks[0]
    problem = next((seen.problem for seen in ranks if seen.problem), "")
    if problem or (len(ranks) == 1 and first.dim is None):
        return replace(first, problem=problem)
    if any((seen.rows, seen.dim) != (first.rows, first.dim) for seen in ranks):
        return replace(first, problem="its rows are not the same kind of rows on every rank")
    if first.dim is None:
        return first
    keys, order = torch.cat([seen.keys for seen in ranks]).sort()
    if len({_without(seen.value.shape, first.dim) for seen in ranks}) > 1:
        return replace(first, value=first.value.new_zeros(0))
    value = torch.cat([seen.value for seen in ranks], first.dim).index_select(first.dim, order)
    return _Seen(value, first.rows, first.dim, keys, coarse=first.coarse)


def _without(shape: torch.Size, dim: int) -> tuple[int, ...]:
    return tuple(shape[:dim]) + tuple(shape[dim + 1 :])


# Comparing


class _Found(NamedTuple):
    """Difference of what a layer was given or made, None if nothing was compared; notes; what its rows are."""

    difference: float | None
    note: str
    rows: str


class _Comparison:
    """Compares what was seen, from the first call on; remembers how large numbers were so far."""

    def __init__(self) -> None:
        self.largest = 0.0

    def of(self, whole: Sequence[_Seen], ranks: Sequence[Sequence[_Seen]]) -> _Found:
        if any(len(seen) != len(whole) for seen in ranks):
            return _Found(math.inf, "another number of tensors", "")
        if not whole:
            return _Found(None, "not compared: no tensors", "")
        found = [self._tensor(_merged([one]), [seen[at] for seen in ranks]) for at, one in enumerate(whole)]
        known = [one.difference for one in found if one.difference is not None]
        note, rows = (
            ", ".join(dict.fromkeys(text for text in texts if text)) for texts in list(zip(*found, strict=True))[1:]
        )
        return _Found(max(known, default=None), note, rows)

    def _tensor(self, whole: _Seen, ranks: Sequence[_Seen]) -> _Found:
        split = _merged(ranks)
        if problem := split.problem or whole.problem:
            return _Found(None, f"not compared: {problem}", split.rows)
        theirs = whole.value
        largest = _largest(theirs)
        self.largest = max(self.largest, largest)
        scale = max(largest, FLOOR * self.largest) or 1.0
        note = "in less than float64" if whole.coarse else ""
        if split.value.shape != theirs.shape:
            seen, expected = tuple(split.value.shape), tuple(theirs.shape)
            return _Found(math.inf, f"shape {seen} in place of {expected}", split.rows)
        if split.dim is None:
            return _Found(max(_gap(seen.value, theirs) for seen in ranks) / scale, note, split.rows)
        gaps = [_gap(split.value, theirs), *(_gap_of_copies(seen, split, theirs) for seen in ranks)]
        if max(gaps) > gaps[0] * 2 and gaps[0] <= 1e-12 * scale < max(gaps):
            note = "copies of other ranks' rows differ"
        return _Found(max(gaps) / scale, note, split.rows)


def _gap(ours: Tensor, theirs: Tensor) -> float:
    """The largest difference; `inf` where one of the two is not finite and the other is something else."""
    if ours.shape != theirs.shape:
        return math.inf
    same = (ours == theirs) | (ours.isnan() & theirs.isnan())
    gap = (ours - theirs).abs().nan_to_num(nan=math.inf, posinf=math.inf).masked_fill(same, 0.0)
    return float(gap.max()) if gap.numel() else 0.0


def _gap_of_copies(seen: _Seen, split: _Seen, theirs: Tensor) -> float:
    if seen.copies is None or seen.keys_of_copies is None or seen.dim is None:
        return 0.0
    places = torch.searchsorted(split.keys, seen.keys_of_copies).clamp(max=max(len(split.keys) - 1, 0))
    return _gap(seen.copies, theirs.index_select(seen.dim, places))


def _compared(trial: _Trial, whole: _Run, again: Callable[[], _Run], tolerance: float) -> Verification:
    split = trial.split(trial.num_ranks)
    rows, first = _compare_layers(whole, split, tolerance, trial.mode)
    refused = str(split.error) if isinstance(split.error, NotExact) else None
    failed = None if split.error is None or refused else split.how_it_failed(split.error)
    remarks = []
    if first is not None:
        _, unsteady = _compare_layers(whole, again(), tolerance, trial.mode)
        if unsteady is not None:
            remarks.append(f"Two runs on the whole graph differ as well, first in {unsteady}: it is not a function.")
        if any("in less than float64" in row.note for row in rows):
            remarks.append("Some layers compute in less than float64 whatever they are given: that may be rounding.")
    gradients = buffers = None
    comparable = False
    if split.error is None:
        result = [_merged(ranks) for ranks in zip(*(one.result() for one in split.recorders))]
        comparable = any(not one.problem for one in result)
        if trial.backward and first is None:
            gradients = _compare_gradients(whole, split, result)
        buffers = _compare_buffers(whole, split)
    exact = (
        comparable
        and first is None
        and all(worst is None or worst.difference <= tolerance for worst in (gradients, buffers))
    )
    part = split.parts[0]
    exchanges, sums = (0, 0) if part is None else split.counts[0]
    return Verification(
        exact,
        rows,
        first,
        refused,
        failed,
        gradients,
        buffers,
        exchanges,
        sums,
        tolerance,
        trial.in_words,
        tuple(remarks),
    )


def _compare_layers(
    whole: _Run, split: _Run, tolerance: float, mode: str
) -> tuple[tuple[LayerCheck, ...], LayerCheck | None]:
    """All calls of all layers, and the one in whose code the first difference is."""
    by_rank = [{(one.layer, one.when): one for one in recorder.moments} for recorder in split.recorders]
    comparison, rows, first = _Comparison(), list[LayerCheck](), None
    moments = whole.recorders[0].moments
    for at, moment in enumerate(moments):
        ranks = [moments_of[key] for moments_of in by_rank if (key := (moment.layer, moment.when)) in moments_of]
        if len(ranks) == len(by_rank):
            found = comparison.of(moment.seen, [one.seen for one in ranks])
        elif split.error is not None:
            found = _Found(None, "not compared: not reached", "")
        else:
            found = _Found(math.inf, f"called on {len(ranks)} of {len(by_rank)} ranks", "")
        check = whole.check(moment.layer, found, mode)
        if moment.when == "made":
            rows.append(check)
        if first is None and found.difference is not None and not found.difference <= tolerance:
            first = _blamed(whole, moments[: at + 1], check)
    made = {(one.layer, one.when) for one in moments}
    extra = [one for moments_of in by_rank for key, one in moments_of.items() if key not in made and one.when == "made"]
    for layer in dict.fromkeys(one.layer for one in extra):
        rows.append(whole.check(layer, _Found(math.inf, "called where the graph is split only", ""), mode))
        first = first or rows[-1]
    return tuple(rows), first


def _blamed(whole: _Run, moments: Sequence[_Moment], check: LayerCheck) -> LayerCheck:
    """The layer whose code ran when a difference first showed: that which gave a wrong value, not that which got it."""
    last = moments[-1]
    note = check.note
    if last.when == "left":
        note = "which changes what it was given"
    elif last.when == "given" and last.inside is None:
        note = "in the arguments themselves"
    elif last.when == "given" and last.inside is not None:
        note = f"in its own code, before it calls {check}"
        check = whole.check(last.inside, _Found(check.difference, "", ""), check.mode)
    else:
        inner = [one.layer for one in moments if one.inside == last.layer and one.when == "made"]
        if inner:
            note = f"in its own code, after it called {whole.check(inner[-1], _Found(None, '', ''), '')}"
    return replace(check, note=note)


def _compare_gradients(whole: _Run, split: _Run, result: list[_Seen]) -> Worst | None:
    """Gradients of all parameters: the whole's against the sum over ranks."""
    if any(one.problem for one in result):
        return None
    if len(whole.recorders[0].result()) != len(result):
        return None
    if not whole.backward_done:
        loss = _loss(whole.results[0], result)
        if loss is None:
            return None
        loss.backward()
    theirs = _gradients(whole.modules[0])
    ours = [_gradients(module) for module in split.modules]
    summed = {name: torch.stack([one[name] for one in ours]).sum(0) for name in theirs}
    return _worst([(name, summed[name], theirs[name]) for name in theirs])


def _compare_buffers(whole: _Run, split: _Run) -> Worst | None:
    pairs = []
    for module in split.modules:
        ours = dict(module.named_buffers())
        pairs += [(name, _numbers(ours[name]), _numbers(one)) for name, one in whole.modules[0].named_buffers()]
    return _worst(pairs)


def _worst(pairs: Iterable[tuple[str, Tensor, Tensor]]) -> Worst | None:
    found = [(name, _gap(ours, theirs), _largest(theirs)) for name, ours, theirs in pairs]
    floor = FLOOR * max((size for *_, size in found), default=0.0)
    return max((Worst(gap / (max(size, floor) or 1.0), name) for name, gap, size in found), default=None)


def _largest(tensor: Tensor) -> float:
    finite = tensor[tensor.isfinite()].abs()
    return float(finite.max()) if finite.numel() else 0.0


def _gradients(module: nn.Module) -> dict[str, Tensor]:
    return {
        name: torch.zeros_like(one) if one.grad is None else _numbers(one.grad)
        for name, one in module.named_parameters()
        if one.requires_grad
    }


def _loss(result: Any, seen: Sequence[_Seen]) -> Tensor | None:
    """A sum of all results with weights that depend on the key of the row, so that they are the same split or not."""
    loss = None
    for tensor, one in zip(_tensors(result), seen, strict=True):
        if not (tensor.requires_grad and tensor.is_floating_point()):
            continue
        first = tensor.flatten() if one.dim is None else tensor.movedim(one.dim, 0)
        table = first.flatten(1) if first.dim() > 1 else first.unsqueeze(1)
        keys = torch.arange(len(table)) if one.dim is None else one.keys
        weights = torch.sin(1.7 * keys.double()[:, None] + 0.9 * torch.arange(table.size(1)) + 0.3)
        added = (table * weights).sum()
        loss = added if loss is None else loss + added
    return loss


# Running


@dataclass
class _Run:
    """One run of a model, whole or on several ranks; lists have an entry for each rank."""

    modules: list[nn.Module]
    recorders: list[_Recorder]
    parts: list[GraphPart | None]
    results: list[Any]
    counts: list[tuple[int, int]]
    backward_done: bool = False
    error: BaseException | None = None
    failed_rank: int = 0

    def check(self, layer: _Layer, found: _Found, mode: str) -> LayerCheck:
        kind = self.recorders[0].kinds[layer.name]
        return LayerCheck(layer.name, kind, layer.number, found.difference, found.note, found.rows, mode)

    def how_it_failed(self, error: BaseException) -> str:
        """Where an error was raised; if by a talk of ranks, also where that rank is which is behind the others."""
        text = f"{self._running_on(self.failed_rank)}: {_in_words(error)}"
        behind = min(range(len(self.recorders)), key=lambda rank: len(self.recorders[rank].moments))
        if _came_from_transport(error) and self._running_on(behind) != self._running_on(self.failed_rank):
            text += f"; rank {behind} was in {self._running_on(behind)} then, where it called for what others did not"
        return text

    def _running_on(self, rank: int) -> str:
        recorder = self.recorders[rank]
        layer = recorder.running[-1] if recorder.running else _Layer("", 1)
        return str(self.check(layer, _Found(None, "", ""), ""))

    def raise_error(self) -> None:
        if self.error is not None:
            raise self.error


@dataclass(frozen=True)
class _Trial:
    """What is run, and on what."""

    module: nn.Module
    edge_index: Tensor
    num_nodes: int
    inputs: Inputs
    edges: EdgePolicy
    backward: bool
    seed: int
    assignment: IntArray
    num_parts: int
    mode: str = ""

    @property
    def num_ranks(self) -> int:
        return self.num_parts + (self.num_parts > 2)

    @property
    def in_words(self) -> str:
        if self.num_parts == 1:
            return "1 rank"
        empty = ", one of which owns nothing" if self.num_parts > 2 else ""
        return f"{self.num_ranks} ranks ({self.edges} edges, nodes dealt at random{empty})"

    def copied(self) -> nn.Module:
        """A copy in float64 on the CPU, tensors that are no parameters or buffers included."""
        module = copy.deepcopy(self.module).cpu().double()
        for child in module.modules():
            for name, value in list(vars(child).items()):
                if isinstance(value, Tensor) and value.is_floating_point():
                    setattr(child, name, value.cpu().double())
        return module.eval() if self.mode == "eval" else module

    def part(self, world: World) -> GraphPart:
        assignment = self.assignment if world.size > 1 else self.assignment * 0
        return split_graph(self.edge_index, self.num_nodes, world, edges=self.edges, partitioner=assignment)

    def arguments(self, part: GraphPart) -> tuple[tuple[Any, ...], dict[str, Any]]:
        made = self.inputs(part)
        args, kwargs = ((), made) if isinstance(made, dict) else (made if isinstance(made, tuple) else (made,), {})
        return _doubled(args), _doubled(kwargs)

    def bare(self) -> tuple[_Run, bool]:
        """The module itself on the whole graph, and whether torch drew random numbers for it."""
        module = self.copied()
        args, kwargs = self.arguments(self.part(World.alone()))
        run = _Run([module], [_Recorder(module)], [None], [None], [(0, 0)])
        torch.manual_seed(self.seed)
        before = torch.get_rng_state()
        try:
            run.results[0] = module(*args, **kwargs)
        except Exception as error:
            error.add_note("This was the whole graph, not split, with a copy of the model in float64 on the CPU.")
            raise
        run.recorders[0].stop()
        return run, not torch.equal(before, torch.get_rng_state())

    def split(self, num_ranks: int) -> _Run:
        """The module on a split graph, forward and backward, up to where it fails."""
        modules = [self.copied() for _ in range(num_ranks)]
        recorders = [_Recorder(module) for module in modules]
        run = _Run(modules, recorders, [None] * num_ranks, [None] * num_ranks, [(0, 0)] * num_ranks, self.backward)

        def work(world: World) -> None:
            rank = world.rank
            parallel = parallelize(modules[rank], world, seed=self.seed)
            part = run.parts[rank] = self.part(world)
            args, kwargs = self.arguments(part)
            result = run.results[rank] = parallel(*args, **kwargs)
            recorders[rank].stop()
            run.counts[rank] = part.num_exchanges, part.num_sums
            world.transport.all_gather(b"")  # every rank to the end of its forward pass, before one fails in backward
            loss = _loss(result, recorders[rank].result()) if self.backward else None
            if loss is not None:
                loss.backward()

        run.error, run.failed_rank = _on_threads(work, num_ranks)
        return run


def _on_threads(work: Callable[[World], None], num_ranks: int) -> tuple[BaseException | None, int]:
    """Run something on ranks that are threads; returns what first went wrong, and on which."""
    switchboard = Switchboard(num_ranks)
    errors: list[tuple[BaseException, int]] = []

    def run(rank: int) -> None:
        torch.set_num_threads(1)
        try:
            work(World.over(ThreadTransport(switchboard, rank, SECONDS_TO_WAIT), domain_size=num_ranks))
        except BaseException as error:
            errors.append((error, rank))
            switchboard.fail(f"rank {rank} failed: {_in_words(error)}")

    ranks = [threading.Thread(target=run, args=(rank,), daemon=True, name=f"rank {rank}") for rank in range(num_ranks)]
    for thread in ranks:
        thread.start()
    for thread in ranks:
        thread.join()
    own = [one for one in errors if not isinstance(one[0], RanksFailed)]  # not what others met because of them
    refused = [one for one in own if isinstance(one[0], NotExact)]
    return next(iter(refused or own or errors), (None, 0))


def _came_from_transport(error: BaseException) -> bool:
    return any("parallel" in Path(frame.filename).parts for frame in traceback.extract_tb(error.__traceback__))


@contextmanager
def _on_our_terms() -> Iterator[None]:
    """Float64 for what models make themselves, one thread, random numbers that nobody misses; all put back."""
    dtype, num_threads = torch.get_default_dtype(), torch.get_num_threads()
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(1)
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        torch.set_default_dtype(dtype)
        torch.set_num_threads(num_threads)


# Arguments


def _graph(graph: Any) -> tuple[Tensor, int]:
    if _is_data(graph):
        return graph.edge_index, int(graph.num_nodes)
    if isinstance(graph, tuple) and len(graph) == 2 and isinstance(graph[0], Tensor):
        return graph[0], int(graph[1])
    raise ValueError(f"a graph is a PyG Data or a tuple (edge_index, num_nodes), not {type(graph).__name__}.")


def _from_data(module: nn.Module, graph: Any) -> Inputs:
    """Arguments for a module from the fields of a `Data` that its forward names."""
    if not _is_data(graph):
        raise ValueError("of (edge_index, num_nodes) no arguments can be made; pass inputs=lambda part: (...).")
    parameters = list(inspect.signature(module.forward).parameters.values())
    fields = {name: value for name, value in graph.to_dict().items() if name != "num_nodes" and value is not None}
    if len(parameters) == 1 and parameters[0].name in ("data", "batch"):
        _check_fields(fields, graph)
        return lambda part: _with_fields(graph, {name: _taken(part, name, one) for name, one in fields.items()})
    named = [one for one in parameters if one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)]
    missing = [one.name for one in named if one.name not in fields and one.default is one.empty]
    if missing:
        raise ValueError(
            f"forward asks for {', '.join(missing)}, the graph has {', '.join(fields)}; "
            "pass inputs, which makes the arguments from a part: inputs=lambda part: (part.nodes(x), part.edge_index)."
        )
    chosen = {one.name: fields[one.name] for one in named if one.name in fields}
    _check_fields(chosen, graph)
    by_name = {one.name for one in named if one.kind is not one.POSITIONAL_ONLY}
    if by_name >= chosen.keys():
        return lambda part: {name: _taken(part, name, one) for name, one in chosen.items()}
    return lambda part: tuple(_taken(part, name, one) for name, one in chosen.items())


def _check_fields(fields: dict[str, Any], graph: Any) -> None:
    num_edges = graph.edge_index.size(1)
    for name, value in fields.items():
        of = _rows_of_field(name)
        expected = {"nodes": int(graph.num_nodes), "edges": num_edges}.get(of)
        if name != "edge_index" and isinstance(value, Tensor) and (not value.dim() or len(value) != expected):
            known = f"are taken for {of}, of which there are {expected}" if expected is not None else "are not known"
            raise ValueError(
                f"the rows of the graph's field {name}, of shape {tuple(value.shape)}, {known}; pass inputs, which "
                "makes the arguments from a part: inputs=lambda part: (part.nodes(x), part.edge_index)."
            )


def _rows_of_field(name: str) -> str:
    if name in ("x", "pos", "batch", "y", "z") or name.startswith("node_") or name.endswith("_mask"):
        return "nodes"
    return "edges" if name.startswith("edge_") else ""


def _taken(part: GraphPart, name: str, value: Any) -> Any:
    if name == "edge_index":
        return part.edge_index
    if not isinstance(value, Tensor):
        return value
    return part.nodes(value) if _rows_of_field(name) == "nodes" else part.edges(value)


def _with_fields(data: Any, fields: dict[str, Any]) -> Any:
    made = copy.copy(data)
    if "num_nodes" in made.to_dict():
        del made["num_nodes"]  # of the whole graph: with it gone, it is asked of the rows
    for name, value in fields.items():
        made[name] = value
    return made


def _doubled(value: Any) -> Any:
    """Arguments in float64, marked as they were."""
    if isinstance(value, Tensor):
        return _doubled_tensor(value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*map(_doubled, value))
    if isinstance(value, (list, tuple)):
        return type(value)(map(_doubled, value))
    if isinstance(value, dict):
        return {name: _doubled(one) for name, one in value.items()}
    return _with_fields(value, _doubled(value.to_dict())) if _is_data(value) else value


def _doubled_tensor(tensor: Tensor) -> Tensor:
    if not tensor.is_floating_point() or tensor.dtype is torch.float64:
        return tensor
    rows = rows_of(tensor)
    made = tensor.detach().double().requires_grad_(tensor.requires_grad)
    return made if rows is UNKNOWN else mark(made, None if rows is None else rows.but())


# Words


def _state(module: nn.Module) -> Iterator[Tensor]:
    yield from module.parameters()
    yield from module.buffers()


def _key(row: LayerCheck) -> tuple[str, int, str]:
    return row.name, row.number, row.mode


def _name(row: LayerCheck) -> str:
    number = f" (call {row.number})" if row.number > 1 else ""
    return f"{row.name or 'the model'}{number}{' in ' + row.mode if row.mode else ''}"


def _number(difference: float | None) -> str:
    return "-" if difference is None else f"{difference:.1e}"


def _in_words(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
