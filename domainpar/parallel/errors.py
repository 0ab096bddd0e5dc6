"""Errors of ranks that cannot go on together: what was sent arrives changed, or ranks part, fail or do not come."""

from __future__ import annotations

from collections.abc import Sequence

from domainpar.common.agreement import name_ranks
from domainpar.common.problems import Problem
from domainpar.parallel.board import Entry


class Garbled(Problem, RuntimeError):
    """Something did not arrive as it was sent; says what, and over which transport."""


class RanksDiffer(Problem, RuntimeError):
    """Ranks do not make the same calls, or no longer hold the same; says which and where. Raised on all of them."""


class RanksFailed(RuntimeError):
    """Another rank failed, so this one cannot go on. Says which and why; the cause is reported there."""


class RankMissing(RuntimeError):
    """A rank that others wait for did not come, or its connection is gone.

    Attributes:
        seen: The observation of the rank that raises it.
        first: Board entries of the ranks that are waited for; empty where nobody knows.
        board: The whole board in words; empty where there is none.
        frames: Place of the rank that is waited for in its program; empty where it does not answer.
    """

    def __init__(self, seen: str, first: Sequence[Entry] = (), board: str = "", frames: str = "") -> None:
        self.seen, self.first, self.board, self.frames = seen, list(first), board, frames
        super().__init__("\n".join(part for part in (f"{self.what}.", board) if part))

    @property
    def what(self) -> str:
        """The error in one line, the rank that is waited for first."""
        if not self.first:
            return self.seen
        return f"{name_ranks([entry.rank for entry in self.first])} did not come: {self.seen}"
