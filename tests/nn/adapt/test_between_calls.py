"""What happens to marked tensors between two calls of the model is seen by the next, or told when the world closes."""

import copy
import io

import numpy as np
import pytest
import torch
from torch import nn
from whole_and_split import USUAL

from domainpar.common.agreement import Refused
from domainpar.nn.adapt.parallelize import parallelize
from domainpar.nn.adapt.rows import NotExact
from domainpar.nn.adapt.split import split_graph
from domainpar.testing import run_ranks

ENDS = USUAL.edge_index


class Sums(nn.Module):
    """Sums at nodes of what lies at the other ends of their edges."""

    def forward(self, x, edge_index, each=None, scale=1.0):
        messages = x[edge_index[0]] * scale
        return torch.zeros_like(x).index_add(0, edge_index[1], messages if each is None else messages * each)


def parted(world, edges="incoming"):
    part = split_graph(ENDS, 13, world, edge_policy=edges, partitioner=np.array(USUAL.assignment) % world.size)
    if world.size > 1:
        held = part.gather(torch.tensor([part.plan.num_owned + part.plan.num_ghosts]))
        assert min(map(int, held)) < 13, "a halo that holds everything proves nothing"
    return part, parallelize(Sums(), world)


def whole(world, part, owned):
    """A tensor of owned rows as one of the whole graph."""
    rows = owned.new_zeros(13, *owned.shape[1:])
    rows[part.local_ids[: part.plan.num_owned]] = owned
    return part.all_reduce(rows)


def in_place(world, part, model):
    state, n = part.nodes(USUAL.x), part.plan.num_owned
    for _ in range(3):
        state[:n] += 0.1 * model(state, part.edge_index)
    return state[:n]


def through_a_view(world, part, model):
    state, n = part.nodes(USUAL.x), part.plan.num_owned
    owned = state[:n]
    for _ in range(3):
        owned.mul_(0.5).add_(model(state, part.edge_index))
    return owned


def of_a_tensor_of_ones_own(world, part, model):
    mine = USUAL.x[part.local_ids].clone()
    for _ in range(3):
        result = model(part.nodes_from_local(mine), part.edge_index)
        mine[: part.plan.num_owned] -= result
        mine[part.plan.num_owned :] = whole(world, part, mine[: part.plan.num_owned])[part.local_ids[len(result) :]]
    return mine[: part.plan.num_owned]


def marked_before_and_written_by_the_name_of_the_unmarked(world, part, model):
    mine = USUAL.x[part.local_ids].clone()
    marked = part.nodes_from_local(mine)
    for _ in range(3):
        mine[: part.plan.num_owned] -= model(marked, part.edge_index)
    return mine[: part.plan.num_owned]


def on_some_ranks_only(world, part, model):
    state, n = part.nodes(USUAL.x), part.plan.num_owned
    for _ in range(3):
        result = model(state, part.edge_index)
        if (part.local_ids[:n] == 4).any():  # the one rank that owns node 4
            state[:n][part.local_ids[:n] == 4] += result[part.local_ids[:n] == 4]
    return model(state, part.edge_index)


def a_copy_of_what_was_written(world, part, model):
    state, n = part.nodes(USUAL.x), part.plan.num_owned
    state[:n] += model(state, part.edge_index)
    return model(copy.deepcopy(state), part.edge_index)


def in_inference_mode(world, part, model):
    with torch.inference_mode():
        state, n = part.nodes(USUAL.x), part.plan.num_owned
        for _ in range(3):
            state[:n] += 0.1 * model(state, part.edge_index)
        return model(state, part.edge_index).clone()


def a_leaf_of_inference_mode(world, part, model):
    with torch.inference_mode():
        state = part.nodes_from_local(USUAL.x[part.local_ids].clone())
        state[: part.plan.num_owned] *= 2
        return model(state, part.edge_index).clone()


def edges_of_one_side(world, part, model):
    each, nodes = part.edges(USUAL.e), part.nodes(USUAL.x)
    each *= 2
    return model(nodes, part.edge_index, each)


def written_by_the_model(world, part, model):
    class Doubles(nn.Module):
        def forward(self, x, edge_index):
            x[:, :1].mul_(2)
            x.add_(1)
            return x[edge_index[0]].sum() + x

    doubles, state = parallelize(Doubles(), world), part.nodes(USUAL.x)
    before = part.num_exchanges
    for _ in range(2):
        result = doubles(state, part.edge_index)
    assert part.num_exchanges == before  # both copies were written alike
    return result


