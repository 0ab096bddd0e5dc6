"""What the report consists of: sections of tables and figures. And what is said wherever something is approximate."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from domainpar.display.event_view import EventView
from domainpar.display.reading import RunFiles
from domainpar.display.summary import Rows

if TYPE_CHECKING:
    from domainpar.display.figures import Figure  # plotly, which pictures do without


@dataclass(frozen=True)
class Section:
    """A part of the report.

    Attributes:
        name: Its id in the page.
        title: Its heading.
        lead: What one sees, and what it was counted against: one paragraph each.
        approximate: What of it is an approximation, said beside the heading; empty where nothing is.
        tables: Its tables.
        styles: Buttons that choose a variant of the figures: value and label; none without variants.
        figures: Its figures.
        commands: What to type, by what it does.
        event: What the event display draws.
        absent: Why there is nothing to show, and what to do; empty where there is.
    """

    name: str
    title: str
    lead: tuple[str, ...] = ()
    approximate: str = ""
    tables: tuple[Rows, ...] = ()
    styles: tuple[tuple[str, str], ...] = ()
    figures: tuple[Figure, ...] = ()
    commands: tuple[tuple[str, str], ...] = ()
    event: EventView | None = None
    absent: str = ""


@dataclass(frozen=True)
class Page:
    """The whole report.

    Attributes:
        title: The name of the run.
        facts: What it is, in a line.
        sections: Its parts.
        missing: What the run lacks and how to get it.
    """

    title: str
    facts: str
    sections: tuple[Section, ...]
    missing: tuple[str, ...] = ()


def approximate(run: RunFiles, other: RunFiles | None = None) -> str:
    """What is approximate of a run, or of the one beside it; empty where both are exact."""
    if is_approximate(run):
        return "approximate: naive mode"
    return "the run beside it is approximate: naive mode" if other is not None and is_approximate(other) else ""


def is_approximate(run: RunFiles) -> bool:
    """Whether a run was trained or scored on independent sectors."""
    return run.approximate or (run.scores is not None and run.scores.approximate)


def why_missing(run: RunFiles, *subjects: str, otherwise: str) -> str:
    """The sentence that says why there is nothing to show: the first that is about one of the subjects."""
    found = (text for subject in subjects for text in run.missing if text.startswith(f"No {subject}"))
    return next(found, otherwise)


def target_words(run: RunFiles) -> str:
    """Which particles tracks are wanted of, in a sentence."""
    target = run.tracking.cuts.target_text
    return f"Target particles: {target}." if target else "Target particles: all."


def percent(share: float | None) -> str:
    """A share for a table; a dash where there was nothing to divide by."""
    return "–" if share is None else f"{share:.2%}"
