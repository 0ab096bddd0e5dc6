"""What does a training step of one whole event hold, whole or split?

    python bench/memory.py --data DIR --event 1012                     a real event, about 1.2M edges
    python bench/memory.py --hits 62300 --graph-iters 8                simulated, 0.4M edges
    python bench/memory.py --case tiny --hidden 16 --graph-iters 2     seconds, to see that it runs

Measured: the plain network of torch_geometric users (`plain_pyg.py`), eager and checkpointed; domainpar, which keeps
inputs of stages and recomputes each tile; the same with whole iterations recomputed (`--recompute-every`); and
domainpar on several ranks. Each in processes of its own, one thread each, all with one setting of the allocator. The
program fails if domainpar's parameters are not the same in all of them.

Beside it what formulas say: `systems.Network.plain_bytes` (plain) and `systems.Network.split_bytes` (domainpar).
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import cases
import flags
import measuring
import numpy as np
import systems
from measuring import Columns, Row, ranks_of
from on_ranks import Job
from systems import GIB, Measured, Network, System

from domainpar.tracking.events.store import EventStore
from partitioners import group
from partitioners.quality import measure
from partitioners.topology import IntArray


def main(argv: Sequence[str] | None = None) -> int:
    options = parse(argv)
    results = measuring.Results("memory", options)
    case = cases.chosen_case(options)
    job = Job(case.store, flags.training_of(options), repeats=options.repeats)
    network = systems.network_of(case, job.training)
    results.console.print(f"{case}; {flags.in_words(options)}; allocator {options.allocator}, one thread a process")
    split = Split(case, options.grouping)
    measured = {}
    for of_system in systems.take_turns(ways(options), job, network, options.rounds, options.timeout):
        measured[of_system.system.name, of_system.system.ranks] = of_system
        results.console.print(
            f"  {of_system.system.name}, ranks {of_system.system.ranks}: {of_system.problem or 'done'}"
        )
    rows = [row_of(of_system, list(measured.values()), network, split) for of_system in measured.values()]
    for row in rows:
        results.add(measured="memory", case=case.name, edges=network.num_edges, **row)
    show(results, rows, options)
    results.end()
    return int(not systems.same_hash(rows, results))


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = flags.parser(__doc__, "memory", case="large")
    parser.add_argument("--forms", nargs="*", choices=systems.FORMS, default=["eager", "checkpoint"])
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--recompute-every", type=int, nargs="*", default=[2, 4], help="iterations, on one rank")
    parser.add_argument("--allocator", choices=measuring.ALLOCATORS, default="default")
    parser.add_argument("--grouping", default="contiguous")
    flags.add_network(parser)
    flags.add_rounds(parser, rounds=1, repeats=2)
    return parser.parse_args(argv)


def ways(options: argparse.Namespace) -> list[System]:
    """The systems that are measured."""
    plain = [System.plain(form, options.allocator) for form in options.forms]
    recomputed = [
        System(f"recompute every {count}", options.allocator, changes={"recompute_every": count})
        for count in options.recompute_every
    ]
    return [*plain, *recomputed, *(System("domainpar", options.allocator, ranks) for ranks in options.ranks)]


# --- parts ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Split:
    """Sizes of the parts of a split event."""

    case: cases.Case
    grouping: str

    @cache  # noqa: B019  # there is one of them
    def parts(self, count: int) -> tuple[IntArray, IntArray]:
        """Nodes, ghosts included, and local edges of each part."""
        store = EventStore(self.case.store)
        with store.open(store.events()[0]) as event:
            tile = np.repeat(np.arange(event.num_tiles), np.diff(event.node_ptr))
            part = group(event.tile_graph(), count, self.grouping)[tile]
            ids = np.arange(event.num_edges)
            quality = measure(np.stack([event.read_edges(end, ids) for end in ("src", "dst")]), part, count)
        return quality.owned_nodes + quality.incident_ghosts, quality.incident_edges


def largest_part(network: Network, split: Split, ranks: int) -> int:
    """Predicted bytes of the rank that holds most."""
    return int(network.split_bytes(*split.parts(ranks)).max())


# --- rows and tables -------------------------------------------------------------------------------------------------


def row_of(of_system: Measured, measured: Sequence[Measured], network: Network, split: Split) -> Row:
    """Figures of one system; of domainpar's also what a perfect split of one rank's memory would have been."""
    row = {**of_system.figures(), "estimate": None, "of_whole": None}
    if of_system.system.form is not None:
        return {**row, "estimate": of_system.system.predicted_bytes(network)}
    predicted = largest_part(network, split, of_system.system.ranks)
    row["share"] = predicted / largest_part(network, split, 1)
    if not of_system.system.changes:
        row["estimate"] = predicted
    for other in measured:
        if other.system == System("domainpar", of_system.system.allocator) and of_system.runs and other.runs:
            row["of_whole"] = max(of_system.above_bare) / max(other.above_bare)
    return row


def figure(name: str, form: str = "{:.2f}", unit: float = 1.0) -> Callable[[Row], str]:
    return lambda row: form.format(row[name] / unit) if row.get(name) else ""


def gib(name: str) -> Callable[[Row], str]:
    return figure(name, unit=GIB)


def show(results: measuring.Results, rows: Sequence[Row], options: argparse.Namespace) -> None:
    for row in rows:
        if row["problem"] is None:
            row |= {"most": max(row["above_bare"]), "together": sum(row["above_bare"])}
            row["of_estimate"] = row["most"] / row["estimate"] if row["estimate"] else None
    columns: Columns = {
        "system": lambda row: row["system"],
        "ranks": ranks_of,
        "GiB a rank": gib("most"),
        "GiB together": gib("together"),
        "estimate": gib("estimate"),
        "measured / it": figure("of_estimate"),
        "of one rank": figure("of_whole", "{:.3f}"),
        "share": figure("share", "{:.3f}"),
        "over share": lambda row: f"{row['of_whole'] / row['share']:.2f}" if row["of_whole"] else "",
        "step s": lambda row: row["problem"] or row["seconds"].text("{:.2f}"),
    }
    note = (
        "GiB: peak of the fullest process less what it held before the store was opened. of one rank: this over that "
        "of one rank; share: the same of owned nodes, ghosts and local edges, weighed as the formula weighs them. "
        "* more ranks than cores: seconds show nothing about scaling."
    )
    results.show(f"One training step, hidden {options.hidden}, {options.graph_iters} iterations", columns, rows, note)


if __name__ == "__main__":
    measuring.run(__file__)
