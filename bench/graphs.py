"""What do the three makers of candidate edges hold, and what do they cost?

    python bench/graphs.py --kept KEPT                                  simulated events
    python bench/graphs.py --kept KEPT --train TRAIN --data DIR         ACTS events as CSV, of two folders

For presets of `prepare`: cuts, a module map and an embedding, both learned from the same events, none of which is
scored. `segments`: share of the segments of targets (pT > 1 GeV, 5 hits) that are edges; `purity`: share of the edges
that are such segments. `seconds`: finding the edges of an event, on one thread. KEPT keeps what was learned.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from pathlib import Path

import flags
import measuring
import numpy as np
from measuring import Row, mean

from domainpar.common.agreement import Gathering
from domainpar.common.atomic_files import write_whole
from domainpar.tracking.config import PrepareConfig
from domainpar.tracking.events.construct import Candidates, Cuts
from domainpar.tracking.events.embedding import Embedding
from domainpar.tracking.events.embedding_training import build_embedding
from domainpar.tracking.events.graph import Hits
from domainpar.tracking.events.joining import cylindrical
from domainpar.tracking.events.map_building import build_map
from domainpar.tracking.events.module_map import ModuleMap
from domainpar.tracking.events.selection import Selection
from domainpar.tracking.events.simulate import simulate_event
from domainpar.tracking.events.sources import open_source
from domainpar.tracking.reco.facts import DEFAULT_TARGET, facts_of

LEARNED_SEED, SCORED_SEED = 1_000_000, 5_000_000


def main(argv: Sequence[str] | None = None) -> None:
    options = parse(argv)
    results = measuring.Results("graphs", options)
    for preset in options.presets:
        read, learn, score = events_of(options, preset)
        made, rows = list(makers(options, preset, lru_cache(options.learn)(read), learn)), []
        for hits in map(read, score):
            for form, candidates in made:
                rows.append({"preset": preset, "form": form, **measured(hits, candidates)})
                results.add(**rows[-1])
        columns = {
            preset: lambda rows: rows[0]["form"], "edges": mean("edges", "{:,.0f}"), "a hit": mean("a_hit", "{:.2f}"),
            "segments": mean("segments", "{:.4f}"), "purity": mean("purity", "{:.4f}"),
            "seconds": mean("seconds", "{:.2f}"),
        }  # fmt: skip
        hits_each = np.mean([row["hits"] for row in rows])
        note = f"{len(score)} events, {hits_each:,.0f} hits each; learned from {made[-1][1].events} others"
        results.show(f"Candidate edges, {preset}", columns, measuring.alike(rows, "form"), note)
    results.end()


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = flags.parser(__doc__, "graphs")
    parser.add_argument("--kept", type=Path, required=True, help="folder for what is learned, and used again")
    parser.add_argument("--presets", nargs="+", default=["pixel", "full"], help="of prepare (default pixel full)")
    parser.add_argument("--events", type=int, default=4, help="events that are scored (default 4)")
    parser.add_argument("--learn", type=int, default=20, help="events that are learned from (default 20)")
    parser.add_argument("--hits", type=int, help="of a simulated event (default: the preset's)")
    parser.add_argument("--train", type=Path, help="folder of ACTS events that are learned from")
    parser.add_argument("--data", type=Path, help="folder of ACTS events that are scored")
    parser.add_argument("--steps", type=int, default=2000, help="of the embedding's training (default 2000)")
    return parser.parse_args(argv)


def events_of(options: argparse.Namespace, preset: str) -> tuple[Callable[[str], Hits], list[str], list[str]]:
    """How an event is read, and the names of those that are learned from and scored."""
    flags_of = PrepareConfig(preset=preset, **PrepareConfig.PRESETS[preset])
    volumes = None if flags_of.volumes is None else tuple(map(int, flags_of.volumes.value))
    selection, num_hits = Selection(volumes, None, 0.0, 0), options.hits or flags_of.hits
    if options.data is None:
        learn = [str(LEARNED_SEED + i) for i in range(options.learn)]
        score = [str(SCORED_SEED + i) for i in range(options.events)]
        return lambda name: selection.select(simulate_event(int(name), num_hits)), learn, score
    learn, score = (
        {f"{directory}/{name}": (acts, name) for name in acts.names[:count]}
        for directory, count in ((options.train, options.learn), (options.data, options.events))
        for acts in [open_source("acts", directory, selection=selection)]
    )
    every = {**learn, **score}
    return lambda path: every[path][0].hits(every[path][1]), [*learn], [*score]


def makers(
    options: argparse.Namespace, preset: str, read: Callable[[str], Hits], learn: Sequence[str]
) -> Iterator[tuple[str, Candidates]]:
    """Candidate edges by name; the map and the embedding are learned where they are not kept."""
    source = "simulate" if options.data is None else "acts"
    yield "cuts", Cuts() if options.data is None else Cuts(z0=220.0)  # four standard deviations of the beam spot
    arguments, steps = (read, learn, DEFAULT_TARGET, {"source": source}, Gathering()), options.steps
    paths = [options.kept / f"{preset}-{source}.{kind}" for kind in ("map", "embedding")]
    for path, build in zip(paths, (lambda: build_map(*arguments), lambda: build_embedding(*arguments, steps=steps))):
        if not path.exists():
            write_whole(path, build().to_bytes())
    for most in (10, 30):
        yield f"module map, {most} pairs per hit", ModuleMap.read(paths[0]).best(most)
    for most in (2, 5, 10):
        yield f"embedding, {most} edges per hit", Embedding.read(paths[1]).best(most)


def measured(hits: Hits, candidates: Candidates) -> Row:
    """All figures of the candidate edges of an event."""
    cylinder = cylindrical(np.asarray(hits.position))
    edges, began = candidates.edges(hits, cylinder), time.perf_counter()  # compiled, and all in memory
    candidates.edges(hits, cylinder)
    seconds, facts = time.perf_counter() - began, facts_of(hits, edges, None)
    return {
        "event": hits.event_id, "hits": len(hits), "edges": facts.edges, "a_hit": facts.edges / len(hits),
        "segments": facts.in_graph / facts.segments, "purity": facts.in_graph / facts.edges, "seconds": seconds,
    }  # fmt: skip


if __name__ == "__main__":
    main()
