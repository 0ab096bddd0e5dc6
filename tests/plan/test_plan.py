"""Plans: who owns what, for any directed graph and any assignment."""

import drawn
import numpy as np
import pytest
from hypothesis import example, given, settings
from random_events import assigned_graphs, random_assignment, random_edges

from domainpar.parallel.halo import ask_owners
from domainpar.plan import LocalEdges, build_plan, build_plans, select_edges
from domainpar.testing import run_ranks

POLICIES = ("incoming", "incident")
LARGE = random_edges(np.random.default_rng(0), 60_000, 3_000), random_assignment(0, 60_000, 4), 4
"""Of more nodes than the root of the largest int32: products of two row numbers need more bits."""


@pytest.mark.parametrize(("policy", "by_hand"), [("incident", drawn.INCIDENT), ("incoming", drawn.INCOMING)])
def test_the_drawn_event_has_the_plans_written_out_by_hand(policy, by_hand):
    plans = build_plans(drawn.EDGE_INDEX, drawn.ASSIGNMENT, 3, policy)
    for part, (plan, expected) in enumerate(zip(plans, by_hand)):
        assert (plan.part, plan.num_parts, plan.edge_policy) == (part, 3, policy)
        for name, values in expected.items():
            np.testing.assert_array_equal(getattr(plan, name), values, err_msg=f"part {part}: {name}")


@pytest.mark.parametrize("policy", POLICIES)
@given(graph=assigned_graphs(30, 80, 6))
@example(graph=LARGE)
@settings(max_examples=300)
def test_every_node_and_edge_is_owned_exactly_once(policy, graph):
    edges, assignment, num_parts = graph
    plans = build_plans(edges, assignment, num_parts, policy)
    owned_nodes = np.concatenate([plan.owned_ids for plan in plans])
    owned_edges = np.concatenate([plan.edge_ids[plan.edge_owned] for plan in plans])
    np.testing.assert_array_equal(np.sort(owned_nodes), np.arange(len(assignment)))
    np.testing.assert_array_equal(np.sort(owned_edges), np.arange(edges.shape[1]))
    for plan in plans:
        np.testing.assert_array_equal(assignment[edges[1, plan.edge_ids]] == plan.part, plan.edge_owned)


@pytest.mark.parametrize("policy", POLICIES)
@given(graph=assigned_graphs(30, 80, 6))
@example(graph=LARGE)
@settings(max_examples=300)
def test_local_rows_name_the_right_nodes_and_ghosts_are_all_that_is_missing(policy, graph):
    edges, assignment, num_parts = graph
    for plan in build_plans(edges, assignment, num_parts, policy):
        np.testing.assert_array_equal(plan.local_ids[plan.edge_rows], edges[:, plan.edge_ids])
        touched = np.unique(edges[:, plan.edge_ids])
        assert set(plan.ghost_ids) == set(touched) - set(plan.owned_ids)
        in_order = np.lexsort((plan.ghost_ids, assignment[plan.ghost_ids]))
        np.testing.assert_array_equal(in_order, np.arange(plan.num_ghosts))
        touches_owned = assignment[edges] == plan.part
        wanted = touches_owned.any(axis=0) if policy == "incident" else touches_owned[1]
        np.testing.assert_array_equal(plan.edge_ids, np.flatnonzero(wanted))


@pytest.mark.parametrize("policy", POLICIES)
@given(graph=assigned_graphs(30, 80, 6))
@example(graph=LARGE)
@settings(max_examples=300)
def test_what_is_sent_is_what_the_receiver_expects_row_for_row(policy, graph):
    edges, assignment, num_parts = graph
    plans = build_plans(edges, assignment, num_parts, policy)
    for sender in plans:
        sent = np.split(sender.owned_ids[sender.send_rows], np.cumsum(sender.send_counts)[:-1])
        for receiver in plans:
            ghosts = np.split(receiver.ghost_ids, np.cumsum(receiver.recv_counts)[:-1])
            np.testing.assert_array_equal(sent[receiver.part], ghosts[sender.part])


def _same_plan_from_own_edges(world, edges, assignment, policy):
    own = select_edges(edges, assignment, world.rank, policy)
    plan = build_plan(own, assignment, world.rank, world.size, policy, ask_owners(world.transport))
    expected = build_plans(edges, assignment, world.size, policy)[world.rank]
    for name in vars(expected):
        np.testing.assert_array_equal(getattr(plan, name), getattr(expected, name), err_msg=name)


@pytest.mark.parametrize("policy", POLICIES)
@given(graph=assigned_graphs(30, 80, 6))
@example(graph=LARGE)
@settings(max_examples=40)
def test_ranks_that_know_only_their_own_edges_build_the_same_plans(policy, graph):
    edges, assignment, num_parts = graph
    run_ranks(_same_plan_from_own_edges, num_parts, edges, assignment, policy)


def test_nodes_that_no_part_takes_are_nobodys_ghosts():
    assignment = np.array([0, 0, 0, -1, -1, -1, 1, 1, 1])
    plans = build_plans(drawn.EDGE_INDEX, assignment, 2, "incident")
    assert [plan.num_ghosts for plan in plans] == [0, 0]
    assert [plan.num_edges for plan in plans] == [3, 4]


@pytest.mark.parametrize(
    ("assignment", "num_parts", "message"),
    [([0, 1, 3], 3, "parts 0 to 3 but num_parts is 3"), ([0, -2, 0], 3, "parts -2 to 0")],
)
def test_an_assignment_to_parts_that_do_not_exist_is_refused(assignment, num_parts, message):
    with pytest.raises(ValueError, match=message):
        build_plans(np.zeros((2, 0), np.int64), np.array(assignment), num_parts, "incident")


def test_an_edge_to_a_node_that_does_not_exist_is_refused_with_its_number():
    with pytest.raises(ValueError, match="edge 1 .*dst 3 .*3 nodes"):
        build_plans(np.array([[0, 1], [1, 3]]), np.zeros(3, np.int64), 1, "incident")


def _nobody(wanted):
    raise AssertionError("asked, though the edges were wrong")


@pytest.mark.parametrize(
    ("edge_ids", "src", "dst", "message"),
    [
        ([4], [1], [2], "edge 4 is not local to part 0 under edge_policy='incoming'"),
        ([5, 4], [2, 2], [0, 0], "not in increasing order"),
        ([4, 5, 5], [2, 2, 2], [0, 0, 0], "not in increasing order"),
        ([4], [3], [0], "touches a node that no part owns"),
    ],
)
def test_edges_that_are_not_the_parts_own_are_refused_before_anybody_is_asked(edge_ids, src, dst, message):
    edges = LocalEdges(np.array(edge_ids), np.array(src), np.array(dst))
    with pytest.raises(ValueError, match=message):
        build_plan(edges, np.array([0, 1, 1, -1]), 0, 2, "incoming", _nobody)


def test_being_asked_for_a_node_of_another_part_is_a_disagreement():
    edges = LocalEdges(*(np.zeros(0, np.int64),) * 3)
    with pytest.raises(RuntimeError, match="part 0 .*node 1,"):
        build_plan(edges, np.array([0, 1]), 0, 2, "incident", lambda wanted: [np.zeros(0, np.int64), np.array([1])])
