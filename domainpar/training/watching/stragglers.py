"""Stragglers: ranks that take much longer than the others, step after step, so that all others wait for them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from domainpar.parallel.world import World

SLOW = 1.5
"""Times the median of the ranks from which on a step counts as slow."""

STEPS = 20
"""Slow steps one after the other before it is said, and steps that are not before it may be said again."""

LEAST_SECONDS = 0.01
"""Less than this above the median is noise, however short the steps are."""

MORE_EDGES = 1.25
"""Times the median of local edges from which on it is the split that makes a rank slow, not its machine..."""

UNEXPLAINED = 1.25
"""... unless it takes this many times longer than even its edges would let one expect."""


@dataclass(frozen=True)
class Straggler:
    """A rank that was slow for `STEPS` steps.

    Attributes:
        rank: The rank.
        times: Its own seconds of computing, times the median of the ranks.
        times_edges: Its local edges, times the median of the ranks.
    """

    rank: int
    times: float
    times_edges: float

    @property
    def for_its_edges(self) -> bool:
        """Whether it has so much more to do that nothing else need be wrong."""
        return self.times_edges >= MORE_EDGES and self.times < UNEXPLAINED * self.times_edges


class Stragglers:
    """Counts the slow steps of every rank. The same on every rank, for all look at the same records."""

    def __init__(self) -> None:
        self._slow: dict[int, list[tuple[float, float]]] = {}
        self._said: dict[int, int] = {}  # steps since a rank that was told of was last slow

    def look(self, seconds: Sequence[float], edges: Sequence[int]) -> list[Straggler]:
        """Look at one step; returns those that are to be told of now.

        Args:
            seconds: What each rank computed, waiting left out.
            edges: Local edges of each rank.
        """
        found = [self._look_at(rank, seconds, edges) for rank in range(len(seconds))]
        return [straggler for straggler in found if straggler is not None]

    def _look_at(self, rank: int, seconds: Sequence[float], edges: Sequence[int]) -> Straggler | None:
        usual = _usual(seconds, rank)
        if seconds[rank] - usual < LEAST_SECONDS or seconds[rank] < SLOW * usual:
            self._recover(rank)
            return None
        steps = self._slow.setdefault(rank, [])
        steps.append((_times(seconds[rank], usual), _times(edges[rank], _usual(edges, rank))))
        if rank in self._said:
            self._said[rank] = 0
        elif len(steps) >= STEPS:
            self._said[rank] = 0
            times, times_edges = (median(one) for one in zip(*steps[-STEPS:]))
            return Straggler(rank, round(times, 2), round(times_edges, 2))
        return None

    def _recover(self, rank: int) -> None:
        """A step that was not slow."""
        self._slow.pop(rank, None)
        if rank in self._said:
            self._said[rank] += 1
            if self._said[rank] >= STEPS:
                del self._said[rank]


def _usual(values: Sequence[float], rank: int) -> float:
    """The median of the ranks; of two, what the other one has; of one, its own."""
    return float(values[1 - rank]) if len(values) == 2 else float(median(values))


def _times(value: float, usual: float) -> float:
    return value / usual if usual > 0 else 1.0


def as_records(found: Sequence[Straggler], world: World) -> list[dict[str, Any]]:
    """For `metrics.jsonl`: each with its host. *Collective*."""
    hosts = [host.decode() for host in world.transport.all_gather(world.host.encode())]
    return [asdict(one) | {"host": hosts[one.rank]} for one in found]


def lines(record: Mapping[str, Any]) -> list[str]:
    """What is printed of the stragglers in a training record; nothing if it names none."""
    return [_line(**one) for one in record.get("straggler", ())]


def _line(rank: int, times: float, times_edges: float, host: str) -> str:
    more_to_do = Straggler(rank, times, times_edges).for_its_edges
    why = "try --grouping metis or more tiles" if more_to_do else "a slow or shared core?"
    return (
        f"note: rank {rank} ({host}) computed {times:.1f}x the median for {STEPS} steps "
        f"with {times_edges:.2f}x the edges: {why}"
    )
