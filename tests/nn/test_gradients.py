"""The gradient sink: every rank reduces every parameter, whatever it computed itself."""

from contextlib import contextmanager

import numpy as np
import pytest
import torch
from one_mlp import an_mlp
from tiled import TiledEvent, sha
from torch import nn

from domainpar.nn.gradients import GradientSink
from domainpar.nn.interaction import InteractionNetwork
from domainpar.nn.program import Team, set_threads
from domainpar.nn.stages import EdgeStage, NodeStage
from domainpar.testing import run_ranks

EVENT = TiledEvent.random(0, 50, 200, num_tiles=6, reach=2)


class Two(nn.Module):
    """Two stages; the second one's first layer does not learn."""

    def __init__(self):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.first = NodeStage(an_mlp(3, (16,), generator))
        self.second = NodeStage(an_mlp(3, (16, 16), generator))
        self.second.mlp.linears[0].requires_grad_(False)


def _touch_first_only(world):
    model = Two()
    sink = GradientSink(model)
    part = EVENT.part(world.transport, EVENT.grouping("one part", world.size))  # all others own nothing
    features = part.graph.features[: part.graph.num_owned]
    model.first([features], part.graph).sum().backward()
    assert sink.reduce(world.transport) == 0
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def test_parameters_that_nobody_touched_get_a_gradient_of_zero_on_every_rank():
    alone, *_ = run_ranks(_touch_first_only, 1)
    for gradients in run_ranks(_touch_first_only, 3):
        for name, gradient in gradients.items():
            if name.startswith("second.mlp.linears.0"):
                assert gradient is None, "it does not learn"
            elif name.startswith("second"):
                assert not gradient.any()
            else:
                assert torch.equal(gradient, alone[name])
                assert gradient.any()


def _two_steps(world, num_steps):
    model = InteractionNetwork(3, 6, hidden=16, graph_iters=1)
    sink = GradientSink(model)
    part = EVENT.part(world.transport, EVENT.grouping("ranges", world.size))
    for _ in range(num_steps):
        model(part.graph, part.halo).sum().backward()
        sink.reduce(world.transport)
    return [parameter.grad for parameter in model.parameters()]


def test_every_reduction_starts_again_from_zero():
    once, twice = run_ranks(_two_steps, 2, 1), run_ranks(_two_steps, 2, 2)
    assert all(torch.equal(a, b) for a, b in zip(once[0], twice[1], strict=True))


@pytest.mark.parametrize("early", [False, True])
def test_a_partial_that_is_not_finite_on_one_rank_is_counted_on_all(early):
    def on_rank(world):
        model = Two()
        sink = GradientSink(model, [model.first] if early else [])
        if early:
            sink.expect_last_pass(world.transport)
        partials = [torch.ones_like(parameter) for parameter in model.first.trainable()]
        if world.rank == 1:
            partials[0][0, 0] = float("inf")
        give(model.first, model.first.trainable(), partials)
        model.first.finished()  # sums over ranks are under way, if early
        return sink.rejected_now(), sink.reduce(world.transport), sink.rejected_now()

    assert run_ranks(on_rank, 3) == [(0, 1, 0), (1, 1, 0), (0, 1, 0)]


def give(stage, parameters, partials):
    """One partial for each number of some parameters; frozen ones get none."""
    pairs = [(table, own) for table, own in zip(partials, parameters) if own.requires_grad]
    finite = [table.where(table.isfinite(), 0) for table, _ in pairs]
    rejected = sum(int((~table.isfinite()).sum()) for table, _ in pairs)
    if pairs:
        stage.add_limbs([own for _, own in pairs], limbs_of(finite), rejected, 0.0)


def limbs_of(tables):
    """Numbers as sums of integers: limbs of all tables, one behind the other."""
    numbers = torch.cat([torch.as_tensor(table).detach().flatten() for table in tables])
    return np.stack([(numbers * 2**20).long(), torch.zeros_like(numbers).long()])


