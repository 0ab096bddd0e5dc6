"""Predictions of every number of ranks as a picture."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from domainpar.tracking.cost.machine import Machine
from domainpar.tracking.cost.model import Grid, by_ranks
from domainpar.tracking.display.chart import Chart, Colour, Panel, Series, log_axis


def chart(found: Sequence[Grid], machine: Machine) -> Chart:
    """Seconds of a step and memory of a rank against ranks, of the best grid of each."""
    rows = by_ranks(found)
    ranks = np.array(list(rows), np.float64)
    seconds = np.array([grid.seconds for grid in rows.values()])
    gib = np.array([grid.bytes_of_rank / 2**30 for grid in rows.values()])
    ideal = seconds[0] * ranks[0] / ranks
    return Chart(
        "estimate",
        f"Predicted for {machine.name}: the best grid of each number of ranks",
        (
            Panel(
                "time",
                (
                    Series("predicted", "line", Colour.BLUE, ranks, seconds, marker="circle"),
                    Series("one rank's time shared evenly", "line", Colour.ORANGE, ranks, ideal, width=1.0),
                ),
                log_axis("ranks", ranks),
                log_axis("seconds of a step", np.concatenate([seconds, ideal])),
            ),
            Panel(
                "memory",
                (Series("predicted", "line", Colour.BLUE, ranks, gib, marker="circle"),),
                log_axis("ranks", ranks),
                log_axis("GiB of a rank, largest event", gib),
            ),
        ),
    )
