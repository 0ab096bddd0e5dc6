"""Tracks that ACTS's Kalman filter finds in measurements of its generic detector, to be counted beside others."""

from __future__ import annotations

import csv
import json
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import yaml

from domainpar.common.problems import EventPlace, Problem
from domainpar.common.words import some_of
from domainpar.tracking.events.acts import LINKS, MEASUREMENTS, PARTICLES, TRUE_HITS
from domainpar.tracking.events.acts_maker import acts_field, generic_detector, import_acts, sequence
from domainpar.tracking.events.csv_tables import read_table
from domainpar.tracking.events.detector import FIELD_ELSEWHERE
from domainpar.tracking.events.field import Field
from domainpar.tracking.events.given_tracks import GivenTracks, plain_name, read_tracks
from domainpar.tracking.events.tables import InputTable

SHIPPED = Path(__file__).with_name("acts_finder.yaml")
"""Working points of the finder."""

_PARTS = {
    "seeds": "SeedFinderConfigArg", "tracks": "TrackSelectorConfig", "filter": "CkfConfig",
    "ambiguity": "AmbiguityResolutionConfig",
}  # fmt: skip
"""Parts of a working point, and ACTS's class of each."""

# ACTS's full chain starts its filter with these: mm, mm, rad, rad, 1/GeV, ns.
_FIRST_ERRORS = {"initialSigmaQoverPt": 0.1, "initialSigmaPtRel": 0.1, "initialVarInflation": [1.0] * 6}

_SIMULATED = InputTable(PARTICLES.names[0])
_LOCAL = InputTable(MEASUREMENTS.file, "measurement_id, geometry_id: u8; local0, local1: f4 mm")

_COUNTED = "counted"
"""Folder with the measurements in ACTS's own order."""

_OF_SECONDS = {"Seeding": "seeds", "TrackFinding": "filter", "Ambiguity": "ambiguity"}


class TrackFinder(NamedTuple):
    """Finds the tracks of events that ACTS wrote."""

    directory: Path  # CSV files of the events
    field: Field | None  # the magnetic field; None: 2 T

    def points(self, settings: str | None) -> dict[str, dict[str, Any]]:
        """The working points of a file by name; None: those that are shipped.

        Raises:
            Problem: If it cannot be read, or lacks a part of one.
        """
        path, wanted = Path(settings or SHIPPED), {"layers", *_PARTS, "kept"}
        try:
            points = yaml.safe_load(path.read_text())
        except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
            raise Problem(f"no working points of ACTS: {error}", f"a file like {SHIPPED}", file=path) from error
        for name, point in points.items() if isinstance(points, dict) else [("it", points)]:
            if not isinstance(point, dict) or set(point) != wanted:
                what = f"{name} is no working point: {', '.join(sorted(wanted))}"
                raise Problem(what, f"see {SHIPPED}", file=path)
        return dict(points)

    def find(
        self, events: Sequence[str], point: Mapping[str, Any], on_event: Callable[..., object]
    ) -> tuple[dict[str, GivenTracks], dict[str, float]]:
        """Find the tracks of events, one after the other.

        Args:
            events: Names, as the store has them.
            point: A working point.
            on_event: Called after each.

        Returns:
            Tracks of each event, by `plain_name`; seconds an event of seeds, filter and ambiguity resolution.

        Raises:
            Problem: If ACTS is not there, an event lacks a table, or ACTS refuses a setting or the event.
        """
        import_acts()
        found: dict[str, GivenTracks] = {}
        seconds: Counter[str] = Counter()
        with tempfile.TemporaryDirectory() as of_field:
            in_field = acts_field(self.field, Path(of_field))
            for event in events:
                with tempfile.TemporaryDirectory() as folder:
                    number = _gather(self.directory, event, Path(folder))
                    try:
                        _chain(Path(folder), in_field, self.field, point).run()
                    except (RuntimeError, TypeError, AttributeError) as error:
                        raise EventPlace(event, self.directory).problem(
                            f"ACTS could not find its tracks: {error}"
                        ) from error
                    found[plain_name(event)] = _tracks(Path(folder), number)
                    seconds.update(_seconds(Path(folder)))
                on_event()
        return found, {part: total / max(1, len(events)) for part, total in seconds.items()}


def _gather(directory: Path, event: str, folder: Path) -> str:
    """Links to the tables of one event in a folder of its own, which ACTS reads whole; its name in the files."""
    number = f"{int(event):09d}" if event.isdecimal() else event
    paths = {table.what: table.find(directory, number) for table in (MEASUREMENTS, LINKS, TRUE_HITS, _SIMULATED)}
    if missing := [table for table, path in paths.items() if path is None or path.suffix == ".gz"]:
        what = f"{directory} has no {some_of([f'event{number}-{table}.csv' for table in missing])}, which ACTS reads"
        raise Problem(what, "name the folder with the CSV files of the store's events: --input", event=event)
    for table, path in paths.items():
        assert path is not None  # none is missing
        (folder / f"event{number}-{table}.csv").symlink_to(path.resolve())
    (folder / _COUNTED).mkdir()
    return number


