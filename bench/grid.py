"""Which grid of ranks is fastest for a fixed batch, what does data parallelism wait for, and is it known before?

    python bench/grid.py                                    events of one size, and of very different sizes: minutes
    python bench/grid.py --sizes 3000 2000 --hidden 16 --rounds 1 --repeats 2      seconds, to see that it runs

A step takes the same events on every grid: groups of ranks that share an event, side by side. `measured`: as many ranks
as there are cores. `PREDICTED`: more, by steps on pieces of an event, as `domainpar.estimate` takes them, and which is
the fastest. `DDP`: torch's DistributedDataParallel of the same network as users of torch_geometric write it, each rank
with whole events of its own, dealt like ours, and the same first loss: the program fails if they differ by more than
rounding.

Waiting: the share of the time of all ranks in which they do not compute. Of DDP that is a step less the same step
without its reduction. Efficiency is t1 / (N tN) of the same system.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import cases
import flags
import measuring
import plain_pyg
import torch
import torch.distributed
from measuring import Columns, Row, Spread, slowest
from on_ranks import Job
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from domainpar.measure.forecast import Line
from domainpar.parallel.world import World
from domainpar.testing import find_mpiexec, run_ranks
from domainpar.tracking.events.construct import Cuts, build_graph
from domainpar.tracking.events.preparation import prepare
from domainpar.tracking.events.simulate import simulate_event
from domainpar.tracking.events.sources import Events
from domainpar.tracking.events.store import EventStore
from domainpar.tracking.training.sampler import deal, samples_of
from domainpar.tracking.training.work import Work, step_lines

LARGEST_DIFFERENCE = 1e-5
MEASURED, PREDICTED, DDP = "measured", "PREDICTED", "DDP"


def main(argv: Sequence[str] | None = None) -> int:
    options = parse(argv)
    results = measuring.Results("grid", options)
    batches = {"as asked": options.sizes} if options.sizes else BATCHES
    agree = True
    for name, sizes in batches.items():
        job = Job(store_of(sizes, options.seed), flags.training_of(options), options.warmup, options.repeats)
        rows = rows_of(job, options, results)
        for row in rows:
            results.add(batch=name, hits=sizes, **row)
        show(results, f"{name}: events of {', '.join(f'{size:,}' for size in sizes)} hits", rows)
        agree &= same_losses(rows, results)
    results.end()
    return int(not agree)


BATCHES = {"alike": (30_000, 30_000, 30_000, 30_000), "different": (52_000, 22_000, 13_000, 8_000)}


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = flags.parser(__doc__, "grid")
    parser.add_argument("--sizes", type=int, nargs="+", help="hits of the events of a step; default: two batches")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--grouping", default="contiguous")
    parser.add_argument("--most-ranks", type=int, default=8, help="predicted up to so many (default 8)")
    flags.add_network(parser, hidden=32)
    flags.add_rounds(parser, rounds=2, repeats=3)
    parser.add_argument("--warmup", type=int, default=1, help="steps before the clock starts")
    return parser.parse_args(argv)


def store_of(sizes: Sequence[int], seed: int) -> Path:
    """A store of one simulated event of each size."""
    of_name = {f"{number:09d}": size for number, size in enumerate(sizes)}
    cuts = Cuts()

    def read(name: str) -> Any:
        return build_graph(simulate_event(seed + int(name), of_name[name], name), cuts)

    settings = {"source": "simulate", "num_hits": list(sizes), "seed": seed, **cuts.settings}
    directory = cases.CACHE / f"grid-{'-'.join(map(str, sizes))}-{seed}"
    prepare(Events(tuple(of_name), read, lambda _: [], settings), directory, val_split=0.0, test_split=0.0)
    return directory


# --- runs ------------------------------------------------------------------------------------------------------------


def rows_of(job: Job, options: argparse.Namespace, results: measuring.Results) -> list[Row]:
    """Every grid of as many ranks as there are cores, in rounds; DDP; and what is predicted."""
    numbers = sorted({1, min(os.cpu_count() or 1, options.most_ranks)})
    asked = [(ranks, size) for ranks in numbers for size in divisors(ranks)]
    runs: dict[tuple[Any, ...], list[list[Row]]] = {}
    for turn in range(options.rounds):
        for ranks, size in asked:
            results.console.print(f"  round {turn + 1} of {options.rounds}: {ranks} ranks, {size} to an event ...")
            transport: Any = "mpi" if find_mpiexec() else "gloo"
            how: dict[str, Any] = {"timeout": options.timeout, "domain_size": size, "transport": transport}
            runs.setdefault((MEASURED, ranks, size), []).append(run_ranks(grid_steps, ranks, job, **how))
        for ranks in numbers:
            with measuring.allocator("keep"):
                found = run_ranks(ddp_steps, ranks, job, transport="gloo", timeout=options.timeout)
            runs.setdefault((DDP, ranks, 1), []).append(found)
    rows = [measured_row(*key, rounds) for key, rounds in runs.items()]
    rows += predictions(job, rows, options)
    for row in rows:
        one = next(other for other in rows if other["ranks"] == 1 and (other["how"] == DDP) == (row["how"] == DDP))
        if "seconds" in row:
            row["efficiency"] = one["seconds"].median / row["ranks"] / row["seconds"].median
    return rows


def grid_steps(world: World, job: Job) -> Row:
    """Steps of all events of a store on this rank of a grid. *Collective*."""
    torch.set_num_threads(1)
    trainer, _ = job.trainer(world)
    samples = samples_of(EventStore(job.store).events(), None)
    records = [trainer.step(samples, step) for step in range(job.warmup + job.repeats)]
    kept = records[job.warmup :]
    return {
        "losses": [record["loss"] for record in records],
        "seconds": [record["seconds"] for record in kept],
        "compute": [record["seconds_compute"][world.rank] for record in kept],
    }


def ddp_steps(world: World, job: Job) -> Row:
    """Steps of DistributedDataParallel: this rank's events one after the other, gradients reduced with the last one."""
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", module="torch_geometric")
    store = EventStore(job.store)
    samples = samples_of(store.events(), None)
    total = sum(sample.record.num_edges for sample in samples)
    mine = deal(samples, world.size)[world.rank]
    events = [plain_pyg.read_event(job.store, job.training.dtype, samples.index(sample)) for sample in mine]
    network = plain_pyg.make_network(job)
    trained = DistributedDataParallel(network) if world.size > 1 else network
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-3, weight_decay=0.01)

    def step(reduces: bool) -> tuple[float, float]:
        """The loss of this rank's events, and seconds."""
        began, loss = time.perf_counter(), 0.0
        optimizer.zero_grad()
        for number, event in enumerate(events):
            alone = world.size > 1 and not (reduces and number == len(events) - 1)
            forward = network if alone else trained  # the module itself, without DDP around it, reduces nothing
            logits = forward(event.x, event.edge_index, event.edge_attr)
            share = F.binary_cross_entropy_with_logits(logits, event.y, reduction="sum") / total
            # DDP takes the mean of gradients over ranks, where a loss over all events is a sum.
            (share * world.size if world.size > 1 else share).backward()
            loss += float(share.detach())
        if reduces:
            optimizer.step()
        return loss, time.perf_counter() - began

    rows: list[tuple[float, float, float]] = []
    for number in range(job.warmup + job.repeats):
        world.transport.barrier()
        own = step(reduces=False)[1] if number >= job.warmup else 0.0  # gradients are thrown away
        world.transport.barrier()
        rows.append((*step(reduces=True), own))
    shares = torch.tensor([loss for loss, _, _ in rows], dtype=torch.float64)
    if world.size > 1:
        torch.distributed.all_reduce(shares)
    kept = rows[job.warmup :]
    return {
        "losses": shares.tolist(),
        "seconds": [seconds for _, seconds, _ in kept],
        "compute": [min(own, seconds) for _, seconds, own in kept],
    }


