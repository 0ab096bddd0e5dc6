"""What must be known of events before a run is begun on them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np

from domainpar.events.store import EventRecord, EventStore, StoreError
from domainpar.events.targets import check_target
from domainpar.parallel.world import World
from domainpar.problems import Place, Problem
from domainpar.training.targets import TARGET, EdgeWeights, edge_classes
from domainpar.training.weighting import EdgeRules
from domainpar.words import several


def check_events(
    store: EventStore, world: World, target: Mapping[str, Any] | None, edge_weights: EdgeWeights, skips: bool = False
) -> None:
    """Refuse what cannot be trained on: no events, no truth, or an unknown target. Events are dealt to ranks.

    Args:
        store: The events.
        world: The ranks.
        target: Conditions of a target particle, if there are any.
        edge_weights: Weights of edges.
        skips: Whether events that cannot be used are left out, and so not looked at.

    Raises:
        Problem: If one of this rank's events, or the store, will not do.
    """
    if not (training := store.events("train")):
        raise Problem(f"store {store.path} has no training events", "prepare some, or lower --val-split")
    if not any(record.has_labels for record in training):
        what = f"none of {several(len(training), 'training event')} of store {store.path} has truth"
        raise Problem(f"{what}; they can be inferred on, not trained on", "prepare events whose files tell the truth")
    records = [record for record in store.events("train") + store.events("val") if record.event not in store.unreadable]
    for record in records[world.rank :: world.size]:
        place = Place(record.event, store.path / record.path)
        if not record.has_labels:
            if skips:
                continue
            raise place.problem(
                "it has no truth; it can be inferred on, not trained on",
                "--on-bad-event skip leaves events without truth out of training",
            )
        if target or isinstance(edge_weights, EdgeRules):
            try:
                _check_conditions(store, record, target, edge_weights)
            except StoreError:
                if not skips:
                    raise
            except ValueError as error:
                raise place.of(error) from error


def check_lessons(
    store: EventStore, world: World, target: Mapping[str, Any] | None, target_text: str | None
) -> list[str]:
    """Refuse training events without any candidate edge; warn where none is true, or a target's. *Collective*.

    Events are dealt to ranks, each of which reads no more of them than it needs to have seen every kind of edge.

    Args:
        store: The events.
        world: The ranks.
        target: Conditions of a target particle, if there are any.
        target_text: They as they were given.

    Returns:
        Warnings, the same on all ranks.

    Raises:
        Refused: On all ranks alike.
    """
    records = [one for one in store.events("train") if one.has_labels and one.event not in store.unreadable]
    events = f"{several(len(records), 'training event')} of {store.path}"
    no_edge = Problem(
        f"no candidate edge in {events}: there is nothing to train on",
        "of hits, --phi-slope, --z0 and --layer-pairs of prepare decide what is joined",
    )
    world.agree(None if any(record.num_edges for record in records) else no_edge)
    share = [record for record in records if record.num_edges][world.rank :: world.size]
    mine = world.on_all(lambda: _kinds_seen(store, share, target))
    true, targets = (
        any(kinds) for kinds in zip(*map(json.loads, world.transport.all_gather(json.dumps(mine).encode())))
    )
    if not true:
        return [f"WARNING: no true edge in {events}: the network learns to say no to every edge"]
    if not targets:
        return [f"WARNING: no edge of a target (--target {target_text!r}) in {events}: there is none to find"]
    return []


def _kinds_seen(
    store: EventStore, records: Sequence[EventRecord], target: Mapping[str, Any] | None
) -> tuple[bool, bool]:
    """Whether there is a true edge, and one of a target, in these events; read until both are found."""
    true = False
    for record in records:
        with suppress(StoreError), store.open(record) as event:  # damaged: it is told when it is loaded
            edges = np.arange(event.num_edges)
            label = event.read_edges("label", edges)
            true = true or bool(label.any())
            if not target:
                targets = true
            else:
                particle = event.read_nodes("particle_id", event.read_edges("dst", edges[label > 0]))
                targets = bool((edge_classes(label[label > 0], particle, event.particles(), target) == TARGET).any())
            if true and targets:
                return True, True
    return true, False


def _check_conditions(
    store: EventStore, record: EventRecord, target: Mapping[str, Any] | None, edge_weights: EdgeWeights
) -> None:
    with store.open(record) as event:
        particles = event.particles() if event.has_particle_ids else None
    if target:
        check_target(particles, target)
    if isinstance(edge_weights, EdgeRules):
        edge_weights.check(particles)
