"""Errors of ranks that cannot continue together: messages arrive changed, or ranks differ, fail or are missing."""

from __future__ import annotations

from collections.abc import Sequence

from domainpar.common.agreement import name_ranks
from domainpar.common.problems import Problem
from domainpar.parallel.board import Entry


class Garbled(Problem, RuntimeError):
    """A message did not arrive as it was sent. The text names the transport."""


class RanksDiffer(Problem, RuntimeError):
    """Ranks do not make the same calls, or no longer hold the same values. All ranks raise it, naming them."""


class RanksFailed(RuntimeError):
    """Another rank failed, so this one cannot continue. The text names it; the failed rank reports the cause."""


class RankMissing(RuntimeError):
    """A rank that others wait for did not arrive, or its connection was lost.

    Attributes:
        seen: What the rank that raises it has observed.
        first: Board entries of the ranks that are waited for; empty where they are unknown.
        board: The whole board as text; empty where there is none.
    """

    def __init__(self, seen: str, first: Sequence[Entry] = (), board: str = "") -> None:
        self.seen, self.first, self.board = seen, list(first), board
        super().__init__("\n".join(part for part in (f"{self.what}.", board) if part))

    @property
    def what(self) -> str:
        """The error in one line, the rank that is waited for first."""
        if not self.first:
            return self.seen
        return f"{name_ranks([entry.rank for entry in self.first])} did not come: {self.seen}"
