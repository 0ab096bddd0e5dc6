"""The two exchanges: they move the right rows, to neighbours only, and are each other's adjoint.

A case is a function of a world, a graph and a policy. Threads try it on many random graphs, processes over gloo on a
few, in one launch.
"""

from dataclasses import replace

import drawn
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from marks import slow
from random_events import assigned_graphs
from torch.autograd import gradcheck, gradgradcheck

from domainpar.common.agreement import gather
from domainpar.parallel.halo import AdjointHalo, CompleteHalo, Halo
from domainpar.placed.ranks import ranks_of
from domainpar.plan import build_plans
from domainpar.testing import run_ranks


def _halo(world, edges, assignment, policy="incident", kind=Halo):
    return kind(build_plans(edges, assignment, world.size, policy)[world.rank], world.transport)


def _ghosts_hold_their_owners_rows(world, edges, assignment, policy):
    halo = _halo(world, edges, assignment, policy)
    rows = torch.from_numpy(np.stack([halo.plan.owned_ids, halo.plan.owned_ids * 7], axis=1))
    ghosts = halo.fill_ghosts(rows)
    np.testing.assert_array_equal(ghosts[:, 0], halo.plan.ghost_ids)
    np.testing.assert_array_equal(ghosts[:, 1], halo.plan.ghost_ids * 7)
    ones = torch.ones(halo.plan.num_ghosts, 1, dtype=torch.float64)
    copies = halo.sum_to_owners(ones)[:, 0]
    np.testing.assert_array_equal(copies, np.bincount(halo.plan.send_rows, minlength=halo.plan.num_owned))


@pytest.mark.parametrize("policy", ["incoming", "incident"])
@given(graph=assigned_graphs(25, 70, 5))
@settings(max_examples=60)
def test_every_ghost_gets_its_owners_row_and_every_owner_all_its_ghosts(policy, graph):
    edges, assignment, num_parts = graph
    run_ranks(_ghosts_hold_their_owners_rows, num_parts, edges, assignment, policy)


