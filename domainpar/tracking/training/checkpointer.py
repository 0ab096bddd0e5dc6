"""The checkpoints of a run under way: when they are saved, and the consequences where they cannot be."""

from __future__ import annotations

import signal
import time

import torch

from domainpar.common import faults
from domainpar.common.agreement import agree
from domainpar.common.problems import Problem
from domainpar.parallel.signals import StopFlag
from domainpar.runs.checkpoint import Checkpoints, TrainingState, first_not_finite, load_agreed, warn
from domainpar.tracking.config.train import RecordFlags
from domainpar.tracking.training.loop import Trainer
from domainpar.tracking.training.monitor.failure import StepFailed, fail_alike
from domainpar.tracking.training.run_log import RunLog


class Checkpointer:
    """The checkpoints of a run under way.

    Args:
        config: Steps, and minutes by rank 0's clock, between two checkpoints.
        trainer: Holds the network and optimiser that are saved.
        run_log: Takes note of weights that are saved, and of failed saves.
        stop: The request to stop, of this rank.

    Attributes:
        failed_saves: Saves that failed so far; on rank 0.
        unsaved: Why the last save of the run failed, the same on all ranks; None if it did not.
        terminated: Whether SIGTERM stopped the run, the same on all ranks.
    """

    def __init__(self, config: RecordFlags, trainer: Trainer, run_log: RunLog, stop: StopFlag) -> None:
        self.trainer, self.world, self.run_log = trainer, trainer.world, run_log
        self.checkpoints = Checkpoints(run_log.directory / "checkpoints")
        self._config, self._stop = config, stop
        self._saved_at = time.monotonic()
        self._loaded: TrainingState | None = None
        self.failed_saves = 0
        self.unsaved: str | None = None
        self.terminated = False

    def resume(self, dataset: str, strict: bool) -> TrainingState:
        """Fill network and optimiser from the last good checkpoint. *Collective*.

        Args:
            dataset: Digest of the store that the run began with, as far as is known; else of the one there is now.
            strict: Whether a damaged last one is refused, in place of the one before it.

        Raises:
            Refused: On all ranks alike, if there is none, or it belongs to another network or other events.
        """
        model, optimizer = self.trainer.model, self.trainer.optimizer
        state = load_agreed(self.checkpoints, "last", self.world, model, optimizer, strict=strict)
        if state.dataset != dataset:
            hint = "give the --store it began with, as it was: run.json does not list the run's own events, or they "
            other = Problem(
                f"the run in {self.checkpoints.directory.parent} was trained on other events (digest "
                f"{state.dataset[:12]}, these have {dataset[:12]})",
                hint + "are of another run",
            )
            agree(self.world.transport, other)
        self._loaded = state
        return state

    def boundary(self, state: TrainingState, may_save: bool = False) -> bool:
        """Agree at a step boundary whether to stop, and save if so or if it is time. *Collective*: one small sum.

        `may_save`: whether no other checkpoint follows at once. Returns whether any rank has a request to stop.
        """
        faults.reach("boundary")
        requested, every = self._stop.requested, self._config.checkpoint_every
        seconds = 60 * (self._config.save_every_minutes or 0)
        # One clock: ranks that looked at their own would not all save.
        overdue = self.world.is_root and 0 < seconds <= time.monotonic() - self._saved_at
        flags = torch.tensor([requested, overdue, requested and self._stop.by == signal.SIGTERM], dtype=torch.int64)
        stops, late, terminated = (bool(count) for count in self.world.step_boundary(flags))
        self.terminated |= terminated
        due = every is not None and state.step > 0 and state.step % every == 0
        if stops or ((late or due) and may_save):
            self.save(state, best=False, final=stops)
        return stops

    def save(self, state: TrainingState, best: bool, final: bool = False) -> None:
        """Save a checkpoint, unless the run has done nothing since it was loaded from one. *Collective*.

        If the disk is full or cannot be written, rank 0 says so and the run continues; the checkpoints there are stay.
        If the run ends with it (`final`), all ranks learn whether it was saved, in `unsaved`.

        Raises:
            StepFailed: If weights or optimiser are not finite on this rank, or not those of the other ranks. Nothing is
                saved then. RanksFailed on the ranks that it speaks for.
        """
        # Noted first: there is never a checkpoint whose weights `run.json` does not know.
        self.run_log.note_weights(state.step)
        if state == self._loaded and not best:
            return
        self.world.mark("save", state.step)
        ours = first_not_finite(self.trainer.model, self.trainer.optimizer) or ""
        names = [name.decode() for name in self.world.transport.all_gather(ours.encode())]
        if guilty := [rank for rank, name in enumerate(names) if name]:
            what = f"{names[guilty[0]]} is not finite after step {state.step}; nothing was saved"
            hint = "go on from the checkpoint before it with a smaller --lr or with --clip"
            fail_alike(self.world, StepFailed(what, hint), guilty[0])
        self.trainer.check_replicas()
        problem = ""
        if self.world.is_root:
            self._saved_at = time.monotonic()  # also after a failure: not again at every step
            try:
                self.checkpoints.save(self.trainer.model, self.trainer.optimizer, state, best)
            except OSError as error:
                self.failed_saves += 1
                problem = f"the checkpoint of step {state.step} could not be saved: {error}"
                try:
                    consequence = f"training goes on, the last checkpoint is {self.checkpoints.pointed('last')}"
                except Problem:
                    consequence = "training goes on without any checkpoint"
                warn(f"{problem}; {consequence}")
                self.run_log.note(failed_saves=self.failed_saves)
            else:
                try:
                    self.checkpoints.drop_old()
                except (OSError, Problem) as error:
                    warn(f"checkpoint of step {state.step} saved, but old ones could not be removed: {error}")
        if final:
            self.unsaved = self.world.transport.broadcast(problem.encode()).decode() or None
