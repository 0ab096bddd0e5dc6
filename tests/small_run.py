"""The directory of a run as `train` and `infer` leave it, written by hand: a few small events, scores and tracks."""

from __future__ import annotations

import functools
import json
from dataclasses import asdict, replace

import numpy as np

from domainpar.common.models import plain
from domainpar.tracking.events.construct import Cuts, build_graph
from domainpar.tracking.events.detector import geometry, known_surfaces
from domainpar.tracking.events.graph import EventGraph, Hits, Particles, surface_numbers
from domainpar.tracking.events.own_events import OwnEvents, kept_place
from domainpar.tracking.events.simulate import simulate_event
from domainpar.tracking.events.store import EventStore, event_file_name, write_arrays, write_event, write_manifest
from domainpar.tracking.reco.event_scores import ARRAYS_OF_FITS, FORMAT, FoundTracks
from domainpar.tracking.reco.performance.counts import count_tracks, total
from domainpar.tracking.reco.performance.truth import truth_of
from domainpar.tracking.reco.segments import TrackHits
from domainpar.tracking.scoring.event_tracks import fitted
from partitioners import Phi, Topology

NUM_TILES = 8
WEIGHTS = "ab" * 32
SPLITS = ("train", "train", "val", "test")
HOSTILE = "</script><script>window.hacked = 1</script><img src=x onerror=window.hacked=1>&\"'"


def write_run(directory, graphs=None, *, scores=True, tracks=True, naive=None, steps=6, ranks=2, **about):
    """A run and its store in `directory`; returns the directory of the run.

    Args:
        directory: Holds `store` and `run` afterwards.
        graphs: Its events. Default: four simulated ones.
        scores: Whether infer ran.
        tracks: Whether it built tracks.
        naive: Sectors of naive mode; None for halo.
        steps: Training steps.
        ranks: Ranks of the training.
        about: What else `run.json` says.
    """
    graphs = [simulated(seed) for seed in range(len(SPLITS))] if graphs is None else graphs
    store = write_store(directory / "store", graphs)
    run = directory / "run"
    run.mkdir(parents=True)
    told = {
        "state": "done",
        "ranks": ranks,
        "domain_size": ranks,
        "threads": 1,
        "seconds": 12.5,
        "steps": steps,
        "bitwise_problem": None,
        "parameters_sha256": WEIGHTS,
        "argv": ["train.py", "--out", "run"],
        "versions": {"domainpar": "0", "torch": "2"},
        "saved": {"6": WEIGHTS},
        "started": "2026-01-31T12:00:00.000+00:00",
        "store": {
            **kept_place(store.path, run),
            "digest": store.digest,
            "events": asdict(OwnEvents.of(store)),
            "learned_from": store.learned_from,
            "feature_names": [],
            "edge_feature_names": [],
        },
        **about,
    }
    (run / "run.json").write_text(json.dumps(told))
    mode = f"mode: naive\nsectors: {naive}" if naive else "mode: halo\nsectors: null"
    (run / "config.yaml").write_text(
        f"{mode}\ngrouping: contiguous\nseed: 0\nepochs: 2\nmodel: interaction\nhidden: 32\ngraph_iters: 2\n"
        "dtype: float32\nprecision: full\ntarget: null\ndevice: cpu\n"
    )
    lines = [json.dumps(record(step, ranks, bool(naive))) for step in range(1, steps + 1)]
    lines += [json.dumps({**record(steps, ranks, bool(naive)), "split": "val", "grad_norm": None})] if steps else []
    (run / "metrics.jsonl").write_text("".join(f"{line}\n" for line in lines))
    if scores:
        write_some_scores(run / "scores", store, graphs, tracks, naive)
    return run


