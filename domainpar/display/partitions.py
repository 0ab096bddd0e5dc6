"""What it costs to split an event over 2, 4, 8 and 16 ranks, with its tiles as they are stored."""

from __future__ import annotations

from dataclasses import dataclass

from domainpar.display.event_data import EventData
from partitioners.quality import Quality, TruthCut, measure, measure_truth

NUM_PARTS = (2, 4, 8, 16)


@dataclass(frozen=True, eq=False)
class Split:
    """An event, split over some ranks.

    Attributes:
        num_parts: The ranks.
        quality: What is cut and borrowed.
        truth: True segments and tracks that the cut crosses; None without truth.
    """

    num_parts: int
    quality: Quality
    truth: TruthCut | None


def splits_of(event: EventData, grouping: str = "contiguous", seed: int = 0) -> list[Split]:
    """Split an event over each of `NUM_PARTS` ranks."""
    return [_split(event, parts, grouping, seed) for parts in NUM_PARTS]


def _split(event: EventData, num_parts: int, grouping: str, seed: int) -> Split:
    part = event.part_of_hits(num_parts, grouping, seed)
    truth = None
    if event.label is not None and event.particle_id is not None:
        truth = measure_truth(event.edge_index, part, event.label, event.particle_id)
    return Split(num_parts, measure(event.edge_index, part, num_parts), truth)
