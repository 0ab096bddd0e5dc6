"""Events that Pythia and ACTS make: collisions, Fatras and Gaussian smearing in the generic detector, written as CSV.

`prepare --simulate` calls the `Maker`. The finder of `evaluate --compare acts` runs ACTS by the last part, too.

An event is named by its number, and the number decides all that is random in it: it is the same whichever rank makes
it, and whatever was made before. Its tables are those that ACTS writes, and `-particles.csv` with what Pythia made.
"""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from domainpar.common.agreement import Ranks, on_all, on_root, rounds
from domainpar.common.atomic_files import PARTIAL, write_whole
from domainpar.common.models import plain
from domainpar.common.problems import EventPlace, Problem
from domainpar.tracking.events.acts import LINKS, MEASUREMENTS, TRUE_HITS
from domainpar.tracking.events.detector import FIELD_ELSEWHERE
from domainpar.tracking.events.field import Field
from partitioners.topology import IntArray

MADE = "made.json"
"""What the events of a folder were made with."""

PROCESSES = {"ttbar": "Top:gg2ttbar = on; Top:qqbar2ttbar = on"}
"""Hard processes by name, as settings of Pythia."""

PITCH = {7: (0.05, 0.05), 12: (0.08, 1.2), 16: (0.12, 10.8)}
"""Channels in mm along both directions of a sensor, of this volume and the next two: ACTS's own digitisation."""

_ENERGY = 14_000.0
_BEAM_WIDTH, _BEAM_TIME = 0.0125, 5.0  # mm across the beam, and ns: those of ACTS's full chain
_ETA, _PT, _RADIUS, _Z = 4.0, 0.15, 1_000.0, 3_000.0  # of particles that enter the detector
_LIGHT = 299.792458  # mm/ns
_R, _Z_OF_MAP = np.arange(0.0, 1_225.0, 12.0), np.arange(-3_200.0, 3_201.0, 20.0)
"""Nodes of the map that ACTS is given, in mm. The detector ends at 1,027 and 3,000, and no field is known beyond."""

_PARTICLES = "particles"
# An event is there with its last table.
_WRITTEN = (_PARTICLES, TRUE_HITS.what, "particles_simulated", LINKS.what, MEASUREMENTS.what)


class Maker(NamedTuple):
    """Makes events: what they are made with.

    Attributes:
        process: Of `PROCESSES`, or settings of Pythia with semicolons between them.
        pile_up: Least and most of the mean number of other collisions, drawn evenly for each event.
        beam_spot: z of the middle of the collisions in mm, and the least and the most of their width, drawn likewise.
        field: The field; None: 2 T.
        lost, dead, noise: Shares of hits that are lost, of modules that see nothing, of hits that no particle left.
        seed: Decides which modules are dead.
    """

    process: str
    pile_up: tuple[float, float]
    beam_spot: tuple[float, float, float]
    field: Field | None
    lost: float
    dead: float
    noise: float
    seed: int

    @classmethod
    def from_flags(cls, flags: Mapping[str, Any]) -> Maker:
        """The one of flags by their names; without a beam spot its collisions lie about 0 with a width of 55 mm."""
        spot = flags["beam_spot"] or (0.0, 55.0)
        others: list[Any] = [flags[name] for name in ("field", "hit_inefficiency", "dead_modules", "noise", "seed")]
        return cls(flags["process"], flags["pile_up"], (spot[0], spot[1], spot[-1]), *others)

    @property
    def folder(self) -> Path:
        """The folder of the events, where none is named."""
        pile_up = "-".join(f"{mean:g}" for mean in dict.fromkeys(self.pile_up))
        return Path("acts", re.sub(r"[^\w.]+", "-", f"{self.process}-{pile_up}"))

    def make(self, directory: Path, numbers: Sequence[int], ranks: Ranks, on_event: Callable[..., object]) -> None:
        """Make the events of these numbers that a folder lacks, dealt to ranks. *Collective*.

        Args:
            directory: The folder; made where it is missing.
            numbers: Below 10^9.
            ranks: The ranks, which see the same folder.
            on_event: Called on every rank for every event.

        Raises:
            Refused: On all ranks alike, if ACTS is not there, if the folder holds other events, if one cannot be made.
        """
        on_all(ranks, import_acts)
        missing = on_root(ranks, lambda: _begun(directory, numbers, self))
        for _ in range(len(numbers) - len(missing)):
            on_event()
        for mine, of_round in rounds(missing, ranks):
            on_all(ranks, partial(_make, directory, mine, self))
            for _ in of_round:
                on_event()


