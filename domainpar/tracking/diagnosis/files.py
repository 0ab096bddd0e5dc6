"""Stores and runs against the hashes that were written with them; every bad file is named."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from domainpar.common.agreement import gather
from domainpar.common.problems import Problem
from domainpar.common.words import several
from domainpar.diagnosis.finding import Finding, failed, works
from domainpar.parallel.world import World
from domainpar.runs.checkpoint_files import CheckpointFiles
from domainpar.tracking.events.store import MANIFEST, StoredEvent, StoreError, file_sha256
from domainpar.tracking.training.pretrained import source

MOST_NAMED = 20


def check_store(directory: Path, world: World) -> Finding:
    """Every event of a store, from end to end, shared among the ranks. *Collective*.

    Not `EventStore`: that one refuses a store for its first bad file, and here all of them are wanted.
    """
    check = f"store {directory}"
    listed, unreadable = _listed(directory)
    if any(gather(world.transport, unreadable)):
        return failed(check, unreadable or "unreadable on another rank", "run python -m domainpar.prepare again")
    bad = [problem for values in listed[world.rank :: world.size] if (problem := event_problem(directory, values))]
    size = sum(int(values["bytes"]) for values in listed)
    text = f"{several(len(listed), 'event')}, {size / 1e6:,.1f} MB hashed and read"
    if bad := _gather_sorted(bad, world):
        advice = "prepare these events again, or copy them anew"
        return failed(check, f"{text}; {len(bad)} bad: {_first(bad)}", advice, events=len(listed), bad=bad)
    return works(check, f"{text}: all as the manifest says", events=len(listed), bytes=size)


def _listed(directory: Path) -> tuple[list[dict[str, Any]], str]:
    """The events of the manifest, or why it cannot be read."""
    try:
        events = list(json.loads((directory / MANIFEST).read_bytes())["events"])
        for values in events:
            if not {"event", "path", "bytes", "sha256"} <= values.keys():
                return [], f"{directory / MANIFEST}: an event without path, bytes or sha256"
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        what = f"{directory / MANIFEST} cannot be read: {type(error).__name__}: {error}"
        return [], Problem(what, file=directory / MANIFEST).what
    return events, ""


def event_problem(directory: Path, listed: dict[str, Any]) -> str | None:
    """The problem of one event of a store, naming its file; None if it is as the manifest's entry says."""
    path = directory / listed["path"]
    try:
        size = path.stat().st_size
        if size != listed["bytes"]:
            what = f"{path.name}: {size} bytes, the manifest says {listed['bytes']}"
            return Problem(what, file=path).what
        sha256 = file_sha256(path, listed["event"])
        if sha256 != listed["sha256"]:
            return f"{path.name}: sha256 is {sha256[:12]}, the manifest says {str(listed['sha256'])[:12]}"
        with StoredEvent(path) as event:
            event.check_bytes()  # its hash may be that of a file that was damaged before it was hashed
    except OSError as error:
        return f"{path.name}: {error.strerror or error}"
    except StoreError as error:
        return f"{path.name}: {error}"
    return None


def check_run(run: str, world: World) -> Finding:
    """Every checkpoint of a run, or of a network that is shipped, against its hashes. *Collective*, shared among ranks.

    Args:
        run: Its directory, or `pretrained:NAME`.
    """
    check = f"run {run}"
    try:
        files = CheckpointFiles(source(run) / "checkpoints")
    except Problem as problem:  # of a name, so on all ranks alike
        return failed(check, problem.what, problem.hint)
    names = files.names()
    # All of them look before any refuses: they may see different file systems.
    if not all(gather(world.transport, names)):
        return failed(check, f"no checkpoint in {files.directory}", "name the directory of a run that has saved one")
    bad = [f"{name}: {what}" for name in names[world.rank :: world.size] if (what := _problem(files.read, name))]
    for pointer in ("last", "best") if world.is_root else ():
        if pointer == "last" or (files.directory / pointer).exists():  # a run without validation has no best
            bad += filter(None, [_problem(files.pointed, pointer)])
    bad, text = _gather_sorted(bad, world), f"{several(len(names), 'checkpoint')} hashed"
    if not bad:
        return works(check, f"{text}: all as their manifests say", checkpoints=len(names))
    advice = "copy them anew, or go on from one that is whole: write its name into checkpoints/last"
    return failed(check, f"{text}; {len(bad)} bad: {_first(bad)}", advice, checkpoints=len(names), bad=bad)


def _problem(read: Callable[[str], object], name: str) -> str:
    """The problem of reading something by its name; nothing if there is none."""
    try:
        read(name)
    except Problem as problem:
        return problem.what
    return ""


def _gather_sorted(problems: list[str], world: World) -> list[str]:
    return sorted(text for texts in gather(world.transport, problems) for text in texts)


def _first(problems: Sequence[str]) -> str:
    more = f"; and {len(problems) - MOST_NAMED} more, in --json" if len(problems) > MOST_NAMED else ""
    return "; ".join(problems[:MOST_NAMED]) + more
