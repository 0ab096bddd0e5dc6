"""Where a reader stands: the event and the file that an error is about."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from domainpar.problems import Problem


@dataclass(frozen=True)
class Place:
    """An event and, where it was read from one, its file.

    Attributes:
        event: Name of the event.
        file: The file.
    """

    event: str
    file: str | Path | None = None

    def problem(self, what: str, hint: str = "") -> Problem:
        """An error about this event, to be raised: what is wrong with the values seen, and what to do."""
        return Problem(what, hint, event=self.event, file=self.file)

    def of(self, error: ValueError) -> Problem:
        """An error of code that saw values and not whose they are, now about this event."""
        if isinstance(error, Problem):
            return Problem(error.what, error.hint, event=error.event or self.event, file=error.file or self.file)
        return self.problem(str(error).rstrip("."))