def _tracks(folder: Path, number: str) -> GivenTracks:
    """The tracks that were found, of measurements as the event's own file numbers them.

    ACTS's reader sorts the measurements of each sensor anew and counts them so; it has written them in this order.
    """
    own, counted = (
        read_table(_LOCAL, place / f"event{number}-{MEASUREMENTS.what}.csv", number)
        for place in (folder, folder / _COUNTED)
    )
    where = _LOCAL.must[1:]
    both = counted[where].merge(own, how="left", on=where)
    if len(both) != len(own) or both["measurement_id"].isna().any():
        what = "measurements of one sensor at one place: ACTS's count of them is not known"
        raise EventPlace(number).problem(what, "write them with all their digits")
    (given,) = read_tracks(str(folder / "event*-tracks_acts.csv")).values()
    return replace(given, hit=both["measurement_id"].to_numpy(np.int64)[given.hit], of_acts=False)


def _seconds(folder: Path) -> dict[str, float]:
    with (folder / "timing.csv").open(newline="") as file:
        times = [(row["identifier"], float(row["time_total_s"])) for row in csv.DictReader(file)]
    return {part: sum(spent for name, spent in times if kind in name) for kind, part in _OF_SECONDS.items()}


def _chain(folder: Path, in_field: Any, field: Field | None, point: Mapping[str, Any]) -> Any:
    """ACTS's chain on the tables in a folder."""
    acts, geometry = import_acts(), generic_detector().trackingGeometry()
    examples, reconstruction, unit = acts.examples, acts.examples.reconstruction, acts.UnitConstants
    quiet = acts.logging.FATAL
    configs = {
        part: getattr(reconstruction, kind)(**{
            name: tuple(value) if isinstance(value, list) else value for name, value in point[part].items()
        })
        for part, kind in _PARTS.items()
    }  # fmt: skip
    layers = folder / "layers.json"
    layers.write_text(json.dumps([{"volume": volume} for volume in point["layers"]]))
    bz = FIELD_ELSEWHERE if field is None else float(field.at(np.zeros((1, 3)))[0][0])
    errors = [1 * unit.mm, 1 * unit.mm, 1 * unit.degree, 1 * unit.degree, 0.0, 1 * unit.ns]
    chain, names = sequence(folder), {"level": quiet, "inputDir": str(folder)}
    # ACTS matches its tracks to particles, in any case.
    chain.addReader(examples.CsvParticleReader(**names, inputStem=_SIMULATED.what, outputParticles="particles"))
    chain.addWhiteboardAlias("particles_selected", "particles")
    chain.addReader(examples.CsvSimHitReader(**names, inputStem=TRUE_HITS.what, outputSimHits="simhits"))
    chain.addReader(
        examples.CsvMeasurementReader(
            **names,
            inputSimHits="simhits",
            outputMeasurements="measurements",
            outputMeasurementSimHitsMap="measurement_simhits_map",
            outputMeasurementParticlesMap="measurement_particles_map",
        )
    )
    counted = {"inputMeasurements": "measurements", "inputMeasurementSimHitsMap": "measurement_simhits_map"}
    chain.addWriter(examples.CsvMeasurementWriter(level=quiet, outputDir=str(folder / _COUNTED), **counted))
    chain.addAlgorithm(_all_of_them())
    reconstruction.addSeeding(
        chain,
        geometry,
        in_field,
        seedFinderConfigArg=configs["seeds"],
        seedFinderOptionsArg=reconstruction.SeedFinderOptionsArg(bFieldInZ=bz * unit.T, beamPos=(0.0, 0.0)),
        geoSelectionConfigFile=layers,
        initialSigmas=errors,
        **_FIRST_ERRORS,
        logLevel=quiet,
    )
    reconstruction.addCKFTracks(chain, geometry, in_field, configs["tracks"], configs["filter"], logLevel=quiet)
    reconstruction.addAmbiguityResolution(chain, configs["ambiguity"], logLevel=quiet)
    chain.addWriter(
        examples.CsvTrackWriter(
            level=quiet,
            inputTracks="ambi_tracks",
            inputMeasurementParticlesMap="measurement_particles_map",
            outputDir=str(folder),
            fileName="tracks_acts.csv",
            **{"ptMin": 0.0, **point["kept"]},
        )
    )
    return chain


def _all_of_them() -> Any:
    """An algorithm that passes all measurements on as the subset to be searched, which ACTS's reader does not."""
    examples = import_acts().examples

    class AllMeasurements(examples.IAlgorithm):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            examples.IAlgorithm.__init__(self, "AllMeasurements", import_acts().logging.FATAL)
            self.read = examples.ReadDataHandle(self, examples.MeasurementContainer, "InputMeasurements")
            self.read.initialize("measurements")
            self.write = examples.WriteDataHandle(self, examples.MeasurementSubset, "OutputSubset")
            self.write.initialize("measurement_subset")

        def execute(self, context: Any) -> Any:
            measurements = self.read(context.eventStore)
            self.write(context, examples.MeasurementSubset(measurements, range(len(measurements))))
            return examples.ProcessCode.SUCCESS

    return AllMeasurements()
