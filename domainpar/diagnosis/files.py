"""Stores and runs against the hashes that were written with them; every bad file is named."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from domainpar.diagnosis.verdicts import Finding, failed, passed
from domainpar.events.store import MANIFEST, StoredEvent, StoreError, file_sha256, names_in
from domainpar.parallel.world import World
from domainpar.problems import Problem
from domainpar.training.checkpoint_files import CheckpointFiles
from domainpar.words import several

MOST_NAMED = 20


def check_store(directory: Path, world: World) -> Finding:
    """Every event of a store, from end to end, shared among the ranks. *Collective*.

    Not `EventStore`: that one refuses a store for its first bad file, and here all of them are wanted.
    """
    check = f"store {directory}"
    listed, unreadable = _listed(directory)
    if _on_any(world, unreadable):
        return failed(check, unreadable or "unreadable on another rank", "run python -m domainpar.prepare again")
    bad = [problem for values in listed[world.rank :: world.size] if (problem := event_problem(directory, values))]
    bad = sorted(text for texts in _of_all(world, bad) for text in texts)
    size = sum(int(values["bytes"]) for values in listed)
    told = f"{several(len(listed), 'event')}, {size / 1e6:,.1f} MB hashed and read"
    if not bad:
        return passed(check, f"{told}: all as the manifest says", events=len(listed), bytes=size)
    advice = "prepare these events again, or copy them anew"
    return failed(check, f"{told}; {len(bad)} bad: {_first(bad)}", advice, events=len(listed), bad=bad)


def _listed(directory: Path) -> tuple[list[dict[str, Any]], str]:
    """The events of the manifest, or why it cannot be read."""
    try:
        events = list(json.loads((directory / MANIFEST).read_bytes())["events"])
        for values in events:
            if not {"event", "path", "bytes", "sha256"} <= values.keys():
                return [], f"{directory / MANIFEST}: an event without path, bytes or sha256"
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return [], f"{directory / MANIFEST} cannot be read: {type(error).__name__}: {error}"
    return events, ""


def event_problem(directory: Path, listed: dict[str, Any]) -> str | None:
    """What is wrong with one event, naming its file; None if nothing is.

    Args:
        directory: The store.
        listed: What the manifest says of it.
    """
    path = directory / listed["path"]
    try:
        found = path.stat().st_size
        if found != listed["bytes"]:
            return f"{path.name}: {found} bytes, the manifest says {listed['bytes']}"
        sha256 = file_sha256(path, listed["event"])
        if sha256 != listed["sha256"]:
            return f"{path.name}: sha256 is {sha256[:12]}, the manifest says {str(listed['sha256'])[:12]}"
        with StoredEvent(path) as event:
            event.check_bytes()
            _read_all(event)
    except OSError as error:
        return f"{path.name}: {error.strerror or error}"
    except StoreError as error:
        return f"{path.name}: {error}"
    return None


def _read_all(event: StoredEvent) -> None:
    """Read every array of nodes, edges and particles."""
    event.tile_graph()
    event.particles()
    left_out = {
        *(set() if event.has_positions else {"position"}),
        *(set() if event.has_particle_ids else {"particle_id"}),
        *(set() if event.has_weights else {"weight"}),
    }
    for name in names_in("nodes"):
        if name not in left_out:
            event.read_nodes(name, np.arange(event.num_nodes))
    for name in names_in("edges"):
        if name != "label" or event.has_labels:
            event.read_edges(name, np.arange(event.num_edges))


def check_run(directory: Path, world: World) -> Finding:
    """Every checkpoint of a run against its hashes, shared among the ranks. *Collective*."""
    check, files = f"run {directory}", CheckpointFiles(directory / "checkpoints")
    names = files.names()
    if _on_any(world, "" if names else "none"):
        return failed(check, f"no checkpoint in {files.directory}", "name the directory of a run that has saved one")
    bad = [what for name in names[world.rank :: world.size] if (what := checkpoint_problem(files, name))]
    bad += _pointer_problems(files) if world.is_root else []
    bad = sorted(text for texts in _of_all(world, bad) for text in texts)
    told = f"{several(len(names), 'checkpoint')} hashed"
    if not bad:
        return passed(check, f"{told}: all as their manifests say", checkpoints=len(names))
    advice = "copy them anew, or go on from one that is whole: write its name into checkpoints/last"
    return failed(check, f"{told}; {len(bad)} bad: {_first(bad)}", advice, checkpoints=len(names), bad=bad)


def checkpoint_problem(files: CheckpointFiles, name: str) -> str | None:
    """What is wrong with one checkpoint, naming it; None if nothing is."""
    try:
        files.read(name)
    except Problem as problem:
        return f"{name}: {problem.what}"
    return None


def _pointer_problems(files: CheckpointFiles) -> list[str]:
    """What is wrong with `last`, and with `best` if there is one."""
    bad = []
    for which in ("last", "best"):
        try:
            if which == "last" or (files.directory / which).exists():
                files.pointed(which)
        except Problem as problem:
            bad.append(problem.what)
    return bad


def _first(bad: Sequence[str]) -> str:
    more = f"; and {len(bad) - MOST_NAMED} more, in --json" if len(bad) > MOST_NAMED else ""
    return "; ".join(bad[:MOST_NAMED]) + more


def _of_all(world: World, own: list[str]) -> list[list[str]]:
    return [json.loads(text) for text in world.transport.all_gather(json.dumps(own).encode())]


def _on_any(world: World, problem: str) -> bool:
    return any(world.transport.all_gather(problem.encode()))
