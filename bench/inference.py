"""How fast is a whole event scored, and in how much memory, against the plain network of torch_geometric users?

    python bench/inference.py                                             0.05, 0.4, 1.2 and 3 million edges, simulated
    python bench/inference.py --hits 107800 --competitors eager compile     1.2M
    python bench/inference.py --data DIR --event 1012                       a real event
    python bench/inference.py --ranks 1 --threads 1 --allocator keep        one core
    python bench/inference.py --case tiny --hidden 16 --graph-iters 2 --rounds 1    seconds, to see that it runs

Systems, layouts and turns are those of `step.py`. domainpar scores through `score_events`, as `infer` does for each
event: a part is loaded on each rank, goes through the network, and its scores are gathered; without tracks, files and
judging. The clock runs for the network alone, and for all of that. The plain network (`plain_pyg.py`) has its event in
memory and runs under `torch.no_grad()`. Weights are fresh ones, the same in all.

The program fails if domainpar's scores are not the same bits over ranks, threads, allocators, rounds and calls, or if
logits of the plain network differ by more than 1e-4 of the largest.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import cases
import flags
import measuring
import numpy as np
import numpy.typing as npt
import systems
from measuring import Columns, Row, Spread, of
from on_ranks import Job
from systems import GIB, Measured, Network

HITS = (20_000, 62_300, 107_800, 170_000)
"""Of events with 0.05, 0.4, 1.2 and 3 million candidate edges."""

LARGEST_DIFFERENCE = 1e-4
"""Of logits, relative to the largest."""


def main(argv: Sequence[str] | None = None) -> int:
    options = parse(argv)
    results = measuring.Results("inference", options)
    results.console.print(f"{flags.in_words(options)}\n{measuring.allocators_in_words(options.allocator)}")
    agreed = [scored(results, case, options) for case in cases.chosen_cases(options)]
    results.end()
    return int(not all(agreed))


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = flags.parser(__doc__, "inference", case="", sizes=HITS)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2], help="of a process, of all systems")
    parser.add_argument("--competitors", nargs="*", choices=("eager", "compile"), default=["eager"])
    parser.add_argument("--allocator", nargs="+", choices=measuring.ALLOCATORS, default=list(measuring.ALLOCATORS))
    parser.add_argument("--grouping", default="contiguous")
    flags.add_network(parser)
    flags.add_rounds(parser, rounds=2, repeats=3)
    parser.add_argument("--warmup", type=int, default=1, help="passes of a round before the clock starts")
    return parser.parse_args(argv)


def scored(results: measuring.Results, case: cases.Case, options: argparse.Namespace) -> bool:
    """Measure all systems on one event; returns whether they agree."""
    job = Job(case.store, flags.training_of(options), options.warmup, options.repeats, "scoring_passes")
    network = systems.network_of(case, job.training)
    plain = network.plain_scoring_bytes() / GIB
    results.console.print(f"{case}; the plain network should take some {plain:.1f} GiB")
    layouts = options.allocator, options.ranks, options.threads, options.competitors
    compared = systems.compared(*layouts, {"domainpar": {}})
    measured: dict[int, Measured] = {}
    furthest: dict[int, float] = {}
    reference: npt.NDArray[Any] | None = None
    for of_system in systems.take_turns(compared, job, network, options.rounds, options.timeout):
        measured[id(of_system)] = of_system
        results.console.print(f"  {of_system.system}: {of_system.problem or last_pass(of_system)}")
        if of_system.problem is None:
            logits = of_system.runs[-1][0].pop("logits")  # many of them would fill the memory
            reference = logits if reference is None else reference
            furthest[id(of_system)] = max(difference(logits, reference), furthest.get(id(of_system), 0.0))
    rows = [row_of(of_system, list(measured.values()), network) for of_system in measured.values()]
    for row, key in zip(rows, measured):
        row["difference"] = furthest.get(key)
        results.add(measured="inference", case=case.name, edges=network.num_edges, **row)
    show(results, rows, network)
    return agree(results, rows)


def last_pass(of_system: Measured) -> str:
    return f"{of_system.round_medians('seconds')[-1]:.4f} s"


def difference(logits: npt.NDArray[Any], reference: npt.NDArray[Any]) -> float:
    """Largest difference of two logits over the largest logit; NaN if there are none."""
    largest = np.abs(reference).max(initial=0.0)
    return float(np.abs(logits - reference).max(initial=0.0) / largest) if largest else float("nan")


def row_of(of_system: Measured, measured: Sequence[Measured], network: Network) -> Row:
    """The figures of one system, some of them against others of the same run."""
    row = of_system.figures()
    if of_system.problem is None:
        row["edges_per_second"] = Spread.of([network.num_edges / seconds for seconds in of_system.values("seconds")])
        row |= systems.ratios(of_system, measured)
    return row


def agree(results: measuring.Results, rows: Sequence[Row]) -> bool:
    """Whether scores are the same bits in all rows of domainpar, and near them in the others."""
    same = systems.same_hash(rows, results, "scores")
    differences = [row["difference"] for row in rows if row["difference"] is not None]
    if not differences:
        results.console.print("no system could be measured")
        return False
    near = all(value <= LARGEST_DIFFERENCE for value in differences)  # false for NaN
    verdict = "agree" if near else "DIFFER"
    results.console.print(
        f"logits of systems compared: {len(differences)}; they {verdict}: {max(differences):.1e} of the largest, "
        f"limit {LARGEST_DIFFERENCE:.0e}"
    )
    return same and near


def show(results: measuring.Results, rows: Sequence[Row], network: Network) -> None:
    times: Columns = {
        **systems.SYSTEM,
        "event s": of("seconds"),
        "from, to": lambda row: f"{row['seconds'].low:.3f} {row['seconds'].high:.3f}",
        "M edges/s": of("edges_per_second", "{:.2f}", 1e-6),
        "whole s": of("whole"),
        **systems.RATIOS,
    }
    note = (
        "event: seconds of the network, slowest rank, median over the passes of all rounds, smallest and largest; "
        "whole: with reading and planning the part before and gathering the scores afterwards. "
        f"{systems.ABOUT_RATIOS} {systems.ABOUT_STARS}"
    )
    title = f"Scoring {network.num_edges:,} edges, {network.num_nodes:,} nodes"
    results.show(title, systems.where_measured(times), rows, note)
    memory: Columns = {**systems.SYSTEM, **systems.MEMORY, "logits": lambda row: f"{row['difference']:.0e}"}
    note = f"{systems.ABOUT_MEMORY} logits: largest difference from the first row over the largest logit."
    results.show("Its memory, and its scores", systems.where_measured(memory), rows, note)
    for row in rows:
        if row["problem"] is not None:
            results.console.print(f"{row['system']}, allocator {row['allocator']}: {row['problem']}")


if __name__ == "__main__":
    measuring.run(__file__)
