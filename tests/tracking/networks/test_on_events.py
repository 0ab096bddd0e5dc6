"""A user's edge classifier on parts of an event, called like the built-in networks: the logits of one rank."""

import copy
import gc
import weakref
from functools import partial

import own_models
import pytest
import torch
from tiled import SMALL as EVENT
from tiled import TiledEvent, part_of
from torch import nn
from torch.utils.checkpoint import checkpoint

import domainpar
from domainpar.parallel.world import World
from domainpar.placed.ranks import NotExact, ranks_of
from domainpar.testing import run_ranks
from domainpar.tracking.networks.on_events import OnEvents, wanted_arguments

ROUNDING = 1e-12


def evolving(dropout=0.0):
    return own_models.evolving(3, 6, 8, 2, dropout)


def _answer(world, make, key):
    """Ids and logits of owned edges, summed gradients and buffers."""
    part, model = part_of(world), OnEvents(make().double())
    logits = model(part.graph, part.halo, key)
    plan = part.graph.plan
    assert logits.shape == (plan.num_edges,)
    assert not logits[torch.from_numpy(~plan.edge_owned)].any(), "edges that another rank counts"
    ids = torch.from_numpy(plan.edge_ids)
    upstream = torch.sin(1.3 * ids.double())
    logits.backward(upstream)
    assert model.gradients().reduce(world.transport) == 0
    gradients = {name: one.grad for name, one in model.named_parameters()}
    owned = torch.from_numpy(plan.edge_owned)
    return ids[owned], logits.detach()[owned], gradients, dict(model.named_buffers())


def answer(make, num_ranks, key=1):
    """Logits in global order, gradients and buffers, the same bits on all ranks."""
    found = run_ranks(_answer, num_ranks, make, key)
    if num_ranks == 4:
        assert [len(ids) for ids, *_ in found].count(0) == 1
    order = torch.argsort(torch.cat([ids for ids, *_ in found]))
    for rank in found:
        for mine, theirs in zip(rank[2:4], found[0][2:4]):
            assert mine.keys() == theirs.keys()
            assert all((mine[name] is theirs[name] is None) or torch.equal(mine[name], theirs[name]) for name in mine)
    return torch.cat([logits for _, logits, *_ in found])[order], *found[0][2:]


def difference(one, other):
    return float((one - other).abs().max() / other.abs().max().clamp(min=1e-300))


def assert_same(found, expected):
    assert difference(found[0], expected[0]) < ROUNDING
    for mine, theirs in zip(found[1:3], expected[1:3]):
        for name in theirs:
            assert difference(mine[name].double(), theirs[name].double()) < ROUNDING, name


MODELS = {
    "norms, edge states": evolving,
    "dropout": lambda: evolving(0.3),
    "logits in a column": own_models.small,
    "every argument": lambda: own_models.filled(own_models.WithBatch()),
}


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_logits_gradients_and_buffers_are_those_of_one_rank(model, num_ranks):
    assert_same(answer(MODELS[model], num_ranks), answer(MODELS[model], 1))


def whole_event():
    """Arguments of the bare module, in the order that edges have in a store."""
    nodes, edges = EVENT.order.original_row, EVENT.order.original_position
    return (
        torch.from_numpy(EVENT.graph.features[nodes]).double(),
        torch.from_numpy(EVENT.edge_index),
        torch.from_numpy(EVENT.graph.edge_features[edges]).double(),
    )


@pytest.mark.parametrize("num_ranks", [1, 4])
def test_the_answer_is_that_of_the_bare_module_on_the_whole_event(num_ranks):
    bare = evolving().double()
    logits = bare(*whole_event())
    logits.backward(torch.sin(1.3 * torch.arange(len(logits)).double()))
    found = answer(evolving, num_ranks)
    assert difference(found[0], logits.detach()) < ROUNDING
    for name, parameter in bare.named_parameters():
        assert difference(found[1][f"module.{name}"], parameter.grad) < ROUNDING
    for name, buffer in bare.named_buffers():
        assert difference(found[2][f"module.{name}"].double(), buffer.double()) < ROUNDING


