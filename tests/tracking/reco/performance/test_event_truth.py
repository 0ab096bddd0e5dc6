"""Truth is read from a store in the user's order of hits, with the borders that naive mode would cut along."""

from dataclasses import replace

import numpy as np
import pytest
from drawn_tracks import drawn, table
from random_events import random_assignment, random_event

from domainpar.tracking.events import detector
from domainpar.tracking.events.construct import Cuts, build_graph
from domainpar.tracking.events.simulate import simulate_event
from domainpar.tracking.events.store import StoredEvent, event_file_name, write_event
from domainpar.tracking.events.truth_order import rows_of_table
from domainpar.tracking.part_loading import sector_of_tiles
from domainpar.tracking.reco.performance.counts import count_tracks
from domainpar.tracking.reco.performance.matching import TrackCuts
from domainpar.tracking.reco.performance.truth import distance_to_other_sectors, production_vertices, truth_of

NUM_TILES = 12


def stored(directory, graph, num_tiles=NUM_TILES):
    assignment = random_assignment(3, graph.num_nodes, num_tiles)
    path = directory / event_file_name(graph.hits.event_id)
    write_event(path, graph, assignment, num_tiles)
    return StoredEvent(path), assignment


def test_truth_comes_in_the_users_order(tmp_path):
    graph = random_event(1, 150, 700)
    event, _ = stored(tmp_path, graph)
    truth = truth_of(event)
    for name in ("particle_id", "weight", "position"):
        assert np.array_equal(getattr(truth, name), getattr(graph.hits, name)), name
    assert np.array_equal(truth.particles.pt, graph.hits.particles.pt)
    pairs = list(zip(graph.hits.volume.tolist(), graph.hits.layer.tolist(), strict=True))
    assert len(set(zip(truth.surface.tolist(), pairs, strict=True))) == len(set(pairs)) == len(set(truth.surface))
    assert (truth.border, truth.border_sectors) == (None, None)


@pytest.mark.parametrize("num_sectors", [1, 3, 40])
def test_borders_are_those_between_the_sectors_of_naive_mode(tmp_path, num_sectors):
    graph = random_event(1, 150, 700)
    event, tile_of_hit = stored(tmp_path, graph)
    truth = truth_of(event, num_sectors)
    sector = sector_of_tiles(event, num_sectors)[tile_of_hit]
    assert np.array_equal(truth.border, distance_to_other_sectors(graph.hits.position, sector))
    assert np.isinf(truth.border).all() == (num_sectors == 1)
    assert truth.border_sectors == num_sectors


def test_what_the_source_does_not_tell_is_none(tmp_path):
    assert truth_of(stored(tmp_path, random_event(1, labels=False))[0]) is None
    graph = random_event(2, positions=False)
    truth = truth_of(stored(tmp_path, replace(graph, hits=replace(graph.hits, weight=None, particles=None)))[0], 3)
    assert (truth.position, truth.border, truth.weight, truth.particles) == (None, None, None, None)
    assert np.array_equal(truth.particle_id, graph.hits.particle_id)
    assert len(truth_of(stored(tmp_path, random_event(3, 0, 0), 1)[0], 3)) == 0


def test_the_field_is_that_of_trackml_on_its_layers_only(tmp_path):
    graph = build_graph(simulate_event(1, 100), Cuts())
    assert truth_of(stored(tmp_path, graph)[0]).field is detector.geometry().field
    assert truth_of(stored(tmp_path, random_event(1, 150, 700))[0]).field.to_json() == 2.0


def test_particles_are_looked_up_by_id_and_unknown_where_no_table_lists_them(tmp_path):
    truth = truth_of(stored(tmp_path, random_event(1, 150, 700))[0])
    ids = np.array([7, 8, 2**40 + 1, 2**60])
    rows = [truth.particles.particle_id.tolist().index(i) for i in (7, 2**40 + 1, 2**60)]
    assert rows_of_table(truth.particles, ids, "pt")[[0, 2, 3]].tolist() == truth.particles.pt[rows].tolist()
    assert np.isnan(rows_of_table(truth.particles, ids, "pt")[1])
    assert production_vertices(truth, ids)[[0, 2, 3]].tolist() == truth.particles.vertex[rows].tolist()
    assert production_vertices(truth, ids)[1].tolist() == [0, 0, 0]
    without = replace(truth, particles=None)
    assert np.isnan(rows_of_table(without.particles, ids, "pt")).all()
    assert without.targets_among(ids, {}).all()
    assert truth.targets_among(ids, {"particle_id": ["in", [7, 8]]}).tolist() == [True, False, False, False]


def test_a_target_has_its_hits_in_the_event_whatever_its_table_counts():
    track_id, truth = drawn("aaaaabbbb....", "0000011112222")
    truth = replace(truth, particles=table([1, 2, 3], [3, 5, 9]))
    assert truth.targets_among(np.array([1, 2, 3]), {"nhits": [5, np.inf]}).tolist() == [True, False, False]
    of_style = count_tracks(track_id, truth, TrackCuts(min_hits=3)).styles["atlas"]
    assert (of_style.targets, of_style.reconstructed) == (1, 1)
