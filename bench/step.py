"""How long does a training step of one whole event take, against the plain network of torch_geometric users?

    python bench/step.py --data DIR --event 1012 --ranks 1 2 --threads 1 2  a real event: ranks against threads
    python bench/step.py --hits 20000 --ranks 1 2 --threads 1 2             48,000 edges, simulated
    python bench/step.py --hits 62300                                       0.4M
    python bench/step.py --hits 107800                                      1.2M
    python bench/step.py --hits 139300                                      2M; what does not fit says so
    python bench/step.py --ranks 1 --precision full bf16 --competitors      domainpar alone, also with products in bf16
    python bench/step.py --case tiny --hidden 16 --graph-iters 2 --competitors eager --rounds 1     seconds

Systems are domainpar on ranks and threads and the competitors (`plain_pyg.py`) on threads, each with each allocator
setting. domainpar runs on each of `--ranks` with the first of `--threads` a rank, and on the first of `--ranks` with
the other `--threads`: `--ranks 1 2 --threads 1 2` is one rank of one thread, two ranks of one, one rank of two.

They take turns in rounds; in a round each is started anew, takes `--warmup` steps and then `--repeats` that count.
Ratios are made round by round, of medians. `compile` compiles in its warm-up.

The program fails if domainpar's parameters differ after equal steps, over ranks, threads, allocators and rounds, or if
losses differ by more than 1e-5 between systems; systems of another `--precision` are compared among themselves.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import cases
import flags
import measuring
import numpy as np
import systems
from measuring import Columns, Row, Spread, of
from on_ranks import Job
from systems import Measured, Network

from partitioners.quality import imbalance

PRECISIONS: dict[str, dict[str, Any]] = {"full": {}, "bf16": {"precision": "bf16"}}


def main(argv: Sequence[str] | None = None) -> int:
    options = parse(argv)
    results = measuring.Results("step", options)
    case = cases.chosen_case(options)
    training = flags.training_of(options, threads=options.threads[0])
    job = Job(case.store, training, options.warmup, options.repeats)
    network = systems.network_of(case, job.training)
    results.console.print(f"{case}; {flags.in_words(options)}\n{measuring.allocators_in_words(options.allocator)}")
    measured = run_all(results, job, network, options)
    rows = [row_of(of_system, measured) for of_system in measured]
    for row in rows:
        results.add(measured="step", case=case.name, edges=network.num_edges, **row)
    show(results, rows)
    show_ranks(results, rows)
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
    return parser.parse_args(argv)


# --- steps -----------------------------------------------------------------------------------------------------------


def run_all(results: measuring.Results, job: Job, network: Network, options: argparse.Namespace) -> list[Measured]:
    """All systems, in turns."""
    ours = {"domainpar" if name == "full" else f"domainpar {name}": PRECISIONS[name] for name in options.precision}
    layouts = options.allocator, options.ranks, options.threads, options.competitors
    measured: dict[int, Measured] = {}
    compared = systems.compared(*layouts, ours)
    for of_system in systems.take_turns(compared, job, network, options.rounds, options.timeout):
        measured[id(of_system)] = of_system
        outcome = of_system.problem or f"{of_system.round_medians('seconds')[-1]:.3f} s"
        results.console.print(f"  {of_system.system}: {outcome}")
    return list(measured.values())


def row_of(of_system: Measured, measured: Sequence[Measured]) -> Row:
    """The figures of one system, some of them against others of the same run."""
    system = of_system.system
    row = of_system.figures()
    if of_system.problem is not None:
        return row
    row["full_precision"] = system.full_precision
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
        **systems.MEMORY,
        "loss": lambda row: f"{row['loss_difference']:.0e}",
    }
    note = (
        "Seconds of the slowest rank, median over the steps of all rounds, smallest and largest. first: the first "
        f"step, compiling included. {systems.ABOUT_RATIOS} {systems.ABOUT_MEMORY} loss: largest "
        f"relative difference from the first row. {systems.ABOUT_STARS}"
    )
    results.show("One training step of one event", systems.where_measured(columns), rows, note)
    for row in rows:
        if row["problem"] is not None:
            results.console.print(f"{row['system']}, allocator {row['allocator']}: {row['problem']}")


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
        "halo MiB": lambda row: f"{max(row['halo_bytes']) / 2**20:.2f}",
        "sha256": lambda row: " ".join(sha256[:12] for sha256 in row["sha256"]),
    }
    results.show(
        "Inside domainpar's step", columns, ours, "Seconds of the slowest rank; halo: the rank that sends most."
    )


if __name__ == "__main__":
    measuring.run(__file__)
