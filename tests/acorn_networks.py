"""acorn's interaction networks by their published definition, with the names its checkpoints give to weights.

Written from the formulas alone, with no code of ours: what `import_acorn` is held against.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import torch
from torch import nn

ONE = {
    "model": "InteractionGNN", "hidden": 32, "n_graph_iters": 3, "nb_node_layer": 2, "nb_edge_layer": 2,
    "layernorm": True, "hidden_activation": "SiLU", "output_activation": "Tanh", "aggregation": ["sum"],
    "node_features": ["r", "phi", "z"], "node_scales": [1000, 3.14, 1000],
    "warmup": 5, "lr": 0.001, "scheduler": "anything", "input_dir": "/data", "weighting": [{"weight": 1.0}],
}  # fmt: skip
OF_CLUSTERS = [f"{of}{name}{end}" for of, end in (("", ""), ("cluster_", "_1"), ("cluster_", "_2")) for name in
               ("r", "phi", "z", "eta")]  # fmt: skip
TWO = {
    "model": "InteractionGNN2", "hidden": 32, "n_graph_iters": 3, "n_node_net_layers": 3, "n_edge_net_layers": 3,
    "n_edge_decoder_layers": 3, "layernorm": False, "batchnorm": True, "hidden_activation": "ReLU",
    "output_activation": "ReLU", "concat": True, "in_out_diff_agg": True, "node_net_recurrent": False,
    "edge_net_recurrent": False, "edge_output_transform_final_activation": None, "checkpointing": True,
    "node_features": OF_CLUSTERS, "node_scales": [1000, np.pi, 1000, 1] * 3,
    "edge_features": ["dr", "dphi", "dz", "deta", "phislope", "rphislope"],
}  # fmt: skip


def net(*widths, norm, hidden, last=()):
    """Linear layers; a norm and an activation after each but the last."""
    modules = []
    for place, (wide, width) in enumerate(pairwise(widths)):
        modules.append(nn.Linear(wide, width))
        modules += [norm(width), hidden()] if place < len(widths) - 2 else [kind() for kind in last]
    return nn.Sequential(*modules)


class One(nn.Module):
    """InteractionGNN."""

    def __init__(self, told):
        super().__init__()
        h, how = (
            told["hidden"],
            {"norm": lambda width: nn.LayerNorm(width, elementwise_affine=False), "hidden": nn.SiLU},
        )
        self.iterations = told["n_graph_iters"]
        self.node_encoder = net(len(told["node_features"]), h, h, **how, last=[nn.Tanh])
        self.edge_encoder = net(2 * h, h, h, **how, last=[nn.Tanh])
        self.edge_network = net(3 * h, h, h, **how, last=[nn.Tanh])
        self.node_network = net(3 * h, h, h, **how, last=[nn.Tanh])
        self.output_edge_classifier = net(3 * h, h, h, 1, **how)

    def forward(self, x, edges, _):
        src, dst = edges
        into, out_of = (one_hot(end, len(x)) for end in (dst, src))  # as matrices [N, E]
        x = self.node_encoder(x)
        e = self.edge_encoder(torch.cat([x[src], x[dst]], 1))
        for _ in range(self.iterations):
            x = self.node_network(torch.cat([x, into @ e, out_of @ e], 1))
            e = self.edge_network(torch.cat([x[src], x[dst], e], 1))
        return self.output_edge_classifier(torch.cat([x[src], x[dst], e], 1))[:, 0]


class Two(nn.Module):
    """InteractionGNN2."""

    def __init__(self, told):
        super().__init__()
        h, how = told["hidden"], {"norm": lambda width: OfAllRows(width), "hidden": nn.ReLU}
        encoder = {**how, "last": [nn.ReLU]}
        self.iterations = told["n_graph_iters"]
        self.node_encoder = net(len(told["node_features"]), h, h, h, **encoder)
        self.edge_encoder = net(len(told["edge_features"]), h, h, h, **encoder)
        self.edge_network = nn.ModuleList(net(6 * h, h, h, h, **encoder) for _ in range(self.iterations))
        self.node_network = nn.ModuleList(net(4 * h, h, h, h, **encoder) for _ in range(self.iterations))
        self.edge_decoder = net(h, h, h, h, **encoder)
        self.edge_output_transform = net(h, h, 1, **how)

    def forward(self, x, edges, edge_attr):
        src, dst = edges
        into, out_of = (one_hot(end, len(x)) for end in (dst, src))
        x_0 = x = self.node_encoder(x)
        e_0 = e = self.edge_encoder(edge_attr)
        for k in range(self.iterations):
            x = torch.cat([x, x_0], 1)
            e = self.edge_network[k](torch.cat([e, e_0, x[src], x[dst]], 1))
            x = self.node_network[k](torch.cat([into @ e, out_of @ e, x], 1))
        return self.edge_output_transform(self.edge_decoder(e))[:, 0]


class OfAllRows(nn.Module):
    """Batch norm by the statistics of the event, in training or not."""

    def __init__(self, width):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))

    def forward(self, x):
        centred = x - x.mean(0)
        return centred / (centred.square().mean(0) + 6e-5).sqrt() * self.weight + self.bias


def one_hot(index, rows):
    """A matrix that sums edges at their nodes, [N, E]."""
    return (torch.arange(rows)[:, None] == index[None]).double()


def drawn_columns(seed, hits=70, edges=400):
    """Columns of an acorn file with clusters and regions, by their short names; edges lead outward."""
    random = np.random.default_rng(seed)
    r, phi, z = random.uniform(30, 900, hits), random.uniform(-np.pi, np.pi, hits), random.uniform(-1500, 1500, hits)
    cluster = {
        f"cluster_{name}_{end}": torch.tensor(of + random.normal(scale=1e-3, size=hits))
        for end in "12"
        for name, of in (("r", r), ("phi", phi), ("z", z), ("eta", np.arcsinh(z / r)))
    }
    ends = random.integers(0, hits, (2, edges))
    ends = ends[:, r[ends[0]] < r[ends[1]]]
    count = ends.shape[1]
    return {
        "hit_id": torch.arange(hits), "r": torch.tensor(r), "phi": torch.tensor(phi), "z": torch.tensor(z),
        "x": torch.tensor(r * np.cos(phi)), "region": torch.tensor(random.integers(1, 7, hits)), **cluster,
        **dict.fromkeys(("volume_id", "layer_id", "module_id"), torch.ones(hits, dtype=torch.int64)),
        "edge_index": torch.tensor(ends), "y": torch.tensor(random.random(count) < 0.3),
        **dict.fromkeys(("track_edges", "truth_map", "particle_id", "pt", "radius", "primary", "nhits", "pdgId"), None),
        "eta_particle": None,
    }  # fmt: skip


def inputs_of(columns, told):
    """Scaled features as acorn's training has them, in float64: of hits, and of edges if the network takes them."""
    raw = {name: value.double() for name, value in columns.items() if torch.is_tensor(value)}
    raw["eta"] = torch.asinh(raw["z"] / raw["r"])
    x = torch.stack([raw[name] / scale for name, scale in zip(told["node_features"], told["node_scales"])], 1)
    if told["model"] == "InteractionGNN":
        return x, None
    in_endcaps = (columns["region"] == 2) | (columns["region"] == 6)
    x[in_endcaps] = x[in_endcaps][:, [0, 1, 2, 3] * 3]
    src, dst = columns["edge_index"]
    r, z, eta, phi = raw["r"] / 1000, raw["z"] / 1000, raw["eta"], raw["phi"]
    dphi = torch.remainder(phi[dst] - phi[src] + torch.pi, 2 * torch.pi) / torch.pi - 1
    slope = (dphi / (r[dst] - r[src])).clamp(-100, 100)
    means = (r[dst] + r[src]) / 2
    return x, torch.stack([r[dst] - r[src], dphi, z[dst] - z[src], eta[dst] - eta[src], slope, means * slope], 1)


def trained(told, seed=0):
    """A network with weights of the size that training leaves."""
    torch.manual_seed(seed)
    module = {"InteractionGNN": One, "InteractionGNN2": Two}[told["model"]](told)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter += 0.05 * torch.randn_like(parameter)
    return module


def save(path, told, module, **changes):
    """A checkpoint as Lightning writes it; returns its path."""
    entries = {
        "epoch": 4, "global_step": 1200, "pytorch-lightning_version": "2.2.0", "state_dict": module.state_dict(),
        "loops": {"fit_loop": {"state_dict": {}, "epoch_progress": {"current": {"ready": 5}}}},
        "callbacks": {"ModelCheckpoint{'monitor': 'auc'}": {"best_model_score": torch.tensor(0.9), "dirpath": "/x"}},
        "optimizer_states": [{"state": {}, "param_groups": [{"lr": 1e-3, "betas": (0.9, 0.999)}]}],
        "lr_schedulers": [], "hparams_name": "kwargs", "hyper_parameters": dict(told),
    }  # fmt: skip
    entries |= changes
    torch.save({name: value for name, value in entries.items() if value is not None}, path)
    return path
