"""The picture of where time and memory went, rank by rank."""

from __future__ import annotations

import numpy as np
from matplotlib.axes import Axes

from domainpar.display.pictures.style import BLUE, GREEN, ORANGE, PALE, Picture, label, legend_above, new_figure
from domainpar.display.ranks import RankTimes, rank_times
from domainpar.display.reading import RunFiles
from domainpar.words import several

PHASES = {
    "seconds_compute": ("computing", BLUE),
    "seconds_exchange": ("handing rows on", ORANGE),
    "seconds_wait": ("waiting", PALE),
}
MIB = 2.0**20
NAME = "ranks"


def draw_ranks(run: RunFiles) -> Picture:
    """Seconds of a training step by phase, and the most memory held, on each rank."""
    times = rank_times(run)
    if times is None:
        return Picture(NAME, absent="no step of the training was finished")
    figure = new_figure(3.2, f"{several(times.num_ranks, 'rank')}, medians over {several(times.num_steps, 'step')}")
    time, memory = figure.subplots(1, 2)
    _draw_time(time, times)
    _draw_memory(memory, times)
    return Picture(NAME, figure)


def _draw_time(axes: Axes, times: RankTimes) -> None:
    ranks, bottom = np.arange(times.num_ranks), np.zeros(times.num_ranks)
    for phase, (name, colour) in PHASES.items():
        axes.bar(ranks, times.phases[phase], 0.6, bottom=bottom, color=colour, label=name)
        bottom += times.phases[phase]
    label(axes, "rank", "time of a training step [s]")
    _ranks_below(axes, times.num_ranks)
    legend_above(axes, 3)


def _draw_memory(axes: Axes, times: RankTimes) -> None:
    held = times.peak_bytes / MIB
    axes.bar(np.arange(times.num_ranks), held, 0.6, color=GREEN)
    label(axes, "rank", "peak memory [MiB]")
    _ranks_below(axes, times.num_ranks)


def _ranks_below(axes: Axes, num_ranks: int) -> None:
    """Whole numbers, not more than fit, and bars no wider than with four ranks."""
    axes.set_xticks(np.arange(0, num_ranks, -(-num_ranks // 16)))
    axes.tick_params(axis="x", length=0)
    axes.grid(False, axis="x")
    axes.locator_params(axis="y", nbins=5)
    spare = max(0.5, (4 - num_ranks) / 2)
    axes.set_xlim(-spare, num_ranks - 1 + spare)
