"""What a step leaves behind: one JSON object a line in `metrics.jsonl`, and one line to read."""

from __future__ import annotations

import json
import math
import resource
import sys
import time
from dataclasses import dataclass
from typing import Any

from domainpar.parallel.world import World
from domainpar.training.metrics import EdgeCounts

SHOWN = ("split", "epoch", "step", "loss", "lr", "grad_norm", "edge_efficiency", "edge_purity", "edge_auc", "seconds")
"""What the readable line of a record holds."""


@dataclass
class Stopwatch:
    """Seconds of one step on this rank, from making it until `share`."""

    world: World

    def __post_init__(self) -> None:
        self.world.take_counters()
        self._began = time.perf_counter()

    def share(self, owned_nodes: int, ghost_nodes: int) -> dict[str, Any]:
        """What ranks took and held since; lists hold one value a rank. *Collective*.

        Args:
            owned_nodes: Nodes this rank owned, over all samples.
            ghost_nodes: Ghosts it held.
        """
        seconds = time.perf_counter() - self._began
        counters = self.world.take_counters()
        ours = {
            "seconds": seconds,
            "seconds_compute": seconds - counters.seconds_exchanging - counters.seconds_waiting,
            "seconds_exchange": counters.seconds_exchanging,
            "seconds_wait": counters.seconds_waiting,
            "owned_nodes": owned_nodes,
            "ghost_nodes": ghost_nodes,
            "halo_bytes": counters.bytes_sent,
            "peak_rss_bytes": peak_rss_bytes(),
        }
        ranks = [json.loads(text) for text in self.world.transport.all_gather(json.dumps(ours).encode())]
        shared = {name: [rank[name] for rank in ranks] for name in ours}
        return {"ranks": self.world.size, **shared, "seconds": max(shared["seconds"])}


def metrics_of(counts: EdgeCounts) -> dict[str, Any]:
    """Edge metrics, against the candidate edges in the graph; None where there is nothing to divide by."""
    ratios = {"edge_efficiency": counts.efficiency, "edge_purity": counts.purity, "edge_auc": counts.auc}
    finite: dict[str, Any] = {name: None if math.isnan(value) else value for name, value in ratios.items()}
    return {**finite, "counted_against": "candidate edges", "edges": counts.edges, "target_edges": counts.targets}


def readable(record: dict[str, Any]) -> str:
    """One grep-able `key=value` line."""
    return " ".join(f"{name}={_short(record[name])}" for name in SHOWN if name in record)


def peak_rss_bytes() -> int:
    """The most memory this process ever held, in bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _short(value: object) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)
