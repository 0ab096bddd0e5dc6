"""How much of the exchange, and of the sums of gradients, is hidden behind compute?

    python bench/overlap.py --data DIR --event 1012              2 ranks
    python bench/overlap.py --case large --ranks 2 4
    python bench/overlap.py --case tiny --hidden 16 --repeats 3    seconds, to see that it runs

Each rank takes the same training step with overlap and without (every exchange waited for where it starts), in turns.
Beside them the exchanges of a step alone, all ranks at the same time with nothing to compute: what there is to hide.
Hidden is (step without overlap - step with it) / exchanges alone; where the exchanges are a small part of a step, steps
differ by more than all of it, and that part says more.

Sums of gradients start when three quarters of the iterations have done their pass back, or, for comparison, when all
have. What is left of them is the time in their `reduce` on the rank that comes last, which waits for nobody.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from functools import partial
from typing import Any
from unittest.mock import patch

import cases
import flags
import measuring
import torch
from measuring import Columns, Spread, in_turns, ranks_of, slowest
from on_ranks import Job

from domainpar.nn.gradients import GradientSink
from domainpar.parallel.halo import CompleteHalo, HaloRows
from domainpar.parallel.local import HAS_GHOSTS
from domainpar.parallel.world import World
from domainpar.testing import run_ranks


def main(argv: Sequence[str] | None = None) -> int:
    options = parse(argv)
    results = measuring.Results("overlap", options)
    case = cases.chosen_case(options)
    job = Job(case.store, flags.training_of(options), repeats=options.repeats)
    for ranks in options.ranks:
        with measuring.allocator(options.allocator):
            of_ranks = run_ranks(overlapping, ranks, job, transport=options.transport, timeout=options.timeout)
        results.add(measured="overlap", case=case.name, edges=case.record.num_edges, **summary(ranks, of_ranks))
    show(results, options)
    results.end()
    return 0


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = flags.parser(__doc__, "overlap", case="large")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2])
    parser.add_argument("--transport", choices=("mpi", "gloo"), default="mpi")
    parser.add_argument("--allocator", choices=measuring.ALLOCATORS, default="keep")
    flags.add_network(parser)
    parser.add_argument("--repeats", type=int, default=5, help="steps of either kind, after one to warm up")
    parser.add_argument("--timeout", type=float, default=3600.0)
    return parser.parse_args(argv)


def overlapping(world: World, job: Job) -> dict[str, Any]:
    """Seconds of steps with and without overlap, in turns, and of their exchanges alone, on this rank. *Collective*."""
    trainer, samples = job.trainer(world)
    graph = (part := trainer.loader.load(samples[0])).graph
    widths: list[int] = []

    def at_once(halo: CompleteHalo, owned: torch.Tensor) -> HaloRows:
        widths.append(owned.shape[1])
        return spread_at_once(halo, owned)

    def without() -> None:
        widths.clear()
        with patch.object(CompleteHalo, "spread", at_once):
            trainer.step(samples, 0)

    def alone() -> None:
        for table in (torch.ones(graph.num_owned, width) for width in widths):
            part.halo.spread(table).finish()

    left: dict[str, list[float]] = {"early": [], "late": []}

    def with_sums(when: str) -> None:
        def timed(sink: GradientSink, transport: Any, *, reduce: Any = GradientSink.reduce) -> torch.Tensor:
            began = time.perf_counter()
            rejected: torch.Tensor = reduce(sink, transport)
            left[when].append(time.perf_counter() - began)
            return rejected

        with patch.object(GradientSink, "reduce", timed):
            if when == "early":
                trainer.step(samples, 0)
            else:
                with patch.object(GradientSink, "expect_last_pass", lambda sink, transport: None):
                    trainer.step(samples, 0)

    sums = {when: partial(with_sums, when) for when in left}
    calls = {"with": lambda: trainer.step(samples, 0), "without": without, "alone": alone, **sums}
    times = in_turns(calls, world.transport, job.repeats)
    times |= {f"{when}_left": seconds[-job.repeats :] for when, seconds in left.items()}
    edges = graph.tiles.edges
    free = int((edges[:, 1] - edges[:, 0])[edges[:, HAS_GHOSTS] == 0].sum())
    return {**times, "exchanges": len(widths), "edges_without_ghosts": free / max(graph.num_edges, 1)}


def spread_at_once(halo: CompleteHalo, owned: torch.Tensor, *, spread: Any = CompleteHalo.spread) -> HaloRows:
    """Without overlap: wait for the ghosts before anything else."""
    rows: HaloRows = spread(halo, owned)
    rows.finish()
    return rows


def summary(ranks: int, of_ranks: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Times of the slowest rank; the share that is hidden, turn by turn."""
    kinds = ("with", "without", "alone", "early", "late")
    times = {name: slowest([rank[name] for rank in of_ranks]) for name in kinds}
    left = {
        f"{when}_left": [min(turn) for turn in zip(*(rank[f"{when}_left"] for rank in of_ranks))] for when in kinds[3:]
    }
    alone = Spread.of(times["alone"])
    saved = [without - overlap for without, overlap in zip(times["without"], times["with"])]
    return {
        "ranks": ranks,
        **{name: Spread.of(seconds) for name, seconds in (times | left).items()},
        "hidden": Spread.of([seconds / alone.median for seconds in saved]),
        "exchanges": of_ranks[0]["exchanges"],
        "edges_without_ghosts": [rank["edges_without_ghosts"] for rank in of_ranks],
    }


def show(results: measuring.Results, options: argparse.Namespace) -> None:
    columns: Columns = {
        "ranks": ranks_of,
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
    grad_sums: Columns = {
        "ranks": ranks_of,
        "step s, sums early": lambda row: row["early"].text(),
        "step s, late": lambda row: row["late"].text(),
        "left of the sums ms, early": lambda row: row["early_left"].text("{:.2f}", 1e3),
        "left ms, late": lambda row: row["late_left"].text("{:.2f}", 1e3),
    }
    results.show(
        "Sums of gradients behind backward",
        grad_sums,
        results.rows,
        "Early: while the last iterations do their pass back. Left: time in `reduce`, on the rank that comes last.",
    )


if __name__ == "__main__":
    measuring.run(__file__)
