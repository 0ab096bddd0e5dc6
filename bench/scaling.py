"""How does a training step scale with ranks: one event on more of them, and larger events on more of them?

    python bench/scaling.py --case large                    a simulated event of TrackML size
    python bench/scaling.py --data DIR --event 1012         strong scaling of a real one
    python bench/scaling.py --case small --parts 4 --kinds strong --hidden 16 --rounds 1      to see that it runs

`measured`: as many ranks as there are cores take steps together. `PREDICTED`: more of them, by steps on pieces of one
rank's event, as `domainpar.estimate` takes them; measured ones have that beside them. Efficiency is t1 / (N tN), in
weak scaling per edge. What ranks hold is the question of `memory.py`.

Weak scaling: simulated events whose edges grow like the ranks. Candidate edges grow like the square of the hits, so
hits grow like the root.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
from collections.abc import Sequence
from itertools import chain
from typing import Any

import cases
import flags
import measuring
import numpy as np
import on_ranks
import torch
from measuring import Columns, Row, Spread, of, slowest
from on_ranks import Job

from domainpar.parallel.world import World
from domainpar.testing import find_mpiexec, run_ranks
from domainpar.tracking.cost.cuts import Cut, stored_tiling
from domainpar.tracking.events.store import EventStore
from domainpar.tracking.training.work import step_lines
from partitioners.quality import imbalance

MEASURED, PREDICTED = "measured", "PREDICTED"
KINDS = ("strong", "weak")
Ranks = list[dict[str, Any]]


def main(argv: Sequence[str] | None = None) -> None:
    options = parse(argv)
    results = measuring.Results("scaling", options)
    for kind in options.kinds:
        rows = rows_of(kind, options, results)
        for row in rows:
            results.add(**row)
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
    parser.add_argument("--parts", type=int, nargs="*", default=[2, 4, 8, 16, 32], help="strong scaling, predicted")
    parser.add_argument("--weak-parts", type=int, nargs="*", default=[2, 4, 8, 16], help="weak scaling, predicted")
    parser.add_argument("--weak-hits", type=int, default=30_000, help="hits of the event of one rank (default 30000)")
    parser.add_argument("--grouping", default="contiguous")
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


def rows_of(kind: str, options: argparse.Namespace, results: measuring.Results) -> list[Row]:
    """One row for each number of ranks: those that take turns, `--rounds` times, and those that are predicted alone."""
    more = options.parts if kind == "strong" else options.weak_parts
    parts = [ranks for ranks in more if ranks not in options.ranks]
    events = events_of(kind, {*options.ranks, *parts}, options)
    runs: dict[int, list[Ranks]] = {ranks: [] for ranks in options.ranks}
    for number in range(options.rounds):
        for ranks in options.ranks:
            results.console.print(f"  {kind} scaling, round {number + 1} of {options.rounds}: {ranks} ranks ...")
            runs[ranks].append(run(events[ranks], ranks, options))
    rows: list[Row] = [{"how": MEASURED, **row_of(rounds, runs[1])} for rounds in runs.values()]
    rows += [{"how": PREDICTED, "ranks": ranks} for ranks in parts]
    for row in rows:
        record = events[row["ranks"]].record
        row |= {"nodes": record.num_nodes, "edges": record.num_edges, "tiles": record.num_tiles}
        row |= {"kind": kind, "case": events[row["ranks"]].name}
    predict_rows(rows, events, options)
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


def run(case: cases.Case, ranks: int, options: argparse.Namespace) -> Ranks:
    """Seconds of every rank."""
    job = Job(case.store, flags.training_of(options), options.warmup, options.repeats)
    launch = {"transport": options.transport, "timeout": options.timeout, "domain_size": ranks}
    return run_ranks(on_ranks.training_steps, ranks, job, **launch)


def predict_rows(rows: Sequence[Row], events: dict[int, cases.Case], options: argparse.Namespace) -> None:
    """Seconds of the fullest part of each row, by pieces of one rank's event; it measures in this process.

    Messages are not in it: they take some per cent of a step at most.
    """
    torch.set_num_threads(1)
    fixed, of_edge = step_lines(World.alone(), flags.training_of(options), events[1].store)[0]
    for row in rows:
        store = EventStore(events[row["ranks"]].store)
        with store.open(store.events()[0]) as event:
            quality = Cut.of(stored_tiling(event), options.grouping, row["ranks"]).quality
        row |= {"predicted": fixed + of_edge * int(quality.incident_edges.max())}
        row |= {"ghost_ratio": quality.incident_ghost_ratio}
        row["edge_work"] = float(quality.incident_edges.sum() / max(row["edges"], 1))
        if row["how"] == MEASURED:
            row["error"] = row["predicted"] / row["seconds"].median - 1


# --- figures ---------------------------------------------------------------------------------------------------------


def row_of(rounds: Sequence[Ranks], alone: Sequence[Ranks]) -> Row:
    """Everything about one number of ranks, against one rank in the same rounds."""
    ranks = rounds[0]  # sizes of parts are the same in all rounds
    return {
        "ranks": len(ranks),
        "cores": os.cpu_count(),
        **times_of(rounds, alone),
        "local_edges": [rank["local_edges"] for rank in ranks],
    }


def times_of(rounds: Sequence[Ranks], alone: Sequence[Ranks]) -> Row:
    """Seconds and ratios, over rounds.

    Both ratios count the edges of this event over those of one rank's, 1 where both are the same event.
    """
    grad_edges = total(rounds[0], "owned_edges") / total(alone[0], "owned_edges")
    seconds = [step_seconds(ranks) for ranks in rounds]
    speed_up = [grad_edges * step_seconds(ranks) / value for ranks, value in zip(alone, seconds)]
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
        "talking": Spread.of([talking(ranks) for ranks in rounds]),
        "compute": compute,
        "cpu": cpu,
    }


def step_seconds(ranks: Ranks) -> float:
    """The slowest rank of each step, then the median."""
    return statistics.median(slowest([rank["seconds"] for rank in ranks]))


def talking(ranks: Ranks) -> float:
    """Seconds of a step for messages, the waiting for slower ranks included."""
    steps = [[a + b for a, b in zip(rank["exchange"], rank["wait"])] for rank in ranks]
    return statistics.median(slowest(steps))


def total(ranks: Ranks, name: str) -> int:
    return sum(rank[name] for rank in ranks)


# --- tables ----------------------------------------------------------------------------------------------------------


def show(results: measuring.Results, kind: str, rows: Sequence[Row]) -> None:
    columns: Columns = {
        "ranks": lambda row: str(row["ranks"]),
        "": lambda row: row["how"],
        "edges": lambda row: f"{row['edges']:,}",
        "step s": lambda row: row["seconds"].text() if "seconds" in row else "",
        "speed-up": of("speed_up", "{:.2f}"),
        "t1 / (N tN)": lambda row: row["efficiency"].text("{:.1%}") if "efficiency" in row else "",
        "slowest / mean": of("imbalance"),
        "talking ms": of("talking", "{:.3g}", 1e3),
        "predicted s": lambda row: f"{row['predicted']:.3g}",
        "error": lambda row: f"{row['error']:+.1%}" if "error" in row else "",
        "ghosts / owned": lambda row: f"{row['ghost_ratio']:.2%}",
        "edge work": lambda row: f"{row['edge_work']:.4f}",
    }
    note = (
        "Median of rounds [smallest, largest]. Slowest rank; talking holds the waiting for it. predicted: by steps on "
        "pieces of the event of one rank, without messages."
    )
    per_edge = "" if kind == "strong" else ", speed-up and efficiency per edge"
    results.show(f"{kind.capitalize()} scaling of a training step{per_edge}", columns, rows, note)


def show_ranks(results: measuring.Results, rows: Sequence[Row]) -> None:
    measured = [row for row in rows if row["how"] == MEASURED]
    columns: Columns = {
        "ranks": lambda row: str(row["ranks"]),
        "slowest / mean": lambda row: f"{row['imbalance'].median:.3f}",
        "CPU": lambda row: f"{row['cpu_imbalance'].median:.3f}",
        "steps of a rank": lambda row: f"{row['unsteadiness'] - 1:.1%}",
        "edges, largest / mean": lambda row: f"{imbalance(np.array(row['local_edges'])):.3f}",
    }
    note = (
        "CPU: slowest / mean in seconds of the processor, which others that use it change less. Steps of a rank: its "
        "longest / its shortest - 1, median over ranks; smaller differences between ranks mean nothing."
    )
    results.show("What each rank of strong scaling does", columns, measured, note)


if __name__ == "__main__":
    measuring.run(__file__)