def _begun(directory: Path, numbers: Sequence[int], making: Maker) -> list[int]:
    """The events that are missing in a folder that is ready for them."""
    field = None if making.field is None else making.field.to_json()
    settings, path = plain({**making._asdict(), "field": field}), directory / MADE
    directory.mkdir(parents=True, exist_ok=True)
    if path.exists():
        before = json.loads(path.read_text())
        differ = [name for name in settings if before.get(name) != settings[name]]
        if differ:
            what = f"{directory} holds events made with {differ[0]} {before.get(differ[0])}, not {settings[differ[0]]}"
            raise Problem(what, "name another --input")
    elif any(directory.glob("event*.csv*")):
        raise Problem(f"{directory} holds events, and no {MADE} that says how they were made", "name another --input")
    write_whole(path, (json.dumps(settings, indent=1) + "\n").encode())
    return [number for number in numbers if MEASUREMENTS.find(directory, f"{number:09d}") is None]


def _make(directory: Path, number: int | None, making: Maker) -> None:
    if number is None:
        return
    with tempfile.TemporaryDirectory(prefix=PARTIAL, dir=directory) as name:
        scratch, event = Path(name), f"event{number:09d}"
        rng = np.random.default_rng([number, 1])
        _collisions(making, number, rng).to_csv(scratch / f"{event}-{_PARTICLES}.csv", index=False)
        try:
            _simulate(scratch, acts_field(making.field, scratch))
        except RuntimeError as error:
            raise EventPlace(event[5:]).problem(f"ACTS could not make it: {error}") from error
        if making.lost or making.dead or making.noise:
            _spoil(scratch / event, making, rng)
        for table in _WRITTEN:
            (scratch / f"{event}-{table}.csv").replace(directory / f"{event}-{table}.csv")


# --- collisions ------------------------------------------------------------------------------------------------------


@cache
def _pythia(settings: str) -> Any:
    import_acts()
    import pythia8mc

    pythia = pythia8mc.Pythia("", False)
    always = f"Beams:idA = 2212; Beams:idB = 2212; Beams:eCM = {_ENERGY}; Print:quiet = on; Random:setSeed = on"
    for line in f"{settings}; {always}; Random:seed = 1".split(";"):
        if not pythia.readString(line.strip()):
            raise Problem(f"--process: Pythia does not know the setting {line.strip()!r}", "as 'HardQCD:all = on'")
    if not pythia.init():
        raise Problem(f"--process {settings!r}: Pythia cannot begin with it", f"known by name: {', '.join(PROCESSES)}")
    return pythia


def _collisions(making: Maker, number: int, rng: np.random.Generator) -> pd.DataFrame:
    """The particles that enter the detector, in the columns of ACTS."""
    hard, soft = _pythia(PROCESSES.get(making.process, making.process)), _pythia("SoftQCD:all = on")
    for pythia, seed in zip((hard, soft), np.random.SeedSequence([number, 2]).generate_state(2)):
        pythia.rndm.init(int(seed) % 900_000_000 + 1)
    width = rng.uniform(*making.beam_spot[1:])
    rows: list[tuple[float, ...]] = []
    for collision in range(1, 2 + rng.poisson(rng.uniform(*making.pile_up))):
        pythia = hard if collision == 1 else soft
        tries = 0
        while not pythia.next():
            if (tries := tries + 1) == 100:
                raise EventPlace(f"{number:09d}").problem("Pythia failed a hundred times in turn", "another --process?")
        x, y, z, t = rng.normal(0, (_BEAM_WIDTH, _BEAM_WIDTH, width, _BEAM_TIME))
        _add_particles(pythia.event, collision, (x, y, z + making.beam_spot[0], t), rows)
    names = ["particle_id_pv", "particle_id_sv", "particle_type", "vx", "vy", "vz", "vt", "px", "py", "pz", "m", "q"]
    table = pd.DataFrame(rows, columns=names)
    table["particle_id_part"] = table.groupby(names[:2]).cumcount() + 1
    table = table.assign(particle_id_gen=0, particle_id_subpart=0, process=0)
    order = [*names[:2], "particle_id_part", "particle_id_gen", "particle_id_subpart", "particle_type", "process"]
    whole = dict.fromkeys(order, np.int64)
    return table[[*order, *names[3:]]].astype(whole).sort_values(order[:3])


