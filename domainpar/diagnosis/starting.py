"""Programs that the doctor starts: each has a time limit."""

from __future__ import annotations

import os
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from domainpar.programs import started

OWN_ERROR = "domainpar: error: "


@dataclass(frozen=True)
class Ended:
    """How programs ended.

    Attributes:
        code: The first exit code that is not 0; None if time ran out.
        output: What they printed, output and errors together.
        seconds: How long it took.
    """

    code: int | None
    output: str
    seconds: float

    @property
    def last_lines(self) -> str:
        """What matters of what they printed, for a cell of the table: our own error, or the end."""
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
    """Run a program, or several copies of it at once.

    Args:
        command: What to run.
        seconds: After so many all of them are killed, with everything they started.
        environments: One for each copy: variables to add.
        without: Variables to take away: those that begin like one of these.

    Raises:
        OSError: If it cannot be started at all.
    """
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(tuple(without) or ("\0",))}
    began = time.monotonic()
    with tempfile.TemporaryFile() as output:
        with ExitStack() as stack:
            copies = [started(command, output.fileno(), inherited | dict(variables)) for variables in environments]
            code = _code_of([stack.enter_context(copy) for copy in copies], began + seconds)
        output.seek(0)
        return Ended(code, output.read().decode(errors="replace"), time.monotonic() - began)


def _code_of(running: Sequence[subprocess.Popen[bytes]], give_up_at: float) -> int | None:
    codes = []
    for process in running:
        try:
            codes.append(process.wait(max(0.0, give_up_at - time.monotonic())))
        except subprocess.TimeoutExpired:
            return None
    return next((code for code in codes if code), 0)
