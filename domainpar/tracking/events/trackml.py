"""TrackML events: `event000001001-hits.csv`, `-truth.csv` and `-particles.csv`, plain or gzipped.

Only the hits are needed; they may tell their errors (`measured`), or `detectors.csv` the axes of modules that are not
TrackML's. Truth needs `hit_id, particle_id`, and may have `weight`; particles may have a production
vertex, momentum, charge and number of hits. Other columns, and a first column without a name, are left alone. Features
of clusters need `-cells.csv` of each event and `detectors.csv` beside them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from domainpar.common.problems import EventPlace, Problem
from domainpar.common.words import several, some_of
from domainpar.tracking.events.clusters import cluster_features
from domainpar.tracking.events.csv_tables import MissingColumns, events_with, find, read_table
from domainpar.tracking.events.detector import lie_on_known_surfaces
from domainpar.tracking.events.graph import Hits, Particles, modules_of_32_bits
from domainpar.tracking.events.measured import AXES, SIGMAS, detectors_file, measured
from partitioners.topology import FloatArray, IntArray

_ACTS = {"geometry_id", "measurement_id", "particle_id_pv", "tx"}
"""Columns of ACTS's CSV in any version, also of the samples that traccc has of it; TrackML has none of them."""
_OF_ACTS = "read the directory with --source acts (docs/recipes/data_acts.md)"
# The columns that each file must have, and those that it may have besides.
_NEEDED: dict[str, dict[str, type[Any]]] = {
    "hits": {
        "hit_id": np.int64, **dict.fromkeys("xyz", np.float64),
        **dict.fromkeys(("volume_id", "layer_id"), np.int32), "module_id": np.int64,
    },
    "truth": {"hit_id": np.int64, "particle_id": np.uint64},
    "particles": {"particle_id": np.uint64},
    "cells": {"hit_id": np.int64, "ch0": np.int64, "ch1": np.int64, "value": np.float64},
    "detectors": {
        **dict.fromkeys(("volume_id", "layer_id", "module_id"), np.int64),
        **dict.fromkeys(("module_t", "pitch_u", "pitch_v"), np.float64),
    },
}  # fmt: skip
_OPTIONAL: dict[str, dict[str, type[Any]]] = {
    "hits": dict.fromkeys((*SIGMAS, *AXES), np.float64),
    "cells": {},
    "detectors": {},
    "truth": {"weight": np.float64},
    "particles": {
        **dict.fromkeys(("vx", "vy", "vz", "px", "py", "pz"), np.float64), "q": np.int64, "nhits": np.int64,
    },
}  # fmt: skip


def list_events(directory: str | Path) -> list[str]:
    """The events of a directory, sorted: `000001001` for `event000001001-hits.csv.gz`.

    Raises:
        Problem: If the directory does not exist or holds no hits file, or files of truth whose hits have other numbers.
    """
    directory = Path(directory)
    names = events_with(directory, "hits")
    truth = events_with(directory, "truth")
    without, others = sorted(set(names) - set(truth)), sorted(set(truth) - set(names))
    if without and others:
        what = (
            f"{several(len(without), 'event')} of {directory} have no truth ({some_of(without, 3)}), and there is truth"
        )
        what = f"{what} of {several(len(others), 'event')} without hits ({some_of(others, 3)})"
        raise Problem(what, "give files of one event one number; or move the truth away to go without")
    if not names:
        hint = "expected are files like event000001001-hits.csv[.gz]"
        if any(directory.glob("event*-measurement*.csv*")) or any(directory.glob("event*-spacepoint*.csv*")):
            hint = f"there are measurements or space points, as ACTS and traccc write them; {_OF_ACTS}"
        if below := [path for path in sorted(directory.iterdir()) if path.is_dir() and events_with(path, "hits")]:
            hint = f"there are some one folder down: --input {some_of([str(path) for path in below])}"
        raise Problem(f"{directory} holds no TrackML events", hint)
    return names


def event_files(directory: str | Path, event_id: str, clusters: bool = False) -> list[Path]:
    """The files that `read_event` reads."""
    parts = ("hits", "truth", "particles", *(("cells",) if clusters else ()))
    files = [find(Path(directory), event_id, part) for part in parts]
    return [path for path in [*files, detectors_file(Path(directory)) if clusters else None] if path is not None]


