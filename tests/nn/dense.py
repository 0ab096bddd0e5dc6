"""The networks as their formulas read, for a whole event in one process: torch's autograd, no tiles, no padding."""

import torch
from torch import nn


def mlp(module, rows):
    """What an `MLP` of ours computes, on plain rows."""
    for position, linear in enumerate(module.linears):
        rows = nn.functional.linear(rows, linear.weight, linear.bias)
        if position < len(module.norms):
            norm = module.norms[position]
            rows = torch.relu(nn.functional.layer_norm(rows, norm.normalized_shape, norm.weight, norm.bias, norm.eps))
    return rows


def edge_stage(stage, nodes, edges, src, dst):
    """New edge states and their sums at `dst` and at `src`."""
    new = mlp(stage.mlp, torch.cat([nodes[src], nodes[dst], edges], dim=1))
    zeros = new.new_zeros(len(nodes), new.shape[1])
    return new, zeros.index_add(0, dst, new), zeros.index_add(0, src, new)


def interaction_network(model, features, edge_features, src, dst):
    """Logits of all edges."""
    x = mlp(model.node_encoder.mlp, features)
    e, at_dst, at_src = edge_stage(model.edge_encoder, x, edge_features, src, dst)
    if model.node_first:
        for node, edge in zip(model.node_stages, model.edge_stages, strict=True):
            x = mlp(node.mlp, torch.cat([x, at_dst, at_src], dim=1))
            e, at_dst, at_src = edge_stage(edge, x, e, src, dst)
        return mlp(model.head.mlp, torch.cat([x[src], x[dst], e], dim=1))[:, 0]
    for position, edge in enumerate(model.edge_stages):
        e, at_dst, at_src = edge_stage(edge, x, e, src, dst)
        if position < len(model.node_stages):
            x = mlp(model.node_stages[position].mlp, torch.cat([x, at_dst, at_src], dim=1))
    return mlp(model.head.mlp, e)[:, 0]
