"""One run of inference: an order read and checked before anything is written, events scored, a directory of scores."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import yaml

from domainpar.common.agreement import agree, on_all, on_root
from domainpar.common.atomic_files import json_bytes, write_whole
from domainpar.common.problems import Problem
from domainpar.common.words import PROGRESS_LOG, progress, several, some_of
from domainpar.measure.forecast import Forecast, MemoryMeter
from domainpar.nn.classifier import EdgeClassifier
from domainpar.nn.program import set_threads
from domainpar.parallel import gpus
from domainpar.parallel.transport import Transport
from domainpar.parallel.world import World
from domainpar.runs.checkpoint import parameters_sha256
from domainpar.runs.directory import newest_run, read_run, state_of
from domainpar.runs.own_files import TUNING, UNFINISHED
from domainpar.runs.records import RunRecord, ScoresRecord, StoreRecord, record_of_root
from domainpar.tracking.command_line import config_of_run
from domainpar.tracking.config import BITWISE, ConfigError, InferConfig, TrainedFlags, resolved_yaml
from domainpar.tracking.config.infer import CountedTrackFlags, ScoringFlags
from domainpar.tracking.display.comparison import run_beside
from domainpar.tracking.events.detector import BEAM_SPOT
from domainpar.tracking.events.own_events import (
    InMaps,
    alike_by_name,
    kept_place,
    own_events,
    store_of_run,
    training_overlap,
)
from domainpar.tracking.events.store import EventRecord, EventStore, StoredEvent, outside
from domainpar.tracking.events.targets import check_conditions
from domainpar.tracking.networks.catalogue import DTYPES
from domainpar.tracking.networks.on_events import on_device
from domainpar.tracking.part_loading import check_sectors
from domainpar.tracking.reco.ckf.detector_layout import layout_of
from domainpar.tracking.reco.event_scores import FORMAT, Scores
from domainpar.tracking.reco.tracks import TrackOptions
from domainpar.tracking.scoring import infer_summary as summary
from domainpar.tracking.scoring.event_metrics import (
    EventMetrics,
    about_tracks,
    evaluator,
    track_cuts,
    track_options,
)
from domainpar.tracking.scoring.event_tracks import (
    BESIDE,
    TrackFinders,
    check_acorn_files_can_be_written,
    check_positions,
)
from domainpar.tracking.scoring.filtering import Score, score_what_is_left
from domainpar.tracking.scoring.score_files import (
    LIST,
    TIMINGS,
    choose_directory,
    publish,
    write_list,
)
from domainpar.tracking.scoring.scorer import LeftOut, Outcome, Scorer
from domainpar.tracking.scoring.scores import score_events
from domainpar.tracking.scoring.scoring_memory import ScoringNetwork, expected_memory
from domainpar.tracking.scoring.tuning import describe, keep, read, tune
from domainpar.tracking.training.inputs import check_parts, open_store
from domainpar.tracking.training.network import load_network
from domainpar.tracking.training.pretrained import as_run
from domainpar.tracking.training.summary import memory_expected, memory_taken
from domainpar.tracking.training.tasks import Tasks, label_arrays


@dataclass(frozen=True, eq=False)
class ScoringJob:
    """Events, and the scorer made for them."""

    config: InferConfig  # the order, with the target particles of the training
    scorer: Scorer  # scores events
    options: TrackOptions | None  # how tracks are built; None for none
    records: list[EventRecord]  # the events to score, in the order of the store
    left_out: list[LeftOut]  # events of the split that are known not to be readable
    record: ScoresRecord  # run, network and how it scores, for `scores.json`
    networks: Sequence[ScoringNetwork]  # a filter, if there is one, and the network


class _Chosen(NamedTuple):
    """A run whose network is asked for: its directory, what it was trained as and on, and what for."""

    run: Path
    trained: TrainedFlags
    record: RunRecord
    tasks: Tasks


def score_store(config: InferConfig, world: World, allocator: str | None) -> None:
    """Score the events of a store and show how it goes (`domainpar.infer.infer`). *Collective*."""
    job = _set_up(config, world)
    config = job.config
    on_root(world.transport, lambda: str(choose_directory(job.scorer.directory.parent, config.overwrite)))
    memory = MemoryMeter(world.device)
    largest = sorted(job.records, key=lambda record: -record.num_edges)[: config.events_per_call]
    finds_tracks = config.tracks is not None or config.ckf
    expected = expected_memory(config, job.networks, job.scorer.store, largest, world, memory, finds_tracks)
    if world.is_root:
        predicted = memory_expected(expected, smaller="") if world.device.type == "cpu" else ()
        targets = None if job.options is None else f"{config.track_target or 'all particles'}"
        lines = summary.first_lines(world, job.scorer.store, job.records, job.record, allocator, targets)
        for line in (*lines, *predicted):
            PROGRESS_LOG.say(line)
    if config.tune:
        job = _tuned(config, job)
    outcomes: dict[str, Outcome] = {}
    left_out: list[LeftOut] = []
    with progress("score", len(job.records), "event", world.is_root) as advance:
        for finished in job.scorer.rounds(job.records):
            world.set_deadline(config.timeout)  # the first events may take longer
            for outcome in finished:
                if isinstance(outcome, LeftOut):
                    left_out.append(outcome)
                else:
                    outcomes[outcome.scored.event] = outcome
                if world.is_root:
                    PROGRESS_LOG.say(summary.event_line(outcome))
            advance(len(finished))
    if not outcomes:
        raise Problem(f"none of {len(job.records)} events could be scored: {left_out[0].why}", event=left_out[0].event)
    taken = memory.taken(world)
    if world.is_root:
        left_out = sorted([*job.left_out, *left_out], key=lambda skipped: skipped.event)
        _publish(config, job, outcomes, left_out, expected, taken)


def _tuned(config: InferConfig, job: ScoringJob) -> ScoringJob:
    """Choose the cuts of tracks on validation events, and keep them with the run. *Collective*."""
    scorer, world, run, options = job.scorer, job.scorer.world, Path(job.record.run), job.options
    assert options is not None  # --tune asks for --tracks
    records = scorer.store.readable("val")
    if not records:
        agree(world.transport, Problem(f"store {scorer.store.path} has no validation events to tune on", "omit --tune"))
    place = scorer.directory / TUNING
    on_root(world.transport, lambda: place.mkdir(parents=True))
    chosen = tune(replace(scorer, directory=place), records, config, options, track_cuts(config), config.timeout)
    # Every rank has counted all events; one of them says what goes.
    chosen = on_root(world.transport, lambda: chosen)

    def kept() -> None:
        shutil.rmtree(place)
        keep(run, options, chosen)

    on_root(world.transport, kept)
    if world.is_root:
        print(describe(options, chosen), flush=True)
    tuned = replace(options, **chosen["cuts"])
    finish = replace(cast(TrackFinders, scorer.finish), options=tuned)
    return replace(job, options=tuned, scorer=replace(scorer, finish=finish))


def _publish(
    config: InferConfig,
    job: ScoringJob,
    outcomes: dict[str, Outcome],
    left_out: Sequence[LeftOut],
    expected: Forecast | None,
    taken: list[int | None],
) -> None:
    """Write and print the summary of all events, and give the files their place; on rank 0.

    `expected` and `taken`: memory of all ranks, before the first event and at its peak.
    """
    job.scorer.world.mark("write", len(outcomes))
    # In the order of the store: that of the outcomes depends on the ranks.
    records = [record for record in job.records if record.event in outcomes]
    in_order = [outcomes[record.event] for record in records]
    evaluations = EventMetrics(records, outcomes, Tasks.of(job.record))
    metrics, performance = evaluations.metrics(), evaluations.performance()
    in_map = {name: bool((outcome.evaluation or {}).get("in_map")) for name, outcome in outcomes.items()}
    of_run, *of_filter = (network.record for network in reversed(job.networks))
    own, run = own_events(of_run, *of_filter), Path(job.record.run)
    alike = alike_by_name(of_run, run, job.scorer.store, records)
    seen = None if own is None else own.counted(records, in_map, alike)
    record = job.record.changed(
        metrics=metrics,
        tracks=about_tracks(config, job.options, performance),
        skipped=left_out,
        trained_on=seen,
        events=[outcome.scored for outcome in in_order],
    )
    unfinished = job.scorer.directory
    place = unfinished.parent  # where they are published
    # As seen from the scores, which may be moved together with run and store.
    store = StoreRecord.of(**kept_place(job.scorer.store.path, place))
    names = "seconds_network", "seconds_tracks", "seconds_all", "stages", "hits"
    timings = [
        {"event": it.scored.event}
        | {name: getattr(it, name) for name in names}
        | {"edges": it.scored.edges, "tracks": it.scored.tracks}
        for it in in_order
    ]
    memory = {"peak_bytes": taken} if expected is None else expected.as_record(taken)
    # Times differ from run to run: nothing that is hashed holds any.
    of_times = {"ranks": job.scorer.world.size, "events": timings, "memory": memory}
    write_whole(unfinished / TIMINGS, json_bytes(of_times))
    listed = record.changed(run=os.path.relpath(run, place), store=store)
    if record.filter is not None:
        listed = listed.changed(filter={**record.filter, "run": os.path.relpath(record.filter["run"], place)})
    write_list(unfinished, listed)
    directory = publish(unfinished)
    beside = run_beside(run) if directory == run / "scores" else None
    tables = summary.performance_lines(
        performance, config.matching_style, naive=config.mode == "naive", shared=config.shared_hits
    )
    skipped = f"WARNING: {several(len(left_out), 'event')} left out that could not be used"
    notes = [
        memory_taken(expected, taken),
        *training_overlap(seen),
        *evaluations.not_counted(),
        *evaluations.field_mismatch(),
        *evaluations.against_truth(),
        *([f"{skipped}: {some_of([it.event for it in left_out])} (why: {LIST})"] if left_out else []),
    ]
    last = summary.last_lines(in_order, directory, record, beside, BESIDE.get(config.format))
    PROGRESS_LOG.close(*tables, *notes, *last)


def _set_up(config: InferConfig, world: World) -> ScoringJob:
    """Read the run and look at the events. *Collective*; writes nothing.

    Raises:
        Refused: On all ranks alike, if they will not do.
    """
    chosen = _choose_run(config.then or config.run, config.model, world)
    before = None if config.then is None else _choose_run(config.run, None, world)
    run, trained, of_run, tasks = chosen
    config = config.trained_for(trained.target)
    for network in filter(None, (before, chosen)):
        agree(world.transport, _unfit(config, network))
    first = before or chosen
    path = on_all(world.transport, lambda: Path(config.store or store_of_run(first.run, first.record.store)))
    store = open_store(path, world, config.on_bad_event)
    records, left_out = _choose_events(config, store, world)
    model, step, score = _loaded(chosen, config, store, world)
    networks = [ScoringNetwork(trained, of_run, model)]
    problem = model.exactness(world.transport).problem
    left: dict[str, Any] = {}
    if before is not None:
        filter_model, _, filter_score = _loaded(before, config, store, world)
        networks.insert(0, ScoringNetwork(before.trained, before.record, filter_model))
        left = on_all(world.transport, lambda: _working_point(config, chosen, before, parameters_sha256(filter_model)))
        score = partial(score_what_is_left, filter_score, left["min_score"], score)
        problem = problem or filter_model.exactness(world.transport).problem
    tuned = on_root(world.transport, lambda: read(run))
    options = on_all(world.transport, lambda: track_options(config, tuned))
    # Minutes may pass until the first track is built: what it lacks is reported now.
    on_all(world.transport, lambda: _check_tracks(config, options, store, records))
    for sectors in (config.sectors, config.border_sectors):
        on_all(world.transport, partial(check_sectors, store, records, sectors))
    if config.strict:
        on_all(world.transport, lambda: check_parts(store, world, config.grouping, config.sectors, trained.seed))
    origin = {
        "mode": config.mode,
        "sectors": config.sectors,
        "dtype": trained.dtype,
        "precision": trained.precision,
        "step": step,
        "parameters_sha256": parameters_sha256(model),
        **({"filter": left} if left else {}),
    }
    unfinished = (Path(config.out) if config.out is not None else run / "scores") / UNFINISHED
    splits = {record.event: record.split for record in store.events()}
    in_maps, target = InMaps.of(of_run, store), trained.target.value if trained.target else None
    scorer = Scorer(
        score,
        store,
        world,
        directory=unfinished,
        finish=TrackFinders(options, unfinished, config.format, config.ckf, splits, store.beam_spot or BEAM_SPOT),
        evaluate=evaluator(config, target, tasks, records, in_maps, options, config.sectors, before is not None),
        origin=origin,
        on_bad_event=config.on_bad_event,
        events_per_call=config.events_per_call,
    )
    record = ScoresRecord.of(
        **FORMAT,
        **origin | ({"filter": {"run": str(first.run), **left}} if left else {}),
        trained_mode=trained.mode,
        trained_sectors=trained.sectors,
        target=trained.target,
        joined_by=None if store.learned_from == of_run.store.learned_from else of_run.store.joined_by,
        run=str(run),
        checkpoint=config.checkpoint,
        tasks=tasks,
        store_digest=store.digest,
        filters=[_filter(of_run.store.filter), _filter(left or store.settings.get("filter"))],
        # Of graphs as the first network sees them: what it leaves is not surveyed.
        outside=outside(first.record.store.surveyed, store.survey),
        bitwise_problem=problem,
    )
    return ScoringJob(config, scorer, options, records, left_out, record, networks)


def _loaded(chosen: _Chosen, config: InferConfig, store: EventStore, world: World) -> tuple[EdgeClassifier, int, Score]:
    """The network of a run, the step of its checkpoint, and what scores events with it. *Collective*."""
    trained = chosen.trained
    model, state = load_network(chosen.run, trained, config.checkpoint, store, world)
    # A network of the user's own may hold tensors that no checkpoint has, drawn anew on each rank.
    model.take_from_root(world)
    model = on_device(model, world.device)
    set_threads(config.threads or world.cores_for_each())
    gpus.repeat_bits(world.device)
    how: dict[str, Any] = {"sectors": config.sectors, "grouping": config.grouping, "seed": trained.seed}
    how |= {"device": world.device, "dtype": DTYPES[trained.dtype]}

    def score(events: Sequence[StoredEvent], transport: Transport, *, root: int = 0) -> list[Scores] | None:
        """`score_events` with the labels that the network's numbers mean."""
        scores = score_events(model.read, events, transport, root=root, **how)
        return scores and [replace(one, labels=label_arrays(chosen.tasks, one.readings)) for one in scores]

    return model, state.step, score


