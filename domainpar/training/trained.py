"""A finished run, for those who use it: its network with its weights, and its counts of target edges."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import astuple
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from domainpar.agreement import on_all
from domainpar.config import TrainConfig
from domainpar.events.store import EventStore, StoredEvent
from domainpar.nn.classifier import EdgeClassifier
from domainpar.parallel.world import World
from domainpar.problems import Problem
from domainpar.training.checkpoint import Checkpoints, TrainingState, load_agreed
from domainpar.training.metrics import EdgeCounts, EdgeMetrics
from domainpar.training.run import make_network
from domainpar.training.targets import edge_classes


def read_run(directory: Path) -> dict[str, Any]:
    """The content of a run's `run.json`.

    Raises:
        ValueError: If there is no run, or its file cannot be read.
    """
    path = directory / "run.json"
    if not path.is_file():
        raise ValueError(f"{directory} is not a run: it has no run.json; name the directory of one with --run.")
    try:
        content: dict[str, Any] = json.loads(path.read_text())
        _ = [content["store"][name] for name in ("path", "digest", "feature_names", "edge_feature_names")]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} cannot be read: {type(error).__name__}: {error}; name another run.") from error
    return content


def load_network(
    directory: Path, config: TrainConfig, which: str, store: EventStore, world: World
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
        trained_on = read_run(directory)["store"]
        for name in ("feature_names", "edge_feature_names"):
            expected, names = trained_on[name], list(getattr(store, name))
            if names != expected:
                raise ValueError(
                    f"the network of {directory} was trained on {name} {expected} but the events of {store.path} have "
                    f"{names}; prepare them from the same kind of source, or name another --store."
                )
        has_best, has_last = ((checkpoints.directory / pointer).is_file() for pointer in ("best", "last"))
        if which == "best" and has_last and not has_best:
            raise Problem(f"{directory} has no best checkpoint yet", "take its newest with --checkpoint last")
        return make_network(config, store)

    network = on_all(world.transport, build)
    return network, load_agreed(checkpoints, which, world, network)


def count_event(
    event: StoredEvent, logits: npt.NDArray[np.floating], conditions: Mapping[str, Any] | None
) -> EdgeCounts | None:
    """Compare the logits of a whole event with its truth; on one rank.

    Args:
        event: The stored event.
        logits: Logits of all edges in stored order, [E]; -inf for one that got none.
        conditions: Conditions of a target particle; None: every particle is one.

    Returns:
        The counts; None if the event has no truth, or lacks a quantity that the conditions are about.
    """
    if not event.has_labels:
        return None
    every_edge = np.arange(event.num_edges)
    label, particles, particle_of_edge = event.read_edges("label", every_edge), event.particles(), None
    if conditions and event.has_particle_ids:
        particle_of_edge = event.read_nodes("particle_id", event.read_edges("dst", every_edge))
    try:
        classes = edge_classes(label, particle_of_edge, particles, conditions)
    except ValueError:  # an event of another source; its scores are worth having all the same
        return None
    metrics = EdgeMetrics()
    metrics.add(logits, classes)
    return metrics.count(World.alone().transport)


def metrics_over(counts: Sequence[EdgeCounts]) -> dict[str, Any]:
    """Metrics over whole events, None where there is nothing to divide by.

    Efficiency and purity are those of all edges together; the AUC is the mean over events, so that no event's scores
    need to be kept.
    """
    total = EdgeCounts(*np.sum([astuple(of_event) for of_event in counts], axis=0, dtype=object).tolist())
    areas = [of_event.auc for of_event in counts if not math.isnan(of_event.auc)]
    ratios = total.ratios() | {"edge_auc": float(np.mean(areas)) if areas else None}
    return {"events": len(counts), **ratios, "edges": total.edges, "target_edges": total.targets}
