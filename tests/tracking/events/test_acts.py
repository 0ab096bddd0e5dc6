"""Events of ACTS, CSV and parquet: hits and truth as its tables say, or an error that names event, file and value."""

from __future__ import annotations

import gzip
import re
import shutil
from functools import partial
from pathlib import Path

import acts_files
import numpy as np
import pytest
import source_files
from acts_files import files_of, one_number, tables, write_event
from refused import refused

from domainpar.common.problems import Problem
from domainpar.tracking.events.preparation import prepare
from domainpar.tracking.events.simulate import simulate_event
from domainpar.tracking.events.sources import open_source

names_in, paths_of, read_event = (
    partial(call, "acts") for call in (source_files.names_in, source_files.paths_of, source_files.read_event)
)

NAME = "000000003"
OF_HITS = [1, 2, 1, 2, 4, 1, 2, 4, 1, 2, 4, 0]
"""The particle of each measurement, as a row of the table from 1; the second is one with a true hit of the fourth."""


def test_measurements_and_their_true_hits_become_hits_with_truth(tmp_path):
    write_event(tmp_path)
    hits = read_event(tmp_path, NAME)
    assert (hits.event_id, hits.hit_id.tolist()) == (NAME, list(range(12)))
    assert hits.volume.tolist() == [8] * 12
    assert hits.layer.tolist() == [2, 2, 4, 4, 4, 6, 6, 6, 8, 8, 8, 8]
    assert hits.module.tolist() == [301, 301, *([1, 2, 3] * 3), 77]
    assert hits.position[-1].tolist() == [-172, 1, 30]
    assert np.hypot(*hits.position[:, :2].T)[:3] == pytest.approx([32, 32, 72], abs=1e-4), "measured, not true"
    # Of the measurement with two true hits: that of the lower row, of the fourth particle of the table.
    assert hits.particle_id.tolist() == [1, 4, *OF_HITS[2:]]
    particles = hits.particles
    assert particles.particle_id.tolist() == [1, 2, 3, 4]
    assert particles.nhits.tolist() == [4, 3, 0, 4]
    assert particles.pt.tolist() == [1, 2, 3, 4]
    assert particles.charge.tolist() == [1, -1, 1, -1]
    assert particles.pdg_id.tolist() == [211, -211, 211, -211]
    assert particles.vertex[:, 2].tolist() == [0, 1, 2, 3]


def same(one, other, but=()):
    for name in {"hit_id", "position", "volume", "layer", "module", "particle_id"} - set(but):
        assert np.array_equal(getattr(one, name), getattr(other, name)), name


def test_a_single_id_stays_and_those_of_64_bits_stay_apart(tmp_path):
    of = tables(five=False)
    low, high = one_number(acts_files.BARCODES[0]), 2**64 - 5
    for part in ("hits", "particles_simulated"):
        of[part] = [[high, *row[1:]] if row[0] == low else row for row in of[part]]
    write_event(tmp_path, of=of)
    hits = read_event(tmp_path, NAME)
    second, fourth = map(one_number, acts_files.BARCODES[1:])
    assert set(hits.particle_id.tolist()) == {-5, second, fourth, 0}
    write_event(tmp_path)
    same(hits, read_event(tmp_path, NAME), but=["particle_id"])


def test_surfaces_in_the_lowest_bits_and_an_extra_number_there_are_read(tmp_path):
    write_event(tmp_path)
    now = read_event(tmp_path, NAME)
    write_event(tmp_path, surface=lambda one: one)
    same(now, read_event(tmp_path, NAME))
    write_event(tmp_path, surface=lambda one: one << 8 | 9)
    same(now, read_event(tmp_path, NAME))


def test_gzipped_files_read_the_same_and_files_are_named(tmp_path):
    (plain := tmp_path / "plain").mkdir()
    (packed := tmp_path / "packed").mkdir()
    write_event(plain)
    write_event(packed, suffix=".csv.gz")
    same(read_event(plain, NAME), read_event(packed, NAME))
    assert names_in(packed) == [NAME]
    assert [path.name for path in paths_of(packed, NAME)] == [
        f"event{NAME}-{part}.csv.gz"
        for part in ("measurements", "measurement-simhit-map", "hits", "particles_simulated")
    ]


