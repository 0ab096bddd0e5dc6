"""Does a simulated event look like a real one?

    python bench/realism.py --data DIR          DIR holds full-size TrackML events (event*-hits.csv.gz and so on)
    python bench/realism.py                     the simulated columns only

Prints hits per surface, then figures per event: hits, particles, noise, overlaps, candidate edges at the default cuts,
degrees, true edges, edges across +-pi, and the cut of 8 phi wedges of equal cost. Every figure is the mean over
events; `ratio` is simulated / real, for hits per surface after scaling to the same total. Simulated events are asked
for as many hits as the real ones have on average.

The particle table gives hits per particle and the noise exactly. Labels may be derived (some hits of particles left
unlabelled): then overlaps and true edges of real events come out too low, by about a tenth for each hit involved.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from domainpar.tracking.events import trackml
from domainpar.tracking.events.construct import Cuts, build_graph
from domainpar.tracking.events.detector import SURFACES
from domainpar.tracking.events.graph import EventGraph, Hits, Particles
from domainpar.tracking.events.simulate import simulate_event
from partitioners import Phi, Topology
from partitioners.quality import measure

PROMPT_RADIUS = 0.2  # mm
NUM_WEDGES = 8
Figures = dict[str, float]


def main(argv: Sequence[str] | None = None) -> None:
    options = parse(argv)
    real = read_real(options.data, options.events)
    num_hits = options.num_hits or (round(np.mean([len(hits) for hits in real])) if real else 105_000)
    simulate_event(0, 500)
    started = time.perf_counter()
    simulated = [simulate_event(options.seed + i, num_hits) for i in range(options.events)]
    seconds = (time.perf_counter() - started) / len(simulated)
    print(f"{len(simulated)} simulated events of {num_hits} hits, {seconds:.2f} s each; {len(real)} real events\n")
    print_surfaces(simulated, real)
    print_figures(simulated, real)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Compare simulated with real full-size events.")
    parser.add_argument("--data", type=Path, help="folder of real TrackML events (default: none)")
    parser.add_argument("--events", type=int, default=6, help="events of each kind (default 6)")
    parser.add_argument("--num-hits", type=int, help="hits of a simulated event (default: as real ones, or 105000)")
    parser.add_argument("--seed", type=int, default=1, help="seed of the first simulated event")
    return parser.parse_args(argv)


def read_real(data: Path | None, count: int) -> list[Hits]:
    """Some real events; none, saying why, where there are none to read."""
    if data is None:
        print("no --data: real events are not shown")
        return []
    try:
        names = trackml.list_events(data)
    except ValueError as missing:
        print(f"real events are not shown: {missing}")
        return []
    return [trackml.read_event(data, name) for name in names[:count]]


def print_surfaces(simulated: list[Hits], real: list[Hits]) -> None:
    left, right = hits_per_surface(simulated), hits_per_surface(real)
    scale = right.sum() / left.sum()
    print(f"{'surface':>10} {'simulated':>10} {'real':>10} {'ratio':>7}")
    for surface, a, b in zip(SURFACES, left, right, strict=True):
        print(f"{surface.volume:>6},{surface.layer:>3} {a:10.0f} " + (f"{b:10.0f} {a * scale / b:7.2f}" if b else ""))
    print()


def hits_per_surface(events: list[Hits]) -> np.ndarray:
    counts = np.zeros(len(SURFACES))
    for hits in events:
        for i, surface in enumerate(SURFACES):
            counts[i] += np.sum((hits.volume == surface.volume) & (hits.layer == surface.layer)) / len(events)
    return counts


def print_figures(simulated: list[Hits], real: list[Hits]) -> None:
    left = [figures(hits) for hits in simulated]
    right = [figures(hits) for hits in real]
    print(f"{'figure':<44} {'simulated':>12} {'real':>12} {'ratio':>7}")
    for name in left[0]:
        a = np.mean([row[name] for row in left])
        b = np.mean([row[name] for row in right]) if right else np.nan
        print(f"{name:<44} {number(a):>12} " + (f"{number(b):>12} {a / b:7.2f}" if right else ""))


def number(value: float) -> str:
    return f"{value:.0f}" if value >= 1000 else f"{value:.4g}"


def figures(hits: Hits) -> Figures:
    assert hits.particles is not None
    graph = build_graph(hits, Cuts())
    topology = Topology(graph.edge_index, graph.num_nodes, graph.hits.position)
    quality = measure(graph.edge_index, Phi()(topology, NUM_WEDGES), NUM_WEDGES)
    of_wedges = {
        f"{NUM_WEDGES} phi wedges: cut edges / edges": quality.cut_share,
        f"{NUM_WEDGES} phi wedges: ghosts / owned": quality.incident_ghost_ratio,
        f"{NUM_WEDGES} phi wedges: edge imbalance": quality.edge_imbalance,
    }
    return particle_figures(hits, hits.particles) | edge_figures(graph) | of_wedges


def particle_figures(hits: Hits, particles: Particles) -> Figures:
    """Numbers of particles and of their hits."""
    seen = particles.nhits > 0
    prompt = np.hypot(particles.vertex[:, 0], particles.vertex[:, 1]) < PROMPT_RADIUS
    nhits = particles.nhits
    target = seen & (particles.pt > 1) & (nhits >= 3)
    assert hits.particle_id is not None
    signal = hits.particle_id != 0
    pairs = np.stack([hits.particle_id[signal], hits.volume[signal], hits.layer[signal]])
    return {
        "hits": len(hits),
        "particles with hits": seen.sum(),
        "particles with pT > 1 GeV, >= 3 hits": target.sum(),
        "noise / hits": 1 - nhits.sum() / len(hits),
        "hits per prompt particle, mean": nhits[seen & prompt].mean(),
        "hits per prompt particle, 10 % quantile": np.quantile(nhits[seen & prompt], 0.1),
        "hits per prompt particle, 90 % quantile": np.quantile(nhits[seen & prompt], 0.9),
        "hits per secondary particle, mean": nhits[seen & ~prompt].mean(),
        "particles with <= 2 hits / particles": np.mean(nhits[seen] <= 2),
        "(particle, surface) with >= 2 hits": float(np.mean(np.unique(pairs, axis=1, return_counts=True)[1] >= 2)),
    }


def edge_figures(graph: EventGraph) -> Figures:
    """Density and truth of the candidate edges."""
    assert graph.label is not None
    src, dst = graph.edge_index
    degree = np.bincount(graph.edge_index.ravel(), minlength=graph.num_nodes)
    joined = degree[degree > 0]
    quantiles = {f"degree of these, {q:.0%} quantile": np.quantile(joined, q) for q in (0.5, 0.9, 0.99)}
    phi = graph.features[:, 1]
    return {
        "edges": graph.num_edges,
        "edges / hits^2 (1e-4)": 1e4 * graph.num_edges / graph.num_nodes**2,
        "hits with edges": len(joined),
        **quantiles,
        "true edges / edges": graph.label.mean(),
        "true edges / hits": graph.label.sum() / graph.num_nodes,
        "edges across +-pi / edges": np.mean(np.abs(phi[dst] - phi[src]) > 1),
    }


if __name__ == "__main__":
    main()
