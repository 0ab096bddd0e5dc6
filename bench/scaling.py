"""How does a training step scale with ranks: one event on more of them, and larger events on more of them?

    python bench/scaling.py --case large                    a simulated event of TrackML size
    python bench/scaling.py --data DIR --event 1012         strong scaling of a real one
    python bench/scaling.py --case small --parts 4 --kinds strong --hidden 16 --rounds 1      to see that it runs

`measured`: as many ranks as there are cores take steps together. `PROJECTED`: no such machine was there; ranks take
their steps one at a time, each alone on the machine, and the slowest one's own work is added to what its messages would
cost by the latency and the bandwidth that two ranks measured here. Memory bandwidth that ranks share, a network between
machines, and what overlap hides are not in a projection. Efficiency is t1 / (N tN), in weak scaling per edge.

Weak scaling: simulated events whose edges grow like the ranks. Candidate edges grow like the square of the hits, so
hits grow like the root.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path

import cases
import flags
import measuring
import numpy as np
import rank_by_rank
import torch
from exchange import SIZES, Price, messages
from measuring import Columns, Row, Spread
from on_ranks import Job

from domainpar import estimate
from domainpar.measure.rates import slowest
from domainpar.parallel.world import World
from domainpar.testing import find_mpiexec, run_ranks
from domainpar.tracking.config import TrainConfig
from domainpar.tracking.planner import work
from domainpar.tracking.planner.choice import predict
from domainpar.tracking.training.inputs import open_lessons
from partitioners.quality import imbalance, measure

GIB = 2**30
MEASURED, PROJECTED = "measured", "PROJECTED"
KINDS = ("strong", "weak")
Ranks = list[rank_by_rank.Record]


def main(argv: Sequence[str] | None = None) -> None:
    options = parse(argv)
    results = measuring.Results("scaling", options)
    times = run_ranks(messages, 2, SIZES, 10, 10, transport=options.transport, timeout=options.timeout)
    slowest_of = {size: slowest([rank[size]["exchange"] for rank in times]) for size in SIZES}
    price = Price.fit({size: statistics.median(seconds) for size, seconds in slowest_of.items()})
    results.console.print(
        f"{options.transport}: {1e6 * price.latency:.3g} us a message and {1e9 * price.per_byte:.3g} ns a byte, "
        f"fitted to messages of {SIZES[0]} to {SIZES[-1]:,} bytes between two ranks"
    )
    for kind in options.kinds:
        rows = rows_of(kind, price, options, results)
        if options.predict:
            predict_rows(kind, rows, options)
        for row in rows:
            results.add(price=vars(price), **row)
        show(results, kind, rows)
        if kind == "strong":
            show_ranks(results, rows)
    results.end()


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = flags.parser(__doc__, "scaling", case="large")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument(
        "--ranks", type=int, nargs="+", default=[1, 2], help="measured; 1 is always, cores are the limit"
    )
    parser.add_argument("--parts", type=int, nargs="*", default=[2, 4, 8, 16, 32], help="strong scaling, projected")
    parser.add_argument("--weak-parts", type=int, nargs="*", default=[2, 4, 8, 16], help="weak scaling, projected")
    parser.add_argument("--weak-hits", type=int, default=30_000, help="hits of the event of one rank (default 30000)")
    parser.add_argument("--grouping", default="contiguous")
    parser.add_argument("--predict", action="store_true", help="what `domainpar.estimate` says beside it")
    flags.add_network(parser)
    flags.add_rounds(parser, rounds=2, repeats=3)
    parser.add_argument("--warmup", type=int, default=1, help="steps before the clock starts")
    parser.add_argument("--transport", choices=("mpi", "gloo", "threads"), default="mpi" if find_mpiexec() else "gloo")
    options = parser.parse_args(argv)
    if (most := max(options.ranks)) > (os.cpu_count() or 1):
        parser.error(f"{most} ranks on {os.cpu_count()} cores would measure waiting; give numbers beyond in --parts.")
    options.ranks = sorted({1, *options.ranks})
    return options


# --- running ---------------------------------------------------------------------------------------------------------


def rows_of(kind: str, price: Price, options: argparse.Namespace, results: measuring.Results) -> list[Row]:
    """One row for each number of ranks, measured ones first; all take turns, `--rounds` times."""
    parts = options.parts if kind == "strong" else options.weak_parts
    setups = [(MEASURED, ranks) for ranks in options.ranks] + [(PROJECTED, ranks) for ranks in parts]
    events = events_of(kind, {ranks for _, ranks in setups}, options)
    small = cases.chosen_case(argparse.Namespace(**{**vars(options), "data": None, "hits": None, "case": "tiny"}))
    runs: dict[tuple[str, int], list[Ranks]] = {setup: [] for setup in setups}
    for number in range(options.rounds):
        for how, ranks in setups:
            results.console.print(f"  {kind} scaling, round {number + 1} of {options.rounds}: {ranks} ranks, {how} ...")
            runs[how, ranks].append(run(events[ranks], small, how, ranks, options))
    rows: list[Row] = []
    for how, ranks in setups:
        record, row = events[ranks].record, row_of(runs[how, ranks], runs[MEASURED, 1], how, price)
        sizes = {"nodes": record.num_nodes, "edges": record.num_edges, "tiles": record.num_tiles}
        rows.append({"kind": kind, "how": how, **row, "case": events[ranks].name, **sizes})
    return rows


def events_of(kind: str, numbers: set[int], options: argparse.Namespace) -> dict[int, cases.Case]:
    """The event of each number of ranks: one for all, or growing ones."""
    if kind == "strong":
        return dict.fromkeys(numbers, cases.chosen_case(options))
    weak = {**vars(options), "data": None, "num_events": 1}
    hits = {ranks: weak_hits(options.weak_hits, ranks) for ranks in numbers}
    return {ranks: cases.chosen_case(argparse.Namespace(**{**weak, "hits": hits[ranks]})) for ranks in numbers}


def weak_hits(hits: int, ranks: int) -> int:
    """Hits of an event with `ranks` times the edges of one with `hits`."""
    return round(hits * math.sqrt(ranks))


def run(case: cases.Case, small: cases.Case, how: str, ranks: int, options: argparse.Namespace) -> Ranks:
    """Seconds and memory of every rank: together, or one at a time."""
    job = Job(case.store, flags.training_of(options), options.warmup, options.repeats)
    launch = {"transport": options.transport, "timeout": options.timeout, "domain_size": ranks}
    if how == MEASURED:
        return run_ranks(rank_by_rank.together, ranks, job, small.store, **launch)
    with tempfile.TemporaryDirectory() as folder:
        return run_ranks(rank_by_rank.in_turn, ranks, job, small.store, Path(folder), **launch)


def predict_rows(kind: str, rows: Sequence[Row], options: argparse.Namespace) -> None:
    """What `domainpar.estimate` says of each row from pieces of one rank's event; it measures in this process."""
    torch.set_num_threads(1)
    training = flags.training_of(options)
    config = TrainConfig(
        model=training.model, hidden=training.hidden, graph_iters=training.graph_iters, seed=training.seed
    )
    alone, events = World.alone(), events_of(kind, {row["ranks"] for row in rows}, options)
    basis = estimate.basis_here(config, events[1].store, alone)
    for row in rows:
        ranks = row["ranks"]
        # Ranks that take turns are not busy all at once.
        machine = basis.here if row["how"] == MEASURED else replace(basis.here, ranks=ranks, busy=1.0)
        lessons = open_lessons(config, events[ranks].store, alone)
        of_row = replace(basis, events=work.events_of(lessons, lessons.train[0], [lessons.train]))
        tiling = of_row.events.tilings[0]
        cut = measure(tiling.edge_index, tiling.parts(ranks, options.grouping), ranks)
        grid = predict(machine, of_row, cut, ranks, (options.partitioner, options.grouping), None)
        row["predicted"], row["error"] = grid.seconds, grid.seconds / row["seconds"].median - 1


