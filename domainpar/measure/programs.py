"""Other programs, each with a time limit: ended with everything that they started."""

from __future__ import annotations

import math
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import IO

from domainpar.common import timeouts

OWN_ERROR = "domainpar: error: "

# In containers and on small machines Open MPI refuses to start without these; MPICH does not look at them.
LET_OPEN_MPI_START = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
}


def mpiexecs() -> list[str]:
    """The `mpiexec` beside this Python, then the one in the PATH, each once; none without mpi4py."""
    beside, in_path = Path(sys.executable).with_name("mpiexec"), shutil.which("mpiexec")
    paths = ([str(beside)] if beside.exists() else []) + ([in_path] if in_path else [])
    once = {os.path.realpath(path): path for path in reversed(paths)}  # each under its first name
    return list(once.values())[::-1] if find_spec("mpi4py") is not None else []


def own_path() -> dict[str, str]:
    """The variable with which a Python that is started from here finds this very domainpar, installed or not."""
    return {"PYTHONPATH": os.pathsep.join(place for place in sys.path if place)}


@dataclass(frozen=True)
class Ended:
    """The end of a program, or of several copies of it."""

    code: int | None  # the first exit code that is not 0; None if time ran out
    output: str  # standard output and errors together
    seconds: float  # from the start to the end

    @property
    def last_lines(self) -> str:
        """The part of the output that fits a cell of a table: our own error, or the end."""
        lines = [line.strip() for line in self.output.splitlines() if line.strip()]
        if errors := [line for line in lines if line.startswith(OWN_ERROR)]:
            return errors[0].removeprefix(OWN_ERROR)
        return " / ".join(lines[-3:]) or "nothing printed"


def run_limited(
    command: Sequence[str],
    seconds: float,
    environments: Sequence[Mapping[str, str]] = ({},),
    without: Sequence[str] = (),
) -> Ended:
    """Run a program, or several copies of it at once, in sessions of their own and without input.

    Args:
        command: The program and its arguments; OSError if it cannot be started at all.
        seconds: Time limit, `inf` for none; then all copies are ended, with everything that they started.
        environments: One for each copy: variables to add.
        without: Variables to take away: those that begin like one of these.
    """
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(tuple(without) or ("\0",))}
    began = time.monotonic()
    with tempfile.TemporaryFile() as output:
        with ExitStack() as stack:
            copies = [
                stack.enter_context(started(command, output, inherited | dict(variables))) for variables in environments
            ]
            for process in copies:
                with suppress(subprocess.TimeoutExpired):
                    left = max(0.0, began + seconds - time.monotonic())
                    process.wait(None if math.isinf(left) else left)
            late = any(process.poll() is None for process in copies)
        # Not by moving the place in the file, which is that of programs that still write.
        text = os.pread(output.fileno(), os.fstat(output.fileno()).st_size, 0).decode(errors="replace")
    code = None if late else next((process.returncode for process in copies if process.returncode), 0)
    return Ended(code, text, time.monotonic() - began)


@contextmanager
def started(
    command: Sequence[str], output: IO[bytes], environment: Mapping[str, str]
) -> Iterator[subprocess.Popen[bytes]]:
    """A program at work in a session of its own; nothing of it is left afterwards."""
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        env=environment,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        # A signal first, because a launcher knows its ranks; then the whole session is killed.
        if process.poll() is None:
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(timeouts.LEAVING)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
