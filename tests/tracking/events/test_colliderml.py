"""ColliderML's parquet: hits, particles and truth as simulated, on TrackML's layers; what is wrong in one line."""

import gc
import re
import shutil

import numpy as np
import pytest

pytest.importorskip("pyarrow", reason="pyarrow is not installed (pip install '.[parquet]')")

import collider_files
import pyarrow as pa
import pyarrow.parquet as pq
from collider_files import SAMPLE, tables_of, write_sample, write_table

from domainpar.common.problems import Problem
from domainpar.tracking.events.colliderml import LAYER_PAIRS, ColliderMLEvents
from domainpar.tracking.events.detector import DEFAULT_LAYER_PAIRS, field_of
from domainpar.tracking.events.field import Field
from domainpar.tracking.events.preparation import prepare
from domainpar.tracking.events.simulate import simulate_event
from domainpar.tracking.events.sources import find_source, open_source


@pytest.fixture(scope="module")
def sample(tmp_path_factory):
    directory = tmp_path_factory.mktemp("colliderml")
    return directory, write_sample(directory)


def test_events_are_what_was_simulated_in_any_order_of_reading(sample):
    directory, simulated = sample
    events = ColliderMLEvents(directory)
    assert events.names == ("000000000", "000000001", "000000002")
    for name in (events.names[1], events.names[0], events.names[2], events.names[0]):
        hits, expected = events.read(name), simulated[int(name)]
        assert hits.event_id == name
        assert np.array_equal(hits.hit_id, np.arange(len(expected)))
        assert np.array_equal(hits.position, collider_files.moved(expected))
        for column in ("volume", "layer", "module", "particle_id"):
            assert np.array_equal(getattr(hits, column), getattr(expected, column)), column
        ours, theirs = hits.particles, expected.particles
        for column in ("particle_id", "vertex", "nhits", "charge"):
            assert np.array_equal(getattr(ours, column), getattr(theirs, column)), column
        assert np.array_equal(ours.primary, theirs.particle_id % 2)
        assert set(ours.pdg_id) == {211}
        assert np.allclose(ours.pt, theirs.pt, rtol=1e-5)
        assert np.allclose(ours.eta, theirs.eta, atol=1e-4)
        assert [path.parent.name for path in events.files(name)] == [f"{SAMPLE}_tracker_hits", f"{SAMPLE}_particles"]


def test_a_store_holds_about_as_many_edges_and_true_ones_as_that_of_the_simulation(sample, tmp_path):
    found = []
    for source in (open_source("colliderml", directory=sample[0]), open_source("simulate", num_events=3, num_hits=600)):
        store = prepare(source, tmp_path / source.settings["source"])
        edges, true = 0, 0
        for record in store.events():
            with store.open(record) as event:
                label = event.read_edges("label", np.arange(event.num_edges))
            edges, true = edges + len(label), true + int((label == 1).sum())
        found.append((edges, true))
    assert np.array(found[0]) == pytest.approx(np.array(found[1]), rel=0.1)
    assert found[0][1] > 500


def test_lines_cross_its_layers_as_they_do_trackmls_but_for_the_first_disks():
    more = set(LAYER_PAIRS) - set(DEFAULT_LAYER_PAIRS)
    assert more == {((7, 14), (12, 12)), ((9, 2), (14, 2))}
    assert len(set(DEFAULT_LAYER_PAIRS) - set(LAYER_PAIRS)) == 2
    assert find_source("colliderml").layer_pairs == LAYER_PAIRS


def test_the_folder_of_the_hits_names_one_of_several_samples(sample, tmp_path):
    shutil.copytree(sample[0], tmp_path, dirs_exist_ok=True)
    write_sample(tmp_path, 1, sample="dihiggs_pu0", first=7)
    with pytest.raises(Problem) as refused:
        ColliderMLEvents(tmp_path)
    assert f"hits of 2 samples: dihiggs_pu0, {SAMPLE}" in str(refused.value)
    assert f"--input {tmp_path / 'dihiggs_pu0_tracker_hits'}" in str(refused.value)
    events = ColliderMLEvents(tmp_path / "dihiggs_pu0_tracker_hits")
    assert events.names == ("000000007",)
    assert events.read("000000007").particles is not None


def of_files(directory):
    """Both files of the first shard."""
    return [next((directory / f"{SAMPLE}_{kind}").rglob("train-00000*")) for kind in ("tracker_hits", "particles")]


