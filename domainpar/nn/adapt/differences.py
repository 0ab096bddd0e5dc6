"""Differences between a run on ranks and a run on the whole graph: results, gradients, buffers, and calls of layers."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from domainpar.nn.adapt.recorder import SeenTensor, Snapshot, merged
from domainpar.nn.adapt.trial import TrialRun
from domainpar.nn.adapt.verification import LayerCheck, Worst

FLOOR = 1e-3  # of the largest value so far: what cancels to less is judged against this, as it is rounding of that
COARSE = (torch.float32, torch.float16, torch.bfloat16, torch.complex64)


def gap(ours: Tensor, theirs: Tensor) -> float:
    """The largest difference; `inf` where one of the two is not finite and the other is something else."""
    if ours.shape != theirs.shape:
        return math.inf
    # Not a plain difference: of two infinities it is no number.
    same = (ours == theirs) | (ours.isnan() & theirs.isnan())
    differences = (ours - theirs).abs().double().nan_to_num(nan=math.inf, posinf=math.inf).masked_fill(same, 0.0)
    return float(differences.max()) if differences.numel() else 0.0


def largest(values: Tensor) -> float:
    """The largest finite size."""
    finite = values[values.isfinite()].abs()
    return float(finite.max()) if finite.numel() else 0.0


@dataclass(frozen=True)
class Differences:
    """What a run leaves, compared with a run on the whole graph; differences are relative to the largest value.

    Attributes:
        results: The difference of each tensor that the module returned.
        gradients: The difference of the gradient of each input and parameter; empty if they were not computed.
        state: The difference of each buffer and parameter after the run.
    """

    results: tuple[Worst, ...]
    gradients: tuple[Worst, ...]
    state: tuple[Worst, ...]


def compare_runs(whole: TrialRun, split: TrialRun) -> Differences:
    """Compare results, gradients and buffers of two runs that came to their ends.

    Args:
        whole: The run on the whole graph, bare or on one rank; the backward pass of a bare one runs here.
        split: The run on ranks.
    """
    bare, results = whole.ranks[0], [Worst(math.inf, "number of results")]
    theirs, ours = bare.results(), [rank.results() for rank in split.ranks]
    if all(len(tensors) == len(theirs) for tensors in ours):
        each = enumerate(zip(theirs, *ours))
        results = [_worst(f"result {number}", merged([one]), ranks) for number, (one, *ranks) in each]
    gradients: list[Worst] = []
    if split.ranks[0].gradients and all(result.difference < math.inf for result in results):
        if not bare.gradients:  # a bare run learns with the keys of the split one, so that both have one loss
            bare.learn([merged(ranks) for ranks in zip(*ours)])
        shares = [rank.gradients for rank in split.ranks]
        # Of inputs each rank has a share. Those of parameters were summed before, which each rank has to agree on.
        summed = [rank.summed for rank in split.ranks if rank.summed is not None]
        sums = [{name: torch.stack([share[name] for share in shares]).sum(0) for name in shares[0]}]
        sums = [{**sums[0], **of_rank} for of_rank in summed] or sums
        gradients = list(_by_name(bare.gradients, sums))
    state = _by_name(bare.state(), [rank.state() for rank in split.ranks])
    return Differences(tuple(results), tuple(gradients), tuple(state))


def _by_name(whole: Mapping[str, Tensor], ranks: Sequence[Mapping[str, Tensor]]) -> Iterator[Worst]:
    """Differences of tensors that every rank has whole."""
    floor = FLOOR * max(map(largest, whole.values()), default=0.0)
    for name, tensor in whole.items():
        yield _worst(name, SeenTensor(tensor), [SeenTensor(tensors[name]) for tensors in ranks], floor)


def _worst(name: str, whole: SeenTensor, ranks: Sequence[SeenTensor], floor: float = 0.0) -> Worst:
    """The difference of what a run leaves: of one type, and what has no rows the same bits on every rank."""
    found = compare(whole, ranks, floor)
    problem = found.note if found.difference is None or found.note.startswith("shape ") else ""
    if ranks[0].dtype is not whole.dtype:
        problem = f"{ranks[0].dtype} in place of {whole.dtype}"
    if not problem and ranks[0].dim is None and any(gap(seen.value, ranks[0].value) for seen in ranks):
        problem = "ranks differ"
    return Worst(math.inf if problem else found.difference or 0.0, name, problem)


class Difference(NamedTuple):
    """Difference of tensors from those of the whole graph, None if they were not compared; notes; their rows."""

    difference: float | None
    note: str
    rows: str = ""


def compare(whole: SeenTensor, ranks: Sequence[SeenTensor], floor: float) -> Difference:
    """The largest difference of a tensor, relative to its largest value.

    Args:
        whole: Of the whole graph, its rows in the order of their keys.
        ranks: What each rank saw.
        floor: What the largest value counts for at least.
    """
    split = merged(ranks)
    if problem := split.problem or whole.problem:
        return Difference(None, problem, split.rows)
    shapes = tuple(split.value.shape), tuple(whole.value.shape)
    if shapes[0] != shapes[1]:
        return Difference(math.inf, f"shape {shapes[0]} in place of {shapes[1]}", split.rows)
    scale = max(largest(whole.value), floor) or 1.0
    note = "in less than float64" if whole.dtype in COARSE else ""
    if split.dim is None:
        return Difference(max(gap(seen.value, whole.value) for seen in ranks) / scale, note, split.rows)
    own = gap(split.value, whole.value)
    of_copies = max(_gap_of_copies(seen, split, whole.value) for seen in ranks)
    if of_copies > own * 2 and own <= 1e-12 * scale < of_copies:
        note = "copies of other ranks' rows differ"
    return Difference(max(own, of_copies) / scale, note, split.rows)


def _gap_of_copies(seen: SeenTensor, split: SeenTensor, theirs: Tensor) -> float:
    if seen.copies is None or seen.dim is None:
        return 0.0
    # A key that no rank counts has no place; clamped to the last one it differs, or there is nothing to differ from.
    places = torch.searchsorted(split.keys, seen.keys_of_copies).clamp(max=max(len(split.keys) - 1, 0))
    return gap(seen.copies, theirs.index_select(seen.dim, places))


def compare_layers(
    whole: TrialRun, split: TrialRun, tolerance: float
) -> tuple[tuple[LayerCheck, ...], LayerCheck | None]:
    """All calls of all layers, inner ones first, and the one in whose own code the first difference arose."""
    record, sizes = whole.ranks[0].recorder.moments, [0.0]
    by_rank = [{(moment.layer, moment.when): moment for moment in rank.recorder.moments} for rank in split.ranks]
    rows: list[LayerCheck] = []
    first = None
    for at, moment in enumerate(record):
        ranks = [moments[key] for moments in by_rank if (key := (moment.layer, moment.when)) in moments]
        if len(ranks) == len(by_rank):
            sizes += [largest(seen.value) for seen in moment.seen if not seen.problem]
            difference = _of_all(moment.seen, [rank.seen for rank in ranks], FLOOR * max(sizes))
        elif split.failure is not None:
            difference = Difference(None, "not compared: not reached")
        else:
            difference = Difference(math.inf, f"called on {len(ranks)} of {len(by_rank)} ranks")
        check = LayerCheck(*moment.layer, *difference)
        if moment.when == "made":
            rows.append(check)
        # Not `> tolerance`: a difference that is no number is one, too.
        if first is None and check.difference is not None and not check.difference <= tolerance:
            first = _blamed(record[: at + 1], check)
    layers_of_whole = {moment.layer for moment in record if moment.when == "made"}
    layers = dict.fromkeys(layer for moments in by_rank for layer, when in moments if when == "made")
    extra = Difference(math.inf, "called where the graph is split only")
    rows_of_extra = [LayerCheck(*layer, *extra) for layer in layers if layer not in layers_of_whole]
    return (*rows, *rows_of_extra), first or next(iter(rows_of_extra), None)


def _of_all(whole: Sequence[SeenTensor], ranks: Sequence[Sequence[SeenTensor]], floor: float) -> Difference:
    """The largest difference of the tensors of one moment."""
    if any(len(seen) != len(whole) for seen in ranks):
        return Difference(math.inf, "another number of tensors")
    if not whole:
        return Difference(None, "not compared: no tensors")
    each = [compare(merged([one]), others, floor) for one, *others in zip(whole, *ranks)]
    notes = [f"not compared: {it.note}" if it.difference is None else it.note for it in each]
    return Difference(
        max((it.difference for it in each if it.difference is not None), default=None),
        _listed(notes),
        _listed(it.rows for it in each),
    )


def _listed(texts: Iterable[str]) -> str:
    return ", ".join(dict.fromkeys(text for text in texts if text))


def _blamed(moments: Sequence[Snapshot], check: LayerCheck) -> LayerCheck:
    """The layer whose code ran when a difference first showed: that which gave a wrong value, not that which got it."""
    last = moments[-1]
    if last.when == "left":
        return replace(check, note="which changes what it was given")
    if last.when == "made":
        inner = [moment.layer for moment in moments if moment.inside == last.layer and moment.when == "made"]
        return replace(check, note=f"in its own code, after it called {inner[-1]}") if inner else check
    if last.inside is None:
        return replace(check, note="in the arguments themselves")
    return LayerCheck(*last.inside, check.difference, f"in its own code, before it calls {check}")
