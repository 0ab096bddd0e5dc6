"""Rows of the doctor's table: how those of all ranks are merged, and how the table is printed and written."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from domainpar.common.agreement import gather
from domainpar.common.atomic_files import write_whole
from domainpar.common.models import plain
from domainpar.common.text_table import WIDTH_OF_A_FILE, drawn
from domainpar.common.words import several
from domainpar.parallel.launcher import detect
from domainpar.parallel.world import World

MOST_RANKS_NAMED = 4


class Verdict(StrEnum):
    """The result of a check; a later one is worse."""

    SKIP = "SKIP"
    PASS = "PASS"
    WARN = "WARN"
    FAIL = "FAIL"

    @property
    def badness(self) -> int:
        """Its place in the order."""
        return list(Verdict).index(self)


COLOURS = {Verdict.PASS: "green", Verdict.WARN: "yellow", Verdict.FAIL: "bold red", Verdict.SKIP: "dim"}


@dataclass(frozen=True)
class Finding:
    """One row of the table."""

    check: str
    verdict: Verdict
    found: str  # the observation, with values
    advice: str = ""  # what to do about it
    figures: Mapping[str, Any] = field(default_factory=dict)  # the observation in plain values, for the JSON


def works(check: str, found: str, advice: str = "", /, **figures: Any) -> Finding:
    """It works; with an advice if the user should know something."""
    return Finding(check, Verdict.WARN if advice else Verdict.PASS, found, advice, figures)


def failed(check: str, found: str, advice: str, **figures: Any) -> Finding:
    """It does not work."""
    return Finding(check, Verdict.FAIL, found, advice, figures)


def skipped(check: str, why: str, advice: str = "") -> Finding:
    """It could not be checked, or there is nothing to check."""
    return Finding(check, Verdict.SKIP, why, advice)


def attempted(check: str, look: Callable[[], Finding | None]) -> list[Finding]:
    """The finding of a check that one rank makes by itself, if it has one; an exception in it is a finding too."""
    try:
        finding = look()
    except Exception as error:
        finding = failed(check, f"the check itself failed: {type(error).__name__}: {error}", "put this into an issue")
    return [] if finding is None else [finding]


def exit_code(findings: Sequence[Finding]) -> int:
    """0 when nothing failed, 1 otherwise."""
    return int(any(finding.verdict is Verdict.FAIL for finding in findings))


def gathered(findings: Sequence[Finding], world: World) -> list[Finding]:
    """One finding for each check of all ranks, the same on every rank. *Collective*.

    The worst verdict wins and its ranks are named; findings that are the same on all ranks appear once.
    """
    by_check: dict[str, dict[int, Finding]] = {}
    for rank, of_rank in enumerate(gather(world.transport, findings, list[Finding])):
        for finding in of_rank:
            by_check.setdefault(finding.check, {})[rank] = finding
    merged = []
    for of_ranks in by_check.values():
        worst = max((finding.verdict for finding in of_ranks.values()), key=lambda verdict: verdict.badness)
        worst_ranks = {rank: finding for rank, finding in of_ranks.items() if finding.verdict is worst}
        first = next(iter(worst_ranks.values()))
        alike = len(worst_ranks) == len(of_ranks) and len({finding.found for finding in worst_ranks.values()}) == 1
        # Without failures the text of one rank stands for all: free memory differs a little between them.
        if not alike and worst.badness > Verdict.PASS.badness:
            lines = [f"rank {rank}: {finding.found}" for rank, finding in list(worst_ranks.items())[:MOST_RANKS_NAMED]]
            if len(worst_ranks) > MOST_RANKS_NAMED:
                lines.append(f"and {several(len(worst_ranks) - MOST_RANKS_NAMED, 'more rank')}")
            first = replace(first, found="; ".join(lines), figures={**first.figures, "ranks": sorted(worst_ranks)})
        merged.append(first)
    return merged


def as_text(findings: Sequence[Finding], width: int = WIDTH_OF_A_FILE, colours: bool = False) -> str:
    """The table, one row a check, and a line that counts verdicts."""
    table = Table(show_edge=False, pad_edge=False, expand=True)  # else columns take no shares
    for name, share in (("check", 2), ("", 0), ("what was found", 8), ("what to do", 4)):
        table.add_column(name, ratio=share or None, overflow="fold")
    for finding in findings:
        verdict = Text(finding.verdict, style=COLOURS[finding.verdict])
        table.add_row(Text(finding.check), verdict, Text(finding.found), Text(finding.advice))
    counts = [f"{sum(finding.verdict is verdict for finding in findings)} {verdict}" for verdict in COLOURS]
    lines = [*drawn(table, width, colours), f"doctor: {', '.join(counts)}; exit code {exit_code(findings)}"]
    return "\n".join(lines) + "\n"


def show(findings: Sequence[Finding]) -> None:
    """Print the table in one piece: lines of several ranks would tear."""
    try:
        launched = detect().kind != "none"
    except ValueError:  # variables of a launcher, but spoilt ones
        launched = True
    # A launcher may give ranks its own terminals, without the width and colours of the user's.
    on_terminal = sys.stdout.isatty() and not launched
    width = shutil.get_terminal_size().columns if on_terminal else WIDTH_OF_A_FILE
    sys.stdout.write(as_text(findings, width, on_terminal and "NO_COLOR" not in os.environ))
    sys.stdout.flush()


def as_record(findings: Sequence[Finding]) -> dict[str, Any]:
    """The table as plain values."""
    return {"checks": plain(findings), "exit_code": exit_code(findings)}


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write plain values to a file, whole or not at all; RuntimeError if that cannot be."""
    try:
        write_whole(path, (json.dumps(content, indent=1, allow_nan=False) + "\n").encode())
    except OSError as error:
        raise RuntimeError(f"cannot write {path}: {error.strerror}; all else is done, see the table") from error
