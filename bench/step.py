"""How long does a training step of one whole event take, against the plain network of torch_geometric users?

    python bench/step.py --data DIR --event 1012 --ranks 1 2                a real event
    python bench/step.py --hits 62300                                       simulated, 0.4M edges
    python bench/step.py --hits 107800                                      1.2M
    python bench/step.py --hits 139300                                      2M; what does not fit says so
    python bench/step.py --ranks 1 --precision full bf16 --competitors      domainpar alone, also with products in bf16
    python bench/step.py --ranks 1 --competitors eager --breakdown          and where domainpar's time goes
    python bench/step.py --case tiny --hidden 16 --graph-iters 2 --competitors eager --rounds 1     seconds

Systems are domainpar on each number of ranks and the competitors (`plain_pyg.py`), each with each allocator setting.
They take turns in rounds; in a round each is started anew, with `--threads` a process, takes `--warmup` steps and then
`--repeats` that count. Ratios are made round by round, of medians. `compile` compiles in its warm-up.

Products: floating point operations of matrix products by formula (`formulas.py`: forward, backward and what the system
recomputes), per thread and second, and their share of the rate of [4608, 64] x [64, 64], one thread, timed after each
run, by torch or by domainpar, whichever is faster. It is the whole step that is divided by, not the edge stages alone.

The program fails if domainpar's parameters differ after equal steps, over ranks, allocators and rounds, or if losses
differ by more than 1e-5 between systems; systems of another `--precision` are compared among themselves.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import cases
import flags
import measuring
import numpy as np
import on_ranks
import systems
from formulas import Network
from measuring import Columns, Row, Spread, of, ranks_of
from on_ranks import Job
from operation_clock import PRODUCTS
from systems import GIB, Measured, System

from domainpar.measure.rates import slowest
from domainpar.testing import run_ranks
from domainpar.words import several
from partitioners.quality import imbalance

MIB = 2**20
PRECISIONS: dict[str, dict[str, Any]] = {"full": {}, "bf16": {"precision": "bf16"}}


def main(argv: Sequence[str] | None = None) -> int:
    options = parse(argv)
    results = measuring.Results("step", options)
    case = cases.chosen_case(options)
    job = Job(case.store, flags.training_of(options), options.warmup, options.repeats)
    network = systems.network_of(case, job.training)
    results.console.print(f"{case}; {flags.in_words(options)}; {several(options.threads, 'thread')} a process")
    measured, rate = run_all(results, job, network, options)
    rows = [row_of(of_system, measured, network, rate, options.threads) for of_system in measured]
    for row in rows:
        results.add(measured="step", case=case.name, edges=network.num_edges, **row)
    show(results, rows, rate)
    show_ranks(results, rows)
    if options.breakdown:
        breakdown(results, job, network, options)
    planning(results, case, options)
    results.end()
    return agree(results, rows)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = flags.parser(__doc__, "step", case="large")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--precision", nargs="+", choices=PRECISIONS, default=["full"], help="of domainpar's edges")
    parser.add_argument("--competitors", nargs="*", choices=systems.FORMS, default=list(systems.FORMS))
    parser.add_argument("--allocator", nargs="+", choices=measuring.ALLOCATORS, default=list(measuring.ALLOCATORS))
    parser.add_argument("--threads", type=int, default=1, help="of each process, of all systems")
    parser.add_argument("--grouping", default="contiguous")
    flags.add_network(parser)
    flags.add_rounds(parser, rounds=3, repeats=2)
    parser.add_argument("--warmup", type=int, default=1, help="steps of a round before the clock starts")
    parser.add_argument("--breakdown", action="store_true", help="also profile one step of domainpar on one rank")
    return parser.parse_args(argv)


# --- steps -----------------------------------------------------------------------------------------------------------


def run_all(
    results: measuring.Results, job: Job, network: Network, options: argparse.Namespace
) -> tuple[list[Measured], Spread]:
    """All systems, and the rate of matrix products meanwhile."""
    compared = [system for allocator in options.allocator for system in compared_with(allocator, options)]
    rates, measured = [], {}
    for of_system in systems.take_turns(compared, job, network, options.rounds, options.timeout):
        measured[of_system.system.name, of_system.system.ranks, of_system.system.allocator] = of_system
        rates.append(measuring.product_rate())
        outcome = of_system.problem or f"{of_system.round_medians('seconds')[-1]:.3f} s"
        ranks = f" on {of_system.system.ranks} ranks" if of_system.system.ranks > 1 else ""
        results.console.print(f"  {of_system.system.name}{ranks}, allocator {of_system.system.allocator}: {outcome}")
    return list(measured.values()), Spread.of(rates)


def compared_with(allocator: str, options: argparse.Namespace) -> list[System]:
    """All systems with one allocator setting."""
    names = {precision: "domainpar" if precision == "full" else f"domainpar {precision}" for precision in PRECISIONS}
    ours = [
        System(names[precision], allocator, ranks, changes=PRECISIONS[precision])
        for precision in options.precision
        for ranks in options.ranks
    ]
    return [*ours, *(System.plain(form, allocator) for form in options.competitors)]


def row_of(of_system: Measured, measured: Sequence[Measured], network: Network, rate: Spread, threads: int) -> Row:
    """The figures of one system, some of them against others of the same run."""
    row = {**of_system.figures(), "threads": threads, "rate": rate, "operations": of_system.system.operations(network)}
    if of_system.problem is not None:
        return row
    row["full_precision"] = of_system.system.full_precision
    row["achieved"] = row["operations"] / row["seconds"].median / (of_system.system.ranks * threads)
    row["imbalance"] = None
    if of_system.system.form is None:  # largest over mean time without exchange and wait, step by step
        steps = [step for run in of_system.runs for step in zip(*(rank["compute"] for rank in run))]
        row["imbalance"] = Spread.of([imbalance(np.array(step)) for step in steps])
    eager = {other.system.allocator: other for other in measured if other.system.form == "eager" and not other.problem}
    alike = eager.get(of_system.system.allocator)
    row["bytes_of_eager"] = sum(of_system.above_bare) / sum(alike.above_bare) if alike else None
    for name, allocator in (("than_eager_alike", of_system.system.allocator), ("than_eager_default", "default")):
        row[name] = systems.ratio(eager[allocator], of_system) if allocator in eager else None
    reference = next(other for other in measured if not other.problem)
    row["loss_difference"] = systems.loss_difference(of_system, reference)
    return row


def agree(results: measuring.Results, rows: Sequence[Row]) -> int:
    """1 if parameters or losses differ, or if there is nothing to compare."""
    same = systems.same_parameters(rows, results)
    differences = [row["loss_difference"] for row in rows if row.get("full_precision")]
    if not differences:
        results.console.print("no system could be measured")
        return 1
    largest, limit = max(differences), systems.LARGEST_DIFFERENCE
    verdict = "agree" if largest <= limit else "DIFFER"
    results.console.print(
        f"losses of systems compared: {len(differences)}; they {verdict}: {largest:.1e}, limit {limit:.0e}"
    )
    return int(not same or not largest <= limit)


# --- tables ----------------------------------------------------------------------------------------------------------


def show(results: measuring.Results, rows: Sequence[Row], rate: Spread) -> None:
    whole: Columns = {
        "step s": of("seconds"),
        "from, to": lambda row: f"{row['seconds'].low:.2f} {row['seconds'].high:.2f}",
        "forward": of("forward"),
        "backward": of("backward"),
        "x eager": of("than_eager_alike", "{:.2f}"),
        "x default": of("than_eager_default", "{:.2f}"),
        "GFLOP/s": lambda row: f"{row['achieved'] / 1e9:.1f}",
        "of rate": lambda row: f"{row['achieved'] / rate.median:.0%}",
        "GiB": lambda row: f"{max(row['above_bare']) / GIB:.2f}",
        "all": lambda row: f"{sum(row['above_bare']) / GIB:.2f}",
        "of eager": lambda row: f"{row['bytes_of_eager']:.2f}" if row["bytes_of_eager"] else "",
        "first s": of("first_step", "{:.1f}"),
        "loss": lambda row: f"{row['loss_difference']:.0e}",
    }
    columns: Columns = {
        "system": lambda row: row["system"],
        "ranks": ranks_of,
        "allocator": lambda row: row["allocator"],
        **{name: lambda row, read=read: read(row) if row["problem"] is None else "" for name, read in whole.items()},
    }
    note = (
        "Seconds of the slowest rank, median over the steps of all rounds, smallest and largest. x eager: how many "
        "times faster than eager PyG with the same allocator setting; x default: with the default one. GFLOP/s: of "
        f"matrix products, per thread; of rate: of one product on one thread, {rate.median / 1e9:.1f} "
        f"[{rate.low / 1e9:.1f}, {rate.high / 1e9:.1f}]. GiB: peak of the fullest process less what it held before the "
        "store was opened; all: of all processes together; of eager: this over eager PyG's, same allocator. first: the "
        "first step, compiling included. loss: largest relative difference from the first row. * more "
        "threads than cores: no measure of scaling."
    )
    results.show("One training step of one event", columns, rows, note)
    for row in rows:
        if row["problem"] is not None:
            results.console.print(f"{row['system']}, allocator {row['allocator']}: {row['problem']}")


def show_ranks(results: measuring.Results, rows: Sequence[Row]) -> None:
    """The table of the ranks of domainpar in that time."""
    ours = [row for row in rows if row["form"] is None and row["problem"] is None]
    first = {(row["system"], row["allocator"]): row["seconds"].median for row in reversed(ours)}
    columns: Columns = {
        "system": lambda row: row["system"],
        "ranks": ranks_of,
        "allocator": lambda row: row["allocator"],
        "speed-up": lambda row: f"{first[row['system'], row['allocator']] / row['seconds'].median:.2f}",
        "reduce": of("reduce"),
        "compute": of("compute"),
        "imbalance": of("imbalance"),
        "exchange": of("exchange", "{:.4f}"),
        "wait": of("wait"),
        "ghosts / owned": lambda row: f"{sum(row['ghosts']) / sum(row['owned_nodes']):.2%}",
        "edge work": lambda row: f"{sum(row['local_edges']) / sum(row['owned_edges']):.4f}",
        "halo MiB": lambda row: f"{max(row['halo_bytes']) / MIB:.2f}",
        "sha256": lambda row: " ".join(sha256[:12] for sha256 in row["sha256"]),
    }
    results.show(
        "Inside domainpar's step", columns, ours, "Seconds of the slowest rank; halo: the rank that sends most."
    )


# --- where the time goes, and what comes before a step ---------------------------------------------------------------


def breakdown(results: measuring.Results, job: Job, network: Network, options: argparse.Namespace) -> None:
    """One step on one rank by operation, with the first allocator setting."""
    with measuring.allocator(options.allocator[0]):
        profile = run_ranks(on_ranks.profiled_step, 1, job, transport="mpi", timeout=options.timeout)[0]
    seconds, operations = profile["seconds"], profile["operations"]
    rest = seconds - sum(operation["seconds"] for operation in operations)
    outside = {"name": "outside all of them", "calls": 1, "seconds": rest, "with_inner": seconds}
    results.add(measured="breakdown", seconds=seconds, operations=[*operations, outside])
    columns: Columns = {
        "operation": lambda row: row["name"],
        "calls": lambda row: f"{row['calls']}",
        "s": lambda row: f"{row['seconds']:.4f}",
        "with inner": lambda row: f"{row['with_inner']:.4f}",
        "of the step": lambda row: f"{row['seconds'] / seconds:.1%}",
    }
    in_products = sum(operation["seconds"] for operation in operations if operation["name"].startswith(PRODUCTS))
    rate = network.streamed_operations() / in_products / 1e9 if in_products else float("nan")
    note = (
        f"A profiled step, {seconds:.3f} s: slower than others. s: inside an operation but not in one that it calls. "
        "aten: torch's operations. Those of programs are named with what they were made for, products with inputs x "
        "outputs; functions of a stage: Python in them. "
        f"{' and '.join(PRODUCTS)} together: {in_products:.3f} s, {rate:.1f} GFLOP/s by formula."
    )
    results.show("Where one rank's time goes", columns, [*operations[:20], outside], note)


def planning(results: measuring.Results, case: cases.Case, options: argparse.Namespace) -> None:
    """Seconds of planning the parts of the event; `partition.py` times cutting it into tiles."""
    rows: list[Row] = []
    arguments = (case.store, options.grouping, max(5, options.repeats))
    for ranks in options.ranks:
        with measuring.allocator(options.allocator[0]):
            of_ranks = run_ranks(on_ranks.planning, ranks, *arguments, transport="mpi", timeout=options.timeout)
        times = {name: Spread.of(slowest([rank[name] for rank in of_ranks])) for name in of_ranks[0]}
        rows.append({"ranks": ranks, "allocator": options.allocator[0], **times})
        results.add(measured="plan", case=case.name, **rows[-1])
    columns: Columns = {
        "ranks": ranks_of,
        **{f"{name} ms": of(name, "{:.2f}", 1e3) for name in ("grouping", "reading", "plan", "agreeing")},
    }
    results.show("Its plan", columns, rows, "Slowest rank, median.")


if __name__ == "__main__":
    measuring.run(__file__)
