"""Scores of a whole event: each edge exactly once, in the user's order, with the same bits on any number of ranks."""

from __future__ import annotations

import re
import warnings

import drawn
import numpy as np
import pytest
import torch
from random_events import random_assignment, random_event

from domainpar.nn.interaction import InteractionNetwork
from domainpar.nn.program import set_threads
from domainpar.parallel.world import World
from domainpar.plan import build_plans
from domainpar.testing import run_ranks
from domainpar.tracking.events.store import StoredEvent, event_file_name, write_event
from domainpar.tracking.part_loading import load_part, sector_of_tiles
from domainpar.tracking.scoring.scores import gather_scores, score_events
from partitioners import number_of_sectors

NUM_TILES = 12


def stored(directory, graph, assignment=None, num_tiles=NUM_TILES) -> StoredEvent:
    path = directory / event_file_name(graph.hits.event_id)
    if assignment is None:
        assignment = random_assignment(3, graph.num_nodes, num_tiles)
    write_event(path, graph, assignment, num_tiles)
    return StoredEvent(path)


def network(dtype=torch.float32):
    return InteractionNetwork(3, 6, hidden=16, graph_iters=2, seed=1, dtype=dtype)


def scores_on(event, num_ranks, **flags):
    """Scores from the last rank; every other rank must have None."""

    def score(world):
        model = network(flags.get("dtype", torch.float32))
        scores = score_events(model, [event], world.domain, root=num_ranks - 1, **flags)
        return scores and scores[0]

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # parts that own nothing are among the cases
        *others, last = run_ranks(score, num_ranks)
    assert others == [None] * (num_ranks - 1)
    return last


def logits_in_stored_order(event, dtype=torch.float32):
    """What one rank computes, without any of the code under test."""
    part = load_part(event, World.alone().domain, dtype=dtype)
    assert np.array_equal(part.graph.plan.edge_ids, np.arange(event.num_edges))
    with torch.no_grad():
        return network(dtype)(part.graph, part.halo)


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    """An event, and as it is stored."""
    graph = random_event(5, 150, 700)
    with stored(tmp_path_factory.mktemp("one"), graph) as event:
        yield graph, event


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("grouping", ["contiguous", "random"])
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_every_edge_has_the_logit_of_one_rank_at_the_users_place(one, num_ranks, grouping, dtype):
    graph, event = one
    scores = scores_on(event, num_ranks, grouping=grouping, dtype=dtype)
    logits = logits_in_stored_order(event, dtype).tolist()
    position = event.read_edges("original_position", np.arange(event.num_edges)).tolist()
    assert not np.array_equal(position, np.sort(position))
    expected = dict(zip(position, logits))
    assert scores.edge_logit.tolist() == [expected[place] for place in range(graph.num_edges)]
    assert scores.edge_logit.dtype == scores.edge_score.dtype == (np.float32 if dtype == torch.float32 else np.float64)
    assert np.array_equal(scores.hit_id, graph.hits.hit_id)
    assert np.array_equal(scores.edge_index, graph.edge_index)
    assert scores.edge_scored.all()
    assert scores.num_unscored == 0


ALIKE = ("event_id", "hit_id", "edge_index", "edge_logit", "edge_score", "edge_scored")


def assert_same_scores(scores, expected):
    for name in ALIKE:
        found, wanted = getattr(scores, name), getattr(expected, name)
        assert found == wanted if name == "event_id" else found.dtype == wanted.dtype and np.array_equal(found, wanted)
    assert scores.edge_logit.tobytes() == expected.edge_logit.tobytes()


@pytest.fixture(scope="module")
def several(tmp_path_factory):
    """Events of unlike size and number of tiles, one of them without an edge."""
    sizes = ((5, 150, 700, NUM_TILES), (6, 40, 90, 3), (7, 20, 0, 2), (8, 151, 701, NUM_TILES))
    place = tmp_path_factory.mktemp("several")
    events = [
        stored(place, random_event(seed, nodes, edges), random_assignment(seed, nodes, tiles), tiles)
        for seed, nodes, edges, tiles in sizes
    ]
    yield events
    for event in events:
        event.close()


