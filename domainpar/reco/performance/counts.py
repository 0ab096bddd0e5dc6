"""The sums that all rates of tracks come from: integers, added over events, written as JSON and read back."""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, TypeVar

from domainpar.reco.performance.binned import Binned
from domainpar.reco.performance.majority import MajorityCounts
from domainpar.reco.performance.styles import StyleCounts

TRUE_WEIGHTS, EQUAL_WEIGHTS, BOTH_WEIGHTS = "truth", "one per labelled hit", "truth in some events only"

Counts = TypeVar("Counts", StyleCounts, MajorityCounts)

_CONDITIONS = ("min_hits", "fraction", "target", "majority_pt", "border_sectors")


@dataclass(frozen=True)
class TrackCounts:
    """What was counted of the tracks of some events. `+` gives the counts of both sets of events together.

    Attributes:
        events: Number of events.
        hits: Their hits.
        tracks: Their tracks, of any length.
        hits_on_tracks: Hits on tracks.
        min_hits: What makes a track matchable (`TrackCuts`).
        fraction: Share of hits that had to agree (`TrackCuts`).
        target: Conditions on target particles, as the command line takes them; empty for every particle.
        majority_pt: Smallest pT in GeV of the particles of `majority`.
        border_sectors: Number of sectors whose borders distances are measured to; None: not measured.
        styles: Counts by style: `atlas`, `one_way`, `two_way`.
        majority: Counts of gnn_tracking.
        trackml_score: TrackML score of each event, None for one without weights; in the order of the sum.
        weights: What the score weighs hits by: `truth`, or `one per labelled hit` where the source gives no weights.
        binned: Counts by style and quantity: `pt`, `eta`, `phi`, `border`.
    """

    events: int
    hits: int
    tracks: int
    hits_on_tracks: int
    min_hits: int
    fraction: float
    target: str
    majority_pt: float
    border_sectors: int | None
    styles: Mapping[str, StyleCounts]
    majority: MajorityCounts
    trackml_score: tuple[float | None, ...]
    weights: str
    binned: Mapping[str, Mapping[str, Binned]]

    def __add__(self, other: TrackCounts) -> TrackCounts:
        """The counts of the events of both.

        Raises:
            ValueError: If they were made with different cuts, or binned differently.
        """
        for name in _CONDITIONS:
            ours, theirs = getattr(self, name), getattr(other, name)
            if ours != theirs:
                raise ValueError(f"counts with {name} {ours!r} and {theirs!r} have no sum; count all events alike.")
        if self._bins() != other._bins():
            raise ValueError("counts in different bins have no sum; count all events with one version.")
        sums = {name: getattr(self, name) + getattr(other, name) for name in _SUMS}
        return replace(
            self,
            **sums,
            weights=self.weights if self.weights == other.weights else BOTH_WEIGHTS,
            styles={name: _sum(ours, other.styles[name]) for name, ours in self.styles.items()},
            majority=_sum(self.majority, other.majority),
            binned={
                style: {name: _sum_of_bins(ours, other.binned[style][name]) for name, ours in quantities.items()}
                for style, quantities in self.binned.items()
            },
        )

    def _bins(self) -> dict[str, dict[str, tuple[float, ...]]]:
        return {
            style: {name: binned.edges for name, binned in quantities.items()}
            for style, quantities in self.binned.items()
        }

    def to_json(self) -> dict[str, Any]:
        """As plain JSON values."""
        values: dict[str, Any] = _lists(asdict(self))
        return values

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> TrackCounts:
        """Counts from what `to_json` gave.

        Raises:
            ValueError: If something is missing, or is there and unknown.
        """
        values = _checked(cls, found)
        values["styles"] = {
            name: StyleCounts(**_checked(StyleCounts, style)) for name, style in found["styles"].items()
        }
        values["majority"] = MajorityCounts(**_checked(MajorityCounts, found["majority"]))
        values["trackml_score"] = tuple(found["trackml_score"])
        values["binned"] = {
            style: {name: _binned(binned) for name, binned in quantities.items()}
            for style, quantities in found["binned"].items()
        }
        return cls(**values)


_SUMS = ("events", "hits", "tracks", "hits_on_tracks", "trackml_score")


def total(counts: Iterable[TrackCounts]) -> TrackCounts:
    """The counts of all events together, given those of each. There is at least one.

    Raises:
        ValueError: If they were made with different cuts, or binned differently.
    """
    return functools.reduce(operator.add, counts)


def _sum(ours: Counts, theirs: Counts) -> Counts:
    return type(ours)(**{each.name: getattr(ours, each.name) + getattr(theirs, each.name) for each in fields(ours)})


def _sum_of_bins(ours: Binned, theirs: Binned) -> Binned:
    sums = {
        each.name: tuple(map(operator.add, getattr(ours, each.name), getattr(theirs, each.name)))
        for each in fields(ours)
        if each.name != "edges"
    }
    return Binned(edges=ours.edges, **sums)


def _binned(found: Mapping[str, Any]) -> Binned:
    return Binned(**{name: tuple(values) for name, values in _checked(Binned, found).items()})


def _checked(kind: type, found: Mapping[str, Any]) -> dict[str, Any]:
    """The values, if there is one for each field of a dataclass and no other."""
    wanted = {each.name for each in fields(kind)}
    if set(found) != wanted:
        missing, unknown = sorted(wanted - set(found)), sorted(set(found) - wanted)
        raise ValueError(
            f"counts of tracks ({kind.__name__}): missing {', '.join(missing) or 'nothing'}, unknown "
            f"{', '.join(unknown) or 'nothing'}; they were written by another version. Infer again."
        )
    return dict(found)


def _lists(value: Any) -> Any:
    """The same with lists for tuples: JSON knows no tuples, and both are to compare equal."""
    if isinstance(value, Mapping):
        return {name: _lists(part) for name, part in value.items()}
    return [_lists(part) for part in value] if isinstance(value, tuple | list) else value
