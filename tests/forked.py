"""Programs as forks of a test's process: torch and kernels are there at once, and what they spoil is their own."""

from __future__ import annotations

import ctypes
import io
import json
import multiprocessing
import os
import runpy
import socket
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
import torch
from jobs import MPIEXEC, free_port

from domainpar.testing import patient, run_command

FORK = multiprocessing.get_context("fork")
SEED_OF_NEW_PROCESSES = 67280421310721  # torch's own


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
    file = os.open(output, os.O_WRONLY | os.O_APPEND)
    _print_into(file, file)
    os.environ.update(environment)
    sys.exit(program(*args))


def _print_into(*files: int) -> None:
    """Standard output and error of this process from now on."""
    for number, (name, file) in enumerate(zip(("stdout", "stderr"), files, strict=True), 1):
        os.dup2(file, number)
        plain = io.FileIO(number, "w", closefd=False)
        setattr(sys, name, io.TextIOWrapper(io.BufferedWriter(plain), line_buffering=True))


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


ASKS_FOR_A_FORK = """
import json, os, socket, sys
with socket.socket(socket.AF_UNIX) as tests:
    tests.connect(sys.argv[1])
    own = {name: value for name, value in os.environ.items() if name.startswith(("PMI", "MPI", "HYD"))}
    socket.send_fds(tests, [json.dumps(own).encode()], [1, 2, int(own["PMI_FD"])])
    os.close(int(own["PMI_FD"]))
    code = int(tests.recv(8))
os.kill(os.getpid(), -code) if code < 0 else os._exit(code)
"""
"""What MPICH's mpiexec starts: a process of milliseconds, for which a fork is the rank, and ends as that has ended."""
AT_ONE_TIME = 0.3
"""Ranks that end so many seconds apart end together: mpiexec kills the others when one has ended with an error."""


FORKS_UNDER_MPIEXEC = MPIEXEC is not None and "HYDRA" in run_command([MPIEXEC, "--version"], 60.0)[1]
"""Whether this is MPICH's mpiexec: the others tell their processes in other ways which rank they are."""
needs_mpich = pytest.mark.skipif(not FORKS_UNDER_MPIEXEC, reason="no mpiexec of MPICH's or no mpi4py")


def under_mpiexec(
    num_ranks: int, program: Callable[..., int], *args: Any, seconds: float = 60.0, **environment: str
) -> tuple[int, str]:
    """Exit code and output of MPICH's mpiexec, whose ranks run a function each as forks; none imports torch anew."""
    with tempfile.TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX) as meeting:
        meeting.bind(path := f"{folder}/ranks")
        meeting.listen(num_ranks)
        command = [str(MPIEXEC), "-n", str(num_ranks), sys.executable, "-S", "-c", ASKS_FOR_A_FORK, path]
        ranks: dict[socket.socket, BaseProcess] = {}
        with ThreadPoolExecutor(1) as thread:
            launched = thread.submit(run_command, command, seconds, **environment)
            while not launched.done():
                for ready in wait([meeting, *ranks], 0.02):
                    if ready is meeting:
                        asking, _ = meeting.accept()
                        ranks[asking] = _fork_for(asking, program, args, environment)
                    else:  # mpiexec has ended its process
                        ranks.pop(ready).kill()
                ended = [asking for asking, rank in ranks.items() if rank.exitcode is not None]
                if ended and len(ended) < len(ranks):
                    wait([ranks[asking].sentinel for asking in ranks.keys() - set(ended)], AT_ONE_TIME)
                for asking in [asking for asking, rank in ranks.items() if rank.exitcode is not None]:
                    with asking, suppress(OSError):
                        asking.send(str(ranks.pop(asking).exitcode).encode())
        return launched.result()


def _fork_for(asking: socket.socket, program: Callable[..., int], args: Sequence[Any], more: dict[str, str]) -> Any:
    about, files, _, _ = socket.recv_fds(asking, 2**16, 3)
    rank = FORK.Process(target=_be_rank, args=(program, args, {**more, **json.loads(about)}, files), daemon=True)
    rank.start()
    for file in files:
        os.close(file)
    return rank


def as_new_process(rank: int, function: Callable[..., object], *args: Any) -> None:
    """What a rank does that is a fork. Its random numbers are those of a new process, not of the tests before."""
    torch.manual_seed(SEED_OF_NEW_PROCESSES)
    function(rank, *args)


def _be_rank(program: Callable[..., int], args: Sequence[Any], environment: dict[str, str], files: list[int]) -> None:
    """Ends as a process does: MPI when Python ends, and its connection to mpiexec when the C library does."""
    _print_into(*files[:2])
    os.environ.update(environment | {"PMI_FD": str(files[2])})
    torch.manual_seed(SEED_OF_NEW_PROCESSES)
    try:
        code = program(*args)
    except SystemExit as ended:
        code = ended.code
    except BaseException:
        traceback.print_exc()
        code = 1
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is not None and mpi.Is_initialized() and not mpi.Is_finalized():
        mpi.Finalize()
    sys.stdout.flush()
    sys.stderr.flush()
    ctypes.CDLL(None).exit(int(code or 0))
