"""Predictions in words, and as a table."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from domainpar.common.text_table import text_table
from domainpar.common.words import byte_size, several
from domainpar.tracking.cost.machine import Machine
from domainpar.tracking.cost.model import Grid, best, by_ranks

SHOWN = 12


def lines(found: Sequence[Grid], machine: Machine, steps_per_epoch: int) -> Iterator[str]:
    """The best grid of each number of ranks, the choice and why, and the seconds of an epoch."""
    rows = by_ranks(found)
    alone = next(iter(rows.values())).seconds
    table = [_row(grid, alone) for grid in list(rows.values())[:SHOWN]]
    yield from text_table(list(table[0]), [list(row.values()) for row in table], words=0)
    chosen = best(found)
    if chosen is None:
        memory = byte_size(int(machine.memory))
        yield f"none of them fits into {memory}: share each event among more machines, or take a smaller network"
        return
    yield f"choice : {why(chosen, found)}"
    yield f"an epoch of {several(steps_per_epoch, 'step')}: {chosen.seconds * steps_per_epoch:.3g} s"


def _row(grid: Grid, alone: float) -> dict[str, str]:
    return {
        "ranks": str(grid.ranks),
        "to an event": str(grid.domain_size),
        "grouping": grid.grouping if grid.domain_size > 1 else "-",
        "recompute": "-" if grid.recompute_every is None else f"every {grid.recompute_every}",
        "s per step": f"{grid.seconds:.3g}",
        "x 1 rank": f"{alone / grid.seconds:.2f}",
        "waiting": f"{grid.waiting:.0%}",
        "memory of a rank": byte_size(grid.bytes_of_rank),
        "sent a step": f"{grid.bytes_sent / 1e6:.3g} MB" if grid.bytes_sent else "-",
        "": "" if grid.fits else "does not fit",
    }


def why(chosen: Grid, found: Sequence[Grid]) -> str:
    """The choice in words, against what was nearest to it."""
    share = several(chosen.ranks, "rank") + (
        ""
        if chosen.ranks == 1
        else f", {chosen.domain_size} to an event"
        if chosen.domain_size > 1
        else ", an event each"
    )
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
    if chosen.recompute_every is not None:
        reasons.append("without --recompute-every the memory would not suffice")
    return f"{share}: {chosen.seconds:.3g} s per step" + (f" ({'; '.join(reasons)})" if reasons else "")