def test_without_truth_hits_are_read_all_the_same(tmp_path):
    write_event(tmp_path)
    with_truth = read_event(tmp_path, NAME)
    for part in ("measurement-simhit-map", "hits"):
        (tmp_path / f"event{NAME}-{part}.csv").unlink()
    hits = read_event(tmp_path, NAME)
    assert (hits.particle_id, hits.particles) == (None, None)
    same(hits, with_truth, but=["particle_id"])


def renamed(directory, part):
    return (directory / f"event{NAME}-particles_simulated.csv").rename(directory / f"event{NAME}-{part}.csv")


def test_particles_are_read_as_they_began_whatever_a_release_called_them(tmp_path):
    for part in ("particles_initial", "particles"):
        write_event(tmp_path)
        path = renamed(tmp_path, part)
        assert read_event(tmp_path, NAME).particles.pt.tolist() == [1, 2, 3, 4]
        path.unlink()
    hits = read_event(tmp_path, NAME)
    assert (hits.particles, hits.particle_id.max()) == (None, 3)
    write_event(tmp_path)
    ends = renamed(tmp_path, "particles_final")
    with refused("there is only .*particles_final.csv, which holds where and how they ended", NAME, ends):
        read_event(tmp_path, NAME)


def test_particles_that_the_table_does_not_list_are_behind_it_as_unknown(tmp_path):
    of = tables()
    del of["particles_simulated"][1]
    write_event(tmp_path, of=of)
    particles = read_event(tmp_path, NAME).particles
    assert particles.particle_id.tolist() == [1, 2, 3, 4]
    assert particles.nhits.tolist() == [3, 0, 4, 4]
    assert np.isnan(particles.pt).tolist() == [False, False, False, True]


def test_without_measured_positions_those_of_true_hits_stand_in_and_prepare_says_so(tmp_path):
    of = tables(measured=False)
    with_noise = of["measurements"].pop()
    write_event(tmp_path, of=of)
    source = open_source("acts", directory=tmp_path)
    assert source.settings["positions"] == "of true hits"
    assert np.hypot(*source.hits(NAME).position[:, :2].T)[0] == pytest.approx(32.0125, abs=1e-3)
    of["measurements"].append(with_noise)
    write_event(tmp_path, of=of)
    with refused(
        "no column global_x, global_y, global_z, nor for every measurement a true hit",
        NAME,
        path_of(tmp_path, MEASURED),
    ):
        source.hits(NAME)
    write_event(tmp_path, "000000004")
    path = tmp_path / "event000000004-measurements.csv"
    with refused("it has measured positions, and the first event has none", path.name[5:14], path):
        open_source("acts", directory=tmp_path).hits("000000004")
    write_event(tmp_path)
    assert "positions" not in open_source("acts", directory=tmp_path).settings


def edges_of(store):
    with store.open(store.records[0]) as event:
        rows = np.arange(event.num_edges)
        return {name: event.read_edges(name, rows) for name in ("src", "dst", "label")}


def test_edges_and_labels_are_those_of_the_same_event_in_trackmls_files(tmp_path):
    simulated = simulate_event(0, num_hits=1500)
    (here := tmp_path / "acts").mkdir()
    (there := tmp_path / "trackml").mkdir()
    write_event(here, of=files_of(simulated))
    axes = simulated.position.astype(object)
    of_hits = zip(simulated.hit_id, *axes.T, simulated.volume, simulated.layer, simulated.module)
    particles = simulated.particles
    for part, header, rows in (
        ("hits", "hit_id,x,y,z,volume_id,layer_id,module_id", of_hits),
        ("truth", "hit_id,particle_id", zip(simulated.hit_id, simulated.particle_id)),
        ("particles", "particle_id,vx,vy,vz", zip(particles.particle_id, *particles.vertex.astype(object).T)),
    ):
        text = "\n".join([header, *(",".join(map(str, row)) for row in rows), ""])
        (there / f"event{NAME}-{part}.csv").write_text(text)
    ours, theirs = (
        edges_of(prepare(open_source(kind, directory=tmp_path / kind), tmp_path / f"store-{kind}"))
        for kind in ("acts", "trackml")
    )
    assert (ours["label"] == 1).sum() > 100
    for name, values in ours.items():
        assert np.array_equal(values, theirs[name]), name


@pytest.mark.parametrize("volume", [1, 200])
def test_another_detector_keeps_its_volumes_and_layers(tmp_path, volume):
    write_event(tmp_path, volume=volume, scale=2.0)
    hits = read_event(tmp_path, NAME)
    assert hits.volume.tolist() == [volume] * 12
    assert sorted(set(hits.layer.tolist())) == [2, 4, 6, 8]
    with pytest.raises(Problem, match=r"no layer pair.*\.2 \(2\)"):
        open_source("acts", directory=tmp_path).read(NAME)


