"""All calls of all layers compared, and the layer in whose own code the first difference arose."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

from domainpar.nn.adapt.verifying.differences import Comparison, Found
from domainpar.nn.adapt.verifying.recording import Layer, Moment, When
from domainpar.nn.adapt.verifying.report import LayerCheck
from domainpar.nn.adapt.verifying.running import OneRank, Run

Moments = dict[tuple[Layer, When], Moment]


def compare_layers(whole: Run, split: Run, tolerance: float) -> tuple[tuple[LayerCheck, ...], LayerCheck | None]:
    """All calls of all layers, and the one in whose code the first difference is."""
    by_rank = [_by_call(rank) for rank in split.ranks]
    bare, comparison = whole.ranks[0], Comparison()
    rows: list[LayerCheck] = []
    first = None
    for at, moment in enumerate(bare.recorder.moments):
        found = _found(comparison, moment, by_rank, split.failure is not None)
        check = _check(bare, moment.layer, found)
        if moment.when == "made":
            rows.append(check)
        if first is None and found.difference is not None and not found.difference <= tolerance:
            first = _blamed(bare, bare.recorder.moments[: at + 1], check)
    extra = Found(math.inf, "called where the graph is split only")
    rows_of_extra = [_check(bare, layer, extra) for layer in dict.fromkeys(_extra_calls(bare, by_rank))]
    return (*rows, *rows_of_extra), first or next(iter(rows_of_extra), None)


def _by_call(rank: OneRank) -> Moments:
    return {(one.layer, one.when): one for one in rank.recorder.moments}


def _check(bare: OneRank, layer: Layer, found: Found) -> LayerCheck:
    return replace(bare.call_of(layer), difference=found.difference, note=found.note, rows=found.rows)


def _found(comparison: Comparison, moment: Moment, by_rank: Sequence[Moments], cut_short: bool) -> Found:
    key = (moment.layer, moment.when)
    ranks = [moments[key] for moments in by_rank if key in moments]
    if len(ranks) == len(by_rank):
        return comparison.of(moment.seen, [one.seen for one in ranks])
    if cut_short:
        return Found(None, "not compared: not reached")
    return Found(math.inf, f"called on {len(ranks)} of {len(by_rank)} ranks")


def _extra_calls(bare: OneRank, by_rank: Sequence[Moments]) -> Iterator[Layer]:
    """Calls that there are only where the graph is split."""
    known = _by_call(bare)
    for moments in by_rank:
        yield from (layer for layer, when in moments if when == "made" and (layer, when) not in known)


def _blamed(bare: OneRank, moments: Sequence[Moment], check: LayerCheck) -> LayerCheck:
    """The layer whose code ran when a difference first showed: that which gave a wrong value, not that which got it."""
    last = moments[-1]
    if last.when == "left":
        return replace(check, note="which changes what it was given")
    if last.when == "made":
        inner = [one.layer for one in moments if one.inside == last.layer and one.when == "made"]
        return replace(check, note=f"in its own code, after it called {bare.call_of(inner[-1])}") if inner else check
    if last.inside is None:
        return replace(check, note="in the arguments themselves")
    return _check(bare, last.inside, Found(check.difference, f"in its own code, before it calls {check}"))
