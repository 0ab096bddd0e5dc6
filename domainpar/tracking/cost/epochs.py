"""What the training steps of an epoch cost: seconds, and the operations that they made a second."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from domainpar.common.agreement import gather
from domainpar.common.compiling import clock
from domainpar.nn.flops import counted
from domainpar.parallel.world import World


@dataclass
class Costs:
    """Counts the steps of an epoch.

    Attributes:
        world: The ranks.
        precision: Of states and products, in words.
    """

    world: World
    precision: str
    _of_edge: float | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """Begin an epoch, or go on in one."""
        self._edges, self._seconds, self._inside, self._steps = 0, 0.0, 0.0, 0

    @contextmanager
    def step(self) -> Iterator[None]:
        """Around a step: operations of the first with edges are counted, and those of others follow from theirs."""
        began = clock()
        if self._of_edge is not None:
            yield
        else:
            with counted() as flops:
                yield
            self._first = flops.total
        self._inside += clock() - began

    def add(self, record: Mapping[str, Any]) -> None:
        """Take the record of a step."""
        edges = record["local_edges"][self.world.rank]
        if self._of_edge is None and edges:  # a rank may own nothing of its first events
            self._of_edge = self._first / edges
        self._edges += edges
        self._seconds += record["seconds_compute"][self.world.rank]
        self._steps += 1

    def epoch_costs(self) -> dict[str, Any]:
        """The costs since `begin`, of training steps alone; the same on every rank. *Collective*."""
        speed = (self._of_edge or 0.0) * self._edges / self._seconds if self._seconds else 0.0
        ranks = gather(self.world.transport, [self._inside, speed])
        return {
            "steps": self._steps,
            "seconds": max(seconds for seconds, _ in ranks),
            "flops_per_second": [speed for _, speed in ranks],
            "precision": self.precision,
        }
