"""One training run, from a configuration to a directory of results."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from domainpar.config import TrainConfig, resolved_yaml, target_conditions
from domainpar.events.store import EventStore
from domainpar.nn.catalogue import build_model
from domainpar.nn.interaction import InteractionNetwork
from domainpar.nn.selftest import rows_are_independent
from domainpar.parallel.signals import StopFlag
from domainpar.parallel.world import World
from domainpar.training.checkpoint import Checkpoints, TrainingState, parameters_sha256
from domainpar.training.loop import Trainer
from domainpar.training.parts import PartLoader
from domainpar.training.record import readable
from domainpar.training.rundir import RunFile, choose_directory, describe_process
from domainpar.training.sampler import samples_of, steps_of_epoch
from domainpar.training.schedule import Schedule
from domainpar.training.targets import EdgeClasses

DTYPES = {"float32": torch.float32, "float64": torch.float64}


def train(config: TrainConfig, store: Path, world: World) -> Run:
    """Train as a configuration says. *Collective*.

    Args:
        config: What to do.
        store: The prepared events.
        world: The ranks.

    Returns:
        The run as it ended, with its trained model.

    Raises:
        Refused: On all ranks alike, before anything was trained, if the events or the output directory will not do.
    """
    events = open_store(store, world)
    directory = Path(world.on_root(lambda: str(choose_directory(config.out, config.resume, config.overwrite))))
    run = Run(config, events, directory, world)
    with StopFlag.listening() as stop:
        run.go(stop)
    return run


def open_store(path: Path, world: World) -> EventStore:
    """Open a store on every rank and look into each of its events, dealt over the ranks. *Collective*.

    Raises:
        Refused: On all ranks alike, if the store or one of its events is missing or damaged.
    """
    problem: Exception | None = None
    store = None
    try:
        store = EventStore(path)
        for record in store.events()[world.rank :: world.size]:
            store.open(record).close()
    except (ValueError, OSError) as error:
        problem = error
    world.agree(problem)
    assert store is not None
    return store


def make_network(config: TrainConfig, store: EventStore) -> InteractionNetwork:
    """The network of a configuration with its first weights, for the features of a store.

    Raises:
        ValueError: If it cannot have these sizes.
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
    )


