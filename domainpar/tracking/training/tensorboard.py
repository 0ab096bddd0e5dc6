"""The figures of a run as TensorBoard's event files, which other trackers read as well; on rank 0.

They are those of `metrics.jsonl`, each number under `split/name`, in `trackers/` of the run. Where the package fails,
training goes on without it.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from domainpar.common.problems import Problem
from domainpar.runs.checkpoint import warn
from domainpar.runs.own_files import TRACKERS

_MODULE = "torch.utils.tensorboard"


class EventFiles:
    """Writes records of a run, or does nothing.

    Args:
        directory: The run's; None: nothing is written.
        flags: All flags of the run, plain values.
    """

    def __init__(self, directory: Path | None, flags: Mapping[str, Any]) -> None:
        self._writer: Any = None
        if directory is not None:
            with self._dispensable():
                self._writer = importlib.import_module(_MODULE).SummaryWriter(str(directory / TRACKERS / "tensorboard"))
                self._writer.add_text("flags", "\n".join(f"    {flag}: {value}" for flag, value in flags.items()))

    def add(self, record: Mapping[str, Any]) -> None:
        """Write the record of a step or an evaluation."""
        with self._dispensable():
            for name, value in numbers_of(record) if self._writer is not None else ():
                self._writer.add_scalar(f"{record['split']}/{name}", value, record["step"])

    def close(self) -> None:
        """The run has ended."""
        with self._dispensable():
            if self._writer is not None:
                self._writer.close()

    @contextmanager
    def _dispensable(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # of a package that is not ours: anything
            self._writer = None
            warn(f"--log tensorboard is left out from now on: {type(error).__name__}: {error}")


def check_tensorboard() -> None:
    """Find out before anything is written whether TensorBoard is here.

    Raises:
        Problem: If it is not.
    """
    try:
        importlib.import_module(_MODULE)
    except ImportError as error:
        what = f"--log tensorboard takes the package tensorboard, which is not here ({error})"
        raise Problem(what, "pip install tensorboard") from error


def numbers_of(record: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, float]]:
    """The single numbers of a record, also inside others of it, by `outer/inner`; not its place in the run."""
    for name, value in record.items():
        if isinstance(value, Mapping):
            yield from numbers_of(value, f"{before}{name}/")
        elif isinstance(value, int | float) and not isinstance(value, bool) and name not in ("step", "epoch"):
            yield before + name, float(value)
