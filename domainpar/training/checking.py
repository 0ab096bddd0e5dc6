"""What must be known of events before a run is begun on them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from domainpar.events.place import Place
from domainpar.events.store import EventRecord, EventStore, StoreError
from domainpar.events.targets import check_target
from domainpar.parallel.world import World
from domainpar.problems import Problem
from domainpar.training.targets import EdgeWeights
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


def _check_conditions(
    store: EventStore, record: EventRecord, target: Mapping[str, Any] | None, edge_weights: EdgeWeights
) -> None:
    with store.open(record) as event:
        particles = event.particles() if event.has_particle_ids else None
    if target:
        check_target(particles, target)
    if isinstance(edge_weights, EdgeRules):
        edge_weights.check(particles)
