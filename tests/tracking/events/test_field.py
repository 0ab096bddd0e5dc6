"""Fields: what flags and files say of them, and the motion of a track in them against the Lorentz force itself."""

import json

import numpy as np
import pytest

from domainpar.common.problems import Problem
from domainpar.tracking.events import detector
from domainpar.tracking.events.detector import GEV_PER_TESLA_MM
from domainpar.tracking.events.field import LARGEST, NODES, Field, read_field
from domainpar.tracking.reco.ckf.states import STATE_DTYPE, fly
from domainpar.tracking.reco.helix import fit_helices


def solenoid(r, z):
    """B_z and B_r near the end of a coil, without divergence: a field that falls with z as a parabola."""
    r, z = np.asarray(r, np.float64), np.asarray(z, np.float64)
    return 2.0 - 2e-7 * (z * z - r * r / 2), 2e-7 * r * z


def map_of(rows=25, columns=121):
    r, z = np.linspace(0, 1200, rows), np.linspace(-3000, 3000, columns)
    bz, br = solenoid(r[:, None], z)
    return Field(r[1], z[0], z[1] - z[0], bz, br)


def flown(field_at, position, momentum, charge, length):
    """x, y, z of a particle behind an arc of this length in the transverse plane: the Lorentz force in steps of 0.2 mm,
    which uses nothing of ours."""
    position, momentum = np.array(position, np.float64), np.array(momentum, np.float64)
    path = 0.0
    while path < length:
        here = position + momentum / np.linalg.norm(momentum) * 0.1
        r = max(np.hypot(here[0], here[1]), 1e-9)
        bz, br = field_at(r, here[2])
        force = np.cross(momentum, [br * here[0] / r, br * here[1] / r, bz])
        # |dp| is the angle by which a particle of charge 1 turns, as p in GeV and B in T have it.
        turned = momentum + charge * GEV_PER_TESLA_MM * force / np.linalg.norm(momentum) * 0.2
        turned *= np.linalg.norm(momentum) / np.linalg.norm(turned)
        step = 0.1 * (momentum + turned) / np.linalg.norm(momentum)
        position, momentum = position + step, turned
        path += np.hypot(step[0], step[1])
    return position


@pytest.mark.parametrize("slope", [-2.5, 0.3, 2.0])
@pytest.mark.parametrize("charge", [1, -1])
def test_a_state_flies_as_the_lorentz_force_has_it_in_a_map_with_a_radial_part(slope, charge):
    pt, psi, length = 0.8, 0.4, 600.0
    begin = (40.0, -20.0, 50.0)
    state = np.zeros(1, STATE_DTYPE).view(np.recarray)[0]
    state.x, state.y, state.z = begin
    state.psi, state.slope, state.k = psi, slope, -charge * GEV_PER_TESLA_MM / pt
    for _ in range(60):
        fly(state, length / 60, map_of())
    truth = flown(solenoid, begin, (pt * np.cos(psi), pt * np.sin(psi), pt * slope), charge, length)
    even = flown(lambda r, z: (2.0, 0.0), begin, (pt * np.cos(psi), pt * np.sin(psi), pt * slope), charge, length)
    found = np.array([state.x, state.y, state.z])
    assert np.linalg.norm(found - truth) < 0.5
    assert slope == 0.3 or np.linalg.norm(even - truth) > 5  # the map matters where the track is far forward


def test_fits_in_a_map_tell_the_momentum():
    arcs = np.linspace(60, 700, 9)
    momentum = (0.9, 0.5, 2.5)
    hits = np.array([flown(solenoid, (0, 0, 10), momentum, 1, arc) for arc in arcs])
    pt = np.hypot(*momentum[:2])
    mapped, even = (float(fit_helices(hits, np.zeros(9, int), 1, field).pt[0]) / pt for field in (map_of(), 2.0))
    assert abs(mapped - 1) < 0.05 < 0.15 < abs(even - 1)


