"""The memory of a run on each rank: expected before its first step, and taken."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import psutil
import torch

from domainpar.common.agreement import gather
from domainpar.nn import fused
from domainpar.nn.memory import Forecast, ModelSize
from domainpar.parallel.allocator import give_back_freed
from domainpar.parallel.gpus import free_memory, uuid_of
from domainpar.parallel.world import World
from domainpar.tracking.training.parts import LabelledPart
from domainpar.tracking.training.record import peak_rss_bytes

OF_PROCESS = 2**24
"""Bytes that do not grow with an event: blocks that tiles are computed in, the optimiser, code not yet touched."""


@dataclass(frozen=True)
class Share:
    """The nodes, edges and bytes of a sample on one rank.

    Attributes:
        owned: Nodes it owns.
        ghosts: Copies of others' nodes.
        edges: Local edges.
        expected: Bytes it will hold at its peak, above `bare`.
        bare: Bytes it held before it had anything of the events.
        where: The memory all this lies in: a machine, or one of its GPUs.
        free: Bytes that nobody uses there.
        in_files: Bytes of tables that will lie in files.
        card: UUID of a GPU; empty for a machine.
    """

    owned: int
    ghosts: int
    edges: int
    expected: int
    bare: int
    where: str
    free: int
    in_files: int = 0
    card: str = ""


class Shortage(NamedTuple):
    """A memory that is too small for its ranks: the bytes they will hold besides those they hold now, and the free."""

    where: str
    ranks: int
    expected: int
    free: int


@dataclass(frozen=True)
class Expectation:
    """The memory of all ranks while they train on the largest sample; the same on every rank.

    Attributes:
        sample: Its name.
        size: The model.
        shares: One for each rank.
    """

    sample: str
    size: Forecast
    shares: tuple[Share, ...]

    @property
    def fullest(self) -> int:
        """The rank that will hold most."""
        return max(range(len(self.shares)), key=lambda rank: self.shares[rank].expected)

    @property
    def largest(self) -> int:
        """Bytes of that rank, with those of its bare process."""
        share = self.shares[self.fullest]
        return share.expected + share.bare

    def fits(self, limit: float | None) -> bool:
        """Whether no rank takes more than a limit in GiB; without one, whether there is room, as far as is known."""
        return not self.shortages() if limit is None else self.largest <= limit * 2**30

    def as_record(self, taken: Sequence[int | None] = ()) -> dict[str, Any]:
        """For `run.json`: bytes of each rank, expected and (when the run is over) taken."""
        return {
            "sample": self.sample,
            "bare_bytes": [share.bare for share in self.shares],
            "expected_bytes": [share.expected for share in self.shares],
            "peak_bytes": list(taken) or None,
            "in_files_bytes": [share.in_files for share in self.shares],
        }

    def shortages(self) -> list[Shortage]:
        """The memories into which it will not fit, as far as that is known now."""
        places: dict[str, list[Share]] = {}
        for share in self.shares:
            places.setdefault(share.card or share.where, []).append(share)  # ranks of one machine share its memory
        memories = [
            Shortage(here[0].where, len(here), sum(share.expected for share in here), min(share.free for share in here))
            for here in places.values()
        ]
        return [memory for memory in memories if memory.expected > memory.free]


class MemoryMeter:
    """Measures the memory of this rank. Make it before events are loaded: the bare process is what is held then.

    Args:
        device: Where the rank computes: host memory is measured, or that of its GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.forget_peak()
        self._bare = torch.cuda.memory_allocated(device) if self._of_gpu else int(psutil.Process().memory_info().rss)

    def forget_peak(self) -> None:
        """Count peaks from now on; where the system does not allow it they count from the start of the process."""
        give_back_freed()
        if self._of_gpu:
            torch.cuda.reset_peak_memory_stats(self._device)
        else:
            with suppress(OSError):
                Path("/proc/self/clear_refs").write_text("5")
        self._peak_before = self._peak()

    @property
    def _of_gpu(self) -> bool:
        return self._device.type == "cuda"

    def expect(self, size: Forecast, part: LabelledPart, kept_edges: int, world: World) -> Expectation:
        """The bytes of all ranks at their peaks, with this rank's part of the largest sample. *Collective*.

        `kept_edges`: local edges of all samples whose data this rank will keep from step to step.
        """
        graph = part.graph
        owned, ghosts, edges = graph.num_owned, graph.plan.num_ghosts, graph.num_edges
        if self._of_gpu:
            has_kernels = isinstance(size, ModelSize) and size.item_bytes == 4 and size.hidden <= fused.WIDEST
            in_kernels = has_kernels and fused.missing() is None
            one_step = size.bytes_on_gpu(owned + ghosts, edges, in_kernels)
        else:
            pairs = np.array([len(graph.tiles.pair_rows)])
            one_step = int(size.bytes_of(np.array([owned + ghosts]), np.array([edges]), pairs)[0])
        of_others = max(kept_edges - edges, 0) * size.data_bytes
        where, free = free_memory(self._device)
        expected = one_step + of_others + OF_PROCESS
        in_files = 0
        if isinstance(size, ModelSize) and size.in_files:
            in_memory = replace(size, in_files=False)
            in_files = int(in_memory.bytes_of(np.array([owned + ghosts]), np.array([edges]), pairs)[0])
        card = uuid_of(self._device) if self._of_gpu else ""
        share = Share(owned, ghosts, edges, expected, self._bare, where, free, in_files, card)
        return Expectation(part.name, size, tuple(Share(**each) for each in gather(world.transport, asdict(share))))

    def taken(self, world: World) -> list[int | None]:
        """Bytes of each rank's peak above its bare process; None where it held more before. *Collective*."""
        peak = self._peak()
        return gather(world.transport, peak - self._bare if peak > self._peak_before else None)

    def _peak(self) -> int:
        return torch.cuda.max_memory_allocated(self._device) if self._of_gpu else peak_rss_bytes()
