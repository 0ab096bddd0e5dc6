"""Splits into training, validation and test by the names of events, so that a store may grow."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from domainpar.tracking.events.store import Split


def splits_of(
    names: Sequence[str],
    val_split: float,
    test_split: float,
    seed: int,
    recorded: Mapping[str, Split] | None = None,
    whole: Callable[[str], str] = str,
) -> dict[str, Split]:
    """Deal events into train, val and test by a hash of their names: no event's split depends on another event.

    Two exceptions. What is recorded stays, so that nothing trained on ever moves into the test. And one event at
    least is trained on; of two or more, one is kept for validation, and of three or more one for the test, where the
    shares are above 0: where the hash gives none, the new event whose hash lies nearest is taken. Shares whose sum is
    1 leave nothing to train on: events to be evaluated, with a network or tracks from elsewhere.

    Args:
        names: The events.
        val_split: Share kept for validation.
        test_split: Share kept for a final test.
        seed: Seed of the hash.
        recorded: Splits of events that were dealt before.
        whole: Name of the event that a record of this name is all or a sector of; its sectors stay together.

    Raises:
        ValueError: If the shares are not in [0, 1], or their sum is above 1.
    """
    if not (val_split >= 0 and test_split >= 0 and val_split + test_split <= 1):
        raise ValueError(f"val_split {val_split} and test_split {test_split} must be shares whose sum is at most 1.")
    trains = val_split + test_split < 1
    bounds: dict[Split, tuple[float, float]] = {
        "train": (test_split, 1 - val_split), "val": (1 - val_split, 1.0), "test": (0.0, test_split),
    }  # fmt: skip
    recorded = recorded or {}
    before: dict[str, Split] = {}
    for split in ("test", "val", "train"):  # the last wins: a sector joins those of its event that were trained on
        before |= {whole(event): split for event, of_event in recorded.items() if of_event == split}
    places: dict[str, float] = {}
    splits: dict[str, Split] = {}
    for event in dict.fromkeys(map(whole, names)):
        # A number in [0, 1) that depends on seed and name alone: the first 53 bits of their hash.
        digest = hashlib.sha256(f"{seed} {event}".encode()).digest()
        places[event] = (int.from_bytes(digest[:8], "big") >> 11) / 2**53
        drawn: Split = "test" if places[event] < test_split else "val" if places[event] >= 1 - val_split else "train"
        splits[event] = before.get(event, drawn)
    needed = {"train": trains, "val": val_split > 0 and len(splits) > 1, "test": test_split > 0 and len(splits) > 2}
    for split, (low, high) in bounds.items():
        counts = Counter(splits.values())
        spare = [event for event in places if event not in before and counts[splits[event]] > needed[splits[event]]]
        if counts[split] < needed[split] and spare:
            splits[min(spare, key=lambda event: (max(low - places[event], places[event] - high), event))] = split
    return {name: recorded.get(name, splits[whole(name)]) for name in names}