def read_event(directory: str | Path, event_id: str, clusters: bool = False) -> Hits:
    """Read the hits of one event, with truth and particles where their files exist.

    Args:
        directory: Where the files are.
        event_id: Name of the event as in `list_events`.
        clusters: Read cells and the table of modules as well, for the features of `clusters`.

    Returns:
        The hits in the order of the file. `nhits` of a particle is the table's; where that does not tell, what truth
        counts. `particle_id` is None without truth, `weight` without truth weights,
        `particles` without a particles file. Particles that left hits but are not listed are appended as unknown.

    Raises:
        Problem: Naming event, file, and what was found and expected: if a file is missing, truncated, there both plain
            and gzipped, or lacks a column; if a hit or a particle is listed twice; if a value is not a finite number;
            or if hits and truth do not list the same hits.
    """
    directory = Path(directory)
    path = find(directory, event_id, "hits")
    if path is None:
        raise Problem(f"no hits in {directory}; expected event{event_id}-hits.csv or .csv.gz", event=event_id)
    table = _read_table(path, event_id, "hits", unique="hit_id")
    hit_id = table["hit_id"].to_numpy()
    particle_id, weight = _read_truth(directory, event_id, hit_id, path)
    known = lie_on_known_surfaces(table["volume_id"].to_numpy(), table["layer_id"].to_numpy())
    return Hits(
        event_id=event_id,
        hit_id=hit_id,
        position=table[["x", "y", "z"]].to_numpy(np.float32),
        volume=table["volume_id"].to_numpy(),
        layer=table["layer_id"].to_numpy(),
        module=modules_of_32_bits(table["module_id"].to_numpy()),
        particle_id=particle_id,
        weight=weight,
        particles=_read_particles(directory, event_id, particle_id),
        clusters=_read_clusters(directory, event_id, table) if clusters else None,
        measured=measured(table, None, EventPlace(event_id, path), None if known else detectors_file(directory)),
    )


def _read_clusters(directory: Path, event_id: str, hits: pd.DataFrame) -> FloatArray:
    """The features of the cluster of each hit, in the order of the hits."""
    path, modules = find(directory, event_id, "cells"), detectors_file(directory)
    if path is None or modules is None:
        missing = f"event{event_id}-cells.csv" if path is None else "detectors.csv"
        raise Problem(f"no {missing} in {directory}", "leave --cluster-features out", event=event_id)
    place = EventPlace(event_id, path)
    cells = _read_table(path, event_id, "cells")
    return cluster_features(hits, cells, _read_table(modules, event_id, "detectors"), place)


def _read_truth(
    directory: Path, event_id: str, hit_id: IntArray, hits_path: Path
) -> tuple[IntArray | None, FloatArray | None]:
    """Particle and weight of each hit, in the order of the hits: the two files may be ordered differently."""
    path = find(directory, event_id, "truth")
    if path is None:
        return None, None
    place = EventPlace(event_id, path)
    table = _read_table(path, event_id, "truth", unique="hit_id")
    truth_id = table["hit_id"].to_numpy()
    unknown, unlisted = np.setdiff1d(hit_id, truth_id), np.setdiff1d(truth_id, hit_id)
    if len(unknown) or len(unlisted):
        first = (unknown if len(unknown) else unlisted)[0]
        hint = "one of the two files is truncated or of another event; remove the truth file to go without labels"
        if not len(unknown) and len(hit_id):
            hint = (
                "if these are true points that left no hit, remove their rows from truth; else the hits are truncated"
            )
        raise place.problem(
            f"{len(unknown)} of the {len(hit_id)} hits in {hits_path.name} have no row here and {len(unlisted)} rows "
            f"name no such hit (first: hit_id {first})",
            hint,
        )
    table = table.set_index("hit_id").loc[hit_id]  # in the order of the hits
    weight = table["weight"].to_numpy(np.float32) if "weight" in table else None
    return table["particle_id"].to_numpy().view(np.int64), weight


def _read_particles(directory: Path, event_id: str, particle_id: IntArray | None) -> Particles | None:
    path = find(directory, event_id, "particles")
    if path is None:
        return None
    place = EventPlace(event_id, path)
    table = _read_table(path, event_id, "particles", unique="particle_id")
    if (table["particle_id"] == 0).any():
        hint = "there is no truth file that could use the particles: remove this file"
        if particle_id is not None:
            hint = (
                "if ids begin at 0 here, add 1 to every particle_id of a particle, in this file and in truth, and give "
                "hits of noise 0; else remove this row"
            )
        raise place.problem("lists a particle 0; 0 means noise and is no particle", hint)
    ids = table["particle_id"].to_numpy().view(np.int64)
    at_hits = np.zeros(0, np.int64) if particle_id is None else particle_id
    left_hits = np.unique(at_hits[at_hits != 0])
    if len(ids) and len(left_hits) and not np.isin(left_hits, ids).any():
        what = f"lists none of the {len(left_hits):,} particles of truth (first: {np.uint64(left_hits[0])})"
        raise place.problem(what, "is one of the two of another event, or were particles numbered anew in one of them?")
    columns = {"charge" if name == "q" else str(name): table[name].to_numpy() for name in table}
    return Particles.of_table(ids, columns, at_hits)


def _read_table(path: Path, event_id: str, part: str, unique: str | None = None) -> pd.DataFrame:
    """A table of the files, of one of the parts above."""
    try:
        return read_table(path, event_id, _NEEDED[part], _OPTIONAL[part], () if unique is None else (unique,))
    except MissingColumns as error:
        if not _ACTS & set(error.found):
            raise
        what = f"these are {part} of ACTS or traccc, not of TrackML: {error.what}"
        raise EventPlace(event_id, path).problem(what, _OF_ACTS) from error
