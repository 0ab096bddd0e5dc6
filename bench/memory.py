"""What does a training step of one whole event hold, whole or split, and how many devices would it take?

    python bench/memory.py --data DIR --event 1012                     a real event, about 1.2M edges
    python bench/memory.py --hits 62300 --graph-iters 8                simulated, 0.4M edges
    python bench/memory.py --case tiny --hidden 16 --graph-iters 2     seconds, to see that it runs

Measured: the plain network of torch_geometric users (`plain_pyg.py`), eager and checkpointed; domainpar, which keeps
inputs of stages and recomputes each tile; the same with whole iterations recomputed (`--recompute-every`); and
domainpar on several ranks. Each in processes of its own, one thread each, all with one setting of the allocator. The
program fails if domainpar's parameters are not the same in all of them.

Estimated: by `formulas.Network.plain_bytes` (plain) and `domainpar.nn.memory.ModelSize` (domainpar), also for
larger networks (`--sizes`), and from them the smallest number of devices that hold the event. The plain network cannot
be split.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache

import cases
import flags
import measuring
import numpy as np
import systems
from formulas import Network
from measuring import Columns, Row, ranks_of
from on_ranks import Job
from systems import GIB, Measured, System

from domainpar.nn.memory import ModelSize
from domainpar.tracking.events.store import EventStore
from partitioners import group
from partitioners.quality import measure
from partitioners.topology import IntArray

DEVICES = (16, 24, 40, 80)
MOST_DEVICES = 64


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
    estimated = [row for size in options.sizes for row in estimates(size, network, split, options)]
    for row in estimated:
        results.add(measured="estimate", case=case.name, edges=network.num_edges, **row)
    show_devices(results, estimated, options)
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
    parser.add_argument("--sizes", nargs="*", default=["64x4", "64x8", "128x8", "256x8"], help="hidden x iterations")
    parser.add_argument("--usable", type=float, default=0.9, help="share of a device's memory that a step may take")
    return parser.parse_args(argv)


def ways(options: argparse.Namespace) -> list[System]:
    """The systems that are measured."""
    plain = [System.plain(form, options.allocator) for form in options.forms]
    recomputed = [
        System(f"recompute every {count}", options.allocator, changes={"recompute_every": count})
        for count in options.recompute_every
    ]
    return [*plain, *recomputed, *(System("domainpar", options.allocator, ranks) for ranks in options.ranks)]


# --- parts and estimates ---------------------------------------------------------------------------------------------


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
    size = ModelSize(network.hidden, network.graph_iters, network.item_bytes)
    return int(size.bytes_of(*split.parts(ranks)).max())


def devices_needed(network: Network, split: Split, limit: float) -> int | None:
    """The smallest number of ranks whose parts are all predicted to fit; None if more than `MOST_DEVICES`."""
    return next((n for n in range(1, MOST_DEVICES + 1) if largest_part(network, split, n) <= limit), None)


def estimates(size: str, network: Network, split: Split, options: argparse.Namespace) -> list[Row]:
    """Bytes of an undivided event and the number of devices of each kind that hold it, for each form."""
    hidden, graph_iters = map(int, size.split("x"))
    network = replace(network, hidden=hidden, graph_iters=graph_iters)
    limits = {str(device): options.usable * device * GIB for device in DEVICES}
    rows = []
    for form in ("eager", "checkpoint"):
        needed = network.plain_bytes(checkpointed=form == "checkpoint")
        devices = {device: 1 if needed <= limit else None for device, limit in limits.items()}
        rows.append({"system": f"PyG {form}", "size": size, "bytes": needed, "devices": devices})
    devices = {device: devices_needed(network, split, limit) for device, limit in limits.items()}
    rows.append({"system": "domainpar", "size": size, "bytes": largest_part(network, split, 1), "devices": devices})
    return rows


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
        "of one rank; share: the same of owned nodes, ghosts and local edges, weighed as the estimate weighs them. "
        "* more ranks than cores: seconds show nothing about scaling."
    )
    results.show(f"One training step, hidden {options.hidden}, {options.graph_iters} iterations", columns, rows, note)


def show_devices(results: measuring.Results, rows: Sequence[Row], options: argparse.Namespace) -> None:
    columns: Columns = {
        "hidden x iterations": lambda row: row["size"],
        "system": lambda row: row["system"],
        "GiB, undivided": gib("bytes"),
        **{f"{device} GiB": lambda row, name=str(device): str(row["devices"][name] or "-") for device in DEVICES},
    }
    note = (
        f"Estimates; a step may take {options.usable:.0%} of a device. -: the plain network holds the event on one "
        f"device or not at all; domainpar: more than {MOST_DEVICES}."
    )
    results.show("Smallest number of devices that hold the event", columns, rows, note)


if __name__ == "__main__":
    measuring.run(__file__)
