"""Surfaces that are learned from hits: those of a detector that the test draws, or moves, and never TrackML's."""

from dataclasses import replace

import numpy as np
import pytest
from test_preparation import files, on_ranks, prepared, source_of

from domainpar.tracking.events import detector
from domainpar.tracking.events.graph import Hits
from domainpar.tracking.events.preparation import prepare
from domainpar.tracking.events.simulate import simulate_event
from domainpar.tracking.events.sources import open_source
from domainpar.tracking.events.store import EventStore
from domainpar.tracking.events.surfaces import SurfaceRow, described_surfaces, learned_surfaces
from domainpar.tracking.reco.ckf.detector_layout import layout_of

CYLINDERS = {(1, 3): 25.0, (1, 5): 55.0, (1, 9): 95.0, (4, 1): 300.0, (4, 2): 500.0, (4, 3): 700.0}
"""Radius by (volume, layer); all reach to 400 mm at either end."""

DISKS = {(2, 1): (-450.0, 20.0, 180.0), (3, 1): (450.0, 20.0, 180.0), (6, 4): (900.0, 250.0, 800.0)}
"""z, inner and outer radius."""


def toy(seed, per_layer=300, event_id="0"):
    """Hits everywhere on the surfaces, within 3 mm of them; of those of volume 1 errors are known."""
    rng, parts, layers = np.random.default_rng(seed), [], []
    for layer, place in {**CYLINDERS, **DISKS}.items():
        off, phi = rng.uniform(-3, 3, per_layer), rng.uniform(-np.pi, np.pi, per_layer)
        if layer in CYLINDERS:
            r, z = place + off, rng.uniform(-400, 400, per_layer)
        else:
            r, z = rng.uniform(*place[1:], per_layer), place[0] + off
        parts.append(np.stack([r * np.cos(phi), r * np.sin(phi), z], axis=1))
        layers += [layer] * per_layer
    order = rng.permutation(len(layers))
    volume, layer = np.array(layers, np.int32)[order].T
    measured = np.full((len(order), 8), np.nan, np.float32)
    measured[volume == 1, 6:] = rng.uniform((0.009, 0.045), (0.011, 0.055), (np.sum(volume == 1), 2))
    position = np.concatenate(parts)[order].astype(np.float32)
    return Hits(event_id, np.arange(len(order)), position, volume, layer, np.zeros_like(layer), measured=measured)


def test_cylinders_and_disks_are_found_where_the_hits_lie():
    learned = learned_surfaces([toy(1), toy(2)])
    assert learned["surfaces_learned"] == {"events": 2, "told": 3}
    rows = {row[:2]: row for row in (SurfaceRow(*row) for row in learned["surfaces"])}
    assert set(rows) == {*CYLINDERS, *DISKS}
    for layer, row in rows.items():
        assert row.wrong() is None
        assert row.kind == ("barrel" if layer in CYLINDERS else "disk")
        place, *reach = (CYLINDERS[layer], -400, 400) if layer in CYLINDERS else DISKS[layer]
        assert row.place == pytest.approx(place, abs=1)
        assert [row.low, row.high] == pytest.approx(reach, abs=10)
        assert row.seeds == (layer[0] in (1, 2, 3))
        errors = (0.01, 0.05) if layer[0] == 1 else (0.0144, 0.0162) if row.seeds else (0.0231, 0.3464)
        assert [row.sigma_u, row.sigma_v] == pytest.approx(errors, rel=0.05)
        assert row.material == detector.MATERIAL


def test_an_error_of_a_strip_that_measures_one_axis_is_that_of_its_length():
    hits = toy(3)
    hits.measured[:, 6:] = 0.02, np.inf
    row = SurfaceRow(*learned_surfaces([hits])["surfaces"][0])
    assert row.sigma_u == pytest.approx(0.02)
    assert row.sigma_v == pytest.approx((row.high - row.low) / 12**0.5)


def test_nothing_is_learned_where_hits_lie_on_trackmls_surfaces_or_on_none():
    hits = simulate_event(3, 3000)
    assert learned_surfaces([hits]) == {}
    assert learned_surfaces([replace(hits, position=None)]) == {}
    assert learned_surfaces([replace(hits, volume=0 * hits.volume, layer=0 * hits.layer)]) == {}
    clouds = np.random.default_rng(0).normal(0, 300, (len(hits), 3)).astype(np.float32)
    assert learned_surfaces([replace(hits, position=clouds)]) == {}
    # The same surfaces with another number, or one of them elsewhere, are another detector.
    assert len(learned_surfaces([replace(hits, volume=hits.volume + 1)])["surfaces"]) > 40
    moved = hits.position.copy()
    moved[(hits.volume == 9) & (hits.layer == 2), 2] += 20
    learned = {tuple(row[:2]): row for row in learned_surfaces([replace(hits, position=moved)])["surfaces"]}
    assert learned[9, 2][3] == pytest.approx(620, abs=3)
    assert learned[8, 2][3] == pytest.approx(32, abs=2)
    assert [learned[9, 2][8], learned[13, 2][8]] == [1, 0]
    assert learned[17, 2][6:8] == pytest.approx([0.12 / 12**0.5, 10.8 / 12**0.5], rel=0.01)