def _add_particles(event: Any, collision: int, vertex: Sequence[float], rows: list[tuple[float, ...]]) -> None:
    """Charged particles and photons that are final and reach the detector; ACTS has no other neutral ones."""
    places: dict[tuple[float, ...], int] = {}
    for i in range(event.size()):
        particle = event[i]
        if not particle.isFinal() or (particle.charge() == 0 and particle.id() != 22):
            continue
        px, py, pz = particle.px(), particle.py(), particle.pz()
        pt = (px * px + py * py) ** 0.5
        if pt < _PT or abs(np.arcsinh(pz / pt)) > _ETA:
            continue
        x, y, z = particle.xProd(), particle.yProd(), particle.zProd()
        radius = (x * x + y * y) ** 0.5
        if radius > _RADIUS or abs(z) > _Z:
            continue
        place = 0  # of decays: counted in each collision
        if radius > 0.001 or abs(z) > 0.001:
            place = places.setdefault((round(x, 4), round(y, 4), round(z, 4)), len(places) + 1)
        when = particle.tProd() / _LIGHT + vertex[3]
        at = (x + vertex[0], y + vertex[1], z + vertex[2], when)
        rows.append((collision, place, particle.id(), *at, px, py, pz, particle.m(), particle.charge()))


# --- the detector ----------------------------------------------------------------------------------------------------


def _simulate(folder: Path, field: Any) -> None:
    """Fatras and the digitisation, of the particles in a folder, into it."""
    acts, geometry = import_acts(), generic_detector().trackingGeometry()
    examples, quiet = acts.examples, acts.logging.FATAL
    smearing = folder / "smearing.json"
    smearing.write_text(json.dumps(_smearing()))
    chain, random = sequence(folder), examples.RandomNumbers(seed=42)
    chain.addReader(
        examples.CsvParticleReader(
            level=quiet, inputDir=str(folder), inputStem=_PARTICLES, outputParticles="particles_generated"
        )
    )
    chain.addWhiteboardAlias("particles_generated_selected", "particles_generated")
    examples.simulation.addFatras(chain, geometry, field, rnd=random, outputDirCsv=folder, logLevel=quiet)
    examples.simulation.addDigitization(
        chain, geometry, field, digiConfigFile=str(smearing), outputDirCsv=folder, rnd=random, logLevel=quiet
    )
    chain.run()


def _smearing() -> dict[str, Any]:
    """Errors of a channel's width over the root of 12, normal, in ACTS's form."""
    entries = [
        {"volume": first + i, "value": {"smearing": [
            {"index": axis, "mean": 0.0, "stddev": width / 12**0.5, "type": "Gauss"} for axis, width in enumerate(pitch)
        ]}}
        for first, pitch in PITCH.items() for i in range(3)
    ]  # fmt: skip
    header = {"format-version": 0, "value-identifier": "digitization-configuration"}
    return {"acts-geometry-hierarchy-map": header, "entries": entries}


def _spoil(event: Path, making: Maker, rng: np.random.Generator) -> None:
    """Lose hits, silence modules and add noise, in the measurements of an event and in their links to true hits."""
    paths = [event.with_name(f"{event.name}-{table}.csv") for table in (MEASUREMENTS.what, LINKS.what)]
    # As text: digits stay as they are, and so does the raw byte that ACTS writes.
    measured, links = (pd.read_csv(path, dtype=str, encoding="latin-1", na_filter=False) for path in paths)
    sensors = _sensors()
    every = np.array(sorted(sensors), np.uint64)
    silent = np.random.default_rng([making.seed, 3]).random(len(every)) < making.dead
    ids = measured["geometry_id"].to_numpy(np.uint64)
    seen = ~np.isin(ids, every[silent])
    stays = (rng.random(len(measured)) >= making.lost) & seen
    noise = _noise(measured[seen], every[~silent], rng.poisson(making.noise * seen.sum()), rng)
    measured = pd.concat([measured[stays], noise.assign(measurement_id="")])
    order = np.argsort(measured["geometry_id"].to_numpy(np.uint64), kind="stable")  # as ACTS writes, and reads them
    measured = measured.iloc[order]
    number_of = pd.Series(np.arange(len(measured)).astype(str), measured["measurement_id"]).drop("", errors="ignore")
    links = links[links["measurement_id"].isin(number_of.index)]
    links = links.assign(measurement_id=number_of.loc[links["measurement_id"]].to_numpy())
    measured = measured.assign(measurement_id=np.arange(len(measured)).astype(str))
    for path, table in zip(paths, (measured, links)):
        table.to_csv(path, index=False, encoding="latin-1")


