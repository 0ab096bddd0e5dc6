"""The TrackML detector as numbers."""

import numpy as np
import pytest

from domainpar.tracking.events.detector import (
    DEFAULT_LAYER_PAIRS,
    KNOWN_LAYERS,
    SEED_LAYER_PAIRS,
    SURFACES,
    crossed_in_turn,
    geometry,
)

MIRROR_VOLUME = {7: 9, 9: 7, 12: 14, 14: 12, 16: 18, 18: 16}


def mirrored(layer: tuple[int, int]) -> tuple[int, int]:
    """The layer at -z of one at z; disks of both ends count towards +z."""
    volume, number = layer
    if volume not in MIRROR_VOLUME:
        return layer
    return MIRROR_VOLUME[volume], (16 if volume in (7, 9) else 14) - number


def test_the_detector_has_48_surfaces_and_18728_modules_in_order():
    modules = geometry().modules
    assert len(SURFACES) == len(KNOWN_LAYERS) == len(geometry().surfaces) == 48
    assert len(modules) == 18_728
    order = np.lexsort((modules["module"], modules["layer"], modules["volume"]))
    np.testing.assert_array_equal(order, np.arange(len(modules)))


@pytest.mark.parametrize(
    ("volume", "layer", "count"), [(8, 2, 224), (8, 8, 1092), (13, 8, 2142), (17, 4, 3192), (9, 2, 108), (16, 2, 98)]
)
def test_surfaces_have_the_published_number_of_modules(volume, layer, count):
    modules = geometry().modules
    assert np.sum((modules["volume"] == volume) & (modules["layer"] == layer)) == count


def test_every_module_has_a_right_handed_frame():
    modules = geometry().modules
    np.testing.assert_allclose(np.cross(modules["u_axis"], modules["v_axis"]), modules["normal"], atol=1e-12)
    for axis in ("u_axis", "v_axis", "normal"):
        np.testing.assert_allclose(np.linalg.norm(modules[axis], axis=1), 1.0, atol=1e-12)


def test_modules_of_a_group_follow_its_record():
    table = geometry()
    for group in table.groups:
        last = group["first_module"] + group["num_rows"] * group["num_phi"] - 1
        ends = table.modules[[group["first_module"], last]]
        assert ends["volume"][0] == ends["volume"][1]
        assert ends["layer"][0] == ends["layer"][1]
        radius = np.hypot(ends["centre"][:, 0], ends["centre"][:, 1])
        along = radius if group["is_barrel"] else ends["centre"][:, 2]
        assert np.abs(along - group["coordinate"]).max() < 6.0


def test_disk_layers_count_from_the_most_negative_z():
    z = {(surface.volume, surface.layer): surface.coordinate for surface in SURFACES if not surface.is_barrel}
    assert z[7, 2] == -1500
    assert z[7, 14] == -600
    assert z[9, 2] == 600
    assert z[18, 12] == 2950
    assert all(z[mirrored(layer)] == -z[layer] for layer in z)


def test_seed_layer_pairs_are_the_50_measured_ones_made_symmetric_in_z():
    assert len(SEED_LAYER_PAIRS) == len(set(SEED_LAYER_PAIRS)) == 52
    assert {(mirrored(a), mirrored(b)) for a, b in SEED_LAYER_PAIRS} == set(SEED_LAYER_PAIRS)


def test_default_layer_pairs_are_those_that_straight_lines_cross_in_turn_and_hold_all_measured_ones():
    assert len(DEFAULT_LAYER_PAIRS) == len(set(DEFAULT_LAYER_PAIRS)) == 110
    assert set(SEED_LAYER_PAIRS) <= set(DEFAULT_LAYER_PAIRS) < set(crossed_in_turn(skipped=1))
    assert {(mirrored(a), mirrored(b)) for a, b in DEFAULT_LAYER_PAIRS} == set(DEFAULT_LAYER_PAIRS)
    assert {layer for pair in DEFAULT_LAYER_PAIRS for layer in pair} == KNOWN_LAYERS


def test_layers_that_are_skipped_lie_between():
    assert ((8, 2), (8, 6)) in set(crossed_in_turn(skipped=1)) - set(DEFAULT_LAYER_PAIRS)
    assert ((8, 2), (8, 8)) in set(crossed_in_turn(skipped=2)) - set(crossed_in_turn(skipped=1))


def test_the_field_is_2_tesla_at_the_centre_and_falls_to_the_ends():
    field = geometry().field
    z, (bz,) = field.z_first + field.z_step * np.arange(121), field.bz
    assert bz[z == 0][0] == 2.005
    assert np.all(np.diff(bz[z <= 0]) > 0)
    assert np.all(np.diff(bz[z >= 0]) < 0)
    assert (z[0], field.z_step, len(bz), field.br.any()) == (-3000.0, 50.0, 121, False)
