"""heptrkx hit graphs: `event000001000_g000.npz` with X, y, Ri_rows, Ri_cols, Ro_rows, Ro_cols, and exact labels.

X holds r/1000, phi/(pi/n_phi) and z/1000 of each hit. Edge `Ro_cols[k]` starts at hit `Ro_rows[k]`, and edge
`Ri_cols[k]` ends at hit `Ri_rows[k]`. The hit ids lie beside it in `event000001000_g000_ID.npz`, or nowhere.
"""

from __future__ import annotations

import math
import re
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from domainpar.common.problems import EventPlace
from domainpar.tracking.events.construct import edge_features
from domainpar.tracking.events.features import EDGE_FEATURES, NODE_FEATURES, NODE_SCALE
from domainpar.tracking.events.graph import Array, EventGraph, Hits, check_array, check_finite, checked
from domainpar.tracking.events.sources import InputFiles, Source
from domainpar.tracking.events.tables import InputTable
from partitioners.topology import IntArray

LARGEST_ARRAY = 2**34
"""Bytes that one array of a file may have: 16 GiB."""

GRAPH = InputTable("event{}.npz", "X: f4; y: f4; Ri_rows, Ri_cols, Ro_rows, Ro_cols: i8")
IDS = InputTable("event{}_ID.npz", "ID: i8")


def _read(files: InputFiles, num_phi_sectors: int) -> EventGraph:
    """The graph in the order of the file.

    Features are r, phi, z over (1000 mm, pi, 1000 mm) whatever the number of sectors was, so that a model does not
    depend on it; edge features as of built graphs. Hits have no layer and no particle. A sector's phi is centred on it,
    so sectors of one event do not lie where they were.
    """
    place, arrays = files.place, _load(files.place, GRAPH.must)
    if num_phi_sectors < 1:
        raise ValueError(f"num_phi_sectors is {num_phi_sectors}, expected at least 1.")
    check_array(place, "X", arrays["X"], ("hits", 3), "r, phi and z,")
    features = arrays["X"].astype(np.float32)
    check_finite(place, "X", features)
    if num_phi_sectors > 1:
        features[:, 1] /= num_phi_sectors
    edge_index = np.stack([_ends(arrays, side, place) for side in ("Ro", "Ri")])
    r, phi, z = (features.astype(np.float64) * NODE_SCALE).T
    position = np.stack([r * np.cos(phi), r * np.sin(phi), z], axis=1).astype(np.float32)
    graph = checked(
        EventGraph(
            hits=Hits.bare(files.event, _hit_ids(files, len(features)), position),
            features=features,
            feature_names=NODE_FEATURES,
            edge_index=edge_index,
            edge_features=np.zeros((edge_index.shape[1], 0), np.float32),
            edge_feature_names=(),
            label=arrays["y"],
        ),
        place,
    )
    # They can be computed only now that the edges are known to name real nodes.
    return replace(graph, edge_features=edge_features(position, edge_index), edge_feature_names=EDGE_FEATURES)


SOURCE = Source(
    _read,
    (GRAPH, IDS),
    "heptrkx graphs",
    options={"num_phi_sectors": 1},
    settings=dict,
    whole=lambda event: re.sub(r"_g\d+$", "", event),  # 000001000 of 000001000_g003
    learns_surfaces=False,
)


def _hit_ids(files: InputFiles, num_hits: int) -> IntArray:
    """The numbers of the hits; without a file of them, the rows."""
    if (path := IDS.find(files.directory, files.event)) is None:
        return np.arange(num_hits)
    place = EventPlace(files.event, path)
    hit_id = _load(place, ("ID",))["ID"]
    check_array(place, "ID", hit_id, (num_hits,), "integers")
    if len(np.unique(hit_id)) != num_hits:
        raise place.problem(f"{num_hits - len(np.unique(hit_id))} of {num_hits} hit ids are repeated")
    return hit_id.astype(np.int64)


def _ends(arrays: Mapping[str, Array], side: str, place: EventPlace) -> IntArray:
    """The node at one end of each edge: `rows[k]` belongs to edge `cols[k]`, listed in any order."""
    num_edges = len(arrays["y"])
    for name in (f"{side}_rows", f"{side}_cols"):
        check_array(place, name, arrays[name], (num_edges,), "integers")
    rows, edges = arrays[f"{side}_rows"], arrays[f"{side}_cols"]
    times_listed = np.bincount(edges[(edges >= 0) & (edges < num_edges)], minlength=num_edges)
    if (times_listed != 1).any():
        edge = int(np.flatnonzero(times_listed != 1)[0])
        raise place.problem(
            f"{side}_cols lists edge {edge} {times_listed[edge]} times, expected each of {num_edges} edges once"
        )
    ends = np.empty(num_edges, np.int64)
    ends[edges] = rows
    return ends


def _load(place: EventPlace, names: Sequence[str]) -> dict[str, Array]:
    path = Path(str(place.file))
    try:
        with zipfile.ZipFile(path) as archive:
            members = {name.removesuffix(".npy") for name in archive.namelist()}
            if missing := [name for name in names if name not in members]:
                raise ValueError(f"no array {', '.join(missing)}; found {sorted(members)}, expected {sorted(names)}")
            for name in names:
                _check_declared(archive, f"{name}.npy")
        # allow_pickle is off by default and stays off: an object array in a file is a program.
        with np.load(path, allow_pickle=False) as arrays:
            return {name: arrays[name] for name in names}
    except (OSError, EOFError, ValueError, TypeError, AttributeError, zipfile.BadZipFile, zlib.error) as error:
        raise place.problem(
            f"cannot be read, {type(error).__name__}: {error}", "is it truncated? Only arrays of numbers are read"
        ) from error


def _check_declared(archive: zipfile.ZipFile, member: str) -> None:
    """Refuse an array that claims another size than its member has: numpy would allocate what it claims."""
    with archive.open(member) as file:
        version = np.lib.format.read_magic(file)
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, _, dtype = read(file)
        header = file.tell()
    held = archive.getinfo(member).file_size - header
    declared = math.prod(shape) * dtype.itemsize
    if not dtype.hasobject and (declared != held or held > LARGEST_ARRAY):
        raise ValueError(f"{member} claims {declared} bytes and holds {held}; at most {LARGEST_ARRAY} are read")
