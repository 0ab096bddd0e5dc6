"""Ranks that differ from the others: replicas that hold other bits, and stragglers that all others wait for.

Every rank holds the same parameters and the same state of the optimiser, to the last bit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from domainpar.parallel.digests import what_differs
from domainpar.parallel.world import World
from domainpar.tracking.training.monitor.failure import StepFailed, fail_alike

HINT = (
    "replicas were equal at the last checkpoint: go on from there with --resume; if it happens again on the same rank, "
    "look at its machine (memory, another kind of processor, another library)"
)

SLOW = 1.5
"""Times the median of the ranks from which on a step counts as slow."""

STEPS = 20
"""Slow steps one after the other before a note, and steps that are not slow before another one."""

LEAST_SECONDS = 0.01
"""Less than this above the median is noise, however short the steps are."""

MORE_EDGES = 1.25
"""Times the median of local edges from which on it is the split that makes a rank slow, not its machine..."""

UNEXPLAINED = 1.25
"""... unless it takes this many times longer than even its edges would let one expect."""


def replicated(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """All tensors that every rank should hold alike: parameters, buffers, and the optimiser's state of each."""
    tensors = dict(model.state_dict())
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, Tensor):
                tensors[f"{key} of {name}"] = value
    return tensors


def check_replicas(model: nn.Module, optimizer: torch.optim.Optimizer, world: World) -> None:
    """Compare the replicas of all ranks by their checksum. *Collective*.

    Raises:
        StepFailed: If ranks differ, on the first of those that differ from the most; names them and the first tensor.
        RanksFailed: Then, on all other ranks.
    """
    difference = what_differs(replicated(model, optimizer), world.transport)
    if difference is not None:
        what, differing_ranks = difference
        fail_alike(world, StepFailed(what, HINT), differing_ranks[0])


class Stragglers:
    """Counts the slow steps of every rank. The same on every rank, for all look at the same records."""

    def __init__(self) -> None:
        self._slow: dict[int, list[tuple[float, float]]] = {}
        self._noted: dict[int, int] = {}  # steps since a rank with a note was last slow

    def look(self, seconds: Sequence[float], edges: Sequence[int]) -> list[dict[str, Any]]:
        """Look at one step; returns the ranks that were slow for `STEPS` steps and are due for a note.

        Args:
            seconds: Seconds of computing of each rank, waiting left out.
            edges: Local edges of each rank.

        Returns:
            Each `rank`, and `times` and `times_edges`: its seconds and its edges, times the median of the ranks.
        """
        due = []
        for rank in range(len(seconds)):
            usual = _usual(seconds, rank)
            if seconds[rank] - usual < LEAST_SECONDS or seconds[rank] < SLOW * usual:
                self._slow.pop(rank, None)
                if rank in self._noted:
                    self._noted[rank] += 1
                    if self._noted[rank] >= STEPS:
                        del self._noted[rank]
                continue
            steps = self._slow.setdefault(rank, [])
            steps.append((_times(seconds[rank], usual), _times(edges[rank], _usual(edges, rank))))
            if rank in self._noted:
                self._noted[rank] = 0
            elif len(steps) >= STEPS:
                self._noted[rank] = 0
                times, times_edges = (median(ratios) for ratios in zip(*steps[-STEPS:]))
                due.append({"rank": rank, "times": round(times, 2), "times_edges": round(times_edges, 2)})
        return due


def _usual(values: Sequence[float], rank: int) -> float:
    """The median of the ranks; of two, the value of the other; of one, its own."""
    return float(values[1 - rank]) if len(values) == 2 else float(median(values))


def _times(value: float, usual: float) -> float:
    return value / usual if usual > 0 else 1.0


def lines(record: Mapping[str, Any]) -> list[str]:
    """A printed note for each straggler in a training record; nothing if it names none."""
    notes = []
    for slow in record.get("straggler", ()):
        times, times_edges = slow["times"], slow["times_edges"]
        # It may have so much more to do that nothing else need be wrong.
        for_its_edges = times_edges >= MORE_EDGES and times < UNEXPLAINED * times_edges
        why = "try --grouping metis or more tiles" if for_its_edges else "a slow or shared core?"
        notes.append(
            f"note: rank {slow['rank']} ({slow['host']}) computed {times:.1f}x the median for {STEPS} steps with "
            f"{times_edges:.2f}x the edges: {why}"
        )
    return notes
