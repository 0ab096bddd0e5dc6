"""What do candidate graphs hold, and what do they cost?

    python bench/graphs.py --map full=stores/full/module_map.safetensors --map pixel=stores/pixel/module_map.safetensors
    python bench/graphs.py --presets full --events 2 --hits 20000        cuts alone, smaller events
    python bench/graphs.py --map full=... --data DIR                     real TrackML events, of truth that is derived

For each preset of `prepare`, on simulated events that no map was learned from: cuts with the pairs of layers measured
once, those that straight lines cross in turn (the default), and those with one layer between; and module maps, at
several numbers of edges a hit.

`segments`: share of the target's segments that are edges. `purity`: share of the edges that are such segments; `true`:
of those that join hits following each other along any particle. `ceiling`: targets found (two-way and by a track's
majority) when a network tells every edge right and tracks are grown from that; `no hole`, `one`, `more`: two-way, of
targets that cross so many layers without a hit, of which `--hit-loss` makes more; `followed`, two-way: and are followed
through all hits. `seconds`: finding the edges, on `--threads` threads.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import flags
import measuring
import numpy as np
from measuring import Row, mean

from domainpar.tracking.config import InferConfig, PrepareConfig, conditions_of, parse_numbers
from domainpar.tracking.events import trackml
from domainpar.tracking.events.construct import Candidates, Cuts, build_graph
from domainpar.tracking.events.detector import DEFAULT_LAYER_PAIRS, SEED_LAYER_PAIRS, crossed_in_turn, field_of_surfaces
from domainpar.tracking.events.graph import Hits, surface_numbers
from domainpar.tracking.events.joining import cylindrical
from domainpar.tracking.events.module_map import ModuleMap
from domainpar.tracking.events.selection import Selection
from domainpar.tracking.events.simulate import simulate_event
from domainpar.tracking.reco.classical.following import follow
from domainpar.tracking.reco.performance.ceiling import edge_ceiling
from domainpar.tracking.reco.performance.counts import count_tracks
from domainpar.tracking.reco.performance.matching import TrackCuts
from domainpar.tracking.reco.performance.truth import EventTruth
from domainpar.tracking.reco.segments import TrackHits
from domainpar.tracking.reco.tracks import TrackOptions, tracks_from_scores

FIRST_SEED = 5_000_000  # maps are learned from seeds from 1,000,000 on
CERTAIN = 20.0  # as a logit


def main(argv: Sequence[str] | None = None) -> None:
    options = parse(argv)
    results = measuring.Results("graphs", options)
    maps = {name: ModuleMap.read(path) for name, path in (text.split("=", 1) for text in options.map)}
    for preset in options.presets:
        of_preset = PrepareConfig.PRESETS[preset]
        volumes = of_preset.get("volumes") and tuple(map(int, parse_numbers("--volumes", of_preset["volumes"])))
        cuts = of_preset.get("hard_cuts")
        conditions = conditions_of("--hard-cuts", cuts) if cuts else None
        rows = []
        for loss in options.hit_loss:
            selection = Selection(volumes, conditions, loss)
            for hits in events_of(options, options.hits or of_preset["hits"]):
                for name, candidates in forms(maps.get(preset), options.edges_per_hit):
                    rows.append(measured(preset, name, selection.of(hits), candidates, options.threads))
                    rows[-1]["hit_loss"] = loss
                    results.add(**rows[-1])
        if rows:
            columns = {
                preset: lambda rows: rows[0]["form"], "hits lost": mean("hit_loss", "{:.2f}"),
                "edges": mean("edges", "{:,.0f}"),
                "a hit": mean("a_hit", "{:.2f}"), "segments": mean("segments", "{:.4f}"),
                "purity": mean("purity", "{:.4f}"), "true": mean("true", "{:.4f}"),
                "ceiling, two-way": mean("two_way", "{:.4f}"), "by majority": mean("atlas", "{:.4f}"),
                **{name: mean(name, "{:.4f}") for name in ("no hole", "one", "more")},
                "followed": mean("followed", "{:.4f}"),
                "seconds": mean("seconds", "{:.2f}"),
            }  # fmt: skip
            hits = np.mean([row["hits"] for row in rows])
            note = f"{options.events} events, {hits:,.0f} hits each; target {rows[0]['target']}"
            results.show(f"Candidate edges, {preset}", columns, measuring.alike(rows, "form", "hit_loss"), note)
    results.end()


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = flags.parser(__doc__, "graphs")
    parser.add_argument("--presets", nargs="+", default=list(PrepareConfig.PRESETS), help="of prepare (default all)")
    parser.add_argument("--map", action="append", default=[], metavar="PRESET=FILE", help="module map of a preset")
    parser.add_argument("--edges-per-hit", type=float, nargs="+", default=[1, 2, 5, 10, 16])
    parser.add_argument("--events", type=int, default=6, help="events of each preset (default 6)")
    parser.add_argument("--hits", type=int, help="hits of a simulated event (default: the preset's)")
    parser.add_argument("--data", type=Path, help="folder of real TrackML events (default: simulated ones)")
    parser.add_argument("--hit-loss", type=float, nargs="+", default=[0.0], help="shares of hits lost at random")
    parser.add_argument("--threads", type=int, default=1)
    return parser.parse_args(argv)


def events_of(options: argparse.Namespace, num_hits: int) -> Iterator[Hits]:
    """Real events of a folder, or simulated ones."""
    if options.data is None:
        yield from (simulate_event(FIRST_SEED + i, num_hits) for i in range(options.events))
    else:
        names = trackml.list_events(options.data)[: options.events]
        yield from (trackml.read_event(options.data, name) for name in names)


def forms(found: ModuleMap | None, edges_per_hit: Sequence[float]) -> Iterator[tuple[str, Candidates]]:
    """Candidate edges to compare, by name."""
    yield "cuts, 52 pairs", Cuts(layer_pairs=SEED_LAYER_PAIRS)
    yield "cuts, 110 pairs", Cuts(layer_pairs=DEFAULT_LAYER_PAIRS)
    yield "cuts, z0 100, skip-one", Cuts(z0=100.0, layer_pairs=crossed_in_turn(1))
    for count in edges_per_hit if found is not None else ():
        assert found is not None
        yield f"map of {found.events:,} events, {count:g} a hit", found.best(count)


def measured(preset: str, form: str, hits: Hits, candidates: Candidates, threads: int) -> Row:
    """All figures of the candidate edges of an event."""
    assert hits.position is not None
    assert hits.particle_id is not None
    config = InferConfig(preset=preset, **InferConfig.PRESETS[preset])  # type: ignore[arg-type]
    cuts = TrackCuts(config.min_track_length, target=conditions_of("--track-target", config.track_target))
    cylinder = cylindrical(hits.position)
    candidates.edges(hits, cylinder, threads)  # compiled, and all in memory
    seconds = measuring.seconds_of(partial(candidates.edges, hits, cylinder, threads))
    graph = build_graph(hits, candidates, threads)
    surface, field = surface_numbers(hits.volume, hits.layer), field_of_surfaces(hits.volume, hits.layer)
    track_hits = TrackHits(hits.position, surface, hits.module, field)
    truth = EventTruth(hits.particle_id, surface, hits.weight, hits.position, hits.particles)
    held = edge_ceiling(truth, graph.edge_index, cuts.target)
    assert held is not None
    assert graph.label is not None
    logits = np.where(graph.label > 0, CERTAIN, -CERTAIN)
    tracks = tracks_from_scores(graph.edge_index, logits, track_hits, TrackOptions("grow"))
    counts = count_tracks(tracks, truth, cuts)
    styles, of_holes = counts.styles, counts.binned["two_way"]["holes"]
    few = [slice(0, 1), slice(1, 2), slice(2, None)]
    efficiency = [sum(of_holes.reconstructed[some]) / max(sum(of_holes.targets[some]), 1) for some in few]
    followed = count_tracks(follow(tracks, track_hits, 3), truth, cuts).styles["two_way"]
    return {
        "preset": preset, "form": form, "event": hits.event_id, "hits": len(hits), "edges": graph.num_edges,
        "a_hit": graph.num_edges / len(hits), "segments": held.in_graph / held.segments,
        "purity": held.in_graph / graph.num_edges, "true": float(graph.label.mean()), "target": cuts.target_text,
        **{style: styles[style].reconstructed / styles[style].targets for style in ("two_way", "atlas")},
        **dict(zip(("no hole", "one", "more"), efficiency, strict=True)),
        "followed": followed.reconstructed / followed.targets, "seconds": seconds,
    }  # fmt: skip


if __name__ == "__main__":
    main()
