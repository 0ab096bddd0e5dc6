"""Surfaces of a file: what the CKF does with them, and which files are refused."""

import csv
from dataclasses import replace

import numpy as np
import pytest
from test_ckf import matches

from domainpar.common.problems import Problem
from domainpar.tracking.events import detector
from domainpar.tracking.events.construct import Cuts
from domainpar.tracking.events.graph import surface_numbers
from domainpar.tracking.events.preparation import prepare
from domainpar.tracking.events.simulate import simulate_event
from domainpar.tracking.events.sources import DetectorConditions, open_source
from domainpar.tracking.events.store import EventStore
from domainpar.tracking.events.surfaces import SurfaceRow, learned_surfaces, read_surfaces
from domainpar.tracking.reco.ckf.detector_layout import layout_of, trackml
from domainpar.tracking.reco.ckf.extending import extend_tracks
from domainpar.tracking.reco.ckf.finder import find_tracks
from domainpar.tracking.reco.hit_table import TrackHits
from domainpar.tracking.reco.perigee import fit_perigees

SHIFT = 20


def rows_of_trackml(shift=SHIFT):
    """The TrackML detector as somebody else would describe it, with other numbers of volumes."""
    rows = []
    for surface in detector.SURFACES:
        errors = surface.sensor.pitch_u / 12**0.5, surface.sensor.pitch_v / 12**0.5
        seeds, kind = int(surface.volume < 10), "barrel" if surface.is_barrel else "disk"
        place = surface.coordinate, *surface.extent
        rows.append(SurfaceRow(surface.volume + shift, surface.layer, kind, *place, *errors, seeds))
    return rows


def written(path, rows, names=SurfaceRow._fields):
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerows([names, *rows])
    return path


def assert_same_surfaces(layout):
    """Those of TrackML, but for the sensors, which a file does not tell; a slanted flight passes more of them."""
    for name in ("is_barrel", "coordinate", "low", "high", "var_u", "var_v"):
        np.testing.assert_allclose(layout.places[name], trackml().places[name])
    assert (layout.places["material"] == detector.MATERIAL).all()
    assert layout.places["by_angle"].all()
    assert not layout.places["thickness"].any()


def test_a_detector_with_other_numbers_gives_the_tracks_that_it_gives_with_trackmls(tmp_path):
    rows = read_surfaces(written(tmp_path / "surfaces.csv", rows_of_trackml()))
    layout, event = layout_of({"surfaces": [list(row) for row in rows]}), simulate_event(4, 6000)
    columns = event.position, event.volume + SHIFT, event.layer, event.module
    found = find_tracks(TrackHits.of(*columns, layout=layout))
    usual = find_tracks(TrackHits.of(event.position, event.volume, event.layer, event.module))
    # Neighbours are those that lines from the beam cross, more than the measured ones: the same tracks but a few.
    mine, yours = (len(np.unique(matches(tracks, event)[1])) for tracks in (found, usual))
    assert abs(mine - yours) < 0.02 * yours
    assert_same_surfaces(layout)
    np.testing.assert_array_equal(layout.ways, trackml().ways)
    with pytest.raises(ValueError, match="volume 7 layer 2, which is no surface of --surfaces"):
        find_tracks(TrackHits.of(event.position, event.volume, event.layer, event.module, layout=layout))


def test_tracks_are_extended_through_the_surfaces_of_the_file():
    layout, event = layout_of({"surfaces": [list(row) for row in rows_of_trackml()]}), simulate_event(5, 3000)
    begun = find_tracks(TrackHits.of(event.position, event.volume, event.layer, event.module))
    begun[::4] = -1
    extended = []
    for shift, of in ((0, None), (SHIFT, layout)):
        surface = surface_numbers(event.volume + shift, event.layer)
        hits = TrackHits(event.position, surface, event.module, detector.geometry().field, of)
        extended.append(extend_tracks(begun, hits, 3))
    # Modules are turned in their surfaces, which a file does not tell.
    assert np.mean((extended[0] >= 0) == (extended[1] >= 0)) > 0.97
    assert (extended[0] >= 0).sum() > (begun >= 0).sum()


def test_surfaces_learned_from_hits_lead_to_the_tracks_that_the_true_ones_do():
    event = simulate_event(4, 12_000)
    columns = event.position, event.volume + SHIFT, event.layer, event.module
    count = []
    for settings in (
        {"surfaces": [list(row) for row in rows_of_trackml()]},
        learned_surfaces([replace(event, volume=event.volume + SHIFT)]),
    ):
        count.append(len(np.unique(matches(find_tracks(TrackHits.of(*columns, layout=layout_of(settings))), event)[1])))
    assert count[1] > 0.97 * count[0]


