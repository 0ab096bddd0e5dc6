"""The record of a step: one JSON object a line in `metrics.jsonl`, and one line to read."""

from __future__ import annotations

import errno
import json
import os
import resource
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from domainpar.agreement import gather
from domainpar.atomic_files import write_whole
from domainpar.compiling import clock
from domainpar.parallel.world import World
from domainpar.training.metrics import EdgeCounts

SHOWN = {
    "split": "", "epoch": "", "step": "", "loss": ".5g",
    "edge_efficiency": ".4f", "edge_purity": ".4f", "edge_auc": ".4f", "seconds": ".3g",
}  # fmt: skip
"""The fields of the readable line of a record, with their formats; the rest is in `metrics.jsonl`."""

AGAINST = {False: "candidate edges", True: "candidate edges inside sectors (approximate: naive mode)"}
"""The edges that are counted: of whole events, or of independent sectors."""


@dataclass
class Stopwatch:
    """Seconds of one step on this rank, from its making until `share`, without those of compiling."""

    world: World

    def __post_init__(self) -> None:
        self.world.take_counters()
        self._began = clock()

    def share(self, owned_nodes: int, ghost_nodes: int, local_edges: int) -> dict[str, Any]:
        """Seconds, bytes and sizes of all ranks since then; lists hold one value a rank. *Collective*.

        `halo_bytes` are all rows handed to other ranks. While a part is loaded, requests for its ghosts are among them.

        Args:
            owned_nodes: Nodes this rank owned, over all samples.
            ghost_nodes: Ghosts it held.
            local_edges: Edges it computed on.
        """
        seconds = clock() - self._began
        counters = self.world.take_counters()
        ours = {
            "seconds": seconds,
            "seconds_compute": seconds - counters.seconds_exchanging - counters.seconds_waiting,
            "seconds_exchange": counters.seconds_exchanging,
            "seconds_wait": counters.seconds_waiting,
            "owned_nodes": owned_nodes,
            "ghost_nodes": ghost_nodes,
            "local_edges": local_edges,
            "halo_bytes": counters.bytes_sent,
            "peak_rss_bytes": peak_rss_bytes(),
        }
        ranks = gather(self.world.transport, ours)
        shared = {name: [rank[name] for rank in ranks] for name in ours}
        return {"ranks": self.world.size, **shared, "seconds": max(shared["seconds"])}


def metrics_of(counts: EdgeCounts, in_sectors: bool = False) -> dict[str, Any]:
    """Edge metrics, against the candidate edges in the graph; None where there is nothing to divide by.

    Args:
        counts: The edges, counted.
        in_sectors: Whether the graphs were independent sectors, which lack the edges between them.
    """
    return {
        **counts.ratios(),
        "counted_against": AGAINST[in_sectors],
        "edges": counts.edges,
        "edges_not_scored": counts.not_scored,
        "target_edges": counts.targets,
    }


@dataclass
class MetricsFile:
    """`metrics.jsonl`, to which a record is added whole or not at all.

    Attributes:
        path: The file.
        lost: Records that could not be written.
    """

    path: Path
    lost: int = 0

    def add(self, record: dict[str, Any]) -> OSError | None:
        """Add one record; returns why that was impossible, such as a full disk. The file then ends as it did before."""
        line = (json.dumps(record, allow_nan=False) + "\n").encode()
        try:
            with self.path.open("ab", buffering=0) as file:
                end = file.tell()
                written = file.write(line)
                if written != len(line):  # the disk took a piece of it
                    file.truncate(end)
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            self.lost += 1
            return error
        return None


def keep_records(path: Path, last_step: int) -> int:
    """Drop from `metrics.jsonl` the steps that a run does again when it resumes from an earlier one.

    Args:
        path: The file; may be missing.
        last_step: Step of the checkpoint that the run resumes from. A line that was not finished goes as well.

    Returns:
        The number of finished lines that were dropped because they could not be read.
    """
    if not path.exists():
        return 0
    lines = path.read_bytes().splitlines(keepends=True)
    steps = [_step_of(line) for line in lines]
    kept = [line for line, step in zip(lines, steps) if step is not None and step <= last_step]
    if kept != lines:
        write_whole(path, b"".join(kept))
    return sum(step is None for step, line in zip(steps, lines) if line.endswith(b"\n"))


def _step_of(line: bytes) -> int | None:
    """The step of a line of the metrics; None if it is not whole."""
    try:
        return int(json.loads(line)["step"]) if line.endswith(b"\n") else None
    except (ValueError, KeyError, TypeError):
        return None


def readable(record: dict[str, Any]) -> str:
    """One grep-able `key=value` line, which says so where a result is approximate."""
    shown = [f"{name}={record[name]:{how}}" for name, how in SHOWN.items() if record.get(name) is not None]
    return " ".join(shown + ["approximate=yes"] * (record.get("counted_against") == AGAINST[True]))


def peak_rss_bytes() -> int:
    """The most memory this process ever held, or has held since a run began to watch it, in bytes."""
    # Not ru_maxrss, where Linux has better: a process inherits it from the one that started it, such as a launcher.
    with suppress(OSError, StopIteration):
        lines = Path("/proc/self/status").read_text().splitlines()
        return 1024 * int(next(line for line in lines if line.startswith("VmHWM:")).split()[1])
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
