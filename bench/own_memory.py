"""What does a step of a whole event hold that trains a network of torch alone, and what do the ways to save it cost?

    python bench/own_memory.py --data DIR --event 1012                  a real event, about 1.2M edges: an hour
    python bench/own_memory.py --hits 62300 --networks interaction      simulated, 0.4M edges
    python bench/own_memory.py --case tiny --sizes 16x2 16x2            seconds, to see that it runs

`interaction` is the interaction network of torch_geometric's users (`plain_pyg.py`), `acorn2` that of GNN4ITk, with
batch norms. Bare, in one process, as their authors run them: everything kept; each encoder and iteration checkpointed
by torch; updates of edges streamed over blocks (`domainpar.stream`). Then on parts, as `train` runs them, whole and
split: kept, checkpointed by the network itself, recomputed (`--recompute-every 1`), streamed, and both.

Each in processes of its own, one thread each. The allocator gives large blocks back to the system at once, so that
what is said to be held is held (`lean`, as `train --allocator lean`); that costs time. The program fails if the losses
of the first step differ by more than rounding. What would not fit is not run, and its memory estimated from a smaller
event: what a node or an edge holds does not depend on the event.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import cases
import flags
import measuring
import on_ranks
import plain_pyg
import psutil
import torch
from measuring import Columns, Row, Spread, ranks_of
from on_ranks import Job
from plain_pyg import PlainInteraction
from systems import GIB
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from domainpar.measure.rates import slowest
from domainpar.nn.published import Ends, InteractionGNN2, at_ends, joined, sum_at, through
from domainpar.testing import run_ranks
from domainpar.tracking.events.store import EventStore
from domainpar.tracking.networks.on_events import OnEvents
from domainpar.tracking.planner.steps import PRECISIONS, Training

EDGES_PER_BLOCK = 65_536
LARGEST = {"interaction": {"float32": 1e-5, "float64": 1e-10}, "acorn2": {"float32": 1e-3, "float64": 1e-10}}
"""Differences of losses, relative. Norms over all edges, eight behind each other, make much of float32's rounding:
torch's own lose more of it on one rank than ours on two."""


class Checkpointed(InteractionGNN2):
    """As acorn runs it: each encoder and each iteration is computed again in backward."""

    def logits(self, x: Tensor, edge_attr: Tensor | None, ends: Ends) -> Tensor:
        again = partial(checkpoint, use_reentrant=False)
        x = x_0 = again(self.node_encoder, x)
        e = e_0 = again(through, self.edge_encoder, *([edge_attr] if self.edge_features else at_ends(x, ends)))
        for k in range(self.graph_iters):
            x, e = again(self.iteration, k, x, x_0, e, e_0, ends)
        return again(through, self.edge_output_transform, self.edge_decoder(e))

    def iteration(self, k: int, x: Tensor, x_0: Tensor, e: Tensor, e_0: Tensor, ends: Ends) -> tuple[Tensor, Tensor]:
        """States after an iteration."""
        x = joined(x, x_0)
        e = through(self.edge_networks[k], joined(e, e_0), *at_ends(x, ends))
        if k < self.graph_iters - 1:
            x = through(self.node_networks[k], sum_at(x, ends.dst, e), sum_at(x, ends.src, e), x)
        return x, e


@dataclass(frozen=True)
class Own(Training):
    """The training of a network of torch alone.

    Attributes:
        checkpointed: Whether the network itself computes pieces again in backward.
        edges_per_block: Of streamed updates; None: all edges at once. Norms over all edges cannot be streamed.
    """

    checkpointed: bool = False
    edges_per_block: int | None = None

    def module(self, store: EventStore) -> nn.Module:
        """The network by itself."""
        widths = len(store.feature_names), len(store.edge_feature_names)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            if self.model == "acorn2":
                network = Checkpointed if self.checkpointed else InteractionGNN2
                module: nn.Module = network(*widths, hidden=self.hidden, graph_iters=self.graph_iters)
            else:
                saving = {"checkpointed": self.checkpointed, "edges_per_block": self.edges_per_block}
                module = PlainInteraction(*widths, self.hidden, self.graph_iters, **saving)
        return module.to(PRECISIONS[self.precision])

    def network(self, store: EventStore) -> Any:
        """The network on parts of events."""
        return OnEvents(self.module(store), self.recompute_every)


@dataclass(frozen=True)
class Way:
    """One way to train a network.

    Attributes:
        name: What tables call it.
        changes: Of the training.
        ranks: Processes that share the event; None: the network bare, in one process.
    """

    name: str
    changes: dict[str, Any]
    ranks: int | None = None

    def run(self, job: Job, timeout: float) -> list[dict[str, Any]]:
        """Take steps in fresh processes; what each rank says of them."""
        job = replace(job, training=replace(job.training, **self.changes))
        steps = bare_steps if self.ranks is None else on_ranks.training_steps
        how: Any = {"transport": "mpi", "timeout": timeout}
        with measuring.allocator("lean"):
            return run_ranks(steps, self.ranks or 1, job, **how)


def bare_steps(world: Any, job: Job) -> dict[str, Any]:
    """Figures of training steps of the network by itself."""
    bare = plain_pyg.peak_rss_bytes()
    return {**plain_pyg.steps_of(job.training.module(EventStore(job.store)), job), "bare_rss": bare}


