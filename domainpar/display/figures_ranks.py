"""Figures of time and memory, rank by rank."""

from __future__ import annotations

from domainpar.display.figures import BLUE, GREEN, ORANGE, Figure, axes, blank
from domainpar.display.ranks import PHASES, RankTimes

PHASE_NAMES = {
    "seconds_compute": ("computing", BLUE),
    "seconds_exchange": ("handing rows to others", ORANGE),
    "seconds_wait": ("waiting for others", "#c9ced6"),
}
MIB = 2.0**20


def rank_figures(times: RankTimes) -> list[Figure]:
    """Time and memory of each rank as bars."""
    return [_time(times), _memory(times)]


def _ranks(times: RankTimes) -> list[str]:
    return [str(rank) for rank in range(times.num_ranks)]


def _time(times: RankTimes) -> Figure:
    plot = blank(barmode="stack", bargap=0.35, legend_traceorder="normal")
    for phase in PHASES:
        name, colour = PHASE_NAMES[phase]
        plot.add_bar(x=_ranks(times), y=times.phases[phase], name=name, marker={"color": colour})
    axes(plot, "rank", "seconds of a step", xaxis={"type": "category"}, yaxis={"rangemode": "tozero"})
    caption = f"Where the time of a training step goes on each rank: medians over {times.num_steps:,} steps."
    return Figure("ranks-time", caption, {"only": plot})


def _memory(times: RankTimes) -> Figure:
    plot = blank(bargap=0.35)
    plot.add_bar(x=_ranks(times), y=times.peak_bytes / MIB, name="peak memory", marker={"color": GREEN})
    axes(plot, "rank", "peak memory [MiB]", xaxis={"type": "category"}, yaxis={"rangemode": "tozero"})
    return Figure("ranks-memory", "The most memory that the process of each rank ever held.", {"only": plot})
