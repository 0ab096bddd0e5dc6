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

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from domainpar.common.problems import EventPlace, Problem
from domainpar.tracking.events import colliderml
from domainpar.tracking.events.csv_tables import read_table
from domainpar.tracking.events.detector import lie_on_known_surfaces
from domainpar.tracking.events.graph import Hits, Particles
from domainpar.tracking.events.measured import measured
from domainpar.tracking.events.sources import Events, InputFiles, Options, Source
from domainpar.tracking.events.tables import InputTable, list_files
from partitioners.topology import IntArray

_FIVE = tuple(f"particle_id_{part}" for part in ("pv", "sv", "part", "gen", "subpart"))
_IDS = f"particle_id, {', '.join(_FIVE)}: u8"
_EITHER = (("particle_id",), _FIVE)
_MEASURED, _TRUE = tuple(f"global_{axis}" for axis in "xyz"), tuple(f"t{axis}" for axis in "xyz")
_TRUE_P = ("tpx", "tpy", "tpz")
_VARIANCES = ("var_local0", "var_local1")
_OF_ANOTHER = "is one of the files truncated, or of another event or another run?"

MEASUREMENTS = InputTable(
    "event{}-measurements.csv",
    "measurement_id, geometry_id: u8",
    "global_x, global_y, global_z: f8 mm; var_local0, var_local1: f8 mm^2",
    unique=("measurement_id",),
)
LINKS = InputTable(
    "event{}-measurement-simhit-map.csv", "measurement_id, hit_id: u8", unique=("measurement_id", "hit_id")
)
TRUE_HITS = InputTable(
    "event{}-hits.csv", "geometry_id: u8", f"{_IDS}; tx, ty, tz: f8 mm; tpx, tpy, tpz: f8 GeV", either=_EITHER
)
PARTICLES = InputTable(
    tuple(f"event{{}}-{part}.csv" for part in ("particles_simulated", "particles_initial", "particles")),
    "",
    f"{_IDS}; vx, vy, vz: f8 mm; px, py, pz: f8 GeV; q: f8; particle_type: i8",
)
"""Particles as they began, by the names that releases gave the table."""

MOST_RISING = 0.05
"""Share of the true hits that may have more momentum than their particle began with, as those of another event have."""


def _hint(directory: Path) -> str:
    """What to do about a directory without measurements."""
    if list_files(directory, [InputTable("event{}-truth.csv")]):
        return "there are files of TrackML's format: --source trackml"
    if beside := list_files(directory, [TRUE_HITS]) or list_files(directory, [InputTable("event{}-spacepoints.csv")]):
        event, _ = beside[0]
        return f"event {event} has other tables; have ACTS write measurements, too (CsvMeasurementWriter)"
    return "expected are event000000000-measurements.csv[.gz], or *.parquet in folders tracker_hits or simhits"


def _in_parquet(directory: Path, options: Options) -> Events | None:
    """The measurements of a directory of parquet files without those in CSV."""
    if any(directory.glob("event*-measurements.csv*")) or not any(directory.rglob("*.parquet")):
        return None
    return colliderml.rows_of(directory, measured=True)


def _settled(events: Sequence[InputFiles], options: Options) -> Options:
    """Whether the first event has no measured positions, so that those of true hits stand in for them in all."""
    return {"at_true": not set(_MEASURED) & set(read_table(MEASUREMENTS, events[0].listed, events[0].event))}


def _read(files: InputFiles, at_true: bool) -> Hits:
    """The measurements in the order of the file; `hit_id` is `measurement_id`.

    Volumes and layers are as `numbered_as_trackml` says. Of five columns, particles are numbered from 1 as the rows of
    their table, and behind them those that are not in it; a single id stays.
    """
    if (read := files.read(MEASUREMENTS, () if at_true else _MEASURED)) is None:
        raise Problem(f"no measurements in {files.directory}", "is the file gone?", event=files.event)
    table, place = read
    volume, layer, module = _decoded(table["geometry_id"].to_numpy(), place)
    truth = _read_truth(files, table)
    if not at_true:
        position = table[list(_MEASURED)].to_numpy(np.float32)
    elif set(_MEASURED) & set(table):
        raise place.problem("it has measured positions, and the first event has none", "prepare them apart")
    elif truth is not None and (truth[1] >= 0).all() and set(_TRUE) <= set(truth[0]):
        position = truth[0][list(_TRUE)].to_numpy(np.float32)[truth[1]]
    else:
        what = f"no column {', '.join(_MEASURED)}, nor for every measurement a true hit with {', '.join(_TRUE)}"
        hint = f"write them with a newer ACTS, or keep {LINKS.what} and {TRUE_HITS.what} beside them"
        raise place.problem(what, hint)
    particle_id, particles = (None, None) if truth is None else _read_particles(files, *truth)
    volume, layer = colliderml.numbered_as_trackml(volume, layer, position, place)
    hit_id = table["measurement_id"].to_numpy().view(np.int64)
    variances = table[list(_VARIANCES)].to_numpy() if set(_VARIANCES) <= set(table) and not at_true else None
    if variances is not None and not variances.any():
        variances = None  # columns of a writer that does not know them
    errors = measured(table, variances, place, None if lie_on_known_surfaces(volume, layer) else files)
    columns = files.event, hit_id, position, volume, layer, module
    return Hits(*columns, particle_id=particle_id, particles=particles, measured=errors)


