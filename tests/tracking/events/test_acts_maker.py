"""Events that Pythia and ACTS make: the number of an event decides all of it, and what is asked of them is in them."""

import json
import re
import sys

import numpy as np
import pandas as pd
import pytest
from source_files import read_event

from domainpar.common.agreement import Gathering, Refused
from domainpar.common.problems import Problem
from domainpar.testing import find_mpiexec, run_command
from domainpar.tracking.events import acts_maker
from domainpar.tracking.events.acts_maker import MADE, Maker, acts_field, import_acts
from domainpar.tracking.events.detector import challenge_field
from domainpar.tracking.events.field import Field

pytest.importorskip("acts", reason="ACTS has wheels for Linux on x86-64 alone")

ALL_SEEN = Maker("ttbar", (3.0, 3.0), (0.0, 55.0, 55.0), None, lost=0.0, dead=0.0, noise=0.0, seed=0)
SPOILT = ALL_SEEN._replace(lost=0.1, dead=0.2, noise=0.3)


def make(directory, numbers, making):
    making.make(directory, numbers, Gathering(), lambda: None)
    return directory


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    return make(tmp_path_factory.mktemp("seen"), [0, 1], ALL_SEEN)


@pytest.fixture(scope="module")
def spoilt(tmp_path_factory):
    return make(tmp_path_factory.mktemp("spoilt"), [0, 1], SPOILT)


def table(directory, number, name):
    return pd.read_csv(directory / f"event{number:09d}-{name}.csv", encoding="latin-1")


def test_an_event_is_the_same_alone_and_after_others(spoilt, tmp_path):
    make(tmp_path, [1], SPOILT)
    files = sorted(path.name for path in tmp_path.glob("event*"))
    assert len(files) == 5
    for name in files:
        assert (tmp_path / name).read_bytes() == (spoilt / name).read_bytes(), name
    assert table(spoilt, 0, "particles").shape != table(spoilt, 1, "particles").shape


def test_what_is_there_stays_and_what_lacks_its_last_table_is_made_again(spoilt, tmp_path):
    for path in spoilt.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    kept = tmp_path / "event000000000-hits.csv"
    kept.write_text("kept")
    (tmp_path / "event000000001-measurements.csv").unlink()
    make(tmp_path, [0, 1], SPOILT)
    assert kept.read_text() == "kept"
    assert (tmp_path / "event000000001-measurements.csv").read_bytes() == (
        spoilt / "event000000001-measurements.csv"
    ).read_bytes()


def test_events_of_another_making_or_of_somebody_are_not_mixed_with_these(spoilt, tmp_path):
    with pytest.raises(Refused, match=r"made with noise 0\.3, not 0\.0"):
        make(spoilt, [2], SPOILT._replace(noise=0.0))
    (tmp_path / "event000000000-hits.csv").write_text("")
    with pytest.raises(Refused, match=f"holds events, and no {MADE}"):
        make(tmp_path, [0], SPOILT)


def silent_modules():
    """The definition: a number drawn for each module of the detector, by the seed of the making alone."""
    modules = np.array(sorted(acts_maker._sensors()), np.uint64)
    return set(modules[np.random.default_rng([SPOILT.seed, 3]).random(len(modules)) < SPOILT.dead].tolist())


def test_hits_are_lost_modules_silent_and_noise_added_as_asked(seen, spoilt):
    for number in (0, 1):
        before, after = (table(place, number, "measurements") for place in (seen, spoilt))
        links = table(spoilt, number, "measurement-simhit-map")
        assert (after["measurement_id"] == np.arange(len(after))).all()
        assert after["geometry_id"].astype(np.uint64).is_monotonic_increasing
        places = ["geometry_id", "local0", "local1"]
        true = after[after["measurement_id"].isin(links["measurement_id"])]
        assert len(true.merge(before, on=places)) == len(true)  # none moved
        assert len(true) == pytest.approx(0.9 * 0.8 * len(before), abs=4 * len(before) ** 0.5)
        assert len(after) - len(true) == pytest.approx(0.3 * 0.8 * len(before), abs=4 * (0.3 * len(before)) ** 0.5)
        noise = after.drop(true.index)
        at = np.hypot(noise["global_x"], noise["global_y"])
        assert 28 < at.min() < at.max() < 1_050
        assert noise["global_z"].abs().max() < 3_000
        assert not silent_modules() & set(after["geometry_id"])


