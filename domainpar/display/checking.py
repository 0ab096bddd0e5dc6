"""Whether `scores.json` and `timings.json` are what `infer` writes, found out where they are read."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from domainpar.reco.performance.counts import TrackCounts

if TYPE_CHECKING:
    from domainpar.display.reading import RunFiles

Table = Mapping[str, Any]

MOST_LOOKED_AT = 8
"""Runs among which one to compare with is looked for: of hundreds, the last ones."""


def check_scores(about: Table, path: Path, run: Path, of_run: Table) -> None:
    """Look whether all that is shown of scores is there, and that the run had their weights, wherever both lie now.

    Args:
        about: What the file says.
        path: The file.
        run: The run they are to be shown with.
        of_run: What its `run.json` says. A run of an earlier version does not tell its weights; it is trusted.

    Raises:
        ValueError: Naming the file: if it is not what infer writes, names files elsewhere, or is of another run.
    """
    try:
        _check_events(about["events"])
        for split, metrics in about["metrics"].items():
            _ = (str(split), int(metrics["events"]))
        for by_finder in ((about.get("tracks") or {}).get("performance") or {}).values():
            for counts in by_finder.values():
                TrackCounts.from_json(counts)
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise ValueError(_not_ours(path, error)) from error
    sha256, saved = str(about.get("parameters_sha256")), of_run.get("saved")
    if isinstance(saved, dict) and sha256 not in saved.values():
        told = f" ({os.path.normpath(path.parent / str(about['run']))})" if about.get("run") else ""
        raise ValueError(
            f"{path} holds the scores of another run{told}, with weights (sha256 {sha256[:12]}) that {run} never had; "
            "show that run, or infer with this one."
        )


def check_timings(timings: Table, path: Path) -> None:
    """Look whether times are those of events.

    Raises:
        ValueError: Naming the file, if they are not what infer writes.
    """
    try:
        for event in timings["events"]:
            _ = (event["event"], float(event["seconds_network"]), float(event["seconds_all"]))
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise ValueError(_not_ours(path, error)) from error


def check_comparable(run: RunFiles, other: RunFiles) -> None:
    """Look whether the scores of two runs may lie side by side: the same events, counted alike.

    Raises:
        ValueError: Naming what differs and how to count alike.
    """
    if run.scores is None or other.scores is None:
        return
    here, there = (_counted(files) for files in (run, other))
    for name, flag in COUNTED.items():
        if name in here and name in there and here[name] != there[name]:
            raise ValueError(
                f"{other.directory} was counted with {name} {there[name]}, {run.directory} with {here[name]}: side by "
                f"side they would mislead; infer both with the same {flag}."
            )


COUNTED = {
    "store_digest": "--store",
    "events": "--split",
    "target": "--track-target",
    "min_hits": "--min-track-length",
    "fraction": "--matching-fraction",
    "border_sectors": "--border-sectors",
}
"""What counts of two runs must share, and the flag of infer that decides it."""


def run_beside(run: Path) -> Path | None:
    """Of the runs beside one, the last scored that may lie at its side: one of whole events beside one of sectors.

    Args:
        run: A run with scores.

    Returns:
        The other run; None if there is none, or this one was not scored as it was trained.
    """
    from domainpar.display.reading import read_run_files

    lists = sorted(run.parent.glob("*/scores/scores.json"), key=lambda path: path.stat().st_mtime_ns, reverse=True)
    for path in lists[:MOST_LOOKED_AT]:
        with suppress(ValueError):  # a run that cannot be read, or not be compared, is none that is looked for
            ours, other = read_run_files(run), read_run_files(path.parents[1])
            if _scored_as_trained(ours) and _scored_as_trained(other) and ours.approximate != other.approximate:
                check_comparable(ours, other)
                return other.directory
    return None


def _scored_as_trained(files: RunFiles) -> bool:
    return files.scores is not None and files.scores.approximate == files.approximate


def _counted(files: RunFiles) -> dict[str, Any]:
    """How the scores of a run were counted: the events of the split that is shown, and the conditions on tracks."""
    assert files.scores is not None
    counted: dict[str, Any] = {"store_digest": files.scores.about.get("store_digest")}
    split = files.split_to_judge()
    network = files.performance.get(split or "", {}).get("network")
    if network is not None:
        counted |= {name: getattr(network, name) for name in COUNTED if name != "store_digest"}
    return counted


def _check_events(events: Any) -> None:
    for listed in events:
        name = str(listed["path"])
        if Path(name).name != name or not isinstance(listed["event"], str):
            raise ValueError(f"the file of event {listed['event']!r} is {name!r}, expected a name in this directory")


def _not_ours(path: Path, error: Exception) -> str:
    return f"{path} is not what infer writes: {type(error).__name__}: {error}; run infer again."