ROLLOUTS = [
    in_place,
    through_a_view,
    of_a_tensor_of_ones_own,
    marked_before_and_written_by_the_name_of_the_unmarked,
    on_some_ranks_only,
    a_copy_of_what_was_written,
    in_inference_mode,
    a_leaf_of_inference_mode,
    edges_of_one_side,
    written_by_the_model,
]


@pytest.mark.parametrize("rollout", ROLLOUTS)
def test_a_state_that_is_written_in_place_between_passes_is_read_as_on_one_rank(rollout):
    def work(world):
        part, model = parted(world)
        with torch.no_grad():
            return whole(world, part, rollout(world, part, model))

    (alone,) = run_ranks(work, 1)
    for num_ranks in (2, 3, 4):
        for split in run_ranks(work, num_ranks):
            torch.testing.assert_close(split, alone, rtol=1e-12, atol=1e-12)


def test_gradients_flow_through_a_state_that_was_written():
    def work(world):
        part, model = parted(world)
        factor = torch.ones((), dtype=torch.float64, requires_grad=True)
        state = part.nodes(USUAL.x)
        state[: part.plan.num_owned].mul_(factor)
        part.node_mean_share(model(state, part.edge_index).square()).backward()
        return part.all_reduce(factor.grad)

    (alone,) = run_ranks(work, 1)
    for split in run_ranks(work, 3):
        torch.testing.assert_close(split, alone, rtol=1e-12, atol=0)


def edges_of_both_sides(part, model):
    each = part.edges(USUAL.e)
    each[torch.from_numpy(part.plan.edge_owned)] *= 2
    return model(part.nodes(USUAL.x), part.edge_index, each)


def the_edges_themselves(part, model):
    part.edge_index[0] = part.edge_index[1]
    return model(part.nodes(USUAL.x), part.edge_index)


def one_end_taken_later(part, model):
    part.edge_index[0] = part.edge_index[1]
    return model(part.nodes(USUAL.x), (part.src, part.dst))


def what_the_model_keeps(part, model):
    class Keeps(nn.Module):
        def forward(self, edge_index):
            return self.state[edge_index[0]].sum()

    model.module = Keeps()
    model.module.state = part.nodes(USUAL.x)
    model(part.edge_index)
    model.module.state[: part.plan.num_owned] += 1
    return model(part.edge_index)


@pytest.mark.parametrize(
    ("write", "words"),
    [
        (edges_of_both_sides, "was written in place since it was marked, and other ranks hold copies"),
        (the_edges_themselves, "row numbers .* split the new graph with split_graph"),
        (one_end_taken_later, "row numbers .* split the new graph with split_graph"),
        (what_the_model_keeps, "that the model keeps was written in place between two passes"),
    ],
)
def test_what_was_written_and_cannot_be_fetched_is_refused_on_all_ranks(write, words):
    def work(world):
        part, model = parted(world, "incident")
        with torch.no_grad(), pytest.raises(NotExact, match=words):
            write(part, model)

    run_ranks(work, 3)


def test_what_is_the_same_everywhere_is_compared_again_once_it_was_written():
    def work(world, by):
        part, model = parted(world)
        scale = part.replicate(torch.ones(4, dtype=torch.float64))
        model(part.nodes(USUAL.x), part.edge_index, None, scale)
        scale += by(world)
        model(part.nodes(USUAL.x), part.edge_index, None, scale)

    run_ranks(work, 3, lambda world: 1.0)
    with pytest.raises(Exception, match="different tensors: rank 2 an argument that is the same everywhere, changed"):
        run_ranks(work, 3, lambda world: 1.0 + (world.rank == 2))


def test_targets_that_are_given_after_the_last_pass_are_compared_when_the_world_closes():
    def work(world, more):
        part, model = parted(world)
        model(part.nodes(USUAL.x), part.edge_index)
        part.owned_nodes(torch.full((13,), float(world.rank == 1)))
        if more and world.is_root:
            part.owned_nodes(USUAL.v)
        with pytest.raises(Refused, match=r"rank 1 part.owned_nodes of \(13,\) float32, checksum"):
            world.close()
        world.presence.close(compare=False)

    run_ranks(work, 3, False)
    run_ranks(work, 3, True)


def test_what_one_rank_alone_is_given_after_the_last_pass_is_its_own():
    def work(world):
        part, model = parted(world)
        model(part.nodes(USUAL.x), part.edge_index)
        if world.is_root:
            part.owned_nodes(USUAL.v)
        world.close()

    run_ranks(work, 3)