# --- figures ---------------------------------------------------------------------------------------------------------


def row_of(rounds: Sequence[Ranks], alone: Sequence[Ranks], how: str, price: Price) -> Row:
    """Everything about one number of ranks, against one rank in the same rounds."""
    ranks = rounds[0]  # sizes of parts are the same in all rounds
    nodes, edges = total(ranks, "owned_nodes"), total(ranks, "owned_edges")
    return {
        "ranks": len(ranks),
        "cores": os.cpu_count(),
        **times_of(rounds, alone, how, price),
        "ghost_ratio": total(ranks, "ghosts") / nodes,
        "edge_work": total(ranks, "local_edges") / edges,
        "local_edges": [rank["local_edges"] for rank in ranks],
        "share_of_nodes": [(rank["owned_nodes"] + rank["ghosts"]) / nodes for rank in ranks],
        "share_of_edges": [rank["local_edges"] / edges for rank in ranks],
        **{f"above_{before}": most_held(rounds, before) for before in ("bare", "loaded")},
        **{f"above_{before}_of_one": most_held(alone, before)[0] for before in ("bare", "loaded")},
    }


def times_of(rounds: Sequence[Ranks], alone: Sequence[Ranks], how: str, price: Price) -> Row:
    """Seconds and ratios, over rounds.

    Both ratios count the edges of this event over those of one rank's, 1 where both are the same event.
    """
    step = step_seconds if how == MEASURED else lambda ranks: projected_seconds(ranks, price)
    work = total(rounds[0], "owned_edges") / total(alone[0], "owned_edges")
    seconds = [step(ranks) for ranks in rounds]
    speed_up = [work * step_seconds(ranks) / value for ranks, value in zip(alone, seconds)]
    compute, cpu = (
        [[statistics.median(rank[name]) for rank in ranks] for ranks in rounds] for name in ("compute", "cpu")
    )
    return {
        "seconds": Spread.of(seconds),
        "speed_up": Spread.of(speed_up),
        "efficiency": Spread.of([value / len(rounds[0]) for value in speed_up]),
        "imbalance": Spread.of([imbalance(np.array(values)) for values in compute]),
        "cpu_imbalance": Spread.of([imbalance(np.array(values)) for values in cpu]),
        "unsteadiness": statistics.median(max(rank["compute"]) / min(rank["compute"]) for rank in chain(*rounds)),
        "talking": Spread.of([talking(ranks, how, price) for ranks in rounds]),
        "compute": compute,
        "cpu": cpu,
    }