def test_without_truth_or_particles_hits_are_read_all_the_same(tmp_path):
    def forget(number, hits, particles):
        del hits["particle_id"]

    write_sample(tmp_path, 1, change=forget)
    hits = ColliderMLEvents(tmp_path).read("000000000")
    assert hits.particle_id is None
    assert hits.particles is None
    shutil.rmtree(tmp_path)
    write_sample(tmp_path, 1)
    shutil.rmtree(tmp_path / f"{SAMPLE}_particles")
    hits = ColliderMLEvents(tmp_path).read("000000000")
    assert hits.particle_id is not None
    assert hits.particles is None


def of_acts(hits):
    # What ACTS's example for this detector writes: codes of volumes 7 to 18, though its volumes are 16 to 30.
    hits["detector"] = np.select([hits["volume_id"] == one for one in (16, 17, 18)], [6, 7, 8], 255).astype(np.uint8)


def of_none(hits):
    del hits["detector"]


def of_codes_alone(hits):
    del hits["volume_id"], hits["layer_id"]


def without_layers(hits):
    of_acts(hits)
    del hits["layer_id"]


def counted_on(hits):
    """Layers 1, 2, 3, ... of each volume, as a newer geometry of ACTS has them."""
    hits["layer_id"] = hits["layer_id"] // 2


NUMBERINGS = (of_acts, of_none, of_codes_alone, without_layers, counted_on)


@pytest.mark.parametrize("numbering", NUMBERINGS)
def test_volume_and_layer_decide_however_a_file_counts_its_detectors(tmp_path, numbering):
    simulated = write_sample(tmp_path, 1, 6000, change=lambda number, hits, particles: numbering(hits))
    hits, expected = ColliderMLEvents(tmp_path).read("000000000"), simulated[0]
    assert np.array_equal(hits.volume, expected.volume)
    assert np.array_equal(hits.layer, expected.layer)
    assert len(set(zip(hits.volume.tolist(), hits.layer.tolist()))) == 48


def test_a_hit_far_from_its_layer_stays_on_it(tmp_path):
    def shift(number, hits, particles):
        innermost = (hits["volume_id"] == 23) & (hits["layer_id"] == 12)
        hits["z"][np.flatnonzero(innermost)[0]] -= 200  # mm: nearer to the next disk

    simulated = write_sample(tmp_path, 1, change=shift)
    assert np.array_equal(ColliderMLEvents(tmp_path).read("000000000").layer, simulated[0].layer)


def test_files_of_trackmls_detector_in_the_same_schema_are_read(tmp_path):
    simulated = simulate_event(0, num_hits=6000)

    def unmoved(number, hits, particles):
        hits |= {axis: simulated.position[:, i] for i, axis in enumerate("xyz")}
        hits["volume_id"] = simulated.volume.astype(np.uint8)
        of_acts(hits)

    write_sample(tmp_path, 1, 6000, change=unmoved)
    hits = ColliderMLEvents(tmp_path).read("000000000")
    assert np.array_equal(hits.volume, simulated.volume)
    assert np.array_equal(hits.layer, simulated.layer)
    settings = open_source("colliderml", directory=tmp_path).settings  # and not in the field of TrackML's events
    assert str(field_of(settings, hits.volume, hits.layer)) == str(Field.of(2.0))
    assert str(field_of({"source": "simulate"}, hits.volume, hits.layer)) != str(Field.of(2.0))


