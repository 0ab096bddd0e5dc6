"""What the training steps of an epoch cost: seconds, joules, and the operations that they made a second."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch

from domainpar.common.agreement import gather
from domainpar.common.compiling import clock
from domainpar.nn.flops import counted
from domainpar.parallel.gpus import uuid_of
from domainpar.parallel.world import World

POWERCAP = Path("/sys/class/powercap")
RAPL, NVML = "RAPL", "NVML"


class Counter(NamedTuple):
    """A counter of joules that this rank reads: of all processors of its machine, or of its GPU.

    Attributes:
        source: Its name.
        joules: Gives joules since the machine, or this process, began to count.
    """

    source: str
    joules: Callable[[], float]


def of_processors(powercap: Path = POWERCAP) -> Counter | None:
    """The counters of all processors of this machine (RAPL, Linux's powercap); None where they cannot be read."""
    packages = sorted(place for place in powercap.glob("intel-rapl:*") if place.name.count(":") == 1)
    last: dict[Path, int] = {}
    turns = dict.fromkeys(packages, 0)

    def read() -> float:
        total = 0
        for place in packages:
            now = int((place / "energy_uj").read_text())
            if now < last.get(place, 0):  # it begins anew every quarter of an hour or so
                turns[place] += int((place / "max_energy_range_uj").read_text())
            last[place] = now
            total += now + turns[place]
        return total / 1e6

    try:
        return Counter(RAPL, read) if packages and read() >= 0 else None
    except (OSError, ValueError):  # the kernel shows them to root alone
        return None


def of_gpu(device: torch.device) -> Counter | None:
    """The counter of a GPU, if NVIDIA's library for Python (`pynvml`) is there and the GPU has one."""
    try:
        import pynvml  # type: ignore[import-not-found]

        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid_of(device)}".encode())
        pynvml.nvmlDeviceGetTotalEnergyConsumption(handle)
    except Exception:  # many kinds, all of which say that energy cannot be had
        return None
    return Counter(NVML, lambda: pynvml.nvmlDeviceGetTotalEnergyConsumption(handle) / 1e3)


@dataclass
class Costs:
    """Counts the steps of an epoch. Made by all ranks together.

    Attributes:
        world: The ranks.
        precision: Of states and products, in words.
    """

    world: World
    precision: str
    _of_edge: float | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        device, on_gpu = self.world.device, self.world.device.type == "cuda"
        own = uuid_of(device) if on_gpu else self.world.host
        grad_sinks = gather(self.world.transport, own)  # of power, by rank
        counter = None
        if grad_sinks.index(own) == self.world.rank:  # one rank reads for its machine, or card
            counter = of_gpu(device) if on_gpu else of_processors()
        self._counter = counter
        reads = gather(self.world.transport, counter.source if counter else "")
        # A sum without one of them would be none.
        sources = {reads[grad_sinks.index(grad_sink)] for grad_sink in grad_sinks}
        self._source = sources.pop() if len(sources) == 1 and "" not in sources else ""
        self.begin()

    def begin(self) -> None:
        """Begin an epoch, or go on in one."""
        self._before = self._joules()
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

    def of_epoch(self) -> dict[str, Any]:
        """The costs since `begin`, of training steps alone; the same on every rank. *Collective*."""
        ours = {
            "seconds": self._inside,
            "joules": self._joules() - self._before,
            "flops_per_second": (self._of_edge or 0.0) * self._edges / self._seconds if self._seconds else 0.0,
        }
        ranks = gather(self.world.transport, ours)
        return {
            "steps": self._steps,
            "seconds": max(rank["seconds"] for rank in ranks),
            "joules": sum(rank["joules"] for rank in ranks) if self._source else None,
            "joules_by": self._source or None,
            "flops_per_second": [rank["flops_per_second"] for rank in ranks],
            "precision": self.precision,
        }

    def _joules(self) -> float:
        return self._counter.joules() if self._counter is not None else 0.0
