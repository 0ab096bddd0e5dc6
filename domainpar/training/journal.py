"""What a run tells while it is under way: lines on the screen, `metrics.jsonl` and `run.json`; on rank 0."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

from torch import nn
from tqdm import tqdm

from domainpar.config import TrainConfig, is_code, resolved_yaml
from domainpar.events.own_events import kept_events, kept_place
from domainpar.events.store import EventStore
from domainpar.nn.adapt.on_events import OnEvents
from domainpar.nn.catalogue import options_of
from domainpar.nn.team import team
from domainpar.parallel.world import World
from domainpar.problems import Where, error_text
from domainpar.training import summary
from domainpar.training.checkpoint import TrainingState, parameters_sha256, warn
from domainpar.training.loop import Trainer
from domainpar.training.memory import Expectation
from domainpar.training.origin import describe_process
from domainpar.training.record import MetricsFile, keep_records, readable
from domainpar.training.rundir import RunDirectory, RunFile
from domainpar.training.sampler import Sample
from domainpar.training.watching.stragglers import lines as straggler_lines


class Journal:
    """The voice of one run; every rank has one, only that of rank 0 speaks and writes.

    Attributes:
        directory: The run's directory.
        file: Its `run.json`.
    """

    def __init__(self, config: TrainConfig, store: EventStore, world: World, directory: RunDirectory) -> None:
        self.config, self.store, self.world = config, store, world
        self.directory = directory.path
        self.file = RunFile(self.directory / "run.json", {"saved": {}})
        self._metrics = MetricsFile(self.directory / "metrics.jsonl")
        self._said_squashed = False
        self._said_of_idle_ranks: set[str] = set()
        if directory.resume and world.is_root:
            self.file = RunFile.read(self.file.path)

    def begin(
        self,
        trainer: Trainer,
        state: TrainingState,
        total_steps: int,
        *,
        num_samples: tuple[int, int],
        expected: Expectation | None,
        exactness: tuple[bool, str | None],
        allocator: str | None,
    ) -> None:
        """Write what the run is, and say so."""
        if not self.world.is_root:
            return
        damaged = keep_records(self._metrics.path, state.step)
        if damaged:
            warn(f"{self._metrics.path}: {damaged} lines could not be read and were dropped")
        # Where the store lies and not how that was typed: the file is read from any directory.
        config = replace(self.config, store=os.path.abspath(self.store.path))
        (self.directory / "config.yaml").write_text(resolved_yaml(config))
        for finished in ("error", "failed_saves", "lost_records"):
            self.file.content.pop(finished, None)
        self.file.update(**self._about(state, expected, exactness[1], allocator))
        self.say(
            *summary.first_lines(
                self.config,
                self.world,
                self.store,
                num_samples=num_samples,
                num_parameters=sum(parameter.numel() for parameter in trainer.model.parameters()),
                allocator=allocator,
            ),
            *summary.memory_expected(expected),
            *summary.exactness(*exactness),
            summary.where_to(self.directory, state, total_steps),
        )

    def write(self, record: dict[str, Any], samples: Sequence[Sample], more: bool, show: bool) -> None:
        """Add one record to the metrics, and print it where that is due.

        Args:
            record: What a step leaves behind.
            samples: The samples it is about.
            more: Whether a step could take more samples than these.
            show: Whether to print it whatever its step.
        """
        if not self.world.is_root:
            return
        lost_before = self._metrics.lost
        problem = self._metrics.add(record)
        if problem is not None:
            if not lost_before:
                warn(f"{self._metrics.path} cannot be written: {problem}; training goes on, its lines are lost")
            self.note(lost_records=self._metrics.lost)
        self._say_once_who_owns_nothing(record, samples, more)
        if show or record["step"] % self.config.log_every == 0:
            self.say(readable(record))
        self.say(*straggler_lines(record))

    def say_once_what_is_exchanged(self, trainer: Trainer) -> None:
        """How often the ranks of an event meet, once the first step has shown it."""
        if "exchanges" in self.file.content or trainer.exchanges is None or not self.world.is_root:
            return
        forward, backward = trainer.exchanges
        sums = trainer.model.sums if isinstance(trainer.model, OnEvents) else 0
        self.note(exchanges={"forward": forward, "backward": backward, "sums": sums})
        self.say(summary.exchanged(forward, backward, sums))

    def note_weights(self, step: int, model: nn.Module) -> None:
        """Keep the hash of weights that are to be saved: scores of a run are known by it.

        A run that an earlier version began does not know all of its own, and goes on without.
        """
        if self.world.is_root and "saved" in self.file.content:
            self.note(saved=self.file.content["saved"] | {str(step): parameters_sha256(model)})

    def say_once_if_squashed(self, trainer: Trainer) -> None:
        """That a network of the user's own seems to end in a sigmoid, where logits are expected."""
        if trainer.squashed and is_code(self.config.model) and not self._said_squashed:
            self._said_squashed = True
            self.say(summary.SQUASHED)

    def note(self, **changes: Any) -> None:
        """Change `run.json` while the run goes on, whether the disk takes it or not."""
        if self.world.is_root:
            try:
                self.file.update(**changes)
            except OSError as error:
                warn(f"{self.file.path} cannot be written: {error}; training goes on")

    def end(
        self,
        how: str,
        trainer: Trainer,
        state: TrainingState,
        *,
        seconds: float,
        expected: Expectation | None,
        taken: Sequence[int | None],
        exact: bool,
    ) -> None:
        """Write and say how the run ended: `done` or `preempted`."""
        if not self.world.is_root:
            return
        sha256 = parameters_sha256(trainer.model)
        memory = {"peak_bytes": list(taken)} if expected is None else expected.as_record(taken)
        skipped = sorted(trainer.loader.skipped.values())
        self.file.update(state=how, parameters_sha256=sha256, steps=state.step, seconds=seconds, memory=memory)
        if skipped:
            self.file.update(skipped=[asdict(skip) for skip in skipped])
        self.say(summary.memory_taken(expected, taken), *self._lost(), *summary.left_out(skipped))
        geometry = self._has_geometry(trainer)
        own, sectors = self._own_model(), self.config.sectors
        self.say(*summary.last_lines(self.directory, state, how, seconds, sha256, exact, own, geometry, sectors))

    def _has_geometry(self, trainer: Trainer) -> bool:
        """Whether hits have positions: asked of the first event that could be read so far."""
        bad = {skip.event for skip in trainer.loader.skipped.values()}
        first = next((record for record in self.store.readable() if record.event not in bad), None)
        if first is None:
            return False
        with self.store.open(first) as event:
            return event.has_positions

    def end_unsaved(self, problem: str, step: int) -> None:
        """Write and say that the run failed, since what it learned last could not be saved."""
        if not self.world.is_root:
            return
        self.note(state="failed", error=f"rank 0: {problem}", steps=step)
        where = Where(rank=0, size=self.world.size, host=self.world.host, step=step, phase="save")
        command = summary.resume_command(self.directory, self._own_model())
        hint = f"make room, then go on from the last checkpoint: {command}"
        tqdm.write(error_text(problem, where, hint), file=sys.stderr, end="")

    def say(self, *lines: str) -> None:
        """Print lines, beside the progress bar."""
        for line in lines if self.world.is_root else ():
            tqdm.write(line)

    def _about(
        self, state: TrainingState, expected: Expectation | None, broken: str | None, allocator: str | None
    ) -> dict[str, Any]:
        store = {
            **kept_place(self.store.path, self.directory),
            "digest": state.dataset,
            "events": kept_events(self.store),
            "feature_names": self.store.feature_names,
            "edge_feature_names": self.store.edge_feature_names,
        }
        return {
            **describe_process(),
            "state": "running",
            "store": store,
            "bitwise_problem": broken,
            "allocator": allocator,
            "memory": None if expected is None else expected.as_record(),
            "model_code": self.config.model if is_code(self.config.model) else None,
            "model_options": options_of(self.config.model),
            "began_at_step": state.step,
            "ranks": self.world.size,
            "domain_size": self.world.domain.size,
            "threads": team().size,
        }

    def _say_once_who_owns_nothing(self, record: dict[str, Any], samples: Sequence[Sample], more: bool) -> None:
        kind, lines = summary.idle_ranks(record, samples, more, self.world)
        if kind not in self._said_of_idle_ranks:
            self._said_of_idle_ranks.add(kind)
            self.say(*lines)

    def _lost(self) -> list[str]:
        failed, lost = self.file.content.get("failed_saves", 0), self.file.content.get("lost_records", 0)
        return summary.lost(failed, lost)

    def _own_model(self) -> str:
        return f" --model {self.config.model}" if is_code(self.config.model) else ""
