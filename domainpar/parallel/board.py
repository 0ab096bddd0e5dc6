"""The board: the doings of every rank, kept where all can read them, so that survivors can say who is missing."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from typing import Self

from domainpar import timeouts


@dataclass(frozen=True)
class _Line:
    """A line of the board."""

    def text(self) -> str:
        """The values as a line of JSON."""
        return json.dumps(astuple(self))

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse the output of `text`."""
        return cls(*json.loads(text))


@dataclass(frozen=True)
class Mark(_Line):
    """The last words of a rank on what it was about to do.

    Attributes:
        step: Number of the step, from 0.
        phase: One word: `load`, `forward`, ...
        event: The event it is about, if it is about one.
        posted: Seconds since 1970 on the clock of that rank.
    """

    step: int
    phase: str
    event: str | None = None
    posted: float = 0.0

    def __str__(self) -> str:
        of = "" if self.event is None else f" of event {self.event}"
        return f"step {self.step}, {self.phase}{of}, {max(0.0, time.time() - self.posted):.1f} s ago"


@dataclass(frozen=True)
class Life(_Line):
    """A rank as its watcher sees it, whatever the rank itself is doing.

    Attributes:
        beat: Grows as long as the process lives.
        calls: Collective calls it has begun.
        waiting: Seconds it has been waiting for other ranks; None if it is not.
        doing: The call that it waits in.
        place: The user's line that it is in, with the call, `model(...) at train.py:41`; empty if none is theirs.
    """

    beat: int
    calls: int = 0
    waiting: float | None = None
    doing: str = ""
    place: str = ""


@dataclass(frozen=True)
class Entry:
    """All that the board knows of a rank.

    Attributes:
        rank: The rank.
        host: Where it runs; empty if unknown.
        mark: The last thing it said.
        life: The last thing its watcher said; None without a watcher.
        alive: Whether the watcher said anything while the board was read; None if that was not looked at.
    """

    rank: int
    host: str = ""
    mark: Mark | None = None
    life: Life | None = None
    alive: bool | None = None

    def __str__(self) -> str:
        host = f" on {self.host}" if self.host else ""
        return f"rank {self.rank}{host}: {self.mark or 'no mark yet'}{self._state()}"

    def _state(self) -> str:
        if self.alive is False:
            return "; no sign of life: ended, stopped, cut off, or deep in compiled code"
        if self.life is None:
            return ""
        at = f", at {self.life.place}" if self.life.place else ""
        if self.life.waiting is None:
            return f"; not waiting for others{at}"
        return f"; waiting for others in {self.life.doing}, {self.life.waiting:.1f} s{at}"


def missing(entries: Sequence[Entry]) -> list[Entry]:
    """The ranks that the others wait for, as far as the board tells: empty if it does not.

    Those without a sign of life; else those that wait for nobody; else those that are behind all others.
    """
    dead = [entry for entry in entries if entry.alive is False]
    if dead:
        return dead
    lives = [(entry, entry.life) for entry in entries if entry.life is not None]
    busy = [entry for entry, life in lives if life.waiting is None or life.waiting < timeouts.PATIENCE]
    if busy or not lives:
        return busy if len(busy) < len(entries) else []
    least = min(life.calls for _, life in lives)
    behind = [entry for entry, life in lives if life.calls == least]
    return behind if len(behind) < len(lives) else []


def describe(entries: Sequence[Entry], first: Sequence[Entry] = ()) -> str:
    """The board in words, one line a rank, those that the others wait for first."""
    rest = [entry for entry in entries if entry not in first]
    lines = [f"  {entry}   <- the others wait for it" for entry in first] + [f"  {entry}" for entry in rest]
    return "\n".join(["Last seen:", *lines])
