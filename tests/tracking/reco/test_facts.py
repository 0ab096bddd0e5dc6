"""What `prepare` says of the values of events: units, detectors and truth that cannot be right are named, once."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from types import SimpleNamespace

import numpy as np
import pytest
from marks import fault
from random_events import random_event
from small_run import ODD, drawn, simulated, write_store

from domainpar.tracking.events.construct import Cuts, build_graph
from domainpar.tracking.events.detector import DEFAULT_LAYER_PAIRS, GEV_PER_TESLA_MM
from domainpar.tracking.events.field import Field
from domainpar.tracking.events.graph import Hits, Particles
from domainpar.tracking.events.simulate import simulate_event
from domainpar.tracking.reco.facts import EventFacts, described, facts_of
from domainpar.tracking.reco.performance.lost import count_segments
from domainpar.tracking.reco.performance.matching import DEFAULT_TARGET
from domainpar.tracking.reco.performance.truth import EventTruth, truth_of

SETTINGS = {"source": "trackml", "layer_pairs": json.loads(json.dumps(DEFAULT_LAYER_PAIRS))}


def looked_at(graph) -> EventFacts:
    """The facts as they come from another rank."""
    facts = facts_of(graph.hits, graph.edge_index, graph.label)
    return EventFacts(**json.loads(json.dumps(asdict(facts), allow_nan=False)))


def joined(change, seed=1):
    """A simulated event whose hits were changed before they were joined."""
    return build_graph(change(simulate_event(seed, 2000, f"{seed:03d}")), Cuts())


def warnings(*graphs, settings=SETTINGS):
    """Those but that of few segments, which many mistakes lead to."""
    lines = described([looked_at(one) for one in graphs], settings)
    return [line for line in lines if line.startswith("WARNING") and "no network finds them" not in line]


def moved(change):
    """Hits at other places."""
    return lambda hits: replace(hits, position=change(hits.position.astype(np.float64)).astype(np.float32))


def beam_elsewhere(hits):
    off = np.float32([1.0, -0.5, 0.0])
    return with_particles(replace(hits, position=hits.position + off), vertex=hits.particles.vertex + off)


def of_another_event(hits):
    other = simulate_event(2, 2000).particles
    return replace(hits, particles=replace(other, particle_id=np.arange(1, len(other.particle_id) + 1)))


def gun(tesla, beam=(0.0, 0.0)):
    """100 particles of 1 to 100 GeV in a field along z, on layers that are not TrackML's."""
    rng, numbers = np.random.default_rng(0), np.repeat(np.arange(1, 101), 8)
    pt, phi, slope = rng.uniform(1, 100, 100), rng.uniform(-3, 3, 100), rng.normal(size=100)
    charge = rng.choice([-1, 1], 100)
    s = np.tile(np.linspace(30, 1000, 8), 100)  # along a circle from the beam line, positive charges to the right
    k, start = (-charge * GEV_PER_TESLA_MM * tesla / pt)[numbers - 1], phi[numbers - 1]
    x, y = (np.sin(start + k * s) - np.sin(start)) / k, (np.cos(start) - np.cos(start + k * s)) / k
    hits = Hits.bare(
        "gun", np.arange(800), np.column_stack([x + beam[0], y + beam[1], slope[numbers - 1] * s]).astype(np.float32)
    )
    momenta = {"px": pt * np.cos(phi), "py": pt * np.sin(phi), "pz": pt * slope, "charge": charge}
    table = momenta | {"vx": np.full(100, beam[0]), "vy": np.full(100, beam[1]), "vz": np.zeros(100)}
    particles = Particles.from_table(np.arange(1, 101), table, numbers)
    layer = np.tile(np.arange(8, dtype=np.int32), 100)
    return replace(hits, particle_id=numbers, particles=particles, volume=layer + 100, layer=layer)


def with_particles(hits, **changed):
    return replace(hits, particles=replace(hits.particles, **changed))


