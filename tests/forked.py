"""Programs as forks of a test's process: torch and kernels are there at once, and what they spoil is their own."""

from __future__ import annotations

import io
import multiprocessing
import os
import runpy
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from jobs import free_port

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


def printed_by_ranks(script: Path, num_ranks: int, *words: str) -> str:
    """What all ranks of a script print, which are forks with the variables that torchrun sets; all end well."""
    meet = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(num_ranks)}
    with ExitStack() as running:
        ranks = [
            running.enter_context(forked(_run_script, script, words, RANK=str(rank), **meet))
            for rank in range(num_ranks)
        ]
        ended = [rank.wait(120.0) for rank in ranks]
    printed = "".join(text for _, text in ended)
    assert not any(code for code, _ in ended), printed
    return printed


def _run_script(script: Path, words: tuple[str, ...]) -> int:
    sys.argv = [str(script), *words]
    runpy.run_path(str(script), run_name="__main__")
    return 0
