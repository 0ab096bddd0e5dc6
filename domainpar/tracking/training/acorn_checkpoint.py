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

import numpy as np
import torch
from torch import Tensor

from domainpar.common.atomic_files import write_whole
from domainpar.common.problems import EventPlace, Problem
from domainpar.nn.options import NetworkOptions
from domainpar.runs.checkpoint import Checkpoints, TrainingState, parameters_sha256
from domainpar.runs.directory import choose_directory
from domainpar.runs.origin import describe_process
from domainpar.runs.records import RUN_FILE, RunFile, StoreRecord, run_record
from domainpar.tracking.config import ConfigError, resolved_yaml
from domainpar.tracking.config.acorn_keys import network_of
from domainpar.tracking.config.group import Group
from domainpar.tracking.events.pyg import read_entries
from domainpar.tracking.networks.catalogue import build_model, options_of

# What `save_hyperparameters` of versions of Lightning keeps a mapping in.
_MAPPINGS = [
    (OrderedDict, f"{module}.AttributeDict")
    for module in (
        "pytorch_lightning.utilities.parsing", "lightning.pytorch.utilities.parsing",
        "lightning_fabric.utilities.data", "lightning.fabric.utilities.data",
    )
]  # fmt: skip
_PLAIN = (
    "give the checkpoint that Lightning wrote; if that holds more, save what is read of it, where it was trained: "
    "torch.save({name: checkpoint[name] for name in ('state_dict', 'hyper_parameters', 'global_step')}, 'plain.ckpt')"
)


@dataclass(frozen=True, eq=False)
class AcornNetwork:
    """A trained network of acorn."""

    path: Path  # its checkpoint
    model: str  # our name of the network
    hidden: int  # width of its states
    graph_iters: int  # iterations
    # node_features, edge_features: names of the features it was trained on, as stores have them
    node_features: tuple[str, ...]
    edge_features: tuple[str, ...]
    scales: Mapping[str, Sequence[float]]  # divisors of the features, by `node_scales` and `edge_scales`
    weights: Mapping[str, Tensor]  # by our names
    step: int  # steps it was trained for

    @property
    def flags(self) -> list[str]:
        """The words that have `prepare` make such features."""
        lists: dict[str, Sequence[Any]] = {
            "--node-features": self.node_features,
            "--node-scales": self.scales["node_scales"],
            "--edge-features": self.edge_features or ("none",),
        }
        if any(scale != 1 for scale in self.scales["edge_scales"]):
            lists["--edge-scales"] = self.scales["edge_scales"]
        return [word for flag, values in lists.items() for word in (flag, ", ".join(map(str, values)))]


def read_network(path: Path) -> AcornNetwork:
    """Read a checkpoint by allow-list: nothing in it is run.

    Raises:
        Problem: If it cannot be read, asks for more than tensors and plain values, is none of acorn's, or its network
            has options that ours has not, with all of them.
    """
    try:
        entries = read_entries(EventPlace("", path), _MAPPINGS, _PLAIN)
    except Problem as error:  # it is no event
        raise Problem(error.what, error.hint, file=path) from error
    state, hparams = entries.get("state_dict"), entries.get("hyper_parameters")
    for name, entry in (("state_dict", state), ("hyper_parameters", hparams)):
        if not isinstance(entry, Mapping):
            found = f"it has {', '.join(sorted(map(str, entries))) or 'nothing'}"
            found = f"that is a {type(entry).__name__}" if name in entries else found
            hint = "read are the checkpoints that Lightning writes of acorn's networks, which have it"
            raise Problem(f"no mapping {name}: {found}", hint, file=path)
    assert isinstance(hparams, Mapping)
    hparams = {str(name): _plain(value) for name, value in hparams.items()}
    try:
        model = network_of(hparams)
    except ConfigError as error:
        raise Problem(error.what, error.hint, file=path) from error
    hidden, iterations = sizes = cast(tuple[Any, Any], (hparams.get("hidden"), hparams.get("n_graph_iters")))
    for name, value, most in zip(("hidden", "n_graph_iters"), sizes, (2**20, _MOST_ITERATIONS)):
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
            what = f"{name} of hyper_parameters is {value!r}, expected a whole number from 1 to {most:,}"
            raise Problem(what, file=path)
    nodes, edges = (_names(hparams, f"{of}_features", path) for of in ("node", "edge"))
    if model == "acorn":  # it does not look at edge features
        edges = ()
    node_scales = _scales(hparams, "node_scales", nodes, path)
    edge_scales = _scales(hparams, "edge_scales", edges, path) if edges else None
    if node_scales is None or not nodes:
        raise Problem("hyper_parameters do not tell node_features and node_scales", "acorn writes both", file=path)
    step = _plain(entries.get("global_step", 0))
    if not isinstance(step, int) or not 0 <= step < 10**15:
        raise Problem(f"global_step is {step!r}, expected a number of steps", file=path)
    return AcornNetwork(
        path=path,
        model=model,
        hidden=hidden,
        graph_iters=iterations,
        node_features=nodes,
        edge_features=edges,
        scales={"node_scales": node_scales, "edge_scales": edge_scales or (1.0,) * len(edges)},
        weights=_weights(model, cast(Mapping[Any, Any], state), hidden, iterations, path),
        step=step,
    )