def _working_point(config: ScoringFlags, chosen: _Chosen, before: _Chosen, parameters: str) -> dict[str, Any]:
    """The weights of a filter, and the score that it asks for: of the flag, else that of the second network's training.

    Raises:
        Problem: If that network was not trained on what these weights leave, and no flag is given.
    """
    trained_on = chosen.record.store.filter or {}
    if config.min_score is None and trained_on.get("parameters_sha256") != parameters:
        raise Problem(
            f"--then {chosen.run} was not trained on what the {config.checkpoint} weights of {before.run} leaves of "
            "the edges",
            "say what the filter asks for: --min-score 0.02",
        )
    return {"parameters_sha256": parameters, "min_score": config.min_score or float(trained_on["min_score"])}


def _unfit(config: InferConfig, chosen: _Chosen) -> Problem | None:
    """Why a network cannot do what is asked; None if it can."""
    run, trained, _, tasks = chosen
    if config.events_per_call > 1 and not trained.is_bitwise:
        what = f"--events-per-call {config.events_per_call} joins events, and --model {trained.model} may have norms"
        hint = f"leave it out; networks built on stages can: {', '.join(BITWISE)}"
        return Problem(f"{what} over a whole event", hint)
    of_graph = [task.name for task in tasks.labels if task.label.of == "graph"]
    if config.tracks and not tasks.edge_weight:
        names = ", ".join(task.name for task in tasks.labels)
        return Problem(
            f"--tracks {config.tracks}: the network of {run} was trained on {names}, and scores no edges", "omit it"
        )
    if config.format == "acorn" and not tasks.edge_weight:
        return Problem(f"--format acorn: the network of {run} scores no edges", "leave it out")
    if of_graph and (config.events_per_call > 1 or config.mode == "naive"):
        flag = "--mode naive" if config.mode == "naive" else f"--events-per-call {config.events_per_call}"
        return Problem(f"{flag}: label {of_graph[0]} of {run} is one of a whole event, seen alone", "leave it out")
    return None