def test_a_number_a_table_and_a_map_come_back_from_json_as_they_were():
    for field in (Field.of(3.8), detector.geometry().field, map_of()):
        again = Field.of(json.loads(json.dumps(field.to_json())))
        position = np.random.default_rng(0).uniform(-900, 900, (50, 3))
        for ours, theirs in zip(again.at(position), field.at(position)):
            np.testing.assert_allclose(ours, theirs, rtol=2e-5, atol=2e-5)
    assert Field.of(3.8).to_json() == 3.8


def test_of_a_fine_map_a_coarser_one_is_kept():
    fine = map_of(101, 401)
    kept = Field.of(fine.to_json())
    assert kept.bz.size <= NODES < fine.bz.size
    position = np.array([[300.0, 100.0, 1234.0], [10.0, 700.0, -2000.0]])
    np.testing.assert_allclose(kept.at(position), fine.at(position), atol=2e-3)


def written(tmp_path, lines):
    path = tmp_path / "map.txt"
    path.write_text("\n".join(lines))
    return str(path)


def test_maps_of_acts_and_tables_are_read_and_lines_without_numbers_are_headings(tmp_path):
    r, z = np.meshgrid(np.linspace(0, 1200, 13), np.linspace(-3000, 3000, 25))
    bz, br = solenoid(r, z)
    rows = np.stack([r, z, br, bz], axis=-1).reshape(-1, 4)
    read = read_field(written(tmp_path, ["% r z Br Bz", *(" ".join(f"{v:.9g}" for v in row) for row in rows)]))
    position = np.array([[0.0, 650.0, 1100.0]])
    np.testing.assert_allclose(read.at(position), np.reshape(solenoid(650.0, 1100.0), (2, 1)), atol=0.01)
    # x, y, z with the planes beside y = 0 as well
    six = [(x, y, zz, b, 9.0, c) for x, zz, b, c in rows for y in (0.0, 50.0)] + [(-50.0, 0.0, 0.0, 9.0, 9.0, 9.0)]
    again = read_field(written(tmp_path, [", ".join(f"{v:.9g}" for v in row) for row in six]))
    for ours, theirs in zip(again, read):
        np.testing.assert_allclose(ours, theirs)
    table = read_field(written(tmp_path, ["z,bz", "100,1.5", "-100,0.5"]))
    np.testing.assert_allclose(table.at(np.array([[5.0, 0, 0.0], [5.0, 0, 900.0]]))[0], [1.0, 1.5])


GRID = [f"{r} {z} 0 2" for r in (0, 10, 20) for z in (0, 10, 20)]


@pytest.mark.parametrize(
    ("lines", "what"),
    [
        (["0 0 2"], "rows of 3 numbers"),
        ([], "rows of 0 numbers"),
        (["z bz"], "rows of 0 numbers"),
        (["0 2", "1"], "line 2 has 1 numbers"),
        (["0 2", "1 two"], "line 2 is"),
        (["0 2", "1 nan"], "not finite"),
        (["0 2", "0 2"], "do not increase"),
        (["0 2"], "shape"),
        (GRID[:-1], "no grid"),
        ([*GRID[:-1], GRID[0]], "no grid"),
        ([line.replace("20 ", "25 ", 1) if line.startswith("20") else line for line in GRID], "not even"),
        ([f"1{line}" for line in GRID], "begins at radius 0"),
        (["{"], "cannot be read"),
        (['{"bz": ["1 2"], "br": ["0 0"]}'], "r_step"),
        (['{"r_step": 1, "z_first": 0, "z_step": 1, "bz": ["1 2"], "br": ["0"]}'], "B_r"),
    ],
)
def test_a_file_that_is_no_field_is_refused_with_its_name(tmp_path, lines, what):
    with pytest.raises(Problem, match=what) as refused:
        read_field(written(tmp_path, lines))
    assert "map.txt" in str(refused.value)


def test_what_is_no_field_of_a_tracker_is_refused(tmp_path):
    for text in (str(LARGEST + 1), "nan", "2000", written(tmp_path, ["0 2000", "1 2000"])):
        with pytest.raises(Problem, match="largest component"):
            read_field(text)
    with pytest.raises(Problem, match="no number, and no file"):
        read_field("2 T")
