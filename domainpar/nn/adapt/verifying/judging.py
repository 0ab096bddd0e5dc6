"""Which runs are compared with which, and what follows from it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from domainpar.nn.adapt.verifying.blaming import compare_layers
from domainpar.nn.adapt.verifying.leftovers import compare_buffers, compare_gradients
from domainpar.nn.adapt.verifying.report import LayerCheck, Verification, Worst, agrees
from domainpar.nn.adapt.verifying.running import Run, Trial
from domainpar.nn.adapt.verifying.seeing import merged

DRAWS = "It draws random numbers: compared with itself on one rank"


def judged(trial: Trial, tolerance: float) -> Verification:
    """Split against whole; a model that draws random numbers against itself on one rank, and in evaluation."""
    bare, draws = trial.bare()
    if not draws:
        return _compared(trial, bare, lambda: trial.bare()[0], tolerance)
    alone = trial.split(1)
    if alone.refused is not None:
        return Verification(False, (), refused=alone.refused, tolerance=tolerance, ranks=trial.ranks_in_words)
    if alone.failure is not None:
        raise alone.failure.error
    found = _compared(trial, alone, lambda: trial.split(1), tolerance)
    calm = replace(trial, mode="eval")
    bare, draws = calm.bare()
    if draws:
        return replace(found, remarks=(*found.remarks, f"{DRAWS} only, as it draws them in evaluation too."))
    return _both(_compared(calm, bare, lambda: calm.bare()[0], tolerance), found)


def _compared(trial: Trial, whole: Run, again: Callable[[], Run], tolerance: float) -> Verification:
    split = trial.split(trial.num_ranks)
    rows, first = compare_layers(whole, split, tolerance)
    remarks = () if first is None else tuple(_remarks(whole, again(), rows, tolerance))
    found = Verification(
        exact=False,
        rows=tuple(replace(row, mode=trial.mode) for row in rows),
        first_difference=None if first is None else replace(first, mode=trial.mode),
        refused=split.refused,
        failed=split.failed,
        exchanges=split.ranks[0].exchanges,
        sums=split.ranks[0].sums,
        tolerance=tolerance,
        ranks=trial.ranks_in_words,
        remarks=remarks,
    )
    return found if split.failure is not None else _with_leftovers(found, whole, split, trial.backward)


def _remarks(whole: Run, again: Run, rows: tuple[LayerCheck, ...], tolerance: float) -> Iterator[str]:
    """What else may be the reason of a difference."""
    _, unsteady = compare_layers(whole, again, tolerance)
    if unsteady is not None:
        yield f"Two runs on the whole graph differ as well, first in {unsteady}: it is not a function."
    if any("in less than float64" in row.note for row in rows):
        yield "Some layers compute in less than float64 whatever they are given: that may be rounding."


def _with_leftovers(found: Verification, whole: Run, split: Run, backward: bool) -> Verification:
    """With gradients and buffers, and so with the judgement."""
    result = [merged(seen) for seen in zip(*(rank.recorder.result() for rank in split.ranks))]
    alike = found.first_difference is None
    gradients = compare_gradients(whole, split, result) if backward and alike else None
    buffers = compare_buffers(whole, split)
    comparable = any(not one.problem for one in result)
    exact = comparable and alike and all(agrees(worst, found.tolerance) for worst in (gradients, buffers))
    return replace(found, exact=exact, gradients=gradients, buffers=buffers)


def _both(calm: Verification, found: Verification) -> Verification:
    """The comparison in evaluation, then the one in training."""
    remark = f"{DRAWS}; in evaluation (eval) with the module alone."
    return replace(
        found,
        exact=calm.exact and found.exact,
        rows=calm.rows + found.rows,
        first_difference=calm.first_difference or found.first_difference,
        refused=calm.refused or found.refused,
        failed=calm.failed or found.failed,
        gradients=_worse(calm.gradients, found.gradients),
        buffers=_worse(calm.buffers, found.buffers),
        remarks=tuple(dict.fromkeys([*calm.remarks, *found.remarks, remark])),
    )


def _worse(*pair: Worst | None) -> Worst | None:
    return max((one for one in pair if one is not None), default=None)