def test_the_opendatadetector_has_trackmls_numbers(tmp_path):
    write_event(tmp_path, volume=17)
    hits = read_event(tmp_path, NAME)
    assert hits.volume.tolist() == [8] * 12
    assert sorted(set(hits.layer.tolist())) == [2, 4, 6, 8]


# --- damage ----------------------------------------------------------------------------------------------------------

MEASURED, MAP, TRUE, PARTICLES = "measurements", "measurement-simhit-map", "hits", "particles_simulated"


def path_of(directory, part, suffix=".csv"):
    return directory / f"event{NAME}-{part}{suffix}"


def edit(part, change):
    """Change the table of a part, a list of rows, before it is written again."""

    def spoil(directory):
        table = [line.split(",") for line in path_of(directory, part).read_text().splitlines()]
        path_of(directory, part).write_text(acts_files.text_of(change(table) or table))

    return part, spoil


def put(part, row, column, value):
    """Another value in a row, 0 the first after the names of columns, of a column."""

    def change(table):
        table[row + 1][table[0].index(column)] = value

    return edit(part, change)


def without(part, column):
    def change(table):
        at = table[0].index(column)
        return [row[:at] + row[at + 1 :] for row in table]

    return edit(part, change)


def raw(part, change):
    """Change the bytes of a part."""

    def spoil(directory):
        path_of(directory, part).write_bytes(change(path_of(directory, part).read_bytes()))

    return part, spoil


def packed(part, change):
    """The part gzipped, and its bytes changed."""

    def spoil(directory):
        content = path_of(directory, part).read_bytes()
        path_of(directory, part).unlink()
        path_of(directory, part, ".csv.gz").write_bytes(change(gzip.compress(content * 50)))

    return part, spoil


def gone(part, named):
    return named, lambda directory: path_of(directory, part).unlink()


def of_another_event(part):
    """The file of an event whose particles are softer, whose true hits lie elsewhere, which is longer."""

    def spoil(directory):
        other = tables()
        other[TRUE] = [other[TRUE][0], *other[TRUE][:0:-1]]
        other[MAP] = [*other[MAP], [len(other[MEASURED]) + 5, 0]]
        other[PARTICLES] = [other[PARTICLES][0], *([*row[:9], 0.1, *row[10:]] for row in other[PARTICLES][1:])]
        path_of(directory, part).write_text(acts_files.text_of(other[part]))

    return MAP if part == TRUE else part, spoil


def with_bits(bits):
    value = acts_files.geometry_id(8, 2, 301)
    return str((value & ~bits[0]) | bits[1])