def on_beam(hits):
    position = hits.position.copy()
    position[:3, :2] = 0
    return replace(hits, position=position)


def far_away(hits):
    position = hits.position.copy()
    position[0, 0] = 1e9
    return replace(hits, position=position)


def without_rows(hits):
    """As the reader of TrackML leaves it: particles that are not listed are appended as unknown."""
    pt = hits.particles.pt.copy()
    pt[np.isin(hits.particles.particle_id, np.unique(hits.particle_id[hits.particle_id != 0])[:4])] = np.nan
    return with_particles(hits, pt=pt)


def without_truth(hits):
    return replace(hits, particle_id=None, particles=None, weight=None)


ABSURD = {
    "cm": (
        lambda hits: replace(hits, position=hits.position / 10),
        ["positions look like cm, not mm, in 1 of 1 event (first: 001, hits at 0.1 times the places of their TrackML"],
    ),
    "m": (
        lambda hits: replace(hits, position=hits.position / 1000),
        ["positions look like m, not mm, in 1 of 1 event"],
    ),
    "another detector with the same numbers": (
        lambda hits: replace(hits, position=hits.position * 3),
        ["hits are not where TrackML's layers are in 1 of 1 event (first: 001, hits at 3 times"],
    ),
    "one hit at the end of the world": (far_away, ["hits beyond 10 m in 1 of 1 event (first: 001, 1 of "]),
    "all at one point": (
        lambda hits: replace(hits, position=np.full_like(hits.position, 40)),
        ["all hits at one point in 1 of 1 event (first: 001)", "no candidate edge in 1 of 1 event (first: 001)"],
    ),
    "on the beam": (on_beam, ["hits on the beam line, x = y = 0, in 1 of 1 event (first: 001, 3 of "]),
    "all noise": (
        lambda hits: replace(hits, particle_id=np.zeros(len(hits), np.int64)),
        ["all hits noise in 1 of 1 event (first: 001)"],
    ),
    "MeV": (
        lambda hits: with_particles(hits, pt=hits.particles.pt * 1000),
        ["momenta look like MeV, not GeV: fitted pT is 0.00"],
    ),
    "another field": (
        lambda hits: simulate_event(1, 2000, "001", Field.of(3.0)),
        ["fitted pT is 0.57"],
    ),
    "a beam elsewhere": (beam_elsewhere, ["tracks come from x "]),
    "vertices elsewhere": (moved(lambda p: p - np.array([3, 0, 0])), ["hits lie "]),
    "z mirrored": (
        moved(lambda p: p * [1, 1, -1]),
        ["hits do not lie as their particles fly: x, y, z of hits look like x, y, -z of the momenta"],
    ),
    "x and z swapped": (
        moved(lambda p: p[:, ::-1]),
        ["hits do not lie as their particles fly: x, y, z of hits look like z, y, x of the momenta"],
    ),
    "r and phi for x and y": (
        moved(lambda p: np.column_stack([np.hypot(p[:, 0], p[:, 1]), np.arctan2(p[:, 1], p[:, 0]), p[:, 2]])),
        ["x, y look like r, phi of hits in 1 of 1 event"],
    ),
    "particles of another event": (
        of_another_event,
        [
            "hits do not lie as their particles fly: a quarter of ",
            "momenta missing in",
            "nhits of the particle table is not",
        ],
    ),
    "slow": (
        lambda hits: with_particles(hits, pt=hits.particles.pt / 100),
        [
            "fitted pT is 100 times the true one",
            "no target particle (nhits: [5, .inf], pt: [1.0, .inf]) in 1 of 1 event",
        ],
    ),
    "rows missing": (
        without_rows,
        ["momenta missing in the particle table in 1 of 1 event (first: 001, 4 of "],
    ),
    "other nhits": (
        lambda hits: with_particles(hits, nhits=hits.particles.nhits + 1),
        ["nhits of the particle table is not the number of hits with this particle_id in 1 of 1 event (first: 001, "],
    ),
    "nothing wrong": (lambda hits: hits, []),
    "no truth": (without_truth, []),
}


