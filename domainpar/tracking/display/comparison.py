"""Two runs side by side: what differs, what was not counted alike, and which run lies beside another."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

from domainpar.common.words import several
from domainpar.tracking.config import flag
from domainpar.tracking.display.run_facts import ReportTable, facts
from domainpar.tracking.display.run_files import RunFiles, read_run_files

MOST_CANDIDATES = 8
"""Scored runs, the last ones, among which the run beside another is looked for."""

COUNTED = {
    "scores": {
        "store_digest": "infer both with the same --store",
        "split": "infer both with the same --split",
        "events": "infer both with the same --split",
        "target": "infer both with the same --track-target",
        "min_hits": "infer both with the same --min-track-length",
        "fraction": "infer both with the same --matching-fraction",
        "border_sectors": "infer both with the same --border-sectors",
        "target of edges": "train both with the same --target",
    },
    "training": {
        "validation events": "train both with the same --store",
        "target of edges": "train both with the same --target",
    },
}
"""Conditions that the figures of two runs must share, those of scores and of the training, and what makes them so."""

NOT_KEPT = "not in its config.yaml"


def not_alike(run: RunFiles, other: RunFiles) -> dict[str, list[str]]:
    """What was not counted alike in two runs: a sentence for each condition, by `scores` and `training`.

    A condition that one of them does not know is in none, and neither are scores that one of them does not have.
    """
    found: dict[str, list[str]] = {}
    both = _conditions(run), _conditions(other)
    for of, remedies in COUNTED.items():
        here, there = (conditions[of] for conditions in both)
        for name, remedy in remedies.items():
            if name in here and name in there and here[name] != there[name]:
                found.setdefault(of, []).append(
                    f"The {of} of {other.directory} were counted with {name} {there[name]}, of {run.directory} with "
                    f"{here[name]}: side by side they would mislead; {remedy}."
                )
    return found


def label_runs(run: RunFiles, other: RunFiles) -> tuple[RunFiles, RunFiles]:
    """Two runs as they are called in one chart: by name where their modes are the same, and what was counted
    otherwise in the second."""
    other = replace(other, counted_otherwise=frozenset(not_alike(run, other)))
    if all(getattr(run, how) != getattr(other, how) for how in ("kind", "how_trained", "how_scored")):
        return run, other
    names = [files.directory.resolve().name for files in (run, other)]
    if names[0] == names[1]:
        names = [str(files.directory) for files in (run, other)]
    return replace(run, name=names[0]), replace(other, name=names[1])


def differing(run: RunFiles, other: RunFiles) -> tuple[ReportTable, ...]:
    """The flags in which two runs differ, and the facts: a table of each, none where nothing differs."""
    flags = [{flag(name): _shown(value) for name, value in files.settings.items()} for files in (run, other)]
    fact_rows: list[dict[str, str]] = [{row[0]: row[1] for row in facts(files).rows} for files in (run, other)]
    tables: list[ReportTable] = []
    for heading, (here, there), absent in (("flag", flags, NOT_KEPT), ("fact", fact_rows, "–")):
        if not (here and there):
            continue
        rows = [
            {heading: name, str(run.directory): here.get(name, absent), str(other.directory): there.get(name, absent)}
            for name in (here | there)
            if here.get(name) != there.get(name)
        ]
        tables += ReportTable.of(rows, words=3)
    return tuple(tables)


def _shown(value: Any) -> str:
    """The value of a flag as it is typed; a dash for one that was not given and has no default."""
    return "–" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def run_beside(run: Path) -> Path | None:
    """The last scored run in the same directory that may lie beside one: of whole events beside one of sectors.

    Args:
        run: A run with scores.

    Returns:
        The other run; None if there is none, or this one was not scored as it was trained.
    """
    # The newest first: it is the likeliest to belong to this one.
    lists = sorted(run.parent.glob("*/scores/scores.json"), key=lambda path: path.stat().st_mtime_ns, reverse=True)
    for path in lists[:MOST_CANDIDATES]:
        with suppress(ValueError):  # a run that cannot be read or compared is no candidate
            both = ours, other = read_run_files(run), read_run_files(path.parents[1])
            as_trained = all(files.scores is not None and files.scored_naive == files.approximate for files in both)
            if as_trained and ours.approximate != other.approximate and "scores" not in not_alike(ours, other):
                return other.directory
    return None


def _conditions(run: RunFiles) -> dict[str, dict[str, Any]]:
    """What the figures of a run were counted on: `scores` of the splits that are shown, the `training` with the events
    that it was validated with; empty where there are none."""
    of_scores: dict[str, Any] = {}
    if run.scores is not None:
        splits = run.splits_to_show()
        of_scores = {"store_digest": run.scores.record.store_digest, "target of edges": run.target or "all"}
        if splits:
            of_scores |= {"split": " and ".join(splits), "events": sum(len(run.events(split)) for split in splits)}
        if (network := run.pooled(splits).get("network")) is not None:
            names = "events", "target", "min_hits", "fraction", "border_sectors"
            of_scores |= {name: getattr(network, name) for name in names}
    of_training: dict[str, Any] = {}
    if run.records_of("val"):
        of_training = {"target of edges": run.settings.get("target") or "all"} if run.settings else {}
        if run.own is not None:
            text = "".join(f"{name} {of_bytes}\n" for name, of_bytes in sorted(run.own.val))
            digest, events = sha256(text.encode()).hexdigest()[:12], several(len(run.own.val), "event")
            of_training["validation events"] = f"of digest {digest} ({events})"
    return {"scores": of_scores, "training": of_training}
