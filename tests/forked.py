"""Programs as forks of a test's process: torch and kernels are there at once, and what they spoil is their own."""

from __future__ import annotations

import io
import multiprocessing
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from domainpar.testing import patient

FORK = multiprocessing.get_context("fork")


@dataclass
class Forked:
    """A program that runs or has run.

    Attributes:
        process: Its process.
        output: Where standard output and error go.
    """

    process: BaseProcess
    output: Path

    @property
    def text(self) -> str:
        """What it has printed so far."""
        return self.output.read_text(errors="replace")

    def wait(self, seconds: float = 60.0) -> tuple[int, str]:
        """Its exit code, negative for a signal, and all it printed."""
        self.process.join(patient(seconds))
        assert self.process.exitcode is not None, f"still at work after {seconds:g} s:\n{self.text}"
        return self.process.exitcode, self.text


@contextmanager
def forked(program: Callable[..., int], *args: Any, **environment: str) -> Iterator[Forked]:
    """Run a function in a fork, which ends with what it returns as its exit code; what is left in the end is killed."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "output"
        output.touch()
        process = FORK.Process(target=_run, args=(program, args, output, environment), daemon=True)
        process.start()
        try:
            yield Forked(process, output)
        finally:
            process.kill()
            process.join()


def _run(program: Callable[..., int], args: tuple[Any, ...], output: Path, environment: dict[str, str]) -> None:
    os.environ.update(environment)
    file = os.open(output, os.O_WRONLY | os.O_APPEND)
    for number, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(file, number)
        plain = io.FileIO(number, "w", closefd=False)
        setattr(sys, name, io.TextIOWrapper(io.BufferedWriter(plain), line_buffering=True))
    sys.exit(program(*args))