def record(step, ranks, naive=False):
    """One line of `metrics.jsonl`."""
    of_ranks = {
        "seconds_compute": 0.5 + 0.1 * np.arange(ranks),
        "seconds_exchange": np.full(ranks, 0.01),
        "seconds_wait": 0.1 * np.arange(ranks)[::-1],
        "seconds_load": 0.2 / step + np.zeros(ranks),
        "owned_nodes": 100 + np.arange(ranks),
        "ghost_nodes": np.full(ranks, 7 if ranks > 1 else 0),
        "halo_bytes": np.full(ranks, 4096),
        "peak_rss_bytes": 1_000_000 * (step + np.arange(ranks)),
    }
    return {
        "split": "train",
        "epoch": step // 4,
        "step": step,
        "loss": 1 / step,
        "lr": 0.001 * step,
        "grad_norm": 2.0,
        "edge_efficiency": 0.5,
        "edge_purity": None if step == 1 else 0.25,
        "edge_auc_pooled": 0.9,
        "counted_against": "candidate edges" + " inside sectors (approximate: naive mode)" * naive,
        "target_edges": 10,
        "ranks": ranks,
        "seconds": 1.0,
        **{name: values.tolist() for name, values in of_ranks.items()},
    }


def write_store(directory, graphs):
    records = []
    for graph, split in zip(graphs, SPLITS, strict=False):
        name = graph.hits.event_id
        written = write_event(directory / event_file_name(name), graph, tiles_of(graph), NUM_TILES)
        records.append(replace(written, split=split))
    write_manifest(directory, records, {})
    return EventStore(directory)


def tiles_of(graph):
    if graph.hits.position is None or graph.num_nodes == 0:
        return np.arange(graph.num_nodes) % NUM_TILES
    return Phi()(Topology(graph.edge_index, graph.num_nodes, graph.hits.position), NUM_TILES)


def write_some_scores(directory, store, graphs, tracks=True, naive=None):
    """Scores that know much of the truth, and tracks that miss one particle in four."""
    counted, listed = {}, []
    for graph, event in zip(graphs, store.events(), strict=True):
        arrays = score_arrays(graph, tracks, naive)
        path = f"event{event.event}.scores.zarr.zip"
        write_arrays(directory / path, arrays, {**FORMAT, "event": event.event})
        sizes = {"edges": graph.num_edges, "unscored": 0}
        listed.append({"event": event.event, "path": path, "event_sha256": event.sha256, **sizes})
        with store.open(event) as stored:
            truth = truth_of(stored, NUM_TILES)
        if tracks and truth is not None:
            found = {"network": arrays["track_id"], "ckf": arrays["ckf_track_id"]}
            for name, track_id in found.items():
                counted.setdefault(event.split, {}).setdefault(name, []).append(count_tracks(track_id, truth))
    performance = {
        split: {name: plain(total(counts)) for name, counts in found.items()} for split, found in counted.items()
    }
    content = {
        "mode": "naive" if naive else "halo",
        "sectors": naive,
        "checkpoint": "best",
        "step": 6,
        "target": None,
        "run": "..",
        "parameters_sha256": WEIGHTS,
        "store": kept_place(store.path, directory),
        "store_digest": store.digest,
        "trained_on": OwnEvents.of(store).counted(
            store.events(), dict.fromkeys((record.event for record in store.events()), False), {}
        ),
        "metrics": {},
        "events": listed,
        "tracks": {"method": "greedy", "matching_style": "atlas", "performance": performance} if tracks else None,
    }
    (directory / "scores.json").write_text(json.dumps(content))


def score_arrays(graph, tracks=True, naive=None):
    rng = np.random.default_rng(graph.num_edges)
    label = np.zeros(graph.num_edges) if graph.label is None else graph.label
    logit = (3.0 * label - 1.5 + 2 * rng.standard_normal(graph.num_edges)).astype(np.float32)
    scored = rng.random(graph.num_edges) < (0.9 if naive else 1)
    arrays = {
        "hit_id": graph.hits.hit_id,
        "edge_index": graph.edge_index,
        "edge_logit": np.where(scored, logit, 0).astype(np.float32),
        "edge_score": np.where(scored, 1 / (1 + np.exp(-logit)), 0).astype(np.float32),
        "edge_scored": scored,
    }
    if tracks:
        arrays["track_id"], arrays["ckf_track_id"] = tracks_of(graph.hits, 4), tracks_of(graph.hits, 2)
        arrays |= fits_of(graph.hits, arrays)
    return arrays


