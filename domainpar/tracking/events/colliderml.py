"""ColliderML events, and those that ACTS writes in its schema: parquet, a row for each event, lists in its columns.

    ttbar_pu200_tracker_hits/.../train-00000-of-01000.parquet     event_id; x, y, z of hits in mm, volume_id, layer_id,
                                                                  detector, surface_id, particle_id; the rest is left
    ttbar_pu200_particles/.../train-00000-of-01000.parquet        event_id; particle_id, px, py, pz in GeV, vx, vy, vz
                                                                  in mm, charge, num_tracker_hits, pdg_id, primary

A file may hold a thousand events of ten megabytes: rows are decoded one by one, in the order in which they are read.
The OpenDataDetector has the layers of TrackML's detector, some a little further out: hits get TrackML's numbers. So
layer pairs, selections and module maps are the same for both, and ACTS's files of either are read; those of any other
detector keep their own. A hit's volume and layer in the file decide: codes of `detector` are another number for the
same in each program that writes it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from domainpar.common.problems import EventPlace, Problem
from domainpar.common.words import some_of
from domainpar.tracking.events.detector import FIELD_ELSEWHERE, SURFACES, LayerPair, crossed_in_turn
from domainpar.tracking.events.field import Field
from domainpar.tracking.events.graph import Hits, Particles, modules_of_32_bits
from domainpar.tracking.events.sources import Events, Source
from domainpar.tracking.events.tables import InputTable
from partitioners.topology import FloatArray, IntArray

HITS, PARTICLES = "tracker_hits", "particles"
_FOLDERS = {HITS: (HITS, "simhits"), PARTICLES: (PARTICLES,)}
"""How names of folders end that hold a table; simhits is what ACTS's full chain says."""

TABLES = {
    HITS: InputTable(
        tuple(f"*{end}/*.parquet" for end in _FOLDERS[HITS]),
        "x, y, z: f4 mm",
        "volume_id, layer_id, detector, surface_id, particle_id: u8",
        either=(("volume_id",), ("detector",)),
    ),
    PARTICLES: InputTable(
        f"*{PARTICLES}/*.parquet",
        "particle_id: u8; px, py, pz: f4 GeV",
        "vx, vy, vz: f4 mm; charge, num_tracker_hits, pdg_id: i8; primary: b1",
    ),
}
"""Columns hold a list for each event. Types are those of the first release; any numbers are read."""

BARREL_RADII = {1: (34.0, 70.0, 116.0, 172.0), 4: (260.0, 360.0, 500.0, 660.0), 7: (820.0, 1020.0)}
_PIXEL_Z = (620.0, 720.0, 840.0, 980.0, 1120.0, 1320.0, 1520.0)
_SHORT_Z = (1300.0, 1550.0, 1850.0, 2200.0, 2550.0, 2950.0)
_LONG_Z = (1300.0, 1600.0, 1900.0, 2250.0, 2600.0, 3000.0)
DISK_Z = {
    detector: tuple(sign * z for z in outward[:: int(sign)])
    for ends, outward in (((0, 2), _PIXEL_Z), ((3, 5), _SHORT_Z), ((6, 8), _LONG_Z))
    for detector, sign in zip(ends, (-1.0, 1.0))
}
"""The OpenDataDetector: radii of barrels and z of disks in mm, by the code of their subdetector; z ascend."""

VOLUME_OF_DETECTOR = dict(enumerate((7, 8, 9, 12, 13, 14, 16, 17, 18)))
"""TrackML's volume for each code of `detector`: pixels, short strips, long strips; of each the end at negative z, the
barrel, the end at positive z."""

DETECTOR_OF_VOLUME = {volume: code for code, volume in enumerate((16, 17, 18, 23, 24, 25, 28, 29, 30))}
"""The same codes for the detector's own volumes."""

_READ_AT_ONCE = 2**18
"""Bytes of a column that are read from the file at a time."""

PARTICLE_0 = -1
"""Stands for a particle 0 of the files."""

_NOBODY = -1
"""2^64 - 1, where a file does not know a hit's particle, as int64."""


