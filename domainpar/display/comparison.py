"""Two runs side by side: whether their scores may be compared, and which run lies beside another."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

from domainpar.display.run_files import RunFiles, read_run_files

MOST_CANDIDATES = 8
"""Scored runs, the last ones, among which the run beside another is looked for."""

COUNTED = {
    "store_digest": "--store",
    "events": "--split",
    "target": "--track-target",
    "min_hits": "--min-track-length",
    "fraction": "--matching-fraction",
    "border_sectors": "--border-sectors",
}
"""Conditions that the counts of two runs must share, and the flag of infer that decides each."""


def check_comparable(run: RunFiles, other: RunFiles) -> None:
    """Look whether the scores of two runs may lie side by side: the same events, counted alike.

    Raises:
        ValueError: Naming what differs and how to count alike.
    """
    if run.scores is None or other.scores is None:
        return
    here, there = _conditions(run), _conditions(other)
    for name, flag in COUNTED.items():
        if name in here and name in there and here[name] != there[name]:
            raise ValueError(
                f"{other.directory} was counted with {name} {there[name]}, {run.directory} with {here[name]}: side by "
                f"side they would mislead; infer both with the same {flag}."
            )


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
            if as_trained and ours.approximate != other.approximate:
                check_comparable(ours, other)
                return other.directory
    return None


def _conditions(run: RunFiles) -> dict[str, Any]:
    """The values of `COUNTED`: the store, and the conditions on the tracks of the split that is shown."""
    assert run.scores is not None, "asked for scored runs only"
    conditions: dict[str, Any] = {"store_digest": run.scores.about.get("store_digest")}
    network = run.performance.get(run.split_to_judge() or "", {}).get("network")
    if network is not None:
        conditions |= {name: getattr(network, name) for name in COUNTED if name != "store_digest"}
    return conditions
