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

from domainpar.config import TrainConfig, is_code, parse_weighting, resolved_yaml, target_conditions
from domainpar.events.reporting import ModelSize
from domainpar.events.store import EventStore
from domainpar.events.targets import check_target
from domainpar.nn.adapt.gradient_sums import take_from_root
from domainpar.nn.adapt.on_events import OnEvents
from domainpar.nn.adapt.parallelize import tensors_of
from domainpar.nn.catalogue import build_model
from domainpar.nn.interaction import InteractionNetwork
from domainpar.nn.selftest import rows_are_independent
from domainpar.nn.team import set_threads, team
from domainpar.parallel.signals import StopFlag
from domainpar.parallel.transport import RanksFailed
from domainpar.parallel.world import World
from domainpar.training import summary
from domainpar.training.checkpoint import Checkpoints, TrainingState, parameters_sha256
from domainpar.training.loop import Trainer
from domainpar.training.memory import Expectation, MemoryWatch
from domainpar.training.parts import PartLoader
from domainpar.training.record import keep_records, readable
from domainpar.training.rundir import RunFile, choose_directory, describe_process, note_failure
from domainpar.training.sampler import samples_of, steps_of_epoch
from domainpar.training.schedule import Schedule
from domainpar.training.targets import EdgeClasses
from domainpar.training.verifying import verified
from domainpar.training.weighting import EdgeRules

DTYPES = {"float32": torch.float32, "float64": torch.float64}


def train(config: TrainConfig, store: Path, world: World, allocator: str | None = None) -> Run:
    """Train as a configuration says. *Collective*.

    Args:
        config: What to do.
        store: The prepared events.
        world: The ranks.
        allocator: What was done about the C library's allocator, to be shown; None if nothing was.

    Returns:
        The run as it ended, with its trained model.

    Raises:
        Refused: On all ranks alike, before anything was trained, if the events or the output directory will not do.
    """
    run = Run(config, open_store(store, world), world, allocator)
    with StopFlag.listening() as stop:
        run.go(stop)
    return run