def _fill_and_sum_are_adjoint(world, edges, assignment, policy, seed=0):
    halo = _halo(world, edges, assignment, policy)
    generator = torch.Generator().manual_seed(seed + world.rank)
    x = torch.randn(halo.plan.num_owned, 3, generator=generator, dtype=torch.float64)
    y = torch.randn(halo.plan.num_ghosts, 3, generator=generator, dtype=torch.float64)
    sides = float((halo.fill_ghosts(x) * y).sum()), float((x * halo.sum_to_owners(y)).sum())
    left, right = np.sum(gather(world.transport, sides), axis=0)
    np.testing.assert_allclose(left, right, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("policy", ["incoming", "incident"])
@given(graph=assigned_graphs(25, 70, 5), seed=st.integers(0, 1000))
@settings(max_examples=60)
def test_fill_ghosts_and_sum_to_owners_are_adjoint(policy, graph, seed):
    edges, assignment, num_parts = graph
    run_ranks(_fill_and_sum_are_adjoint, num_parts, edges, assignment, policy, seed)


def _bytes_are_the_lower_bound(world, edges, assignment, policy):
    """Each row that some rank needs from another travels once: (node, receiving rank) pairs x width, counted anew."""
    needed = set()
    for src, dst in edges.T:
        needed.add((src, assignment[dst]))
        if policy == "incident":
            needed.add((dst, assignment[src]))
    bound = 5 * 4 * sum(assignment[node] != part for node, part in needed)
    halo = _halo(world, edges, assignment, policy)
    world.take_counters()
    halo.fill_ghosts(torch.zeros(halo.plan.num_owned, 5, dtype=torch.float32))
    forward = world.take_counters().bytes_sent
    halo.sum_to_owners(torch.zeros(halo.plan.num_ghosts, 5, dtype=torch.float32))
    sent = gather(world.transport, (forward, world.take_counters().bytes_sent))
    np.testing.assert_array_equal(np.sum(sent, axis=0), [bound, bound])


@pytest.mark.parametrize("policy", ["incoming", "incident"])
@given(graph=assigned_graphs(25, 70, 5))
@settings(max_examples=60)
def test_bytes_of_an_exchange_are_the_lower_bound(policy, graph):
    edges, assignment, num_parts = graph
    run_ranks(_bytes_are_the_lower_bound, num_parts, edges, assignment, policy)


def _two_exchanges_in_flight(world, edges, assignment, policy):
    halo = _halo(world, edges, assignment, policy)
    owned = torch.from_numpy(halo.plan.owned_ids).reshape(-1, 1)
    table = torch.full((halo.plan.num_local, 1), -1)
    first = halo.start_fill(owned, table[halo.plan.num_owned :])
    second = halo.start_fill(owned * 10)
    np.testing.assert_array_equal(second.finish()[:, 0], halo.plan.ghost_ids * 10)
    first.finish()
    np.testing.assert_array_equal(table[halo.plan.num_owned :, 0], halo.plan.ghost_ids)
    sums = halo.sum_to_owners(torch.from_numpy(halo.plan.ghost_ids).reshape(-1, 1))[:, 0]
    copies = np.bincount(halo.plan.send_rows, minlength=halo.plan.num_owned)
    np.testing.assert_array_equal(sums, halo.plan.owned_ids * copies)


@pytest.mark.parametrize("policy", ["incoming", "incident"])
def test_compute_can_run_between_start_and_finish_of_several_exchanges(policy):
    run_ranks(_two_exchanges_in_flight, 3, drawn.EDGE_INDEX, drawn.ASSIGNMENT, policy)


def _gradients_of_extend(world, edges, assignment, policy):
    halo = _halo(world, edges, assignment, policy, kind=AdjointHalo)
    owned = torch.from_numpy(halo.plan.owned_ids).double().reshape(-1, 1).requires_grad_()
    weights = torch.from_numpy(halo.plan.local_ids).double().reshape(-1, 1) + 100 * world.rank
    (halo.extend(owned) * weights).sum().backward()
    found = owned.grad[:, 0].tolist()
    plans = build_plans(edges, assignment, world.size, policy)
    assert found == [sum(node + 100 * it.part for it in plans if node in it.local_ids) for node in halo.plan.owned_ids]
    return found


def _gradients_of_spread(world, edges, assignment):
    halo = _halo(world, edges, assignment, kind=CompleteHalo)
    owned = torch.from_numpy(halo.plan.owned_ids).double().reshape(-1, 1).requires_grad_()
    weights = torch.from_numpy(halo.plan.local_ids).double().reshape(-1, 1) + 100 * world.rank
    spread = halo.spread(owned)
    np.testing.assert_array_equal(spread.finish()[:, 0], halo.plan.ghost_ids)
    assert not spread.local.requires_grad
    again = halo.spread(owned).with_owned(owned + 0)  # as a stage hands on nodes that it did not read
    np.testing.assert_array_equal(again.finish()[:, 0], halo.plan.ghost_ids)
    (spread.owned * weights[: halo.plan.num_owned]).sum().backward()
    assert torch.equal(owned.grad, weights[: halo.plan.num_owned])
    return owned.grad[:, 0].tolist()


def test_the_adjoint_form_returns_what_ghosts_received_and_the_complete_form_drops_it():
    adjoint = run_ranks(_gradients_of_extend, 3, drawn.EDGE_INDEX, drawn.ASSIGNMENT, "incident")
    # node 3 is owned by part 1 (weight 103) and a ghost of parts 0 (3) and 2 (203)
    assert adjoint == [[0, 1 + 101, 2 + 102], [103 + 3 + 203, 104 + 204, 105 + 5], [206 + 106, 207, 208]]
    complete = run_ranks(_gradients_of_spread, 3, drawn.EDGE_INDEX, drawn.ASSIGNMENT)
    assert complete == [[0, 1, 2], [103, 104, 105], [206, 207, 208]]


class Summed(torch.autograd.Function):
    """The sum over ranks, which is its own adjoint: each leaf gets the whole gradient."""

    @staticmethod
    def forward(ctx, local, ranks):
        ctx.ranks = ranks
        return ranks.added(local)

    @staticmethod
    def backward(ctx, grad):
        return Summed.apply(grad, ctx.ranks), None


def _differences_agree_with_gradients_of_any_order(world, edges, assignment, policy):
    """torch's own checks. Every rank has the number that rows are made of, and so makes the same calls."""
    halo, ranks = _halo(world, edges, assignment, policy, kind=AdjointHalo), ranks_of(world.transport)
    ids = torch.from_numpy(halo.plan.local_ids).double().reshape(-1, 1)
    of_owned, weights = ids[: halo.plan.num_owned].cos(), ids / 10 + 1 + world.rank

    def of_all(number):
        # Of a share of each rank: the whole gradient comes back to every leaf, to be compared with differences.
        local = halo.extend(of_owned * Summed.apply(number / world.size, ranks))
        return Summed.apply((local.sin() * weights).sum(0), ranks)

    number = torch.tensor([0.6], dtype=torch.float64, requires_grad=True)
    cotangent = torch.ones(1, dtype=torch.float64, requires_grad=True)  # drawn by torch, it would differ between ranks
    assert gradcheck(of_all, number, check_undefined_grad=False)
    assert gradgradcheck(of_all, number, cotangent, check_undefined_grad=False)


@pytest.mark.parametrize("policy", ["incoming", "incident"])
def test_gradients_of_an_exchange_are_those_that_differences_show(policy):
    for num_ranks in (1, 3):
        assignment = np.minimum(drawn.ASSIGNMENT, num_ranks - 1)
        run_ranks(_differences_agree_with_gradients_of_any_order, num_ranks, drawn.EDGE_INDEX, assignment, policy)


def _spread_gradients_of_sums(world, edges, assignment):
    """As a stage does in backward."""
    halo = _halo(world, edges, assignment, kind=CompleteHalo)
    sums = torch.zeros(halo.plan.num_owned, 1, dtype=torch.float64, requires_grad=True)
    (sums[:, 0] * torch.from_numpy(halo.plan.owned_ids)).sum().backward()
    of_sums = halo.spread(sums.grad)
    of_sums.finish()
    np.testing.assert_array_equal(of_sums.local[:, 0], halo.plan.local_ids)


def test_spreading_the_gradient_of_aggregates_gives_every_copy_its_owners_gradient():
    run_ranks(_spread_gradients_of_sums, 3, drawn.EDGE_INDEX, drawn.ASSIGNMENT)


def _spread_rows(world, edges, assignment):
    halo = _halo(world, edges, assignment, kind=CompleteHalo)
    plan = halo.plan
    ids = torch.from_numpy(np.stack([plan.owned_ids, plan.owned_ids * 7]))
    for owned in (ids.T.contiguous(), ids.T, ids.T.double().requires_grad_(), ids.T[:, :0]):  # also not contiguous
        before = owned.detach().clone()
        first, second = halo.spread(owned), halo.spread(owned * 2)
        assert first.owned is owned if owned.requires_grad else torch.equal(first.owned, owned)
        second.finish()
        first.progress()
        for _ in range(2):  # a second call waits for nothing
            ghosts = first.finish()
            first.progress()
        expected = torch.from_numpy(np.stack([plan.local_ids, plan.local_ids * 7], axis=1))[:, : owned.shape[1]]
        assert torch.equal(first.local, expected.to(owned.dtype))
        assert torch.equal(second.local, 2 * expected.to(owned.dtype))
        assert torch.equal(ghosts, first.local[plan.num_owned :])
        assert first.local.is_contiguous()
        assert torch.equal(owned, before)
        joined = halo.join(owned, ghosts)
        assert torch.equal(joined.local, first.local)
        assert torch.equal(joined.finish(), ghosts)
        assert joined.owned is owned if owned.requires_grad else torch.equal(joined.owned, owned)


@given(graph=assigned_graphs(25, 70, 5))
@settings(max_examples=60)
def test_spread_rows_are_the_owned_ones_then_those_of_ghosts_however_they_lay_before(graph):
    edges, assignment, num_parts = graph
    run_ranks(_spread_rows, num_parts, edges, assignment)


def _a_spread_sends_a_row_once_and_a_join_nothing(world, edges, assignment):
    halo = _halo(world, edges, assignment, kind=CompleteHalo)
    owned = torch.zeros(halo.plan.num_owned, 5)
    world.take_counters()
    ghosts = halo.spread(owned).finish()
    of_spread = world.take_counters().bytes_sent
    halo.join(owned, ghosts).finish()
    sent = gather(world.transport, (of_spread, world.take_counters().bytes_sent, halo.plan.num_ghosts))
    of_spread, of_join, num_ghosts = np.sum(sent, axis=0)
    assert (of_spread, of_join) == (5 * 4 * num_ghosts, 0)


@given(graph=assigned_graphs(25, 70, 5))
@settings(max_examples=60)
def test_a_spread_sends_each_ghosts_row_once_and_a_join_sends_nothing(graph):
    edges, assignment, num_parts = graph
    run_ranks(_a_spread_sends_a_row_once_and_a_join_nothing, num_parts, edges, assignment)


# Of both policies, and of the complete form, which takes incident plans only.
OF_BOTH = (
    _ghosts_hold_their_owners_rows,
    _fill_and_sum_are_adjoint,
    _bytes_are_the_lower_bound,
    _two_exchanges_in_flight,
    _gradients_of_extend,
)
OF_INCIDENT = (
    _gradients_of_spread,
    _spread_gradients_of_sums,
    _spread_rows,
    _a_spread_sends_a_row_once_and_a_join_nothing,
)


def _graphs(num_ranks):
    """Edges and the rank of each node, by what is special about them."""
    blocks = np.repeat(np.arange(num_ranks), 5)
    nodes = np.arange(len(blocks))
    inside = np.stack([nodes, np.where(nodes % 5 == 4, nodes, nodes + 1)])  # the last of a block has a self-loop
    one_way = np.stack([np.full(num_ranks - 1, 2), np.arange(1, num_ranks) * 5])
    twice = np.repeat(np.stack([nodes[4:-1:5], nodes[5::5]]), 2, axis=1)
    return {
        "as drawn": (drawn.EDGE_INDEX, np.minimum(drawn.ASSIGNMENT, num_ranks - 1)),
        "a row of blocks": (np.concatenate([inside, twice, twice[::-1, :1]], axis=1), blocks),
        "one-way needs": (np.concatenate([inside, one_way], axis=1), blocks),
        "no edges": (np.zeros((2, 0), np.int64), blocks),
        "parts that own nothing": (inside, np.where(blocks % 2, blocks, num_ranks - 1)),
        "no nodes": (np.zeros((2, 0), np.int64), np.zeros(0, np.int64)),
    }


def _all_cases(world):
    for name, (edges, assignment) in _graphs(world.size).items():
        for policy in ("incoming", "incident"):
            held = build_plans(edges, assignment, world.size, policy)[world.rank].num_local
            # Of two ranks of which one owns nothing, the other owns all.
            of_one = name == "no nodes" or (name == "parts that own nothing" and world.size == 2)
            assert of_one or held < len(assignment), f"rank {world.rank} holds all nodes of {name!r} ({policy})"
            for case in OF_BOTH:
                case(world, edges, assignment, policy)
        for case in OF_INCIDENT:
            case(world, edges, assignment)
    for policy in ("incoming", "incident"):  # of one graph: torch's checks make hundreds of exchanges
        _differences_agree_with_gradients_of_any_order(world, *_graphs(world.size)["as drawn"], policy)
    _wrong_rows(world)
    if world.size > 2:
        for fault in FAULTS:
            _broken_on_rank_1(world, fault)
    return True


@pytest.mark.parametrize("num_ranks", [slow(2), 4])
def test_all_of_it_holds_between_processes_over_gloo(num_ranks):
    assert run_ranks(_all_cases, num_ranks, transport="gloo") == [True] * num_ranks


def _swapped(ids, counts, peer):
    """Swap two ids within the block of one peer."""
    start = int(np.sum(counts[:peer]))
    ids = ids.copy()
    ids[[start, start + 1]] = ids[[start + 1, start]]
    return ids


def _sends_part_2(plan, rows, more):
    """The plan of part 1 with other rows, of which part 2 gets more or fewer."""
    return replace(plan, send_rows=rows, send_counts=plan.send_counts + more * (np.arange(plan.num_parts) == 2))


FAULTS = {
    "one row short": lambda plan: _sends_part_2(plan, plan.send_rows[:-1], -1),
    "one row long": lambda plan: _sends_part_2(plan, np.append(plan.send_rows, 2), 1),
    "swapped order": lambda plan: replace(plan, send_rows=_swapped(plan.send_rows, plan.send_counts, 2)),
    "wrong peer": lambda plan: replace(plan, send_rows=np.array([0, 1, 0, 2])),
    "one wrong id": lambda plan: replace(plan, send_rows=np.array([0, 2, 0, 2])),
    "another event": lambda plan: build_plans(drawn.EDGE_INDEX[:, 4:], drawn.ASSIGNMENT, plan.num_parts, "incident")[1],
}


def _broken_on_rank_1(world, fault):
    plan = build_plans(drawn.EDGE_INDEX, drawn.ASSIGNMENT, world.size, "incident")[world.rank]
    with pytest.raises(RuntimeError, match="rank 1") as caught:
        Halo(FAULTS[fault](plan) if world.rank == 1 else plan, world.transport)
    return str(caught.value)


@pytest.mark.parametrize("fault", FAULTS)
def test_plans_that_disagree_are_refused_by_all_ranks_before_anything_is_exchanged(fault):
    said = run_ranks(_broken_on_rank_1, 3, fault)
    assert len(set(said)) == 1
    assert "plans disagree" in said[0]


def _wrong_rows(world):
    halo = _halo(world, *_graphs(world.size)["a row of blocks"])
    with pytest.raises(ValueError, match=rf"owned rows on rank {world.rank}: expected 5, got {halo.plan.num_local}"):
        halo.fill_ghosts(torch.zeros(halo.plan.num_local, 1))
    with pytest.raises(ValueError, match=rf"ghost rows on rank {world.rank}: expected {halo.plan.num_ghosts}"):
        halo.sum_to_owners(torch.zeros(halo.plan.num_local, 1))


def test_rows_of_the_wrong_kind_are_refused_with_both_numbers():
    run_ranks(_wrong_rows, 3)


def _wrong_part(world):
    with pytest.raises(ValueError, match="part 1 of 3 .*rank 0 of 1"):
        Halo(build_plans(drawn.EDGE_INDEX, drawn.ASSIGNMENT, 3, "incident")[1], world.transport)


def test_a_plan_of_another_part_is_refused():
    run_ranks(_wrong_part, 1)


def _incoming_plan_in_complete_form(world):
    plan = build_plans(drawn.EDGE_INDEX, drawn.ASSIGNMENT, 3, "incoming")[world.rank]
    with pytest.raises(ValueError, match="edge_policy='incident', .*'incoming'"):
        CompleteHalo(plan, world.transport)


def test_the_complete_form_refuses_plans_that_lack_one_side_of_cut_edges():
    run_ranks(_incoming_plan_in_complete_form, 3)
