"""The profile of some steps of a run: seconds of operations, memory over time, floating-point operations, by rank."""

from __future__ import annotations

import numpy as np

from domainpar.common.words import several
from domainpar.runs.own_files import PROFILE
from domainpar.runs.records import Table, read_file
from domainpar.tracking.display.chart import (
    BLUE,
    GREEN,
    ORANGE,
    PALE,
    PURPLE,
    SKY,
    VERMILION,
    Chart,
    ChartAxis,
    Panel,
    Series,
)
from domainpar.tracking.display.run_files import RunFiles
from domainpar.tracking.display.summary import ReportTable

COLOURS = (BLUE, ORANGE, GREEN, VERMILION, PURPLE, SKY, PALE)
MIB = 2.0**20
MOST_RANKS, MOST_ROWS = 8, 25


def profile_of(run: RunFiles) -> Table | None:
    """The profile of a run; None if it has none.

    Raises:
        Problem: If it cannot be read.
    """
    path = run.directory / PROFILE
    return read_file(path, dict) if path.is_file() else None


def operations(profile: Table) -> tuple[ReportTable, ...]:
    """A row for each operation: its calls, and its own time in a step on each rank; the longest first."""
    ranks = profile["ranks"][:MOST_RANKS]
    by_name: dict[str, list[Table]] = {}
    for number, rank in enumerate(ranks):
        for operation in rank["operations"]:
            by_name.setdefault(operation["name"], [{}] * len(ranks))[number] = operation
    longest = sorted(by_name, key=lambda name: -sum(it.get("seconds", 0.0) for it in by_name[name]))[:MOST_ROWS]
    rows = [
        {"operation": name, "calls": f"{max(it.get('calls', 0.0) for it in by_name[name]):,.4g}"}
        | {f"rank {number}": _milliseconds(it.get("seconds")) for number, it in enumerate(by_name[name])}
        for name in longest
    ]
    sums = [sum(it["seconds"] for it in rank["operations"]) + rank["other_seconds"] for rank in ranks]
    rows.append({"operation": "all", "calls": ""} | {f"rank {n}": _milliseconds(of) for n, of in enumerate(sums)})
    note = f"Own time of operations, without that of those they call; means over {several(profile['steps'], 'step')}."
    if len(ranks) < len(profile["ranks"]):
        note += f" The first {MOST_RANKS} of {several(len(profile['ranks']), 'rank')}."
    return ReportTable.of(rows, note)


def _milliseconds(seconds: float | None) -> str:
    return "–" if seconds is None else f"{1e3 * seconds:,.2f} ms"


def profile_chart(profile: Table) -> Chart:
    """Memory of each rank over the profiled steps; operations of a step on each rank, and how fast they were."""
    all_ranks = profile["ranks"]
    lines = []
    for number, (rank, colour) in enumerate(zip(all_ranks, COLOURS)):
        seconds, held = np.array(rank["memory"], np.float64).reshape(-1, 2).T
        lines.append(Series(f"rank {number}", "line", colour, seconds, held / MIB, width=1.0))
    flops = np.array([rank["flops"] for rank in all_ranks], np.float64)
    rates = flops / np.array([rank["seconds"] for rank in all_ranks]) / 1e9
    ranks = np.arange(len(all_ranks), dtype=np.float64)
    ticks = tuple((float(rank), str(rank)) for rank in range(len(ranks)))
    spare = max(0.5, (4 - len(ranks)) / 2)
    x = ChartAxis("rank", -spare, len(ranks) - 1 + spare, ticks=ticks)
    of_memory = f"Memory in use on each rank over {several(profile['steps'], 'step')}; not what is kept free."
    counted = "Floating-point operations of products in a step, by formula, both passes and all that is made again."
    panels = (
        Panel(
            "memory",
            tuple(lines),
            ChartAxis("time [s]", low=0.0),
            ChartAxis("memory in use [MiB]", low=0.0),
            "",
            of_memory,
        ),
        Panel(
            "flops",
            (Series("operations", "bars", GREEN, ranks, flops / 1e9),),
            x,
            ChartAxis("GFLOP of a step", low=0.0),
            "",
            counted,
        ),
        Panel(
            "rate",
            (Series("rate", "bars", BLUE, ranks, rates),),
            x,
            ChartAxis("GFLOP/s", low=0.0),
            "",
            "The same over the seconds of a step, waiting included.",
        ),
    )
    return Chart("profile", f"Profile of {several(profile['steps'], 'step')}", panels)
