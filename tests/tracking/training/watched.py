"""Steps of a small run in which one rank goes wrong: what each rank was told."""

from __future__ import annotations

import threading

import torch

from domainpar.common import faults
from domainpar.nn.options import NetworkOptions
from domainpar.parallel.errors import RanksFailed
from domainpar.testing import run_ranks
from domainpar.tracking.events.store import EventStore
from domainpar.tracking.networks.catalogue import build_model
from domainpar.tracking.training.loop import Schedule, Trainer
from domainpar.tracking.training.monitor.failure import StepFailed
from domainpar.tracking.training.parts import PartLoader
from domainpar.tracking.training.sampler import samples_of

SMALL = {"hidden": 16, "graph_iters": 2}
LEARNING_RATE = 1e-2


def network_of(store, model, **sizes):
    """A network for the features of a store."""
    store = EventStore(store)
    counts = len(store.feature_names), len(store.edge_feature_names)
    return build_model(model, *counts, NetworkOptions(**SMALL | sizes))


def trainer_of(store, world, model="interaction", check_replicas_every=0, **sizes):
    """A trainer as a run makes it."""
    network, store = network_of(store, model, **sizes), EventStore(store)
    network.take_from_root(world)
    optimizer = torch.optim.AdamW(network.parameters(), lr=LEARNING_RATE)
    schedule = Schedule(LEARNING_RATE, "constant", 0, 100, 10)
    loader = PartLoader(store, world)
    return Trainer(network, optimizer, loader, world, schedule, check_replicas_every=check_replicas_every)


def _steps(world, store, spoil, options, num_steps, events_per_step):
    trainer = trainer_of(store, world, **options)
    spoil(trainer, world)
    before = [one.detach().clone() for one in trainer.model.parameters()]
    samples = samples_of(EventStore(store).events("train"), None)[:events_per_step]
    step = 0
    try:
        for step in range(num_steps):
            trainer.step(samples, step)
    except (StepFailed, RanksFailed) as error:
        unchanged = all(torch.equal(one, other) for one, other in zip(before, trainer.model.parameters()))
        return {"error": error, "step": step, "unchanged": unchanged, "phase": world.rank_status.last_mark.phase}
    return {"error": None, "step": step, "unchanged": False, "phase": ""}


def steps(store, num_ranks, spoil, num_steps=1, domain_size=None, events_per_step=1, **options):
    """Every rank's `error`, the `step` and `phase` it came in, and whether parameters are `unchanged`.

    Args:
        store: The events.
        num_ranks: Ranks, as threads.
        spoil: Called on every rank with its trainer and its world before the first step.
        num_steps: Steps to do, all on the first events.
        domain_size: Ranks that share one event.
        events_per_step: Events of a step.
        **options: Of `trainer_of`.
    """
    return run_ranks(_steps, num_ranks, store, spoil, options, num_steps, events_per_step, domain_size=domain_size)


def spokesman(found, rank):
    """The error of the one rank that says what is wrong, once every other rank was seen to end with its words."""
    said = found[rank]["error"]
    assert isinstance(said, StepFailed), f"rank {rank} got {said!r}"
    for other, result in enumerate(found):
        if other != rank:
            assert isinstance(result["error"], RanksFailed)
            assert said.what in str(result["error"])
    return said


def poisoned(layer, which_calls):
    """Make all that a layer makes NaN, in some of its calls, counted from 1."""
    calls = []

    def poison(module, given, made):
        calls.append(1)
        if len(calls) in which_calls:
            with torch.no_grad():  # under the watch, which refuses what changes behind it
                (made[0] if isinstance(made, tuple) else made).fill_(torch.nan)
        return made

    layer.register_forward_hook(poison)


def always_poisoned(layer):
    """Make all that a layer makes NaN, whenever it is called."""
    poisoned(layer, range(1, 10**6))


def gives(stage, value):
    """Let a stage find that a gradient of this value cannot be added up."""
    give = stage.add_limbs
    stage.add_limbs = lambda parameters, limbs, rejected, largest: give(parameters, limbs, rejected + 1, abs(value))


def at_point(monkeypatch, rank, point, do, times=1):
    """On one rank do something to what is at hand at one of the places of faults, the first so many times."""
    left = [times]

    def reach(name, at_hand=None):
        if name == point and threading.current_thread().name == f"rank {rank}" and left[0]:
            left[0] -= 1
            do(at_hand)
        return at_hand

    monkeypatch.setattr(faults, "reach", reach)