def test_the_key_decides_what_is_dropped_and_without_one_nothing_is():
    drops = MODELS["dropout"]
    one, again, other = (answer(drops, 2, key)[0] for key in (1, 1, 2))
    assert torch.equal(one, again)
    assert difference(other, one) > 1e-3
    assert torch.equal(answer(drops, 2, None)[0], answer(evolving, 2, None)[0])


def _modes(world):
    part, model = part_of(world), OnEvents(evolving(0.2).double())
    seen = []
    for key in (1, None, 2, None):
        before = {name: value.clone() for name, value in model.named_buffers()}
        model(part.graph, part.halo, key)
        changed = any(not torch.equal(before[name], value) for name, value in model.named_buffers())
        seen.append((model.module.training, model.module.of_nodes[1].training, changed))
    return seen


def test_a_call_with_a_key_trains_and_one_without_evaluates_and_changes_nothing():
    assert run_ranks(_modes, 2) == [[(True,) * 3, (False,) * 3] * 2] * 2


def test_a_network_that_draws_in_evaluation_draws_the_same_each_time_on_any_ranks():
    drops = lambda: own_models.filled(own_models.DropsAlways())  # noqa: E731
    one, again, split = (answer(drops, num_ranks, None)[0] for num_ranks in (1, 1, 4))
    assert torch.equal(one, again)
    assert difference(split, one) < ROUNDING
    assert difference(answer(own_models.small, 1, None)[0], one) > 1e-3


class Drops(own_models.Small):
    """Drops numbers, in a checkpoint of torch's say, which is computed again in backward."""

    def __init__(self, through):
        super().__init__()
        self.through = through

    def changed(self, x):
        return self.through(lambda x: torch.nn.functional.dropout(x, 0.4), x)


PLAIN = partial(checkpoint, use_reentrant=False)


@pytest.mark.parametrize("through", [PLAIN, partial(PLAIN, context_fn=domainpar.kept_ghosts)])
def test_what_a_checkpoint_of_the_network_drops_is_dropped_once_more_in_backward(through):
    expected = answer(lambda: own_models.filled(Drops(lambda drop, x: drop(x))), 1)
    for num_ranks in (1, 2, 4):
        assert_same(answer(lambda: own_models.filled(Drops(through)), num_ranks), expected)


class Noisy(own_models.Small):
    """Adds noise that torch draws, of which no rank knows that it has rows."""

    def forward(self, x, edge_index):
        return super().forward(x + torch.rand(x.shape[0], 1, dtype=x.dtype), edge_index)


def test_noise_that_the_network_draws_is_that_of_the_key_on_every_rank():
    one, again, other = (answer(lambda: own_models.filled(Noisy()), *how)[0] for how in ((1, 7), (4, 7), (1, 8)))
    assert difference(again, one) < ROUNDING
    assert difference(other, one) > 1e-3


class Running(own_models.Small):
    """Puts a new tensor in the place of a buffer."""

    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros(4))

    def changed(self, x):
        self.seen = 0.9 * self.seen + 0.1 * x.detach().mean(0)
        return x - self.seen


def test_a_buffer_in_whose_place_another_is_put_stays_where_it_is():
    def run(world):
        part, model = part_of(world), OnEvents(own_models.filled(Running()).double())
        (before,) = model.changing
        model(part.graph, part.halo, 1)
        return model.module.seen is before, before.clone()

    found = [run_ranks(run, num_ranks) for num_ranks in (1, 3)]
    assert all(stays for of_ranks in found for stays, _ in of_ranks)
    assert all(difference(seen, found[0][0][1]) < ROUNDING for _, seen in found[1])


def test_sums_are_those_of_the_last_call():
    def counted(world):
        part, model = part_of(world), OnEvents(evolving().double())
        return [(model(part.graph, part.halo, key), model.sums)[1] for key in (1, 2, None)]

    for first, second, calm in run_ranks(counted, 2):
        assert first == second > 0
        assert calm == 0, "running statistics need no sums"
    assert run_ranks(counted, 1) == [[0, 0, 0]]