def ways(network: str, ranks: Sequence[int]) -> list[Way]:
    """The ways that are measured."""
    checkpointed, recomputed = {"checkpointed": True}, {"recompute_every": 1}
    alone = [Way("bare, all kept", {}), Way("bare, checkpointed", checkpointed)]
    if network == "acorn2":
        own = [("all kept", {}), ("checkpointed", checkpointed), ("recomputed", recomputed)]
    else:
        streamed = {"edges_per_block": EDGES_PER_BLOCK}
        alone.append(Way("bare, streamed", streamed))
        own = [("all kept", {}), ("checkpointed", checkpointed), ("recomputed", recomputed), ("streamed", streamed)]
        own.append(("recomputed and streamed", recomputed | streamed))
    of_ranks = [Way(name, changes, count) for count in ranks for name, changes in (own if count == 1 else own[2:])]
    return alone + of_ranks


def main(argv: Sequence[str] | None = None) -> int:
    options = parse(argv)
    results = measuring.Results("own_memory", options)
    case = cases.chosen_case(options)
    smaller = {"case": options.piece, "data": None, "hits": None}
    piece = cases.chosen_case(argparse.Namespace(**vars(options) | smaller))
    agree = True
    for network, size in zip(options.networks, options.sizes, strict=True):
        hidden, graph_iters = map(int, size.split("x"))
        training = Own(network, hidden, graph_iters, precision=options.dtype)
        results.console.print(f"{case}; {network} {size}, {options.dtype}, one thread a process")
        rows = []
        for way in [way for way in ways(network, options.ranks) if not options.ways or way.name in options.ways]:
            row = measured(way, Job(case.store, training, repeats=options.repeats), piece, options)
            results.console.print(f"  {row['system']}, ranks {row['ranks']}: {row['problem'] or 'done'}")
            results.add(measured="own memory", case=case.name, network=network, size=size, **row)
            rows.append(row)
        show(results, f"{network} {size}", rows)
        agree &= same_losses(network, rows, results, options)
    results.end()
    return int(not agree)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = flags.parser(__doc__, "own_memory", case="large")
    parser.add_argument("--networks", nargs="+", choices=("interaction", "acorn2"), default=["interaction", "acorn2"])
    parser.add_argument("--sizes", nargs="+", default=["64x4", "64x8"], help="hidden x iterations, of each network")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--ways", nargs="+", help="their names in the table; default: all")
    parser.add_argument("--piece", choices=cases.HITS, default="medium", help="the smaller event of estimates")
    parser.add_argument("--dtype", choices=flags.DTYPES, default="float32")
    parser.add_argument("--anyway", action="store_true", help="run also what a piece says will not fit")
    flags.add_rounds(parser, rounds=1, repeats=1)
    return parser.parse_args(argv)


def measured(way: Way, job: Job, piece: cases.Case, options: argparse.Namespace) -> Row:
    """The figures of one way, and what the smaller event lets expect of it."""
    small = way.run(replace(job, store=piece.store), options.timeout)
    expected = max(map(above_bare, small)) * edges_of(job.store) / edges_of(piece.store)
    row: Row = {"system": way.name, "ranks": way.ranks or 1, "expected": expected, "problem": None}
    free = psutil.virtual_memory().available
    if expected * (way.ranks or 1) > 0.9 * free and not options.anyway:
        return {**row, "problem": f"not run: {free / GIB:.0f} GiB are free"}
    run = way.run(job, options.timeout)
    return {
        **row,
        "most": max(map(above_bare, run)),
        "together": sum(map(above_bare, run)),
        "seconds": Spread.of(slowest([rank["seconds"] for rank in run])),
        "losses": run[0]["losses"],
    }


def above_bare(rank: dict[str, Any]) -> int:
    """Peak bytes of a process less those held before the store was opened."""
    return int(rank["peak_rss"] - rank["bare_rss"])


def edges_of(store: Any) -> int:
    """Edges of the first event of a store."""
    return EventStore(store).events()[0].num_edges


def same_losses(network: str, rows: Sequence[Row], results: measuring.Results, options: argparse.Namespace) -> bool:
    """Say whether all ways have the same loss in the first step, to rounding.

    The optimiser makes whole steps of gradients that are rounding alone, as those of biases before a norm are.
    """
    losses = [row["losses"][0] for row in rows if "losses" in row]
    if not losses:
        return True
    apart, limit = max(abs(loss / losses[0] - 1) for loss in losses), LARGEST[network][options.dtype]
    results.console.print(f"first losses {'agree' if apart <= limit else 'DIFFER'}: {apart:.0e}, limit {limit:.0e}")
    return apart <= limit


def show(results: measuring.Results, title: str, rows: Sequence[Row]) -> None:
    own = next((row["most"] for row in rows if row["system"] == "bare, checkpointed" and "most" in row), None)
    columns: Columns = {
        "way": lambda row: row["system"],
        "ranks": ranks_of,
        "GiB a rank": lambda row: f"{row['most'] / GIB:.2f}" if "most" in row else "",
        "GiB together": lambda row: f"{row['together'] / GIB:.2f}" if "most" in row else "",
        "by a piece": lambda row: f"{row['expected'] / GIB:.2f}",
        "of checkpointed": lambda row: f"{row['most'] / own:.2f}" if own and "most" in row else "",
        "step s": lambda row: row["problem"] or f"{row['seconds'].median:.1f}",
    }
    note = (
        "GiB: peak of the fullest process less what it held before the store was opened. By a piece: that of a smaller "
        "event, by the number of edges. Of checkpointed: this over that of the bare network that checkpoints each "
        "iteration. * more ranks than cores: seconds show nothing about scaling."
    )
    results.show(f"One training step of {title}", columns, rows, note)


if __name__ == "__main__":
    measuring.run(__file__)
