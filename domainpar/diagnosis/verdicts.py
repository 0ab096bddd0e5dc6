"""What each check finds, and how what ranks found becomes one row of the table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from typing import Any

from domainpar.agreement import gather
from domainpar.parallel.world import World
from domainpar.words import several

MOST_RANKS_NAMED = 4


class Verdict(StrEnum):
    """How a check ended; the later the worse."""

    SKIP = "SKIP"
    PASS = "PASS"
    WARN = "WARN"
    FAIL = "FAIL"

    @property
    def badness(self) -> int:
        """Its place in the order."""
        return list(Verdict).index(self)


@dataclass(frozen=True)
class Finding:
    """One row of the table.

    Attributes:
        check: What was looked at.
        verdict: How it ended.
        found: What was seen, with values.
        advice: What to do about it; may be empty.
        figures: The same in plain values, for the JSON.
    """

    check: str
    verdict: Verdict
    found: str
    advice: str = ""
    figures: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def read(cls, values: Mapping[str, Any]) -> Finding:
        """A finding that travelled as JSON."""
        return cls(**{**values, "verdict": Verdict(values["verdict"])})


def passed(check: str, found: str, **figures: Any) -> Finding:
    """All is well."""
    return Finding(check, Verdict.PASS, found, figures=figures)


def warned(check: str, found: str, advice: str, **figures: Any) -> Finding:
    """It works, but somebody should know."""
    return Finding(check, Verdict.WARN, found, advice, figures)


def failed(check: str, found: str, advice: str, **figures: Any) -> Finding:
    """It does not work."""
    return Finding(check, Verdict.FAIL, found, advice, figures)


def skipped(check: str, why: str, advice: str = "") -> Finding:
    """It could not be looked at, or there is nothing to look at."""
    return Finding(check, Verdict.SKIP, why, advice)


def gathered(findings: Sequence[Finding], world: World) -> list[Finding]:
    """One finding for each check of all ranks, the same on every rank. *Collective*.

    The worst verdict wins and its ranks are named; what all ranks found alike is said once.
    """
    by_check: dict[str, dict[int, Finding]] = {}
    for rank, theirs in enumerate(gather(world.transport, [asdict(finding) for finding in findings])):
        for values in theirs:
            by_check.setdefault(values["check"], {})[rank] = Finding.read(values)
    return [_merged(of_ranks) for of_ranks in by_check.values()]


def _merged(of_ranks: Mapping[int, Finding]) -> Finding:
    worst = max((finding.verdict for finding in of_ranks.values()), key=lambda verdict: verdict.badness)
    told = {rank: finding for rank, finding in of_ranks.items() if finding.verdict is worst}
    first = next(iter(told.values()))
    alike = len(told) == len(of_ranks) and len({finding.found for finding in told.values()}) == 1
    if alike or worst.badness <= Verdict.PASS.badness:
        return first
    lines = [f"rank {rank}: {finding.found}" for rank, finding in list(told.items())[:MOST_RANKS_NAMED]]
    if len(told) > MOST_RANKS_NAMED:
        lines.append(f"and {several(len(told) - MOST_RANKS_NAMED, 'more rank')}")
    return replace(first, found="; ".join(lines), figures={**first.figures, "ranks": sorted(told)})


def worst_of(findings: Sequence[Finding]) -> Verdict:
    """The worst verdict among some; SKIP of none."""
    return max((finding.verdict for finding in findings), key=lambda verdict: verdict.badness, default=Verdict.SKIP)


def exit_code(findings: Sequence[Finding]) -> int:
    """0 when nothing failed, 1 otherwise."""
    return int(worst_of(findings) is Verdict.FAIL)
