"""One training run, from a configuration to a directory of results."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

from domainpar.common.agreement import agree, on_all, on_root
from domainpar.common.problems import Problem
from domainpar.common.words import progress, several
from domainpar.measure.forecast import MemoryMeter
from domainpar.nn.program import set_threads
from domainpar.parallel import gpus
from domainpar.parallel.errors import RanksFailed
from domainpar.parallel.signals import StopFlag
from domainpar.parallel.tables import in_files, lie_in_files
from domainpar.parallel.world import World
from domainpar.runs.checkpoint import TrainingState
from domainpar.runs.directory import RunDirectory, choose_directory, figure_of, note_failure
from domainpar.tracking.config import is_code
from domainpar.tracking.config.train import TrainingFlags, UpkeepFlags
from domainpar.tracking.cost.epochs import Costs
from domainpar.tracking.cost.scratch import traffic
from domainpar.tracking.events.store import EventStore
from domainpar.tracking.networks.catalogue import DTYPES, make_network
from domainpar.tracking.networks.on_events import on_device
from domainpar.tracking.training.checkpointer import Checkpointer
from domainpar.tracking.training.inputs import TrainingData, open_training_data, steps_of
from domainpar.tracking.training.loop import Schedule, Trainer
from domainpar.tracking.training.monitor.profile import Profile
from domainpar.tracking.training.network import begin_with, verify_network
from domainpar.tracking.training.optimizer import make_optimizer
from domainpar.tracking.training.parts import PartLoader, Skip
from domainpar.tracking.training.pretrained import source
from domainpar.tracking.training.run_log import RunLog
from domainpar.tracking.training.step_memory import choose_recompute, expected_memory
from domainpar.tracking.training.summary import SQUASHED
from domainpar.tracking.training.tensorboard import check_tensorboard


@dataclass(frozen=True, eq=False)
class Run:
    """A run as it ended."""

    directory: Path  # its results
    store: EventStore  # its events
    trainer: Trainer  # holds the trained network
    state: TrainingState  # where training stands
    exit_code: int  # 0, or 1 (143 after SIGTERM) if the run ended without its last checkpoint


def train(
    config: TrainingFlags,
    upkeep: UpkeepFlags,
    store: Path,
    world: World,
    allocator: str | None = None,
    stop: StopFlag | None = None,
) -> Run:
    """Train as a configuration says, until the last step or until a request to stop. *Collective*.

    If it fails, `run.json` says so.

    Args:
        config: What decides the weights; written to `config.yaml`, with all other groups that it has.
        upkeep: How the run is carried through.
        store: The events.
        world: The ranks.
        allocator: The set-up of the C library's allocator, to be shown; None if there is none.
        stop: Asks the run to stop. Default: the signals that do, listened to while it trains.

    Returns:
        The run as it ended, with its trained model.

    Raises:
        Refused: On all ranks alike, before a file is touched, if the events, the network or the output directory will
            not do.
    """
    with ExitStack() as stack:
        stop = stop or stack.enter_context(StopFlag.listening())
        # Open and refuse.
        if upkeep.log is not None:
            on_root(world.transport, check_tensorboard)
        training_data = open_training_data(config, store, world)
        if upkeep.profile is not None and training_data.total_steps < upkeep.profile + 2:
            what = f"--profile {upkeep.profile} begins with the third step of a run, and this one has "
            problem = Problem(f"{what}{training_data.total_steps}", "profile fewer, or train for more")
            agree(world.transport, problem)
        # Build.
        set_threads(config.threads or world.cores_for_each())
        gpus.repeat_bits(world.device)
        mixed = gpus.mixed_kinds(world.transport, world.device)
        agree(world.transport, mixed if upkeep.check_replicas_every else None)
        trainer = on_all(world.transport, lambda: make_trainer(config, training_data, world, upkeep))
        exactness = trainer.model.exactness(world.transport)
        trainer.model.take_from_root(world)
        if config.verify and is_code(config.model):
            verify_network(trainer.model, training_data, world)
        memory, expected = MemoryMeter(world.device), None  # of the bare process, before the first part is loaded
        stack.callback(lie_in_files, None)
        if upkeep.recompute_every == "auto" or upkeep.memory_limit is not None or upkeep.scratch is not None:
            expected = choose_recompute(upkeep, trainer, training_data, memory, config.keeps_freed)
        # Claim and resume.
        choice = config.out, config.resume, config.overwrite
        directory = on_root(world.transport, lambda: choose_directory(*choice), RunDirectory)
        if world.is_root:  # the lock is rank 0's
            stack.callback(directory.release)
        run_log = on_all(world.transport, lambda: RunLog(config, upkeep, training_data, trainer, directory, exactness))
        checkpointer = Checkpointer(upkeep, trainer, run_log, stop)
        state = TrainingState(dataset=training_data.digest)
        if directory.resume:
            state = checkpointer.resume(training_data.digest, config.strict_resume)
        run_log.say(*(f"note: {note}" for note in directory.notes))
        stack.enter_context(_failures_noted(directory, world))
        # Steps.
        keeps = config.keeps_freed
        expected = expected or expected_memory(trainer, training_data, memory, state.step, keeps)
        run_log.begin(state, expected, allocator)
        before, began = traffic(world), time.perf_counter()
        state, stopped = _steps(config, upkeep, training_data, checkpointer, state)
        seconds, taken = time.perf_counter() - began, memory.taken(world)
        moved = traffic(world) if in_files() else None
        # Report.
        exit_code = 0
        if checkpointer.unsaved is not None:
            exit_code = 143 if checkpointer.terminated else 1  # 128 + SIGTERM, as batch systems expect
            run_log.end_unsaved(checkpointer.unsaved, state.step)
        else:
            moved = moved.since(before) if moved is not None and before is not None else None
            run_log.end("preempted" if stopped else "done", state, seconds, taken, moved)
        return Run(directory.path, training_data.store, trainer, state, exit_code)


@contextmanager
def _failures_noted(directory: RunDirectory, world: World) -> Iterator[None]:
    """Around training: the rank that fails says so in `run.json`, and gives the directory back.

    It ends all ranks, and rank 0 may have no time for it.
    """
    try:
        yield
    except RanksFailed:  # the rank that failed says why
        raise
    except BaseException as error:
        note_failure(directory.path, world.rank, error)
        directory.release()
        raise


def _steps(
    config: TrainingFlags,
    upkeep: UpkeepFlags,
    training_data: TrainingData,
    checkpointer: Checkpointer,
    state: TrainingState,
) -> tuple[TrainingState, bool]:
    """Train from a state to the last step; returns the state at the end, and whether it was stopped. *Collective*."""
    trainer, run_log = checkpointer.trainer, checkpointer.run_log
    total, talks = training_data.total_steps, trainer.world.is_root
    costs = Costs(trainer.world, config.precision_in_words)
    profile = None if upkeep.profile is None else Profile(trainer.world, run_log.directory, upkeep.profile)
    if profile is not None:
        trainer.now.listener = profile.begins
    with progress("train", total, "step", talks, state.step) as advance:
        stopped = state.step < total and checkpointer.boundary(state)  # stopped while the run was set up
        while state.step < total and not stopped and not _goes_stale(config.stop_early, state):
            epoch = state.epoch
            steps = steps_of(config, training_data.train, config.seed, epoch)
            costs.begin()
            for samples, following in pairwise([*steps[state.step_in_epoch :], []]):
                with nullcontext() if profile is None else profile.step(), costs.step():
                    record = trainer.step(samples, state.step, following)
                costs.add(record)
                if profile is not None:
                    profile.add(record)
                state = replace(state, step=state.step + 1, step_in_epoch=state.step_in_epoch + 1)
                trainer.world.set_deadline(upkeep.timeout)  # the first step may take longer
                if state.step_in_epoch >= len(steps):
                    record["epoch_costs"] = costs.epoch_costs()
                run_log.write({"split": "train", "epoch": epoch, "step": state.step, **record}, samples)
                advance(1, "" if record["loss"] is None else f"loss {record['loss']:.4f}")
                may_save = state.step_in_epoch < len(steps) and state.step < total
                stopped = checkpointer.boundary(state, may_save)
                if stopped or state.step >= total:
                    break
            if not stopped:
                # More are done than there are, where a run goes on with other steps. And
                if state.step_in_epoch >= len(steps):  # else --max-steps ended it early: a resumed run finishes it
                    state = replace(state, epoch=epoch + 1, step_in_epoch=0)
                state, best = _validated(training_data, checkpointer, state, epoch)
                stale = state.step < total and _goes_stale(config.stop_early, state)
                checkpointer.save(state, best, final=stale or state.step >= total)
                if stale:
                    epochs = several(config.stop_early or 0, "epoch")
                    than = f"no better validation than that of step {state.best_step} in {epochs}"
                    run_log.say(f"stopping : {than} (--stop-early)")
    return state, stopped


def _goes_stale(stop_early: int | None, state: TrainingState) -> bool:
    """Whether the best validation is as many epochs ago as `--stop-early` allows."""
    if stop_early is None or state.best_epoch is None:
        return False
    return state.epoch - state.best_epoch >= stop_early


def _validated(
    training_data: TrainingData, checkpointer: Checkpointer, state: TrainingState, epoch: int
) -> tuple[TrainingState, bool]:
    """Evaluate the validation samples; returns the state, and whether it is the best so far. *Collective*."""
    trainer, run_log = checkpointer.trainer, checkpointer.run_log
    best = state.best is None  # without a figure, the newest is
    if training_data.val:
        record = trainer.evaluate(training_data.val, state.step)
        run_log.write({"split": "val", "epoch": epoch, "step": state.step, **record}, training_data.val)
        figure = figure_of(record, training_data.tasks.main)
        if figure is not None and (state.best is None or figure > state.best):
            best, state = True, replace(state, best=figure)
    if trainer.squashed and is_code(run_log.config.model):
        run_log.say_once("squashed", [SQUASHED])
    return (replace(state, best_step=state.step, best_epoch=state.epoch) if best else state), best


def make_trainer(
    config: TrainingFlags, training_data: TrainingData, world: World, upkeep: UpkeepFlags | None = None
) -> Trainer:
    """The network of a configuration with all that trains it.

    Raises:
        ValueError: If the network or the optimiser cannot be made, or the network has nothing to train.
    """
    upkeep = upkeep or UpkeepFlags()
    model = make_network(config, training_data.store, training_data.standard, training_data.tasks.heads)
    if config.init is not None:
        begin_with(source(config.init), training_data.store, model)
    model = on_device(model, world.device)
    model.recompute(None if upkeep.recompute_every == "auto" else upkeep.recompute_every)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ValueError(f"model {config.model!r} has no parameter to train: all of them are frozen.")
    loader = PartLoader(
        training_data.store,
        world,
        grouping=config.grouping,
        tasks=training_data.tasks,
        edge_weights=training_data.edge_weights,
        target=training_data.target,
        dtype=DTYPES[config.dtype],
        seed=config.seed,
        on_bad_event=config.on_bad_event,
    )
    for sample in training_data.without_truth:
        loader.skipped[sample.name] = Skip(
            sample.name, sample.record.event, f"it has no {training_data.tasks.missing(sample.record)}"
        )
    per_epoch = training_data.steps_per_epoch
    planned = training_data.planned_steps  # not --max-steps: a run that is resumed later keeps its schedule
    warmup = config.warmup if config.warmup_epochs is None else config.warmup_epochs * per_epoch
    return Trainer(
        model=model,
        optimizer=make_optimizer(config, model),
        loader=loader,
        world=world,
        schedule=Schedule(config.lr, config.lr_schedule, warmup, planned, per_epoch),
        clip=config.clip,
        seed=config.seed,
        check_replicas_every=upkeep.check_replicas_every,
        sizes_every=upkeep.log_every,
    )
