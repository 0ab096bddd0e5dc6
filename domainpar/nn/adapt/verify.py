"""Does a model give on a split graph what it gives on the whole one? If not: in which layer does it first differ?

The watch over a forward pass sees torch calls. It does not see Python: a counter in a global, what was
kept from an earlier call, the number of a rank. This is the look at the results themselves, on a small graph, before a
long run.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from domainpar import timeouts
from domainpar.nn.adapt.parallelize import Parallel
from domainpar.nn.adapt.verifying.arguments import Inputs, edges_and_size, inputs_from
from domainpar.nn.adapt.verifying.float64 import on_our_terms
from domainpar.nn.adapt.verifying.judging import judged
from domainpar.nn.adapt.verifying.report import LayerCheck, Verification, Worst
from domainpar.nn.adapt.verifying.running import Trial
from domainpar.plan import EdgePolicy, IntArray

__all__ = ["LayerCheck", "Verification", "Worst", "verify"]


def verify(
    module: nn.Module,
    graph: Any,
    parts: int = 3,
    *,
    inputs: Inputs | None = None,
    edges: EdgePolicy = "incoming",
    backward: bool = True,
    tolerance: float = 1e-10,
    seed: int = 0,
) -> Verification:
    """Run a model whole and split over threads of this process, and compare every call of every layer.

    Copies of it run in float64 on the CPU; the model itself is left as it is. Nodes are dealt to parts at random, which
    no real split does, so that as many edges as can be are cut; with more than two parts there is one rank more, which
    owns nothing. A model that drops numbers at random, which torch draws in another way, is compared with itself on one
    rank, and in evaluation with the module alone.

    Args:
        module: The model, in the mode in which it is to be compared.
        graph: A PyG `Data`, or `(edge_index, num_nodes)`. Of a `Data`, x, pos, batch, y, z, node_* and *_mask have a
            row for each node, edge_* one for each edge.
        parts: Parts with nodes.
        inputs: Makes the model's arguments from a part, with part.nodes(x) and so on: a tuple, a dictionary of them by
            name, or the only one. Called for the whole graph as one part, then on each rank. None: the fields of
            `graph` that `forward` names, or `graph` itself if the only argument is called data or batch.
        edges: As for `split_graph`.
        backward: Whether to compare gradients too, of a sum of the results with weights of all sizes.
        tolerance: The largest relative difference that is rounding.
        seed: Of the parts of nodes and of dropout.

    Returns:
        The comparison; `.check()` raises if the model is not exact.

    Raises:
        ValueError: If arguments cannot be made from the graph.
        Exception: What the module raises on the whole graph.
    """
    module = module.module if isinstance(module, Parallel) else module
    edge_index, num_nodes = edges_and_size(graph)
    if parts < 1:
        raise ValueError(f"a graph cannot be split into {parts} parts; pass 1 or more.")
    state = [*module.parameters(), *module.buffers()]
    if any(isinstance(one, (UninitializedParameter, UninitializedBuffer)) for one in state):
        raise ValueError("the module has parameters whose size is not known yet; run it once, so that they get it.")
    trial = Trial(
        module=module,
        edge_index=edge_index,
        num_nodes=num_nodes,
        inputs=inputs or inputs_from(module, graph),
        edges=edges,
        backward=backward,
        seed=seed,
        assignment=_at_random(num_nodes, parts, seed),
        num_parts=parts,
        patience=timeouts.SMALL_GRAPH,
    )
    with on_our_terms():
        return judged(trial, tolerance)


def _at_random(num_nodes: int, parts: int, seed: int) -> IntArray:
    return torch.randint(0, parts, (num_nodes,), generator=torch.Generator().manual_seed(seed)).numpy()
