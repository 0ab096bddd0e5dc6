"""The figures of a run shown by somebody else's tracker, too: TensorBoard, Weights & Biases or MLflow; on rank 0.

They are those of `metrics.jsonl`, each number under `split/name`. All of it lies in `trackers/` of the run, and nothing
is sent anywhere unless the tracker's own variables say so (WANDB_MODE=online, MLFLOW_TRACKING_URI). A tracker that
fails is left alone from then on: training goes on without it.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

from domainpar.common.problems import Problem
from domainpar.runs.checkpoint import warn
from domainpar.runs.own_files import TRACKERS

PACKAGES = {"tensorboard": "torch.utils.tensorboard", "wandb": "wandb", "mlflow": "mlflow"}
"""The module that each is used through; its package has the name on the left."""


class Backend(Protocol):
    """What a tracker is asked to do."""

    def add(self, figures: Mapping[str, float], step: int) -> None:
        """Show some numbers of a step."""

    def close(self) -> None:
        """The run has ended."""


class Tracker:
    """Shows records of a run, or does nothing.

    Args:
        kind: Of `PACKAGES`; None: no tracker.
        directory: The run's.
        flags: All flags of the run, plain values.
    """

    def __init__(self, kind: str | None, directory: Path, flags: Mapping[str, Any]) -> None:
        self.kind = kind
        self._backend: Backend | None = None
        if kind is not None:
            place = directory / TRACKERS
            self._try(lambda: setattr(self, "_backend", _BACKENDS[kind](place, directory.name, flags)))

    def add(self, record: Mapping[str, Any]) -> None:
        """Show the record of a step or an evaluation."""
        if (backend := self._backend) is not None:
            figures = {f"{record['split']}/{name}": value for name, value in numbers_of(record)}
            self._try(lambda: backend.add(figures, record["step"]))

    def close(self) -> None:
        """The run has ended."""
        if (backend := self._backend) is not None:
            self._try(backend.close)

    def _try(self, call: Callable[[], None]) -> None:
        try:
            call()
        except Exception as error:  # of a package that is not ours: anything
            self._backend = None
            warn(f"--log {self.kind} is left out from now on: {type(error).__name__}: {error}")


def check_tracker(kind: str | None) -> None:
    """Find out before anything is written whether a tracker is here.

    Raises:
        Problem: If it is not.
    """
    if kind is None:
        return
    try:
        importlib.import_module(PACKAGES[kind])
    except ImportError as error:
        raise Problem(
            f"--log {kind} takes the package {kind}, which is not here ({error})", f"pip install {kind}"
        ) from error


def numbers_of(record: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, float]]:
    """The single numbers of a record, also inside others of it, by `outer/inner`; not its place in the run."""
    for name, value in record.items():
        if isinstance(value, Mapping):
            yield from numbers_of(value, f"{before}{name}/")
        elif isinstance(value, int | float) and not isinstance(value, bool) and name not in ("step", "epoch"):
            yield before + name, float(value)


class _TensorBoard:
    def __init__(self, place: Path, name: str, flags: Mapping[str, Any]) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer: Any = SummaryWriter(str(place / "tensorboard"))
        self._writer.add_text("flags", "\n".join(f"    {flag}: {value}" for flag, value in flags.items()))

    def add(self, figures: Mapping[str, float], step: int) -> None:
        for name, value in figures.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class _WandB:
    def __init__(self, place: Path, name: str, flags: Mapping[str, Any]) -> None:
        wandb = importlib.import_module("wandb")
        place.mkdir(exist_ok=True)
        mode = os.environ.get("WANDB_MODE", "offline")
        self._run = wandb.init(project="domainpar", name=name, dir=str(place), config=dict(flags), mode=mode)

    def add(self, figures: Mapping[str, float], step: int) -> None:
        # Of the steps: its own count goes one up with each call, and an evaluation has the number of a step.
        self._run.log({**figures, "step": step})

    def close(self) -> None:
        self._run.finish()


class _MLflow:
    def __init__(self, place: Path, name: str, flags: Mapping[str, Any]) -> None:
        self._mlflow = mlflow = importlib.import_module("mlflow")
        if "MLFLOW_TRACKING_URI" not in os.environ:
            place.mkdir(exist_ok=True)
            mlflow.set_tracking_uri(f"sqlite:///{(place / 'mlflow.db').absolute()}")
        mlflow.set_experiment("domainpar")
        mlflow.start_run(run_name=name)
        mlflow.log_params({flag: str(value)[:500] for flag, value in flags.items()})

    def add(self, figures: Mapping[str, float], step: int) -> None:
        self._mlflow.log_metrics(dict(figures), step=step)

    def close(self) -> None:
        self._mlflow.end_run()


_BACKENDS: dict[str, Callable[[Path, str, Mapping[str, Any]], Backend]] = {
    "tensorboard": _TensorBoard,
    "wandb": _WandB,
    "mlflow": _MLflow,
}