def test_shares_of_gradients_wait_for_one_sum_of_all():
    def sums_of_backward(world):
        part, model = part_of(world), OnEvents(own_models.small().double())
        logits, ranks = model(part.graph, part.halo, 1), ranks_of(world.transport)
        before = ranks.num_sums
        logits.sum().backward()
        return ranks.num_sums - before

    assert run_ranks(sums_of_backward, 3) == [0] * 3


WANTED = {
    "two": (own_models.Small, ("x", "edge_index")),
    "all, and one with a default": (own_models.WithBatch, ("x", "edge_index", "edge_attr", "batch")),
    "data": (own_models.OfData, ("data",)),
}


@pytest.mark.parametrize(("make", "expected"), WANTED.values(), ids=WANTED)
def test_a_module_gets_what_its_forward_names(make, expected):
    assert wanted_arguments(make()) == expected


def test_arguments_may_be_optional_and_by_name_only():
    class Net(nn.Module):
        def forward(self, edge_index, *rest, x, edge_attr=None, depth=3, **more):
            return x

    assert wanted_arguments(Net()) == ("x", "edge_index", "edge_attr")


def test_a_module_that_needs_other_arguments_is_refused_by_name():
    class Net(nn.Module):
        def forward(self, x, adjacency, *, weights):
            return x

    with pytest.raises(ValueError, match="adjacency, weights; .*x, edge_index"):
        OnEvents(Net())


def test_a_module_that_takes_arguments_by_place_only_is_refused():
    with pytest.raises(ValueError, match="forward needs x; here it can have .* by name"):
        OnEvents(own_models.ByPlace())


def test_a_module_that_keeps_rows_in_its_state_is_refused_before_training():
    class Keeps(own_models.Small):
        def __init__(self):
            super().__init__()
            self.register_buffer("seen", None)

        def forward(self, x, edge_index):
            self.seen = x > 0
            return super().forward(x, edge_index)

    event = TiledEvent.random(5, 30, 60, 6)
    x = torch.randn(30, 3, dtype=torch.float64)
    with pytest.raises(NotExact, match="buffer seen"):
        OnEvents(own_models.filled(Keeps()).double()).verify(torch.from_numpy(event.edge_index), x, torch.zeros(60, 6))


def test_hooks_on_parameters_are_refused():
    """They would be called with one rank's share of a gradient."""
    with pytest.raises((ValueError, NotExact), match="hook"):
        answer(own_models.Hooked, 2)


def test_complex_parameters_are_refused():
    with pytest.raises((ValueError, NotExact), match="complex"):
        OnEvents(own_models.OfComplexNumbers())


@pytest.mark.parametrize("make", [own_models.OfNodes, own_models.TwoColumns, own_models.APair])
def test_a_result_that_is_no_logit_for_each_edge_is_refused(make):
    with pytest.raises(ValueError, match="returned a t.*; return one logit"):
        answer(lambda: own_models.filled(make()), 2)


def test_nodes_are_not_taken_for_edges_where_there_are_as_many():
    event = TiledEvent.random(5, 30, 30, 6)

    def run(world):
        part = part_of(world, event)
        return OnEvents(own_models.filled(own_models.OfNodes()).double())(part.graph, part.halo, 1)

    with pytest.raises(ValueError, match="one logit for each edge"):
        run_ranks(run, 1)


def test_logits_have_the_type_of_the_features():
    class Half(own_models.Small):
        def forward(self, x, edge_index):
            return super().forward(x, edge_index).to(torch.float32)

    def run(world):
        part = part_of(world)
        return OnEvents(own_models.filled(Half()).double())(part.graph, part.halo, 1).dtype

    assert run_ranks(run, 2) == [torch.float64] * 2