def bytes_held(directory, num_events):
    """Bytes that pyarrow holds after one event of a row group of so many has been read."""
    hits = simulate_event(0, num_hits=2000)
    rng = np.random.default_rng(0)
    rows = [tables_of(hits)[0] | {"particle_id": rng.integers(1, 2**60, len(hits)).astype(np.uint64)}] * num_events
    path = directory / f"{SAMPLE}_tracker_hits" / "train.parquet"
    write_table(path, range(num_events), rows, compression="none", use_dictionary=False, data_page_size=2**14)
    events = ColliderMLEvents(directory)
    gc.collect()
    before = pa.total_allocated_bytes()
    events.read(events.names[num_events // 2])
    assert pq.ParquetFile(path).num_row_groups == 1
    return pa.total_allocated_bytes() - before, path.stat().st_size


def test_an_event_takes_as_much_memory_in_a_large_row_group_as_in_a_small_one(tmp_path):
    (few, _), (many, size) = (bytes_held(tmp_path / str(count), count) for count in (150, 450))
    assert many < 1.1 * few
    assert many < size / 4


def test_a_particle_0_is_a_particle_and_ids_of_64_bits_stay_apart(tmp_path):
    def renumber(number, hits, particles):
        for table in (hits, particles):
            ids = table["particle_id"].copy()
            ids[table["particle_id"] == 3], ids[table["particle_id"] == 4] = 0, 2**64 - 2
            table["particle_id"] = ids
        hits["surface_id"] = hits["surface_id"].astype(np.uint64) << np.uint64(40)

    simulated = write_sample(tmp_path, 1, change=renumber)
    hits, expected = ColliderMLEvents(tmp_path).read("000000000"), simulated[0].particle_id
    assert set(expected) >= {0, 3, 4}
    wanted = np.select([expected == 3, expected == 4, expected == 0], [-1, -2, -1], expected)
    assert np.array_equal(hits.particle_id, wanted), "noise is particle 0 in these files"
    modules = simulated[0].module
    assert len(np.unique(hits.module)) == len(np.unique(modules)) > 5
    assert np.array_equal(np.argsort(hits.module, kind="stable"), np.argsort(modules, kind="stable"))
    assert len(np.unique(hits.particles.particle_id)) == len(simulated[0].particles.pt)


def rows_of(path):
    return {name: [np.array(row) for row in column] for name, column in pq.read_table(path).to_pydict().items()}


def spoil(path, change):
    """Write a file again with its columns changed."""
    columns = rows_of(path)
    numbers = [int(number) for number in columns.pop("event_id")]
    rows = [{name: column[i] for name, column in columns.items()} for i in range(len(numbers))]
    for row in rows:
        change(row)
    write_table(path, numbers, rows)


def in_metres(row):
    for axis in "xyz":
        row[axis] = row[axis] / 1000


def shorten(row):
    row["y"] = row["y"][:-1]


def not_finite(row):
    row["z"] = np.where(np.arange(len(row["z"])) == 5, np.inf, row["z"])


def in_a_calorimeter(row):
    row["volume_id"] = np.where(np.arange(len(row["volume_id"])) < 2, 9, row["volume_id"])


def coded_by_acts(row):
    of_acts(row)
    row.pop("volume_id")


SPOILT = {
    "no column": (0, lambda row: row.pop("x"), r"column x; found \['event_id', 'y'"),
    "no detector": (0, lambda row: (row.pop("detector"), row.pop("volume_id")), "no column detector"),
    "no momentum": (1, lambda row: row.pop("px"), "no column px"),
    "metres": (0, in_metres, "60 mm from every layer"),
    "ragged": (0, shorten, "differ in length"),
    "not finite": (0, not_finite, "column z holds 1 .* 5 "),
    "calorimeter": (0, in_a_calorimeter, r"^2 of 629 hits .*volume_id .*: 9 "),
    "codes of others": (0, coded_by_acts, "detector .*: 255 "),
    "no list": (0, lambda row: row.update(x=1.0), "column x holds double"),
    "twice": (1, lambda row: row.update(particle_id=np.ones_like(row["particle_id"])), "lists 1 more than once"),
}


@pytest.mark.parametrize("how", SPOILT)
def test_what_is_wrong_is_one_line_with_event_and_file(tmp_path, how):
    which, change, said = SPOILT[how]
    write_sample(tmp_path, 1)
    path = of_files(tmp_path)[which]
    spoil(path, change)
    with pytest.raises(Problem) as refused:
        ColliderMLEvents(tmp_path).read("000000000")
    assert re.search(said, str(refused.value))
    assert str(path) in str(refused.value)


def test_files_that_are_no_parquet_or_truncated_or_there_twice_are_refused(tmp_path):
    write_sample(tmp_path, 2)
    hits, particles = of_files(tmp_path)
    whole = hits.read_bytes()
    for content in (b"no parquet", whole[: len(whole) // 2]):
        hits.write_bytes(content)
        with pytest.raises(Problem, match="truncated, or no parquet"):
            ColliderMLEvents(tmp_path)
    hits.write_bytes(whole)
    shutil.copy(hits, hits.with_name("train-00001-of-00001.parquet"))
    with pytest.raises(Problem, match="event 0 .*twice, .*train-00000"):
        ColliderMLEvents(tmp_path)
    hits.with_name("train-00001-of-00001.parquet").unlink()
    columns = rows_of(particles)
    columns.pop("event_id")
    write_table(particles, [0], [{name: column[0] for name, column in columns.items()}])
    with pytest.raises(Problem, match="no row .*particles"):
        ColliderMLEvents(tmp_path).read("000000001")


def test_a_directory_without_hits_says_what_is_expected(tmp_path):
    with pytest.raises(Problem, match="no hits of ColliderML"):
        ColliderMLEvents(tmp_path)
    with pytest.raises(Problem, match="is not a directory"):
        ColliderMLEvents(tmp_path / "nowhere")