DAMAGE = {
    "no measurements": (gone(MEASURED, None), "no measurements in"),
    "no map": (gone(MAP, TRUE), "hits.csv is here and .*measurement-simhit-map.csv.* is not"),
    "no true hits": (gone(TRUE, MAP), "map.csv is here and .*hits.csv.* is not"),
    "measurements twice": (
        (MEASURED, lambda there: shutil.copy(path_of(there, MEASURED), path_of(there, MEASURED, ".csv.gz"))),
        "measurements are there twice",
    ),
    "no geometry_id": (without(MEASURED, "geometry_id"), "no column geometry_id; found"),
    "no measurement_id": (without(MEASURED, "measurement_id"), "no column measurement_id"),
    "two coordinates": (without(MEASURED, "global_z"), "no column global_z"),
    "no hit_id in the map": (without(MAP, "hit_id"), "no column hit_id"),
    "no geometry_id of true hits": (without(TRUE, "geometry_id"), "no column geometry_id"),
    "four columns of an id": (without(TRUE, "particle_id_gen"), "no column particle_id_gen"),
    "no id of particles": (without(PARTICLES, "particle_id_part"), "no column particle_id_part"),
    "another separator": (raw(MEASURED, lambda text: text.replace(b",", b";")), "separated by ';' here"),
    "position NaN": (put(MEASURED, 4, "global_y", "nan"), "column global_y holds 1 values .* nan in row 4"),
    "position infinite": (put(MEASURED, 4, "global_x", "-inf"), "column global_x holds 1 values .* -inf in row 4"),
    "position empty": (put(MEASURED, 2, "global_x", ""), "column global_x holds 1 values .* empty in row 2"),
    "position a word": (put(MEASURED, 2, "global_x", "near"), "column global_x holds .*: near in row 2"),
    "id of a measurement twice": (put(MEASURED, 5, "measurement_id", 2), r"the first is 2 in rows \[2, 5\]"),
    "id of a measurement negative": (put(MEASURED, 5, "measurement_id", -2), "measurement_id holds .*: -2 in row 5"),
    "id of a measurement of 65 bits": (put(MEASURED, 5, "measurement_id", 2**64), f"{2**64} in row 5"),
    "id of a measurement empty": (put(MEASURED, 5, "measurement_id", ""), "measurement_id holds .*: empty in row 5"),
    "geometry_id decimal": (
        put(MEASURED, 3, "geometry_id", "5.76e17"),
        r"column geometry_id holds .* whole numbers of 64 bits.*: 5.76e17 in row 3",
    ),
    "geometry_id 0": (put(MEASURED, 3, "geometry_id", 0), "the first is 0 = 0x0000000000000000 in row 3"),
    "no volume": (put(MEASURED, 0, "geometry_id", with_bits((0xFF << 56, 0))), "no sensitive surface.*in row 0"),
    "a boundary": (put(MEASURED, 0, "geometry_id", with_bits((0, 3 << 48))), "no sensitive surface.*in row 0"),
    "an approach surface": (put(MEASURED, 0, "geometry_id", with_bits((0, 3 << 28))), "no sensitive surface"),
    "no surface": (put(MEASURED, 0, "geometry_id", with_bits((0xFFFFFFF, 0))), "no sensitive surface.*in row 0"),
    "another layer": (
        put(MEASURED, 0, "geometry_id", with_bits((0xFFF << 36, 8 << 36))),
        "1 of 12 rows .* another sensor, .*measurement 0 and hit 11",
        MAP,
    ),
    "another volume of noise": (
        put(MEASURED, 11, "geometry_id", acts_files.geometry_id(11, 8, 77)),
        "1 of 12 hits .*volume_id .*: 11",
    ),
    "positions in micrometres": (
        edit(MEASURED, lambda table: [table[0], *([*row[:4], *(f"{x}e3" for x in row[4:])] for row in table[1:])]),
        "12 of 12 hits .* 60 mm from every layer",
    ),
    "a line truncated": (raw(MEASURED, lambda text: text[:-30]), "row 11 has . .* 7.*truncated"),
    "a comma too many": (put(MEASURED, 7, "local0", "0,5"), "row 7 has 8 .* 7"),
    "a line of the map truncated": (raw(MAP, lambda text: text[:-3]), "row 11 has 1 .* 2"),
    "a line of true hits truncated": (raw(TRUE, lambda text: text[:-12]), "row 11 has .* fields"),
    "a raw byte in an id": (put(MEASURED, 1, "geometry_id", "57\x0616"), "geometry_id holds .*: 57\x0616 in row 1"),
    "a raw byte in a position": (put(MEASURED, 1, "global_x", "5\x06"), "column global_x holds .*: 5\x06 in row 1"),
    "bytes of no text": (raw(MEASURED, lambda text: b"\xff\xfe" + text), "cannot be read, UnicodeDecodeError"),
    "an empty file": (raw(MEASURED, lambda text: b""), "cannot be read, EmptyDataError.*the file is empty"),
    "an empty map": (raw(MAP, lambda text: b""), "cannot be read, EmptyDataError"),
    "gz truncated": (packed(MEASURED, lambda content: content[:-40]), "cannot be read, EOFError.*truncated"),
    "gz damaged": (packed(TRUE, lambda content: content[:60] + b"\0" * 30 + content[90:]), "cannot be read, "),
    "plain and named gz": (packed(MAP, gzip.decompress), "not gzipped"),
    "map to a hit that is not there": (put(MAP, 6, "hit_id", 99), "1 of 12 rows .*hit_id .* 12 in hits, .* 99"),
    "map to no hit": (put(MAP, 6, "hit_id", 2**64 - 1), f" 12 in hits, .* {2**64 - 1}"),
    "map of a measurement that is not there": (
        put(MAP, 6, "measurement_id", 30),
        "measurement_id .* 12 in measurements, .* 30",
    ),
    "map with a negative id": (put(MAP, 6, "hit_id", -1), "hit_id holds .* no ids.*: -1 in row 6"),
    "map with a decimal id": (put(MAP, 6, "hit_id", 1.5), "hit_id holds .* no ids.*: 1.5 in row 6"),
    "map with a row twice": (
        edit(MAP, lambda table: [*table, table[4]]),
        r"1 .*measurement_id, hit_id .* 2, 8 in rows \[3, 12\]",
    ),
    "map of another event": (of_another_event(MAP), "measurement_id .* none of the 12"),
    "true hits of another event": (of_another_event(TRUE), "of 12 rows .* another sensor"),
    "particles of another event": (
        of_another_event(PARTICLES),
        "11 of 11 true hits .* 1.02 GeV, not 0.2236",
    ),
    "id of a particle negative": (put(TRUE, 2, "particle_id_part", -4), "particle_id_part .*: -4 in row 2"),
    "a particle twice": (
        edit(PARTICLES, lambda table: [*table, table[1]]),
        r" 1, 0, 1, 0, 0 in rows \[0, 4\]",
    ),
    "a particle 0": (
        edit(PARTICLES, lambda table: [*table, [*"00000", *table[1][5:]]]),
        "particle 0 in row 4; .*noise",
    ),
    "momentum NaN": (put(PARTICLES, 1, "px", "nan"), "px .* nan in row 1"),
    "ids of another release": (
        edit(PARTICLES, lambda table: tables(five=False)[PARTICLES]),
        "no column particle_id_pv.*found .'particle_id'",
    ),
}  # fmt: skip