def test_a_mean_of_another_parts_rows_is_refused():
    def work(world):
        a, model = parted(world)
        b = split_graph(ENDS, 13, world, partitioner=np.array(USUAL.assignment) % world.size)
        result = model(a.nodes(USUAL.x), a.edge_index)
        targets = [lambda: b.node_mean_share(result), lambda: b.node_mean_share(a.owned_nodes(USUAL.x))]
        targets.append(lambda: a.node_mean_share((result - 1) ** 2, weights=b.owned_nodes(USUAL.u)))
        targets.append(lambda: a.edge_mean_share(b.owned_edges(USUAL.e)))
        for mean in targets:
            with pytest.raises(NotExact, match="rows of another part"):
                mean()
        a.node_mean_share((result - a.owned_nodes(USUAL.x)) ** 2, weights=a.owned_nodes(USUAL.u))

    run_ranks(work, 3)


def test_a_gradient_outside_of_the_model_is_a_share_that_part_sum_makes_whole():
    def work(world):
        part, model = parted(world)
        x, scale = USUAL.x.clone().requires_grad_(), torch.full((4,), 2.0, dtype=torch.float64, requires_grad=True)
        result = model(part.nodes(x), part.edge_index, None, part.replicate(scale))
        part.node_mean_share(result.square()).backward()
        for leaf in (x, scale):
            leaf.grad = part.all_reduce(leaf.grad)  # as docs/recipes/model_rollouts.md says
        return x.grad, scale.grad

    (alone,) = run_ranks(work, 1)
    for split in run_ranks(work, 3):
        torch.testing.assert_close(split, alone, rtol=1e-12, atol=1e-14)


def test_what_is_learned_outside_of_the_model_by_shares_is_refused_with_the_line_that_mends_it():
    def work(world, mend):
        part, model = parted(world)
        scale = torch.full((4,), 2.0, dtype=torch.float64, requires_grad=True)
        optimizer = torch.optim.SGD([scale], 0.1)
        for _ in range(2):
            optimizer.zero_grad()
            result = model(part.nodes(USUAL.x), part.edge_index, None, part.replicate(scale))
            part.node_mean_share(result.square()).backward()
            if mend:
                scale.grad = part.all_reduce(scale.grad)
            optimizer.step()

    run_ranks(work, 3, True)
    with pytest.raises(Exception, match=r"t.grad = part.all_reduce\(t.grad\)"):
        run_ranks(work, 3, False)


class Imputes(nn.Module):
    """Keeps which of its rows had holes."""

    def __init__(self, persistent):
        super().__init__()
        self.register_buffer("holes", None, persistent=persistent)
        self.register_buffer("passes", torch.zeros(()))

    def forward(self, x):
        self.holes = x.isnan()
        self.passes += 1
        return x.nan_to_num(0.0)


class Keeps(Imputes):
    """Keeps how large its values were in its first pass."""

    def forward(self, x):
        if self.holes is None:
            self.holes = x.abs()
        return x


def test_rows_that_a_pass_left_do_not_leave_through_a_state_after_the_model_was_converted_and_used_again():
    def work(world):
        part, _ = parted(world)
        model = parallelize(nn.Sequential(Keeps(True)), world)
        model(part.nodes(USUAL.x))
        model.module.half()
        model(part.nodes(USUAL.x))
        with pytest.raises(NotExact, match="0.holes holds rows"):
            model.module.state_dict()

    run_ranks(work, 3)


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_rows_of_a_part_do_not_leave_through_a_state_nor_come_in(num_ranks):
    def work(world):
        part, _ = parted(world)
        net = nn.Sequential(Imputes(True))
        before = copy.deepcopy(net.state_dict())
        model = parallelize(net, world)
        model(part.nodes(USUAL.x))
        takes = [net.state_dict, model.state_dict, lambda: torch.save(net.state_dict(), io.BytesIO())]
        takes += [lambda: copy.deepcopy(net).state_dict(), lambda: net.half().state_dict()]
        for take in takes:
            with pytest.raises(NotExact, match=r"buffer (module\.)?0.holes holds rows of this rank's part"):
                take()
        with pytest.raises(NotExact, match="buffer 0.holes holds rows"):
            net.load_state_dict({**before, "0.holes": torch.zeros(13, 4)})
        net.load_state_dict(before, strict=False)  # in which no rows are
        net[0].holes = None
        net.load_state_dict(net.state_dict())

    run_ranks(work, num_ranks)


def test_a_state_without_rows_is_taken_and_loaded():
    def work(world):
        part, _ = parted(world)
        net = nn.Sequential(Imputes(False), nn.Linear(4, 2).double(), nn.BatchNorm1d(2).double())
        model = parallelize(net, world)
        model(part.nodes(USUAL.x))
        assert sorted(name for name in net.state_dict() if "holes" in name) == []
        net.load_state_dict(net.state_dict())
        parallelize(net, world)(part.nodes(USUAL.x))

    run_ranks(work, 3)
