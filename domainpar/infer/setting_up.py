"""Everything that scoring needs, made ready before anything is written."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from domainpar.config import InferConfig, TrainConfig, target_conditions
from domainpar.events.own_events import OwnEvents, own_events
from domainpar.events.store import EventRecord, EventStore
from domainpar.events.targets import check_conditions
from domainpar.infer.judging import judge_of, track_options, track_target
from domainpar.infer.taking import choose_run, open_events
from domainpar.nn.adapt.gradient_sums import take_from_root
from domainpar.nn.adapt.modules import common_tensors
from domainpar.nn.adapt.on_events import OnEvents
from domainpar.nn.selftest import rows_are_independent
from domainpar.nn.team import set_threads
from domainpar.own_files import UNFINISHED
from domainpar.parallel.world import World
from domainpar.problems import Problem
from domainpar.reco.classical.surfaces import surface_of
from domainpar.reco.finishing import Finisher
from domainpar.reco.scoring import LeftOut, Scorer
from domainpar.reco.track_files import check_acorn_files_can_be_written
from domainpar.training.checkpoint import parameters_sha256
from domainpar.training.opening import check_parts
from domainpar.training.run import DTYPES
from domainpar.training.trained import load_network, read_run


@dataclass(frozen=True, eq=False)
class Job:
    """What is to be scored, and how.

    Attributes:
        scorer: Scores events.
        records: The events to score, in the order of the store.
        left_out: Events of the split that are known not to be readable.
        about: What `scores.json` says of run, network and events.
        own: The events that the run was trained on; None if that is not known.
    """

    scorer: Scorer
    records: list[EventRecord]
    left_out: list[LeftOut]
    about: dict[str, Any]
    own: OwnEvents | None


def set_up(config: InferConfig, world: World) -> Job:
    """Read the run and look at the events. *Collective*; writes nothing.

    Raises:
        Refused: On all ranks alike, if they will not do.
    """
    run, trained = choose_run(config, world)
    store = open_events(config, run, world)
    records, left_out = _choose_events(config, store, world)
    model, state = load_network(run, trained, config.checkpoint, store, world)
    world.on_all(lambda: _check_tracks(config, store, records))
    if config.strict:
        world.on_all(lambda: check_parts(store, world, config.grouping, config.sectors, trained.seed))
    if isinstance(model, OnEvents):
        take_from_root(common_tensors(model), world)
    model.to(world.device)
    set_threads(config.threads or world.cores_for_each())
    origin = {
        "mode": config.mode,
        "sectors": config.sectors,
        "dtype": trained.dtype,
        "precision": trained.precision,
        "step": state.step,
        "parameters_sha256": parameters_sha256(model),
    }
    unfinished = (Path(config.out) if config.out is not None else run / "scores") / UNFINISHED
    scorer = _scorer(config, trained, world, store=store, model=model, directory=unfinished, origin=origin)
    about = {**origin, **_about(config, trained, run, store), "bitwise_problem": _self_test(model, world)}
    own = world.on_all(lambda: own_events(read_run(run), store))
    return Job(scorer, records, left_out, about, own)


def _choose_events(config: InferConfig, store: EventStore, world: World) -> tuple[list[EventRecord], list[LeftOut]]:
    """The events to score, and those of them that are left out from the start. *Collective*."""
    chosen = store.events(None if config.split == "all" else config.split)
    if not chosen:
        world.agree(Problem(f"store {store.path} has no {config.split} events", "take another --split"))
    records = [record for record in chosen if record.event not in store.unreadable]
    if not records:
        world.agree(Problem(f"no {config.split} event of store {store.path} can be read", "take another --split"))
    left_out = [record.event for record in chosen if record.event in store.unreadable]
    return records, [LeftOut(event, store.unreadable[event].what) for event in left_out]


def _scorer(
    config: InferConfig,
    trained: TrainConfig,
    world: World,
    *,
    store: EventStore,
    model: nn.Module,
    directory: Path,
    origin: dict[str, Any],
) -> Scorer:
    splits = {record.event: record.split for record in store.events()}
    return Scorer(
        model,
        store,
        world,
        directory=directory,
        sectors=config.sectors,
        grouping=config.grouping,
        dtype=DTYPES[trained.dtype],
        seed=trained.seed,
        origin=origin,
        judge=judge_of(config, target_conditions(trained.target) if trained.target else None),
        tracks=track_options(config),
        finish=Finisher(directory, config.format, config.classical, splits),
        on_bad_event=config.on_bad_event,
    )


def _about(config: InferConfig, trained: TrainConfig, run: Path, store: EventStore) -> dict[str, Any]:
    return {
        "run": str(run),
        "checkpoint": config.checkpoint,
        "trained_mode": trained.mode,
        "trained_sectors": trained.sectors,
        "target": trained.target,
        "store_digest": store.digest,
    }


def _self_test(model: nn.Module, world: World) -> str | None:
    """Why scores are the same to rounding only; None if they are to the last bit, or on a GPU. *Collective*."""
    if isinstance(model, OnEvents):
        return "this network is not built on stages"
    return rows_are_independent(model, world.transport) if world.device.type == "cpu" else None


def _check_tracks(config: InferConfig, store: EventStore, records: Sequence[EventRecord]) -> None:
    """Refuse what the first event lacks before anything is computed: those of a store are of one kind."""
    check_conditions(track_target(config))
    if config.format == "acorn":
        check_acorn_files_can_be_written()
    if config.tracks == "walk" or config.classical or config.format == "acorn":
        with store.open(records[0]) as event:
            if not event.has_positions:
                raise event.place.problem(
                    "its hits have no positions, which --tracks walk, --classical and --format acorn need",
                    "take --tracks cc or junction",
                )
            if config.classical:
                everything = np.arange(event.num_nodes)
                surface_of(event.read_nodes("volume", everything), event.read_nodes("layer", everything))