@pytest.mark.parametrize("how", DAMAGE)
def test_damage_is_refused_by_event_file_and_value_with_what_to_do(tmp_path, how):
    (part, spoil), said, *elsewhere = DAMAGE[how]
    part = elsewhere[0] if elsewhere else part
    write_event(tmp_path)
    spoil(tmp_path)
    with pytest.raises(Problem) as found:
        read_event(tmp_path, NAME)
    error = found.value
    assert re.search(said, f"{error.what}; {error.hint}"), str(error)
    assert error.event == NAME
    if part is not None:
        assert f"event{NAME}-{part}.csv" in (error.file or error.what)


DIRECTORIES = {
    "nothing": ([], "event000000000-measurements.csv"),
    "trackml's files": (["event1-hits.csv", "event1-truth.csv"], "--source trackml"),
    "true hits alone": (["event1-hits.csv"], "have ACTS write measurements"),
    "space points alone": (["event1-spacepoints.csv.gz"], "have ACTS write measurements"),
}


@pytest.mark.parametrize("of", DIRECTORIES)
def test_a_directory_without_measurements_says_what_it_holds(tmp_path, of):
    names, hint = DIRECTORIES[of]
    for name in names:
        (tmp_path / name).write_text("")
    with pytest.raises(Problem, match="holds no measurements of ACTS") as found:
        open_source("acts", directory=tmp_path)
    assert hint in found.value.hint
    with pytest.raises(Problem, match="not a directory"):
        open_source("acts", directory=tmp_path / "nowhere")


# --- parquet ---------------------------------------------------------------------------------------------------------


def write_parquet(directory, event=0, nested=False, change=lambda hits: None):
    """The event of `tables` in ACTS's parquet: a row for each true hit, particles by their rows from 0."""
    from collider_files import write_table

    of = tables()
    measured, listed = of["measurements"][1:], [tuple(row[:5]) for row in of["particles_simulated"][1:]]
    rows = sorted((hit, measurement) for measurement, hit in of["measurement-simhit-map"][1:])
    at = [measured[measurement] for _, measurement in rows]
    geometry = np.array([row[1] for row in at], np.uint64)
    whose = np.array([listed.index(tuple(of["hits"][1 + hit][:5])) for hit, _ in rows], np.uint64)
    hits = {
        **{axis: np.array([row[4 + i] for row in at], np.float32) for i, axis in enumerate("xyz")},
        "volume_id": (geometry >> np.uint64(56)).astype(np.uint8),
        "layer_id": (geometry >> np.uint64(36) & np.uint64(0xFFF)).astype(np.uint16),
        "surface_id": (geometry >> np.uint64(8) & np.uint64(0xFFFFF)).astype(np.uint32),
        "particle_id": [[one, 0] for one in whose.tolist()] if nested else whose,
    }
    change(hits)
    numbers = np.array([row[5:] for row in of["particles_simulated"][1:]], np.float32).T
    particles = dict(zip(("pdg_id", "vx", "vy", "vz", "px", "py", "pz", "charge"), numbers))
    particles["particle_id"] = np.arange(len(listed), dtype=np.uint64)
    for folder, row in (("simhits", hits), ("particles", particles)):
        write_table(Path(directory) / folder / f"{folder}_000000-001000.parquet", [event], [row])


