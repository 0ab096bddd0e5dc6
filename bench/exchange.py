"""How fast is the exchange of ghosts, forward and backward, against a memory copy and against MPI itself?

    python bench/exchange.py --case large                   on a simulated event of TrackML size
    python bench/exchange.py --data DIR --event 1012        on a real one
    python bench/exchange.py --case tiny --ranks 2 --repeats 3       seconds, to see that it runs

Exchanges of float32 rows, per transport and number of ranks. Forward, `fill_ghosts` brings node states to ghosts.
Backward, in the complete form of built-in models, it brings them the gradient of the sums at both ends of edges, in
rows twice as wide; in the adjoint form of other models `sum_to_owners` takes the gradient back; `extend` is that
form's forward, a fill into the tail of a new [owned | ghosts] table. They take turns with a plain copy of as many
bytes and, under MPI, with the same messages sent by mpi4py alone. Each time is the mean of several calls in a row, then
the median of the slowest rank. What a message of a given size takes: `doctor`.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import cases
import flags
import measuring
import numpy as np
import torch
from measuring import Columns, Row, Spread, in_turns, ranks_of, slowest

from domainpar.parallel.halo import AdjointHalo, Halo
from domainpar.parallel.mpi import import_mpi
from domainpar.parallel.world import World
from domainpar.plan import PartitionPlan
from domainpar.testing import find_mpiexec, run_ranks
from domainpar.tracking.events.store import EventStore
from domainpar.tracking.part_loading import load_part
from partitioners import group

EXCHANGES = ("fill", "gradient", "sum", "extend", "copy")
TRANSPORTS = ("threads", "gloo", "mpi")


def main(argv: Sequence[str] | None = None) -> None:
    options = parse(argv)
    results = measuring.Results("exchange", options)
    case = cases.chosen_case(options)
    results.console.print(f"{case}; rows of {options.width_of_rows} float32")
    exchanges = [
        one_row(case, transport, ranks, options) for transport in options.transports for ranks in options.ranks
    ]
    for row in exchanges:
        # Of the run on MPI, the only one that knows it.
        bare = (other["bare"] for other in exchanges if other.get("bare") and other["ranks"] == row["ranks"])
        row["bare"] = next(bare, None)
        results.add(measured="exchange", case=case.name, edges=case.record.num_edges, **row)
    show(results, exchanges)
    results.end()
    wrong = [row for row in exchanges if row["bytes"] != row["lower_bound"]]
    if wrong:
        raise SystemExit(f"{len(wrong)} exchanges moved another number of bytes than the lower bound")


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = flags.parser(__doc__, "exchange", case="large")
    here = TRANSPORTS if find_mpiexec() else TRANSPORTS[:-1]
    parser.add_argument("--transports", nargs="+", choices=TRANSPORTS, default=list(here))
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--grouping", default="contiguous")
    parser.add_argument("--width-of-rows", type=int, default=64, help="columns of a row (default 64)")
    parser.add_argument("--repeats", type=int, default=20, help="timings of each exchange")
    parser.add_argument("--inner", type=int, default=10, help="calls in a row that one timing is the mean of")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds for one transport and number of ranks")
    return parser.parse_args(argv)


def one_row(case: cases.Case, transport: Any, ranks: int, options: argparse.Namespace) -> Row:
    """Seconds and bytes of every way to exchange, on some ranks of one transport."""
    arguments = (case.store, options.grouping, options.width_of_rows, options.repeats, options.inner)
    how = {"transport": transport, "timeout": options.timeout, "domain_size": ranks}
    of_ranks = run_ranks(exchanges_of, ranks, *arguments, **how)
    timed = [name for name in (*EXCHANGES, "bare") if name in of_ranks[0]]
    return {
        "transport": transport,
        "ranks": ranks,
        **{name: Spread.of(slowest([rank[name] for rank in of_ranks])) for name in timed},
        "bytes": sum(rank["bytes_sent"] for rank in of_ranks),
        "most_bytes": max(rank["bytes_sent"] for rank in of_ranks),
        "lower_bound": fewest_rows(case, ranks, options.grouping) * options.width_of_rows * 4,
        "ghost_ratio": sum(rank["ghosts"] for rank in of_ranks) / sum(rank["owned_nodes"] for rank in of_ranks),
        "neighbours": max(rank["neighbours"] for rank in of_ranks),
    }


def fewest_rows(case: cases.Case, ranks: int, grouping: str) -> int:
    """Distinct (node, other part with an edge at it), from the edges alone, without a plan."""
    store = EventStore(case.store)
    with store.open(store.events()[0]) as event:
        edge_ids = np.arange(event.num_edges)
        src, dst = event.read_edges("src", edge_ids), event.read_edges("dst", edge_ids)
        part = np.repeat(group(event.tile_graph(), ranks, grouping), np.diff(event.node_ptr))
    cut = part[src] != part[dst]
    # A pair (node, part) as one number, so that `unique` counts pairs.
    needed = np.concatenate([src[cut] * ranks + part[dst[cut]], dst[cut] * ranks + part[src[cut]]])
    return len(np.unique(needed))


def show(results: measuring.Results, rows: Sequence[Row]) -> None:
    def rate(row: Row, name: str, width: int = 1) -> float:
        return width * row["most_bytes"] / row[name].median

    ranks: Columns = {"transport": lambda row: row["transport"], "ranks": ranks_of}
    columns: Columns = {
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


def microseconds(spread: Spread, form: str = "{:.0f}") -> str:
    return Spread(*(1e6 * value for value in (spread.median, spread.low, spread.high)), spread.count).text(form)


def ratio(spread: Spread, other: Spread | None) -> str:
    return f"{spread.median / other.median:.2f}" if other and other.median else "-"


# --- the exchanges of a plan -----------------------------------------------------------------------------------------


def exchanges_of(world: World, store: Path, grouping: str, width: int, repeats: int, inner: int) -> dict[str, Any]:
    """Seconds of the exchanges on the first event of a store, each the mean of `inner` in a row. *Collective*.

    They take turns with a plain copy of as many bytes as this rank sends and, on MPI, with the same messages sent by
    bare mpi4py.
    """
    opened = EventStore(store)
    with opened.open(opened.events()[0]) as event:
        plan = load_part(event, world.domain, grouping=grouping).halo.plan
    calls = _exchanges_of(plan, world, width)
    times = in_turns(calls, world.transport, repeats, inner)
    world.take_counters()
    calls["fill"]()
    return {
        **times,
        "bytes_sent": world.take_counters().bytes_sent,
        "ghosts": plan.num_ghosts,
        "owned_nodes": plan.num_owned,
        "neighbours": int(((plan.send_counts > 0) | (plan.recv_counts > 0)).sum()),
    }


def _exchanges_of(plan: PartitionPlan, world: World, width: int) -> dict[str, Callable[[], object]]:
    halo, adjoint = Halo(plan, world.domain), AdjointHalo(plan, world.domain)
    generator = torch.Generator().manual_seed(world.rank)
    owned = torch.randn(plan.num_owned, width, generator=generator)
    ghosts = torch.zeros(plan.num_ghosts, width)
    # In the complete form owners hand out the gradient of the sums at both ends of edges: rows twice as wide.
    gradients, ghost_gradients = torch.cat([owned, owned], 1), torch.cat([ghosts, ghosts], 1)
    sent = np.ones((len(plan.send_rows), width), np.float32)
    copied = np.zeros_like(sent)
    calls: dict[str, Callable[[], object]] = {
        "fill": lambda: halo.fill_ghosts(owned, ghosts),
        "gradient": lambda: halo.fill_ghosts(gradients, ghost_gradients),
        "sum": lambda: halo.sum_to_owners(ghosts),
        "extend": lambda: adjoint.extend(owned),
        "copy": lambda: np.copyto(copied, sent),
    }
    if world.transport.name == "mpi":
        received = np.zeros((plan.num_ghosts, width), np.float32)
        calls["bare"] = _bare_exchange(_blocks(sent, plan.send_counts), _blocks(received, plan.recv_counts))
    return calls


def _blocks(rows: np.ndarray, counts: Sequence[int] | np.ndarray) -> list[np.ndarray]:
    """Rows of each peer."""
    return np.split(rows, np.cumsum(counts)[:-1])


def _bare_exchange(send: Sequence[np.ndarray], receive: Sequence[np.ndarray]) -> Callable[[], object]:
    """Send and receive blocks, one per rank, with mpi4py alone; empty ones do not travel."""
    mpi = import_mpi()
    comm = mpi.COMM_WORLD

    def call() -> None:
        requests = [comm.Irecv(rows, peer) for peer, rows in enumerate(receive) if rows.size]
        requests += [comm.Isend(rows, peer) for peer, rows in enumerate(send) if rows.size]
        mpi.Request.Waitall(requests)

    return call


if __name__ == "__main__":
    measuring.run(__file__)
