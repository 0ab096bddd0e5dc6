"""Fields: what flags and files say of them, and the motion of a track in them against the Lorentz force itself."""

import json
import math

import numpy as np
import pytest

from domainpar.common.problems import Problem
from domainpar.tracking.events import detector
from domainpar.tracking.events.detector import GEV_PER_TESLA_MM
from domainpar.tracking.events.field import LARGEST, NODES, Field, read_field
from domainpar.tracking.reco.ckf.detector_layout import PLACE_DTYPE
from domainpar.tracking.reco.helix import fit_helices
from domainpar.tracking.reco.hit_table import TrackHits
from domainpar.tracking.reco.kalman import AT_FIRST, HIT_DTYPE, STATE_DTYPE, fly, point, start


def solenoid(r, z):
    """B_z and B_r near the end of a coil, without divergence: a field that falls with z as a parabola."""
    return 2.0 - 2e-7 * (z * z - r * r / 2), 2e-7 * r * z


def map_of(rows=25, columns=121):
    r, z = np.linspace(0, 1200, rows), np.linspace(-3000, 3000, columns)
    bz, br = solenoid(r[:, None], z)
    return Field(r[1], z[0], z[1] - z[0], bz, br)


def about(axis):
    return map_of()._replace(x=axis[0], y=axis[1])


def flown(field_at, position, momentum, charge, length, axis=(0.0, 0.0)):
    """x, y, z of a particle behind an arc of this length in the transverse plane: the Lorentz force in steps of 0.2 mm,
    which uses nothing of ours; in numbers of Python, twenty times faster here than arrays of three."""
    x, y, z, px, py, pz = map(float, (*position, *momentum))
    size, path = math.hypot(px, py, pz), 0.0
    while path < length:
        away_x, away_y = x + 0.1 * px / size - axis[0], y + 0.1 * py / size - axis[1]
        r = max(math.hypot(away_x, away_y), 1e-9)
        bz, br = field_at(r, z + 0.1 * pz / size)
        bx, by = br * away_x / r, br * away_y / r
        # |dp| is the angle by which a particle of charge 1 turns, as p in GeV and B in T have it.
        turn = 0.2 * charge * GEV_PER_TESLA_MM / size
        turned = px + turn * (py * bz - pz * by), py + turn * (pz * bx - px * bz), pz + turn * (px * by - py * bx)
        kept = size / math.hypot(*turned)  # a magnetic field does no work
        step = [0.1 * (old + kept * new) / size for old, new in zip((px, py, pz), turned)]
        px, py, pz = (kept * new for new in turned)
        x, y, z, path = x + step[0], y + step[1], z + step[2], path + math.hypot(step[0], step[1])
    return np.array([x, y, z])


@pytest.mark.parametrize("slope", [-2.5, 0.3, 2.0])
@pytest.mark.parametrize("charge", [1, -1])
@pytest.mark.parametrize("axis", [(0.0, 0.0), (-150.0, 100.0)])
def test_a_state_flies_as_the_lorentz_force_has_it_in_a_map_with_a_radial_part(slope, charge, axis):
    pt, psi, length = 0.8, 0.4, 600.0
    begin = (40.0, -20.0, 50.0)
    state = np.zeros(1, STATE_DTYPE).view(np.recarray)[0]
    state.x, state.y, state.z = begin
    point(state, psi)
    state.slope, state.k = slope, -charge * GEV_PER_TESLA_MM / pt
    for _ in range(60):
        fly(state, length / 60, about(axis))
    truth = flown(solenoid, begin, (pt * np.cos(psi), pt * np.sin(psi), pt * slope), charge, length, axis)
    even = flown(lambda r, z: (2.0, 0.0), begin, (pt * np.cos(psi), pt * np.sin(psi), pt * slope), charge, length)
    found = np.array([state.x, state.y, state.z])
    assert np.linalg.norm(found - truth) < 0.5
    assert slope == 0.3 or np.linalg.norm(even - truth) > 5  # the map matters where the track is far forward


@pytest.mark.parametrize("axis", [(0.0, 0.0), (300.0, 300.0)])
def test_fits_in_a_map_tell_the_momentum(axis):
    arcs = np.linspace(60, 700, 9)
    momentum = (0.9, 0.5, 2.5)
    hits = np.array([flown(solenoid, (0, 0, 10), momentum, 1, arc, axis) for arc in arcs])
    pt = np.hypot(*momentum[:2])
    nowhere = np.zeros(9, np.int64)
    mapped, even = (
        fit_helices(TrackHits(hits, nowhere, nowhere, field), nowhere, 1)[0, 0] / pt for field in (about(axis), 2.0)
    )
    assert abs(mapped - 1) < 0.05 < 0.1 < abs(even - 1)


def test_a_number_a_table_and_a_map_come_back_from_json_as_they_were():
    for field in (Field.of(3.8), detector.geometry().field, map_of(), about((-150.0, 30.0))):
        again = Field.of(json.loads(json.dumps(field.to_json())))
        position = np.random.default_rng(0).uniform(-900, 900, (50, 3))
        for ours, theirs in zip(again.at(position), field.at(position)):
            np.testing.assert_allclose(ours, theirs, rtol=2e-5, atol=2e-5)
        assert (again.x, again.y) == (field.x, field.y)
    assert Field.of(3.8).to_json() == 3.8