def test_sums_of_integers_are_added_to_partials_and_what_they_left_out_is_counted_on_all_ranks():
    def on_rank(world):
        model = Two()
        sink = GradientSink(model)
        parameters = model.first.trainable()
        give(model.first, parameters[1:3], [torch.full_like(parameter, 0.25) for parameter in parameters[1:3]])
        for _ in range(2):
            limbs = limbs_of([torch.full_like(parameter, 1.5 + world.rank) for parameter in parameters])
            model.first.add_limbs(parameters, limbs, 0, 0.0)
        trained = model.second.trainable()  # some are frozen
        own = limbs_of([torch.full_like(parameter, 7.0) for parameter in trained])
        model.second.add_limbs(trained, own, 2 * world.rank, float("nan"))
        found = sink.rejected_now(), sink.reduce(world.transport), sink.rejected_now()
        return found, [None if p.grad is None else p.grad.unique().tolist() for p in model.parameters()]

    for rank, (counts, gradients) in enumerate(run_ranks(on_rank, 3)):
        assert counts == (2 * rank, 6, 0)
        assert gradients[:4] == [[15.0], [15.75], [15.75], [15.0]]
        assert gradients[4:6] == [None, None]
        assert gradients[6:] == [[21.0]] * (len(gradients) - 6)


@pytest.mark.parametrize("value", [float("nan"), 1e30])
def test_a_gradient_that_cannot_be_added_up_is_counted_on_all_ranks_and_the_largest_is_told(value):
    def back(world):
        model, told = Two(), []
        sink = GradientSink(model)
        add_limbs = sink.add_limbs
        sink.add_limbs = lambda *given: told.append(given[2:]) or add_limbs(*given)
        part = EVENT.part(world.transport, EVENT.grouping("ranges", world.size))
        out = model.first([part.graph.features[: part.graph.num_owned]], part.graph)
        upstream = torch.ones_like(out)
        upstream[0] = value if world.rank == 1 else 1
        out.backward(upstream)
        return told, sink.rejected_now(), sink.reduce(world.transport)

    found = run_ranks(back, 3)
    (((rejected, largest),), own, of_all) = found[1]
    assert rejected == own == of_all > 0
    assert not largest < min(value, 1e29)
    assert [counts for _, *counts in (found[0], found[2])] == [[0, of_all]] * 2
    assert found[0][0] == found[2][0] == [(0, 0.0)]


@pytest.mark.parametrize("value", [float("nan"), 1e30])
def test_what_cannot_be_added_up_is_counted_whichever_thread_computed_it(monkeypatch, value):
    """A team shares tiles out as it comes; here one thread of three, another each time, does all of them."""

    def counts(world, only):
        def alone(team, threads, worker, *others):
            assert threads == 3
            while worker(only)(2**62):
                pass

        monkeypatch.setattr(Team, "each", alone)
        set_threads(3)
        model, told = Two(), []
        sink = GradientSink(model)
        add_limbs = sink.add_limbs
        sink.add_limbs = lambda *given: told.append(given[2:]) or add_limbs(*given)
        part = EVENT.part(world.transport, EVENT.grouping("one part", 1))
        out = model.first([part.graph.features], part.graph)
        out.backward(torch.full_like(out, value))
        return sink.rejected_now()

    (first,), *others = [run_ranks(counts, 1, thread) for thread in range(3)]
    assert others == [[first]] * 2
    assert first > 0


def test_limbs_may_be_larger_than_a_carried_low_limb_times_the_tiles():
    """Sums of many threads and calls, of which each is carried."""
    model = Two()
    sink = GradientSink(model)
    parameters = model.first.trainable()
    limbs = limbs_of([torch.zeros_like(parameter) for parameter in parameters])
    limbs[1] = 2**52 - 1
    for _ in range(3000):
        model.first.add_limbs(parameters, limbs, 0, 0.0)
    assert run_ranks(lambda world: sink.reduce(world.transport), 1) == [0]
    expected = torch.tensor(3000 * (2**52 - 1) / 2**72, dtype=torch.float64).to(parameters[0].dtype)
    assert all((parameter.grad == expected).all() for parameter in parameters)