def open_store(path: Path, world: World) -> EventStore:
    """Open a store on every rank and look into each of its events, dealt over the ranks. *Collective*.

    Raises:
        Refused: On all ranks alike, if the store or one of its events is missing or damaged.
    """

    def look() -> EventStore:
        store = EventStore(path)
        for record in store.events()[world.rank :: world.size]:
            store.open(record).close()
        return store

    return world.on_all(look)


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
    """A run under way: the trainer, its files, and what is printed.

    Making a run is *collective*. What cannot be trained is refused before a file is touched.

    Args:
        config: What to do.
        store: The events.
        world: The ranks.
        allocator: What was done about the C library's allocator, to be shown; None if nothing was.

    Raises:
        Refused: On all ranks alike, if the events, the network or the output directory will not do.
    """

    def __init__(self, config: TrainConfig, store: EventStore, world: World, allocator: str | None = None) -> None:
        self.config, self.store, self.world, self._allocator = config, store, world, allocator
        sectors = config.sectors if config.mode == "naive" else None
        self.train_samples = samples_of(store.events("train"), sectors)
        self.val_samples = samples_of(store.events("val"), sectors)
        set_threads(config.threads or world.cores_for_each())
        self._target = target_conditions(config.target) if config.target else None
        self._edge_weights = edge_weights_of(config)
        world.on_all(self._check_events)
        self.steps_per_epoch = -(-len(self.train_samples) // config.events_per_step)
        self.total_steps = config.epochs * self.steps_per_epoch
        if config.max_steps is not None:
            self.total_steps = min(self.total_steps, config.max_steps)
        self.trainer = world.on_all(self._make_trainer)
        self._to_rounding = world.device.type != "cpu" or isinstance(self.trainer.model, OnEvents)
        self._broken = None if self._to_rounding else rows_are_independent(self.trainer.model, world.transport)
        if isinstance(self.trainer.model, OnEvents):
            self._broken = "this network is not built on stages"
            take_from_root(tensors_of(self.trainer.model), world.transport)
        self._verify()
        chosen = world.on_root(lambda: str(choose_directory(config.out, config.resume, config.overwrite)))
        self.directory = Path(chosen)
        self.checkpoints = Checkpoints(self.directory / "checkpoints")
        self.state = TrainingState(dataset=store.digest)
        self.file = RunFile(self.directory / "run.json")
        self._said_who_owns_nothing = False
        if config.resume:
            world.on_all(self._resume)

    def go(self, stop: StopFlag) -> None:
        """Train until the last step, or until asked to stop. *Collective*.

        If it fails, `run.json` says so.
        """
        try:
            memory = MemoryWatch(self.world.device)
            expected = self._expect(memory)
            self._begin(expected)
            began = time.perf_counter()
            stopped = False
            with tqdm(total=self.total_steps, initial=self.state.step, disable=self._no_bar(), unit="step") as bar:
                while self.state.step < self.total_steps and not stopped:
                    stopped = self._epoch(stop, bar)
            seconds = time.perf_counter() - began
            self._end("stopped" if stopped else "done", seconds, expected, memory.taken(self.world))
        except BaseException as error:
            if not isinstance(error, RanksFailed):  # else the rank that failed says why
                note_failure(self.directory, self.world.rank, error)
            raise

    def _epoch(self, stop: StopFlag, bar: Any) -> bool:
        """The rest of one epoch; returns whether the run was asked to stop. *Collective*."""
        epoch = self.state.epoch
        steps = steps_of_epoch(self.train_samples, self.config.events_per_step, self.config.seed, epoch)
        for samples in steps[self.state.step_in_epoch :]:
            record = self.trainer.step(samples, self.state.step)
            self.state = replace(self.state, step=self.state.step + 1, step_in_epoch=self.state.step_in_epoch + 1)
            self._say_once_what_is_exchanged()
            self._write({"split": "train", "epoch": epoch, "step": self.state.step, **record})
            bar.set_postfix_str(f"loss {record['loss']:.4f}", refresh=False)
            bar.update()
            if self._should_stop(stop):
                self._save(best=False)
                return True
            if self.state.step >= self.total_steps:
                break
            if self._is_due(self.state.step) and self.state.step_in_epoch < len(steps):
                self._save(best=False)
        if self.state.step_in_epoch == len(steps):  # else --max-steps ended it early, and a resumed run goes on with it
            self.state = replace(self.state, epoch=epoch + 1, step_in_epoch=0)
        self._save(best=self._validate(epoch))
        return False

    def _validate(self, epoch: int) -> bool:
        """Look at the validation events; returns whether the model is the best so far. *Collective*."""
        if not self.val_samples:
            return True
        record = self.trainer.evaluate(self.val_samples, self.state.step)
        self._write({"split": "val", "epoch": epoch, "step": self.state.step, **record}, always_print=True)
        auc = record["edge_auc"] if record["loss"] is not None else None
        better = auc is not None and (self.state.best is None or auc > self.state.best)
        if better:
            self.state = replace(self.state, best=auc, best_step=self.state.step)
        return better or self.state.best is None

    def _is_due(self, step: int) -> bool:
        return bool(self.config.checkpoint_every) and step % (self.config.checkpoint_every or 1) == 0

    def _should_stop(self, stop: StopFlag) -> bool:
        """Whether any rank was asked to stop: one small reduction at each step boundary. *Collective*."""
        flags = torch.tensor([int(stop.asked)], dtype=torch.int64)
        return bool(self.world.step_boundary(flags)[0])

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
        )
        planned = config.epochs * self.steps_per_epoch  # not --max-steps: a run that goes on later keeps its schedule
        warmup = config.warmup if config.warmup_epochs is None else config.warmup_epochs * self.steps_per_epoch
        schedule = Schedule(config.lr, config.lr_schedule, warmup, planned, self.steps_per_epoch)
        return Trainer(
            model, optimizer, loader, self.world, self._edge_weights, schedule, config.clip, config.offload, config.seed
        )

    def _check_events(self) -> None:
        """Refuse what cannot be trained on: no events, no truth, or an unknown target. Events are dealt to ranks."""
        records = self.store.events("train") + self.store.events("val")
        if not self.train_samples:
            raise ValueError(f"store {self.store.path} has no training events; prepare some, or lower --val-split.")
        for record in records[self.world.rank :: self.world.size]:
            where = f"event {record.event}, file {self.store.path / record.path}"
            if not record.has_labels:
                raise ValueError(f"{where}: it has no truth; it can be inferred on, not trained on.")
            if self._target or isinstance(self._edge_weights, EdgeRules):
                with self.store.open(record) as event:
                    particles = event.particles() if event.has_particle_ids else None
                try:
                    if self._target:
                        check_target(particles, self._target)
                    if isinstance(self._edge_weights, EdgeRules):
                        self._edge_weights.check(particles)
                except ValueError as error:
                    raise ValueError(f"{where}: {error}") from error

    def _resume(self) -> None:
        self.file = RunFile.read(self.file.path)
        self.state = self.checkpoints.load("last", self.trainer.model, self.trainer.optimizer)
        if self.state.dataset != self.store.digest:
            raise ValueError(
                f"the run in {self.directory} was trained on other events (digest {self.state.dataset[:12]}, "
                f"{self.store.path} has {self.store.digest[:12]}); give the --store it began with."
            )

    def _expect(self, memory: MemoryWatch) -> Expectation | None:
        """How much memory the largest event will take, if that is known of the network. *Collective*.

        The part that is loaded is kept for its step.
        """
        if isinstance(self.trainer.model, OnEvents):
            return None
        self.world.mark("load", self.state.step)
        largest = max(self.train_samples, key=lambda sample: sample.cost)
        loader, config = self.trainer.loader, self.config
        size = ModelSize(
            config.hidden,
            config.graph_iters,
            DTYPES[config.dtype].itemsize,
            edge_item_bytes=2 if config.precision == "bf16" else None,
            recompute_every=config.recompute_every,
        )
        kept_edges = loader.kept_edges(self.train_samples + self.val_samples)
        return memory.expect(size, loader.load(largest), kept_edges, self.world)

    def _verify(self) -> None:
        """Try a user's own network whole and split before anything is trained. *Collective*.

        Raises:
            Refused: On all ranks alike, if it does not compute the same.
        """
        model = self.trainer.model
        if not (self.config.verify and is_code(self.config.model) and isinstance(model, OnEvents)):
            return
        first = next((sample.record for sample in self.train_samples if sample.record.num_edges), None)
        if first is None:
            self._say("verify   : no training event has an edge, so nothing can be tried")
            return
        self._say(
            "verify   : the network whole and split over 3 ranks, on a piece of the first event (--no-verify: skip)"
        )
        self.world.mark("verify", 0)
        said = self.world.on_root(lambda: verified(model, self.store, first))
        self._say(*(f"           {line}" for line in said.splitlines()))

    def _begin(self, expected: Expectation | None) -> None:
        """Write what the run is, and say so."""
        if not self.world.is_root:
            return
        keep_records(self.directory / "metrics.jsonl", self.state.step)
        (self.directory / "config.yaml").write_text(resolved_yaml(self.config))
        store = {
            "path": str(self.store.path),
            "digest": self.store.digest,
            "feature_names": self.store.feature_names,
            "edge_feature_names": self.store.edge_feature_names,
        }
        ranks = {"ranks": self.world.size, "domain_size": self.world.domain.size, "threads": team().size}
        self.file.content.pop("error", None)
        self.file.update(
            state="running",
            store=store,
            bitwise_problem=self._broken,
            allocator=self._allocator,
            memory=None if expected is None else expected.as_record(),
            model_code=self.config.model if is_code(self.config.model) else None,
            **describe_process() | ranks,
        )
        self._say(
            *summary.first_lines(
                self.config,
                self.world,
                self.store,
                num_samples=(len(self.train_samples), len(self.val_samples)),
                num_parameters=sum(parameter.numel() for parameter in self.trainer.model.parameters()),
                allocator=self._allocator,
            ),
            *summary.memory_expected(expected),
            *summary.exactness(self._to_rounding, self._broken),
            summary.where_to(self.directory, self.state, self.total_steps),
        )

    def _write(self, record: dict[str, Any], always_print: bool = False) -> None:
        if not self.world.is_root:
            return
        with (self.directory / "metrics.jsonl").open("a") as file:
            file.write(json.dumps(record, allow_nan=False) + "\n")
        self._say_once_who_owns_nothing(record)
        if always_print or record["step"] % self.config.log_every == 0 or record["step"] in (1, self.total_steps):
            self._say(readable(record))

    def _say_once_who_owns_nothing(self, record: dict[str, Any]) -> None:
        if not self._said_who_owns_nothing:
            num_samples = min(self.config.events_per_step, len(self.train_samples))
            lines = summary.idle_ranks(record["owned_nodes"], record["step"], num_samples, self.world)
            self._said_who_owns_nothing = bool(lines)
            self._say(*lines)

    def _say_once_what_is_exchanged(self) -> None:
        if "exchanges" in self.file.content or self.trainer.exchanges is None or not self.world.is_root:
            return
        forward, backward = self.trainer.exchanges
        sums = self.trainer.model.sums if isinstance(self.trainer.model, OnEvents) else 0
        self.file.update(exchanges={"forward": forward, "backward": backward, "sums": sums})
        self._say(summary.exchanged(forward, backward, sums))

    def _save(self, best: bool) -> None:
        if self.world.is_root:
            self.checkpoints.save(self.trainer.model, self.trainer.optimizer, self.state, best)

    def _end(self, how: str, seconds: float, expected: Expectation | None, taken: Sequence[int | None]) -> None:
        if not self.world.is_root:
            return
        sha256 = parameters_sha256(self.trainer.model)
        memory = {"peak_bytes": list(taken)} if expected is None else expected.as_record(taken)
        self.file.update(state=how, parameters_sha256=sha256, steps=self.state.step, seconds=seconds, memory=memory)
        exact = not self._to_rounding and self._broken is None
        self._say(summary.memory_taken(expected, taken))
        own = f" --model {self.config.model}" if is_code(self.config.model) else ""
        with self.store.open(self.store.events()[0]) as event:
            geometry = event.has_positions
        self._say(*summary.last_lines(self.directory, self.state, how, seconds, sha256, exact, own, geometry))

    def _no_bar(self) -> bool | None:
        return None if self.world.is_root else True

    def _say(self, *lines: str) -> None:
        for line in lines if self.world.is_root else ():
            tqdm.write(line)
