"""Scores and tracks in the formats of others: acorn's `.pyg` and lists of tracks, and CSV as TrackML scores it.

    trainset/event000000007.pyg           acorn: hits, edges, scores, labels (the track of each hit), truth if known
    trainset_tracks/event000000007.txt    acorn: one track a line, its hit ids from the inside out
    event000000007-tracks.csv             event_id, hit_id, track_id

acorn's track building and evaluation read the first, and so does `events.acorn`. Names and units are acorn's
(`acorn/utils/loading_utils.py`, GNN4ITkTeam/CommonFramework): no prefixes, pt in MeV. Files appear under their name
only when they are complete, and have the same bytes whenever the same is written, on any number of ranks; acorn keeps
the time that tracks took in its file, so that counts as well.
"""

from __future__ import annotations

import importlib
import io
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from domainpar.atomic_files import write_whole
from domainpar.events.graph import FloatArray, IntArray, Particles
from domainpar.events.store import SUFFIX, event_file_name
from domainpar.problems import Problem
from domainpar.reco.performance.truth import rows_of_table

Dataset = Literal["trainset", "valset", "testset"]
DATASETS: dict[str, Dataset] = {"train": "trainset", "val": "valset", "test": "testset"}
"""acorn's name of each split."""

CSV_SUFFIX = "-tracks.csv"


@dataclass(frozen=True, eq=False)
class TrackedEvent:
    """The hits, edges and tracks of one event, to be written. Hits and edges are in the user's order.

    Attributes:
        event_id: Name of the event; acorn's evaluation wants a number.
        hit_id: The user's own number of each hit, int64 [N].
        track_id: Track of each hit, -1 for none, int64 [N].
        position: x, y, z in mm, [N, 3]; acorn's files need it, and lists of tracks their order from it.
        edge_index: Rows of the two hits of each edge, int64 [2, E].
        edge_score: Score of each edge, 0 where there is none, [E].
        label: 1 for a true segment, [E]; None without truth.
        particle_id: Particle of each hit, 0 for noise, int64 [N]; None without truth.
        particles: The particle table; None when unknown.
        volume: Detector volume, [N]; None when unknown.
        layer: Layer within the volume, [N]; None when unknown.
        module: Module within the layer, [N]; None when unknown.
        seconds: Time that the tracks took; acorn's evaluation averages it.
    """

    event_id: str
    hit_id: IntArray
    track_id: IntArray
    position: FloatArray | None
    edge_index: IntArray
    edge_score: FloatArray
    label: IntArray | None = None
    particle_id: IntArray | None = None
    particles: Particles | None = None
    volume: IntArray | None = None
    layer: IntArray | None = None
    module: IntArray | None = None
    seconds: float = 0.0


def check_acorn_files_can_be_written() -> None:
    """Find out before anything is computed.

    Raises:
        Problem: If torch_geometric is not there.
    """
    try:
        importlib.import_module("torch_geometric.data")
    except ImportError as error:
        raise Problem(
            f"acorn's files are torch_geometric Data, which cannot be imported here ({error})",
            "install torch-geometric, or choose another format",
        ) from error


def write_acorn(directory: str | Path, event: TrackedEvent, dataset: Dataset) -> tuple[Path, Path]:
    """Write one event as acorn's track building leaves it: a `.pyg` file and a list of tracks.

    Args:
        directory: Parent of the folders `{dataset}` and `{dataset}_tracks`.
        event: The event.
        dataset: The folder, acorn's name of the split.

    Returns:
        Paths of the `.pyg` file and of the list.

    Raises:
        ValueError: If torch_geometric is not there, or the event has no positions or a name that cannot name a file.
    """
    check_acorn_files_can_be_written()
    stem = _stem(event)
    path = Path(directory) / dataset / f"{stem}.pyg"
    write_whole(path, _saved(acorn_columns(event)))
    tracks = Path(directory) / f"{dataset}_tracks" / f"{stem}.txt"
    write_whole(tracks, track_lines(event).encode())
    return path, tracks


def write_csv(directory: str | Path, event: TrackedEvent) -> Path:
    """Write the track of each hit as CSV: columns event_id, hit_id, track_id, every hit once, in the user's order.

    Tracks count from 1, and hits on no track have 0: TrackML's scorer wants no negative number. It takes such a table
    for one event as it is; the tables of several events, one below the other, are a submission.

    Raises:
        ValueError: If the name of the event cannot name a file.
    """
    path = Path(directory) / f"{_stem(event)}{CSV_SUFFIX}"
    rows = (f"{event.event_id},{hit},{track + 1}" for hit, track in zip(event.hit_id.tolist(), event.track_id.tolist()))
    write_whole(path, "\n".join(["event_id,hit_id,track_id", *rows, ""]).encode())
    return path