def _filter(source: Mapping[str, Any] | None) -> str:
    """The network that left edges of a store out, and the score it asked for; empty for none."""
    return f"{source['parameters_sha256'][:16]} at {source['min_score']:g}" if source else ""


def _choose_run(named: str | None, model: str | None, world: World) -> _Chosen:
    """The run to take a network from, the newest if none is named. *Collective*.

    Args:
        named: A directory, or a network that is shipped.
        model: Code of the user's own, if the network is.
    """
    run = Path(on_root(world.transport, lambda: str(as_run(named) if named else newest_run())))

    def trained() -> str:
        read_run(run)  # says it better than a missing file does
        try:
            return resolved_yaml(config_of_run(run, model))
        except ConfigError as error:
            raise Problem(error.what, error.hint) from error

    # Read and checked by one rank: the others get values that are known to be good.
    values = yaml.safe_load(on_root(world.transport, trained))
    if world.is_root and state_of(run, read_run(run)) == "died":
        print(f"note: the training in {run} ended without a word, as a killed process does", flush=True)
    record = record_of_root(world.transport, lambda: read_run(run))
    assert record is not None  # `read_run` raises where there is none
    config = TrainedFlags(**values | ({} if model is None else {"model": model}))
    return _Chosen(run, config, record, Tasks.of(record))