def of_the_same(hits, rows=slice(None)):
    """What must be alike of hits that two formats have in another order, with particles counted from 1."""
    ids = np.where(hits.particle_id == -1, 1, np.where(hits.particle_id == 0, 0, hits.particle_id + 1))
    return sorted(zip(*hits.position.T.tolist(), hits.volume, hits.layer, hits.module, ids))


@pytest.mark.parametrize("nested", [False, True])
def test_parquet_has_the_measurements_of_the_csv_each_once(tmp_path, nested):
    pytest.importorskip("pyarrow", reason="pyarrow is not installed (pip install '.[parquet]')")
    write_event(tmp_path)
    expected = read_event(tmp_path, NAME)
    (files := tmp_path / "parquet").mkdir()
    (files / f"event{NAME}-tracks_ckf.csv").write_text("")  # what ACTS may write beside it
    write_parquet(files, nested=nested)
    hits = open_source("acts", directory=files).hits("000000000")
    assert len(hits) == 11, "of the 12 true hits two are one measurement; noise is not in these files"
    ids = expected.particle_id[:-1]
    wanted = sorted(zip(*expected.position[:-1].T.tolist(), *(getattr(expected, n)[:-1] for n in PLACES), ids))
    assert of_the_same(hits) == wanted
    assert hits.particles.pt.tolist() == [1, 2, 3, 4]
    assert hits.particles.nhits.tolist() == [4, 3, 0, 4]
    rows = open_source("colliderml", directory=files).hits("000000000")
    assert len(rows) == 12, "the benchmark counts rows"


PLACES = ("volume", "layer", "module")


def test_of_parquet_a_hit_that_no_sensor_measured_is_left_out_and_one_of_nobody_is_noise(tmp_path):
    pytest.importorskip("pyarrow", reason="pyarrow is not installed (pip install '.[parquet]')")

    def change(hits):
        for axis in "xyz":
            hits[axis][2] = np.nan
        hits["particle_id"][3] = 2**64 - 1

    write_parquet(tmp_path, change=change)
    hits = open_source("acts", directory=tmp_path).hits("000000000")
    assert hits.hit_id.tolist() == [0, 1, 3, 4, 5, 6, 7, 8, 9, 11]
    assert np.flatnonzero(hits.particle_id == 0).tolist() == [2]
    assert (hits.particle_id == -1).sum() == 4 - 1, "the particle in row 0 is one, and not noise"


def unmeasured(hits):
    for axis in "xyz":
        hits[axis][:] = np.nan


OF_PARQUET = {
    "no position at all": (unmeasured, "no hit .*position.*ACTS's .* clusters"),
    "a position infinite": (lambda hits: hits["x"].put(1, np.inf), "x holds 1 .*not finite"),
    "an unknown volume": (lambda hits: hits["volume_id"].put(1, 99), "1 of 11 hits .*volume_id .*: 99"),
    "micrometres": (lambda hits: [hits[axis].__imul__(1000) for axis in "xyz"], "11 of 11 hits .* 60 mm"),
    "ragged": (lambda hits: hits.update(y=hits["y"][:-1]), "differ in length"),
    "decimal particles": (lambda hits: hits.update(particle_id=["a"] * 12), "list of numbers"),
    "no layers of another detector": (
        lambda hits: (hits["volume_id"].fill(3), hits.pop("layer_id")), "11 of 11 hits .*volume_id",
    ),
}  # fmt: skip


@pytest.mark.parametrize("how", OF_PARQUET)
def test_damaged_parquet_of_acts_is_refused_by_event_and_file(tmp_path, how):
    pytest.importorskip("pyarrow", reason="pyarrow is not installed (pip install '.[parquet]')")
    change, said = OF_PARQUET[how]
    write_parquet(tmp_path, change=change)
    with pytest.raises(Problem) as found:
        open_source("acts", directory=tmp_path).hits("000000000")
    assert re.search(said, f"{found.value.what}; {found.value.hint}"), str(found.value)
    assert found.value.file == str(next((tmp_path / "simhits").glob("*.parquet")))
