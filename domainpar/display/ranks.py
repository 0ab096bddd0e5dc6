"""Where the time and the memory of a training went, rank by rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from domainpar.display.reading import RunFiles, Table
from domainpar.events.graph import FloatArray
from partitioners.quality import imbalance

PHASES = ("seconds_compute", "seconds_exchange", "seconds_wait")
"""Computing, handing rows to others, waiting for others."""


@dataclass(frozen=True, eq=False)
class RankTimes:
    """Medians over the training steps of a run, P values each.

    Attributes:
        phases: Seconds of a step in each of `PHASES`, by its name.
        step_seconds: Seconds of a step: the slowest rank's.
        owned: Nodes that each rank owned.
        ghosts: Ghosts that each rank held.
        halo_bytes: Bytes that each rank sent in a step.
        peak_bytes: The most memory that each rank's process held in the whole run.
        node_imbalance: Largest owned / mean, median over steps.
        compute_imbalance: Slowest computing / mean, median over steps.
        num_steps: Steps that were looked at; the first one, in which kernels are compiled, is left out.
        other_sizes: Steps of this run that were done on another number of ranks, and are not in these numbers.
    """

    phases: dict[str, FloatArray]
    step_seconds: float
    owned: FloatArray
    ghosts: FloatArray
    halo_bytes: FloatArray
    peak_bytes: FloatArray
    node_imbalance: float
    compute_imbalance: float
    num_steps: int
    other_sizes: int

    @property
    def num_ranks(self) -> int:
        return len(self.owned)


def rank_times(run: RunFiles) -> RankTimes | None:
    """Where a step's time goes on each rank, on the number of ranks the run had last; None before the first step."""
    records = [record for record in run.records_of("train") if record.get("ranks")]
    if not records:
        return None
    size = records[-1]["ranks"]
    alike = [record for record in records if record["ranks"] == size]
    steps = alike[1:] or alike
    compute = _table(steps, "seconds_compute")
    owned = _table(steps, "owned_nodes")
    return RankTimes(
        phases={name: _median(_table(steps, name)) for name in PHASES},
        step_seconds=float(np.median([record["seconds"] for record in steps])),
        owned=_median(owned),
        ghosts=_median(_table(steps, "ghost_nodes")),
        halo_bytes=_median(_table(steps, "halo_bytes")),
        peak_bytes=_table(alike, "peak_rss_bytes").max(axis=0),
        node_imbalance=float(np.median([imbalance(row) for row in owned])),
        compute_imbalance=float(np.median([imbalance(row) for row in compute])),
        num_steps=len(steps),
        other_sizes=len(records) - len(alike),
    )


def _table(records: Sequence[Table], name: str) -> FloatArray:
    return np.array([record[name] for record in records], dtype=np.float64)


def _median(table: FloatArray) -> FloatArray:
    medians: FloatArray = np.median(table, axis=0)
    return medians
