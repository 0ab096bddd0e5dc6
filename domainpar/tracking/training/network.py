"""The network of a run: made with its first weights, compared whole and split, loaded with those of a checkpoint."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from domainpar.common.agreement import on_all, on_root
from domainpar.common.problems import Problem
from domainpar.common.words import PROGRESS_LOG
from domainpar.nn.classifier import Differs, EdgeClassifier
from domainpar.nn.standard import Standard
from domainpar.parallel.world import World
from domainpar.runs.checkpoint import Checkpoints, TrainingState, load_agreed
from domainpar.runs.directory import read_run
from domainpar.tracking.config.train import TrainedFlags
from domainpar.tracking.events.store import EventStore
from domainpar.tracking.networks.catalogue import make_network, message_of
from domainpar.tracking.training.inputs import TrainingData
from domainpar.tracking.training.tasks import Tasks

MOST_EDGES_TO_VERIFY = 10_000


def verify_network(model: EdgeClassifier, training_data: TrainingData, world: World) -> None:
    """Compare a user's own network whole and split. *Collective*.

    Raises:
        Refused: On all ranks alike, if it does not compute the same.
    """
    readable = {record.event for record in training_data.store.readable() if record.num_edges}
    first = next((sample.record for sample in training_data.train if sample.record.event in readable), None)
    if first is None:  # labels of nodes may be trained on without an edge; then there is nothing to split
        return
    if world.is_root:
        what = "the network whole and split over 3 ranks, on a piece of the first event (--no-verify: skip)"
        PROGRESS_LOG.say(f"verify   : {what}")
    world.mark("verify", 0)

    def conclusion() -> str:
        with training_data.store.open(first) as event:
            # Whole tiles with some thousand edges; all of a small event.
            tiles = int(np.searchsorted(event.edge_ptr, min(MOST_EDGES_TO_VERIFY, event.edge_ptr[-1]), side="left"))
            nodes = int(event.node_ptr[min(tiles, event.num_tiles)])
            ids = np.arange(event.edge_ptr[np.searchsorted(event.node_ptr, nodes)])
            ends = np.stack([event.read_edges("src", ids), event.read_edges("dst", ids)]).astype(np.int64)
            inside = (ends < nodes).all(axis=0)
            # In float64, so that rounding does not hide a mistake.
            x = torch.from_numpy(event.read_nodes("features", np.arange(nodes))).double()
            edge_attr = torch.from_numpy(event.read_edges("features", ids[inside])).double()
        try:
            return model.verify(torch.from_numpy(ends[:, inside]), x, edge_attr)
        except Differs:
            raise
        except Exception as error:  # a user's own code may raise anything: it is a reason like any other
            what = f"the network cannot be run on a piece of event {first.event}: {message_of(error)}"
            raise ValueError(what) from error

    lines = on_root(world.transport, conclusion).splitlines()
    for line in lines if world.is_root else ():
        PROGRESS_LOG.say(f"           {line}")


def load_network(
    directory: Path, config: TrainedFlags, which: str, store: EventStore, world: World
) -> tuple[EdgeClassifier, TrainingState]:
    """The network of a run with its `best` or `last` weights, for the events of a store. *Collective*.

    If the last checkpoint is damaged, the newest good one before it is taken, with a warning; a damaged best one is
    refused.

    Raises:
        Refused: On all ranks alike, if the store has other features than the network was trained on, or there is no
            such checkpoint, or it is damaged.
    """
    checkpoints = Checkpoints(directory / "checkpoints")

    def build() -> EdgeClassifier:
        _check_features(directory, store)
        # Else the missing `best` would read as if the run had saved nothing.
        has_best, has_last = ((checkpoints.directory / pointer).is_file() for pointer in ("best", "last"))
        if which == "best" and has_last and not has_best:
            raise Problem(f"{directory} has no best checkpoint yet", "take its newest with --checkpoint last")
        # The constants are those of the checkpoint, never of the store that it is to score.
        sizes = len(store.feature_names), len(store.edge_feature_names)
        standard = Standard.neutral(*sizes) if config.standardises else None
        return make_network(config, store, standard, Tasks.of(read_run(directory)).heads)

    network = on_all(world.transport, build)
    return network, load_agreed(checkpoints, which, world, network)


def begin_with(directory: Path, store: EventStore, model: EdgeClassifier) -> None:
    """Fill a network with the best weights of a run, and with the constants that standardise its features.

    Raises:
        ValueError: If the store has other features than the run's, its network is another one, or it has no weights.
    """
    _check_features(directory, store)
    Checkpoints(directory / "checkpoints").load("best", model)


def _check_features(directory: Path, store: EventStore) -> None:
    """Refuse events with other features than the network of a run was trained on."""
    trained_on = read_run(directory).store
    for name in ("feature_names", "edge_feature_names"):
        expected, names = list(getattr(trained_on, name)), list(getattr(store, name))
        if names != expected:
            raise ValueError(
                f"the network of {directory} was trained on {name} {expected} but the events of {store.path} have "
                f"{names}; prepare them from the same kind of source, or name another --store."
            )
    for name, scales in (trained_on.scales or {}).items():
        theirs = store.scales.get(name, scales)
        if not np.allclose(theirs, scales, rtol=1e-6, atol=0):
            raise ValueError(
                f"the network of {directory} was trained on features with {name} {scales} but those of {store.path} "
                f"are {theirs}; prepare them with --{name.replace('_', '-')} {', '.join(map(str, scales))!r}."
            )