@cache
def _sensors() -> dict[int, Any]:
    """The sensors of the detector by their geometry id."""
    surfaces: list[Any] = []
    generic_detector().trackingGeometry().visitSurfaces(surfaces.append)
    return {surface.geometryId.value: surface for surface in surfaces}


def _noise(measured: pd.DataFrame, working: IntArray, number: int, rng: np.random.Generator) -> pd.DataFrame:
    """Hits that no particle left: in a layer as often as true ones, on any working sensor of it, anywhere."""
    acts, sensors = import_acts(), _sensors()
    trapezoid = acts.SurfaceBoundsType.Trapezoid
    context = acts.GeometryContext.dangerouslyDefaultConstruct()
    below = np.uint64(36)  # bits of a geometry id below its layer
    if number == 0:
        return measured[:0]
    noise = measured.iloc[rng.integers(len(measured), size=number)].copy()
    places = []
    for layer in noise["geometry_id"].to_numpy(np.uint64) >> below:
        of_layer = working[slice(*np.searchsorted(working, np.array([layer, layer + 1]) << below))]
        sensor = sensors[int(of_layer[rng.integers(len(of_layer))])]
        values = np.abs(sensor.bounds.values())  # of a trapezoid: half its two widths, and half its length
        half = (values[:2].max(), values[2]) if sensor.bounds.type == trapezoid else (values[0], values[1])
        while True:
            local = acts.Vector2(*rng.uniform(np.negative(half), half))
            if sensor.bounds.inside(local):
                break
        at = sensor.localToGlobal(context, local, acts.Vector3(0, 0, 1))
        places.append([str(sensor.geometryId.value), *(f"{np.float32(value):.9g}" for value in (*local, *at))])
    noise[["geometry_id", "local0", "local1", "global_x", "global_y", "global_z"]] = places
    return noise


# --- ACTS itself -----------------------------------------------------------------------------------------------------


def import_acts() -> Any:
    """The module `acts`, with `acts.examples` and all that is used of it.

    Raises:
        Problem: If the package is not there.
    """
    try:
        import acts
        import acts.examples
        import acts.examples.json
        import acts.examples.reconstruction
        import acts.examples.simulation
    except ImportError as error:
        what = f"this takes the packages pyacts and pythia8mc, and one is not here ({error})"
        raise Problem(what, "pip install 'domainpar[acts]' (Linux, x86-64)") from error
    return acts


@cache
def generic_detector() -> Any:
    """The generic detector of ACTS, which is that of TrackML. Its geometry lives as long as it does."""
    acts = import_acts()
    config = acts.examples.GenericDetector.Config()
    for name in ("logLevel", "surfaceLogLevel", "layerLogLevel", "volumeLogLevel"):
        setattr(config, name, acts.logging.WARNING)
    return acts.examples.GenericDetector(config)


def acts_field(field: Field | None, scratch: Path) -> Any:
    """A field as ACTS has it; None: 2 T. Maps pass through a file in `scratch`.

    Raises:
        Problem: If the axis of a map is not the beam.
    """
    if field is not None and (field.x or field.y):
        what = f"ACTS takes a map about the beam, and the axis of this one lies at x {field.x:g} and y {field.y:g} mm"
        raise Problem(what, "take a map without x and y")
    acts = import_acts()
    uniform = FIELD_ELSEWHERE if field is None else field.to_json()
    if isinstance(uniform, float | int):
        return acts.ConstantBField(acts.Vector3(0, 0, uniform * acts.UnitConstants.T))
    assert field is not None  # of None it was a number
    # ACTS takes rows in this order, the radius fastest, on trust.
    r, z = (axis.ravel() for axis in np.meshgrid(_R, _Z_OF_MAP))
    bz, br = field.at(np.stack([r, np.zeros_like(r), z], axis=1))
    path = scratch / "field.txt"
    np.savetxt(path, np.stack([r, z, br, bz], axis=1), fmt="%.9g")
    return acts.MagneticFieldMapRz(str(path), acts.UnitConstants.mm, acts.UnitConstants.T)


def sequence(scratch: Path) -> Any:
    """An empty chain of ACTS's algorithms, to read its one event from `scratch`, where it writes its times, too."""
    acts = import_acts()
    # Without `skip`: a folder's first event is its own, and its number decides what is random.
    return acts.examples.Sequencer(
        events=1, numThreads=1, logLevel=acts.logging.WARNING, trackFpes=False, outputDir=str(scratch)
    )
