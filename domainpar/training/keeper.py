"""The checkpoints of a run under way: when they are saved, and the consequences where they cannot be."""

from __future__ import annotations

import signal
import time

import torch

from domainpar import faults
from domainpar.agreement import agree
from domainpar.parallel.signals import StopFlag
from domainpar.problems import Problem
from domainpar.training.checkpoint import Checkpoints, TrainingState, first_not_finite, load_agreed, warn
from domainpar.training.journal import Journal
from domainpar.training.loop import Trainer
from domainpar.training.monitor.failure import StepFailed, fail_alike


class Keeper:
    """The checkpoints of a run under way.

    Args:
        checkpoints: Their directory.
        trainer: Holds the network and optimiser that are saved.
        journal: Takes note of weights that are saved, and of failed saves.
        every_steps: Steps between two checkpoints; None: time alone decides.
        every_minutes: Minutes between two checkpoints by rank 0's clock; 0 or None: steps alone decide.

    Attributes:
        failed_saves: Saves that failed so far; on rank 0.
        unsaved: Why the last save of the run failed, the same on all ranks; None if it did not.
        terminated: Whether SIGTERM asked the run to stop, the same on all ranks.
    """

    def __init__(
        self,
        checkpoints: Checkpoints,
        trainer: Trainer,
        journal: Journal,
        every_steps: int | None = None,
        every_minutes: float | None = None,
    ) -> None:
        self.checkpoints, self.trainer, self.world, self.journal = checkpoints, trainer, trainer.world, journal
        self._every_steps, self._every_seconds = every_steps, 60 * (every_minutes or 0)
        self._saved_at = time.monotonic()
        self._loaded: TrainingState | None = None
        self.failed_saves = 0
        self.unsaved: str | None = None
        self.terminated = False

    def resume(self, dataset: str, strict: bool) -> TrainingState:
        """Fill network and optimiser from the last good checkpoint. *Collective*.

        Args:
            dataset: Digest of the store that the run began with, as far as is known; else of the one there is now.
            strict: Refuse where the newest checkpoint is not good.

        Raises:
            Refused: On all ranks alike, if there is none, or it belongs to another network or other events.
        """
        trainer = self.trainer
        state = load_agreed(self.checkpoints, "last", self.world, trainer.model, trainer.optimizer, strict=strict)
        if state.dataset != dataset:
            agree(
                self.world.transport,
                Problem(
                    f"the run in {self.checkpoints.directory.parent} was trained on other events (digest "
                    f"{state.dataset[:12]}, these have {dataset[:12]})",
                    "give the --store it began with, as it was: run.json does not list the run's own events, or they "
                    "are of another run",
                ),
            )
        self._loaded = state
        return state

    def boundary(self, stop: StopFlag, state: TrainingState, may_save: bool = False) -> bool:
        """Agree at a step boundary whether to stop, and save if so or if it is time. *Collective*: one small sum.

        Args:
            stop: Whether this rank was asked to stop.
            state: Where training stands.
            may_save: Whether no other checkpoint follows at once.

        Returns:
            Whether any rank was asked to stop.
        """
        faults.reach("boundary")
        asked, overdue = stop.asked, self.world.is_root and 0 < self._every_seconds <= time.monotonic() - self._saved_at
        flags = torch.tensor([asked, overdue, asked and stop.by == signal.SIGTERM], dtype=torch.int64)
        stops, late, terminated = (bool(count) for count in self.world.step_boundary(flags))
        self.terminated |= terminated
        due = self._every_steps is not None and state.step > 0 and state.step % self._every_steps == 0
        if stops or ((late or due) and may_save):
            self.save(state, best=False, final=stops)
        return stops

    def save(self, state: TrainingState, best: bool, final: bool = False) -> None:
        """Save a checkpoint, unless the run has done nothing since it was loaded from one. *Collective*.

        If the disk is full or cannot be written, rank 0 says so and the run continues; the checkpoints there are stay.

        Args:
            state: Where training stands.
            best: Whether it is the best so far.
            final: Whether the run ends with it: then all ranks learn whether it was saved, in `unsaved`.

        Raises:
            StepFailed: If weights or optimiser are not finite on this rank, or not those of the other ranks. Nothing is
                saved then. RanksFailed on the ranks that it speaks for.
        """
        # Noted first: there is never a checkpoint whose weights `run.json` does not know.
        self.journal.note_weights(state.step)
        if state == self._loaded and not best:
            return
        self.world.mark("save", state.step)
        self._refuse_not_finite(state.step)
        self.trainer.check_replicas()
        problem = self._try_to_save(state, best) if self.world.is_root else None
        if final:
            self.unsaved = self.world.transport.broadcast((problem or "").encode()).decode() or None

    def _try_to_save(self, state: TrainingState, best: bool) -> str | None:
        """Save on rank 0; returns why that failed."""
        self._saved_at = time.monotonic()  # also after a failure: not again at every step
        try:
            self.checkpoints.save(self.trainer.model, self.trainer.optimizer, state, best)
        except OSError as error:
            self.failed_saves += 1
            problem = f"the checkpoint of step {state.step} could not be saved: {error}"
            try:
                there = f"training goes on, the last checkpoint is {self.checkpoints.pointed('last')}"
            except Problem:
                there = "training goes on without any checkpoint"
            warn(f"{problem}; {there}")
            self.journal.note(failed_saves=self.failed_saves)
            return problem
        try:
            self.checkpoints.drop_old()
        except (OSError, Problem) as error:
            warn(f"checkpoint of step {state.step} saved, but old ones could not be removed: {error}")
        return None

    def _refuse_not_finite(self, step: int) -> None:
        """Fail on all ranks alike rather than save what cannot be trained on. *Collective*."""
        ours = first_not_finite(self.trainer.model, self.trainer.optimizer) or ""
        names = [name.decode() for name in self.world.transport.all_gather(ours.encode())]
        guilty = [rank for rank, name in enumerate(names) if name]
        if guilty:
            what = f"{names[guilty[0]]} is not finite after step {step}; nothing was saved"
            hint = "go on from the checkpoint before it with a smaller --lr or with --clip"
            fail_alike(self.world, StepFailed(what, hint), guilty[0])