def track_lines(event: TrackedEvent) -> str:
    """The tracks, one a line in the order of their numbers: hit ids from the inside out (by r^2 + z^2), blanks between.

    Without positions the hits of a track are in the user's order.
    """
    distance = np.zeros(len(event.hit_id)) if event.position is None else (_float64(event.position) ** 2).sum(axis=1)
    order = np.lexsort((distance, event.track_id))
    order = order[event.track_id[order] >= 0]
    starts = np.flatnonzero(np.diff(event.track_id[order], prepend=-1))
    hits = event.hit_id[order].astype(str)
    return "".join(" ".join(track) + "\n" for track in np.split(hits, starts[1:]) if len(track))


def acorn_columns(event: TrackedEvent) -> dict[str, Any]:
    """The columns of the `.pyg` file by acorn's names, as numpy arrays.

    True edges join the hits of a particle one after the other, by distance from the origin. With them come columns of
    the particle table: pt in MeV, nhits, radius and eta_particle, one value a true edge. A particle with one hit has no
    true edge, so acorn cannot know of it.

    Raises:
        Problem: If the event has no positions.
    """
    if event.position is None:
        raise Problem("it has no positions, which acorn's files need", "write another format", event=event.event_id)
    x, y, z = _float64(event.position).T
    r = np.hypot(x, y)
    with np.errstate(divide="ignore", invalid="ignore"):
        eta = np.arcsinh(z / r)
    ids = {"volume_id": event.volume, "layer_id": event.layer, "module_id": event.module}
    return {
        "hit_id": event.hit_id,
        "x": x,
        "z": z,
        "r": r,
        "phi": np.arctan2(y, x),
        "eta": eta,
        **{name: values for name, values in ids.items() if values is not None},
        "edge_index": event.edge_index,
        "scores": event.edge_score,
        "labels": event.track_id,
        **({} if event.label is None else {"y": event.label != 0}),
        **({} if event.particle_id is None else _truth(event, event.particle_id, r * r + z * z)),
        "num_nodes": len(event.hit_id),
        "event_id": [event.event_id],
        "config": [{}],
        "time_taken": event.seconds,
    }


def _truth(event: TrackedEvent, particle_id: IntArray, distance: npt.NDArray[np.float64]) -> dict[str, Any]:
    order = np.lexsort((distance, particle_id))
    inner, outer = order[:-1], order[1:]
    joined = (particle_id[inner] == particle_id[outer]) & (particle_id[inner] != 0)
    track_edges = np.stack([inner[joined], outer[joined]])
    of_edge = particle_id[track_edges[0]]
    return {
        "track_edges": track_edges,
        "truth_map": _places(track_edges, event.edge_index, len(particle_id)),
        "particle_id": of_edge,
        **({} if event.particles is None else _of_particles(event.particles, of_edge)),
    }


def _places(track_edges: IntArray, edge_index: IntArray, num_hits: int) -> IntArray:
    """Place among the candidate edges of each true edge, in either direction; -1 if it is none of them."""
    if edge_index.shape[1] == 0:
        return np.full(track_edges.shape[1], -1)
    key_of_edges = edge_index.min(axis=0) * num_hits + edge_index.max(axis=0)
    order = np.argsort(key_of_edges, kind="stable")
    wanted = track_edges.min(axis=0) * num_hits + track_edges.max(axis=0)
    place = order[np.minimum(np.searchsorted(key_of_edges[order], wanted), len(order) - 1)]
    return np.where(key_of_edges[place] == wanted, place, -1)


def _of_particles(particles: Particles, of_edge: IntArray) -> dict[str, Any]:
    """Columns of the particle table for each true edge; NaN, or 0 hits, for a particle that it does not list."""
    names = ["pt", "eta", "nhits", *(name for name in ("primary", "pdg_id") if getattr(particles, name) is not None)]
    columns = {name: rows_of_table(particles, of_edge, name) for name in names}
    whole = {name: np.nan_to_num(columns[name]).astype(np.int64) for name in names[2:]}
    x, y, _ = rows_of_table(particles, of_edge, "vertex").astype(particles.vertex.dtype).T
    return {
        **{name: whole[of] for name, of in {"primary": "primary", "pdgId": "pdg_id"}.items() if of in whole},
        "pt": columns["pt"] * 1000.0,
        "eta_particle": columns["eta"],
        "radius": _float64(np.hypot(x, y)),
        "nhits": whole["nhits"],
    }


def _saved(columns: Mapping[str, Any]) -> bytes:
    import torch

    data = importlib.import_module("torch_geometric.data").Data()
    for name, value in columns.items():
        # Copied: an array that shares memory with others, or may not be written, would be saved with all of it.
        data[name] = torch.from_numpy(np.array(value, order="C")) if isinstance(value, np.ndarray) else value
    buffer = io.BytesIO()
    torch.save(data, buffer)
    return buffer.getvalue()


def _stem(event: TrackedEvent) -> str:
    return event_file_name(event.event_id).removesuffix(SUFFIX)


def _float64(values: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    return values.astype(np.float64)
