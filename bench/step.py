"""How long does a training step of one whole event take on 1, 2, 4, 8 ranks, and what does each rank hold?

    python bench/step.py --case large                       a simulated event of TrackML size
    python bench/step.py --data DIR --event 1012            a real one
    python bench/step.py --case small --ranks 1 2 --hidden 16        seconds, to see that it runs

Starts `mpiexec` for each number of ranks and each allocator setting, one thread a rank. Every line ends with the
sha256 of all parameters after the same steps: ranks and allocator may not change it, and the program fails if they do.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

import cases
import measuring
import on_ranks
from measuring import Spread

from domainpar.nn.catalogue import BUILT_IN
from domainpar.testing import run_ranks
from partitioners import PARTITIONERS, get_partitioner

GIB, MIB = 2**30, 2**20


def main(argv: Sequence[str] | None = None) -> int:
    options = parse(argv)
    results = measuring.Results("step", options)
    case = cases.chosen_case(options)
    record = case.records[0]
    results.console.print(
        f"{case.name}: {record.num_nodes:,} nodes, {record.num_edges:,} edges, {record.num_tiles} tiles; "
        f"{options.model}, hidden {options.hidden}, {options.graph_iters} iterations, {options.dtype}"
    )
    tiling(results, case, options)
    steps = []
    for allocator in options.allocator:
        for ranks in options.ranks:
            steps.append(one_count(case, ranks, allocator, options))
            results.add(measured="step", case=case.name, edges=record.num_edges, **steps[-1])
            results.console.print(f"  {ranks} ranks, allocator {allocator}: {steps[-1]['seconds'].text()} s")
    show(results, steps)
    results.end()
    return one_hash(results, steps)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cases.add_flags(parser, case="large")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--allocator", nargs="+", choices=measuring.ALLOCATORS, default=["default"])
    parser.add_argument("--grouping", default="contiguous")
    parser.add_argument("--model", choices=BUILT_IN, default="interaction")
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--graph-iters", type=int, default=4)
    parser.add_argument("--dtype", choices=on_ranks.DTYPES, default="float32")
    parser.add_argument("--warmup", type=int, default=1, help="steps before the clock starts")
    parser.add_argument("--repeats", type=int, default=5, help="steps measured")
    parser.add_argument("--tile-shapes", nargs="*", choices=PARTITIONERS, help="shapes to time; default: the store's")
    parser.add_argument("--timeout", type=float, default=3600.0, help="seconds for one number of ranks")
    measuring.add_flags(parser, "step")
    return parser.parse_args(argv)


def tiling(results: measuring.Results, case: cases.Case, options: argparse.Namespace) -> None:
    """Seconds to cut the event into tiles, once for any number of ranks."""
    topology, num_tiles = cases.original_topology(case)
    for shape in [options.partitioner] if options.tile_shapes is None else options.tile_shapes:
        cut = get_partitioner(shape, options.seed)
        seconds = measuring.timed(lambda cut=cut: cut(topology, num_tiles), 3)
        results.add(measured="tiling", case=case.name, shape=shape, tiles=num_tiles, seconds=seconds)
        results.console.print(f"tiling {shape}, {num_tiles} tiles: {seconds.text()} s")


def one_count(case: cases.Case, ranks: int, allocator: str, options: argparse.Namespace) -> dict[str, Any]:
    """Everything about one number of ranks; each time is of the slowest rank."""
    names = ("model", "hidden", "graph_iters", "dtype", "grouping", "seed", "warmup", "repeats")
    settings = on_ranks.StepSettings(case.store, **{name: getattr(options, name) for name in names})
    with measuring.allocator(allocator):
        found = run_ranks(on_ranks.training_steps, ranks, settings, transport="mpi", timeout=options.timeout)
        arguments = (case.store, options.grouping, max(5, options.repeats))
        plans = run_ranks(on_ranks.planning, ranks, *arguments, transport="mpi", timeout=options.timeout)
    names = ("seconds", "compute", "exchange", "wait", *on_ranks.PHASES, *(f"{name}_busy" for name in on_ranks.PHASES))
    held = ("owned_nodes", "ghosts", "owned_edges", "local_edges", "halo_bytes", "bare_rss", "peak_rss")
    busiest = measuring.slowest([rank["compute"] for rank in found])
    means = [sum(step) / ranks for step in zip(*(rank["compute"] for rank in found))]
    return {
        "ranks": ranks,
        "allocator": allocator,
        "cores": os.cpu_count(),
        **{name: Spread.of(measuring.slowest([rank[name] for rank in found])) for name in names},
        "imbalance": Spread.of([most / mean for most, mean in zip(busiest, means)]),
        **{name: [rank[name] for rank in found] for name in held},
        **{f"{name}_seconds": Spread.of(measuring.slowest([rank[name] for rank in plans])) for name in plans[0]},
        "loss": found[0]["loss"],
        "sha256": sorted({rank["sha256"] for rank in found}),
    }


def show(results: measuring.Results, steps: Sequence[dict[str, Any]]) -> None:
    first = {row["allocator"]: row["seconds"].median for row in reversed(steps)}

    def seconds(name: str, unit: float = 1.0, form: str = "{:.3f}") -> Callable[[dict[str, Any]], str]:
        return lambda row: form.format(unit * row[name].median)

    columns: dict[str, Callable[[dict[str, Any]], str]] = {
        "ranks": lambda row: f"{row['ranks']}" + (" *" if row["ranks"] > row["cores"] else ""),
        "allocator": lambda row: row["allocator"],
        "step s": lambda row: row["seconds"].text(),
        "speed-up": lambda row: f"{first[row['allocator']] / row['seconds'].median:.2f}",
        "forward": seconds("forward"),
        "backward": seconds("backward"),
        "reduce": seconds("reduce"),
        "compute": seconds("compute"),
        "imbalance": seconds("imbalance"),
        "exchange": seconds("exchange"),
        "wait": seconds("wait"),
        "peak GiB": lambda row: f"{max(row['peak_rss']) / GIB:.2f}",
        "above bare": lambda row: f"{max(p - b for p, b in zip(row['peak_rss'], row['bare_rss'])) / GIB:.2f}",
        "sha256": lambda row: " ".join(found[:8] for found in row["sha256"]),
    }
    note = "Slowest rank, median over steps [smallest, largest]. * more ranks than cores: not a measure of scaling."
    results.show("One training step of one event", columns, steps, note)
    columns = {
        "ranks": columns["ranks"],
        "allocator": columns["allocator"],
        "grouping ms": seconds("grouping_seconds", 1e3, "{:.2f}"),
        "reading ms": seconds("reading_seconds", 1e3, "{:.1f}"),
        "plan ms": seconds("plan_seconds", 1e3, "{:.1f}"),
        "agreeing ms": seconds("agreeing_seconds", 1e3, "{:.2f}"),
        "ghosts / owned": lambda row: f"{sum(row['ghosts']) / sum(row['owned_nodes']):.2%}",
        "edge work": lambda row: f"{sum(row['local_edges']) / row['edges']:.4f}",
        "halo MiB / step": lambda row: f"{max(row['halo_bytes']) / MIB:.2f}",
    }
    rows = [row for row in results.rows if row["measured"] == "step"]
    results.show("Its plan", columns, rows, "Slowest rank, median; halo: the rank that sends most.")


def one_hash(results: measuring.Results, steps: Sequence[dict[str, Any]]) -> int:
    hashes = {found for row in steps for found in row["sha256"]}
    if len(hashes) == 1:
        results.console.print(f"one hash of all parameters: {hashes.pop()}")
        return 0
    results.console.print(f"PARAMETERS DIFFER: {len(hashes)} hashes")
    return 1


if __name__ == "__main__":
    sys.exit(main())
