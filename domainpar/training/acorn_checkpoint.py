"""Checkpoints of acorn's interaction networks, and the runs that they become.

A checkpoint is a pickle that Lightning writes: `state_dict`, the weights, and `hyper_parameters`, the keys of the YAML
file it was trained with. Our networks have acorn's names of weights, but for one list of nets in place of a net that
serves all iterations, or of a list under the net's name. From GNN4ITkTeam/CommonFramework,
`acorn/stages/edge_classifier/models/interaction_gnn.py`.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
import yaml
from torch import Tensor

from domainpar.config import TrainConfig
from domainpar.config.acorn import network_of
from domainpar.events.pyg import read_entries
from domainpar.nn.catalogue import build_model, options_of
from domainpar.problems import Place, Problem
from domainpar.training.checkpoint import Checkpoints, TrainingState, parameters_sha256
from domainpar.training.origin import describe_process
from domainpar.training.rundir import RunFile, choose_directory

# What `save_hyperparameters` of versions of Lightning keeps a mapping in.
_MAPPINGS = [
    (OrderedDict, f"{module}.AttributeDict")
    for module in (
        "pytorch_lightning.utilities.parsing", "lightning.pytorch.utilities.parsing",
        "lightning_fabric.utilities.data", "lightning.fabric.utilities.data",
    )
]  # fmt: skip


@dataclass(frozen=True, eq=False)
class AcornNetwork:
    """A trained network of acorn.

    Attributes:
        path: Its checkpoint.
        model: Our name of the network.
        hidden: Width of its states.
        graph_iters: Iterations.
        node_features, edge_features: Names of the features it was trained on, as stores have them.
        features: Flags of `prepare` for a store with these features and scales, with their values.
        scales: Divisors of the features, by `node_scales` and `edge_scales`.
        weights: By our names.
        step: Steps it was trained for.
    """

    path: Path
    model: str
    hidden: int
    graph_iters: int
    node_features: tuple[str, ...]
    edge_features: tuple[str, ...]
    features: Mapping[str, str]
    scales: Mapping[str, Sequence[float]]
    weights: Mapping[str, Tensor]
    step: int


def read_network(path: Path) -> AcornNetwork:
    """Read a checkpoint by allow-list: nothing in it is run.

    Raises:
        Problem: If it cannot be read, asks for more than tensors and plain values, or is none of acorn's.
        ConfigError: If its network has options that ours has not, with all of them.
    """
    try:
        entries = read_entries(Place("", path), _MAPPINGS)
    except Problem as error:  # it is no event
        raise Problem(error.what, error.hint, file=path) from error
    state, told = entries.get("state_dict"), entries.get("hyper_parameters")
    if not isinstance(state, Mapping) or not isinstance(told, Mapping):
        found = f"it has {', '.join(sorted(map(str, entries))) or 'nothing'}"
        raise Problem(f"no state_dict and hyper_parameters: {found}", "a checkpoint of Lightning has both", file=path)
    model = network_of(told)
    hidden, iterations = (_whole_number(told, name, path) for name in ("hidden", "n_graph_iters"))
    nodes, edges = (_names(told, f"{of}_features", path) for of in ("node", "edge"))
    node_scales = _scales(told, "node_scales", nodes, path)
    edge_scales = _scales(told, "edge_scales", edges, path)
    if node_scales is None or not nodes:
        raise Problem("hyper_parameters do not tell node_features and node_scales", "acorn writes both", file=path)
    if model == "acorn":  # it does not look at edge features
        edges, edge_scales = (), None
    flags = {"node_features": ", ".join(nodes), "node_scales": ", ".join(map(str, node_scales))}
    flags |= {"edge_features": ", ".join(edges) or "none"}
    flags |= {} if edge_scales is None else {"edge_scales": ", ".join(map(str, edge_scales))}
    return AcornNetwork(
        path=path,
        model=model,
        hidden=hidden,
        graph_iters=iterations,
        node_features=nodes,
        edge_features=edges,
        features=flags,
        scales={"node_scales": node_scales, "edge_scales": edge_scales or (1.0,) * len(edges)},
        weights=_weights(model, state, hidden, path),
        step=int(entries.get("global_step") or 0),
    )


def as_run(network: AcornNetwork, out: str | None = None) -> tuple[Path, str]:
    """Make a run of a network of acorn, as if it had been trained here.

    Returns:
        The directory of the run, and the hash of its weights.

    Raises:
        Problem: If the weights are not those of such a network, with the first that differs, or are not finite; or the
            directory holds something already.
    """
    columns = len(network.node_features), len(network.edge_features)
    model = build_model(network.model, *columns, hidden=network.hidden, graph_iters=network.graph_iters)
    needed = {name.removeprefix("module."): parameter for name, parameter in model.named_parameters()}
    shapes, ours = ({name: tuple(it.shape) for name, it in of.items()} for of in (network.weights, needed))
    for name in sorted(shapes.keys() | ours.keys()):
        if shapes.get(name) != ours.get(name):
            what = f"{name} is {shapes.get(name, 'not there')}, of {network.model} it is {ours.get(name, 'not there')}"
            raise Problem(what, "the weights and hyper_parameters are not of one network", file=network.path)
        if not network.weights[name].isfinite().all():
            raise Problem(f"{name} is not finite", "take an earlier checkpoint", file=network.path)
    with torch.no_grad():
        for name, parameter in needed.items():
            parameter.copy_(network.weights[name])
    chosen = choose_directory(out, resume=False, overwrite=False)
    try:
        config = TrainConfig(
            model=network.model, hidden=network.hidden, graph_iters=network.graph_iters, standardise=False
        )
        kept = ("model", "hidden", "graph_iters", "standardise")
        (chosen.path / "config.yaml").write_text(yaml.safe_dump({name: getattr(config, name) for name in kept}))
        optimizer = torch.optim.AdamW(model.parameters())  # nothing of acorn's is taken over
        Checkpoints(chosen.path / "checkpoints").save(model, optimizer, TrainingState(step=network.step), best=True)
        sha256 = parameters_sha256(model)
        RunFile.read(chosen.path / "run.json").update(
            **describe_process(),
            state="done",
            steps=network.step,
            imported={"file": str(network.path.resolve()), "framework": "acorn"},
            parameters_sha256=sha256,
            model_code=None,
            model_options=options_of(network.model),
            store={
                "path": "",
                "absolute": "",
                "digest": "",
                "events": None,
                "feature_names": network.node_features,
                "edge_feature_names": network.edge_features,
                "scales": dict(network.scales),
            },
        )
    finally:
        chosen.release()
    return chosen.path, sha256


def _whole_number(told: Mapping[str, Any], name: str, path: Path) -> int:
    value = told.get(name)
    if not isinstance(value, int) or value < 1:
        raise Problem(f"{name} of hyper_parameters is {value!r}, expected a number of at least 1", file=path)
    return value


def _names(told: Mapping[str, Any], key: str, path: Path) -> tuple[str, ...]:
    """Features as stores name them, without the prefix that newer versions write."""
    names = told.get(key) or []
    if not isinstance(names, Sequence) or not all(isinstance(name, str) for name in names):
        raise Problem(f"{key} of hyper_parameters is {names!r}, expected a list of names", file=path)
    prefix = "hit_" if key == "node_features" else "edge_"
    return tuple(name.removeprefix(prefix) for name in names)


def _scales(told: Mapping[str, Any], key: str, names: Sequence[str], path: Path) -> tuple[float, ...] | None:
    scales = told.get(key)
    if scales is None:
        return None
    if not isinstance(scales, Sequence) or len(scales) != len(names):
        raise Problem(
            f"{key} of hyper_parameters is {scales!r}, expected one for each of {', '.join(names)}", file=path
        )
    return tuple(float(scale) for scale in scales)


def _weights(model: str, state: Mapping[Any, Any], hidden: int, path: Path) -> dict[str, Tensor]:
    """The weights by our names; of sizes that the file can hold."""
    for name, value in state.items():
        if not isinstance(value, Tensor) or value.dtype != torch.float32:
            kind = value.dtype if isinstance(value, Tensor) else type(value).__name__
            raise Problem(f"{name} of state_dict is {kind}, expected float32", file=path)
        # A tensor of stride 0 takes no room until it is used.
        if value.numel() * value.element_size() > path.stat().st_size:
            raise Problem(f"{name} claims {value.numel():,} values, more than the file can hold", file=path)
    weights = {_our_name(str(name), model): cast(Tensor, value) for name, value in state.items()}
    first = weights.get("node_encoder.0.weight")
    if first is None or len(first) != hidden:
        found = "not there" if first is None else f"{len(first)} wide"
        raise Problem(f"node_encoder.0.weight is {found}, hyper_parameters say hidden: {hidden}", file=path)
    return weights


def _our_name(name: str, model: str) -> str:
    """`edge_network.0.weight` of a net that serves all iterations is `edge_networks.0.0.weight` here."""
    of_all = r"\1s.0." if model == "acorn" else r"\1s."
    return re.sub(r"^(edge_network|node_network)\.", of_all, name)