def fits_of(hits: Hits, tracks):
    """The parameters of the tracks, where they can be fitted."""
    surface = surface_numbers(hits.volume, hits.layer)
    if hits.position is None or not np.isin(surface, known_surfaces()).all():
        return {}
    found = {"network": FoundTracks(tracks["track_id"]), "ckf": FoundTracks(tracks["ckf_track_id"])}
    found = fitted(TrackHits(hits.position, surface, hits.module, geometry().field), found)
    values = {"": found["network"].fits, "ckf_": found["ckf"].fits}
    return {f"{of}{name}": getattr(fit, to) for of, fit in values.items() for name, to in ARRAYS_OF_FITS.items()}


def tracks_of(hits: Hits, every: int):
    """The true tracks, but for one particle in `every`, numbered by their first hits."""
    if hits.particle_id is None:
        return np.full(len(hits), -1, np.int64)
    found = (hits.particle_id > 0) & (hits.particle_id % every != 0)
    track_id = np.full(len(hits), -1, np.int64)
    _, first, which = np.unique(hits.particle_id[found], return_index=True, return_inverse=True)
    track_id[found] = np.argsort(np.argsort(first))[which]
    return track_id


@functools.cache
def simulated(seed, num_hits=600) -> EventGraph:
    return build_graph(simulate_event(seed, num_hits, f"{seed:03d}"), Cuts(phi_slope=3e-3, z0=1000.0))


def drawn(num_hits, *, noise=False, positions=True, truth=True, num_edges=0, event_id="drawn") -> EventGraph:
    """Hits along x, all of one particle or all noise; each is joined to the next by the first `num_edges` edges."""
    rows = np.arange(num_hits)
    ids = np.zeros(num_hits, np.int64) if noise else np.full(num_hits, 7)
    particles = Particles(
        particle_id=np.array([7][: 0 if noise or num_hits == 0 else 1], np.int64),
        pt=np.full(0 if noise or num_hits == 0 else 1, 2.0, np.float32),
        eta=np.zeros(0 if noise or num_hits == 0 else 1, np.float32),
        vertex=np.zeros((0 if noise or num_hits == 0 else 1, 3), np.float32),
        nhits=np.full(0 if noise or num_hits == 0 else 1, num_hits, np.int32),
        charge=np.ones(0 if noise or num_hits == 0 else 1, np.int8),
    )
    place = np.stack([30.0 + 40 * rows, 1.0 * rows, 10.0 * rows], axis=1).astype(np.float32)
    hits = Hits(
        event_id=event_id,
        hit_id=rows + 1,
        position=place if positions else None,
        volume=np.full(num_hits, 8, np.int32),
        layer=(rows + 1).astype(np.int32),
        module=np.zeros(num_hits, np.int32),
        particle_id=ids if truth else None,
        particles=particles if truth else None,
    )
    edges = np.stack([rows[:num_edges], rows[:num_edges] + 1])
    label = np.full(num_edges, 0 if noise else 1, np.uint8) if truth else None
    features = np.zeros((num_hits, 1), np.float32)
    return EventGraph(hits, features, ("r",), edges, np.zeros((num_edges, 0), np.float32), (), label)


ODD = {
    "no hits": {"num_hits": 0},
    "one hit": {"num_hits": 1},
    "noise only": {"num_hits": 5, "noise": True, "num_edges": 4},
    "no edges": {"num_hits": 5},
    "one track": {"num_hits": 6, "num_edges": 5},
    "no truth": {"num_hits": 6, "num_edges": 5, "truth": False},
    "no positions": {"num_hits": 6, "num_edges": 5, "positions": False},
}
"""Events that break what was not thought of."""
