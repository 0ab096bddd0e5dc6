"""TrackML events: `event000001001-hits.csv`, `-truth.csv` and `-particles.csv`, plain or gzipped.

Only the hits are needed; they may have their errors (`measured`), and `detectors.csv` the axes of modules that are not
TrackML's. Truth needs `hit_id, particle_id`, and may have `weight`; particles may have a production
vertex, momentum, charge and number of hits. Other columns, and a first column without a name, are left alone. Features
of clusters need `-cells.csv` of each event and `detectors.csv` beside them.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from domainpar.common.problems import EventPlace, Problem
from domainpar.common.words import several, some_of
from domainpar.tracking.events.csv_tables import MissingColumns, in_order_of
from domainpar.tracking.events.detector import lie_on_known_surfaces
from domainpar.tracking.events.graph import Hits, Particles, modules_of_32_bits
from domainpar.tracking.events.measured import MEASURED_COLUMNS, MODULE_KEY, measured, rows_of_modules
from domainpar.tracking.events.sources import InputFiles, Options, Source
from domainpar.tracking.events.tables import InputTable, list_files
from partitioners.topology import FloatArray, IntArray

HITS = InputTable(
    "event{}-hits.csv",
    "hit_id: i8; x, y, z: f8 mm; volume_id, layer_id: i4; module_id: i8",
    MEASURED_COLUMNS,
    unique=("hit_id",),
)
TRUTH = InputTable("event{}-truth.csv", "hit_id: i8; particle_id: u8", "weight: f8", unique=("hit_id",))
PARTICLES = InputTable(
    "event{}-particles.csv",
    "particle_id: u8",
    "vx, vy, vz: f8 mm; px, py, pz: f8 GeV; q, nhits: i8",
    unique=("particle_id",),
)
CELLS = InputTable("event{}-cells.csv", "hit_id, ch0, ch1: i8; value: f8", only_with="cluster_features")
MODULES = InputTable(
    "detectors.csv",
    "volume_id, layer_id, module_id: i8; module_t, pitch_u, pitch_v: f8 mm",
    unique=MODULE_KEY,
    only_with="cluster_features",
)

_ACTS = {"geometry_id", "measurement_id", "particle_id_pv", "tx"}
"""Columns of ACTS's CSV in any version, also of the samples that traccc has of it; TrackML has none of them."""
_OF_ACTS = "read the directory with --source acts (docs/recipes/data_acts.md)"


def _read(files: InputFiles, cluster_features: bool) -> Hits:
    """The hits in the order of the file, with truth and particles where their files exist.

    `nhits` of a particle is the table's, or where that has none the number in truth. Particles that left hits but are
    not listed are appended as unknown.
    """
    if (read := _table(files, HITS)) is None:
        raise Problem(f"no hits in {files.directory}", "is the file gone?", event=files.event)
    table, place = read
    particle_id, weight = _truth(files, table["hit_id"].to_numpy(), place)
    known = lie_on_known_surfaces(table["volume_id"].to_numpy(), table["layer_id"].to_numpy())
    return Hits(
        event_id=files.event,
        hit_id=table["hit_id"].to_numpy(),
        position=table[["x", "y", "z"]].to_numpy(np.float32),
        volume=table["volume_id"].to_numpy(),
        layer=table["layer_id"].to_numpy(),
        module=modules_of_32_bits(table["module_id"].to_numpy()),
        particle_id=particle_id,
        weight=weight,
        particles=_particles(files, particle_id),
        clusters=_clusters(files, table) if cluster_features else None,
        measured=measured(table, None, place, None if known else files),
    )


def _hint(directory: Path) -> str:
    """What to do about a directory without hits."""
    if any(directory.glob("event*-measurement*.csv*")) or any(directory.glob("event*-spacepoint*.csv*")):
        return f"there are measurements or space points, as ACTS and traccc write them; {_OF_ACTS}"
    below = [path for path in sorted(directory.iterdir()) if path.is_dir() and list_files(path, [HITS])]
    return f"there are some one folder down: --input {some_of([str(path) for path in below])}" if below else ""


