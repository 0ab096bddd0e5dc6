"""Events that ACTS wrote, as CSV: `event000000000-measurements.csv` and the tables beside it, plain or gzipped.

    measurements              measurement_id, geometry_id; global_x, global_y, global_z in mm where a release has
                              them; var_local0, var_local1 in mm^2: the errors of the hit
    measurement-simhit-map    measurement_id, hit_id: row of the true hit in the next table, several for one measurement
    hits                      true hits: the particle's id, geometry_id; tx, ty, tz in mm
    particles_simulated       the particle's id, particle_type; vx, vy, vz in mm, px, py, pz in GeV, q

Hits here are measurements. The particle of one is that of its first true hit, the one of the lowest row; without a true
hit it is noise. The second and third table together are the truth, and may be left out. Ids of particles are five
columns since release 44, and one number before.

A geometry id holds the volume in bits 56 to 63, the layer in 36 to 47 and the sensitive surface in 8 to 27; in the
releases before there was an extra number in bits 0 to 7, the surface had those as well. `colliderml` reads parquet.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd

from domainpar.common.problems import EventPlace, Problem
from domainpar.tracking.events.colliderml import numbered_as_trackml
from domainpar.tracking.events.csv_tables import columns_of, events_with, find, read_table
from domainpar.tracking.events.detector import lie_on_known_surfaces
from domainpar.tracking.events.graph import Hits, Particles
from domainpar.tracking.events.measured import detectors_file, measured
from partitioners.topology import IntArray

MEASUREMENTS, LINKS, TRUE_HITS = "measurements", "measurement-simhit-map", "hits"
PARTICLES = ("particles_simulated", "particles_initial", "particles")
"""Tables of particles as they began, by the names that releases gave them; the first that is there is read."""

_FIVE = tuple(f"particle_id_{part}" for part in ("pv", "sv", "part", "gen", "subpart"))
_MEASURED, _TRUE = tuple(f"global_{axis}" for axis in "xyz"), tuple(f"t{axis}" for axis in "xyz")
_TRUE_P = ("tpx", "tpy", "tpz")
_VARIANCES = ("var_local0", "var_local1")
_OF_PARTICLES = ("vx", "vy", "vz", "px", "py", "pz", "q")
_OF_ANOTHER = "is one of the files truncated, or of another event or another run?"

MOST_RISING = 0.05
"""Share of the true hits that may have more momentum than their particle began with, as those of another event have."""


def list_events(directory: str | Path) -> list[str]:
    """The events of a directory, sorted: `000000012` for `event000000012-measurements.csv.gz`.

    Raises:
        Problem: If the directory does not exist or holds no measurements.
    """
    names = events_with(directory := Path(directory), MEASUREMENTS)
    if names:
        return names
    hint = "expected are event000000000-measurements.csv[.gz], or *.parquet in folders tracker_hits or simhits"
    if events_with(directory, "truth"):
        hint = "there are files of TrackML's format: --source trackml"
    elif beside := events_with(directory, TRUE_HITS) or events_with(directory, "spacepoints"):
        hint = f"event {beside[0]} has other tables; have ACTS write measurements, too (CsvMeasurementWriter)"
    raise Problem(f"{directory} holds no measurements of ACTS", hint)


def event_files(directory: str | Path, event_id: str) -> list[Path]:
    """The files that `read_event` reads."""
    directory = Path(directory)
    files = [find(directory, event_id, part) for part in (MEASUREMENTS, LINKS, TRUE_HITS, *PARTICLES)]
    there = [path for path in files if path is not None]
    return there[: sum(path is not None for path in files[:3]) + 1]


def at_true_positions(directory: str | Path, event_id: str) -> bool:
    """Whether an event has no measured positions, so that those of its true hits stand in for them."""
    path = find(Path(directory), event_id, MEASUREMENTS)
    return path is not None and not set(_MEASURED) & set(columns_of(path, event_id))


def read_event(directory: str | Path, event_id: str, at_true: bool = False) -> Hits:
    """Read the measurements of one event, with truth and particles where their files are.

    Args:
        directory: Where the files are.
        event_id: Name of the event as in `list_events`.
        at_true: Take the positions of true hits, as no measured ones are written.

    Returns:
        The measurements in the order of the file; `hit_id` is `measurement_id`. Volumes and layers are as
        `numbered_as_trackml` says. Of five columns, particles are numbered from 1 as the rows of their table, and
        behind them those that are not in it; a single id stays. `particle_id` and `particles` are None without truth.

    Raises:
        Problem: Naming event, file, and what was found and expected: if a file is missing, damaged, or does not fit the
            others.
    """
    directory = Path(directory)
    path = find(directory, event_id, MEASUREMENTS)
    if path is None:
        raise Problem(f"no measurements in {directory}; expected event{event_id}-measurements.csv[.gz]", event=event_id)
    place, global_ = EventPlace(event_id, path), {} if at_true else dict.fromkeys(_MEASURED, np.float64)
    ids = dict.fromkeys(("measurement_id", "geometry_id"), np.uint64)
    table = read_table(path, event_id, {**ids, **global_}, dict.fromkeys(_VARIANCES, np.float64), ("measurement_id",))
    volume, layer, module = _decoded(table["geometry_id"].to_numpy(), place)
    truth = _read_truth(directory, event_id, table)
    if not at_true:
        position = table[list(_MEASURED)].to_numpy(np.float32)
    elif not at_true_positions(directory, event_id):
        raise place.problem("it has measured positions, and the first event has none", "prepare them apart")
    elif truth is not None and (truth[1] >= 0).all() and set(_TRUE) <= set(truth[0]):
        position = truth[0][list(_TRUE)].to_numpy(np.float32)[truth[1]]
    else:
        what = f"no column {', '.join(_MEASURED)}, nor for every measurement a true hit with {', '.join(_TRUE)}"
        raise place.problem(what, f"write them with a newer ACTS, or keep {LINKS} and {TRUE_HITS} beside them")
    particle_id, particles = (None, None) if truth is None else _read_particles(directory, event_id, *truth)
    volume, layer = numbered_as_trackml(volume, layer, position, place)
    hit_id = table["measurement_id"].to_numpy().view(np.int64)
    variances = table[list(_VARIANCES)].to_numpy() if set(_VARIANCES) <= set(table) and not at_true else None
    if variances is not None and not variances.any():
        variances = None  # columns of a writer that does not know them
    known = lie_on_known_surfaces(volume, layer)
    told = measured(table, variances, place, None if known else detectors_file(directory))
    columns = event_id, hit_id, position, volume, layer, module
    return Hits(*columns, particle_id=particle_id, particles=particles, measured=told)


def _decoded(geometry_id: IntArray, place: EventPlace) -> tuple[IntArray, IntArray, IntArray]:
    """Volume, layer and sensitive surface of each, int32 [N]."""

    def bits(first: int, last: int) -> IntArray:
        return ((geometry_id >> np.uint64(first)) & np.uint64(2 ** (last - first + 1) - 1)).astype(np.int32)

    volume, layer, surface = bits(56, 63), bits(36, 47), bits(8, 27)
    if (surface == 0).any():  # of a release in which it had the lowest bits, too
        surface = bits(0, 27)
    bad = np.flatnonzero((volume == 0) | (surface == 0) | (bits(48, 55) != 0) | (bits(28, 35) != 0))
    if len(bad):
        first = int(geometry_id[bad[0]])
        raise place.problem(
            f"{len(bad):,} of {len(geometry_id):,} measurements have a geometry_id of no sensitive surface, the first "
            f"is {first} = {first:#018x} in row {bad[0]}",
            "expected are the volume in bits 56 to 63, the layer in 36 to 47, the surface in 8 to 27, and no others",
        )
    return volume, layer, surface


def _read_truth(directory: Path, event_id: str, table: pd.DataFrame) -> tuple[pd.DataFrame, IntArray] | None:
    """The true hits, and the row of the first of each measurement, -1 where there is none; None without truth."""
    links_path, hits_path = (find(directory, event_id, part) for part in (LINKS, TRUE_HITS))
    if links_path is None or hits_path is None:
        if (there := links_path or hits_path) is None:
            return None
        missing = f"event{event_id}-{LINKS if links_path is None else TRUE_HITS}.csv[.gz]"
        what = f"{there.name} is here and {missing} is not; truth takes both"
        raise Problem(what, "fetch it, or remove the other to go without truth", event=event_id, file=there)
    place, keys = EventPlace(event_id, links_path), ("measurement_id", "hit_id")
    links = read_table(links_path, event_id, dict.fromkeys(keys, np.uint64), {}, unique=keys)
    ids = dict.fromkeys((*_id_columns(hits_path, event_id), "geometry_id"), np.uint64)
    hits = read_table(hits_path, event_id, ids, dict.fromkeys((*_TRUE, *_TRUE_P), np.float64))
    measurement = pd.Index(table["measurement_id"]).get_indexer(links["measurement_id"])
    hit = links["hit_id"].to_numpy()
    for bad, one, where, count in (
        (measurement < 0, "measurement_id", MEASUREMENTS, len(table)),
        (hit >= len(hits), "hit_id", TRUE_HITS, len(hits)),
    ):
        if bad.any():
            what = f"{bad.sum():,} of {len(links):,} rows name a {one} that is none of the {count:,} in {where}"
            raise place.problem(f"{what}, the first is {links[one][bad].iloc[0]}", _OF_ANOTHER)
    order = np.lexsort((hit, measurement))
    measurement, hit = measurement[order], hit[order].astype(np.int64)
    elsewhere = hits["geometry_id"].to_numpy()[hit] != table["geometry_id"].to_numpy()[measurement]
    if elsewhere.any():
        pair = table["measurement_id"].iloc[measurement[elsewhere][0]], hit[elsewhere][0]
        what = f"{elsewhere.sum():,} of {len(links):,} rows join a measurement to a true hit on another sensor"
        raise place.problem(f"{what}, the first are measurement {pair[0]} and hit {pair[1]}", _OF_ANOTHER)
    first = np.full(len(table), -1)
    first[measurement[::-1]] = hit[::-1]
    return hits, first


def _id_columns(path: Path, event_id: str) -> tuple[str, ...]:
    """The columns of the particle's id in a file."""
    return ("particle_id",) if "particle_id" in columns_of(path, event_id) else _FIVE


