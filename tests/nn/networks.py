"""A network on an event split over ranks: its logits in global order and its gradients; importable by spawned ranks."""

from dataclasses import dataclass

import dense
import numpy as np
import torch
from random_events import random_event
from tiled import TiledEvent, sha

from domainpar.nn.interaction import InteractionNetwork, InteractionsOnStages
from domainpar.nn.published import InteractionGNN
from domainpar.testing import run_ranks


@dataclass(frozen=True, eq=False)
class Answer:
    """What a network makes of an event.

    Attributes:
        logits: Of all edges, in global order, [num_edges] or [readouts, num_edges].
        gradients: Of every parameter, by name, for an upstream gradient that is a function of the edge.
    """

    logits: torch.Tensor
    gradients: dict[str, torch.Tensor]

    @property
    def sha(self):
        """One hash of all its bits."""
        return sha(self.logits, *self.gradients.values())


def tiled_event(num_nodes=70, num_edges=400, num_edge_features=6):
    """An event with self-loops, duplicate edges, isolated nodes and three tiles without any node."""
    graph = random_event(2, num_nodes, num_edges, num_edge_features=num_edge_features, reach=2)
    tiles = np.sort(np.random.default_rng(2).choice([0, 1, 3, 4, 6, 8], num_nodes))
    return TiledEvent.of(graph, tiles, 9, tiny=num_edges <= 1)


def network(event, dtype=torch.float64, published=False, **flags):
    """A small network for the features of an event, or `acorn` on stages; the same weights every time."""
    if published:
        return InteractionsOnStages(published_network(event, **flags).to(dtype))
    return InteractionNetwork(3, event.graph.edge_features.shape[1], hidden=16, dtype=dtype, **flags)


def published_network(event, graph_iters=3):
    """`acorn` in plain torch, in float64; biases are no longer what they begin with."""
    model = InteractionGNN(3, event.graph.edge_features.shape[1], hidden=16, graph_iters=graph_iters).double()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, dtype=torch.float64, generator=generator)
    return model


def upstream(event, dtype=torch.float64):
    """Gradient of each logit, in global order; of one sign, so that rounding does not drown in cancellation."""
    generator = torch.Generator().manual_seed(5)
    return torch.rand(event.graph.num_edges, dtype=torch.float64, generator=generator).to(dtype)


def pull(logits, upstream):
    """Back from logits, given the gradient of those of one readout; that of each further one is as much larger."""
    factors = torch.arange(1, len(torch.atleast_2d(logits)) + 1, dtype=upstream.dtype, device=upstream.device)
    logits.backward((factors[:, None] * upstream).view_as(logits))


def forward_and_back(world, event, grouping="random", key=None, dtype=torch.float64, device="cpu", **flags):
    """Global ids of the local edges, whether they are owned, their logits, and the gradients summed over ranks."""
    part = event.part(world.transport, event.grouping(grouping, world.size, seed=world.size), dtype, device=device)
    model = network(event, dtype, **flags).to(device)
    sink = model.gradients()
    logits = model(part.graph, part.halo, key)
    pull(logits, upstream(event, dtype)[torch.from_numpy(part.graph.plan.edge_ids)].to(device))
    assert sink.reduce(world.transport) == 0
    plan = part.graph.plan
    gradients = {name: parameter.grad.cpu() for name, parameter in model.named_parameters()}
    return plan.edge_ids, plan.edge_owned, logits.detach().cpu().numpy(), gradients


def whole(event, found, copies_agree=True):
    """The one answer of what all ranks found, who must have the same gradients and, of a cut edge, the same logit."""
    logits = np.full((*found[0][2].shape[:-1], event.graph.num_edges), np.nan, found[0][2].dtype)
    for ids, owned, theirs, gradients in found:
        logits[..., ids[owned]] = theirs[..., owned]
        assert sha(*gradients.values()) == sha(*found[0][3].values()), "gradients of two ranks"
    for ids, _, theirs, _ in found if copies_agree else ():
        assert np.array_equal(logits[..., ids], theirs), "logits of two copies of an edge"
    return Answer(torch.from_numpy(logits), found[0][3])


def on_ranks(event, num_ranks, *, copies_agree=True, timeout=60.0, **how):
    """The answer of a number of ranks; `how` goes to `forward_and_back`."""
    return whole(event, run_ranks(_forward_and_back, num_ranks, event, how, timeout=timeout), copies_agree)


def _forward_and_back(world, event, how):
    return forward_and_back(world, event, **how)


def by_formula(event, key=None, **flags):
    """The answer of plain torch on the whole event, in float64."""
    model = network(event, **flags)
    if isinstance(model, InteractionsOnStages):
        features, edge_features, src, dst = tables(event)
        logits = model.module(features, torch.stack([src, dst]), edge_features)
    else:
        logits = dense.interaction_network(model, *tables(event), key)
    pull(logits, upstream(event))
    gradients = {
        name: torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        for name, parameter in model.named_parameters()
    }
    return Answer(logits.detach(), gradients)


def tables(event, dtype=torch.float64):
    """Features of all nodes and edges, and both ends of the edges, in stored order."""
    features = torch.from_numpy(event.graph.features[event.order.original_row]).to(dtype)
    edge_features = torch.from_numpy(event.graph.edge_features[event.order.original_position]).to(dtype)
    return features, edge_features, *map(torch.from_numpy, event.edge_index)


def distance(found, expected):
    """The largest max |difference| / max |value| of logits and of each gradient."""
    gradients = [_distance(found.gradients[name], expected.gradients[name]) for name in expected.gradients]
    return max(distance_of_logits(found, expected), *gradients)


def distance_of_logits(found, expected):
    """max |difference| / max |value|."""
    return _distance(found.logits, expected.logits)


def distance_of_gradients(found, expected):
    """Length of the difference of all gradients as one vector, over its length."""
    ours, theirs = (
        torch.cat([one.double().flatten() for one in each.gradients.values()]) for each in (found, expected)
    )
    return float((ours.double() - theirs).norm() / theirs.double().norm())


def _distance(found, expected):
    assert found.shape == expected.shape
    if expected.numel() == 0:
        return 0.0
    difference = (found.double() - expected.double()).abs().max()
    return float(difference / expected.double().abs().max().clamp(min=1e-300))
