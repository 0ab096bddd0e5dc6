"""Other programs: started apart from this one, and ended with everything that they started."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from domainpar import timeouts


@contextmanager
def started(
    command: Sequence[str], output: Path | int, environment: Mapping[str, str] | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """A program at work in a session of its own, without input; nothing of it is left afterwards.

    Args:
        command: What to run.
        output: File, or descriptor of one, for what it prints, errors too.
        environment: All its variables; None for those of this process.

    Raises:
        OSError: If it cannot be started.
    """
    if isinstance(output, Path):
        with output.open("wb") as file, started(command, file.fileno(), environment) as process:
            yield process
        return
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
        end(process)


def end(process: subprocess.Popen[bytes]) -> None:
    """End a program that leads a session: first ask it, since a launcher knows its ranks, then kill the session."""
    if process.poll() is None:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(timeouts.LEAVING)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
