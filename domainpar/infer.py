"""Score every edge of whole events with a trained network, and build tracks: in the order of the user's own files.

Writes one zarr zip an event: hit_id, edge_index (rows into hit_id), edge_logit, edge_score, edge_scored and, with
--tracks, track_id (-1: none). The same tracks on any number of ranks.

Examples:
  python -m domainpar.infer                                        the newest run, on its own events
  mpiexec -n 8 python -m domainpar.infer --run runs/0001 --store stores/full --out scores
  python -m domainpar.infer --run runs/0001 --split val --checkpoint last
  mpiexec -n 8 python -m domainpar.infer --tracks walk --classical --split test    tracks, held against helix following
  python -m domainpar.infer --tracks walk --format acorn          also files for acorn's evaluation
  torchrun --nproc-per-node 8 -m -- domainpar.infer --run runs/0001      `--`, or torchrun takes --run for its own
"""

import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from domainpar.command_line import parse, run_command
from domainpar.config import ConfigError, InferConfig, TrainConfig, resolved_yaml, target_conditions
from domainpar.config.texts import conditions_of
from domainpar.parallel.allocator import set_up_allocator

if TYPE_CHECKING:
    from domainpar.events.store import EventRecord, EventStore, StoredEvent
    from domainpar.parallel.world import World
    from domainpar.reco.performance.counts import TrackCounts
    from domainpar.reco.scores import EventScores
    from domainpar.reco.scoring import Judge, Outcome, Scorer
    from domainpar.reco.tracks import TrackOptions

DEFAULT_BORDERS = 8
"""Sectors whose borders efficiency is shown against where there are none: what others would have cut."""


def main(argv: Sequence[str] | None = None) -> int:
    """Score events as the command line says; returns the exit code. Collective."""
    return run_command(InferConfig, _work, __doc__, argv)


def _work(config: InferConfig) -> int:
    allocator = set_up_allocator(config.allocator)

    import torch

    from domainpar.parallel.world import World

    torch.set_num_threads(1)  # ranks are the parallelism; more threads inside a kernel could change its bits
    # As in training: sectors need no exchange, so each rank takes other events unless told otherwise.
    domain_size = 1 if config.mode == "naive" and config.domain_size is None else config.domain_size
    with World.session(config.transport, config.device, domain_size) as world:
        infer(config, world, allocator)
    return 0


def infer(config: InferConfig, world: "World", allocator: str | None = None) -> None:
    """Score the events of a store with the network of a run, and show how it goes. *Collective*.

    Args:
        config: What to do.
        world: The ranks.
        allocator: What was done about the C library's allocator, to be shown; None if nothing was.

    Raises:
        Refused: On all ranks alike, before anything was written, if run, events or output directory will not do.
        RuntimeError: If an edge of an event did not get exactly one score.
    """
    from domainpar.reco import summary
    from domainpar.reco.score_files import choose_directory, write_list, write_timings

    scorer, records, about = _set_up(config, world)
    world.on_root(lambda: str(choose_directory(scorer.directory, config.overwrite)))
    if world.is_root:
        print(*summary.first_lines(world, scorer.store, records, about, allocator), sep="\n", flush=True)
    outcomes = _score(scorer, records)
    if world.is_root:
        in_order = [outcomes[record.event] for record in records]
        metrics, performance = _metrics(records, outcomes), _performance(records, outcomes)
        about = {**about, "metrics": metrics, "tracks": _about_tracks(config, performance)}
        write_timings(scorer.directory, world.size, [summary.timing(outcome) for outcome in in_order])
        write_list(scorer.directory, [outcome.scored for outcome in in_order], about)
        lines = summary.last_lines(in_order, metrics, scorer.directory, about)
        tables = summary.performance_lines(performance, config.matching_style, config.mode == "naive")
        print(*tables, *_not_counted(records, outcomes), *lines, sep="\n", flush=True)


