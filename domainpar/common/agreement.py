"""Agreement of ranks: compare their values, and raise one error on all ranks if any of them has a problem.

This module does not know how ranks communicate: any object that can gather a payload of each rank will do. All
functions that take `Ranks` are *collective*.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from domainpar.common.models import as_json, read_as
from domainpar.common.problems import NotWritten, Problem, Where, as_problem, error_text, problem_record

T = TypeVar("T")


class Ranks(Protocol):
    """Ranks that can talk; every transport is one."""

    @property
    def rank(self) -> int:
        """This rank, in [0, size)."""

    @property
    def size(self) -> int:
        """Number of ranks."""

    @property
    def world_ranks(self) -> Sequence[int]:
        """Name of each in messages to the user: its rank in the whole run."""

    def all_gather(self, payload: bytes) -> list[bytes]:
        """Give every rank the payload of each, in the order of ranks; *collective*."""


AnyRanks = TypeVar("AnyRanks", bound=Ranks)


@dataclass(frozen=True)
class Gathering:
    """Ranks given by a function that gathers; by default one rank alone."""

    rank: int = 0
    size: int = 1
    all_gather: Callable[[bytes], list[bytes]] = lambda payload: [payload]

    @property
    def world_ranks(self) -> Sequence[int]:
        """Their names are their numbers."""
        return range(self.size)


class Refused(Problem):
    """An error that all ranks raise alike. The text is for the user; the exit code is 2.

    Attributes:
        ranks, size: Ranks of the run with a problem, empty if it belongs to none in particular; number of all.
        first: The problem of the first of these ranks; `what` combines the problems of all.
        not_written: Whether on any of them a disk was full, or a place could not be written.
    """

    def __init__(
        self,
        what: str,
        hint: str = "",
        *,
        event: str | None = None,
        file: str | None = None,
        ranks: Sequence[int] = (),
        size: int = 0,
        first: Problem | None = None,
        not_written: bool = False,
    ) -> None:
        super().__init__(what, hint, event=event, file=file)
        self.ranks, self.size, self.not_written = tuple(ranks), size, not_written
        self.first = first or Problem(what, hint, event=event, file=file)

    def __str__(self) -> str:
        return self.text.removeprefix("domainpar: error: ").rstrip()

    @property
    def text(self) -> str:
        """The refusal as it is printed; the rank is named if one of several has the problem."""
        where = Where(event=self.event, file=self.file)
        if len(self.ranks) == 1 < self.size:
            where = Where(event=self.event, file=self.file, rank=self.ranks[0], size=self.size)
        return error_text(self.what, where, self.hint)


def gather(ranks: Ranks, value: Any, kind: Any = Any) -> list[Any]:
    """The values of all ranks, in their order: JSON, or models of one kind."""
    payloads = ranks.all_gather(json.dumps(value, default=as_json).encode())
    return [read_as(kind, json.loads(text)) for text in payloads]


def agree(ranks: Ranks, problem: BaseException | str | None) -> None:
    """Refuse on all ranks, with the same text naming the ranks, if any has a problem; None if this one found none."""
    payload = ""
    if problem is not None:
        not_written = not isinstance(problem, str) and isinstance(as_problem(problem), NotWritten)
        record = problem_record(problem), not_written
        payload = json.dumps(record, sort_keys=True)  # sorted: equal problems are equal texts
    ranks_of: dict[str, list[int]] = {}
    for rank, text in enumerate(ranks.all_gather(payload.encode())):
        if text:
            ranks_of.setdefault(text.decode(), []).append(ranks.world_ranks[rank])
    if not ranks_of:
        return
    problems = [(*json.loads(text), holders) for text, holders in ranks_of.items()]
    # The first in full, with what is wrong on others below it; no rank is named where all have the same problem.
    first, _, holders = problems[0]
    what = first["what"]
    if len(problems) > 1 or 1 < len(holders) < ranks.size:
        what = "\n".join(f"{name_ranks(holders)}: {problem['what']}" for problem, _, holders in problems)
    raise Refused(
        **{**first, "what": what},
        ranks=sorted(rank for _, _, holders in problems for rank in holders),
        size=ranks.size,
        first=Problem(**first),
        not_written=any(not_written for _, not_written, _ in problems),
    )


def agree_on(ranks: Ranks, values: Mapping[str, str], hint: str = "start all ranks alike") -> None:
    """Refuse on all ranks if named values differ, naming the ranks that differ from most, and both values."""
    if problem := difference(ranks, values, hint):
        raise Refused(problem.what, problem.hint)


def difference(ranks: Ranks, values: Mapping[str, str], hint: str) -> Problem | None:
    """The problem of the first named value in which ranks differ, the same on all ranks; None if all agree."""
    everyone = gather(ranks, dict(values))
    # By order of mention, rank 0's names first: every rank comes to the same first difference.
    for name in dict.fromkeys(name for named in everyone for name in named):
        held = [named.get(name, "missing") for named in everyone]
        if odd := differing_ranks(held):
            rest = [rank for rank in range(len(held)) if rank not in odd]
            others = "the others" if len(rest) > 1 else name_ranks([ranks.world_ranks[rank] for rank in rest])
            names = name_ranks([ranks.world_ranks[rank] for rank in odd if held[rank] == held[odd[0]]])
            return Problem(f"{name} is {held[odd[0]]} on {names}, but {held[rest[0]]} on {others}", hint)
    return None


def on_all(
    ranks: AnyRanks, make: Callable[[], T], settle: Callable[[AnyRanks, ValueError | OSError | None], None] = agree
) -> T:
    """Make something on every rank; if one raises a ValueError, TypeError, OverflowError or OSError, all refuse.

    Args:
        ranks: Those that agree.
        make: Makes it, without communication.
        settle: Raises on all ranks alike if any has a problem: `agree`, or another way to do so.
    """
    try:
        value = make()
    except Refused:  # all ranks know already
        raise
    except (ValueError, TypeError, OverflowError, OSError) as error:
        settle(ranks, error if isinstance(error, (ValueError, OSError)) else ValueError(str(error)))
        raise
    settle(ranks, None)
    return value


def on_root(ranks: Ranks, make: Callable[[], T], kind: Any = Any) -> T:
    """Have rank 0 make a JSON value, or a model, and give it to every rank; all refuse if it cannot (`on_all`)."""
    made = on_all(ranks, lambda: make() if ranks.rank == 0 else None)
    value: T = read_as(kind, gather(ranks, made)[0])
    return value


def rounds(items: Sequence[T], ranks: Ranks) -> list[tuple[T | None, Sequence[T]]]:
    """Items dealt to ranks, one each a round, after which all meet: a long silence of one looks like a hang.

    Returns:
        Of each round: the item of this rank, None where none is left for it; and all items of the round.
    """
    dealt = [items[start : start + ranks.size] for start in range(0, len(items), ranks.size)]
    return [(of_round[ranks.rank] if ranks.rank < len(of_round) else None, of_round) for of_round in dealt]


def differing_ranks(held: Sequence[Any]) -> list[int]:
    """Ranks whose value differs from the majority's or, without a majority, from that of rank 0."""
    (commonest, count), *_ = Counter(held).most_common()
    # Without a majority rank 0, which prints for all ranks, counts as right.
    most = commonest if 2 * count > len(held) else held[0]
    return [rank for rank, value in enumerate(held) if value != most]


def name_ranks(ranks: Sequence[int]) -> str:
    """Words for some ranks: `rank 3` or `ranks 0, 2`."""
    return f"rank{'' if len(ranks) == 1 else 's'} {', '.join(map(str, ranks))}"