@pytest.mark.parametrize("num_ranks", [1, 3])
@pytest.mark.parametrize(("num_nodes", "num_edges"), [(0, 0), (5, 0), (1, 3)])
def test_events_without_edges_or_nodes_go_through(num_ranks, num_nodes, num_edges):
    event = TiledEvent.random(5, num_nodes, num_edges, 6, tiny=True)

    def run(world):
        part, model = part_of(world, event), OnEvents(own_models.small().double())
        logits = model(part.graph, part.halo, 1)
        logits.backward(torch.ones_like(logits))
        assert model.gradients().reduce(world.transport) == 0
        return len(logits), model.module.lin.weight.grad is not None

    found = run_ranks(run, num_ranks)
    assert all(has_gradient for _, has_gradient in found)
    assert num_edges <= sum(length for length, _ in found)


def test_a_network_without_edges_that_reach_its_parameters_has_a_gradient_of_zeros():
    event = TiledEvent.random(5, 4, 0, 6, tiny=True)

    def run(world):
        part, model = part_of(world, event), OnEvents(own_models.small().double())
        model(part.graph, part.halo, 1).sum().backward()
        model.gradients().reduce(world.transport)
        return model.module.lin.weight.grad.abs().sum().item()

    assert run_ranks(run, 2) == [0.0, 0.0]


def test_two_parts_may_be_used_in_turns():
    other = TiledEvent.random(4, 33, 120, 6, reach=2)

    def run(world):
        model = OnEvents(own_models.small().double())
        parts = [part_of(world), part_of(world, other)]
        first, second, again = (model(part.graph, part.halo, 1) for part in (*parts, parts[0]))
        return torch.equal(first, again), second.shape == (parts[1].graph.num_edges,)

    assert run_ranks(run, 3) == [(True, True)] * 3


def test_what_is_made_of_a_part_goes_with_it():
    def run(world):
        part, model = part_of(world), OnEvents(own_models.small().double())
        model(part.graph, part.halo, 1)
        gone = weakref.ref(next(iter(model._parts.values()))[0])
        assert gone() is not None
        del part
        gc.collect()
        return gone() is None, len(model._parts)

    assert run_ranks(run, 1) == [(True, 0)]


def test_checkpoints_of_it_name_what_the_user_named():
    names = set(OnEvents(evolving()).state_dict())
    assert names == {f"module.{name}" for name in evolving().state_dict()}


def test_a_copy_computes_with_its_own_parameters():
    model = OnEvents(evolving().double())
    with torch.no_grad():
        other = copy.deepcopy(model)
        for parameter in other.parameters():
            parameter.zero_()
        part = part_of(World.alone())
        assert not other(part.graph, part.halo).any()
        assert model(part.graph, part.halo).any()


class Supervised(nn.Module):
    """Scores each edge twice in training, and says so."""

    deep_supervision = True

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 1), nn.Linear(3, 1)

    def forward(self, x, edge_index):
        scores = [layer(x[edge_index[0]] * x[edge_index[1]]) for layer in (self.first, self.last)]
        return torch.cat(scores, 1) if self.training else scores[-1]


def _readouts(world):
    part, model = part_of(world), OnEvents(own_models.filled(Supervised()).double())
    several, one = model(part.graph, part.halo, 1), model(part.graph, part.halo, None)
    owned = torch.from_numpy(part.graph.plan.edge_owned)
    return torch.from_numpy(part.graph.plan.edge_ids)[owned], several.detach()[:, owned], one.detach()[owned]


def test_a_network_that_says_so_may_return_several_readouts_in_training():
    whole = own_models.filled(Supervised()).double()(*whole_event()[:2]).detach()
    for num_ranks in (1, 4):
        ids, several, last = zip(*run_ranks(_readouts, num_ranks))
        order = torch.argsort(torch.cat(ids))
        several, last = torch.cat(several, 1)[:, order], torch.cat(last)[order]
        assert difference(several, whole.t()) < ROUNDING
        assert difference(last, whole[:, 1]) < ROUNDING