@pytest.mark.parametrize("kind", ["barrel", "disk"])
def test_surfaces_that_the_hits_do_not_lie_on_are_refused(kind):
    event = simulate_event(5, 3000)
    rows = [row._replace(place=row.place + 40 * (row.kind == kind)) for row in rows_of_trackml(0)]
    columns, layout = (event.position, event.volume, event.layer, event.module), layout_of({"surfaces": rows})
    with pytest.raises(ValueError, match=r"lie (3[4-9]|4[0-6])[.\d]* mm from .*prepare --surfaces FILE"):
        find_tracks(TrackHits.of(*columns, layout=layout))
    hits = TrackHits(*columns[:1], surface_numbers(event.volume, event.layer), event.module, 2.0, layout)
    with pytest.raises(ValueError, match="prepare --overwrite"):
        extend_tracks(np.full(len(event), -1), hits, 3)
    # Fits of tracks ask for no place.
    particle = np.unique(event.particle_id, return_inverse=True)[1] - 1  # noise is the first
    assert np.isfinite(fit_perigees(hits, particle, int(particle.max()) + 1).value).mean() > 0.5


def test_one_hit_in_a_hundred_may_lie_elsewhere():
    position, volume, layer = np.tile([32.0, 0.0, 0.0], (2000, 1)), np.full(2000, 8), np.full(2000, 2)
    position[:20, 0] += 31
    assert trackml().surface_of(volume, layer, position).any()
    position[20, 0] += 31
    with pytest.raises(ValueError, match="volume 8 layer 2 .* 21 of 2000 more than 30 mm"):
        trackml().surface_of(volume, layer, position)


def test_the_store_keeps_the_surfaces(tmp_path):
    rows = rows_of_trackml(0)
    source = open_source("simulate", num_events=1, num_hits=800, cuts=Cuts())
    assert "surfaces" not in source.settings
    files = tmp_path / "files"
    files.mkdir()
    hits = simulate_event(1, 800)
    elsewhere = hits.position + np.array([0, 0, 50])  # where `prepare` would learn others
    table = np.column_stack([hits.hit_id, elsewhere, hits.volume, hits.layer, hits.module])
    heading = "hit_id,x,y,z,volume_id,layer_id,module_id"
    np.savetxt(files / "event000000001-hits.csv", table, "%.9g", ",", header=heading, comments="")
    prepare(open_source("trackml", directory=files, conditions=DetectorConditions(surfaces=rows)), tmp_path / "store")
    store = EventStore(tmp_path / "store")
    assert [SurfaceRow(*row) for row in store.settings["surfaces"]] == rows
    assert_same_surfaces(layout_of(store.settings))


ROW = SurfaceRow(1, 2, "barrel", 30.0, -500.0, 500.0, 0.01, 0.1, 1)
OTHERS = [ROW._replace(layer=4, place=70.0), ROW._replace(layer=6, kind="disk", place=900.0, low=40.0)]


@pytest.mark.parametrize(
    ("row", "what"),
    [
        (ROW._replace(kind="plane"), "kind is 'plane'"),
        (ROW._replace(place=0.0), "the radius is 0"),
        (ROW._replace(low=500.0), "reaches from 500 to 500"),
        (ROW._replace(kind="disk"), "reaches from -500"),
        (ROW._replace(sigma_v=0.0), "errors are 0.01 and 0"),
        (ROW._replace(high=float("nan")), "not finite"),
        (ROW._replace(seeds=2), "seeds is 2"),
        (ROW._replace(material=2.0), "material is 2 radiation lengths"),
        (ROW._replace(layer=4), "volume 1 layer 4 is there twice"),
        (ROW._replace(volume="a"), "invalid literal"),
        (ROW[:5], "line 4: "),
    ],
)
def test_an_impossible_surface_is_refused_with_its_line(tmp_path, row, what):
    path = written(tmp_path / "surfaces.csv", [*OTHERS, row])
    with pytest.raises(Problem, match=what) as refused:
        read_surfaces(path)
    assert "line 4" in str(refused.value)
    assert "surfaces.csv" in str(refused.value)


def test_material_may_be_left_out(tmp_path):
    path = written(tmp_path / "surfaces.csv", [row[:-1] for row in (ROW, *OTHERS)], SurfaceRow._fields[:-1])
    assert read_surfaces(path) == [ROW, *OTHERS]
    stored = layout_of({"surfaces": [list(row[:-1]) for row in (ROW, *OTHERS)]})  # as earlier versions wrote them
    assert stored.places["material"].tolist() == [detector.MATERIAL] * 3


def test_files_without_surfaces_are_refused(tmp_path):
    for path, what in (
        (tmp_path / "none.csv", "cannot be read"),
        (written(tmp_path / "few.csv", OTHERS), "2 surfaces"),
        (written(tmp_path / "names.csv", [ROW, *OTHERS], ("volume", "layer", "type", *SurfaceRow._fields[3:])), "kind"),
    ):
        with pytest.raises(Problem, match=what):
            read_surfaces(path)
