"""How much of the exchange is hidden behind compute?

    python bench/overlap.py --data DIR --event 1012              2 ranks
    python bench/overlap.py --case large --ranks 2 4
    python bench/overlap.py --case tiny --hidden 16 --repeats 3    seconds, to see that it runs

Each rank takes the same training step with overlap and without (every exchange waited for where it starts), in turns.
Beside them the exchanges of a step alone, all ranks at the same time with nothing to compute: what there is to hide.
Hidden is (step without overlap - step with it) / exchanges alone; where the exchanges are a small part of a step, steps
differ by more than all of it, and that part says more.
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
from ways_on_ranks import overlapping

from domainpar.testing import run_ranks


def main(argv: Sequence[str] | None = None) -> int:
    options = parse(argv)
    results = measuring.Results("overlap", options)
    case = cases.chosen_case(options)
    record = case.records[0]
    names = ("model", "hidden", "graph_iters", "dtype", "seed", "repeats")
    settings = on_ranks.StepSettings(case.store, **{name: getattr(options, name) for name in names})
    for ranks in options.ranks:
        with measuring.allocator(options.allocator):
            found = run_ranks(overlapping, ranks, settings, transport=options.transport, timeout=options.timeout)
        results.add(measured="overlap", case=case.name, edges=record.num_edges, **summary(ranks, found))
    show(results, options)
    results.end()
    return 0


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cases.add_flags(parser, case="large")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2])
    parser.add_argument("--transport", choices=("mpi", "gloo"), default="mpi")
    parser.add_argument("--allocator", choices=measuring.ALLOCATORS, default="keep")
    on_ranks.add_network_flags(parser)
    parser.add_argument("--repeats", type=int, default=5, help="steps of either kind, after one to warm up")
    parser.add_argument("--timeout", type=float, default=3600.0)
    measuring.add_flags(parser, "overlap")
    return parser.parse_args(argv)


def summary(ranks: int, found: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Times of the slowest rank; the share that is hidden, turn by turn."""
    slowest = {name: measuring.slowest([rank[name] for rank in found]) for name in ("with", "without", "alone")}
    alone = Spread.of(slowest["alone"])
    saved = [without - overlap for without, overlap in zip(slowest["without"], slowest["with"])]
    return {
        "ranks": ranks,
        "cores": os.cpu_count(),
        **{name: Spread.of(seconds) for name, seconds in slowest.items()},
        "hidden": Spread.of([seconds / alone.median for seconds in saved]),
        "exchanges": found[0]["exchanges"],
        "edges_without_ghosts": [rank["edges_without_ghosts"] for rank in found],
    }


def show(results: measuring.Results, options: argparse.Namespace) -> None:
    columns: dict[str, Callable[[dict[str, Any]], str]] = {
        "ranks": lambda row: f"{row['ranks']}" + (" *" if row["ranks"] > row["cores"] else ""),
        "step s": lambda row: row["with"].text(),
        "without overlap s": lambda row: row["without"].text(),
        "exchanges": lambda row: str(row["exchanges"]),
        "alone ms": lambda row: f"{1e3 * row['alone'].median:.2f}",
        "of a step": lambda row: f"{row['alone'].median / row['without'].median:.2%}",
        "hidden": lambda row: f"{row['hidden'].median:.0%} [{row['hidden'].low:.0%}, {row['hidden'].high:.0%}]",
        "free edges": lambda row: f"{min(row['edges_without_ghosts']):.0%}",
    }
    note = (
        f"{options.transport}, allocator {options.allocator}, one thread a rank; slowest rank, median over steps. Free "
        "edges: share of a rank's edges in tiles that need no ghost, least of all ranks. * more ranks than cores."
    )
    results.show("Exchange behind compute", columns, results.rows, note)


if __name__ == "__main__":
    sys.exit(main())
