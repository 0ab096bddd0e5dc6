"""Do ranks, groupings, transports, the grid, threads, overlap and recomputation change a single bit? They may not.

    python bench/bitwise.py --case medium                          a simulated event of 0.1M edges
    python bench/bitwise.py --data DIR --event 1012 --graph-iters 8 --networks float32 bf16
    python bench/bitwise.py --case tiny --hidden 16 --most-ranks 2   seconds, to see that it runs

Each network trains some steps in many ways of running it, and all ways must end with one sha256 of all parameters. The
ways are pairwise: every pair of settings occurs together in one of them, as far as the settings go together. The
program fails if a network has two hashes.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import cases
import flags
import measuring
from measuring import Columns
from overlap import spread_at_once

from domainpar.parallel.halo import CompleteHalo
from domainpar.parallel.world import World
from domainpar.runs.checkpoint import parameters_sha256
from domainpar.testing import run_ranks
from domainpar.tracking.config import TrainConfig
from domainpar.tracking.diagnosis.layouts import trained
from domainpar.tracking.events.store import EventStore

NETWORKS: dict[str, dict[str, Any]] = {
    "float32": {},
    "bf16": {"precision": "bf16"},
    "dropout": {"dropout": 0.1},
    "all": {"precision": "bf16", "dropout": 0.1},
}
"""Networks by name: each has bits of its own, the same however it is run."""

WAYS: dict[str, tuple[Any, ...]] = {
    "ranks": (1, 2, 3, 4, 8),
    "grouping": ("contiguous", "metis", "random"),
    "transport": ("threads", "mpi", "gloo"),
    "groups": (1, 2),
    "threads": (1, 2),
    "overlap": (True, False),
    "recompute_every": (None, 2, 3),
}
"""Ways to run a network; `groups`: data groups, which take different events."""

Way = Mapping[str, Any]


def main(argv: Sequence[str] | None = None) -> int:
    options = parse(argv)
    results = measuring.Results("bitwise", options)
    case = cases.chosen_case(options)
    steps = f"{options.steps} steps of {options.num_events} events"
    results.console.print(f"{case}; {flags.in_words(options)}, {steps}")
    ways = pairwise({**WAYS, "ranks": tuple(ranks for ranks in WAYS["ranks"] if ranks <= options.most_ranks)})
    for name in options.networks:
        for way in ways:
            hashes = hashes_of_ranks(case, name, way, options)
            about = {"case": case.name, "edges": case.record.num_edges, "network": name, **way}
            results.add(measured="hash", **about, sha256=hashes)
            results.console.print(f"  {name}: {in_words(way)}: {' '.join(digest[:12] for digest in hashes)}")
    show(results, options.networks)
    results.end()
    return max(len(hashes_of(results, name)) for name in options.networks) > 1


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = flags.parser(__doc__, "bitwise", case="medium", events=2)
    parser.add_argument("--networks", nargs="+", choices=NETWORKS, default=list(NETWORKS))
    flags.add_network(parser)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--most-ranks", type=int, default=8)
    parser.add_argument("--timeout", type=float, default=3600.0, help="seconds for one way of running")
    return parser.parse_args(argv)


def pairwise(factors: Mapping[str, Sequence[Any]]) -> list[Way]:
    """Few ways in which every possible pair of two factors' settings occurs; greedy, always the same."""
    every = [way for values in itertools.product(*factors.values()) if possible(way := dict(zip(factors, values)))]
    missing = set().union(*(pairs_of(way) for way in every))
    chosen: list[Way] = []
    while missing:
        best = max(every, key=lambda way: len(pairs_of(way) & missing))
        chosen.append(best)
        missing -= pairs_of(best)
    return sorted(chosen, key=lambda way: way["ranks"])


def possible(way: Way) -> bool:
    return way["ranks"] % way["groups"] == 0 and (
        way["ranks"] > 1 or (way["transport"] == "threads" and way["overlap"])
    )


def pairs_of(way: Way) -> set[tuple[tuple[str, Any], tuple[str, Any]]]:
    return set(itertools.combinations(way.items(), 2))


def hashes_of_ranks(case: cases.Case, network: str, way: Way, options: argparse.Namespace) -> list[str]:
    """The hashes of all ranks after the steps: one, if they agree."""
    of_way = {name: way[name] for name in ("grouping", "threads", "recompute_every")}
    training = flags.training_of(options, **NETWORKS[network], **of_way)
    how = {"transport": way["transport"], "timeout": options.timeout, "domain_size": way["ranks"] // way["groups"]}
    arguments = case.store, training, options.steps, options.num_events, way["overlap"]
    return sorted(set(run_ranks(parameters_after, way["ranks"], *arguments, **how)))


def parameters_after(world: World, store: Path, training: TrainConfig, steps: int, events: int, overlap: bool) -> str:
    """Hash of all parameters after some steps of some events each. *Collective*."""
    with patch.object(CompleteHalo, "spread", CompleteHalo.spread if overlap else spread_at_once):
        trainer, _ = trained(training, EventStore(store), world, steps, events)
    return parameters_sha256(trainer.model)


def in_words(way: Way) -> str:
    return ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in way.items())


def hashes_of(results: measuring.Results, network: str) -> set[str]:
    return {digest for row in results.rows if row["network"] == network for digest in row["sha256"]}


def show(results: measuring.Results, networks: Sequence[str]) -> None:
    rows = [{"network": name, "hashes": hashes_of(results, name)} for name in networks]
    columns: Columns = {
        "network": lambda row: row["network"],
        "ways": lambda row: str(sum(other["network"] == row["network"] for other in results.rows)),
        "hashes": lambda row: "one" if len(row["hashes"]) == 1 else f"{len(row['hashes'])}: BITS DIFFER",
        "sha256": lambda row: " ".join(sorted(digest[:12] for digest in row["hashes"])),
    }
    note = f"Pairwise over {in_words(WAYS)}."
    results.show("Hashes of all parameters", columns, rows, note)


if __name__ == "__main__":
    measuring.run(__file__)
