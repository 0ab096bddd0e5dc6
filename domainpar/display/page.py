"""The report, section by section, in the order in which a physicist asks. No HTML here."""

from __future__ import annotations

from domainpar.display.efficiency import how_scored
from domainpar.display.reading import RunFiles
from domainpar.display.sections import Page
from domainpar.display.sections_event import one_event, partition
from domainpar.display.sections_run import about_run, ranks, training
from domainpar.display.sections_scores import edges, tracks
from domainpar.display.summary import STATES


def build_page(
    run: RunFiles, other: RunFiles | None = None, event_name: str | None = None, num_parts: int | None = None
) -> Page:
    """Everything that there is to show of a run.

    Args:
        run: The run.
        other: A run to lay beside it where both have the same: naive beside halo.
        event_name: The event to draw. Default: the first one that training did not see.
        num_parts: Ranks to split it over. Default: the run's own, or its sectors, or 8.

    Raises:
        StoreError: If the file of an event is damaged.
        ValueError: If there is no such event, or scores and events do not belong together.
    """
    record = run.choose_event(event_name)
    event = None if record is None else run.read_event(record)
    sections = (
        about_run(run, other),
        training(run, other),
        edges(run, other),
        tracks(run, other),
        one_event(run, event, "" if record is None else run.known_as(record), num_parts),
        partition(run, event),
        ranks(run),
    )
    facts = f"{how_scored(run)} · {STATES.get(str(run.about.get('state')), 'state unknown')}"
    missing = run.missing + _missing_of(other)
    return Page(str(run.directory), facts, sections, missing)


def _missing_of(other: RunFiles | None) -> tuple[str, ...]:
    return () if other is None else tuple(f"{other.directory}: {sentence}" for sentence in other.missing)