def _numbers_agree(events: Sequence[InputFiles], options: Options) -> Options:
    """Refuse files of truth whose hits have other numbers."""
    names, directory = {event.event for event in events}, events[0].directory
    truth = {event for event, _ in list_files(directory, [TRUTH])}
    without, others = sorted(names - truth), sorted(truth - names)
    if without and others:
        what = f"{several(len(without), 'event')} of {directory} have no truth ({some_of(without, 3)}), and there is "
        what += f"truth of {several(len(others), 'event')} without hits ({some_of(others, 3)})"
        raise Problem(what, "give files of one event one number; or move the truth away to go without")
    return options


SOURCE = Source(
    _read,
    (HITS, TRUTH, PARTICLES, CELLS, MODULES),
    "TrackML events",
    options={"cluster_features": False},
    settings=lambda options: {"cluster_features": True} if options["cluster_features"] else {},
    settle=_numbers_agree,
    hint=_hint,
)


def _table(files: InputFiles, table: InputTable) -> tuple[pd.DataFrame, EventPlace] | None:
    """A table; one of ACTS is called that."""
    try:
        return files.read(table)
    except MissingColumns as error:
        if not _ACTS & set(error.found):
            raise
        what = f"these are {table.what} of ACTS or traccc, not of TrackML: {error.what}"
        raise Problem(what, _OF_ACTS, event=error.event, file=error.file) from error


def _clusters(files: InputFiles, hits: pd.DataFrame) -> FloatArray:
    """The features of the cluster of each hit, in the order of the hits."""
    cells, modules = _table(files, CELLS), _table(files, MODULES)
    if cells is None or modules is None:
        missing = f"event{files.event}-cells.csv" if cells is None else "detectors.csv"
        raise Problem(f"no {missing} in {files.directory}", "leave --cluster-features out", event=files.event)
    return cluster_features(hits, cells[0], modules[0], cells[1])


def _truth(files: InputFiles, hit_id: IntArray, hits: EventPlace) -> tuple[IntArray | None, FloatArray | None]:
    """Particle and weight of each hit, in the order of the hits: the two files may be ordered differently."""
    if (read := _table(files, TRUTH)) is None:
        return None, None
    table, place = read
    table = in_order_of(hit_id, table, hits, place)
    weight = table["weight"].to_numpy(np.float32) if "weight" in table else None
    return table["particle_id"].to_numpy().view(np.int64), weight


def _particles(files: InputFiles, particle_id: IntArray | None) -> Particles | None:
    if (read := _table(files, PARTICLES)) is None:
        return None
    table, place = read
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
    return Particles.from_table(ids, columns, at_hits)


def cluster_features(hits: pd.DataFrame, cells: pd.DataFrame, modules: pd.DataFrame, place: EventPlace) -> FloatArray:
    """The features of each hit, `features.OF_CLUSTERS`, float32 [N, 6], of its cells.

    A particle that crosses a module at a slant fires more cells: the angle is that of a straight line through as many
    cells and the whole thickness (`module_t` is half of it), without its sign, which cells do not have.
    """
    of_hits = cells.groupby("hit_id").agg(
        cells=("ch0", "size"), charge=("value", "sum"), u0=("ch0", "min"), u1=("ch0", "max"), v0=("ch1", "min"),
        v1=("ch1", "max"),
    )  # fmt: skip
    clusters = of_hits.reindex(hits["hit_id"])
    without = ~(clusters["charge"].to_numpy() > 0)
    if without.any():
        first = hits["hit_id"].to_numpy()[without][0]
        raise place.problem(
            f"{int(without.sum())} of {len(hits)} hits have no cell with a charge here, the first is hit_id {first}",
            "the file is truncated or of another event; leave --cluster-features out",
        )
    sensors = modules.iloc[rows_of_modules(modules, hits, [*MODULE_KEY], place)]
    thickness = 2 * sensors["module_t"].to_numpy()
    columns = [np.log(clusters["cells"].to_numpy(float)), np.log(clusters["charge"].to_numpy())]
    sizes = [
        (clusters[f"{axis}1"] - clusters[f"{axis}0"] + 1).to_numpy() * sensors[f"pitch_{axis}"].to_numpy()
        for axis in "uv"
    ]
    angles = [np.arctan2(size, thickness) for size in sizes]
    return np.stack([*columns, *sizes, *angles], axis=1).astype(np.float32)
