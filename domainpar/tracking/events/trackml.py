"""TrackML events: `event000001001-hits.csv`, `-truth.csv` and `-particles.csv`, plain or gzipped.

Only the hits are needed. Truth needs `hit_id, particle_id`, and may have `weight`; particles may have a production
vertex, momentum, charge and number of hits. Other columns, and a first column without a name, are left alone. Features
of clusters need `-cells.csv` of each event and `detectors.csv` beside them.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from domainpar.common.problems import EventPlace, Problem
from domainpar.tracking.events.clusters import cluster_features
from domainpar.tracking.events.graph import Hits, Particles
from partitioners.topology import FloatArray, IntArray

_SUFFIXES = (".csv", ".csv.gz")
_ACTS = {"geometry_id", "measurement_id", "particle_id_pv", "tx"}
"""Columns of ACTS's CSV in any version, also of the samples that traccc has of it; TrackML has none of them."""
_OF_ACTS = "that CSV is not read yet: docs/recipes/data_acts.md says which columns to write, or which parquet is read"
# The columns that each file must have, and those that it may have besides.
_NEEDED: dict[str, dict[str, type[Any]]] = {
    "hits": {
        "hit_id": np.int64, **dict.fromkeys("xyz", np.float64),
        **dict.fromkeys(("volume_id", "layer_id", "module_id"), np.int64),
    },
    "truth": {"hit_id": np.int64, "particle_id": np.int64},
    "particles": {"particle_id": np.int64},
    "cells": {"hit_id": np.int64, "ch0": np.int64, "ch1": np.int64, "value": np.float64},
    "detectors": {
        **dict.fromkeys(("volume_id", "layer_id", "module_id"), np.int64),
        **dict.fromkeys(("module_t", "pitch_u", "pitch_v"), np.float64),
    },
}  # fmt: skip
_OPTIONAL: dict[str, dict[str, type[Any]]] = {
    "hits": {},
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
        Problem: If the directory does not exist or holds no hits file.
    """
    directory = Path(directory)
    if not directory.is_dir():
        raise Problem(f"{directory} is not a directory", "give the one that holds the TrackML files")
    names = {
        path.name.removesuffix(f"-hits{suffix}").removeprefix("event")
        for suffix in _SUFFIXES
        for path in directory.glob(f"event*-hits{suffix}")
    }
    if not names:
        hint = "expected are files like event000001001-hits.csv[.gz]"
        if any(directory.glob("event*-measurement*.csv*")) or any(directory.glob("event*-spacepoint*.csv*")):
            hint = f"there are measurements or space points, as ACTS and traccc write them; {_OF_ACTS}"
        raise Problem(f"{directory} holds no TrackML events", hint)
    return sorted(names)


def event_files(directory: str | Path, event_id: str, clusters: bool = False) -> list[Path]:
    """The files that `read_event` reads."""
    parts = ("hits", "truth", "particles", *(("cells",) if clusters else ()))
    files = [_find(Path(directory), event_id, part) for part in parts]
    return [path for path in [*files, _detectors(Path(directory)) if clusters else None] if path is not None]


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
    path = _find(directory, event_id, "hits")
    if path is None:
        raise Problem(f"no hits in {directory}; expected event{event_id}-hits.csv or .csv.gz", event=event_id)
    table = _read_table(path, EventPlace(event_id, path), "hits", unique="hit_id")
    hit_id = table["hit_id"].to_numpy()
    particle_id, weight = _read_truth(directory, event_id, hit_id, path)
    return Hits(
        event_id=event_id,
        hit_id=hit_id,
        position=table[["x", "y", "z"]].to_numpy(np.float32),
        **{name: table[f"{name}_id"].to_numpy(np.int32) for name in ("volume", "layer", "module")},
        particle_id=particle_id,
        weight=weight,
        particles=_read_particles(directory, event_id, particle_id),
        clusters=_read_clusters(directory, event_id, table) if clusters else None,
    )


def _read_clusters(directory: Path, event_id: str, hits: pd.DataFrame) -> FloatArray:
    """The features of the cluster of each hit, in the order of the hits."""
    path, modules = _find(directory, event_id, "cells"), _detectors(directory)
    if path is None or modules is None:
        missing = f"event{event_id}-cells.csv" if path is None else "detectors.csv"
        raise Problem(f"no {missing} in {directory}", "leave --cluster-features out", event=event_id)
    place = EventPlace(event_id, path)
    cells = _read_table(path, place, "cells")
    return cluster_features(hits, cells, _read_table(modules, EventPlace(event_id, modules), "detectors"), place)


def _detectors(directory: Path) -> Path | None:
    """The table of the modules, which is the same for all events of a directory."""
    return next((path for suffix in _SUFFIXES if (path := directory / f"detectors{suffix}").is_file()), None)


def _read_truth(
    directory: Path, event_id: str, hit_id: IntArray, hits_path: Path
) -> tuple[IntArray | None, FloatArray | None]:
    """Particle and weight of each hit, in the order of the hits: the two files may be ordered differently."""
    path = _find(directory, event_id, "truth")
    if path is None:
        return None, None
    place = EventPlace(event_id, path)
    table = _read_table(path, place, "truth", unique="hit_id")
    truth_id = table["hit_id"].to_numpy()
    unknown, unlisted = np.setdiff1d(hit_id, truth_id), np.setdiff1d(truth_id, hit_id)
    if len(unknown) or len(unlisted):
        first = (unknown if len(unknown) else unlisted)[0]
        raise place.problem(
            f"{len(unknown)} of the {len(hit_id)} hits in {hits_path.name} have no row here and {len(unlisted)} rows "
            f"name no such hit (first: hit_id {first})",
            "one of the two files is truncated or of another event; remove the truth file to go without labels",
        )
    table = table.set_index("hit_id").loc[hit_id]  # in the order of the hits
    weight = table["weight"].to_numpy(np.float32) if "weight" in table else None
    return table["particle_id"].to_numpy(), weight


def _read_particles(directory: Path, event_id: str, particle_id: IntArray | None) -> Particles | None:
    path = _find(directory, event_id, "particles")
    if path is None:
        return None
    place = EventPlace(event_id, path)
    table = _read_table(path, place, "particles", unique="particle_id")
    if (table["particle_id"] == 0).any():
        hint = "there is no truth file that could use the particles: remove this file"
        if particle_id is not None:
            hint = (
                "if ids begin at 0 here, add 1 to every particle_id of a particle, in this file and in truth, and give "
                "hits of noise 0; else remove this row"
            )
        raise place.problem("lists a particle 0; 0 means noise and is no particle", hint)
    at_hits = pd.Series(np.zeros(0, np.int64) if particle_id is None else particle_id[particle_id != 0])
    unlisted = np.setdiff1d(at_hits, table["particle_id"])
    table = pd.concat([table, pd.DataFrame({"particle_id": unlisted})], ignore_index=True)

    def column(name: str) -> FloatArray:
        """A column, NaN where it is unknown, float64."""
        return np.asarray(table[name], np.float64) if name in table else np.full(len(table), np.nan)

    px, py, pz, nhits = (column(name) for name in ("px", "py", "pz", "nhits"))
    pt = np.hypot(px, py)
    with np.errstate(divide="ignore", invalid="ignore"):
        eta = np.where(pt > 0, np.arcsinh(pz / pt), np.nan)
    hits_left = at_hits.value_counts().reindex(table["particle_id"], fill_value=0)
    return Particles(
        particle_id=table["particle_id"].to_numpy(np.int64),
        pt=pt.astype(np.float32),
        eta=eta.astype(np.float32),
        vertex=np.stack([column(name) for name in ("vx", "vy", "vz")], axis=1).astype(np.float32),
        nhits=np.where(np.isnan(nhits), hits_left, nhits).astype(np.int32),
        charge=np.nan_to_num(np.sign(column("q"))).astype(np.int8),
    )


def _find(directory: Path, event_id: str, part: str) -> Path | None:
    candidates = [directory / f"event{event_id}-{part}{suffix}" for suffix in _SUFFIXES]
    files = [path for path in candidates if path.is_file()]
    if len(files) > 1:
        what = f"{part} are there twice, as {' and as '.join(path.name for path in files)}"
        raise Problem(what, "remove one of the two", event=event_id, file=files[0])
    return files[0] if files else None


def _read_table(path: Path, place: EventPlace, part: str, unique: str | None = None) -> pd.DataFrame:
    """The wanted columns of a CSV file of finite numbers, one of them without repeats if it is named."""
    needed = _NEEDED[part]
    try:
        columns = [str(name) for name in pd.read_csv(path, nrows=0).columns]
        if not (missing := [name for name in needed if name not in columns]):
            types = {name: kind for name, kind in {**needed, **_OPTIONAL[part]}.items() if name in columns}
            # index_col: else a row with one field too many would silently shift all columns by one.
            table = pd.read_csv(path, usecols=list(types), dtype=types, index_col=False)
    except (OSError, EOFError, UnicodeDecodeError, pd.errors.ParserError, pd.errors.EmptyDataError) as error:
        raise place.problem(f"cannot be read, {type(error).__name__}: {error}", _why_unreadable(path)) from error
    except ValueError as error:
        raise place.problem(f"a column holds what is not a number, or an empty field: {error}") from error
    if missing:
        what = f"no column {', '.join(missing)}; found {columns}, expected {list(needed)}"
        if _ACTS & set(columns):
            raise place.problem(f"these are {part} of ACTS or traccc, not of TrackML: {what}", _OF_ACTS)
        raise place.problem(what, _why_missing(columns, missing))
    for name in table.columns:
        bad = np.flatnonzero(~np.isfinite(table[name].to_numpy()))
        if len(bad):
            raise place.problem(
                f"column {name} holds {len(bad)} values that are empty or not finite, "
                f"the first is {table[name].iloc[bad[0]]} in row {bad[0]}"
            )
    if unique is None:
        return table
    repeated = table[unique][table[unique].duplicated(keep=False)]
    if len(repeated):
        rows = np.flatnonzero(table[unique] == repeated.min())[:2].tolist()
        what = f"{repeated.nunique()} values of {unique} appear more than once, the first is {repeated.min()}"
        raise place.problem(f"{what} in rows {rows}")
    return table


def _why_unreadable(path: Path) -> str:
    """A hint, from the first bytes of a file, on why it is no CSV."""
    try:
        with path.open("rb") as file:
            head = file.read(2)
    except OSError:
        return "is it truncated?"
    gzipped = head == b"\x1f\x8b"
    if not head:
        return "the file is empty; without a truth or particles file the event is read without them"
    if gzipped != (path.suffix == ".gz"):
        return f"it is {'' if gzipped else 'not '}gzipped, and its name says otherwise: rename it"
    if head in (b"\xff\xfe", b"\xfe\xff"):
        return f"it is written in UTF-16: iconv -f UTF-16 -t UTF-8 {path.name} > as_utf8.csv"
    return "is it truncated?"


def _why_missing(found: Sequence[str], missing: Sequence[str]) -> str:
    """A hint, from the names of the columns that are there, on why others are not."""
    first = found[0] if found else ""
    other = next((mark for mark in (";", "\t", "|") if mark in first), None)
    if first.startswith("#"):
        return "the first line is a comment: remove it, the names of the columns come first"
    if other is not None:
        return f"columns are separated by {other!r} here; write commas"
    if set(missing) <= {name.strip() for name in found}:
        return "there are blanks around names in the first line; remove them"
    return ""