@fault(22)
@pytest.mark.parametrize(("change", "expected"), ABSURD.values(), ids=ABSURD)
def test_what_cannot_be_right_is_named_with_the_values_and_what_is_right_is_not(change, expected):
    found = warnings(joined(change))
    assert len(found) == len(expected), found
    for line, text in zip(found, expected, strict=True):
        assert line.startswith(f"WARNING: {text}")


def test_an_oddity_is_said_once_for_all_events_that_show_it_and_the_first_is_named():
    odd = [joined(ABSURD["cm"][0], seed) for seed in (2, 3)]
    (line,) = warnings(joined(lambda hits: hits), *odd)
    assert line.startswith("WARNING: positions look like cm, not mm, in 2 of 3 events (first: 002, ")


@pytest.mark.parametrize(
    ("name", "expected"),
    {
        "no hits": ["no hits in"],
        "no edges": ["no candidate edge in"],
        "noise only": ["all hits noise in"],
        "one track": [],
        "no truth": [],
        "no positions": [],
    }.items(),
)
def test_odd_events_are_looked_at_without_a_scratch(name, expected):
    settings = {"source": "pyg"}  # a plain graph: where its nodes lie says nothing
    found = warnings(drawn(**ODD[name]), settings=settings)
    assert [line.removeprefix("WARNING: ")[: len(text)] for line, text in zip(found, expected, strict=True)] == expected


@pytest.mark.parametrize(("tesla", "told"), [(2.0, []), (3.0, ["3 T would make it 1, not 2 T: prepare --field 3"])])
def test_a_particle_gun_of_100_gev_is_not_taken_for_mev_and_the_field_that_fits_it_is_named(tesla, told):
    hits = gun(tesla)
    graph = SimpleNamespace(hits=hits, edge_index=np.zeros((2, 0), np.int64), label=np.zeros(0))
    found = [line for line in warnings(graph) if "no candidate edge" not in line]
    assert len(found) == len(told)
    for line, text in zip(found, told):
        assert line.endswith(text), line
        assert f"fitted pT is {2 / tesla:.3g} times the true one (median of 50 particles)" in line


@pytest.mark.parametrize(("known", "told"), [((0.0, 0.0), "1,-0.5"), ((2.0, 1.0), "3,0.5")])
def test_a_beam_beside_the_line_of_the_store_is_named_as_prepare_takes_it(known, told):
    graph = SimpleNamespace(hits=gun(2.0, (1.0, -0.5)), edge_index=np.zeros((2, 0), np.int64), label=np.zeros(0))
    found = warnings(graph, settings={"source": "acts", "beam_line": known})
    assert [line for line in found if "tracks come from x 1, y -0.5 mm" in line and line.endswith(f"-line={told}")]


def test_of_other_detectors_no_place_is_expected_and_a_tiny_one_is_still_taken_for_another_unit():
    own = {**SETTINGS, "layer_pairs": [[[8, 2], [8, 4]]]}
    (larger,) = warnings(joined(lambda hits: replace(hits, position=hits.position * 3)), settings=own)
    assert larger.startswith("WARNING: fitted pT is 1.77 times"), "three times as large a circle, in a weaker field"
    (small,) = warnings(joined(ABSURD["m"][0]), settings=own)
    assert small.startswith(
        "WARNING: positions look like cm or m, not mm, in 1 of 1 event (first: 001, no hit beyond 2.9"
    )


def test_layers_that_pairs_name_and_no_event_has_hits_on_are_named():
    own = {**SETTINGS, "layer_pairs": [[[8, 2], [8, 4]], [[8, 4], [8, 5]], [[8, 5], [9, 1]]]}
    found = warnings(joined(lambda hits: hits), joined(lambda hits: hits, 2), settings=own)
    assert found == ["WARNING: --layer-pairs names layers without a hit in any event: 8.5, 9.1"]


