"""The records of a run under way: lines on the screen, `metrics.jsonl` and `run.json`."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from shlex import quote
from typing import Any

import yaml

from domainpar.common.atomic_files import write_whole
from domainpar.common.problems import Where, error_text
from domainpar.common.words import PROGRESS_LOG, exactness_text, several, this_python
from domainpar.measure.forecast import Forecast
from domainpar.nn.classifier import Exactness
from domainpar.nn.program import team
from domainpar.runs.checkpoint import TrainingState, parameters_sha256, warn
from domainpar.runs.checkpoint_files import CheckpointFiles
from domainpar.runs.directory import RunDirectory
from domainpar.runs.origin import describe_process
from domainpar.runs.own_files import PROFILE, TRACKERS
from domainpar.runs.records import RUN_FILE, RunFile, RunRecord, StoreRecord, run_record
from domainpar.tracking.config import is_code, resolved_yaml
from domainpar.tracking.config.train import RecordFlags, TrainingFlags
from domainpar.tracking.cost.epoch_words import in_words, mean_epoch
from domainpar.tracking.cost.scratch import Traffic
from domainpar.tracking.events.own_events import OwnEvents, kept_place
from domainpar.tracking.networks.catalogue import options_of
from domainpar.tracking.reco.ckf.detector_layout import why_not_followed
from domainpar.tracking.training import summary
from domainpar.tracking.training.inputs import TrainingData
from domainpar.tracking.training.loop import Trainer
from domainpar.tracking.training.monitor.rank_differences import lines as straggler_lines
from domainpar.tracking.training.monitor.spikes import lines as spike_lines
from domainpar.tracking.training.record import MetricsFile, keep_records, readable
from domainpar.tracking.training.sampler import Sample
from domainpar.tracking.training.tensorboard import EventFiles

LONG_EPOCH = 10.0
"""Seconds from which on every epoch has a line of its own."""


class RunLog:
    """Writes `run.json` and `metrics.jsonl`, and prints progress; on rank 0, the others have one that does nothing.

    Attributes:
        directory: The run's directory.
        file: Its `run.json`.
    """

    def __init__(
        self,
        config: TrainingFlags,
        record: RecordFlags,
        training_data: TrainingData,
        trainer: Trainer,
        directory: RunDirectory,
        exactness: Exactness,
    ) -> None:
        self.config, self._record, self.training_data = config, record, training_data
        self.trainer, self.world = trainer, trainer.world
        self.directory = directory.path
        self.file = RunFile(self.directory / RUN_FILE, RunRecord.of(saved={}))
        self._metrics = MetricsFile(self.directory / "metrics.jsonl")
        self._printed: set[str] = set()
        self._costs: list[dict[str, Any]] = []
        self._exactness = exactness
        self._event_files = EventFiles(None, {})
        self._expected: Forecast | None = None
        if directory.resume and self.world.is_root:
            self.file.record = run_record(self.file.path)

    def begin(self, state: TrainingState, expected: Forecast | None, allocator: str | None) -> None:
        """Write and print the first facts of the run."""
        self._expected = expected
        if not self.world.is_root:
            return
        if damaged := keep_records(self._metrics.path, state.step):
            warn(f"{self._metrics.path}: {damaged} lines could not be read and were dropped")
        config, store = self.config, self.training_data.store
        # Where the store lies and not how that was typed: the file is read from any directory.
        resolved = resolved_yaml(replace(config, store=os.path.abspath(store.path)))
        write_whole(self.directory / "config.yaml", resolved.encode())
        # Of the run before: they are no more true of this one.
        self.file.record = self.file.record.without("error", "failed_saves", "lost_records")
        self.file.update(
            **describe_process(),
            state="running",
            store=StoreRecord.of(
                **kept_place(store.path, self.directory),
                digest=state.dataset,
                events=OwnEvents.of(store),
                feature_names=store.feature_names,
                edge_feature_names=store.edge_feature_names,
                filter=store.settings.get("filter"),
                scales=store.scales,
                learned_from=store.learned_from,
                surveyed=store.survey,
            ),
            tasks=self.training_data.tasks,
            bitwise_problem=self._exactness.problem,
            allocator=allocator,
            memory=None if expected is None else expected.as_record(),
            model_code=config.model if is_code(config.model) else None,
            model_options=options_of(config.model),
            optimizer_code=config.optimizer if is_code(config.optimizer) else None,
            began_at_step=state.step,
            ranks=self.world.size,
            domain_size=self.world.domain.size,
            threads=team().size,
        )
        self._event_files = EventFiles(self.directory if self._record.log else None, yaml.safe_load(resolved))
        exactness, total_steps = self._exactness, self.training_data.total_steps
        holds = [exactness_text(exactness.problem)]
        if exactness.bitwise and exactness.problem:  # without a warning where the kind of the network is the reason
            what, _, why = holds[0].partition(": ")
            holds = [f"WARNING: {what}, because", f"           {why}"]
        steps = f"steps {state.step + 1} to {total_steps}" if state.step else several(total_steps, "step")
        steps += "; Ctrl-C or kill -USR1 stops it with a checkpoint"
        if state.step >= total_steps:
            steps = f"all {state.step} steps are done; give more --epochs or --max-steps to go on"
        self.say(
            *summary.first_lines(config, self.training_data, self.trainer, allocator),
            *summary.memory_expected(expected),
            f"exactness: {holds[0]}",
            *holds[1:],
            f"run      : {self.directory}, {steps}",
            *self.training_data.warnings,
        )

    def write(self, record: dict[str, Any], samples: Sequence[Sample]) -> None:
        """Add the record of a step or an evaluation to the metrics, and print it where that is due."""
        if not self.world.is_root:
            return
        if self.file.record.exchanges is None and self.trainer.exchanges is not None:
            forward, backward = self.trainer.exchanges
            sums = self.trainer.model.sums
            self.note(exchanges={"forward": forward, "backward": backward, "sums": sums})
            over_all = f", and {several(sums, 'sum')} over all ranks" if sums else ""
            passes = f"{forward} in the forward pass and {backward} in the backward pass"
            self.say(f"exchanges: {passes} of an event{over_all}")
        lost_before = self._metrics.lost
        problem = self._metrics.add(record)
        self._event_files.add(record)
        if problem is not None:
            if not lost_before:
                warn(f"{self._metrics.path} cannot be written: {problem}; training goes on, its lines are lost")
            self.note(lost_records=self._metrics.lost)
        more = len(samples) < len(self.training_data.train)
        self.say_once(*summary.idle_ranks(record, samples, more, self.world))
        due = record["step"] in (1, self.training_data.total_steps) or record["step"] % self._record.log_every == 0
        if due or record["split"] == "val":
            self.say(readable(record))
        self.say(*straggler_lines(record), *spike_lines(record))
        if costs := record.get("epoch_costs"):
            self._costs.append(costs)
            if costs["seconds"] >= LONG_EPOCH:  # short ones are summed up in the end
                self.say(f"epoch {record['epoch']}: {in_words(costs)}")

    def note_weights(self, step: int) -> None:
        """Keep the hash of weights that are to be saved: scores of a run are known by it.

        A network that came from elsewhere does not know all of its own, and continues without.
        """
        if self.world.is_root and self.file.record.saved is not None:
            self.note(saved={**self.file.record.saved, str(step): parameters_sha256(self.trainer.model)})

    def note(self, **changes: Any) -> None:
        """Change `run.json` while the run is under way, whether the disk takes it or not."""
        if self.world.is_root:
            try:
                self.file.update(**changes)
            except OSError as error:
                warn(f"{self.file.path} cannot be written: {error}; training goes on")

    def end(
        self, how: str, state: TrainingState, seconds: float, taken: Sequence[int | None], moved: Traffic | None
    ) -> None:
        """Write and say how the run ended.

        Args:
            how: `done`, or `preempted`: stopped on request, with a checkpoint.
            taken: The memory of each rank at its peak.
            moved: What went to disks and came from them, where tables lie in files.
        """
        if not self.world.is_root:
            return
        self._event_files.close()
        sha256 = parameters_sha256(self.trainer.model)
        memory = {"peak_bytes": list(taken)} if self._expected is None else self._expected.as_record(taken)
        steps = state.step - self.file.record.began_at_step
        skipped = sorted(self.trainer.loader.skipped.values())
        left_out = {"skipped": [skip._asdict() for skip in skipped]} if skipped else {}
        changes = {"state": how, "parameters_sha256": sha256, "steps": state.step, "seconds": seconds, "memory": memory}
        from_disk = {} if moved is None else {"disk_bytes": moved._asdict()}
        self.file.update(**changes, **left_out, **from_disk)
        config, store, tasks, tracks = self.config, self.training_data.store, self.training_data.tasks, ""
        # The flags of infer with which the shipped networks were evaluated, as far as the hits of an event allow.
        events = {skip.event for skip in skipped}
        for record in [record for record in store.readable() if tasks.edge_weight and record.event not in events][:1]:
            with store.open(record) as event:
                if event.has_positions:
                    tracks = " --tracks greedy" + (" --extend --ckf" if why_not_followed(event) is None else "")
        lines = [summary.memory_taken(self._expected, taken)]
        if moved is not None and steps:
            read, written = (f"{bytes_moved / steps / 1e9:.2f} GB" for bytes_moved in moved)
            lines.append(
                f"scratch  : a step had {read} from the disk and gave it {written}; what memory kept did not move"
            )
        if (mean := mean_epoch(self._costs)) is not None:
            lines.append(f"epochs   : {len(self._costs)}, on average {in_words(mean)}")
        failed, lost = self.file.record.failed_saves, self.file.record.lost_records
        losses = [several(failed, "checkpoint")] * bool(failed)
        losses += [several(lost, "line") + " of metrics.jsonl"] * bool(lost)
        lines += [f"WARNING: {' and '.join(losses)} could not be written"] if losses else []
        if skipped:
            lines.append(f"WARNING: {several(len(skipped), 'sample')} left out that could not be used:")
            lines += [f"         {skip.sample}: {skip.why}"[:120] for skip in skipped[:8]]
        if len(skipped) > 8:
            lines.append(f"         and {len(skipped) - 8} more; run.json lists them all")
        # Scores that compare like with like are those of sectors, too.
        naive = "" if config.sectors is None else f" --mode naive --sectors {config.sectors}"
        own = summary.own_code(config, ["model"])
        score = f"{this_python()} -m domainpar.infer --run {quote(str(self.directory))}{own}{naive}{tracks}"
        best = "" if state.best is None else f"; best validation {tasks.describe(state.best)} at step {state.best_step}"
        files = ["metrics.jsonl", "config.yaml", "run.json", "checkpoints/"]
        files += [f"{PROFILE.parent}/"] * bool(self._record.profile) + [f"{TRACKERS}/"] * bool(self._record.log)
        exact = self._exactness.bitwise and self._exactness.problem is None
        PROGRESS_LOG.close(
            *lines,
            f"{how} after {several(state.step, 'step')}, {seconds:.0f} s{best}",
            f"parameters sha256 {sha256[:16]}" + (": another number of ranks ends with the same" if exact else ""),
            f"results in {self.directory}: {', '.join(files)}",
            f"next: {score if how == 'done' else summary.resume_command(self.directory, config)}",
        )

    def end_unsaved(self, problem: str, step: int) -> None:
        """Write and say that the run failed, since its last checkpoint could not be saved."""
        if not self.world.is_root:
            return
        self._event_files.close()
        self.note(state="failed", error=f"rank 0: {problem}", steps=step)
        where = Where(rank=0, size=self.world.size, host=self.world.host, step=step, phase="save")
        command = summary.resume_command(self.directory, self.config)
        hint = f"make room, then go on from the last checkpoint: {command}"
        if not CheckpointFiles(self.directory / "checkpoints").names():
            hint = "no checkpoint was ever saved: make room, and begin anew with --overwrite"
        PROGRESS_LOG.say(error_text(problem, where, hint).rstrip("\n"), sys.stderr)

    def say(self, *lines: str) -> None:
        """Print lines, beside the progress bar."""
        for line in lines if self.world.is_root else ():
            PROGRESS_LOG.say(line)

    def say_once(self, kind: str, lines: Sequence[str]) -> None:
        """Print lines, but not again those of one kind."""
        if kind not in self._printed:
            self._printed.add(kind)
            self.say(*lines)
