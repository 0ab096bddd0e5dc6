"""Predictions in words, as a table, and as a picture."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from domainpar.common.words import byte_size, several
from domainpar.tracking.display.chart import BLUE, ORANGE, Chart, Panel, Series, log_axis
from domainpar.tracking.planner.choice import Grid, best, by_ranks
from domainpar.tracking.planner.machine import Machine
from domainpar.tracking.planner.work import STORED

SHOWN = 12


def lines(found: Sequence[Grid], machine: Machine, steps_per_epoch: int) -> Iterator[str]:
    """The best grid of each number of ranks, the choice and why, and what an epoch costs."""
    rows = by_ranks(found)
    alone = next(iter(rows.values())).seconds
    table = [_row(grid, alone, machine, steps_per_epoch) for grid in list(rows.values())[:SHOWN]]
    if len({grid.partitioner for grid in found}) > 1:
        for row, grid in zip(table, rows.values()):
            row["tiles"] = grid.partitioner if grid.domain_size > 1 else "-"
    widths = {name: max(len(name), *(len(row[name]) for row in table)) for name in table[0]}
    yield "  ".join(name.rjust(width) for name, width in widths.items()).rstrip()
    for row in table:
        yield "  ".join(row[name].rjust(width) for name, width in widths.items()).rstrip()
    chosen = best(found)
    if chosen is None:
        yield f"none of them fits into {byte_size(int(machine.memory))}: more --nodes, or a smaller network"
        return
    yield f"choice : {why(chosen, found)}"
    yield f"an epoch of {several(steps_per_epoch, 'step')}: {of_epoch(chosen, machine, steps_per_epoch)}"


def _row(grid: Grid, alone: float, machine: Machine, steps_per_epoch: int) -> dict[str, str]:
    row = {
        "ranks": str(grid.ranks),
        "to an event": str(grid.domain_size),
        "grouping": grid.grouping if grid.domain_size > 1 else "-",
        "recompute": "-" if grid.recompute_every is None else f"every {grid.recompute_every}",
        "s a step": f"{grid.seconds:.3g}",
        "x 1 rank": f"{alone / grid.seconds:.2f}",
        "waiting": f"{grid.waiting:.0%}",
        "memory of a rank": byte_size(grid.bytes_of_rank),
        "sent a step": f"{grid.bytes_sent / 1e6:.3g} MB" if grid.bytes_sent else "-",
    }
    if machine.dollars_per_hour:
        row["dollars an epoch"] = f"{dollars(grid, machine, steps_per_epoch):.3g}"
    return row | {"": "" if grid.fits else "does not fit"}


def why(chosen: Grid, found: Sequence[Grid]) -> str:
    """The choice in words, against what was nearest to it."""
    share = several(chosen.ranks, "rank") + (
        ""
        if chosen.ranks == 1
        else f", {chosen.domain_size} to an event"
        if chosen.domain_size > 1
        else ", an event each"
    )
    stored = [grid for grid in found if grid.fits and grid.partitioner == STORED]
    of_more = [grid for grid in found if grid.fits and grid.ranks > chosen.ranks]
    others = [
        grid for grid in found if grid.fits and grid.ranks == chosen.ranks and grid.domain_size != chosen.domain_size
    ]
    reasons = [f"{chosen.waiting:.0%} of the time ranks do not compute"] if chosen.ranks > 1 else []
    if others:
        reasons.append(f"with {others[0].domain_size} to an event {others[0].seconds / chosen.seconds - 1:.0%} longer")
    if of_more:
        faster = 1 - of_more[0].seconds / chosen.seconds
        reasons.append(f"{of_more[0].ranks} would be {faster:.0%} faster" if faster > 0 else "more are not faster")
    if chosen.partitioner != STORED:
        longer = f", with those of the store {stored[0].seconds / chosen.seconds - 1:.0%} longer" if stored else ""
        reasons.append(f"tiles of prepare --partitioner {chosen.partitioner}{longer}")
    if chosen.recompute_every is not None:
        reasons.append("what is kept would not fit")
    return f"{share}: {chosen.seconds:.3g} s a step" + (f" ({'; '.join(reasons)})" if reasons else "")


def of_epoch(grid: Grid, machine: Machine, steps: int) -> str:
    """Time, energy and price of an epoch, as far as they are known."""
    seconds = grid.seconds * steps
    parts = [f"{seconds:.3g} s"]
    if machine.watts:
        parts.append(f"{seconds * machine.watts * machine.machines(grid.ranks) / 3.6e6:.3g} kWh")
    if machine.dollars_per_hour:
        parts.append(f"{dollars(grid, machine, steps):.3g} dollars")
    return ", ".join(parts)


def dollars(grid: Grid, machine: Machine, steps: int) -> float:
    """Price of an epoch: whole machines are paid for."""
    return grid.seconds * steps / 3600 * machine.machines(grid.ranks) * (machine.dollars_per_hour or 0.0)


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
                    Series("predicted", "line", BLUE, ranks, seconds, marker="circle"),
                    Series("one rank's time shared evenly", "line", ORANGE, ranks, ideal, width=1.0),
                ),
                log_axis("ranks", ranks),
                log_axis("seconds of a step", np.concatenate([seconds, ideal])),
            ),
            Panel(
                "memory",
                (Series("predicted", "line", BLUE, ranks, gib, marker="circle"),),
                log_axis("ranks", ranks),
                log_axis("GiB of a rank, largest event", gib),
            ),
        ),
    )
