"""Differences of a run on ranks from a run on the whole graph: results, gradients, buffers, and calls of layers."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from domainpar.nn.adapt.recorder import Layer, Moment, Seen, When, merged
from domainpar.nn.adapt.trial import OneRank, Run
from domainpar.nn.adapt.verification import LayerCheck, Worst

FLOOR = 1e-3  # of the largest value so far: what cancels to less is judged against this, as it is rounding of that

Moments = dict[tuple[Layer, When], Moment]


def gap(ours: Tensor, theirs: Tensor) -> float:
    """The largest difference; `inf` where one of the two is not finite and the other is something else."""
    if ours.shape != theirs.shape:
        return math.inf
    same = (ours == theirs) | (ours.isnan() & theirs.isnan())
    differences = (ours - theirs).abs().double().nan_to_num(nan=math.inf, posinf=math.inf).masked_fill(same, 0.0)
    return float(differences.max()) if differences.numel() else 0.0


def largest(values: Tensor) -> float:
    """The largest finite size."""
    finite = values[values.isfinite()].abs()
    return float(finite.max()) if finite.numel() else 0.0


@dataclass(frozen=True)
class Differences:
    """Everything that a run leaves, compared with that of a run on the whole graph; relative to the largest values.

    Attributes:
        results: Of each tensor that the module returned.
        gradients: Of each input and parameter; empty if they were not computed.
        state: Of each buffer and parameter after the run.
    """

    results: tuple[Worst, ...]
    gradients: tuple[Worst, ...]
    state: tuple[Worst, ...]


def compare_runs(whole: Run, split: Run) -> Differences:
    """Compare results, gradients and buffers of two runs that came to their ends.

    Args:
        whole: The run on the whole graph, bare or on one rank; the backward pass of a bare one runs here.
        split: The run on ranks.
    """
    theirs, ours = whole.ranks[0], [rank.results() for rank in split.ranks]
    if any(len(tensors) != len(theirs.results()) for tensors in ours):
        results: tuple[Worst, ...] = (Worst(math.inf, "number of results"),)
    else:
        results = tuple(
            _compare_result(f"result {number}", one, ranks)
            for number, (one, *ranks) in enumerate(zip(theirs.results(), *ours))
        )
    comparable = all(result.difference < math.inf for result in results)
    if comparable and split.ranks[0].gradients and not theirs.gradients:
        theirs.learn([merged(ranks) for ranks in zip(*ours)])
    gradients = tuple(_compare_gradients(theirs, split)) if comparable else ()
    return Differences(results, gradients, tuple(_compare_state(theirs, split)))


def _compare_result(name: str, whole: Seen, ranks: Sequence[Seen]) -> Worst:
    whole, split = merged([whole]), merged(ranks)
    if problem := split.problem or whole.problem:
        return Worst(math.inf, name, problem)
    if split.dtype is not whole.dtype:
        return Worst(math.inf, name, f"{split.dtype} in place of {whole.dtype}")
    if split.value.shape != whole.value.shape:
        return Worst(math.inf, name, f"shape {tuple(split.value.shape)} in place of {tuple(whole.value.shape)}")
    if split.dim is None and any(gap(seen.value, split.value) for seen in ranks):
        return Worst(math.inf, name, "ranks differ")
    return Worst(gap(split.value, whole.value) / (largest(whole.value) or 1.0), name)


def _compare_gradients(whole: OneRank, split: Run) -> Iterator[Worst]:
    """Those of inputs and parameters: the whole's against the sum over ranks, which is the same on all."""
    if not split.ranks[0].gradients:
        return
    floor = FLOOR * max(map(largest, whole.gradients.values()), default=0.0)
    for name, theirs in whole.gradients.items():
        summed = [rank.summed[name] for rank in split.ranks if rank.summed is not None and name in rank.summed]
        if any(gap(tensor, summed[0]) for tensor in summed):
            yield Worst(math.inf, name, "ranks differ")
        ours = summed[0] if summed else torch.stack([rank.gradients[name] for rank in split.ranks]).sum(0)
        yield Worst(gap(ours, theirs) / (max(largest(theirs), floor) or 1.0), name)


def _compare_state(whole: OneRank, split: Run) -> Iterator[Worst]:
    """Buffers and parameters: the whole's against those of each rank."""
    state, ranks = whole.state(), [rank.state() for rank in split.ranks]
    floor = FLOOR * max(map(largest, state.values()), default=0.0)
    for name, theirs in state.items():
        size = max(gap(ours[name], theirs) for ours in ranks) / (max(largest(theirs), floor) or 1.0)
        differ = any(gap(ours[name], ranks[0][name]) for ours in ranks)
        yield Worst(math.inf if differ else size, name, "ranks differ" if differ else "")


class Difference(NamedTuple):
    """Difference of the arguments or the result of a layer, None if nothing was compared; notes; their rows."""

    size: float | None
    note: str
    rows: str = ""


