"""What share of scoring an event goes into its tracks?

    python bench/tracks.py                                   a TrackML event of a million edges, minutes
    python bench/tracks.py --run runs/0001 --case large      with the scores of a trained network
    python bench/tracks.py --case small --hidden 16 --repeats 3

One forward pass of the interaction network over the whole event, against building tracks from its scores by each
method, on rank 0 however many there are. Seconds of the slowest rank. `stitching`, which joins pieces of one helix,
comes on top. `infer` builds the tracks of as many events at a time as there are ranks.

How long a walk takes depends on the scores. Without `--run` the pass is that of fresh weights, and scores are drawn
from the labels: logits of true edges around 3.5, of false ones around -7, with a spread of `--spread` each, much as a
network with an AUC of 0.996 gives them. `passing` is the share of the edges that exceed 0.01.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import cases
import measuring
from tracks_on_ranks import Settings, measure

from domainpar.reco.tracks import METHODS
from domainpar.testing import run_ranks


def main(argv: Sequence[str] | None = None) -> int:
    options = parse(argv)
    case = cases.chosen_case(options)
    results = measuring.Results("tracks", options)
    settings = Settings(
        case.store, options.run, options.hidden, options.graph_iters, options.spread, options.repeats,
        tuple(options.methods),
    )  # fmt: skip
    rows = []
    for num_ranks in options.ranks:
        transport: Any = "threads" if num_ranks == 1 else "mpi"
        found = run_ranks(measure, num_ranks, settings, transport=transport, timeout=options.time_limit)
        for method in options.methods:
            rows.append(row_of(found, method, case.name, num_ranks))
            results.add(**rows[-1])
    results.show("Tracks against the forward pass", COLUMNS, rows, "seconds of the slowest rank: median [least, most]")
    results.end()
    return 0


COLUMNS: dict[str, Callable[[Any], str]] = {
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


def row_of(found: list[dict[str, Any]], method: str, case: str, num_ranks: int) -> dict[str, Any]:
    """A row of the table: seconds of one method on the slowest rank, and their share of the network's."""
    network = measuring.Spread.of(measuring.slowest([rank["network"] for rank in found]))
    seconds = measuring.Spread.of(measuring.slowest([rank["seconds"][method] for rank in found]))
    return {
        "measured": "tracks",
        "case": case,
        "ranks": num_ranks,
        "method": method,
        "edges": sum(rank["edges"] for rank in found),
        "passing": sum(rank["passing"] for rank in found) / max(1, sum(rank["edges"] for rank in found)),
        "tracks": found[0]["tracks"][method],
        "network": network,
        "seconds": seconds,
        "share": seconds.median / network.median,
        "stitching": measuring.Spread.of(measuring.slowest([rank["stitching"][method] for rank in found])),
    }


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, help="take network and scores from this run; its features must fit")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--ranks", nargs="+", type=int, default=[1])
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--graph-iters", type=int, default=4)
    parser.add_argument("--spread", type=float, default=2.8, help="of the logits that are drawn")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--time-limit", type=float, default=1800.0, help="seconds for one number of ranks")
    cases.add_flags(parser, case="large")
    measuring.add_flags(parser, "tracks")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