@pytest.mark.parametrize(
    "spoilt_by", [{"lost": 0.1}, {"dead": 0.1}, {"noise": 0.1}, {"dead": 1.0, "noise": 1.0}], ids=str
)
def test_each_spoils_alone(seen, tmp_path, spoilt_by):
    make(tmp_path, [1], ALL_SEEN._replace(**spoilt_by))
    before, after = (len(table(place, 1, "measurements")) for place in (seen, tmp_path))
    expected = before * (1 - spoilt_by.get("lost", 0)) * (1 - spoilt_by.get("dead", 0))
    expected *= 1 + spoilt_by.get("noise", 0)
    assert after == pytest.approx(expected, abs=6 * before**0.5)
    assert len(table(tmp_path, 1, "measurement-simhit-map")) <= len(table(seen, 1, "measurement-simhit-map"))


def test_the_events_are_read_with_their_truth(spoilt):
    hits = read_event("acts", spoilt, "000000001")
    noise = hits.particle_id == 0
    assert 0.2 < noise.mean() < 0.4
    assert hits.particles is not None
    assert len(hits.particles.particle_id) > 50
    # Where a particle was, by ACTS: within a few widths of a channel of the measured place.
    links, true = table(spoilt, 1, "measurement-simhit-map"), table(spoilt, 1, "hits")
    moved = hits.position[links["measurement_id"]] - true[["tx", "ty", "tz"]].to_numpy()[links["hit_id"]]
    assert np.quantile(np.linalg.norm(moved, axis=1), 0.9) < 8


OF_ID = ["particle_id_pv", "particle_id_sv", "particle_id_part", "particle_id_gen", "particle_id_subpart"]


def test_particles_and_their_hits_are_those_that_another_reading_counts(seen):
    hits = read_event("acts", seen, "000000000")
    tables = ("measurements", "hits", "particles_simulated", "measurement-simhit-map")
    measured, true, particles, links = (table(seen, 0, name) for name in tables)
    first = links.drop_duplicates("measurement_id").set_index("measurement_id")["hit_id"]
    owner = true[OF_ID].iloc[first.loc[measured["measurement_id"]]]
    counted = particles.merge(owner.groupby(OF_ID).size().rename("n").reset_index(), how="left", on=OF_ID).fillna(
        {"n": 0}
    )
    assert len(hits) == len(measured) == counted["n"].sum()
    pt, of = np.hypot(counted["px"], counted["py"]).to_numpy(), hits.particles
    eta = np.arcsinh(counted["pz"].to_numpy() / pt)
    expected, found = (
        sorted(zip(n[n > 0].tolist(), pt[n > 0].round(4).tolist(), eta[n > 0].round(4).tolist()))
        for n, pt, eta in ((counted["n"].to_numpy(), pt, eta), (of.nhits, of.pt, of.eta))
    )
    np.testing.assert_allclose(found, expected, atol=2e-4)
    assert len(found) > 100


def test_collisions_lie_as_the_beam_spot_says(tmp_path):
    rng = np.random.default_rng
    wide = ALL_SEEN._replace(pile_up=(300.0, 300.0), beam_spot=(20.0, 30.0, 30.0))
    z = acts_maker._collisions(wide, 4, rng(0)).drop_duplicates("particle_id_pv")["vz"]
    assert z.std() == pytest.approx(30, rel=0.15)
    assert z.mean() == pytest.approx(20, abs=6)
    drawn = ALL_SEEN._replace(pile_up=(30.0, 200.0), beam_spot=(0.0, 5.0, 60.0))
    counts, widths = [], []
    for number in range(4):
        collisions = acts_maker._collisions(drawn, number, rng(number)).drop_duplicates("particle_id_pv")
        counts.append(len(collisions))
        widths.append(collisions["vz"].std())
    assert max(counts) > 1.3 * min(counts) > 20
    assert 75 > max(widths) > 1.3 * min(widths)


