"""The memory of a run on each rank: expected before its first step, and taken."""

from __future__ import annotations

import resource
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil
import torch

from domainpar.common.agreement import gather
from domainpar.parallel.allocator import give_back_freed
from domainpar.parallel.gpus import free_memory, uuid_of
from domainpar.parallel.local import LocalGraph
from domainpar.parallel.world import World
from domainpar.tracking.cost.pieces import PartMemory

OF_PROCESS = 2**24
"""Bytes that do not grow with an event: blocks that tiles are computed in, the optimiser, code not yet touched."""

DATA_BYTES = 72
"""Of a local edge of a part that stays in memory from step to step: features, ends, pair, ids, label, class and weight;
and of a node: features, id, degrees, scales, and its pairs."""

LOADING_BYTES = 200
"""Of a local edge while a part is read and planned, and of a node where the event is scored; seen, not derived."""


def peak_rss_bytes() -> int:
    """The most memory this process ever held, or has held since a run began to watch it, in bytes."""
    # Not ru_maxrss, where Linux has better: a process inherits it from the one that started it, such as a launcher.
    with suppress(OSError, StopIteration):
        lines = Path("/proc/self/status").read_text().splitlines()
        return 1024 * int(next(line for line in lines if line.startswith("VmHWM:")).split()[1])
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


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


@dataclass(frozen=True)
class Expectation:
    """The memory of all ranks while they train on the largest sample; the same on every rank.

    Attributes:
        sample: Its name.
        shares: One for each rank.
        recompute_every: Iterations of a segment that is computed again; None: all are kept.
        leaner: The `recompute_every` that would take least; None where that is no less.
    """

    sample: str
    shares: tuple[Share, ...]
    recompute_every: int | None = None
    leaner: int | None = None

    @property
    def in_files(self) -> bool:
        """Whether tables will lie in files."""
        return any(share.in_files for share in self.shares)

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

    def shortages(self) -> list[list[Share]]:
        """The ranks of each memory that is too small for them, as far as that is known now."""
        places: dict[str, list[Share]] = {}
        for share in self.shares:
            places.setdefault(share.card or share.where, []).append(share)  # ranks of one machine share its memory
        return [
            here
            for here in places.values()
            if sum(share.expected for share in here) > min(share.free for share in here)
        ]


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

    def expect(
        self,
        weight: PartMemory,
        sample: str,
        graph: LocalGraph,
        world: World,
        kept: tuple[int, int] = (0, 0),
        recompute_every: int | None = None,
        ways: Sequence[int | None] = (None,),
        then: PartMemory | None = None,
        share: float = 1.0,
        of_whole: int = 0,
        in_files: bool = False,
    ) -> Expectation:
        """The bytes of all ranks at their peaks, with this rank's part of the largest sample. *Collective*.

        Args:
            weight: The memory of a step, with the data of the part.
            sample: Its name.
            graph: This rank's part of it.
            world: The ranks.
            kept: Nodes and local edges of all samples whose data this rank will keep from step to step.
            recompute_every: Iterations of a segment that is computed again.
            ways: Choices of that, the last of which takes least.
            then: The memory of a second network, which gets a `share` of the edges when the first is done.
            share: That share.
            of_whole: Bytes that this rank takes beside them, of whole events.
            in_files: Whether tables lie in files.
        """
        owned, ghosts, edges = graph.num_owned, graph.plan.num_ghosts, graph.num_edges
        pairs = len(graph.tiles.pair_rows)
        of_others = DATA_BYTES * sum(max(all_of - here, 0) for all_of, here in zip(kept, (owned + ghosts, edges)))
        of_tables = expected = int(weight.of(owned, ghosts, edges, pairs))
        if then is not None:  # what the first one had is used again
            expected = max(expected, int(then.of(owned, ghosts, int(edges * share), int(pairs * share))))
        if in_files:  # at most what a part is made from, and some rows of tables
            expected = LOADING_BYTES * edges + int(weight.through_files(owned + ghosts, edges))
        expected += of_others + of_whole + OF_PROCESS
        where, free = free_memory(self._device)
        card = uuid_of(self._device) if self._of_gpu else ""
        own = Share(owned, ghosts, edges, expected, self._bare, where, free, of_tables * in_files, card)
        shares = tuple(Share(**each) for each in gather(world.transport, asdict(own)))
        return Expectation(sample, shares, recompute_every, None if ways[-1] == recompute_every else ways[-1])

    def taken(self, world: World) -> list[int | None]:
        """Bytes of each rank's peak above its bare process; None where it held more before. *Collective*."""
        peak = self._peak()
        return gather(world.transport, peak - self._bare if peak > self._peak_before else None)

    def _peak(self) -> int:
        return torch.cuda.max_memory_allocated(self._device) if self._of_gpu else peak_rss_bytes()