def _read_particles(
    directory: Path, event_id: str, hits: pd.DataFrame, first: IntArray
) -> tuple[IntArray, Particles | None]:
    """The particle of each measurement, and all particles."""
    columns = [name for name in ("particle_id", *_FIVE) if name in hits]
    at_hits = hits[columns].iloc[first[first >= 0]]
    path = next((path for part in PARTICLES if (path := find(directory, event_id, part)) is not None), None)
    table = at_hits[:0]
    if path is not None:
        optional = {**dict.fromkeys(_OF_PARTICLES, np.float64), "particle_type": np.int64}
        table = read_table(path, event_id, dict.fromkeys(columns, np.uint64), optional, unique=columns)
    elif (ends := find(directory, event_id, "particles_final")) is not None:
        what = f"of particles there is only {ends.name}, which holds where and how they ended"
        hint = f"write {PARTICLES[0]}; or name it event{event_id}-particles.csv, if it will do; or remove it"
        raise Problem(what, hint, event=event_id, file=ends)
    both = pd.concat([table[columns], at_hits])
    ids = both[columns[0]].to_numpy().view(np.int64)
    if len(columns) > 1:
        ids = np.where((both == 0).all(axis=1), 0, both.groupby(columns, sort=False).ngroup() + 1)
    own, seen = ids[: len(table)], ids[len(table) :]
    if path is not None:
        if (own == 0).any():
            what = f"lists a particle 0 in row {np.flatnonzero(own == 0)[0]}; 0 means noise and is no particle"
            raise EventPlace(event_id, path).problem(what, "remove this row, or number particles from 1 in all files")
        _check_momenta(table, own, hits.iloc[first[first >= 0]], seen, EventPlace(event_id, path))
    particle_id = np.zeros(len(first), np.int64)
    particle_id[first >= 0] = seen
    if path is None:
        return particle_id, None
    named = table.rename(columns={"q": "charge", "particle_type": "pdg_id"})
    return particle_id, Particles.of_table(own, {str(name): named[name].to_numpy() for name in named}, particle_id)


def _check_momenta(table: pd.DataFrame, own: IntArray, hits: pd.DataFrame, seen: IntArray, place: EventPlace) -> None:
    """Refuse particles that have more momentum at many a true hit than where they began: they are of another event."""
    if not set(_TRUE_P) <= set(hits) or not {"px", "py", "pz"} <= set(table):
        return
    begun = pd.Series(np.linalg.norm(table[["px", "py", "pz"]], axis=1), own).reindex(seen).to_numpy()
    at_hit = np.linalg.norm(hits[list(_TRUE_P)], axis=1)
    more = at_hit > 1.01 * begun  # never where it is unknown
    if more.sum() > MOST_RISING * max(1, np.isfinite(begun).sum()):
        row = np.flatnonzero(more)[0]
        what = f"{more.sum():,} of {len(more):,} true hits have more momentum than their particle began with"
        raise place.problem(f"{what}, the first {at_hit[row]:.4g} GeV, not {begun[row]:.4g}", _OF_ANOTHER)
