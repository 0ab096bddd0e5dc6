"""One training run, from a configuration to a directory of results."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from domainpar.config import TrainConfig, is_code, parse_weighting, target_conditions
from domainpar.events.own_events import OwnEvents, store_of_run
from domainpar.events.reporting import ModelSize
from domainpar.events.store import EventStore
from domainpar.nn.adapt.gradient_sums import take_from_root
from domainpar.nn.adapt.modules import common_tensors
from domainpar.nn.adapt.on_events import OnEvents
from domainpar.nn.catalogue import build_model
from domainpar.nn.interaction import InteractionNetwork
from domainpar.nn.selftest import rows_are_independent
from domainpar.nn.team import set_threads
from domainpar.parallel.signals import StopFlag
from domainpar.parallel.transport import RanksFailed
from domainpar.parallel.world import World
from domainpar.training.checking import check_events, check_lessons
from domainpar.training.checkpoint import Checkpoints, TrainingState
from domainpar.training.journal import Journal
from domainpar.training.keeping import Keeper
from domainpar.training.loop import Trainer
from domainpar.training.memory import Expectation, MemoryWatch
from domainpar.training.opening import check_parts, open_store
from domainpar.training.parts import PartLoader, Skip
from domainpar.training.rundir import RunDirectory, RunFile, choose_directory, goes_on, note_failure
from domainpar.training.sampler import Sample, samples_of, steps_of_epoch
from domainpar.training.schedule import Schedule
from domainpar.training.targets import EdgeClasses
from domainpar.training.verifying import verified
from domainpar.training.weighting import EdgeRules
from domainpar.words import several, some_of

DTYPES = {"float32": torch.float32, "float64": torch.float64}


def train(
    config: TrainConfig, store: Path, world: World, allocator: str | None = None, stop: StopFlag | None = None
) -> Run:
    """Train as a configuration says. *Collective*.

    Args:
        config: What to do.
        store: The prepared events.
        world: The ranks.
        allocator: What was done about the C library's allocator, to be shown; None if nothing was.
        stop: Asks the run to stop. Default: the signals that do, listened to while it trains.

    Returns:
        The run as it ended, with its trained model.

    Raises:
        Refused: On all ranks alike, before anything was trained, if the events or the output directory will not do.
    """
    run = Run(config, open_store(store, world, config.on_bad_event), world, allocator)
    if stop is not None:
        run.go(stop)
        return run
    with StopFlag.listening() as stop:
        run.go(stop)
    return run


def store_to_go_on_with(config: TrainConfig, world: World) -> str:
    """The store of a run that goes on; nothing for one that begins. *Collective*.

    Raises:
        Refused: On all ranks alike, if it is not where it was.
    """

    def find() -> str:
        kept = _began_with(config)
        return str(store_of_run(Path(config.out or ""), {"store": kept})) if kept else ""

    return world.on_root(find)


def make_network(config: TrainConfig, store: EventStore) -> InteractionNetwork | OnEvents:
    """The network of a configuration with its first weights, for the features of a store.

    Raises:
        ValueError: If it cannot be loaded, or cannot have these sizes or options.
    """
    return build_model(
        config.model,
        len(store.feature_names),
        len(store.edge_feature_names),
        hidden=config.hidden,
        graph_iters=config.graph_iters,
        shared_weights=config.shared_weights,
        seed=config.seed,
        dtype=DTYPES[config.dtype],
        products=torch.bfloat16 if config.precision == "bf16" else None,
        recompute_every=config.recompute_every,
        dropout=config.dropout,
    )


def edge_weights_of(config: TrainConfig) -> EdgeClasses | EdgeRules:
    """How much each edge weighs in the loss, as a configuration says."""
    if config.weighting is not None:
        return EdgeRules.of(parse_weighting(config.weighting))
    return EdgeClasses(config.true_weight, config.fake_weight, config.other_weight)


class Run:
    """A run under way: the trainer and its way through the epochs.

    Making a run is *collective*. What cannot be trained is refused before a file is touched.

    Args:
        config: What to do.
        store: The events.
        world: The ranks.
        allocator: What was done about the C library's allocator, to be shown; None if nothing was.

    Attributes:
        exit_code: 0, or 1 (143 after SIGTERM) if the run ended without its last checkpoint.

    Raises:
        Refused: On all ranks alike, if the events, the network or the output directory will not do.
    """

    def __init__(self, config: TrainConfig, store: EventStore, world: World, allocator: str | None = None) -> None:
        self.config, self.world, self._allocator = config, world, allocator
        store, self._dataset = self._own_of(store)
        self.store = store
        self.exit_code = 0
        sectors = config.sectors if config.mode == "naive" else None
        self.train_samples, no_truth = _by_truth(samples_of(store.events("train"), sectors))
        self.val_samples, no_truth_to_validate = _by_truth(samples_of(store.events("val"), sectors))
        self._no_truth = no_truth + no_truth_to_validate
        set_threads(config.threads or world.cores_for_each())
        self._target = target_conditions(config.target) if config.target else None
        self._edge_weights = edge_weights_of(config)
        skips = config.on_bad_event == "skip"
        world.on_all(lambda: check_events(store, world, self._target, self._edge_weights, skips))
        self._warnings = check_lessons(store, world, self._target, config.target)
        if self._no_truth:
            events = sorted({sample.record.event for sample in self._no_truth})
            _say(world, f"WARNING: {several(len(events), 'event')} without truth left out: {some_of(events)}")
        if config.strict:
            world.on_all(lambda: check_parts(store, world, config.grouping, sectors, config.seed))
        self.steps_per_epoch = -(-len(self.train_samples) // config.events_per_step)
        self.total_steps = config.epochs * self.steps_per_epoch
        if config.max_steps is not None:
            self.total_steps = min(self.total_steps, config.max_steps)
        self.trainer = world.on_all(self._make_trainer)
        self._to_rounding = world.device.type != "cpu" or isinstance(self.trainer.model, OnEvents)
        self._broken = None if self._to_rounding else rows_are_independent(self.trainer.model, world.transport)
        if isinstance(self.trainer.model, OnEvents):
            self._broken = "this network is not built on stages"
            take_from_root(common_tensors(self.trainer.model), world)
        self._verify()
        self.state = TrainingState(dataset=self._dataset)
        self._claim_directory()

    @property
    def directory(self) -> Path:
        """Where the run writes."""
        return self._claimed.path

    def go(self, stop: StopFlag) -> None:
        """Train until the last step, or until asked to stop. *Collective*.

        If it fails, `run.json` says so.
        """
        culprit = False
        try:
            self._go(stop)
        except BaseException as error:
            if not isinstance(error, RanksFailed):  # else the rank that failed says why
                culprit = True
                note_failure(self.directory, self.world.rank, error)
            raise
        finally:
            if culprit or self.world.is_root:  # a rank that failed ends them all; rank 0 may have no time for it
                self._claimed.release()

    def _go(self, stop: StopFlag) -> None:
        memory = MemoryWatch(self.world.device)
        expected = self._expect(memory)
        self.journal.begin(
            self.trainer,
            self.state,
            self.total_steps,
            num_samples=(len(self.train_samples), len(self.val_samples)),
            expected=expected,
            exactness=(self._to_rounding, self._broken),
            allocator=self._allocator,
        )
        self.journal.say(*self._warnings)
        began = time.perf_counter()
        with tqdm(total=self.total_steps, initial=self.state.step, disable=self._no_bar(), unit="step") as bar:
            stopped = self.state.step < self.total_steps and self._stops(stop)  # asked while the run was set up
            while self.state.step < self.total_steps and not stopped:
                stopped = self._epoch(stop, bar)
        seconds, taken = time.perf_counter() - began, memory.taken(self.world)
        if self.keeper.unsaved is not None:
            self.exit_code = 143 if self.keeper.terminated else 1
            self.journal.end_unsaved(self.keeper.unsaved, self.state.step)
            return
        self.journal.end(
            "preempted" if stopped else "done",
            self.trainer,
            self.state,
            seconds=seconds,
            expected=expected,
            taken=taken,
            exact=not self._to_rounding and self._broken is None,
        )

    def _epoch(self, stop: StopFlag, bar: Any) -> bool:
        """The rest of one epoch; returns whether the run was asked to stop. *Collective*."""
        epoch = self.state.epoch
        steps = steps_of_epoch(self.train_samples, self.config.events_per_step, self.config.seed, epoch)
        for samples in steps[self.state.step_in_epoch :]:
            record = self.trainer.step(samples, self.state.step)
            self.state = replace(self.state, step=self.state.step + 1, step_in_epoch=self.state.step_in_epoch + 1)
            self.world.set_deadline(self.config.timeout)  # the first step may take longer
            self.journal.say_once_what_is_exchanged(self.trainer)
            self._write({"split": "train", "epoch": epoch, "step": self.state.step, **record}, samples)
            if record["loss"] is not None:
                bar.set_postfix_str(f"loss {record['loss']:.4f}", refresh=False)
            bar.update()
            if self._stops(stop, may_save=self.state.step_in_epoch < len(steps)):
                return True
            if self.state.step >= self.total_steps:
                break
        if self.state.step_in_epoch == len(steps):  # else --max-steps ended it early, and a resumed run goes on with it
            self.state = replace(self.state, epoch=epoch + 1, step_in_epoch=0)
        best = self._validate(epoch)
        self._save(best, final=self.state.step >= self.total_steps)
        return False

    def _stops(self, stop: StopFlag, may_save: bool = False) -> bool:
        """At a step boundary: stop with a checkpoint if any rank was asked to, or save one if it is time. *Collective*.

        Args:
            stop: Asked on this rank or not.
            may_save: Whether no other checkpoint follows at once.
        """
        ahead = self.keeper.ahead(stop, self.state.step)
        if ahead.stop or (ahead.save and may_save and self.state.step < self.total_steps):
            self._save(best=False, final=ahead.stop)
        return ahead.stop

    def _save(self, best: bool, final: bool) -> None:
        # Noted first: there is never a checkpoint whose weights `run.json` does not know.
        self.journal.note_weights(self.state.step, self.trainer.model)
        self.keeper.save(self.state, best, final=final)

    def _validate(self, epoch: int) -> bool:
        """Look at the validation events; returns whether the model is the best so far. *Collective*."""
        best = self.state.best is None  # without a figure, the newest is
        if self.val_samples:
            record = self.trainer.evaluate(self.val_samples, self.state.step)
            self._write({"split": "val", "epoch": epoch, "step": self.state.step, **record}, self.val_samples)
            auc = record["edge_auc"] if record["loss"] is not None else None
            if auc is not None and (self.state.best is None or auc > self.state.best):
                best, self.state = True, replace(self.state, best=auc)
        self.journal.say_once_if_squashed(self.trainer)
        if best:
            self.state = replace(self.state, best_step=self.state.step)
        return best

    def _write(self, record: dict[str, Any], samples: Sequence[Sample]) -> None:
        show = record["split"] == "val" or record["step"] in (1, self.total_steps)
        self.journal.write(record, samples, len(samples) < len(self.train_samples), show)

    def _own_of(self, store: EventStore) -> tuple[EventStore, str]:
        """What a store holds of the events that the run began with, and the digest it had then. *Collective*.

        A run that begins takes all of them. One that goes on takes its own, whatever else there is by now.
        """
        text = self.world.on_root(lambda: json.dumps(_began_with(self.config)))
        kept = json.loads(text)
        own = OwnEvents.read(kept)
        if own is None:  # an earlier version kept the digest only
            return store, store.digest
        return self.world.on_all(lambda: own.taken_from(store, kept["absolute"])), kept["digest"]

    def _claim_directory(self) -> None:
        """Choose and lock the run's directory, and load what it goes on from. *Collective*."""
        config, world = self.config, self.world
        text = world.on_root(lambda: choose_directory(config.out, config.resume, config.overwrite).to_text())
        self._claimed = RunDirectory.of_text(text)
        self.checkpoints = Checkpoints(self.directory / "checkpoints")
        try:
            self.journal = world.on_all(lambda: Journal(config, self.store, world, self._claimed))
            self.keeper = Keeper(
                self.checkpoints,
                self.trainer,
                world,
                config.checkpoint_every,
                config.save_every_minutes,
                self.journal.note,
            )
            if self._claimed.resume:
                self.state = self.keeper.resume(self._dataset, config.strict_resume)
        except BaseException:
            if world.is_root:
                self._claimed.release()
            raise
        self.journal.say(*(f"note: {note}" for note in self._claimed.notes))

    def _make_trainer(self) -> Trainer:
        config, dtype = self.config, DTYPES[self.config.dtype]
        model = make_network(config, self.store).to(self.world.device)
        if not any(parameter.requires_grad for parameter in model.parameters()):
            raise ValueError(f"model {config.model!r} has no parameter to train: all of them are frozen.")
        optimizer = torch.optim.AdamW(model.parameters(), lr=config.lr, weight_decay=config.weight_decay)
        loader = PartLoader(
            self.store,
            self.world,
            grouping=config.grouping,
            edge_weights=self._edge_weights,
            target=self._target,
            dtype=dtype,
            seed=config.seed,
            on_bad_event=config.on_bad_event,
        )
        loader.skipped |= {
            sample.name: Skip(sample.name, sample.record.event, "it has no truth") for sample in self._no_truth
        }
        planned = config.epochs * self.steps_per_epoch  # not --max-steps: a run that goes on later keeps its schedule
        warmup = config.warmup if config.warmup_epochs is None else config.warmup_epochs * self.steps_per_epoch
        schedule = Schedule(config.lr, config.lr_schedule, warmup, planned, self.steps_per_epoch)
        return Trainer(
            model,
            optimizer,
            loader,
            self.world,
            self._edge_weights,
            schedule,
            config.clip,
            config.offload,
            config.seed,
            config.check_replicas_every,
        )

    def _expect(self, memory: MemoryWatch) -> Expectation | None:
        """How much memory the largest event will take, if that is known of the network. *Collective*.

        The part that is loaded is kept for its step.
        """
        if isinstance(self.trainer.model, OnEvents):
            return None
        self.world.mark("load", self.state.step)
        readable = [sample for sample in self.train_samples if sample.record.event not in self.store.unreadable]
        if not readable:
            return None
        largest = max(readable, key=lambda sample: sample.cost)
        loader, config = self.trainer.loader, self.config
        size = ModelSize(
            config.hidden,
            config.graph_iters,
            DTYPES[config.dtype].itemsize,
            edge_item_bytes=2 if config.precision == "bf16" else None,
            recompute_every=config.recompute_every,
        )
        kept_edges = loader.kept_edges(self.train_samples + self.val_samples)
        part = loader.load(largest)
        # Groups of ranks load it each for itself; one that must leave it out leaves all without a prediction.
        missing = self.world.step_boundary(torch.tensor([int(part is None)], dtype=torch.int64))
        return None if part is None or missing[0] else memory.expect(size, part, kept_edges, self.world)

    def _verify(self) -> None:
        """Try a user's own network whole and split before anything is trained. *Collective*.

        Raises:
            Refused: On all ranks alike, if it does not compute the same.
        """
        model = self.trainer.model
        if not (self.config.verify and is_code(self.config.model) and isinstance(model, OnEvents)):
            return
        readable = {record.event for record in self.store.readable() if record.num_edges}  # `check_lessons` saw some
        first = next(sample.record for sample in self.train_samples if sample.record.event in readable)
        _say(
            self.world,
            "verify   : the network whole and split over 3 ranks, on a piece of the first event (--no-verify: skip)",
        )
        self.world.mark("verify", 0)
        said = self.world.on_root(lambda: verified(model, self.store, first))
        _say(self.world, *(f"           {line}" for line in said.splitlines()))

    def _no_bar(self) -> bool | None:
        return None if self.world.is_root else True


def _began_with(config: TrainConfig) -> dict[str, Any]:
    """What `run.json` keeps of the store of a run that goes on; nothing for one that begins."""
    path = Path(config.out or "") / "run.json"
    goes = config.resume and goes_on(config.out, config.resume) and path.is_file()
    return dict(RunFile.read(path).content.get("store") or {}) if goes else {}


def _by_truth(samples: Sequence[Sample]) -> tuple[list[Sample], list[Sample]]:
    """The samples whose events have a truth to learn from, and the others."""
    truths = [sample for sample in samples if sample.record.has_labels]
    return truths, [sample for sample in samples if not sample.record.has_labels]


def _say(world: World, *lines: str) -> None:
    for line in lines if world.is_root else ():
        tqdm.write(line)