def _set_up(config: InferConfig, world: "World") -> "tuple[Scorer, list[EventRecord], dict[str, Any]]":
    """The scorer, the events to score, and what `scores.json` says of both. *Collective*; writes nothing."""
    from domainpar.nn.adapt.gradient_sums import take_from_root
    from domainpar.nn.adapt.on_events import OnEvents
    from domainpar.nn.adapt.parallelize import tensors_of
    from domainpar.nn.team import set_threads
    from domainpar.reco.finishing import Finisher
    from domainpar.reco.scoring import Scorer
    from domainpar.training.checkpoint import parameters_sha256
    from domainpar.training.run import DTYPES
    from domainpar.training.trained import load_network

    run, trained = _choose_run(config, world)
    store = _open_events(config, run, world)
    records = store.events(None if config.split == "all" else config.split)
    world.agree(None if records else f"store {store.path} has no {config.split} events; take another --split.")
    model, state = world.on_all(lambda: load_network(run, trained, config.checkpoint, store))
    world.on_all(lambda: _check_tracks(config, store, records))
    if isinstance(model, OnEvents):
        take_from_root(tensors_of(model), world.transport)
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
    directory = Path(config.out) if config.out is not None else run / "scores"
    splits = {record.event: record.split for record in records}
    scorer = Scorer(
        model,
        store,
        world,
        directory=directory,
        sectors=config.sectors,
        grouping=config.grouping,
        dtype=DTYPES[trained.dtype],
        seed=trained.seed,
        origin=origin,
        judge=_judge(config, target_conditions(trained.target) if trained.target else None),
        tracks=_track_options(config),
        finish=Finisher(directory, config.format, config.classical, splits),
    )
    about = {
        **origin,
        "run": str(run),
        "checkpoint": config.checkpoint,
        "trained_mode": trained.mode,
        "target": trained.target,
        "store": str(store.path),
        "store_digest": store.digest,
        "trained_on_this_store": state.dataset == store.digest,
        "bitwise_problem": _self_test(scorer),
    }
    return scorer, records, about


def _choose_run(config: InferConfig, world: "World") -> tuple[Path, TrainConfig]:
    """The run to take the network from, and what it was trained as. *Collective*."""
    from domainpar.training.rundir import newest_run
    from domainpar.training.trained import read_run

    run = Path(world.on_root(lambda: config.run or str(newest_run())))

    def trained() -> str:
        read_run(run)  # says it better than a missing file does
        try:
            return resolved_yaml(trained_as(run, config))
        except ConfigError as error:
            raise ValueError(f"{error}; {error.hint}.") from error

    # Read and checked by one rank: the others get values that are known to be good.
    values = yaml.safe_load(world.on_root(trained))
    return run, TrainConfig(**values | ({} if config.model is None else {"model": config.model}))


def trained_as(run: Path, config: InferConfig) -> TrainConfig:
    """What a run was trained as, by its `config.yaml`; a network of the user's own is named by `config.model`."""
    own = [] if config.model is None else ["--model", config.model]
    return parse(TrainConfig, "", ["--config", str(run / "config.yaml"), *own])


def _open_events(config: InferConfig, run: Path, world: "World") -> "EventStore":
    """The store that is asked for, or else the one the run was trained on. *Collective*."""
    from domainpar.training.run import open_store
    from domainpar.training.trained import read_run

    def path() -> Path:
        if config.store is not None:
            return Path(config.store)
        trained_on = Path(read_run(run)["store"]["path"])
        if not trained_on.is_dir():
            raise ValueError(f"{run} was trained on {trained_on}, which is not there; name its place with --store.")
        return trained_on

    return open_store(world.on_all(path), world)


def _self_test(scorer: "Scorer") -> str | None:
    from domainpar.nn.adapt.on_events import OnEvents
    from domainpar.nn.selftest import rows_are_independent

    if isinstance(scorer.model, OnEvents):
        return "this network is not built on stages"
    on_cpu = scorer.world.device.type == "cpu"
    return rows_are_independent(scorer.model, scorer.world.transport) if on_cpu else None


def _track_options(config: InferConfig) -> "TrackOptions | None":
    from domainpar.reco.tracks import TrackOptions

    if config.tracks is None:
        return None
    return TrackOptions(
        method=config.tracks,
        score_cut=config.score_cut,
        walk_min=config.walk_min,
        walk_add=config.walk_add,
        min_hits=config.min_hits,
        double_hits=config.double_hits,
        stitch=config.stitch,
    )


def _check_tracks(config: InferConfig, store: "EventStore", records: "Sequence[EventRecord]") -> None:
    """Refuse what the first event lacks before anything is computed: those of a store are of one kind."""
    import numpy as np

    from domainpar.events.targets import check_conditions
    from domainpar.reco.track_files import check_acorn_files_can_be_written

    check_conditions(_track_target(config))
    if config.format == "acorn":
        check_acorn_files_can_be_written()
    if config.tracks == "walk" or config.classical or config.format == "acorn":
        with store.open(records[0]) as event:
            if not event.has_positions:
                raise ValueError(
                    f"event {event.event_id}: its hits have no positions, which --tracks walk, --classical and "
                    "--format acorn need; take --tracks cc or junction."
                )
            if config.classical:
                from domainpar.reco.classical.surfaces import surface_of

                everything = np.arange(event.num_nodes)
                surface_of(event.read_nodes("volume", everything), event.read_nodes("layer", everything))


def _track_target(config: InferConfig) -> dict[str, Any]:
    return conditions_of("--track-target", config.track_target) if config.track_target else {}


