"""Operations of a step are those of the formula: 2 m n k for each product of matrices."""

import numpy as np
import pytest
import torch
from one_mlp import an_mlp
from random_events import random_event
from tiled import TiledEvent
from torch import nn

from domainpar.nn.flops import counted
from domainpar.nn.gradients import GradientSink
from domainpar.nn.interaction import InteractionNetwork
from domainpar.nn.stages import EdgeStage, NodeStage, run_chain
from domainpar.testing import run_ranks

NODES, WIDTH = 60, 16


@pytest.fixture(scope="module")
def event():
    return TiledEvent.of(random_event(2, NODES, 300, reach=2), np.arange(NODES) * 4 // NODES, 4)


def part_of(event, world):
    return event.part(world.transport, event.grouping("ranges", world.size))


def test_products_of_torch_are_counted_both_ways():
    linear, x = nn.Linear(5, 3), torch.ones(7, 5, requires_grad=True)
    with counted() as flops:
        linear(x).sum().backward()
    assert (flops.of_torch, flops.of_stages) == (3 * 2 * 7 * 5 * 3, 0)
    with counted() as nothing:
        torch.ones(7, 5).add_(1).sum()
    assert nothing.total == 0


def test_a_node_stage_counts_the_rows_it_owns_and_what_backward_makes(event):
    def count(world, keeps):
        part, stage = part_of(event, world), NodeStage(an_mlp(3, (WIDTH, 32), torch.Generator()))
        stage.keeps_layers = keeps
        GradientSink(stage)
        rows = part.graph.features[: part.graph.num_owned].requires_grad_()
        with counted() as forward:
            out = stage([rows], part.graph)
        with counted() as backward:
            out.sum().backward()
        return part.graph.num_owned, forward.of_stages, backward.of_stages

    for keeps, times in ((True, 2), (False, 3)):
        for rows, forward, backward in run_ranks(count, 2, keeps):
            grad_rows = 2 * rows * (3 * WIDTH + WIDTH * 32)
            assert (forward, backward) == (grad_rows, times * grad_rows)


def test_an_edge_stage_takes_products_of_nodes_once_for_each_node(event):
    def count(world):
        part, stage = part_of(event, world), EdgeStage(an_mlp(2 * WIDTH + 6, (WIDTH, WIDTH), torch.Generator()))
        GradientSink(stage)
        nodes = torch.ones(part.graph.num_owned, WIDTH, requires_grad=True)
        with counted() as flops:
            stage(part.halo.spread(nodes), part.graph.edge_features, part.graph)
        grad_edges = part.graph.num_edges * (6 * WIDTH + WIDTH * WIDTH)
        return flops.of_stages, 2 * (grad_edges + part.graph.plan.num_local * 2 * WIDTH * WIDTH)

    for found, expected in run_ranks(count, 3):
        assert found == expected


def test_stages_of_a_chain_and_of_ghosts_are_counted_by_the_widths_that_they_take(event):
    def count(world):
        part, draw = part_of(event, world), torch.Generator()
        stages = [EdgeStage(an_mlp(2 * 3 + 6, (WIDTH,), draw)), EdgeStage(an_mlp(WIDTH, (32, 1), draw, readout=True))]
        of_nodes = NodeStage(an_mlp(3, (WIDTH,), draw))
        nodes = part.halo.spread(part.graph.features[: part.graph.num_owned])
        with torch.no_grad(), counted() as flops:
            run_chain(stages, nodes, part.graph.edge_features, part.graph, sums=True, keys=[None, None])
        with counted() as of_ghosts:
            of_nodes.run_on_ghosts([nodes.finish()], part.graph)
        plan = part.graph.plan
        edges, local = part.graph.num_edges * (6 * WIDTH + WIDTH * 32 + 32), plan.num_local * 2 * 3 * WIDTH
        return (flops.of_stages, of_ghosts.of_stages), (2 * (edges + local), 2 * plan.num_ghosts * 3 * WIDTH)

    for found, expected in run_ranks(count, 3):
        assert found == expected


def test_counts_of_ranks_differ_by_their_ghosts_alone(event):
    """What all ranks compute together is what one computes, and what copies cost."""

    def count(world):
        part, model = part_of(event, world), InteractionNetwork(3, 6, hidden=WIDTH, graph_iters=2, seed=1)
        gradients = model.gradients()
        with counted() as flops:
            logits = model(part.graph, part.halo)
            logits.sum().backward()
        gradients.reduce(world.transport)
        return flops.total

    (alone,), many = run_ranks(count, 1), run_ranks(count, 3)
    assert alone < sum(many) < 3 * alone