def write_run(network: AcornNetwork, config: Group, out: str | None = None) -> tuple[Path, str]:
    """Make a run of a network of acorn, as if it had been trained here.

    Args:
        network: The network.
        config: The configuration that would have trained it.
        out: The directory of the run; by default a new one.

    Returns:
        The directory of the run, and the hash of its weights.

    Raises:
        Problem: If the weights are not those of such a network, with the first that differs, or are not finite; or the
            directory holds something already.
    """
    columns = len(network.node_features), len(network.edge_features)
    options = NetworkOptions(hidden=network.hidden, graph_iters=network.graph_iters)
    model = build_model(network.model, *columns, options)
    needed = {name.removeprefix("module."): parameter for name, parameter in model.named_parameters()}
    shapes, ours = ({name: tuple(it.shape) for name, it in of.items()} for of in (network.weights, needed))
    for name in sorted(shapes.keys() | ours.keys()):
        if shapes.get(name) != ours.get(name):
            what = f"{name} is {shapes.get(name, 'not there')}, of {network.model} it is {ours.get(name, 'not there')}"
            raise Problem(what, "the weights and hyper_parameters are not of one network", file=network.path)
        if network.weights[name].dtype is not torch.float32:
            raise Problem(f"{name} is {network.weights[name].dtype}, expected float32", file=network.path)
        if not network.weights[name].isfinite().all():
            raise Problem(f"{name} is not finite", "take an earlier checkpoint", file=network.path)
    with torch.no_grad():
        for name, parameter in needed.items():
            parameter.copy_(network.weights[name])
    try:
        chosen = choose_directory(out, resume=False, overwrite=False)
    except Problem as taken:
        raise Problem(taken.what, "choose another --out") from taken
    try:
        write_whole(chosen.path / "config.yaml", resolved_yaml(config).encode())
        optimizer = torch.optim.AdamW(model.parameters())  # nothing of acorn's is taken over
        Checkpoints(chosen.path / "checkpoints").save(model, optimizer, TrainingState(step=network.step), best=True)
        sha256 = parameters_sha256(model)
        RunFile(chosen.path / RUN_FILE, run_record(chosen.path / RUN_FILE)).update(
            **describe_process(),
            state="done",
            steps=network.step,
            imported={"file": str(network.path.resolve()), "framework": "acorn"},
            parameters_sha256=sha256,
            model_code=None,
            model_options=options_of(network.model),
            store=StoreRecord.of(
                path="",
                absolute="",
                digest="",
                events=None,
                feature_names=network.node_features,
                edge_feature_names=network.edge_features,
                scales=dict(network.scales),
            ),
        )
    finally:
        chosen.release()
    return chosen.path, sha256


_MOST_ITERATIONS = 1000  # more than any network has: ours would be built before it is found to be another one
_NAME = re.compile(r"[\w.-]+")


def _plain(value: Any) -> Any:
    """Numbers, lists and names of Python for those of numpy and torch."""
    if isinstance(value, Tensor | np.ndarray | np.generic):
        return value.tolist()
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value


def _names(hparams: Mapping[str, Any], key: str, path: Path) -> tuple[str, ...]:
    """Features as stores name them, without the prefix that newer versions write."""
    names = hparams.get(key) or []
    good = isinstance(names, list) and all(isinstance(name, str) and _NAME.fullmatch(name) for name in names)
    if not good or len(set(names)) < len(names):
        raise Problem(f"{key} of hyper_parameters is {names!r}, expected a list of names", file=path)
    prefix = "hit_" if key == "node_features" else "edge_"
    return tuple(name.removeprefix(prefix) for name in names)


def _scales(hparams: Mapping[str, Any], key: str, names: Sequence[str], path: Path) -> tuple[float, ...] | None:
    scales = hparams.get(key)
    if scales is None:
        return None
    good = isinstance(scales, list) and all(isinstance(of, int | float) and not isinstance(of, bool) for of in scales)
    if not good or len(scales) != len(names) or not all(0 < abs(of) < 1e30 for of in scales):
        what = f"{key} of hyper_parameters is {scales!r}, expected a finite number other than 0"
        raise Problem(f"{what} for each of the {len(names)} features {', '.join(names)}", file=path)
    return tuple(float(scale) for scale in scales)


def _weights(model: str, state: Mapping[Any, Any], hidden: int, iterations: int, path: Path) -> dict[str, Tensor]:
    """The weights by our names; of sizes that the file can hold, and of as many nets as there are iterations."""
    weights: dict[str, Tensor] = {}
    for name, value in state.items():
        if not isinstance(value, Tensor):
            raise Problem(f"{name} of state_dict is a {type(value).__name__}, expected a tensor", file=path)
        if value.layout is not torch.strided or value.device.type != "cpu":
            raise Problem(f"{name} is {value.layout} on {value.device}, expected a plain tensor", file=path)
        # A tensor of stride 0 takes no room until it is used.
        if value.numel() * value.element_size() > path.stat().st_size:
            raise Problem(f"{name} claims {value.numel():,} values, more than the file can hold", file=path)
        # `edge_network.0.weight` of a net that serves all iterations is `edge_networks.0.0.weight` here.
        of_all = r"\1s.0." if model == "acorn" else r"\1s."
        ours = re.sub(r"^(edge_network|node_network)\.", of_all, str(name))
        if ours in weights:
            raise Problem(f"{name} is there under two names", "remove one of them", file=path)
        weights[ours] = value
    first = weights.get("node_encoder.0.weight")
    if first is None:
        found = f"{next(iter(weights), 'nothing')} first"
        raise Problem(f"state_dict has no node_encoder.0.weight; it has {found}", "acorn writes no prefix", file=path)
    if first.shape[:1] != (hidden,):
        what = f"node_encoder.0.weight is {list(first.shape)}, hyper_parameters say hidden: {hidden}"
        raise Problem(what, "they are not of one network", file=path)
    nets = {name.split(".")[1] for name in weights if name.startswith("edge_networks.")}
    if len(nets) != (iterations if model == "acorn2" else 1):
        what = f"state_dict has {len(nets)} edge networks, hyper_parameters say n_graph_iters: {iterations}"
        raise Problem(what, "they are not of one network", file=path)
    return weights