def _choose_events(config: ScoringFlags, store: EventStore, world: World) -> tuple[list[EventRecord], list[LeftOut]]:
    """The events to score, and those of them that are left out from the start. *Collective*."""
    split = None if config.split == "all" else config.split
    chosen, records = store.events(split), store.readable(split)
    if not chosen:
        agree(world.transport, Problem(f"store {store.path} has no {config.split} events", "take another --split"))
    if not records:
        what = f"no {config.split} event of store {store.path} can be read"
        agree(world.transport, Problem(what, "take another --split"))
    left_out = [record.event for record in chosen if record.event in store.unreadable]
    return records, [LeftOut(event, store.unreadable[event].what) for event in left_out]


def _check_tracks(
    config: CountedTrackFlags, options: TrackOptions | None, store: EventStore, records: Sequence[EventRecord]
) -> None:
    """Refuse what the first event lacks before anything is computed: those of a store are of one kind."""
    check_conditions(track_cuts(config).target)
    if config.format == "acorn":
        check_acorn_files_can_be_written()
    with store.open(records[0]) as event:
        check_positions(event, options, config.ckf, config.format == "acorn")
        if config.ckf or config.extend:
            everything = np.arange(event.num_nodes)
            columns = (event.read_nodes(name, everything) for name in ("volume", "layer", "position"))
            layout_of(event.settings).surface_of(*columns)