def _judge(config: InferConfig, conditions: dict[str, Any] | None) -> "Judge":
    """Counts the edges and tracks of each event against its truth, where it has one."""
    import numpy as np

    from domainpar.reco.judging import TrackJudge
    from domainpar.reco.performance.cuts import TrackCuts
    from domainpar.training.trained import count_event

    cuts = TrackCuts(config.min_track_length, config.matching_fraction, _track_target(config))
    tracks = TrackJudge(cuts, config.border_sectors or config.sectors or DEFAULT_BORDERS)

    def judge(event: "StoredEvent", scores: "EventScores") -> dict[str, Any]:
        # An edge without a score never passes and ranks below all others: what naive mode cuts, it loses.
        logits = np.where(scores.edge_scored, scores.edge_logit, -np.inf)
        counts = count_event(event, logits[scores.original_position], conditions)
        edges = None if counts is None else asdict(counts)
        found = tracks.judge(event, scores) if config.tracks else {}
        return {"edges": edges, "tracks": found if "tracks" in found else None, "uncounted": found.get("uncounted")}

    return judge


def _about_tracks(config: InferConfig, performance: "dict[str, dict[str, TrackCounts]]") -> dict[str, Any] | None:
    """What `scores.json` says of tracks: how they were built, and their counts by split and finder."""
    options = _track_options(config)
    if options is None:
        return None
    told = options.told()
    return {
        "method": told.pop("method"),
        "options": told,
        "found_by": sorted({finder for found in performance.values() for finder in found}),
        "target": config.track_target,
        "border_sectors": config.border_sectors or config.sectors or DEFAULT_BORDERS,
        "matching_style": config.matching_style,
        "performance": {
            split: {finder: counts.to_json() for finder, counts in found.items()}
            for split, found in performance.items()
        },
    }


def _score(scorer: "Scorer", records: "Sequence[EventRecord]") -> "dict[str, Outcome]":
    """Score all events, with a bar and a line for each; outcomes by event, in no order. *Collective*."""
    from tqdm import tqdm

    from domainpar.reco import summary

    is_root = scorer.world.is_root
    outcomes: dict[str, Outcome] = {}
    with tqdm(total=len(records), desc="score", unit="event", disable=None if is_root else True) as bar:
        for finished in scorer.rounds(records):
            outcomes |= {outcome.scored.event: outcome for outcome in finished}
            bar.update(len(finished))
            for outcome in finished if is_root else ():
                bar.write(summary.event_line(outcome))
    return outcomes


def _metrics(records: "Sequence[EventRecord]", outcomes: "dict[str, Outcome]") -> dict[str, dict[str, Any]]:
    """Metrics of each split over those of its events that have a truth to count against."""
    from domainpar.reco.judging import sum_segments
    from domainpar.training.metrics import EdgeCounts
    from domainpar.training.trained import metrics_over

    edges = _by_split(records, outcomes, "edges")
    metrics = {split: metrics_over([EdgeCounts(**one) for one in found]) for split, found in edges.items()}
    for split, found in _by_split(records, outcomes, "tracks").items():
        segments = sum_segments(found)
        if segments is not None and split in metrics:
            metrics[split]["segments"] = asdict(segments)
    return metrics


def _performance(
    records: "Sequence[EventRecord]", outcomes: "dict[str, Outcome]"
) -> "dict[str, dict[str, TrackCounts]]":
    """Counts of each finder's tracks over the events of each split that have a truth to count against."""
    from domainpar.reco.judging import sum_tracks

    return {split: sum_tracks(found) for split, found in _by_split(records, outcomes, "tracks").items()}


def _not_counted(records: "Sequence[EventRecord]", outcomes: "dict[str, Outcome]") -> list[str]:
    """Which tracks are in no table, and why."""
    from collections import Counter

    from domainpar.reco.judging import left_out
    from domainpar.words import several

    reasons = Counter(outcome.judgement["uncounted"] for outcome in outcomes.values() if outcome.judgement)
    uncounted = [
        f"tracks of {several(count, 'event')} were not counted: {reason}" for reason, count in reasons.items() if reason
    ]
    found = _by_split(records, outcomes, "tracks")
    return uncounted + [line for judgements in found.values() for line in left_out(judgements)]


def _by_split(
    records: "Sequence[EventRecord]", outcomes: "dict[str, Outcome]", what: str
) -> dict[str, list[dict[str, Any]]]:
    """One part of the judgements of events, where there is one, in the order of the store."""
    found: dict[str, list[dict[str, Any]]] = {}
    for split in ("train", "val", "test"):
        for record in records:
            judgement = outcomes[record.event].judgement
            if record.split == split and judgement is not None and judgement[what] is not None:
                found.setdefault(split, []).append(judgement[what])
    return found


if __name__ == "__main__":
    sys.exit(main())
