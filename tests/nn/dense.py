"""The networks as their formulas read, for a whole event in one process: torch's autograd, no tiles, no padding."""

import torch
from torch import nn

from domainpar.nn.noise import Noise, dropout_mask, key_of

ACTIVATIONS = [lambda rows: rows, torch.relu, nn.functional.silu, torch.tanh]  # as in domainpar.nn.mlp.ACTIVATIONS


def keeps(noise, layer, rows, like):
    """Factors of the results of a layer: 0 or 1 / (1 - rate)."""
    ids, width = torch.as_tensor(noise.ids[rows]), like.shape[1]
    return dropout_mask(ids, noise.key_of_layer(layer), width, noise.rate, like)


def mlp(module, rows, key=None):
    """What an `MLP` of ours computes, on plain rows; with a key, numbers of the rows 0, 1, ... are dropped."""
    for position, (linear, norm, activation) in enumerate(module.layers):
        rows = nn.functional.linear(rows, linear.weight, linear.bias)
        if norm is not None:
            rows = nn.functional.layer_norm(rows, norm.normalized_shape, norm.weight, norm.bias, norm.eps)
        rows = ACTIVATIONS[activation](rows)
        if key is not None and position < len(module.linears) - 1:
            noise = Noise(key, module.dropout, torch.arange(len(rows)).numpy())
            rows = rows * keeps(noise, position, slice(None), rows)
    return rows


def edge_stage(stage, nodes, edges, src, dst, key=None):
    """New edge states and their sums at `dst` and at `src`."""
    new = mlp(stage.mlp, torch.cat([nodes[src], nodes[dst], edges], dim=1), key)
    new = new + edges if stage.residual else new
    zeros = new.new_zeros(len(nodes), new.shape[1])
    sums = []
    for end in (dst, src):
        degree = torch.bincount(end, minlength=len(nodes)).clamp(min=1).to(new.dtype)[:, None]
        scale = {"sum": 1, "mean": 1 / degree, "root": 1 / degree.sqrt()}[stage.aggregate]
        sums.append(zeros.index_add(0, end, new) * scale)
    return new, *sums


def node_stage(stage, tables, key=None):
    """New states of nodes."""
    new = mlp(stage.mlp, torch.cat(tables, dim=1), key)
    return new + tables[0] if stage.residual else new


def interaction_network(model, features, edge_features, src, dst, key=None, gives_nodes=False):
    """Logits of all edges, and the last states of nodes if asked for.

    With a key, numbers are dropped as in training, and all readouts are there if several.
    """

    def of(*which):
        return None if key is None else key_of(key, *which)

    logits = []
    x = mlp(model.node_encoder.mlp, features, of("node encoder"))
    e, at_dst, at_src = edge_stage(model.edge_encoder, x, edge_features, src, dst, of("edge encoder"))
    for position, edge in enumerate(model.edge_stages):
        if model.node_first:
            x = node_stage(model.node_stages[position], [x, at_dst, at_src], of("nodes", position))
        e, at_dst, at_src = edge_stage(edge, x, e, src, dst, of("edges", position))
        is_last = position == len(model.edge_stages) - 1
        rows = torch.cat([x[src], x[dst], e], dim=1) if model.node_first else e
        logits.append(mlp(model.head.mlp, rows, of("head") if is_last else of("head", position))[:, 0])
        if not model.node_first and not is_last:
            x = node_stage(model.node_stages[position], [x, at_dst, at_src], of("nodes", position))
    if gives_nodes:
        last = len(model.node_stages) - 1
        return logits[-1], node_stage(model.node_stages[last], [x, at_dst, at_src], of("nodes", last))
    return torch.stack(logits) if key is not None and model.num_readouts > 1 else logits[-1]