def test_a_map_about_another_axis_is_none_for_acts(tmp_path):
    with pytest.raises(Problem, match="lies at x -150 and y -150 mm"):
        acts_field(challenge_field(), tmp_path)


def test_acts_has_the_field_of_the_store_everywhere(tmp_path):
    program = import_acts()
    r, z = np.meshgrid(np.linspace(0, 1_200, 7), np.linspace(-3_000, 3_000, 13), indexing="ij")
    field = Field(200.0, -3_000.0, 500.0, 2 - (z / 3_000) ** 2 - r / 4_000, r * z / 9e6)
    places = np.array([(0, 0, 0), (0, 0, 1_500), (300, 400, 2_400), (-600, 0, -1_480), (0, 960, -2_920)], float)
    bz, br = field.at(places)
    for told, expected in ((field, np.stack([br, bz])), (Field.of(1.5), np.array([[0.0], [1.5]]) + np.zeros(5))):
        in_field = acts_field(told, tmp_path)
        cache = in_field.makeCache(program.MagneticFieldContext())
        found = np.array([list(in_field.getField(program.Vector3(*at), cache)) for at in places])
        found /= program.UnitConstants.T
        radius = np.maximum(np.hypot(places[:, 0], places[:, 1]), 1e-9)
        outward = (found[:, 0] * places[:, 0] + found[:, 1] * places[:, 1]) / radius
        np.testing.assert_allclose(np.stack([outward, found[:, 2]]), expected, atol=1e-3)


def test_a_field_bends(seen, tmp_path):
    weak = make(tmp_path, [0], ALL_SEEN._replace(field=Field.of(0.5)))
    assert json.loads((weak / MADE).read_text())["field"] == 0.5
    turned = []
    for place in (seen, weak):
        hits = table(place, 0, "hits").query("abs(tz) < 1000 and tpx**2 + tpy**2 > 0.25").sort_values("tt")
        groups = hits.groupby([f"particle_id_{it}" for it in ("pv", "sv", "part")])
        first, last = groups.first(), groups.last()
        turn = np.arctan2(last["tpy"], last["tpx"]).to_numpy() - np.arctan2(first["tpy"], first["tpx"]).to_numpy()
        turned.append(np.median(np.abs((turn + np.pi) % (2 * np.pi) - np.pi)))
    assert turned[0] == pytest.approx(4 * turned[1], rel=0.3)  # 2 T and 0.5


@pytest.mark.parametrize(
    ("process", "match"), [("Tip:top = on", "does not know the setting 'Tip:top = on'"), ("nothing", "does not know")]
)
def test_a_process_that_pythia_does_not_know_is_refused(process, match, tmp_path):
    with pytest.raises(Refused, match=match):
        make(tmp_path / "events", [0], ALL_SEEN._replace(process=process))


def test_without_acts_its_extra_is_named(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "acts", None)
    with pytest.raises(Refused, match=r"pyacts and pythia8mc"):
        make(tmp_path, [0], ALL_SEEN)


@pytest.mark.slow
@pytest.mark.skipif(find_mpiexec() is None, reason="no mpiexec or no mpi4py")
def test_one_two_and_three_ranks_make_the_same_files_and_store(tmp_path):
    made = {}
    for ranks in (1, 2, 3):
        place = tmp_path / str(ranks)
        words = "--source acts --simulate 4 --pile-up 1,5 --beam-spot 0,5,60 --noise 0.1 --hit-inefficiency 0.05"
        command = [find_mpiexec(), "-n", str(ranks), sys.executable, "-m", "domainpar.prepare", *words.split()]
        code, printed = run_command([*command, "--input", f"{place}/acts", "--store", f"{place}/store"], 300)
        assert code == 0, printed
        files = {path.name: path.read_bytes() for path in sorted((place / "acts").iterdir())}
        made[ranks] = files, re.search(r"digest \w+", printed)[0]
    assert len(made[1][0]) == 4 * 5 + 1
    assert made[1] == made[2] == made[3]
