"""Time and memory of a training, rank by rank: the numbers, and the chart of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from domainpar.display.chart import BLUE, GREEN, ORANGE, PALE, Axis, Chart, Panel, Series
from domainpar.display.run_files import RunFiles, Table
from domainpar.events.graph import FloatArray
from domainpar.words import several
from partitioners.quality import imbalance

PHASES = {
    "seconds_compute": ("computing", BLUE),
    "seconds_exchange": ("handing rows on", ORANGE),
    "seconds_wait": ("waiting", PALE),
}
"""Phases of a step by their keys in a record: name and colour."""

MIB = 2.0**20


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
        num_steps: Steps in these numbers; the first, in which kernels are compiled, is left out.
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
    """Times and memory of each rank, on the number of ranks the run had last; None before the first step."""
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


def rank_chart(times: RankTimes) -> Chart:
    """Seconds of a training step by phase, and the most memory held, on each rank."""
    ranks = np.arange(times.num_ranks, dtype=np.float64)
    # Whole numbers, not more than fit; bars no wider than with four ranks.
    ticks = tuple((float(rank), str(rank)) for rank in range(0, times.num_ranks, -(-times.num_ranks // 16)))
    spare = max(0.5, (4 - times.num_ranks) / 2)
    x = Axis("rank", -spare, times.num_ranks - 1 + spare, ticks=ticks)
    phases = tuple(Series(name, "bars", colour, ranks, times.phases[key]) for key, (name, colour) in PHASES.items())
    memory = Series("peak memory", "bars", GREEN, ranks, times.peak_bytes / MIB)
    steps = several(times.num_steps, "step")
    caption = f"Where the time of a training step goes on each rank: medians over {steps}."
    panels = (
        Panel("time", phases, x, Axis("time of a training step [s]", low=0.0), "", caption),
        Panel("memory", (memory,), x, Axis("peak memory [MiB]", low=0.0), "",
              "The most memory that the process of each rank ever held."),
    )  # fmt: skip
    return Chart("ranks", f"{several(times.num_ranks, 'rank')}, medians over {steps}", panels)


def _table(records: Sequence[Table], name: str) -> FloatArray:
    return np.array([record[name] for record in records], dtype=np.float64)


def _median(table: FloatArray) -> FloatArray:
    medians: FloatArray = np.median(table, axis=0)
    return medians