def test_without_a_sink_the_first_backward_pass_says_what_is_missing():
    stage = Two().first
    parameters = stage.trainable()
    with pytest.raises(RuntimeError, match=r"make GradientSink\(model\) before the first backward pass"):
        stage.add_limbs(parameters, limbs_of(parameters), 0, 0.0)


def _with_frozen(world, frozen):
    model = InteractionNetwork(3, 6, hidden=16, graph_iters=2)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not any(part in name for part in frozen))
    sink = GradientSink(model)
    part = EVENT.part(world.transport, EVENT.grouping("ranges", world.size))
    logits = model(part.graph, part.halo)
    logits.backward(torch.tanh(logits.detach()))
    assert sink.reduce(world.transport) == 0
    return {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.mark.parametrize(
    "frozen", [["linears.0.weight"], ["norms.0", "linears.1.bias"], ["edge_stages", "node_encoder"]]
)
def test_parameters_that_are_frozen_get_no_gradient_and_change_no_bit_of_the_others(frozen):
    everything = run_ranks(_with_frozen, 1, [])[0]
    for gradients in run_ranks(_with_frozen, 2, frozen):
        for name, gradient in gradients.items():
            if any(part in name for part in frozen):
                assert gradient is None
            else:
                assert torch.equal(gradient, everything[name])


def test_some_parameters_of_a_stage_can_be_given_their_gradient_apart():
    model = Two()
    sink = GradientSink(model)
    parameters = model.first.trainable()
    give(model.first, parameters[1:3], [torch.ones_like(parameter) for parameter in parameters[1:3]])
    give(model.first, parameters[:1], [torch.full_like(parameters[0], 3.0)])
    give(model.second, list(model.second.mlp.linears[0].parameters()), [torch.ones(16, 3), torch.ones(16)])  # frozen
    assert run_ranks(lambda world: sink.reduce(world.transport), 1) == [0]
    assert [parameter.grad.unique().tolist() for parameter in parameters] == [[3.0], [1.0], [1.0], [0.0]]


def test_stages_that_share_a_perceptron_add_up_but_those_that_share_a_part_of_one_are_refused():
    model = nn.ModuleList([Two().first, NodeStage(an_mlp(3, (16, 16), torch.Generator()))])
    model.append(NodeStage(model[0].mlp))
    sink = GradientSink(model)
    for stage in (model[0], model[2]):
        give(stage, stage.trainable(), [torch.ones_like(parameter) for parameter in stage.trainable()])
    assert run_ranks(lambda world: sink.reduce(world.transport), 1) == [0]
    assert model[0].mlp.linears[0].weight.grad.unique().tolist() == [2.0]
    model[1].mlp.linears[1] = NodeStage(an_mlp(16, (16,), torch.Generator())).mlp.linears[0]
    model.append(NodeStage(an_mlp(16, (16, 16), torch.Generator())))
    model[3].mlp.linears[0] = model[1].mlp.linears[1]
    with pytest.raises(ValueError, match="stage 3 shares"):
        GradientSink(model)


def _rejected(world, frozen):
    """Partials left out where a norm's scale makes all gradients of the layer before it too large, and no others."""
    stage = EdgeStage(an_mlp(2 * 3 + 6, (16,), torch.Generator().manual_seed(0)))
    nn.init.constant_(stage.mlp.norms[0].weight, 1e20)
    stage.mlp.linears[0].weight.requires_grad_(not frozen)
    stage.mlp.linears[0].bias.requires_grad_(not frozen)
    sink = GradientSink(stage)
    part = EVENT.part(world.transport, EVENT.grouping("ranges", world.size))
    nodes = part.halo.spread(part.graph.features[: part.graph.num_owned])
    new_edges, sums = stage(nodes, part.graph.edge_features, part.graph)
    (new_edges.sum() + sums.sum()).backward()
    return sink.reduce(world.transport)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_what_is_too_large_is_counted_unless_it_belongs_to_frozen_parameters(num_ranks):
    assert min(run_ranks(_rejected, num_ranks, False)) > 0
    assert run_ranks(_rejected, num_ranks, True) == [0] * num_ranks


def _calls_of_a_step(world, order, passes, over_ranks):
    """Numbers of each call on the transport, in the order of their starts, and the gradients after some passes back."""
    model = InteractionNetwork(3, 6, hidden=16, graph_iters=4, order=order, recompute_every=None)
    sink = model.gradients(over_ranks)
    part = EVENT.part(world.transport, EVENT.grouping("one part", world.size))  # all others own nothing
    calls = []
    for attempt in range(passes):
        logits = model(part.graph, part.halo)
        if attempt == passes - 1:
            sink.expect_last_pass(world.transport)
            with recorded(world.transport, calls):
                logits.sum().backward()
                calls.append("backward is over")
                assert sink.rejected_now() == 0
                assert sink.reduce(world.transport) == 0
        else:
            logits.sum().backward()
    return calls, sha(*(parameter.grad for parameter in model.parameters()))


@contextmanager
def recorded(transport, calls):
    """Adds what is started on a transport to a list: rows exchanged, or how many integers are summed."""
    with pytest.MonkeyPatch.context() as patch:
        start, start_sum = transport.start, transport.start_all_reduce
        patch.setattr(transport, "start", lambda *args: (calls.append("exchange"), start(*args))[1])
        patch.setattr(transport, "start_all_reduce", lambda it: (calls.append(it.numel()), start_sum(it))[1])
        yield


@pytest.mark.parametrize("order", ["edge-first", "node-first"])
def test_sums_of_three_iterations_start_before_the_first_one_has_done_its_pass_back(order):
    found = run_ranks(_calls_of_a_step, 3, order, 2, True)
    calls = found[0][0]
    assert [each for each, _ in found] == [calls] * 3, "one order of calls on all ranks"
    early, end, late = calls.index(next(it for it in calls if isinstance(it, int))), calls.index("backward is over"), -1
    assert early < end, "behind backward"
    assert "exchange" in calls[early:end], "that goes on for some time"
    assert calls[end + 1 :] == [calls[late]], "and one sum is left"
    numbers = sum(it.numel() for it in InteractionNetwork(3, 6, hidden=16, graph_iters=4, order=order).parameters())
    assert calls[early] + calls[late] == 2 * numbers + 2
    assert calls[early] > numbers
    plain = run_ranks(_calls_of_a_step, 1, order, 2, False)
    assert {bits for _, bits in found} == {plain[0][1]}
    assert sum(isinstance(it, int) for it in plain[0][0]) == 1, "one sum where nobody waits"


def test_stages_that_all_iterations_share_are_summed_when_backward_is_over():
    assert not InteractionNetwork(3, 6, hidden=16, graph_iters=4, shared_weights=True).early_in_backward()


def test_a_rank_whose_group_has_no_event_starts_its_sums_in_the_order_of_those_that_have(monkeypatch):
    def step(world):
        world.transport.doing = f"step 5, {'backward' if world.data_group == 0 else 'reduce'}"
        model = InteractionNetwork(3, 6, hidden=16, graph_iters=4)
        sink = model.gradients(over_ranks=True)
        if world.data_group == 0:
            part = EVENT.part(world.domain, EVENT.grouping("ranges", world.domain.size))
            logits = model(part.graph, part.halo)
            sink.expect_last_pass(world.transport)
            logits.sum().backward()
        assert sink.reduce(world.transport) == 0
        return sha(*(parameter.grad for parameter in model.parameters()))

    monkeypatch.setenv("DOMAINPAR_CHECK_CALLS", "1")  # which compares what ranks are in before each call
    alone = run_ranks(step, 1)
    assert set(run_ranks(step, 4, domain_size=2)) == set(alone)