class Run:
    """A run under way: the trainer, its files, and what is printed.

    Args:
        config: What to do.
        store: The events.
        directory: Where results go.
        world: The ranks. Making a run is *collective*.
    """

    def __init__(self, config: TrainConfig, store: EventStore, directory: Path, world: World) -> None:
        self.config, self.store, self.directory, self.world = config, store, directory, world
        sectors = config.sectors if config.mode == "naive" else None
        self.train_samples = samples_of(store.events("train"), sectors)
        self.val_samples = samples_of(store.events("val"), sectors)
        world.agree(self._problem_with_events())
        self.steps_per_epoch = -(-len(self.train_samples) // config.events_per_step)
        self.total_steps = config.epochs * self.steps_per_epoch
        if config.max_steps is not None:
            self.total_steps = min(self.total_steps, config.max_steps)
        self.trainer = self._make_trainer()
        self.checkpoints = Checkpoints(directory / "checkpoints")
        self.state = TrainingState(dataset=store.digest)
        self.file = RunFile(directory / "run.json")
        self._said_who_owns_nothing = False
        if config.resume:
            self._resume()

    def go(self, stop: StopFlag) -> None:
        """Train until the last step, or until asked to stop. *Collective*."""
        self._begin()
        began = time.perf_counter()
        stopped = False
        with tqdm(total=self.total_steps, initial=self.state.step, disable=self._no_bar(), unit="step") as bar:
            while self.state.step < self.total_steps and not stopped:
                stopped = self._epoch(stop, bar)
        self._end("stopped" if stopped else "done", time.perf_counter() - began)

    def _epoch(self, stop: StopFlag, bar: Any) -> bool:
        """The rest of one epoch; returns whether the run was asked to stop. *Collective*."""
        epoch = self.state.epoch
        steps = steps_of_epoch(self.train_samples, self.config.events_per_step, self.config.seed, epoch)
        for samples in steps[self.state.step_in_epoch :]:
            record = self.trainer.step(samples, self.state.step)
            self.state = replace(self.state, step=self.state.step + 1, step_in_epoch=self.state.step_in_epoch + 1)
            self._write({"split": "train", "epoch": epoch, "step": self.state.step, **record})
            bar.set_postfix_str(f"loss {record['loss']:.4f}", refresh=False)
            bar.update()
            if self._should_stop(stop):
                self._save(best=False)
                return True
            if self.state.step >= self.total_steps:
                break
            if self.config.checkpoint_every and self.state.step % self.config.checkpoint_every == 0:
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
        better = record["edge_auc"] is not None and (self.state.best is None or record["edge_auc"] > self.state.best)
        if better:
            self.state = replace(self.state, best=record["edge_auc"], best_step=self.state.step)
        return better or self.state.best is None

    def _should_stop(self, stop: StopFlag) -> bool:
        """Whether any rank was asked to stop: one small reduction at each step boundary. *Collective*."""
        flags = torch.tensor([int(stop.asked)], dtype=torch.int64)
        return bool(self.world.step_boundary(flags)[0])

    def _make_trainer(self) -> Trainer:
        config, dtype = self.config, DTYPES[self.config.dtype]
        model = make_network(config, self.store).to(self.world.device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=config.lr, weight_decay=config.weight_decay)
        edge_weights = EdgeClasses(config.true_weight, config.fake_weight, config.other_weight)
        loader = PartLoader(
            self.store,
            self.world,
            grouping=config.grouping,
            edge_weights=edge_weights,
            target=target_conditions(config.target) if config.target else None,
            dtype=dtype,
            seed=config.seed,
        )
        schedule = Schedule(config.lr, config.lr_schedule, config.warmup, self.total_steps, self.steps_per_epoch)
        return Trainer(model, optimizer, loader, self.world, edge_weights, schedule, config.clip)

    def _problem_with_events(self) -> str | None:
        records = self.store.events("train") + self.store.events("val")
        if not self.train_samples:
            return f"store {self.store.path} has no training events; prepare some, or lower --val-split."
        if blind := [record.event for record in records if not record.has_labels]:
            return f"event {blind[0]} of {self.store.path} has no truth; it can be inferred on, not trained on."
        return None

    def _resume(self) -> None:
        problem: Exception | None = None
        try:
            self.state = self.checkpoints.load("last", self.trainer.model, self.trainer.optimizer)
            if self.state.dataset != self.store.digest:
                raise ValueError(
                    f"the run in {self.directory} was trained on other events (digest {self.state.dataset[:12]}, this store "
                    f"has {self.store.digest[:12]}); give the --store it began with."
                )
        except (ValueError, OSError) as error:
            problem = error
        self.world.agree(problem)
        if self.world.is_root:
            self.file.content = json.loads(self.file.path.read_text())

    def _begin(self) -> None:
        """Try the machine, write what the run is, and say so."""
        broken = None
        if self.world.device.type == "cpu":
            broken = rows_are_independent(self.trainer.model, self.world.transport)
        if not self.world.is_root:
            return
        (self.directory / "config.yaml").write_text(resolved_yaml(self.config))
        store = {
            "path": str(self.store.path),
            "digest": self.store.digest,
            "feature_names": self.store.feature_names,
            "edge_feature_names": self.store.edge_feature_names,
        }
        about = describe_process() | {"ranks": self.world.size, "domain_size": self.world.domain.size}
        self.file.update(state="running", store=store, bitwise_problem=broken, **about)
        self._say(*self._first_lines(broken))

    def _first_lines(self, broken: str | None) -> list[str]:
        config, world = self.config, self.world
        sizes = [record.num_edges for record in self.store.events()]
        parameters = sum(parameter.numel() for parameter in self.trainer.model.parameters())
        exactness = "same bits on any number of ranks (self-test passed)"
        if world.device.type != "cpu":
            exactness = "same answer on any number of ranks, to rounding (on GPU)"
        if broken:
            exactness = f"WARNING: same answer to rounding only: {broken}"
        mode = (
            "whole events, halo exchange"
            if config.mode == "halo"
            else f"APPROXIMATE: {config.sectors} sectors, no exchange"
        )
        return [
            f"domainpar: {world.size} ranks over {world.transport.name}, {world.domain.size} to an event, 1 thread each, {mode}",
            f"events   : {self.store.path}: {len(sizes)} events of {min(sizes):,} to {max(sizes):,} candidate edges; "
            f"{len(self.train_samples)} to train on, {len(self.val_samples)} to validate",
            f"network  : {config.model}, hidden {config.hidden}, {config.graph_iters} iterations, {parameters:,} parameters, "
            f"{config.dtype}, {exactness}",
            f"run      : {self.directory}, {self.total_steps} steps; stop with Ctrl-C or kill -USR1 (a checkpoint is kept)",
        ]

    def _write(self, record: dict[str, Any], always_print: bool = False) -> None:
        if not self.world.is_root:
            return
        with (self.directory / "metrics.jsonl").open("a") as file:
            file.write(json.dumps(record) + "\n")
        self._say_once_who_owns_nothing(record)
        if always_print or record["step"] % self.config.log_every == 0 or record["step"] in (1, self.total_steps):
            self._say(readable(record))

    def _say_once_who_owns_nothing(self, record: dict[str, Any]) -> None:
        idle = [str(rank) for rank, owned in enumerate(record["owned_nodes"]) if owned == 0]
        if idle and not self._said_who_owns_nothing:
            self._said_who_owns_nothing = True
            self._say(
                f"note: ranks {', '.join(idle)} of {self.world.size} own nothing in step {record['step']}. The result is the "
                "same; fewer ranks, smaller --domain-size or more tiles (prepare --tiles) would give each some work."
            )

    def _save(self, best: bool) -> None:
        if self.world.is_root:
            self.checkpoints.save(self.trainer.model, self.trainer.optimizer, self.state, best)

    def _end(self, how: str, seconds: float) -> None:
        if not self.world.is_root:
            return
        sha256 = parameters_sha256(self.trainer.model)
        self.file.update(state=how, parameters_sha256=sha256, steps=self.state.step, seconds=seconds)
        best = (
            ""
            if self.state.best is None
            else f"; best validation edge AUC {self.state.best:.4f} at step {self.state.best_step}"
        )
        again = f"python -m domainpar.train --out {self.directory} --resume"
        score = f"python -m domainpar.infer --run {self.directory}"
        self._say(
            f"{how} after {self.state.step} steps in {seconds:.0f} s{best}",
            f"parameters sha256 {sha256[:16]} (another number of ranks ends with the same)",
            f"results in {self.directory}: metrics.jsonl, config.yaml, run.json, checkpoints/",
            f"next: {score if how == 'done' else again}",
        )

    def _no_bar(self) -> bool | None:
        return None if self.world.is_root else True

    def _say(self, *lines: str) -> None:
        for line in lines:
            tqdm.write(line)
