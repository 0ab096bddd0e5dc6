"""Score every edge of whole events with a trained network: each edge once, in the order of the user's own files.

Writes one zarr zip an event: hit_id, edge_index (rows into hit_id), edge_logit, edge_score, edge_scored.

Examples:
  python -m domainpar.infer                                        the newest run, on its own events
  mpiexec -n 8 python -m domainpar.infer --run runs/0001 --store stores/full --out scores
  python -m domainpar.infer --run runs/0001 --split val --checkpoint last
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
from domainpar.parallel.allocator import set_up_allocator

if TYPE_CHECKING:
    from domainpar.events.store import EventRecord, EventStore, StoredEvent
    from domainpar.parallel.world import World
    from domainpar.reco.scores import EventScores
    from domainpar.reco.scoring import Judge, Outcome, Scorer


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
    from domainpar.reco.score_files import choose_directory, write_list

    scorer, records, about = _set_up(config, world)
    world.on_root(lambda: str(choose_directory(scorer.directory, config.overwrite)))
    if world.is_root:
        print(*summary.first_lines(world, scorer.store, records, about, allocator), sep="\n", flush=True)
    outcomes = _score(scorer, records)
    if world.is_root:
        metrics = _metrics(records, outcomes)
        scored = [outcomes[record.event].scored for record in records]
        write_list(scorer.directory, scored, {**about, "metrics": metrics})
        print(*summary.last_lines(list(outcomes.values()), metrics, scorer.directory, about), sep="\n", flush=True)


def _set_up(config: InferConfig, world: "World") -> "tuple[Scorer, list[EventRecord], dict[str, Any]]":
    """The scorer, the events to score, and what `scores.json` says of both. *Collective*; writes nothing."""
    from domainpar.nn.adapt.gradient_sums import take_from_root
    from domainpar.nn.adapt.on_events import OnEvents
    from domainpar.nn.adapt.parallelize import tensors_of
    from domainpar.nn.team import set_threads
    from domainpar.reco.scoring import Scorer
    from domainpar.training.checkpoint import parameters_sha256
    from domainpar.training.run import DTYPES
    from domainpar.training.trained import load_network

    run, trained = _choose_run(config, world)
    store = _open_events(config, run, world)
    records = store.events(None if config.split == "all" else config.split)
    world.agree(None if records else f"store {store.path} has no {config.split} events; take another --split.")
    model, state = world.on_all(lambda: load_network(run, trained, config.checkpoint, store))
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
    scorer = Scorer(
        model,
        store,
        world,
        directory=Path(config.out) if config.out is not None else run / "scores",
        sectors=config.sectors,
        grouping=config.grouping,
        dtype=DTYPES[trained.dtype],
        seed=trained.seed,
        origin=origin,
        judge=_judge(target_conditions(trained.target) if trained.target else None),
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
            return resolved_yaml(_trained_as(run, config))
        except ConfigError as error:
            raise ValueError(f"{error}; {error.hint}.") from error

    # Read and checked by one rank: the others get values that are known to be good.
    values = yaml.safe_load(world.on_root(trained))
    return run, TrainConfig(**values | ({} if config.model is None else {"model": config.model}))


def _trained_as(run: Path, config: InferConfig) -> TrainConfig:
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


def _judge(conditions: dict[str, Any] | None) -> "Judge":
    """Counts each event against its truth, where it has one."""
    import numpy as np

    from domainpar.training.trained import count_event

    def judge(event: "StoredEvent", scores: "EventScores") -> dict[str, Any] | None:
        # An edge without a score never passes and ranks below all others: what naive mode cuts, it loses.
        logits = np.where(scores.edge_scored, scores.edge_logit, -np.inf)
        counts = count_event(event, logits[scores.original_position], conditions)
        return None if counts is None else asdict(counts)

    return judge


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
    from domainpar.training.metrics import EdgeCounts
    from domainpar.training.trained import metrics_over

    counted: dict[str, list[EdgeCounts]] = {}
    for record in records:
        if (judgement := outcomes[record.event].judgement) is not None:
            counted.setdefault(record.split, []).append(EdgeCounts(**judgement))
    return {split: metrics_over(counted[split]) for split in ("train", "val", "test") if split in counted}


if __name__ == "__main__":
    sys.exit(main())
