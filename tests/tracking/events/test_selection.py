"""Selections of hits: whole volumes, and hits of particles that pass by the truth."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from domainpar.common.problems import Problem
from domainpar.tracking.events.selection import Selection
from domainpar.tracking.events.simulate import simulate_event

HITS = simulate_event(3, 2000)


@pytest.mark.parametrize(
    "selection", [Selection((8, 9)), Selection(None, {"pt": [1.0, np.inf]}), Selection((8,), {"pt": [0.9, 2]})]
)
def test_the_hits_that_pass_are_kept_in_order_and_particles_count_them(selection):
    kept = selection.select(HITS)
    momentum = np.concatenate([[np.nan], HITS.particles.pt])[HITS.particle_id]
    wanted = np.ones(len(HITS), bool)
    if selection.volumes is not None:
        wanted &= np.isin(HITS.volume, selection.volumes)
    if selection.hard_cuts is not None:
        low, high = selection.hard_cuts["pt"]
        wanted &= (momentum >= low) & (momentum <= high)  # noise has no momentum
    assert 0 < wanted.sum() < len(HITS)
    for name in ("hit_id", "position", "volume", "layer", "module", "particle_id"):
        np.testing.assert_array_equal(getattr(kept, name), getattr(HITS, name)[wanted])
    assert kept.weight.sum() == pytest.approx(1)
    np.testing.assert_allclose(kept.weight, HITS.weight[wanted] / HITS.weight[wanted].sum())
    counts = np.bincount(kept.particle_id, minlength=len(HITS.particles.nhits) + 1)[1:]
    np.testing.assert_array_equal(kept.particles.nhits, counts)
    np.testing.assert_array_equal(kept.particles.pt, HITS.particles.pt)


def test_lost_hits_are_a_share_of_them_by_seed_and_event_and_particles_count_those_left():
    lossy = Selection(hit_inefficiency=0.1, seed=4)
    kept = lossy.select(HITS)
    assert 0.08 < 1 - len(kept) / len(HITS) < 0.12
    np.testing.assert_array_equal(kept.hit_id, lossy.select(HITS).hit_id)
    for other in (
        Selection(hit_inefficiency=0.1, seed=5).select(HITS),
        lossy.select(replace(HITS, event_id="another")),
    ):
        assert not np.array_equal(np.isin(HITS.hit_id, other.hit_id), np.isin(HITS.hit_id, kept.hit_id))
    counts = np.bincount(kept.particle_id, minlength=len(HITS.particles.nhits) + 1)[1:]
    np.testing.assert_array_equal(kept.particles.nhits, counts)
    assert lossy.settings == {"hit_inefficiency": [0.1, 4]}
    # Of the volumes as well, and the same hits of them.
    both = Selection((8,), hit_inefficiency=0.1, seed=4).select(HITS)
    np.testing.assert_array_equal(both.hit_id, kept.hit_id[kept.volume == 8])


def test_no_selection_keeps_the_event_and_no_setting():
    assert Selection().select(HITS) is HITS
    assert Selection().settings == {}
    assert Selection((7,), {"pt": [1, 2]}).settings == {"volumes": [7], "hard_cuts": {"pt": [1, 2]}}


@pytest.mark.parametrize(
    ("selection", "hits", "message"),
    [
        (Selection((99,)), HITS, r"no hit of 2,\d+ is kept; its volumes are 7, 8, 9"),
        (Selection(None, {"pt": [1e6, 2e6]}), HITS, "no hit of"),
        (Selection(None, {"pt": [1, 2]}), replace(HITS, particle_id=None), "--hard-cuts need true particles"),
        (Selection(None, {"pt": [1, 2]}), replace(HITS, particles=None), "--hard-cuts need true particles"),
    ],
)
def test_selections_that_leave_nothing_or_need_what_is_not_there_are_refused(selection, hits, message):
    with pytest.raises(Problem, match=message):
        selection.select(hits)


def test_an_event_without_hits_stays_one():
    names = ("hit_id", "position", "volume", "layer", "module", "particle_id", "weight")
    none = replace(HITS, **{name: getattr(HITS, name)[:0] for name in names})
    assert len(Selection((8,), {"pt": [1, 2]}).select(none)) == 0
