"""How fast is the exchange of ghosts, forward and backward, against a memory copy and against MPI itself?

    python bench/exchange.py --case large                   on a simulated event of TrackML size
    python bench/exchange.py --data DIR --event 1012        on a real one
    python bench/exchange.py --case tiny --ranks 2 --repeats 3       seconds, to see that it runs

Exchanges of float32 rows, per transport and number of ranks. Forward, `fill_ghosts` brings node states to ghosts.
Backward, in the complete form of built-in models, it brings them the gradient of the sums at both ends of edges, in
rows twice as wide; in the adjoint form of other models `sum_to_owners` takes the gradient back; `extend` is that
form's forward, a fill into the tail of a new [owned | ghosts] table. They take turns with a plain copy of as many
bytes and, under MPI, with the same messages sent by mpi4py alone. The last table sends messages of given sizes between
two ranks. Each time is the mean of several calls in a row, then the median of the slowest rank.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Sequence
from typing import Any

import cases
import measuring
import numpy as np
import wire
from measuring import Spread

from domainpar.events.store import EventStore
from domainpar.testing import find_mpiexec, run_ranks
from partitioners import group

TRANSPORTS = ("threads", "gloo", "mpi")
SIZES = [8, 4_096, 65_536, 409_600, 4_194_304]


def main(argv: Sequence[str] | None = None) -> None:
    options = parse(argv)
    results = measuring.Results("exchange", options)
    case = cases.chosen_case(options)
    record = case.records[0]
    sizes = f"{record.num_nodes:,} nodes, {record.num_edges:,} edges"
    results.console.print(f"{case.name}: {sizes}, rows of {options.width_of_rows} float32")
    exchanges = [
        one_row(case, transport, ranks, options) for transport in options.transports for ranks in options.ranks
    ]
    for row in exchanges:
        row["bare"] = bare_of(exchanges, row["ranks"])
        results.add(measured="exchange", case=case.name, edges=record.num_edges, **row)
    show(results, exchanges)
    messages = [row for transport in options.transports for row in message_rows(transport, options)]
    for row in messages:
        results.add(measured="message", **row)
    show_messages(results, messages, options.transports)
    results.end()
    wrong = [row for row in exchanges if row["bytes"] != row["lower_bound"]]
    if wrong:
        raise SystemExit(f"{len(wrong)} exchanges moved another number of bytes than the lower bound")


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cases.add_flags(parser, case="large")
    here = TRANSPORTS if find_mpiexec() else TRANSPORTS[:-1]
    parser.add_argument("--transports", nargs="+", choices=TRANSPORTS, default=list(here))
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--grouping", default="contiguous")
    parser.add_argument("--width-of-rows", type=int, default=64, help="columns of a row (default 64)")
    parser.add_argument("--message-sizes", type=int, nargs="*", default=SIZES, help="bytes; none: no such table")
    parser.add_argument("--repeats", type=int, default=20, help="timings of each exchange")
    parser.add_argument("--inner", type=int, default=10, help="calls in a row that one timing is the mean of")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds for one transport and number of ranks")
    measuring.add_flags(parser, "exchange")
    return parser.parse_args(argv)


def one_row(case: cases.Case, transport: Any, ranks: int, options: argparse.Namespace) -> dict[str, Any]:
    """Seconds and bytes of every way to exchange, on so many ranks of one transport."""
    arguments = (case.store, options.grouping, options.width_of_rows, options.repeats, options.inner)
    how = {"transport": transport, "timeout": options.timeout, "domain_size": ranks}
    found = run_ranks(wire.exchanges, ranks, *arguments, **how)
    timed = [name for name in (*wire.EXCHANGES, "bare") if name in found[0]]
    return {
        "transport": transport,
        "ranks": ranks,
        "cores": os.cpu_count(),
        **{name: Spread.of(measuring.slowest([rank[name] for rank in found])) for name in timed},
        "bytes": sum(rank["bytes_sent"] for rank in found),
        "most_bytes": max(rank["bytes_sent"] for rank in found),
        "lower_bound": fewest_rows(case, ranks, options.grouping) * options.width_of_rows * 4,
        "ghost_ratio": sum(rank["ghosts"] for rank in found) / sum(rank["owned_nodes"] for rank in found),
        "neighbours": max(rank["neighbours"] for rank in found),
    }


def bare_of(rows: Sequence[dict[str, Any]], ranks: int) -> Spread | None:
    """What mpi4py alone took for the same messages, from the run on MPI; None without one."""
    return next((row["bare"] for row in rows if row.get("bare") and row["ranks"] == ranks), None)


def message_rows(transport: Any, options: argparse.Namespace) -> list[dict[str, Any]]:
    """One row for each size of a message between two ranks."""
    if not options.message_sizes:
        return []
    arguments = (options.message_sizes, options.repeats, options.inner)
    found = run_ranks(wire.messages, 2, *arguments, transport=transport, timeout=options.timeout)
    return [
        {
            "transport": transport,
            "size": size,
            **{name: Spread.of(measuring.slowest([rank[size][name] for rank in found])) for name in found[0][size]},
        }
        for size in options.message_sizes
    ]


def price_of(rows: Sequence[dict[str, Any]]) -> wire.Price:
    """What the messages of one transport cost, as a latency and a bandwidth."""
    return wire.Price.fit({row["size"]: row["exchange"].median for row in rows})


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


def show(results: measuring.Results, rows: Sequence[dict[str, Any]]) -> None:
    def rate(row: dict[str, Any], name: str, width: int = 1) -> float:
        return width * row["most_bytes"] / row[name].median

    ranks: dict[str, Callable[[dict[str, Any]], str]] = {
        "transport": lambda row: row["transport"],
        "ranks": lambda row: f"{row['ranks']}" + (" *" if row["ranks"] > row["cores"] else ""),
    }
    columns = {
        **ranks,
        "forward us": lambda row: microseconds(row["fill"]),
        "GB/s": lambda row: f"{rate(row, 'fill') / 1e9:.3g}",
        "backward us": lambda row: microseconds(row["gradient"]),
        "GB/s ": lambda row: f"{rate(row, 'gradient', 2) / 1e9:.3g}",
        "copy GB/s": lambda row: f"{rate(row, 'copy') / 1e9:.3g}",
        "forward / copy": lambda row: ratio(row["fill"], row["copy"]),
        "bare MPI us": lambda row: f"{1e6 * row['bare'].median:.0f}" if row["bare"] else "-",
        "forward / bare": lambda row: ratio(row["fill"], row["bare"]),
        "bytes": lambda row: f"{row['bytes']:,}",
        "/ bound": lambda row: f"{row['bytes'] / row['lower_bound']:.3f}" if row["lower_bound"] else "-",
        "ghosts / owned": lambda row: f"{row['ghost_ratio']:.2%}",
        "neighbours": lambda row: str(row["neighbours"]),
    }
    note = (
        "Slowest rank, median [smallest, largest]. GB/s: of the rank that sends most, packing included. / copy and / "
        "bare: how many times longer than a plain memory copy of these bytes, than the same messages by mpi4py alone. "
        "Bytes: forward, of all ranks. * more ranks than cores: mostly waiting for a core."
    )
    results.show("One exchange: forward, and backward in the complete form", columns, rows, note)
    columns = {
        **ranks,
        "extend us": lambda row: microseconds(row["extend"]),
        "sum_to_owners us": lambda row: microseconds(row["sum"]),
        "GB/s": lambda row: f"{rate(row, 'sum') / 1e9:.3g}",
    }
    note = "Both also write a whole table of owned rows, which is most of their time."
    results.show("The adjoint form of other models: forward and backward", columns, rows, note)


def show_messages(results: measuring.Results, messages: Sequence[dict[str, Any]], transports: Sequence[str]) -> None:
    """One row a size, the transports side by side."""
    if not messages:
        return
    found = {(row["transport"], row["size"]): row for row in messages}
    columns: dict[str, Callable[[int], str]] = {
        "bytes": lambda size: f"{size:,}",
        "copy us": lambda size: microseconds(found[transports[-1], size]["copy"], "{:.1f}"),
        **{f"{name} us": lambda size, name=name: microseconds(found[name, size]["exchange"]) for name in transports},
    }
    if "mpi" in transports:
        columns |= {
            "bare MPI us": lambda size: microseconds(found["mpi", size]["bare"], "{:.1f}"),
            "mpi / bare": lambda size: ratio(found["mpi", size]["exchange"], found["mpi", size]["bare"]),
            "one way us": lambda size: f"{5e5 * found['mpi', size]['ping-pong'].median:.3g}",
        }
    note = "Both ways at once, without packing; one way: half of a ping and a pong of mpi4py."
    results.show("Messages between two ranks", columns, sorted({row["size"] for row in messages}), note)
    for name in transports:
        price = price_of([row for row in messages if row["transport"] == name])
        speed = f"{1e-9 / price.per_byte:.3g} GB/s" if price.per_byte else "no time for bytes"
        results.console.print(f"{name}: {1e6 * price.latency:.3g} us a message, then {speed}")


def microseconds(spread: Spread, form: str = "{:.0f}") -> str:
    return Spread(*(1e6 * value for value in (spread.median, spread.low, spread.high)), spread.count).text(form)


def ratio(spread: Spread, other: Spread | None) -> str:
    return f"{spread.median / other.median:.2f}" if other and other.median else "-"


if __name__ == "__main__":
    main()
