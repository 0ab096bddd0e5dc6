"""The events of a run: opened, and refused where they cannot be used, before anything is computed.

Events are dealt to ranks; a problem that one rank finds is agreed on by all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from domainpar.common.agreement import agree, agree_on, gather, on_all, on_root
from domainpar.common.problems import EventPlace, Problem, Where, problem_record
from domainpar.common.words import PROGRESS_LOG, several, some_of
from domainpar.nn.standard import Standard
from domainpar.parallel.world import World
from domainpar.runs.directory import began_with
from domainpar.runs.records import record_of_root
from domainpar.tracking.config.train import LearningFlags, LossFlags, RunFlags, TrainingFlags
from domainpar.tracking.events.module_map import ModuleMap
from domainpar.tracking.events.own_events import OwnEvents, store_of_run
from domainpar.tracking.events.store import LEARNED, EventStore, StoreError, WholeEvent
from domainpar.tracking.events.targets import check_target
from domainpar.tracking.part_loading import check_sectors, empty_parts
from domainpar.tracking.reco.performance.lost import FEW_SEGMENTS, count_segments
from domainpar.tracking.reco.performance.matching import TrackCuts
from domainpar.tracking.reco.performance.truth import truth_of
from domainpar.tracking.training.edge_classes import TARGET, EdgeRules, edge_classes
from domainpar.tracking.training.sampler import Sample, samples_of, steps_of_epoch
from domainpar.tracking.training.tasks import EDGES, Tasks, going_on, tasks_of
from partitioners import Sectors

Conditions = Mapping[str, Any]


@dataclass(frozen=True, eq=False)
class TrainingData:
    """The samples of a run, and the weights of their edges."""

    store: EventStore  # the events; of a run that continues, those that it began with
    digest: str  # digest of the store that the run began with
    tasks: Tasks  # what the network is trained on; of a run that continues, as it began
    train: list[Sample]  # samples to train on
    val: list[Sample]  # samples to validate with
    without_truth: list[Sample]  # samples that are left out, since their events lack a label
    target: Conditions | None  # conditions of a target particle; None: every particle is one
    edge_weights: EdgeRules  # weights of edges in the loss
    steps_per_epoch: int  # steps that take every training sample once, on average
    planned_steps: int  # steps of all epochs
    total_steps: int  # steps of the whole run: those, or fewer with --max-steps
    # constants that standardise features; None: the network takes them as they are. A run that continues has those of
    # its checkpoint.
    standard: Standard | None
    warnings: list[str]  # lines for the user about events without edges to learn from


def open_training_data(config: TrainingFlags, path: Path, world: World) -> TrainingData:
    """Open the events of a run. *Collective*; touches no file.

    A run that begins takes all events of a store. One that continues takes its own, however the store has grown.

    Raises:
        Refused: On all ranks alike, if the events cannot be trained on.
    """
    store, skips = open_store(path, world, config.on_bad_event), config.on_bad_event == "skip"
    began = record_of_root(world.transport, lambda: began_with(config.out, config.resume))
    digest = store.digest
    if began is not None and (own := OwnEvents.read(began.store)) is not None:
        store = on_all(world.transport, lambda: own.taken_from(store, began.store.absolute))
        digest = began.store.digest or ""
    on_all(world.transport, lambda: _check_partitioner(config.partitioner, store))
    sectors = config.sectors if config.mode == "naive" else None
    on_all(world.transport, lambda: check_sectors(store, store.readable(), sectors))
    samples = {split: samples_of(store.events(split), sectors) for split in ("train", "val")}
    if began is None:
        tasks = tasks_of(config, store, world)
    else:
        learned = Tasks.of(began)
        tasks = on_all(world.transport, lambda: going_on(learned, config, store))
    if sectors is not None and (of_graph := [task.name for task in tasks.labels if task.label.of == "graph"]):
        what = f"label {of_graph[0]} is one of the whole event, and --mode naive shows the network sectors of it"
        agree(world.transport, Problem(what, "leave out --mode naive"))
    without_truth = [sample for split in samples.values() for sample in split if tasks.missing(sample.record)]
    train, val = ([sample for sample in split if not tasks.missing(sample.record)] for split in samples.values())
    target, edge_weights = config.target.value if config.target else None, edge_weights_of(config)
    on_all(world.transport, lambda: check_events(store, world, target, edge_weights, tasks, skips))
    standard = store.standard if config.standardises else None
    # It reads labels of edges, so it comes once the cheap checks have passed.
    warnings = check_edges(store, world, target, config.target) if tasks.edge_weight else []
    if len(train) == 1 and not val:
        alone = f"WARNING: one {'event' if sectors is None else 'sector'} to train on, and none to validate with"
        warnings.append(f"{alone}: the network may learn it by heart, and nothing shows it")
    if config.stop_early is not None and not val:
        what = f"--stop-early {config.stop_early}: store {store.path} has no validation events that could be better"
        agree(world.transport, Problem(what, "prepare some with --val-split, or leave it out"))
    if without_truth and world.is_root:
        events = sorted({sample.record.event for sample in without_truth})
        lacks = tasks.missing(without_truth[0].record)
        PROGRESS_LOG.say(f"WARNING: {several(len(events), 'event')} without {lacks} left out: {some_of(events)}")
    if config.strict:
        on_all(world.transport, lambda: check_parts(store, world, config.grouping, sectors, config.seed))
    # A budget makes other numbers of steps of other orders.
    planned_steps = sum(len(steps_of(config, train, config.seed, epoch)) for epoch in range(config.epochs))
    total_steps = planned_steps if config.max_steps is None else min(planned_steps, config.max_steps)
    return TrainingData(
        store=store,
        digest=digest,
        tasks=tasks,
        train=train,
        val=val,
        without_truth=without_truth,
        target=target,
        edge_weights=edge_weights,
        steps_per_epoch=-(-planned_steps // config.epochs),
        planned_steps=planned_steps,
        total_steps=total_steps,
        standard=standard,
        warnings=warnings,
    )


def _check_partitioner(partitioner: str | None, store: EventStore) -> None:
    """Refuse to cut the events of a store otherwise than it is.

    Raises:
        Problem: If it was cut by another partitioner.
    """
    if partitioner is None:
        return
    made_by = str(store.settings.get("partitioner", "who wrote it"))
    if made_by.startswith("phi-eta, or"):  # no partitioner was named
        with store.open(store.readable()[0]) as event:
            made_by = "phi-eta" if event.has_positions else "metis"
    if made_by != partitioner:
        raise Problem(
            f"--partitioner is {partitioner}, and the tiles of store {store.path} were cut by {made_by}",
            f"leave it out; or make another store: python -m domainpar.prepare --partitioner {partitioner} "
            "--store DIRECTORY, with the flags of this one",
        )


def steps_of(config: LearningFlags, samples: Sequence[Sample], seed: int, epoch: int) -> list[list[Sample]]:
    """The samples of each step of an epoch."""
    return steps_of_epoch(samples, config.events_per_step, seed, epoch, config.sampling, config.node_budget)


def store_to_resume(config: RunFlags, world: World) -> str:
    """The store of a run that continues; nothing for one that begins. *Collective*.

    Raises:
        Refused: On all ranks alike, if it is not where it was.
    """

    def find() -> str:
        began = began_with(config.out, config.resume)
        return "" if began is None else str(store_of_run(Path(config.out or ""), began.store))

    return on_root(world.transport, find)


def edge_weights_of(config: LossFlags) -> EdgeRules:
    """Weights of edges in the loss, by a configuration."""
    if config.weighting is not None:
        return EdgeRules.of(config.weighting.value)
    return EdgeRules.by_class(config.true_weight)


def open_store(path: Path, world: World, on_bad_event: Literal["fail", "skip"] = "fail") -> EventStore:
    """Open a store on every rank and look into each of its events, dealt over the ranks. *Collective*.

    Args:
        on_bad_event: The fate of an event that cannot be opened. `skip`: rank 0 warns, and `unreadable` lists it.

    Raises:
        Refused: On all ranks alike, if the store, or an event that is not to be left out, is missing or damaged; or if
            no event is left.
    """
    skips = on_bad_event == "skip"
    store = on_all(world.transport, lambda: EventStore(path, check_files=not skips))
    agree_on(world.transport, {"the content of the store": store.digest[:12]}, "let all ranks see the same files")
    share: dict[str, dict[str, Any]] = {}

    def look() -> None:
        for record in store.events()[world.rank :: world.size]:
            try:
                store.open(record).close()
            except StoreError as error:
                if not skips:
                    raise
                share[record.event] = problem_record(error)

    on_all(world.transport, look)
    if not skips:
        return store
    for problems in gather(world.transport, share):
        store.unreadable |= {event: Problem(**problem) for event, problem in problems.items()}
    if len(store) and not store.readable():
        first = store.unreadable[store.records[0].event]
        agree(
            world.transport,
            Problem(f"none of {several(len(store), 'event')} can be read: {first.what}", first.hint, file=path),
        )
    for event in sorted(store.unreadable) if world.is_root else ():
        problem = store.unreadable[event]
        PROGRESS_LOG.say(f"WARNING: an event is left out: {problem.what}{Where(event=event, file=problem.file)}")
    return store


def check_parts(store: EventStore, world: World, grouping: str, sectors: Sectors | None, seed: int) -> None:
    """Refuse events of which some of the ranks that share them would own nothing. Events are dealt to ranks.

    Raises:
        Problem: Naming one of this rank's events, and the ranks of a domain group that would own nothing.
    """
    size = world.domain.size
    for record in store.readable()[world.rank :: world.size]:
        with store.open(record) as event:
            empty = empty_parts(event, size, grouping, sectors, seed)
        if empty:
            names = some_of([*map(str, empty)])
            raise EventPlace(record.event, store.path / record.path).problem(
                f"{len(empty)} of the {several(size, 'rank')} that share it would own nothing ({names}): it has "
                f"{several(record.num_nodes, 'node')} in {several(record.num_tiles, 'tile')}",
                "fewer ranks, a smaller --domain-size or more tiles (prepare --tiles) give each some work; without "
                "--strict it is computed all the same",
            )


def check_events(
    store: EventStore,
    world: World,
    target: Conditions | None,
    edge_weights: EdgeRules,
    tasks: Tasks = EDGES,
    skips: bool = False,
) -> None:
    """Refuse a store without training events or truth, or a target it does not know. Events are dealt to ranks.

    With `skips` events that cannot be used are left out, and so not looked at.

    Raises:
        Problem: If one of this rank's events, or the store, will not do.
    """
    if not (training := store.events("train")):
        hint = "prepare some, or lower --val-split and --test-split"
        raise Problem(f"store {store.path} has no training events", hint)
    missing = [tasks.missing(record) for record in training]
    if all(missing):
        what = f"none of {several(len(training), 'training event')} of store {store.path} has {missing[0]}"
        hint = "prepare events whose files tell the truth"
        if label := next(iter(store.labels.values()), None):
            hint = f"their labels are trained on with --task {label.task} --label {label.name}"
        raise Problem(f"{what}; they can be inferred on, not trained on", hint)
    records = store.readable("train") + store.readable("val")
    has_conditions = target or any(rule.conditions for rule in edge_weights.rules)
    for record in records[world.rank :: world.size]:
        place = EventPlace(record.event, store.path / record.path)
        if lacks := tasks.missing(record):
            if skips:
                continue
            raise place.problem(
                f"it has no {lacks}; it can be inferred on, not trained on",
                f"--on-bad-event skip leaves events without {lacks} out of training",
            )
        try:
            if has_conditions or tasks.labels:
                with store.open(record) as event:
                    particles = event.particles() if event.has_particle_ids else None
                    for task in tasks.labels:
                        task.labels(event, np.arange(min(1, event.num_nodes)))
                if target:
                    check_target(particles, target)
                edge_weights.check(particles)
        except StoreError:
            if not skips:
                raise
        except ValueError as error:
            raise place.attach_to(error) from error


def check_edges(store: EventStore, world: World, target: Conditions | None, target_text: str | None) -> list[str]:
    """Refuse training events without any candidate edge, or one of a target; returns warnings where none is true, or
    many segments of targets are no candidate edges.

    *Collective*; the same on all ranks. Events are dealt to them, and each stops reading once it has seen every kind
    of edge. `target_text` are the conditions as the user wrote them.

    Raises:
        Refused: On all ranks alike.
    """
    records = [record for record in store.readable("train") if record.has_labels]
    events = f"{several(len(records), 'training event')} of {store.path}"
    no_edge = Problem(
        f"no candidate edge in {events}: there is nothing to train on",
        "of hits, --phi-slope, --z0 and --layer-pairs of prepare decide what is joined",
    )
    agree(world.transport, None if any(record.num_edges for record in records) else no_edge)

    def kinds_seen() -> tuple[bool, bool]:
        """Whether this rank's events have a true edge, and one of a target."""
        true = False
        for record in [record for record in records if record.num_edges][world.rank :: world.size]:
            with suppress(StoreError), store.open(record) as event:  # a damaged event is named when it is loaded
                label = event.read_edges("label", np.arange(event.num_edges))
                edges = np.flatnonzero(label > 0)
                true = true or len(edges) > 0
                particle = event.read_nodes("particle_id", event.read_edges("dst", edges)) if target else None
                if (edge_classes(label[edges], particle, event.particles(), target) == TARGET).any():
                    return True, True
        return true, False

    kinds = on_all(world.transport, kinds_seen)
    true, targets = (any(seen) for seen in zip(*gather(world.transport, kinds)))
    if not true:
        return [f"WARNING: no true edge in {events}: the network learns to say no to every edge"]
    none = Problem(
        f"no edge of a target (--target {target_text!r}) in {events}: there is none to find",
        "take a --target that some of their particles meet: prepare prints their pT",
    )
    agree(world.transport, None if targets else none)
    if target is None:
        return []

    def held_by_graph() -> list[int]:
        """Segments of the target that are candidate edges in an event of this rank, and all of them."""
        for record in records[world.rank :: world.size][:1]:
            with suppress(StoreError), store.open(record) as event:
                truth = truth_of(event)
                held = None if truth is None else count_segments(truth, WholeEvent(event).edge_index, target)
                return [0, 0] if held is None else [held.in_graph, held.segments]
        return [0, 0]

    held, segments = np.sum(gather(world.transport, on_all(world.transport, held_by_graph)), axis=0).tolist()
    if held >= FEW_SEGMENTS * segments:
        return []
    line = f"WARNING: {held / segments:.1%} of {segments:,} segments of --target {target_text!r} are candidate edges"
    narrower = ""
    if (path := store.path / LEARNED["module_map"]).is_file():
        learned_for = TrackCuts(target=ModuleMap.read(path).origin["target"]).target_text
        narrower = f"; their module map was learned for {learned_for!r}: prepare --module-map build --map-target"
    return [f"{line}: no network finds the others{narrower}"]
