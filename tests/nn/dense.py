"""The networks as their formulas read, for a whole event in one process: torch's autograd, no tiles, no padding."""

import torch
from torch import nn

from domainpar.nn.noise import Noise, keeps, key_of


def mlp(module, rows, key=None):
    """What an `MLP` of ours computes, on plain rows; with a key, numbers of the rows 0, 1, ... are dropped."""
    for position, linear in enumerate(module.linears):
        rows = nn.functional.linear(rows, linear.weight, linear.bias)
        if position < len(module.norms):
            norm = module.norms[position]
            rows = torch.relu(nn.functional.layer_norm(rows, norm.normalized_shape, norm.weight, norm.bias, norm.eps))
        if key is not None and position < len(module.linears) - 1:
            noise = Noise(key, module.dropout, torch.arange(len(rows)).numpy())
            rows = rows * keeps(noise, position, slice(None), rows.shape[1], rows)
    return rows


def edge_stage(stage, nodes, edges, src, dst, key=None):
    """New edge states and their sums at `dst` and at `src`."""
    new = mlp(stage.mlp, torch.cat([nodes[src], nodes[dst], edges], dim=1), key)
    zeros = new.new_zeros(len(nodes), new.shape[1])
    return new, zeros.index_add(0, dst, new), zeros.index_add(0, src, new)


def interaction_network(model, features, edge_features, src, dst, key=None):
    """Logits of all edges; with a key, numbers are dropped as in training."""

    def of(*which):
        return None if key is None else key_of(key, *which)

    x = mlp(model.node_encoder.mlp, features, of("node encoder"))
    e, at_dst, at_src = edge_stage(model.edge_encoder, x, edge_features, src, dst, of("edge encoder"))
    if model.node_first:
        for position, (node, edge) in enumerate(zip(model.node_stages, model.edge_stages, strict=True)):
            x = mlp(node.mlp, torch.cat([x, at_dst, at_src], dim=1), of("nodes", position))
            e, at_dst, at_src = edge_stage(edge, x, e, src, dst, of("edges", position))
        return mlp(model.head.mlp, torch.cat([x[src], x[dst], e], dim=1), of("head"))[:, 0]
    for position, edge in enumerate(model.edge_stages):
        e, at_dst, at_src = edge_stage(edge, x, e, src, dst, of("edges", position))
        if position < len(model.node_stages):
            x = mlp(model.node_stages[position].mlp, torch.cat([x, at_dst, at_src], dim=1), of("nodes", position))
    return mlp(model.head.mlp, e, of("head"))[:, 0]