def measured_row(how: str, ranks: int, size: int, rounds: Sequence[Sequence[Row]]) -> Row:
    seconds = [statistics.median(slowest([rank["seconds"] for rank in of_ranks])) for of_ranks in rounds]
    waiting = []
    for of_ranks, step in zip(rounds, seconds):
        computing = sum(statistics.median(rank["compute"]) for rank in of_ranks)
        waiting.append(max(0.0, 1 - computing / (ranks * step)))
    losses = rounds[0][0]["losses"]
    return {
        "how": how, "ranks": ranks, "domain_size": size, "seconds": Spread.of(seconds),
        "waiting": statistics.median(waiting), "losses": losses,
    }  # fmt: skip


def predictions(job: Job, rows: Sequence[Row], options: argparse.Namespace) -> list[Row]:
    """What one rank's steps on pieces say of measured grids, put beside them, and of larger ones; and the fastest."""
    torch.set_num_threads(1)
    config = replace(job.training, events_per_step=len(EventStore(job.store)), grouping=options.grouping)
    work = Work.of(config, job.store)
    lines = [Line(*line) for line in step_lines(World.alone(), config, job.store)]
    numbers = {row["ranks"] for row in rows}
    more = {2**power for power in range(options.most_ranks.bit_length())} - numbers
    seconds = {
        (ranks, size): work.estimates(config, ranks, size, lines)[0].seconds
        for ranks in sorted(numbers | more)
        for size in divisors(ranks)
    }
    for row in rows:
        if row["how"] == MEASURED:
            row["predicted"] = found = seconds[row["ranks"], row["domain_size"]]
            row["error"] = found / row["seconds"].median - 1
            row["chosen"] = found == min(other for (ranks, _), other in seconds.items() if ranks == row["ranks"])
    return [
        {"how": PREDICTED, "ranks": ranks, "domain_size": size, "predicted": found}
        for (ranks, size), found in seconds.items()
        if ranks in more
    ]


def divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]


def same_losses(rows: Sequence[Row], results: measuring.Results) -> bool:
    """Whether all systems have the same first loss, to rounding."""
    losses = [row["losses"][0] for row in rows if "losses" in row]
    apart = max(abs(loss / losses[0] - 1) for loss in losses)
    bits = {repr(row["losses"]) for row in rows if row["how"] == MEASURED}
    results.console.print(
        f"first losses {'agree' if apart <= LARGEST_DIFFERENCE else 'DIFFER'} to {apart:.0e}; grids of domainpar: "
        f"{'the same bits' if len(bits) == 1 else 'DIFFERENT BITS'}"
    )
    return apart <= LARGEST_DIFFERENCE and len(bits) == 1


def show(results: measuring.Results, title: str, rows: Sequence[Row]) -> None:
    columns: Columns = {
        "": lambda row: row["how"],
        "ranks": lambda row: str(row["ranks"]),
        "to an event": lambda row: str(row["domain_size"]),
        "step s": lambda row: row["seconds"].text() if "seconds" in row else "",
        "t1 / (N tN)": lambda row: f"{row['efficiency']:.1%}" if "efficiency" in row else "",
        "waiting": lambda row: f"{row['waiting']:.1%}" if "waiting" in row else "",
        "predicted s": lambda row: f"{row['predicted']:.3g}" if "predicted" in row else "",
        "error": lambda row: f"{row['error']:+.1%}" if "error" in row else "",
        "choice": lambda row: "*" if row.get("chosen") else "",
    }
    note = "Median of rounds [smallest, largest]. Waiting: of all ranks' time. *: predicted to be the fastest."
    results.show(title, columns, rows, note)


if __name__ == "__main__":
    measuring.run(__file__)
