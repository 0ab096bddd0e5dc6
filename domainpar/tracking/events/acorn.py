"""Event graphs of the acorn framework (`.pyg`): hits, candidate edges with labels, and the true edges of particles.

acorn writes `trainset/`, `valset/` and `testset/` with a file `event000000007.pyg` (or `...-graph.pyg`) an event; a
directory of such files alone will do. They are pickles and are read by allow-list (`events.pyg`): one that asks for
more than tensors, numpy values and plain `Data` is refused, and there is no switch to run it anyway.

Truth is known of hits on true edges only. All other hits count as noise, so also those of particles with one hit.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from domainpar.common.problems import EventPlace, Problem
from domainpar.tracking.events import acorn_columns, construct, features
from domainpar.tracking.events.acorn_columns import Columns, short_name
from domainpar.tracking.events.graph import EventGraph, Hits, Particles, checked, modules_of_32_bits
from domainpar.tracking.events.pyg import read_entries
from domainpar.tracking.events.targets import MEV_ABOVE, passes
from partitioners.topology import FloatArray, IntArray

PtUnit = Literal["MeV", "GeV"]
SplitName = Literal["train", "val", "test"]

FOLDERS: dict[str, SplitName] = {"trainset": "train", "valset": "val", "testset": "test"}
SUFFIX = ".pyg"

_IN_GEV = {"MeV": 1e-3, "GeV": 1.0, None: 1e-3}  # acorn itself writes MeV


@dataclass(frozen=True)
class AcornOptions:
    """Columns, scales, cuts and units to read files with.

    Attributes:
        node_features: Columns of hits that become node features; `hit_y`, or `y`, is r sin(phi).
        node_scales: Divisor of each.
        edge_features: Columns of candidate edges that become edge features; computed where the file lacks them
            (`events.acorn_columns`). None: those of graphs built here (`features.EDGE_FEATURES`).
        edge_scales: Divisor of each. None: 1.
        hard_cuts: Conditions on the columns of true edges (`events.targets` has the grammar), pt in GeV: only edges
            whose two hits both lie on true edges that pass are kept. By truth, so impossible on real data.
        pt_unit: Unit of pt in the files. None: guessed (`guess_pt_unit`).

    Raises:
        ValueError: If scales and features are not of one number, or a scale is not a finite number other than 0.
    """

    node_features: tuple[str, ...] = features.NODE_FEATURES
    node_scales: tuple[float, ...] = features.NODE_SCALE
    edge_features: tuple[str, ...] | None = None
    edge_scales: tuple[float, ...] | None = None
    hard_cuts: Mapping[str, Any] | None = None
    pt_unit: PtUnit | None = None

    def __post_init__(self) -> None:
        for of in ("node", "edge"):
            names, scales = getattr(self, f"{of}_features"), getattr(self, f"{of}_scales")
            count = len(names or ())
            if scales is not None and count != len(scales):
                raise ValueError(f"{count} {of}_features but {len(scales)} {of}_scales; one scale for each feature.")
            if any(not math.isfinite(scale) or scale == 0 for scale in scales or ()):
                raise ValueError(f"{of}_scales are {list(scales)}; expected finite numbers other than 0.")


@dataclass(frozen=True)
class AcornFile:
    """One file of a directory.

    Attributes:
        path: The file.
        split: Split of its folder; None in a directory without such folders.
    """

    path: Path
    split: SplitName | None


def find_events(directory: str | Path) -> dict[str, AcornFile]:
    """The events of a directory by name, in order of split, then name: `000000007` for `event000000007.pyg`.

    Raises:
        Problem: If the directory does not exist or holds no events, or two files have one name.
    """
    directory = Path(directory)
    if not directory.is_dir():
        raise Problem(f"{directory} is not a directory", "give the one that holds trainset, valset and testset")
    folders: dict[Path, SplitName | None] = {
        directory / name: split for name, split in FOLDERS.items() if (directory / name).is_dir()
    }
    events: dict[str, AcornFile] = {}
    for folder, split in (folders or {directory: None}).items():
        for path in sorted(folder.glob(f"*{SUFFIX}")):
            name = event_name(path)
            if name in events:
                what = f"{path} and {events[name].path} are one event by their names"
                raise Problem(what, "remove one of them", event=name)
            events[name] = AcornFile(path, split)
    if not events:
        places = ", ".join(map(str, folders or (directory,)))
        raise Problem(f"no acorn events in {places}", f"expected are files like event000000007{SUFFIX}")
    return events


def event_name(path: Path) -> str:
    """Name of the event of a file: without `event` before it and `-graph` behind."""
    return path.stem.removesuffix("-graph").removeprefix("event") or path.stem


def guess_pt_unit(paths: Iterable[Path]) -> PtUnit | None:
    """Unit of pt, from the median over the true edges of the first file that has any: above 50 only MeV make sense.

    acorn itself writes MeV. None if no file knows a pt.

    Raises:
        Problem: If the median is between 20 and 50, which may be either, or a file cannot be read.
    """
    for path in paths:
        columns = _columns(path)
        if columns.track_edges is None or not columns.has("track", "pt"):
            continue
        pt = columns.get("track", "pt")
        pt = pt[np.isfinite(pt)]
        if len(pt) == 0:
            continue
        median = float(np.median(pt))
        if 20 <= median <= MEV_ABOVE:
            raise columns.place.problem(f"the median pt is {median:.4g}", "is that MeV or GeV? Say pt_unit")
        return "MeV" if median > MEV_ABOVE else "GeV"
    return None


def read_event(path: str | Path, options: AcornOptions | None = None) -> EventGraph:
    """Read one event.

    Args:
        path: The file; its name is that of the event.
        options: How. Default: r, phi, z over (1000 mm, pi, 1000 mm), and the edge features of graphs built here.

    Returns:
        The graph in the order of the file. `hit_id` is the file's, else the rows from 0; it may repeat, where one hit
        was written once for each of its particles. Volume, layer and module are 0 where the file has none; modules
        whose numbers do not fit 32 bits are numbered within the event. A particle's vertex is known if the file has
        vx, vy and vz; where it has only `radius`, x is the radius, y 0 and z NaN. Charges are unknown.

    Raises:
        Problem: Naming event and file: if the file asks for more than it may, is damaged or lacks a column; if a
            shape does not fit, an edge names a hit that does not exist, or a value is not finite or in another unit.
    """
    options = options or AcornOptions()
    columns = _columns(Path(path))
    cylinder = acorn_columns.cylinder_of(columns)
    position = np.stack([cylinder[name] for name in "xyz"], axis=1).astype(np.float32)
    names = tuple(name if name == "hit_id" else name.removeprefix("hit_") for name in options.node_features)
    if options.edge_features is None:
        of_edges: tuple[str, ...] = features.EDGE_FEATURES
        edge_values = construct.edge_features(position, columns.edge_index)
    else:
        of_edges = tuple(name.removeprefix("edge_") for name in options.edge_features)
        edge_scales = options.edge_scales or (1.0,) * len(of_edges)
        node_scales = acorn_columns.SCALES | dict(zip(names, options.node_scales))
        edge_values = acorn_columns.edge_features(columns, cylinder, of_edges, edge_scales, node_scales)
    graph = EventGraph(
        hits=_hits(columns, position, options),
        features=acorn_columns.node_features(columns, cylinder, names, options.node_scales),
        feature_names=names,
        edge_index=columns.edge_index,
        edge_features=edge_values,
        edge_feature_names=of_edges,
        label=columns.get("edge", "y") if columns.has("edge", "y") else None,
    )
    return _with_hard_cuts(checked(graph, columns.place), columns, options)


def _columns(path: Path) -> Columns:
    place = EventPlace(event_name(path), path)
    return Columns(read_entries(place), place)


def _hits(columns: Columns, position: FloatArray, options: AcornOptions) -> Hits:
    def whole(name: str) -> IntArray:
        return columns.get("hit", name).astype(np.int64) if columns.has("hit", name) else np.zeros(len(position), int)

    particle_id, particles = _truth(columns, _IN_GEV[options.pt_unit])
    return Hits(
        event_id=columns.place.event,
        hit_id=whole("hit_id") if columns.has("hit", "hit_id") else np.arange(len(position)),
        position=position,
        volume=whole("volume_id").astype(np.int32),
        layer=whole("layer_id").astype(np.int32),
        module=modules_of_32_bits(whole("module_id")),
        particle_id=particle_id,
        particles=particles,
    )


# --- truth -----------------------------------------------------------------------------------------------------------


def _truth(columns: Columns, in_gev: float) -> tuple[IntArray | None, Particles | None]:
    """Particle of each hit, and the particle table."""
    if columns.track_edges is None or not columns.has("track", "particle_id"):
        return None, None
    of_edge = columns.get("track", "particle_id").astype(np.int64)
    particle_id = np.zeros(columns.num_hits, np.int64)
    for ends in columns.track_edges:  # a hit of two particles is the last one's, as in acorn
        particle_id[ends[columns.inside]] = of_edge[columns.inside]
    ids, first = np.unique(of_edge, return_index=True)
    first = first[ids != 0]  # noise is no particle
    return particle_id, _particles(columns, of_edge[first], first, particle_id, in_gev)


def _particles(columns: Columns, ids: IntArray, first: IntArray, particle_id: IntArray, in_gev: float) -> Particles:
    """The table: what the first true edge of each particle says of it."""

    def column(name: str) -> FloatArray:
        return columns.floats("track", name)[first] if columns.has("track", name) else np.full(len(ids), np.nan)

    vertex = np.stack([column(name) for name in ("vx", "vy", "vz")], axis=1)
    radius = column("radius")
    only_radius = ~np.isfinite(vertex).all(axis=1) & np.isfinite(radius)
    vertex[only_radius] = np.stack([radius, np.zeros_like(radius), np.full_like(radius, np.nan)], axis=1)[only_radius]
    nhits = column("nhits")
    sorted_ids = np.sort(particle_id)
    in_event = np.searchsorted(sorted_ids, ids, "right") - np.searchsorted(sorted_ids, ids, "left")
    return Particles(
        particle_id=ids,
        pt=(column("pt") * in_gev).astype(np.float32),
        eta=column("eta_particle").astype(np.float32),
        vertex=vertex.astype(np.float32),
        nhits=np.where(np.isnan(nhits), in_event, nhits).astype(np.int32),
        charge=np.zeros(len(ids), np.int8),
        primary=(column("primary") > 0).astype(np.int8) if columns.has("track", "primary") else None,
        pdg_id=np.nan_to_num(column("pdgId")).astype(np.int64) if columns.has("track", "pdgId") else None,
    )


def _with_hard_cuts(graph: EventGraph, columns: Columns, options: AcornOptions) -> EventGraph:
    if not options.hard_cuts:
        return graph
    if columns.track_edges is None:
        raise columns.place.problem("hard_cuts need the truth, and the event has no track_edges")
    passing = columns.inside.copy()  # of each true edge, whether it meets all conditions
    for name, condition in options.hard_cuts.items():
        kind_and_name = short_name(name)
        short = "eta_particle" if name == "eta" else kind_and_name[1] if kind_and_name else name
        values = columns.get("track", short)
        if short == "pt":
            values = values.astype(np.float64) * _IN_GEV[options.pt_unit]
        try:
            passing &= passes(values, condition)
        except ValueError as error:
            raise columns.place.problem(f"hard_cuts on {name}: {error}".rstrip(".")) from error
    on_passing = np.zeros(columns.num_hits, np.bool_)
    on_passing[columns.track_edges[:, passing]] = True
    kept = np.flatnonzero(on_passing[graph.edge_index].all(axis=0))
    return replace(
        graph,
        edge_index=graph.edge_index[:, kept],
        edge_features=graph.edge_features[kept],
        label=None if graph.label is None else graph.label[kept],
        label_note=f"hard cuts by truth kept {len(kept)} of {graph.num_edges} candidate edges",
    )