CODE_OF_VOLUME = {volume: code for code, volume in VOLUME_OF_DETECTOR.items()}
_MIDDLES = {**BARREL_RADII, **DISK_Z}
_OWN_SURFACES = tuple(
    replace(surface, coordinate=_MIDDLES[CODE_OF_VOLUME[surface.volume]][surface.layer // 2 - 1])
    for surface in SURFACES
)
LAYER_PAIRS: tuple[LayerPair, ...] = crossed_in_turn(surfaces=_OWN_SURFACES)
"""The pairs of layers that follow each other along some straight line from the beam; two are not TrackML's."""

NEAR = 60.0
"""mm from its layer within which a hit is believed to lie on it: modules stand before and behind its middle."""

MOST_ASTRAY = 0.01
"""Share of the hits that may lie further away."""


def import_parquet() -> tuple[Any, Any]:
    """The modules `pyarrow` and `pyarrow.parquet`.

    Raises:
        Problem: If the package is not there.
    """
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise Problem(
            "parquet files take the package pyarrow, which is not here", "pip install 'domainpar[parquet]'"
        ) from error
    return pyarrow, pyarrow.parquet


class ColliderMLEvents:
    """The events of one sample.

    Args:
        directory: Holds the parquet files, at any depth; or the folder of the hits, with that of particles beside it.
        measured: Hits are measurements, as in ACTS's CSV: rows of one position, which several particles left, are the
            first of them, and rows without one, which no sensor measured, are left out. Else hits are rows.

    Attributes:
        names: Name of each event, its number in nine digits, ascending.

    Raises:
        Problem: If there are no hits, hits of several samples, or an event twice; if a file cannot be read, or lacks a
            column.
    """

    def __init__(self, directory: str | Path, measured: bool = False) -> None:
        import_parquet()
        self._measured = measured
        found = _find_files(Path(directory))
        self._rows = {kind: _index(kind, files) for kind, files in found.items()}
        self.names = tuple(f"{number:09d}" for number in sorted(self._rows[HITS]))
        self._readers: dict[Path, _RowReader] = {}

    def files(self, name: str) -> list[Path]:
        """The files that an event is read from."""
        number = int(name)
        return [rows[number][0] for rows in self._rows.values() if number in rows]

    def read(self, name: str) -> Hits:
        """Read the hits of an event, with truth where hits have it and particles where their file is.

        Returns:
            The hits in the order of the file; `hit_id` is the row there, from 0. Particles that left hits and are not
            listed are appended as unknown. A particle 0 that the files list becomes `PARTICLE_0`: here 0 is noise.

        Raises:
            Problem: Naming event, file, and what was found and expected: if lists of an event differ in length, or hold
                what is not finite; if a particle is listed twice; if hits do not lie where their volumes are
                (`numbered_as_trackml`).
        """
        number = int(name)
        path, columns = self._columns(HITS, number)
        place = EventPlace(name, path)
        position = np.stack([columns[axis] for axis in "xyz"], axis=1).astype(np.float32)
        hit_id = np.arange(len(position))
        if self._measured:
            hit_id = hit_id[~np.isnan(position).any(axis=1)]
            if len(position) and not len(hit_id):
                hint = "give ACTS's ArrowSimHitOutputConverter clusters (or measurements) and simhit_measurements_map"
                raise place.problem("no hit has a measured position: all x, y, z are NaN", hint)
            _, first = np.unique(position[hit_id].view("V12"), return_index=True)  # bytes, so that it takes one sort
            hit_id = hit_id[np.sort(first)]
            position, columns = position[hit_id], {name: values[hit_id] for name, values in columns.items()}
        if "volume_id" in columns:
            volume, layer = numbered_as_trackml(columns["volume_id"], columns.get("layer_id"), position, place)
        else:
            codes = columns["detector"], None, position, place, "detector", ({code: code for code in range(9)},)
            volume, layer = numbered_as_trackml(*codes)
        particle_id = _ids(columns["particle_id"]) if "particle_id" in columns else None
        particles = None
        if PARTICLES in self._rows and particle_id is not None:
            particle_id, particles = self._particles(name, particle_id)
        elif particle_id is not None:
            particle_id = np.where(particle_id == _NOBODY, 0, particle_id)
        return Hits(
            event_id=name,
            hit_id=hit_id,
            position=position,
            volume=volume,
            layer=layer,
            module=modules_of_32_bits(_ids(columns.get("surface_id", np.zeros(len(position), int)))),
            particle_id=particle_id,
            weight=None,
            particles=particles,
        )

    def with_errors(self, name: str) -> Hits:
        """The hits with how far each lies from its true position, across and along, as errors if the file has it."""
        hits, (path, row) = self.read(name), self._rows[HITS][int(name)]
        _, pq = import_parquet()
        columns = [f"true_{axis}" for axis in "xyz"]
        if not set(columns) <= set(pq.read_schema(path).names) or not len(hits):
            return hits
        true = _RowReader(path, columns).read(row, EventPlace(name, path))
        position = np.asarray(hits.position, np.float64)
        away = position - np.stack([true[column] for column in columns], axis=1)[hits.hit_id]
        phi = np.arctan2(position[:, 1], position[:, 0])
        across = np.cos(phi) * away[:, 1] - np.sin(phi) * away[:, 0]
        measured = np.full((len(hits), 8), np.nan, np.float32)
        measured[:, 6], measured[:, 7] = np.abs(across), np.sqrt(np.maximum((away**2).sum(axis=1) - across**2, 0))
        return replace(hits, measured=measured)

    def _particles(self, name: str, at_hits: IntArray) -> tuple[IntArray, Particles]:
        """The particle of each hit, and all particles."""
        if int(name) not in self._rows[PARTICLES]:
            raise Problem("it has hits, and no row in the files of particles", "are files missing?", event=name)
        path, table = self._columns(PARTICLES, int(name))
        ids = _ids(table["particle_id"])
        unique, counts = np.unique(ids, return_counts=True)
        if (counts > 1).any():
            repeated = unique[counts > 1]
            raise EventPlace(name, path).problem(f"lists {some_of([str(one) for one in repeated])} more than once")
        if "num_tracker_hits" in table:
            table["nhits"] = table["num_tracker_hits"]
        known = (at_hits != _NOBODY) | (ids == _NOBODY).any()
        if (ids == 0).any():
            ids, at_hits = (np.where(these == 0, PARTICLE_0, these) for these in (ids, at_hits))
        at_hits = np.where(known, at_hits, 0)
        return at_hits, Particles.from_table(ids, table, at_hits)

    def _columns(self, kind: str, number: int) -> tuple[Path, dict[str, Any]]:
        """The file and the columns of one event, each of as many numbers."""
        path, row = self._rows[kind][number]
        place = EventPlace(f"{number:09d}", path)
        if path not in self._readers:
            self._readers = {other: rows for other, rows in self._readers.items() if other in self.files(place.event)}
            self._readers[path] = _RowReader(path, _wanted(kind, path))
        columns = self._readers[path].read(row, place)
        lengths = {name: len(values) for name, values in columns.items()}
        if len(set(lengths.values())) > 1:
            raise place.problem(f"lists of one event differ in length: {lengths}", "the file is spoilt")
        for name, values in columns.items():
            unmeasured = np.isnan(values) if self._measured and kind == HITS and name in "xyz" else False
            if values.dtype.kind == "f" and len(bad := np.flatnonzero(~(np.isfinite(values) | unmeasured))):
                raise place.problem(f"column {name} holds {len(bad)} numbers that are not finite, first at {bad[0]}")
        return path, columns


def rows_of(directory: Path, measured: bool) -> Events:
    """The events of a sample (`ColliderMLEvents`)."""
    sample = ColliderMLEvents(directory, measured)
    read: Any = sample.read
    return Events(sample.names, read, sample.files, {}, surveyed=sample.with_errors)


SOURCE = Source(
    None,
    tuple(TABLES.values()),
    opens=lambda directory, options: rows_of(directory, measured=False),
    layer_pairs=LAYER_PAIRS,
    default_field=Field.of(FIELD_ELSEWHERE),  # simulated with ACTS: on TrackML's layers, but never in TrackML's field
)


class _RowReader:
    """One file, read forward: rows of a group are decoded one after the other, and none is kept."""

    def __init__(self, path: Path, columns: Sequence[str]) -> None:
        self._path, self._names = path, list(columns)
        self._next = -1
        self._batches: Iterator[Any] = iter([])

    def read(self, row: int, place: EventPlace) -> dict[str, Any]:
        """The columns of one row as arrays."""
        pa, pq = import_parquet()
        try:
            if not 0 <= self._next <= row:
                # Else the whole row group is read first, and that may be the whole file.
                file = pq.ParquetFile(self._path, buffer_size=_READ_AT_ONCE, pre_buffer=False)
                sizes = [file.metadata.row_group(i).num_rows for i in range(file.num_row_groups)]
                starts = np.concatenate([[0], np.cumsum(sizes)])
                group = int(np.searchsorted(starts, row, side="right")) - 1
                groups = range(group, file.num_row_groups)
                self._batches = file.iter_batches(batch_size=1, row_groups=groups, columns=self._names)
                self._next = int(starts[group])
            while self._next <= row:
                batch = next(self._batches)
                self._next += 1
        except (OSError, pa.ArrowException, StopIteration) as error:
            self._next = -1
            raise place.problem(f"cannot be read, {type(error).__name__}: {error}", "is it truncated?") from error
        columns: dict[str, Any] = {}
        for name in self._names:
            numbers: Any = batch.column(name)[0].values
            if numbers is None or numbers.null_count:
                raise place.problem(f"column {name} has no value for {'this event' if numbers is None else 'some'}")
            if hasattr(numbers, "offsets"):  # lists: of several particles of a hit the first is taken
                ends, of_all = numbers.offsets.to_numpy(), _ids(numbers.values.to_numpy(zero_copy_only=False))
                columns[name] = np.append(of_all, _NOBODY)[np.where(np.diff(ends) > 0, ends[:-1], len(of_all))]
                continue
            columns[name] = numbers.to_numpy(zero_copy_only=False)
        return columns


def _find_files(directory: Path) -> dict[str, list[Path]]:
    """Files of hits, and of particles if there are, of one sample."""
    if not directory.is_dir():
        raise Problem(f"{directory} is not a directory", "give the one that holds the parquet files")
    found: dict[str, dict[str, list[Path]]] = {HITS: {}, PARTICLES: {}}
    roots = [directory]
    if of := next((end for end in _FOLDERS[HITS] if directory.name.endswith(end)), None):
        roots.append(directory.with_name(directory.name.removesuffix(of) + PARTICLES))
    for path in sorted(path for root in roots for path in root.rglob("*.parquet")):
        names = path.relative_to(directory.parent).with_suffix("").parts
        for kind, samples in found.items():
            for end in _FOLDERS[kind]:
                if of_kind := [name for name in names if name.endswith(end)]:
                    samples.setdefault(of_kind[-1].removesuffix(end).rstrip("_"), []).append(path)
    if not found[HITS]:
        raise Problem(
            f"{directory} holds no hits of ColliderML",
            f"expected are files *.parquet in a folder whose name ends in {' or '.join(_FOLDERS[HITS])}, and one that "
            f"ends in {PARTICLES}",
        )
    if len(found[HITS]) > 1:
        raise Problem(
            f"{directory} holds hits of {len(found[HITS])} samples: {some_of(sorted(found[HITS]))}",
            f"name the folder of one: --input {directory / (sorted(found[HITS])[0] + '_' + HITS)}",
        )
    ((sample, hits),) = found[HITS].items()
    particles = found[PARTICLES].get(sample, [])
    return {HITS: hits, **({PARTICLES: particles} if particles else {})}


def _index(kind: str, files: Sequence[Path]) -> Mapping[int, tuple[Path, int]]:
    """File and row of each event of a table."""
    pa, pq = import_parquet()
    rows: dict[int, tuple[Path, int]] = {}
    for path in files:
        _wanted(kind, path)
        try:
            numbers = pq.read_table(path, columns=["event_id"]).column("event_id").to_pylist()
        except (OSError, pa.ArrowException) as error:
            raise _unreadable(path, error) from error
        for row, number in enumerate(numbers):
            if number is None:
                raise Problem(f"row {row} has no event_id", "the file is spoilt", file=path)
            if number in rows:
                raise Problem(f"event {number} is there twice, the first in {rows[number][0]}", "keep one", file=path)
            rows[int(number)] = path, row
    return rows


def _wanted(kind: str, path: Path) -> list[str]:
    """The columns of a file that are read."""
    pa, pq = import_parquet()
    try:
        schema = pq.read_schema(path)
    except (OSError, pa.ArrowException) as error:
        raise _unreadable(path, error) from error
    if missing := TABLES[kind].missing(schema.names, ("event_id",)):
        what = f"no column {', '.join(missing)}; found {schema.names}"
        raise Problem(what, "expected is the schema of ColliderML's first release", file=path)
    wanted = [name for name in TABLES[kind].types if name in schema.names]
    if "volume_id" in wanted and "detector" in wanted:
        wanted.remove("detector")
    for name in wanted:
        kind_of = schema.field(name).type
        nested = pa.types.is_list(kind_of) and pa.types.is_list(kind_of.value_type)
        if nested and (kind, name) == (HITS, "particle_id"):
            kind_of = kind_of.value_type  # a newer ACTS has all particles of a measurement
        is_list = pa.types.is_list(kind_of) or pa.types.is_large_list(kind_of)
        numbers = pa.types.is_integer, pa.types.is_floating, pa.types.is_boolean
        if not is_list or not any(is_kind(kind_of.value_type) for is_kind in numbers):
            raise Problem(f"column {name} holds {kind_of}, not a list of numbers an event", file=path)
    return wanted


def _unreadable(path: Path, error: Exception) -> Problem:
    return Problem(f"cannot be read, {type(error).__name__}: {error}", "is it truncated, or no parquet?", file=path)


def _ids(values: Any) -> IntArray:
    """Ids as int64; those of 2^63 and more become negative, each its own."""
    return np.asarray(values).astype(np.uint64).view(np.int64) if values.dtype.kind == "u" else values.astype(np.int64)


def numbered_as_trackml(
    volume: IntArray,
    layer: IntArray | None,
    position: FloatArray,
    place: EventPlace,
    by: str = "volume_id",
    numberings: Sequence[Mapping[int, int]] = (DETECTOR_OF_VOLUME, CODE_OF_VOLUME),
) -> tuple[IntArray, IntArray]:
    """TrackML's volume and layer for hits on its detector or on the OpenDataDetector; those of any other as they are.

    Args:
        volume: As in the file, [N].
        layer: The same; None: each hit's nearest is meant, of one of the two detectors.
        position: x, y, z in mm, [N, 3].
        place: The event and its file.
        by: The column that `volume` is.
        numberings: Codes of subdetectors by such numbers, of each detector.

    Raises:
        Problem: If all hits have volumes of one of the two detectors and do not lie on its layers; if some have not,
            and the others, which are most, do lie there.
    """
    volumes = volume.astype(np.int64)
    fits = []
    for numbering in numberings:
        code = np.full(len(volumes), -1)
        for number, detector in numbering.items():
            code[volumes == number] = detector
        numbers, astray = _nearest(code, layer, position)
        fits.append((int((code < 0).sum()), int((astray > NEAR).sum()), astray, numbers))
    # Volumes 16 to 18 are pixels of one detector and long strips of the other: the places of hits decide.
    unknown, far, astray, numbers = min(fits, key=lambda fit: fit[:2])
    if unknown:
        known = [len(volumes) - fit[0] for fit in fits]
        nearly = any(n > len(volumes) / 2 and fit[1] <= MOST_ASTRAY * n for n, fit in zip(known, fits))
        if layer is not None and not nearly:
            return volumes.astype(np.int32), layer.astype(np.int32)
        codes = some_of([str(one) for one in np.unique(volumes[numbers[0] == 0])])
        raise place.problem(
            f"{unknown:,} of {len(volumes):,} hits have a {by} of neither the OpenDataDetector nor TrackML's: {codes}",
            "are these columns, or bits of geometry_id, spoilt? docs/another_detector.md has other detectors",
        )
    if far > MOST_ASTRAY * len(volumes):
        hint = "is volume_id that of the OpenDataDetector (16 to 30) or of TrackML's detector (7 to 18)"
        if by == "detector":
            hint = "a column volume_id would decide; without it detector is read as ColliderML counts, 0 to 8"
        raise place.problem(
            f"{far:,} of {len(volumes):,} hits lie more than {NEAR:g} mm from every layer of their subdetector, which "
            f"{by} names, half of all more than {np.median(astray):.3g} mm; largest r "
            f"{np.hypot(*position.T[:2]).max():.4g}",
            f"{hint}, and are x, y, z in mm?",
        )
    return numbers[0], numbers[1]


def _nearest(code: IntArray, layer_id: IntArray | None, position: FloatArray) -> tuple[IntArray, FloatArray]:
    """TrackML's volume and layer of hits [2, N], 0 of an unknown code, and how far each hit lies from its layer, in mm.

    The layer of all hits of one `layer_id` is the nearest to the middle one of them; without ids, each hit's nearest.
    """
    numbers, astray = np.zeros((2, len(code)), np.int32), np.zeros(len(code))
    radius = np.hypot(position[:, 0], position[:, 1])
    for detector, volume in VOLUME_OF_DETECTOR.items():
        rows = np.flatnonzero(code == detector)
        trackmls = [surface.coordinate for surface in SURFACES if surface.volume == volume]
        middles = np.array([_MIDDLES[detector], trackmls])
        along = radius[rows] if detector in BARREL_RADII else position[rows, 2]
        middle = along.copy()
        if layer_id is not None:
            for one in np.unique(layer_id[rows]):
                middle[layer_id[rows] == one] = np.median(along[layer_id[rows] == one])
        nearest = np.abs(middle[:, None, None] - middles).min(axis=1).argmin(axis=1)
        numbers[0, rows], numbers[1, rows] = volume, 2 * (nearest + 1)
        astray[rows] = np.abs(along - middles[:, nearest]).min(axis=0)
    return numbers, astray
