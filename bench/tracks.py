"""What share of scoring an event goes into its tracks?

    python bench/tracks.py                                   a TrackML event of a million edges, minutes
    python bench/tracks.py --run runs/0001 --case large      with the scores of a trained network
    python bench/tracks.py --case small --hidden 16 --repeats 3

One forward pass of the interaction network over the whole event, against building tracks from its scores by each
method, on rank 0 however many there are. Seconds of the slowest rank. `stitching`, which joins pieces of one helix,
comes on top. `infer` builds the tracks of as many events at a time as there are ranks.

How long `greedy` takes depends on the scores. Without `--run` the pass is that of fresh weights, and scores are drawn
from the labels: logits of true edges around 3.5, of false ones around -7, with a spread of `--spread` each, much as a
network with an AUC of 0.996 gives them. `passing` is the share of the edges that exceed 0.01.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import cases
import flags
import measuring
import numpy as np
import numpy.typing as npt
import torch
from measuring import Columns, Spread, in_turns, slowest

from domainpar.nn.program import set_threads
from domainpar.parallel.world import World
from domainpar.testing import run_ranks
from domainpar.tracking.command_line import config_of_run
from domainpar.tracking.events.store import EventStore, WholeEvent
from domainpar.tracking.networks.catalogue import make_network
from domainpar.tracking.part_loading import Part, load_part
from domainpar.tracking.reco.tracks import SCORE_CUT, TrackOptions, build_tracks, finished
from domainpar.tracking.scoring.event_tracks import hits_of
from domainpar.tracking.scoring.scores import score_events
from domainpar.tracking.training.network import load_network

TRUE, FALSE = 3.5, -7.0  # logits to draw around


def main(argv: Sequence[str] | None = None) -> None:
    options = parse(argv)
    case = cases.chosen_case(options)
    results = measuring.Results("tracks", options)
    names = ("run", "hidden", "graph_iters", "spread", "repeats", "methods")
    job = Job(case.store, **{name: getattr(options, name) for name in names})
    for num_ranks in options.ranks:
        transport: Any = "threads" if num_ranks == 1 else "mpi"
        ranks = run_ranks(measure, num_ranks, job, transport=transport, timeout=options.time_limit)
        for method in options.methods:
            results.add(**row_of(ranks, method, case.name, num_ranks))
    note = "seconds of the slowest rank: median [least, most]"
    results.show("Tracks against the forward pass", COLUMNS, results.rows, note)
    results.end()


COLUMNS: Columns = {
    "event": lambda row: row["case"],
    "ranks": lambda row: str(row["ranks"]),
    "method": lambda row: row["method"],
    "edges": lambda row: f"{row['edges']:,}",
    "passing": lambda row: f"{row['passing']:.1%}",
    "tracks": lambda row: f"{row['tracks']:,}",
    "network s": lambda row: row["network"].text(),
    "tracks s": lambda row: row["seconds"].text(),
    "share": lambda row: f"{row['share']:.1%}",
    "stitching s": lambda row: row["stitching"].text(),
}


def row_of(ranks: list[dict[str, Any]], method: str, case: str, num_ranks: int) -> dict[str, Any]:
    """A row of the table: seconds of one method on the slowest rank, and their share of the network's."""
    network = Spread.of(slowest([rank["network"] for rank in ranks]))
    seconds = Spread.of(slowest([rank["seconds"][method] for rank in ranks]))
    return {
        "measured": "tracks",
        "case": case,
        "ranks": num_ranks,
        "method": method,
        "edges": sum(rank["edges"] for rank in ranks),
        "passing": sum(rank["passing"] for rank in ranks) / max(1, sum(rank["edges"] for rank in ranks)),
        "tracks": ranks[0]["tracks"][method],
        "network": network,
        "seconds": seconds,
        "share": seconds.median / network.median,
        "stitching": Spread.of(slowest([rank["stitching"][method] for rank in ranks])),
    }


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = flags.parser(__doc__, "tracks", case="large")
    parser.add_argument("--run", type=Path, help="take network and scores from this run; its features must fit")
    parser.add_argument("--methods", nargs="+", choices=SCORE_CUT, default=list(SCORE_CUT))
    parser.add_argument("--ranks", nargs="+", type=int, default=[1])
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--graph-iters", type=int, default=4)
    parser.add_argument("--spread", type=float, default=2.8, help="of the logits that are drawn")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--time-limit", type=float, default=1800.0, help="seconds for one number of ranks")
    return parser.parse_args(argv)


@dataclass(frozen=True)
class Job:
    """The measurement that ranks are asked for, as the flags say."""

    store: Path
    run: Path | None
    hidden: int
    graph_iters: int
    spread: float
    repeats: int
    methods: list[str]


def measure(world: World, job: Job) -> dict[str, Any]:
    """Seconds of the network, of each method and of stitching on this rank. *Collective*."""
    set_threads(1)
    store = EventStore(job.store)
    with store.open(store.events()[0]) as event:
        part = load_part(event, world.domain)
        sizes = {"hidden": job.hidden, "graph_iters": job.graph_iters}
        model: torch.nn.Module = make_network(replace(flags.USUAL, **sizes), store)
        if job.run is not None:
            model = load_network(job.run, config_of_run(job.run), "best", store, world)[0]
        network = in_turns({"": lambda: forward(model, part)}, world.transport, job.repeats)[""]
        logits = forward(model, part) if job.run else drawn(part, event.event_id, job.spread)
        scores = score_events(lambda graph, halo: torch.from_numpy(logits), [event], world.domain)
        hits = hits_of(WholeEvent(event))

        def build(method: Any) -> npt.NDArray[Any]:
            if scores is None:  # rank 0 has them
                return np.full(event.num_nodes, -1)
            return build_tracks(scores[0].edge_index, scores[0].edge_logit, hits, TrackOptions(method=method))

        names = {method: build(method) for method in job.methods}
        building = {method: partial(build, method) for method in job.methods}
        joining = {
            method: partial(finished, names[method], hits, TrackOptions(method=method)) for method in job.methods
        }
        seconds = in_turns(building, world.transport, job.repeats)
        stitching = in_turns(joining, world.transport, job.repeats)  # rank 0 has tracks; the others have none
    owned = part.graph.plan.edge_owned
    return {
        "network": network,
        "seconds": seconds,
        "stitching": stitching,
        "edges": int(owned.sum()),
        "passing": int((logits[owned] > np.log(0.01 / 0.99)).sum()),
        "tracks": {method: int(of_method.max(initial=-1)) + 1 for method, of_method in names.items()},
    }


def forward(model: torch.nn.Module, part: Part) -> npt.NDArray[np.float32]:
    with torch.no_grad():
        logits: npt.NDArray[np.float32] = model(part.graph, part.halo).numpy()
    return logits


def drawn(part: Part, event_id: str, spread: float) -> npt.NDArray[np.float32]:
    """Scores of a network that separates well, the same for both copies of a cut edge."""
    assert part.graph.label is not None, f"event {event_id} has no labels to draw scores from; name a --run"
    plan = part.graph.plan
    noise = np.random.default_rng(0).normal(0, spread, int(plan.edge_ids.max(initial=-1)) + 1)[plan.edge_ids]
    return (np.where(part.graph.label.numpy() > 0, TRUE, FALSE) + noise).astype(np.float32)


if __name__ == "__main__":
    measuring.run(__file__)