def test_facts_do_not_depend_on_the_order_of_hits_and_edges():
    graph = simulated(3)
    rng = np.random.default_rng(0)
    rows, edges = rng.permutation(graph.num_nodes), rng.permutation(graph.num_edges)
    place = np.argsort(rows)
    hits = replace(
        graph.hits,
        **{name: getattr(graph.hits, name)[rows] for name in ("hit_id", "position", "volume", "layer", "particle_id")},
    )
    assert facts_of(hits, place[graph.edge_index][:, edges], graph.label[edges]) == looked_at(graph)


def test_what_the_graph_holds_is_what_infer_counts(tmp_path):
    graph = simulated(1, 3000)
    store = write_store(tmp_path, [graph])
    with store.open(store.events()[0]) as event:
        expected = count_segments(truth_of(event), graph.edge_index, DEFAULT_TARGET)
    facts = looked_at(graph)
    assert (facts.segments, facts.in_graph) == (expected.segments, expected.in_graph)
    assert 0 < facts.in_graph < facts.segments
    lines = described([facts, facts], SETTINGS)
    share = f"{facts.in_graph / facts.segments:.1%} of {2 * facts.segments:,} true segments"
    end = f"{share} of target particles are candidate edges"
    assert f"segments: {end}" in lines


def test_without_a_known_pt_there_are_no_targets_and_the_ceiling_is_that_of_all_particles():
    graph = simulated(1, 3000)
    hits = replace(graph.hits, particles=None)
    facts = looked_at(replace(graph, hits=hits))
    surface = EventTruth(hits.particle_id, hits.volume.astype(np.int64) * 100 + hits.layer, position=hits.position)
    held = count_segments(surface, graph.edge_index, {})
    assert (facts.targets, facts.pt) == (None, None)
    assert (facts.segments, facts.in_graph) == (held.segments, held.in_graph)
    text = "\n".join(described([facts], SETTINGS))
    assert "particles: no pT is known, so there is no target particle" in text
    assert "true segments of particles are candidate edges" in text


def test_events_without_labels_are_counted_and_lines_have_their_numbers():
    labelled, without = simulated(1, 3000), joined(without_truth, 4)
    text = "\n".join(described([looked_at(labelled), looked_at(without)], SETTINGS))
    assert "truth of edges: none in 1 of 2 events: 004" in text
    true, edges = int(labelled.label.sum()), labelled.num_edges
    assert f"edges: {true:,} of {edges:,} candidate edges are true ({true / edges:.1%})" in text
    assert "volume 8: " in text
    assert "in 4 layers" in text
    assert "hits: radius 3" in text
    assert len(set(text.splitlines())) == len(text.splitlines())
    assert described([], SETTINGS) == []


def test_random_graphs_without_a_detector_are_described_too():
    assert described([looked_at(random_event(seed)) for seed in range(3)], {"source": "pyg"})


@pytest.mark.parametrize(("left", "warned"), [(971, False), (969, True)])
def test_a_filter_that_loses_three_percent_of_the_segments_it_was_given_is_told_with_both_shares(left, warned):
    one = replace(looked_at(joined(lambda hits: hits)), segments=1_000, unfiltered=500)
    facts = [replace(one, in_graph=count) for count in (left // 2, left - left // 2)]
    told = [line for line in described(facts, SETTINGS) if "the filter lost" in line]
    assert bool(told) == warned
    assert not told or "lost 3.1% of the true segments that its graph had: of 2,000, 50.0% were" in told[0]
    assert not told or ", 48.4% are left; lower --min-score" in told[0]
    unfiltered = [replace(one, unfiltered=None) for one in facts]
    assert not any("the filter" in line for line in described(unfiltered, SETTINGS))
