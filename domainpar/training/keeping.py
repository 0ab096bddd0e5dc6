"""When a run saves a checkpoint, when it stops, and what becomes of it when it cannot save."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from domainpar import faults
from domainpar.agreement import agree
from domainpar.parallel.signals import StopFlag
from domainpar.parallel.world import World
from domainpar.problems import Problem
from domainpar.training.checkpoint import Checkpoints, TrainingState, first_not_finite, load_agreed, warn
from domainpar.training.loop import Trainer
from domainpar.training.watching.failing import StepFailed, fail_alike


@dataclass(frozen=True)
class Ahead:
    """What all ranks do at a step boundary.

    Attributes:
        stop: Stop with a checkpoint: some rank was asked to.
        save: Save a checkpoint: it is time.
        terminated: Whether it was SIGTERM that asked.
    """

    stop: bool
    save: bool
    terminated: bool


class Keeper:
    """The checkpoints of a run under way.

    Args:
        checkpoints: Where they go.
        trainer: What is saved.
        world: The ranks.
        every_steps: Steps between two checkpoints; None: time alone decides.
        every_minutes: Minutes between two checkpoints by rank 0's clock; 0 or None: steps alone decide.
        note: Called on rank 0 with what `run.json` should say of failed saves.

    Attributes:
        failed_saves: Saves that failed so far; on rank 0.
        unsaved: Why the last save of the run failed, the same on all ranks; None if it did not.
        terminated: Whether SIGTERM asked the run to stop, the same on all ranks.
    """

    def __init__(
        self,
        checkpoints: Checkpoints,
        trainer: Trainer,
        world: World,
        every_steps: int | None = None,
        every_minutes: float | None = None,
        note: Callable[..., None] = lambda **changes: None,
    ) -> None:
        self.checkpoints, self.trainer, self.world, self._note = checkpoints, trainer, world, note
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

    def ahead(self, stop: StopFlag, step: int) -> Ahead:
        """Agree on what comes next: one small reduction at each step boundary. *Collective*."""
        faults.reach("boundary")
        overdue = self.world.is_root and 0 < self._every_seconds <= time.monotonic() - self._saved_at
        terminated = stop.asked and stop.by == signal.SIGTERM
        flags = torch.tensor([stop.asked, overdue, terminated], dtype=torch.int64)
        asked, late, terminating = (bool(count) for count in self.world.step_boundary(flags))
        self.terminated |= terminating
        due = self._every_steps is not None and step > 0 and step % self._every_steps == 0
        return Ahead(asked, late or due, terminating)

    def save(self, state: TrainingState, best: bool, final: bool = False) -> None:
        """Save a checkpoint, unless the run has done nothing since it was loaded from one. *Collective*.

        If the disk is full or cannot be written, rank 0 says so and the run goes on; the checkpoints there are stay.

        Args:
            state: Where training stands.
            best: Whether it is the best so far.
            final: Whether the run ends with it: then all ranks learn whether it was saved, in `unsaved`.

        Raises:
            StepFailed: If weights or optimiser are not finite on this rank, or not those of the other ranks. Nothing is
                saved then. RanksFailed on the ranks that it speaks for.
        """
        if state == self._loaded and not best:
            return
        self.world.mark("save", state.step)
        self._refuse_not_finite(state.step)
        self.trainer.check_replicas()
        problem = self._try_to_save(state, best) if self.world.is_root else None
        if final:
            self.unsaved = self.world.transport.broadcast((problem or "").encode()).decode() or None

    def _try_to_save(self, state: TrainingState, best: bool) -> str | None:
        self._saved_at = time.monotonic()  # also after a failure: not again at every step
        try:
            self.checkpoints.save(self.trainer.model, self.trainer.optimizer, state, best)
        except OSError as error:
            self.failed_saves += 1
            problem = f"the checkpoint of step {state.step} could not be saved: {error}"
            warn(f"{problem}; {self._still_there()}")
            self._note(failed_saves=self.failed_saves)
            return problem
        try:
            self.checkpoints.files.drop_old()
        except (OSError, Problem) as error:
            warn(f"checkpoint of step {state.step} saved, but old ones could not be removed: {error}")
        return None

    def _still_there(self) -> str:
        try:
            return f"training goes on, the last checkpoint is {self.checkpoints.files.pointed('last')}"
        except Problem:
            return "training goes on without any checkpoint"

    def _refuse_not_finite(self, step: int) -> None:
        """Fail on all ranks alike rather than save what cannot be trained on. *Collective*."""
        mine = first_not_finite(self.trainer.model, self.trainer.optimizer) or ""
        found = [name.decode() for name in self.world.transport.all_gather(mine.encode())]
        guilty = [rank for rank, name in enumerate(found) if name]
        if guilty:
            what = f"{found[guilty[0]]} is not finite after step {step}; nothing was saved"
            hint = "go on from the checkpoint before it with a smaller --lr or with --clip"
            fail_alike(self.world, StepFailed(what, hint), guilty[0])