class Comparison:
    """Compares the record of layers, from the first call on; remembers how large numbers were so far."""

    def __init__(self) -> None:
        self._largest = 0.0

    def of(self, whole: Sequence[Seen], ranks: Sequence[Sequence[Seen]]) -> Difference:
        """The largest difference of some tensors from those that ranks saw in their place."""
        if any(len(seen) != len(whole) for seen in ranks):
            return Difference(math.inf, "another number of tensors")
        if not whole:
            return Difference(None, "not compared: no tensors")
        each = [self._of_one(merged([one]), [seen[at] for seen in ranks]) for at, one in enumerate(whole)]
        sizes = [difference.size for difference in each if difference.size is not None]
        notes, rows = _listed(one.note for one in each), _listed(one.rows for one in each)
        return Difference(max(sizes, default=None), notes, rows)

    def _of_one(self, whole: Seen, ranks: Sequence[Seen]) -> Difference:
        split = merged(ranks)
        if problem := split.problem or whole.problem:
            return Difference(None, f"not compared: {problem}", split.rows)
        size = largest(whole.value)
        self._largest = max(self._largest, size)
        scale = max(size, FLOOR * self._largest) or 1.0
        if split.value.shape != whole.value.shape:
            shapes = f"shape {tuple(split.value.shape)} in place of {tuple(whole.value.shape)}"
            return Difference(math.inf, shapes, split.rows)
        note = "in less than float64" if whole.coarse else ""
        if split.dim is None:
            return Difference(max(gap(seen.value, whole.value) for seen in ranks) / scale, note, split.rows)
        own = gap(split.value, whole.value)
        of_copies = max(_gap_of_copies(seen, split, whole.value) for seen in ranks)
        if of_copies > own * 2 and own <= 1e-12 * scale < of_copies:
            note = "copies of other ranks' rows differ"
        return Difference(max(own, of_copies) / scale, note, split.rows)


def _gap_of_copies(seen: Seen, split: Seen, theirs: Tensor) -> float:
    if seen.copies is None or seen.keys_of_copies is None or seen.dim is None:
        return 0.0
    places = torch.searchsorted(split.keys, seen.keys_of_copies).clamp(max=max(len(split.keys) - 1, 0))
    return gap(seen.copies, theirs.index_select(seen.dim, places))


def _listed(texts: Iterable[str]) -> str:
    return ", ".join(dict.fromkeys(text for text in texts if text))


def compare_layers(whole: Run, split: Run, tolerance: float) -> tuple[tuple[LayerCheck, ...], LayerCheck | None]:
    """All calls of all layers, inner ones first, and the one in whose own code the first difference arose."""
    bare, comparison = whole.ranks[0], Comparison()
    by_rank = [_by_call(rank) for rank in split.ranks]
    rows: list[LayerCheck] = []
    first = None
    for at, moment in enumerate(bare.recorder.moments):
        difference = _compare_moment(comparison, moment, by_rank, split.failure is not None)
        check = _check(bare, moment.layer, difference)
        if moment.when == "made":
            rows.append(check)
        if first is None and difference.size is not None and not difference.size <= tolerance:
            first = _blamed(bare, bare.recorder.moments[: at + 1], check)
    known = _by_call(bare)
    layers = dict.fromkeys(layer for moments in by_rank for layer, when in moments if when == "made")
    extra = Difference(math.inf, "called where the graph is split only")
    rows_of_extra = [_check(bare, layer, extra) for layer in layers if (layer, "made") not in known]
    return (*rows, *rows_of_extra), first or next(iter(rows_of_extra), None)


def _by_call(rank: OneRank) -> Moments:
    return {(moment.layer, moment.when): moment for moment in rank.recorder.moments}


def _check(bare: OneRank, layer: Layer, difference: Difference) -> LayerCheck:
    return replace(bare.call_of(layer), difference=difference.size, note=difference.note, rows=difference.rows)


def _compare_moment(comparison: Comparison, moment: Moment, by_rank: Sequence[Moments], cut_short: bool) -> Difference:
    key = (moment.layer, moment.when)
    ranks = [moments[key] for moments in by_rank if key in moments]
    if len(ranks) == len(by_rank):
        return comparison.of(moment.seen, [rank.seen for rank in ranks])
    if cut_short:
        return Difference(None, "not compared: not reached")
    return Difference(math.inf, f"called on {len(ranks)} of {len(by_rank)} ranks")


def _blamed(bare: OneRank, moments: Sequence[Moment], check: LayerCheck) -> LayerCheck:
    """The layer whose code ran when a difference first showed: that which gave a wrong value, not that which got it."""
    last = moments[-1]
    if last.when == "left":
        return replace(check, note="which changes what it was given")
    if last.when == "made":
        inner = [moment.layer for moment in moments if moment.inside == last.layer and moment.when == "made"]
        return replace(check, note=f"in its own code, after it called {bare.call_of(inner[-1])}") if inner else check
    if last.inside is None:
        return replace(check, note="in the arguments themselves")
    return _check(bare, last.inside, Difference(check.difference, f"in its own code, before it calls {check}"))