@pytest.mark.parametrize(("slope", "axis"), [(2.9, (0.0, 0.0)), (2.9, (-150.0, -150.0)), (-6.0, (150.0, 0.0))])
@pytest.mark.parametrize("z", [(1740, 2380, 2800), (2120, 2230, 2340)])  # the second: where it bends least
@pytest.mark.parametrize("back", [False, True])
def test_three_hits_far_apart_in_a_map_tell_direction_and_momentum(slope, axis, z, back):
    pt, psi, arcs = 1.4, 0.7, np.array(z) / abs(slope)
    momentum = (pt * np.cos(psi), pt * np.sin(psi), pt * slope)
    if back:
        arcs = arcs[::-1]
    at = [flown(solenoid, (0, 0, 0), momentum, 1, arc, axis) for arc in arcs]
    ahead = flown(solenoid, (0, 0, 0), momentum, 1, arcs[2] + (-1 if back else 1), axis) - at[2]
    places, hits = np.zeros(3, PLACE_DTYPE), np.zeros(3, HIT_DTYPE)
    places["material"], hits["var_u"], hits["var_v"] = 0.001, 1e-2, 1e-2
    (hits["x"], hits["y"], hits["z"]), hits["surface"] = np.transpose(at), range(3)
    # Modules that stand across the flight.
    out = np.array(momentum) / np.linalg.norm(momentum)
    hits["u"], hits["w"] = np.cross([0, 0, 1.0], out) / np.hypot(*out[:2]), out
    hits["v"] = np.cross(hits["w"], hits["u"])
    state = np.zeros(1, STATE_DTYPE).view(np.recarray)[0]
    start(state, *hits.view(np.recarray), places, -1 if back else 1, about(axis))
    turned = (state.psi - np.arctan2(ahead[1], ahead[0]) + np.pi) % (2 * np.pi) - np.pi
    # Where tracks are bent little, three hits say little of momenta.
    _, of_direction, of_k, _, _ = np.sqrt(np.diag(state.cov))
    assert abs(turned) < max(1e-3, 3 * of_direction)
    assert of_direction < 0.02
    assert abs(state.k * (-1 if back else 1) + GEV_PER_TESLA_MM / pt) < 3 * of_k < 3 * AT_FIRST[2]
    assert np.linalg.eigvalsh(state.cov / np.outer(AT_FIRST, AT_FIRST)).min() > 0


def test_the_field_of_a_solenoid_has_neither_sources_nor_curls():
    field = detector.challenge_field()
    r, h = field.r_step * np.arange(len(field.bz))[:, None], field.r_step
    inner = np.s_[1:-1, 1:-1]
    sources = np.gradient(r * field.br, h, axis=0)[inner] / r[1:-1] + np.gradient(field.bz, h, axis=1)[inner]
    curls = np.gradient(field.br, h, axis=1)[inner] - np.gradient(field.bz, h, axis=0)[inner]
    assert (
        max(np.abs(sources[:16]).max(), np.abs(curls[:16]).max())
        < 0.02 * np.abs(np.gradient(field.bz, h, axis=1)).max()
    )
    middle = round((detector.FIELD_CENTRE[2] - field.z_first) / h * 2)
    np.testing.assert_allclose(field.bz[:, : middle + 1], field.bz[:, middle::-1], atol=1e-12)
    assert 1.95 < field.bz[0, 50] < 2.05


def test_what_bends_about_an_axis_beside_the_beam_is_the_mean_over_azimuths():
    field = Field.solenoid((30.0, 0.0, 100.0), 12000.0, (1.5, 0.5), (1200.0, 3200.0))
    for x, y, z in ((20.0, 0.0, 50.0), (35.0, 0.0, 2000.0), (-300.0, 400.0, -900.0)):
        r, phi = np.hypot(x, y), np.linspace(0, 2 * np.pi, 8, endpoint=False)
        at = np.stack([r * np.cos(phi), r * np.sin(phi), np.full(8, z)], axis=1)
        bz, br = field.at(at)
        away = at[:, :2] - (30.0, 0.0)  # from the axis, along which B_r points
        ahead = (away * at[:, :2]).sum(axis=1) / np.hypot(*away.T) / r
        assert field.bending([[x, y, z]])[0] == pytest.approx(np.mean(bz - z / r * br * ahead), rel=1e-9)


def test_events_of_the_challenge_have_the_field_that_was_measured_in_them():
    volume, layer = np.array([8, 9]), np.array([2, 4])
    assert detector.field_of({"source": "trackml"}, volume, layer) is detector.challenge_field()
    assert detector.field_of({"source": "simulate"}, volume, layer) is detector.geometry().field
    assert detector.field_of({"source": "trackml"}, volume + 50, layer).to_json() == 2.0
    assert detector.field_of({"source": "trackml", "field": 3.0}, volume, layer).to_json() == 3.0


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
    (tmp_path / "radial").mkdir()
    radial = written(tmp_path / "radial", [f"{r} {z} {60 * r / 100} 2" for r in (0, 100) for z in (0, 100)])
    for text in (str(LARGEST + 1), "nan", "2000", radial, written(tmp_path, ["0 2000", "1 2000"])):
        with pytest.raises(Problem, match="largest component"):
            read_field(text)
    with pytest.raises(Problem, match="no number, and no file"):
        read_field("2 T")