SOURCE = Source(
    _read,
    (MEASUREMENTS, LINKS, TRUE_HITS, PARTICLES),
    "measurements of ACTS",
    options={"at_true": False},
    settings=lambda options: {"positions": "of true hits"} if options["at_true"] else {},
    settle=_settled,
    hint=_hint,
    opens=_in_parquet,
    default_field=colliderml.SOURCE.default_field,
)


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


def _read_truth(files: InputFiles, table: pd.DataFrame) -> tuple[pd.DataFrame, IntArray] | None:
    """The true hits, and the row of the first of each measurement, -1 where there is none; None without truth."""
    of_links, of_hits = files.read(LINKS), files.read(TRUE_HITS)
    if of_links is None or of_hits is None:
        if (read := of_links or of_hits) is None:
            return None
        missing = (LINKS if of_links is None else TRUE_HITS).what
        what = f"{Path(str(read[1].file)).name} is here and event{files.event}-{missing}.csv[.gz] is not; "
        raise read[1].problem(f"{what}truth takes both", "fetch it, or remove the other to go without truth")
    (links, place), (hits, _) = of_links, of_hits
    measurement = pd.Index(table["measurement_id"]).get_indexer(links["measurement_id"])
    hit = links["hit_id"].to_numpy()
    for bad, one, where, count in (
        (measurement < 0, "measurement_id", MEASUREMENTS.what, len(table)),
        (hit >= len(hits), "hit_id", TRUE_HITS.what, len(hits)),
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


def _read_particles(files: InputFiles, hits: pd.DataFrame, first: IntArray) -> tuple[IntArray, Particles | None]:
    """The particle of each measurement, and all particles."""
    columns = next([*names] for names in _EITHER if set(names) <= set(hits))
    at_hits = hits[columns].iloc[first[first >= 0]]
    table, place = files.read(PARTICLES, columns, columns) or (at_hits[:0], None)
    if (
        place is None
        and (ends := InputTable("event{}-particles_final.csv").find(files.directory, files.event)) is not None
    ):
        what = f"of particles there is only {ends.name}, which holds where and how they ended"
        hint = f"write {PARTICLES.what}; or name it event{files.event}-particles.csv, if it will do; or remove it"
        raise Problem(what, hint, event=files.event, file=ends)
    both = pd.concat([table[columns], at_hits])
    ids = both[columns[0]].to_numpy().view(np.int64)
    if len(columns) > 1:
        ids = np.where((both == 0).all(axis=1), 0, both.groupby(columns, sort=False).ngroup() + 1)
    listed, seen = ids[: len(table)], ids[len(table) :]
    if place is not None:
        if (listed == 0).any():
            what = f"lists a particle 0 in row {np.flatnonzero(listed == 0)[0]}; 0 means noise and is no particle"
            raise place.problem(what, "remove this row, or number particles from 1 in all files")
        _check_momenta(table, listed, hits.iloc[first[first >= 0]], seen, place)
    particle_id = np.zeros(len(first), np.int64)
    particle_id[first >= 0] = seen
    if place is None:
        return particle_id, None
    named = table.rename(columns={"q": "charge", "particle_type": "pdg_id"})
    return particle_id, Particles.from_table(listed, {str(name): named[name].to_numpy() for name in named}, particle_id)


def _check_momenta(
    table: pd.DataFrame, listed: IntArray, hits: pd.DataFrame, seen: IntArray, place: EventPlace
) -> None:
    """Refuse particles that have more momentum at many a true hit than where they began: they are of another event."""
    if not set(_TRUE_P) <= set(hits) or not {"px", "py", "pz"} <= set(table):
        return
    begun = pd.Series(np.linalg.norm(table[["px", "py", "pz"]], axis=1), listed).reindex(seen).to_numpy()
    at_hit = np.linalg.norm(hits[list(_TRUE_P)], axis=1)
    more = at_hit > 1.01 * begun  # never where it is unknown
    if more.sum() > MOST_RISING * max(1, np.isfinite(begun).sum()):
        row = np.flatnonzero(more)[0]
        what = f"{more.sum():,} of {len(more):,} true hits have more momentum than their particle began with"
        raise place.problem(f"{what}, the first {at_hit[row]:.4g} GeV, not {begun[row]:.4g}", _OF_ANOTHER)
