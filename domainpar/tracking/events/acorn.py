"""Event graphs of the acorn framework (`.pyg`): hits, candidate edges with labels, and the true edges of particles.

acorn writes `trainset/`, `valset/` and `testset/` with a file `event000000007.pyg` (or `...-graph.pyg`) an event; a
directory of such files alone will do. They are pickles and are read by allow-list (`events.pyg`): one that asks for
more than tensors, numpy values and plain `Data` is refused, and there is no switch to run it anyway.

Truth is known of hits on true edges only. All other hits count as noise, so also those of particles with one hit.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from domainpar.tracking.events import acorn_columns, construct, features
from domainpar.tracking.events.acorn_columns import Columns, short_name
from domainpar.tracking.events.graph import EventGraph, Hits, Particles, checked, modules_of_32_bits
from domainpar.tracking.events.pyg import read_entries
from domainpar.tracking.events.sources import InputFiles, Options, Source
from domainpar.tracking.events.tables import InputTable
from domainpar.tracking.events.targets import MEV_ABOVE, passes
from partitioners.topology import FloatArray, IntArray

_IN_GEV = {"MeV": 1e-3, "GeV": 1.0, None: 1e-3}  # acorn itself writes MeV
_PARTICLE_NAMES = {"eta_particle": "eta", "pdgId": "pdg_id"}


def _settled(events: Sequence[InputFiles], options: Options) -> Options:
    """The options with the unit of pt, guessed once for all events: guessed anew for each, a small one could differ.

    Raises:
        ValueError: If scales and features are not of one number, or a scale is not a finite number other than 0.
        Problem: If the unit may be either.
    """
    for of in ("node", "edge"):
        names, scales = options[f"{of}_features"], options[f"{of}_scales"]
        if scales is not None and len(names or ()) != len(scales):
            count = f"{len(names or ())} {of}_features but {len(scales)} {of}_scales"
            raise ValueError(f"{count}; one scale for each feature.")
        if any(not math.isfinite(scale) or scale == 0 for scale in scales or ()):
            raise ValueError(f"{of}_scales are {list(scales)}; expected finite numbers other than 0.")
    return {**options, "pt_unit": options["pt_unit"] or _guessed_pt_unit(events)}


def _guessed_pt_unit(events: Sequence[InputFiles]) -> str | None:
    """Unit of pt by the median over the true edges of the first file that has any: above 50 only MeV make sense.

    None if no file knows a pt. Between 20 and 50, which may be either, it is refused.
    """
    for files in events:
        columns = Columns(read_entries(files.place), files.place)
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


def _read(
    files: InputFiles,
    node_features: Sequence[str],
    node_scales: Sequence[float],
    edge_features: Sequence[str] | None,
    edge_scales: Sequence[float] | None,
    hard_cuts: Mapping[str, Any] | None,
    pt_unit: str | None,
) -> EventGraph:
    """The graph in the order of the file.

    `hit_id` is the file's, else the rows from 0; it may repeat, where one hit was written once for each of its
    particles. Volume, layer and module are 0 where the file has none; modules whose numbers do not fit 32 bits are
    numbered within the event. A particle's vertex is known if the file has vx, vy and vz; where it has only `radius`, x
    is the radius, y 0 and z NaN. Charges are unknown.

    Args:
        files: The event.
        node_features: Columns of hits that become node features; `hit_y`, or `y`, is r sin(phi).
        node_scales: Divisor of each.
        edge_features: Columns of candidate edges that become edge features; computed where the file lacks them
            (`events.acorn_columns`). None: those of graphs built here (`features.EDGE_FEATURES`).
        edge_scales: Divisor of each. None: 1.
        hard_cuts: Conditions on the columns of true edges (`events.targets` has the grammar), pt in GeV: only edges
            whose two hits both lie on true edges that pass are kept. By truth, so impossible on real data.
        pt_unit: Unit of pt in the files, MeV or GeV.
    """
    columns = Columns(read_entries(files.place), files.place)
    cylinder = acorn_columns.cylinder_of(columns)
    position = np.stack([cylinder[name] for name in "xyz"], axis=1).astype(np.float32)
    names = tuple(name if name == "hit_id" else name.removeprefix("hit_") for name in node_features)
    if edge_features is None:
        of_edges: tuple[str, ...] = features.EDGE_FEATURES
        edge_values = construct.edge_features(position, columns.edge_index)
    else:
        of_edges = tuple(name.removeprefix("edge_") for name in edge_features)
        scales = acorn_columns.SCALES | dict(zip(names, node_scales))
        edge_values = acorn_columns.edge_features(
            columns, cylinder, of_edges, edge_scales or (1.0,) * len(of_edges), scales
        )
    graph = EventGraph(
        hits=_hits(columns, position, _IN_GEV[pt_unit]),
        features=acorn_columns.node_features(columns, cylinder, names, node_scales),
        feature_names=names,
        edge_index=columns.edge_index,
        edge_features=edge_values,
        edge_feature_names=of_edges,
        label=columns.get("edge", "y") if columns.has("edge", "y") else None,
    )
    graph = checked(graph, columns.place)
    return graph if not hard_cuts else _with_hard_cuts(graph, columns, hard_cuts, _IN_GEV[pt_unit])


SOURCE = Source(
    _read,
    (InputTable(("event{}-graph.pyg", "event{}.pyg", "{}-graph.pyg", "{}.pyg")),),
    "acorn events",
    options={
        "node_features": features.NODE_FEATURES,
        "node_scales": features.NODE_SCALE,
        **dict.fromkeys(("edge_features", "edge_scales", "hard_cuts", "pt_unit")),
    },
    settings=lambda options: json.loads(json.dumps(options)),  # tuples become lists, as in a manifest
    settle=_settled,
    folders={"trainset": "train", "valset": "val", "testset": "test"},
)


def _hits(columns: Columns, position: FloatArray, in_gev: float) -> Hits:
    def whole(name: str) -> IntArray:
        return columns.get("hit", name).astype(np.int64) if columns.has("hit", name) else np.zeros(len(position), int)

    particle_id, particles = _truth(columns, in_gev)
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
    first = first[ids != 0]  # noise is no particle; a particle is as its first true edge has it
    names = {name: name for name in ("pt", "nhits", "primary", "vx", "vy", "vz")} | _PARTICLE_NAMES
    table = {to: columns.floats("track", name)[first] for name, to in names.items() if columns.has("track", name)}
    if "pt" in table:
        table["pt"] = table["pt"] * in_gev
    if columns.has("track", "radius"):
        unknown, radius = np.full(len(first), np.nan), columns.floats("track", "radius")[first]
        vertex = [table.get(axis, unknown) for axis in ("vx", "vy", "vz")]
        alone = ~np.isfinite(vertex).all(axis=0) & np.isfinite(radius)
        by_radius = zip(("vx", "vy", "vz"), vertex, (radius, 0.0, np.nan))
        table |= {axis: np.where(alone, value, known) for axis, known, value in by_radius}
    return particle_id, Particles.from_table(of_edge[first], table, particle_id)


def _with_hard_cuts(graph: EventGraph, columns: Columns, hard_cuts: Mapping[str, Any], in_gev: float) -> EventGraph:
    if columns.track_edges is None:
        raise columns.place.problem("hard_cuts need the truth, and the event has no track_edges")
    passing = columns.inside.copy()  # of each true edge, whether it meets all conditions
    for name, condition in hard_cuts.items():
        kind_and_name = short_name(name)
        short = "eta_particle" if name == "eta" else kind_and_name[1] if kind_and_name else name
        values = columns.get("track", short)
        if short == "pt":
            values = values.astype(np.float64) * in_gev
        try:
            passing &= passes(values, condition)
        except ValueError as error:
            raise columns.place.problem(f"hard_cuts on {name}: {error}".rstrip(".")) from error
    on_passing = np.zeros(columns.num_hits, np.bool_)
    on_passing[columns.track_edges[:, passing]] = True
    kept = np.flatnonzero(on_passing[graph.edge_index].all(axis=0))
    note = f"hard cuts by truth kept {len(kept)} of {graph.num_edges} candidate edges"
    return replace(graph.take_edges(kept), label_note=note)