OF_ONE_CALL = {
    "plain": ({}, {}, 3),
    "node-first": (
        {"order": "node-first", "aggregate": "mean"}, {"grouping": "random", "dtype": torch.float64}, 2,
    ),
    "bf16": ({"products": torch.bfloat16, "recompute_every": 1}, {"grouping": "metis"}, 3),
    "naive": ({}, {"sectors": 3}, 2),
    "grid": ({}, {"sectors": "3x2"}, 3),
}  # fmt: skip
WAYS = [
    pytest.param(
        *options, num_ranks, marks=[] if num_ranks == usual else pytest.mark.slow, id=f"{name}, {num_ranks} ranks"
    )
    for name, (*options, usual) in OF_ONE_CALL.items()
    for num_ranks in (1, 2, 3)
]


@pytest.mark.parametrize(("network_flags", "flags", "num_ranks"), WAYS)
def test_events_of_one_call_have_the_bits_of_calls_of_their_own(several, num_ranks, network_flags, flags):
    made = InteractionNetwork(3, 6, hidden=16, graph_iters=2, dtype=flags.get("dtype", torch.float32), **network_flags)
    calls = []

    def model(graph, halo):
        calls.append(graph.num_edges)
        return made(graph, halo)

    def joined(world):
        set_threads(1 + world.rank % 2)
        try:
            return score_events(model, several, world.domain, root=num_ranks - 1, **flags)
        finally:
            set_threads(1)

    def alone(world):
        return [score_events(made, [event], world.domain, **flags)[0] for event in several]

    (expected,) = run_ranks(alone, 1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        *others, scores = run_ranks(joined, num_ranks)
    assert others == [None] * (num_ranks - 1)
    assert len(calls) == num_ranks * number_of_sectors(flags.get("sectors", 1))
    for found, wanted in zip(scores, expected, strict=True):
        assert_same_scores(found, wanted)
        assert wanted.edge_scored.all() == ("sectors" not in flags or wanted.num_edges == 0)
    assert sum(found.num_edges for found in scores) == 700 + 90 + 701


def test_a_sum_over_a_whole_graph_would_mix_the_events_of_a_call(several):
    """Why networks that may have one are refused."""
    made = network()

    def with_a_norm(graph, halo):
        logits = made(graph, halo)
        return logits - logits.mean()

    world = World.alone()
    alone, *_ = score_events(with_a_norm, several[:1], world.domain)
    joined, *_ = score_events(with_a_norm, several, world.domain)
    assert not np.array_equal(joined.edge_logit, alone.edge_logit)


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_scores_are_the_sigmoid_of_all_logits_at_once(one, num_ranks):
    scores = scores_on(one[1], num_ranks)
    assert scores.edge_score.tobytes() == torch.sigmoid(torch.from_numpy(scores.edge_logit)).numpy().tobytes()


def test_naive_mode_marks_the_edges_between_sectors_and_no_others(tmp_path):
    graph = random_event(7, 150, 700)
    with stored(tmp_path, graph) as event:
        sector_of_node = np.repeat(sector_of_tiles(event, 3), np.diff(event.node_ptr))
        user_sector = np.empty(graph.num_nodes, int)
        user_sector[event.read_nodes("original_row", np.arange(graph.num_nodes))] = sector_of_node
        scores = {ranks: scores_on(event, ranks, sectors=3) for ranks in (1, 2, 3)}
        whole = scores_on(event, 1)
    src, dst = user_sector[graph.edge_index]
    naive = scores[1]
    assert np.array_equal(naive.edge_scored, src == dst)
    assert 0 < naive.num_unscored == np.count_nonzero(src != dst) < graph.num_edges
    assert not naive.edge_logit[~naive.edge_scored].any()
    assert not naive.edge_score[~naive.edge_scored].any()
    assert (naive.edge_score[naive.edge_scored] > 0).all()
    assert not np.array_equal(naive.edge_logit[naive.edge_scored], whole.edge_logit[naive.edge_scored])
    for ranks in (2, 3):
        assert scores[ranks].edge_logit.tobytes() == naive.edge_logit.tobytes()
        assert np.array_equal(scores[ranks].edge_scored, naive.edge_scored)


def test_naive_mode_is_the_whole_event_where_no_edge_is_cut(tmp_path):
    graph = random_event(8, 120, 600)
    whole_parts = graph.edge_index // 60
    kept = np.flatnonzero(whole_parts[0] == whole_parts[1])
    uncut = type(graph)(
        **{
            **vars(graph),
            "edge_index": graph.edge_index[:, kept],
            "edge_features": graph.edge_features[kept],
            "label": graph.label[kept],
        }
    )
    # Two tiles that no edge joins: one sector each.
    with stored(tmp_path, uncut, np.arange(120) // 60, 2) as event:
        naive, whole = scores_on(event, 2, sectors=2), scores_on(event, 2)
    assert naive.edge_scored.all()
    assert naive.edge_logit.tobytes() == whole.edge_logit.tobytes()


@pytest.mark.parametrize("num_ranks", [1, 3])
@pytest.mark.parametrize("num_sectors", [None, 2])
def test_an_event_without_edges_and_one_without_truth_have_scores(tmp_path, num_ranks, num_sectors):
    with stored(tmp_path, random_event(1, 30, 0)) as event:
        scores = scores_on(event, num_ranks, sectors=num_sectors)
        assert (scores.num_edges, scores.edge_index.shape, len(scores.hit_id)) == (0, (2, 0), 30)
    with stored(tmp_path, random_event(2, 30, 90, labels=False)) as event:
        assert not event.has_labels
        assert scores_on(event, num_ranks, sectors=num_sectors).num_edges == 90


def test_more_ranks_than_tiles_score_the_same(tmp_path):
    with stored(tmp_path, random_event(4, 40, 200), num_tiles=2) as event:
        one, four = scores_on(event, 1), scores_on(event, 4)
    assert one.edge_logit.tobytes() == four.edge_logit.tobytes()


def gathered(owned_by_rank, logits=None, num_edges=12, root=0):
    """What each rank gets from plans of the drawn event in which it owns these nodes; errors as text."""

    def gather(world):
        own = np.isin(np.arange(9), owned_by_rank[world.rank])
        assignment = np.where(own, world.rank, (world.rank + 1) % world.size)
        plan = build_plans(drawn.EDGE_INDEX, assignment, world.size, "incident")[world.rank]
        values = torch.arange(12.0) if logits is None else logits
        try:
            return gather_scores(values[plan.edge_ids], plan, world.domain, np.ones(num_edges, bool), root)
        except RuntimeError as error:
            return str(error)

    return run_ranks(gather, len(owned_by_rank))


@pytest.mark.parametrize("root", [0, 1, 2])
def test_gathered_logits_lie_in_global_order_on_the_rank_that_is_to_have_them(root):
    logits = gathered([[3, 4, 8], [1, 5, 7], [0, 2, 6]], root=root)
    assert logits.pop(root).tolist() == list(range(12))
    assert logits == [None, None]


@pytest.mark.parametrize("root", [0, 1])
def test_edges_that_two_parts_or_none_own_are_counted_and_stop_all_ranks(root):
    # Node 3 (two incoming edges) is owned twice, node 4 (one incoming edge) by nobody.
    first, second = gathered([[0, 1, 2, 3], [3, 5, 6, 7, 8]], root=root)
    assert first == second
    assert re.match("1 of 12 edges got no .* 2 got two;", first)


def test_scores_of_edges_that_the_event_does_not_have_stop_all_ranks():
    first, second = gathered([[0, 1, 2, 3], [4, 5, 6, 7, 8]], num_edges=10)
    assert first == second
    assert re.match("0 of 10 edges .* 0 got two, and 2 scores", first)


def test_a_score_that_is_not_finite_stops_all_ranks_and_names_the_event(tmp_path):
    logits = torch.arange(12.0)
    logits[4] = torch.nan
    first, second = gathered([[0, 1, 2, 3], [4, 5, 6, 7, 8]], logits)
    assert first == second
    assert re.match("1 of 12 edges .*not finite", first)

    def broken(graph, halo):
        return torch.full((graph.num_edges,), torch.inf)

    with stored(tmp_path, random_event(9, 20, 50)) as event, pytest.raises(RuntimeError, match="not finite") as raised:
        score_events(broken, [event], World.alone().domain)
    assert raised.value.__notes__ == ["event 000000009"]


def test_only_ids_and_logits_of_others_edges_travel(tmp_path):
    def bytes_gathered(world):
        assignment = np.array([0, 0, 0, 1, 1, 1, 2, 2, 2])
        plan = build_plans(drawn.EDGE_INDEX, assignment, 3, "incident")[world.rank]
        world.take_counters()
        gather_scores(torch.zeros(plan.num_edges), plan, world.domain, np.ones(12, bool))
        return world.take_counters().bytes_sent

    assert run_ranks(bytes_gathered, 3) == [0, 4 * (8 + 4), 5 * (8 + 4)]
