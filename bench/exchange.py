"""How fast are `fill_ghosts` and its backward, and do they move more than they must?

    python bench/exchange.py --case large                   on a simulated event of TrackML size
    python bench/exchange.py --data DIR --event 1012        on a real one
    python bench/exchange.py --case tiny --ranks 2 --repeats 3       seconds, to see that it runs

One exchange of float32 rows, per transport and number of ranks. `fill_ghosts` is the forward of every halo and the
backward of the complete one (gradients of aggregates go out, in rows twice as wide); `sum_to_owners` is the backward
of the adjoint one; `extend` is what a model calls, a fill into the tail of a new [owned | ghosts] table. Each time is
the mean of several calls in a row, then the median of the slowest rank.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Sequence
from typing import Any

import cases
import measuring
import numpy as np
import on_ranks
from measuring import Spread

from domainpar.events.store import EventStore
from domainpar.testing import run_ranks
from partitioners import group

TRANSPORTS = ("threads", "gloo", "mpi")


def main(argv: Sequence[str] | None = None) -> None:
    options = parse(argv)
    results = measuring.Results("exchange", options)
    case = cases.chosen_case(options)
    record = case.records[0]
    sizes = f"{record.num_nodes:,} nodes, {record.num_edges:,} edges"
    results.console.print(f"{case.name}: {sizes}, rows of {options.width_of_rows} float32")
    for transport in options.transports:
        for ranks in options.ranks:
            results.add(case=case.name, edges=record.num_edges, **one_row(case, transport, ranks, options))
    show(results)
    results.end()
    wrong = [row for row in results.rows if row["bytes"] != row["lower_bound"]]
    if wrong:
        raise SystemExit(f"{len(wrong)} exchanges moved another number of bytes than the lower bound")


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cases.add_flags(parser, case="large")
    parser.add_argument("--transports", nargs="+", choices=TRANSPORTS, default=list(TRANSPORTS))
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--grouping", default="contiguous")
    parser.add_argument("--width-of-rows", type=int, default=64, help="columns of a row (default 64)")
    parser.add_argument("--repeats", type=int, default=20, help="timings of each exchange")
    parser.add_argument("--inner", type=int, default=10, help="calls in a row that one timing is the mean of")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds for one transport and number of ranks")
    measuring.add_flags(parser, "exchange")
    return parser.parse_args(argv)


def one_row(case: cases.Case, transport: Any, ranks: int, options: argparse.Namespace) -> dict[str, Any]:
    arguments = (case.store, options.grouping, options.width_of_rows, options.repeats, options.inner)
    found = run_ranks(on_ranks.exchanges, ranks, *arguments, transport=transport, timeout=options.timeout)
    return {
        "transport": transport,
        "ranks": ranks,
        "cores": os.cpu_count(),
        **{name: Spread.of(measuring.slowest([rank[name] for rank in found])) for name in on_ranks.EXCHANGES},
        "bytes": sum(rank["bytes_sent"] for rank in found),
        "most_bytes": max(rank["bytes_sent"] for rank in found),
        "lower_bound": fewest_rows(case, ranks, options.grouping) * options.width_of_rows * 4,
        "ghost_ratio": sum(rank["ghosts"] for rank in found) / sum(rank["owned_nodes"] for rank in found),
        "neighbours": max(rank["neighbours"] for rank in found),
    }


def fewest_rows(case: cases.Case, ranks: int, grouping: str) -> int:
    """Distinct (node, other part with an edge at it), from the edges alone, without a plan."""
    store = EventStore(case.store)
    with store.open(store.events()[0]) as event:
        edge_ids = np.arange(event.num_edges)
        src, dst = event.read_edges("src", edge_ids), event.read_edges("dst", edge_ids)
        part = np.repeat(group(event.tile_graph(), ranks, grouping), np.diff(event.node_ptr))
    cut = part[src] != part[dst]
    needed = np.concatenate([src[cut] * ranks + part[dst[cut]], dst[cut] * ranks + part[src[cut]]])
    return len(np.unique(needed))


def show(results: measuring.Results) -> None:
    def rate(row: dict[str, Any], name: str) -> str:
        return f"{row['most_bytes'] / row[name].median / 1e9:.3g}"

    def microseconds(row: dict[str, Any], name: str) -> str:
        spread = row[name]
        return Spread(*(1e6 * value for value in (spread.median, spread.low, spread.high)), spread.count).text("{:.0f}")

    columns: dict[str, Callable[[dict[str, Any]], str]] = {
        "transport": lambda row: row["transport"],
        "ranks": lambda row: f"{row['ranks']}" + (" *" if row["ranks"] > row["cores"] else ""),
        "fill_ghosts us": lambda row: microseconds(row, "fill"),
        "GB/s": lambda row: rate(row, "fill"),
        "sum_to_owners us": lambda row: microseconds(row, "sum"),
        "GB/s ": lambda row: rate(row, "sum"),
        "extend us": lambda row: microseconds(row, "extend"),
        "bytes": lambda row: f"{row['bytes']:,}",
        "/ bound": lambda row: f"{row['bytes'] / row['lower_bound']:.3f}" if row["lower_bound"] else "-",
        "ghosts / owned": lambda row: f"{row['ghost_ratio']:.2%}",
        "neighbours": lambda row: str(row["neighbours"]),
    }
    note = (
        "Slowest rank, median [smallest, largest]. GB/s: of the rank that sends most, packing included. Bytes: of all "
        "ranks. * more ranks than cores: mostly waiting for a core."
    )
    results.show("One exchange", columns, results.rows, note)


if __name__ == "__main__":
    main()
