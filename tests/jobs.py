"""Jobs of several ranks in which a fault happens on purpose, timed from the fault to the end of the last process."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil
from faults.on_purpose import switch

from domainpar.measure import programs
from domainpar.testing import find_mpiexec, patient


def free_port() -> int:
    """A port of this machine that nobody uses at the moment."""
    with closing(socket.socket()) as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def without_signs_of_life(printed: str) -> str:
    """What a program says however long it takes."""
    return re.sub(r"^\[\d+ s\] .*\n", "", printed, flags=re.MULTILINE)


MPIEXEC = find_mpiexec()
TORCHRUN = "torchrun"
MARK = "DOMAINPAR_TEST_JOB"


@dataclass
class Job:
    """A job that runs or has run.

    Attributes:
        process: The launcher.
        name: What all its processes carry in their environment.
        output: Where standard output and error go.
        ranks_ended: When the last rank had ended, seconds since 1970.
        ended: When the launcher had ended as well.
        final: All it printed, once it has ended.
        others: Processes that are none of its own, which are asked once.
    """

    process: subprocess.Popen[bytes]
    name: str
    output: Path
    ranks_ended: float = 0.0
    ended: float = 0.0
    final: str | None = None
    others: set[psutil.Process] = field(default_factory=set)

    @property
    def text(self) -> str:
        """What it has printed so far, or did."""
        return self.output.read_text(errors="replace") if self.final is None else self.final

    @property
    def code(self) -> int:
        return self.process.returncode

    @property
    def fault_at(self) -> float:
        """When the fault happened; the last one, if there were several."""
        found = re.findall(r"fault on purpose: .*, time ([\d.]+)", self.text)
        assert found, f"no fault happened:\n{self.text}"
        return float(found[-1])

    @property
    def seconds(self) -> float:
        """From the fault to the end of the last process, the launcher's included."""
        return self.ended - self.fault_at

    @property
    def seconds_of_ranks(self) -> float:
        """From the fault to the end of the last rank."""
        return self.ranks_ended - self.fault_at

    def processes(self, words: str = "") -> list[psutil.Process]:
        """All processes of the job that run, launcher and ranks, or those whose command begins with `words`."""
        found = []
        for process in psutil.process_iter():
            if process in self.others:
                continue
            # Any of these questions may find that the process has ended since the one before.
            with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                if process.environ().get(MARK) != self.name:
                    self.others.add(process)
                elif words in " ".join(process.cmdline()[1:4]) and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found

    def ranks(self) -> list[psutil.Process]:
        """The processes that are ranks."""
        return self.processes("domainpar.train")

    def wait_for(self, text: str, timeout: float = 120.0) -> None:
        """Wait until the job has printed something."""
        self.wait_until(lambda: text in self.text, timeout)

    def wait_until(self, there: Callable[[], bool], timeout: float = 120.0) -> None:
        """Wait until the job has come so far."""
        timeout = patient(timeout)
        give_up_at = time.monotonic() + timeout
        ended = False
        while not there():
            assert not ended, f"the job has ended before that:\n{self.text}"
            assert time.monotonic() < give_up_at, f"not so far after {timeout:g} s:\n{self.text}"
            time.sleep(0.02)
            ended = self.process.poll() is not None

    def wait(self, timeout: float = 120.0) -> Job:
        """Wait until launcher and ranks have ended."""
        timeout = patient(timeout)
        until = time.monotonic() + timeout
        while self.process.poll() is None:
            if "fault on purpose" in self.text and self.ranks():
                self.ranks_ended = time.time()
            assert time.monotonic() < until, f"still at work after {timeout:g} s:\n{self.text}"
            time.sleep(0.02)
        give_up_at = time.monotonic() + patient(15.0)
        while self.processes():
            assert time.monotonic() < give_up_at, f"still at work: {self.processes()}\n{self.text}"
            time.sleep(0.02)
        self.ended, self.final = time.time(), self.text
        return self


@contextmanager
def started(
    launcher: str | None, num_ranks: int, words: Sequence[str], *, fault: str | None = None, **more: str
) -> Iterator[Job]:
    """Start `python -m domainpar.<words>` on ranks; whatever is left in the end is killed.

    Args:
        launcher: `mpiexec`, `torchrun`, or None for one process.
        num_ranks: Ranks to start.
        words: The command's module and its words.
        fault: For the switch.
        **more: Environment variables.
    """
    module = ["-m", f"domainpar.{words[0]}", *words[1:]]
    command = [sys.executable, *module]
    if launcher == TORCHRUN:
        run = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks)]
        command = [*run, "-m", "--", *module[1:]]
    elif launcher is not None:
        assert MPIEXEC is not None
        command = [MPIEXEC, "-n", str(num_ranks), *command]
    with running(command, **more, **({} if fault is None else {"DOMAINPAR_FAULT": switch(fault)})) as job:
        yield job


@contextmanager
def running(command: Sequence[str], **environment: str) -> Iterator[Job]:
    """A program with all processes that carry its name; whatever is left in the end is killed."""
    name = uuid.uuid4().hex
    inherited = {variable: value for variable, value in os.environ.items() if variable != "DOMAINPAR_FAULT"}
    environment = inherited | {"OMP_NUM_THREADS": "1", MARK: name} | environment
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "output"
        with (
            output.open("wb") as file,
            programs.started(command, file, environment) as process,
        ):
            job = Job(process, name, output)
            try:
                yield job
            finally:  # torchrun gives each rank a session of its own
                for left in job.processes():
                    with suppress(psutil.NoSuchProcess):
                        left.kill()


def small_training(store: Path, out: Path, *more: str, epochs: int = 3) -> list[str]:
    """The words of a training of seconds."""
    sizes = ["--hidden", "16", "--graph-iters", "2", "--epochs", str(epochs), "--log-every", "1"]
    return ["train", "--store", str(store), "--out", str(out), *sizes, *more]