@pytest.mark.parametrize("size", [1, 3])
def test_a_store_learns_the_same_surfaces_on_any_number_of_ranks_and_keeps_them(tmp_path, size):
    read = []
    source = source_of(surveyed=lambda name: read.append(name) or toy(int(name), 1000))
    stores = on_ranks(size, lambda ranks: prepared(source, tmp_path / "many", ranks=ranks))
    assert read == ["000", "001", "002"]  # of nine layers with a thousand hits: until there are 20,000
    expected = learned_surfaces([toy(i, 1000) for i in range(3)])
    assert {name: stores[0].settings[name] for name in expected} == expected
    prepared(source, tmp_path / "one")
    assert files(tmp_path / "one") == files(tmp_path / "many")
    more = source_of(6, surveyed=lambda name: toy(int(name) + 9, 1000))
    assert prepared(more, tmp_path / "one").settings == stores[0].settings
    anew = prepared(more, tmp_path / "one", overwrite=True).settings["surfaces"]
    assert anew == learned_surfaces([toy(i + 9, 1000) for i in range(3)])["surfaces"]


def test_surfaces_of_colliderml_lie_where_its_layers_do_and_measure_as_its_true_positions_say(tmp_path):
    pytest.importorskip("pyarrow", reason="pyarrow is not installed (pip install '.[parquet]')")
    from collider_files import write_sample

    from domainpar.tracking.events.colliderml import BARREL_RADII, CODE_OF_VOLUME, DISK_Z

    def measure(number, hits, particles):
        rng = np.random.default_rng(number)
        true = np.stack([hits[axis] for axis in "xyz"], axis=1).astype(np.float64)
        hits.update({f"true_{axis}": true[:, i].copy() for i, axis in enumerate("xyz")})
        out = true[:, :2] / np.hypot(*true[:, :2].T)[:, None]
        barrel = np.isin(hits["volume_id"], (17, 24, 29))
        u, v = rng.normal(0, 0.02, len(true)), rng.normal(0, 0.3, len(true))
        true[:, :2] += u[:, None] * np.stack([-out[:, 1], out[:, 0]], axis=1) + np.where(barrel, 0, v)[:, None] * out
        true[:, 2] += np.where(barrel, v, 0)
        hits.update({axis: true[:, i].astype(np.float32) for i, axis in enumerate("xyz")})

    write_sample(tmp_path / "files", 2, 6000, change=measure)
    source = open_source("colliderml", directory=tmp_path / "files")
    store = prepare(source, tmp_path / "store")
    rows = [SurfaceRow(*row) for row in EventStore(store.path).settings["surfaces"]]
    assert store.settings["surfaces_learned"] == {"events": 2, "told": len(rows)}
    kinds = [row.kind for row in rows]
    assert len(rows) > 40
    line = described_surfaces(store.settings["surfaces"], store.settings["surfaces_learned"])
    assert f"{kinds.count('barrel')} cylinders and {kinds.count('disk')} disks" in line
    assert "--surfaces FILE" in line
    with store.open(store.records[0]) as event:
        columns = [event.read_nodes(name, np.arange(event.num_nodes)) for name in ("volume", "layer", "position")]
    layout_of(store.settings).surface_of(*columns)
    with pytest.raises(ValueError, match=r"lie (7|8)\d[.\d]* mm from where the TrackML detector has their surface"):
        layout_of({"source": "colliderml"}).surface_of(*columns)
    for row in rows:
        code = CODE_OF_VOLUME[row.volume]
        places = BARREL_RADII[code] if row.kind == "barrel" else DISK_Z[code]
        assert row.place == pytest.approx(places[row.layer // 2 - 1], abs=4)
        assert row.seeds == (row.volume in (7, 8, 9))
    errors = np.array([(row.sigma_u, row.sigma_v) for row in rows])
    assert np.median(errors, axis=0) == pytest.approx((0.02, 0.3), rel=0.1)