def step_seconds(ranks: Ranks) -> float:
    """The slowest rank of each step, then the median."""
    return statistics.median(slowest([rank["seconds"] for rank in ranks]))


def projected_seconds(ranks: Ranks, price: Price) -> float:
    """The slowest rank: its own work, and its messages at the price measured between two ranks."""
    return max(statistics.median(rank["compute"]) + rank["traffic"].seconds(price, len(ranks)) for rank in ranks)


def talking(ranks: Ranks, how: str, price: Price) -> float:
    """Seconds of a step for messages: measured ones hold the waiting for slower ranks, projected ones do not."""
    if how == PROJECTED:
        return float(max(rank["traffic"].seconds(price, len(ranks)) for rank in ranks))
    steps = [[a + b for a, b in zip(rank["exchange"], rank["wait"])] for rank in ranks]
    return statistics.median(slowest(steps))


def most_held(rounds: Sequence[Ranks], before: str) -> list[int]:
    """Bytes that each rank held at most, above what it held before (`bare` or `loaded`)."""
    return [max(rank["peak_rss"] - rank[f"{before}_rss"] for rank in same) for same in zip(*rounds)]


def total(ranks: Ranks, name: str) -> int:
    return sum(rank[name] for rank in ranks)


# --- tables ----------------------------------------------------------------------------------------------------------


def show(results: measuring.Results, kind: str, rows: Sequence[Row]) -> None:
    columns: Columns = {
        "ranks": lambda row: str(row["ranks"]),
        "": lambda row: row["how"],
        "edges": lambda row: f"{row['edges']:,}",
        "step s": lambda row: row["seconds"].text(),
        "speed-up": lambda row: f"{row['speed_up'].median:.2f}",
        "t1 / (N tN)": lambda row: row["efficiency"].text("{:.1%}"),
        "slowest / mean": lambda row: row["imbalance"].text(),
        "predicted s": lambda row: f"{row['predicted']:.3g}" if "predicted" in row else "",
        "error": lambda row: f"{row['error']:+.1%}" if "error" in row else "",
        "talking ms": lambda row: f"{1e3 * row['talking'].median:.3g}",
        "ghosts / owned": lambda row: f"{row['ghost_ratio']:.2%}",
        "edge work": lambda row: f"{row['edge_work']:.4f}",
    }
    note = (
        "Median of rounds [smallest, largest]. Measured: slowest rank, talking holds the waiting for it. PROJECTED: "
        "ranks took their steps one at a time; the slowest one's own work plus its messages at the price above."
    )
    per_edge = "" if kind == "strong" else ", speed-up and efficiency per edge"
    results.show(f"{kind.capitalize()} scaling of a training step{per_edge}", columns, rows, note)


def show_ranks(results: measuring.Results, rows: Sequence[Row]) -> None:
    columns: Columns = {
        "ranks": lambda row: str(row["ranks"]),
        "": lambda row: "one at a time" if row["how"] == PROJECTED else "together",
        "slowest / mean": lambda row: f"{row['imbalance'].median:.3f}",
        "CPU": lambda row: f"{row['cpu_imbalance'].median:.3f}",
        "steps of a rank": lambda row: f"{row['unsteadiness'] - 1:.1%}",
        "edges, largest / mean": lambda row: f"{imbalance(np.array(row['local_edges'])):.3f}",
        "above bare GiB": lambda row: f"{max(row['above_bare']) / GIB:.3f}",
        "/ share": lambda row: over_share(row, "bare", "nodes"),
        "above loaded GiB": lambda row: f"{max(row['above_loaded']) / GIB:.3f}",
        "/ share ": lambda row: over_share(row, "loaded", "nodes"),
        "/ share of edges": lambda row: over_share(row, "loaded", "edges"),
    }
    note = (
        "CPU: slowest / mean in seconds of the processor, which others that use it change less. Steps of a rank: its "
        "longest / its shortest - 1, median over ranks; smaller differences between ranks mean nothing. Above bare: "
        "most memory less that of Python, torch and MPI, largest rank. Above loaded: less that of a process that has "
        "taken a step on a tiny event. / share: over the same of one rank times the rank's share of nodes (owned + "
        "ghosts) or of edges (local ones), worst rank."
    )
    results.show("What each rank of strong scaling does and holds", columns, rows, note)


def over_share(row: Row, before: str, share: str) -> str:
    """Memory above what was held before, against a rank's share of what one rank held; the worst rank."""
    whole = row[f"above_{before}_of_one"]
    ratios = [held / part for held, part in zip(row[f"above_{before}"], row[f"share_of_{share}"]) if part]
    return f"{max(ratios) / whole:.2f}" if whole else "-"


if __name__ == "__main__":
    measuring.run(__file__)
