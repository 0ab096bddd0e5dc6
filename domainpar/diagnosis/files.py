"""Stores and runs against the hashes that were written with them; every bad file is named."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from domainpar.diagnosis.finding import Finding, failed, of_all_ranks, passed
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
    if any(of_all_ranks(unreadable, world)):
        return failed(check, unreadable or "unreadable on another rank", "run python -m domainpar.prepare again")
    bad = [problem for values in listed[world.rank :: world.size] if (problem := event_problem(directory, values))]
    size = sum(int(values["bytes"]) for values in listed)
    text = f"{several(len(listed), 'event')}, {size / 1e6:,.1f} MB hashed and read"
    if bad := _of_all(bad, world):
        advice = "prepare these events again, or copy them anew"
        return failed(check, f"{text}; {len(bad)} bad: {_first(bad)}", advice, events=len(listed), bad=bad)
    return passed(check, f"{text}: all as the manifest says", events=len(listed), bytes=size)


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
    """The problem of one event of a store, naming its file; None if it is as the manifest's entry says."""
    path = directory / listed["path"]
    try:
        size = path.stat().st_size
        if size != listed["bytes"]:
            return f"{path.name}: {size} bytes, the manifest says {listed['bytes']}"
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
    if not all(of_all_ranks(names, world)):
        return failed(check, f"no checkpoint in {files.directory}", "name the directory of a run that has saved one")
    bad = [what for name in names[world.rank :: world.size] if (what := checkpoint_problem(files, name))]
    bad = _of_all(bad + (_pointer_problems(files) if world.is_root else []), world)
    text = f"{several(len(names), 'checkpoint')} hashed"
    if not bad:
        return passed(check, f"{text}: all as their manifests say", checkpoints=len(names))
    advice = "copy them anew, or go on from one that is whole: write its name into checkpoints/last"
    return failed(check, f"{text}; {len(bad)} bad: {_first(bad)}", advice, checkpoints=len(names), bad=bad)


def checkpoint_problem(files: CheckpointFiles, name: str) -> str | None:
    """The problem of one checkpoint, naming it; None if there is none."""
    try:
        files.read(name)
    except Problem as problem:
        return f"{name}: {problem.what}"
    return None


def _pointer_problems(files: CheckpointFiles) -> list[str]:
    """The problems of `last`, and of `best` if there is one."""
    problems = []
    for pointer in ("last", "best"):
        try:
            if pointer == "last" or (files.directory / pointer).exists():
                files.pointed(pointer)
        except Problem as problem:
            problems.append(problem.what)
    return problems


def _of_all(problems: list[str], world: World) -> list[str]:
    return sorted(text for texts in of_all_ranks(problems, world) for text in texts)


def _first(problems: Sequence[str]) -> str:
    more = f"; and {len(problems) - MOST_NAMED} more, in --json" if len(problems) > MOST_NAMED else ""
    return "; ".join(problems[:MOST_NAMED]) + more
