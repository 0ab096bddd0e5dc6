"""How long does a training step of one whole event take, against the plain network of torch_geometric users?

    python bench/step.py --data DIR --event 1012 --ranks 1 2 --threads 1 2  a real event: ranks against threads
    python bench/step.py --hits 20000 --ranks 1 2 --threads 1 2             48,000 edges, simulated
    python bench/step.py --hits 62300                                       0.4M
    python bench/step.py --hits 107800                                      1.2M
    python bench/step.py --hits 139300                                      2M; what does not fit says so
    python bench/step.py --ranks 1 --precision full bf16 --competitors      domainpar alone, also with products in bf16
    python bench/step.py --ranks 1 --competitors eager --breakdown          and where domainpar's time goes
    python bench/step.py --case tiny --hidden 16 --graph-iters 2 --competitors eager --rounds 1     seconds

Systems are domainpar on ranks and threads and the competitors (`plain_pyg.py`) on threads, each with each allocator
setting. domainpar runs on each of `--ranks` with the first of `--threads` a rank, and on the first of `--ranks` with
the other `--threads`: `--ranks 1 2 --threads 1 2` is one rank of one thread, two ranks of one, one rank of two.

They take turns in rounds; in a round each is started anew, takes `--warmup` steps and then `--repeats` that count.
Ratios are made round by round, of medians. `compile` compiles in its warm-up.

Products: floating point operations of matrix products by formula (`formulas.py`: forward, backward and what the system
recomputes), per thread and second. It is the whole step that is divided by, not the edge stages alone. Their shares are
of what one thread of this machine can do, both timed after each run: the peak, fused multiply-adds in registers that
wait for nothing; and the rate of [4608, 64] x [64, 64], by torch or by domainpar, whichever is faster.

The program fails if domainpar's parameters differ after equal steps, over ranks, threads, allocators and rounds, or if
losses differ by more than 1e-5 between systems; systems of another `--precision` are compared among themselves.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
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
from systems import Measured

from domainpar.measure.rates import slowest
from domainpar.testing import run_ranks
from partitioners.quality import imbalance

MIB = 2**20
PRECISIONS: dict[str, dict[str, Any]] = {"full": {}, "bf16": {"precision": "bf16"}}


def main(argv: Sequence[str] | None = None) -> int:
    options = parse(argv)
    results = measuring.Results("step", options)
    case = cases.chosen_case(options)
    training = flags.training_of(options, threads=options.threads[0])
    job = Job(case.store, training, options.warmup, options.repeats)
    network = systems.network_of(case, job.training)
    results.console.print(f"{case}; {flags.in_words(options)}\n{measuring.allocators_in_words(options.allocator)}")
    measured, limits = run_all(results, job, network, options)
    rows = [row_of(of_system, measured, network, limits) for of_system in measured]
    for row in rows:
        results.add(measured="step", case=case.name, edges=network.num_edges, **row)
    show(results, rows)
    show_work(results, rows, limits)
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
    parser.add_argument("--threads", type=int, nargs="+", default=[1], help="of a process, of all systems; see above")
    parser.add_argument("--grouping", default="contiguous")
    flags.add_network(parser)
    flags.add_rounds(parser, rounds=3, repeats=2)
    parser.add_argument("--warmup", type=int, default=1, help="steps of a round before the clock starts")
    parser.add_argument("--breakdown", action="store_true", help="also profile one step of domainpar on one rank")
    return parser.parse_args(argv)


# --- steps -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Limits:
    """What this machine can do at best, in floating point operations a second, timed between the runs.

    Attributes:
        peaks: Fused multiply-adds in registers, by the number of threads at once: of all of them together.
        product: One matrix product on one thread.
    """

    peaks: Mapping[int, Spread]
    product: Spread


def run_all(
    results: measuring.Results, job: Job, network: Network, options: argparse.Namespace
) -> tuple[list[Measured], Limits]:
    """All systems, and the limits of the machine meanwhile."""
    ours = {"domainpar" if name == "full" else f"domainpar {name}": PRECISIONS[name] for name in options.precision}
    layouts = options.allocator, options.ranks, options.threads, options.competitors
    compared = systems.compared(*layouts, ours)
    in_all = {1, *(system.ranks * system.threads for system in compared)}
    peaks: dict[int, list[float]] = {count: [] for count in sorted(in_all) if count <= (os.cpu_count() or 1)}
    rates: list[float] = []
    measured: dict[int, Measured] = {}
    for of_system in systems.take_turns(compared, job, network, options.rounds, options.timeout):
        measured[id(of_system)] = of_system
        for count, values in peaks.items():
            values.append(measuring.fma_peak(count))
        rates.append(measuring.product_rate())
        outcome = of_system.problem or f"{of_system.round_medians('seconds')[-1]:.3f} s"
        results.console.print(f"  {of_system.system}: {outcome}")
    limits = Limits({count: Spread.of(values) for count, values in peaks.items()}, Spread.of(rates))
    by_threads = {f"peak_{count}": peak for count, peak in limits.peaks.items()}
    results.add(measured="machine", name=measuring.machine_name(), product=limits.product, **by_threads)
    return list(measured.values()), limits


def row_of(of_system: Measured, measured: Sequence[Measured], network: Network, limits: Limits) -> Row:
    """The figures of one system, some of them against others of the same run."""
    system = of_system.system
    row = {**of_system.figures(), "operations": system.operations(network)}
    if of_system.problem is not None:
        return row
    row["full_precision"] = system.full_precision
    row["achieved"] = row["operations"] / row["seconds"].median / (system.ranks * system.threads)
    row["of_peak"] = row["achieved"] / limits.peaks[1].median
    row["of_rate"] = row["achieved"] / limits.product.median
    row["imbalance"] = None
    if system.form is None:  # largest over mean time without exchange and wait, step by step
        steps = [step for run in of_system.runs for step in zip(*(rank["compute"] for rank in run))]
        row["imbalance"] = Spread.of([imbalance(np.array(step)) for step in steps])
    reference = next(other for other in measured if not other.problem)
    row["loss_difference"] = systems.loss_difference(of_system, reference)
    return row | systems.ratios(of_system, measured)


def agree(results: measuring.Results, rows: Sequence[Row]) -> int:
    """1 if parameters or losses differ, or if there is nothing to compare."""
    same = systems.same_hash(rows, results)
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


def show(results: measuring.Results, rows: Sequence[Row]) -> None:
    columns: Columns = {
        **systems.SYSTEM,
        "step s": of("seconds"),
        "from, to": lambda row: f"{row['seconds'].low:.2f} {row['seconds'].high:.2f}",
        "forward": of("forward"),
        "backward": of("backward"),
        "first s": of("first_step", "{:.1f}"),
        **systems.RATIOS,
        "loss": lambda row: f"{row['loss_difference']:.0e}",
    }
    note = (
        "Seconds of the slowest rank, median over the steps of all rounds, smallest and largest. first: the first "
        f"step, compiling included. {systems.ABOUT_RATIOS} loss: largest relative difference from the first row. "
        f"{systems.ABOUT_STARS}"
    )
    results.show("One training step of one event", systems.where_measured(columns), rows, note)
    for row in rows:
        if row["problem"] is not None:
            results.console.print(f"{row['system']}, allocator {row['allocator']}: {row['problem']}")


def show_work(results: measuring.Results, rows: Sequence[Row], limits: Limits) -> None:
    """The table of what each system makes of the machine, and of its memory."""
    columns: Columns = {
        **systems.SYSTEM,
        "GFLOP/s": lambda row: f"{row['achieved'] / 1e9:.1f}",
        "of peak": lambda row: f"{row['of_peak']:.0%}",
        "of rate": lambda row: f"{row['of_rate']:.0%}",
        **systems.MEMORY,
    }
    one, form = limits.peaks[1], "{:.1f}"
    more = [
        f", {threads} threads at once {peak.text(form, 1e-9)}, {peak.median / one.median:.2f} times as much"
        for threads, peak in limits.peaks.items()
        if threads > 1
    ]
    note = (
        "GFLOP/s: of matrix products, per thread; of peak: of fused multiply-adds in registers, one thread; of rate: "
        f"of one product, one thread. {measuring.machine_name()}: peak {one.text(form, 1e-9)} GFLOP/s{''.join(more)}; "
        f"rate {limits.product.text(form, 1e-9)}. {systems.ABOUT_MEMORY}"
    )
    results.show("Its share of the machine, and its memory", systems.where_measured(columns), rows, note)


def show_ranks(results: measuring.Results, rows: Sequence[Row]) -> None:
    """The table of the ranks of domainpar in that time."""
    ours = [row for row in rows if row["form"] is None and row["problem"] is None]
    columns: Columns = {
        **systems.SYSTEM,
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
