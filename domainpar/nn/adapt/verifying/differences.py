"""How much two tensors differ: what layers were given or made, whole and split, in sizes that come up in the model."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from domainpar.nn.adapt.verifying.seeing import Seen, merged

FLOOR = 1e-3  # of the largest value so far: what cancels to less is judged against this, as it is rounding of that


class Found(NamedTuple):
    """Difference of what a layer was given or made, None if nothing was compared; notes; what its rows are."""

    difference: float | None
    note: str
    rows: str = ""


class Comparison:
    """Compares what was seen, from the first call on; remembers how large numbers were so far."""

    def __init__(self) -> None:
        self._largest = 0.0

    def of(self, whole: Sequence[Seen], ranks: Sequence[Sequence[Seen]]) -> Found:
        """The largest difference of some tensors from those that ranks saw in their place."""
        if any(len(seen) != len(whole) for seen in ranks):
            return Found(math.inf, "another number of tensors")
        if not whole:
            return Found(None, "not compared: no tensors")
        found = [self._of_one(merged([one]), [seen[at] for seen in ranks]) for at, one in enumerate(whole)]
        known = [one.difference for one in found if one.difference is not None]
        return Found(max(known, default=None), _listed(one.note for one in found), _listed(one.rows for one in found))

    def _of_one(self, whole: Seen, ranks: Sequence[Seen]) -> Found:
        split = merged(ranks)
        if problem := split.problem or whole.problem:
            return Found(None, f"not compared: {problem}", split.rows)
        scale = self._scale(whole.value)
        if split.value.shape != whole.value.shape:
            seen, expected = tuple(split.value.shape), tuple(whole.value.shape)
            return Found(math.inf, f"shape {seen} in place of {expected}", split.rows)
        note = "in less than float64" if whole.coarse else ""
        if split.dim is None:
            return Found(max(gap(seen.value, whole.value) for seen in ranks) / scale, note, split.rows)
        own = gap(split.value, whole.value)
        of_copies = max(_gap_of_copies(seen, split, whole.value) for seen in ranks)
        if of_copies > own * 2 and own <= 1e-12 * scale < of_copies:
            note = "copies of other ranks' rows differ"
        return Found(max(own, of_copies) / scale, note, split.rows)

    def _scale(self, values: Tensor) -> float:
        """What a difference of these values is relative to."""
        size = largest(values)
        self._largest = max(self._largest, size)
        return max(size, FLOOR * self._largest) or 1.0


def gap(ours: Tensor, theirs: Tensor) -> float:
    """The largest difference; `inf` where one of the two is not finite and the other is something else."""
    if ours.shape != theirs.shape:
        return math.inf
    same = (ours == theirs) | (ours.isnan() & theirs.isnan())
    differences = (ours - theirs).abs().nan_to_num(nan=math.inf, posinf=math.inf).masked_fill(same, 0.0)
    return float(differences.max()) if differences.numel() else 0.0


def largest(values: Tensor) -> float:
    """The largest finite size."""
    finite = values[values.isfinite()].abs()
    return float(finite.max()) if finite.numel() else 0.0


def _gap_of_copies(seen: Seen, split: Seen, theirs: Tensor) -> float:
    if seen.copies is None or seen.keys_of_copies is None or seen.dim is None:
        return 0.0
    places = torch.searchsorted(split.keys, seen.keys_of_copies).clamp(max=max(len(split.keys) - 1, 0))
    return gap(seen.copies, theirs.index_select(seen.dim, places))


def _listed(texts: Iterable[str]) -> str:
    return ", ".join(dict.fromkeys(text for text in texts if text))
