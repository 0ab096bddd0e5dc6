"""A store before anything is computed: every event is looked into, dealt over the ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Literal

from domainpar.events.store import EventStore, StoreError
from domainpar.parallel.loading import empty_parts
from domainpar.parallel.world import World
from domainpar.problems import Place, Problem, Where, told
from domainpar.words import several


def open_store(path: Path, world: World, on_bad_event: Literal["fail", "skip"] = "fail") -> EventStore:
    """Open a store on every rank and look into each of its events, dealt over the ranks. *Collective*.

    Args:
        path: The store.
        world: The ranks.
        on_bad_event: What becomes of an event that cannot be opened. `skip`: it is told and noted in `unreadable`.

    Raises:
        Refused: On all ranks alike, if the store, or an event that is not to be left out, is missing or damaged; or if
            no event is left.
    """
    skips = on_bad_event == "skip"
    store = world.on_all(lambda: EventStore(path, check_files=not skips))
    world.agree_on({"the content of the store": store.digest[:12]}, "let all ranks see the same files")
    if not skips:
        return world.on_all(lambda: _look(store, world))
    share = {name: told(problem) for name, problem in _bad_ones(store, world).items()}
    for payload in world.transport.all_gather(json.dumps(share).encode()):
        store.unreadable |= {name: Problem(**problem) for name, problem in json.loads(payload).items()}
    if len(store) and not store.readable():
        first = store.unreadable[store.records[0].event]
        world.agree(Problem(f"none of {several(len(store), 'event')} can be read: {first.what}", first.hint, file=path))
    for event in sorted(store.unreadable) if world.is_root else ():
        problem = store.unreadable[event]
        print(f"WARNING: an event is left out: {problem.what}{Where(event=event, file=problem.file)}", flush=True)
    return store


def _look(store: EventStore, world: World) -> EventStore:
    for record in store.events()[world.rank :: world.size]:
        store.open(record).close()
    return store


def _bad_ones(store: EventStore, world: World) -> dict[str, StoreError]:
    """What is wrong with those of this rank's share of the events that cannot be opened."""
    found: dict[str, StoreError] = {}
    for record in store.events()[world.rank :: world.size]:
        try:
            store.open(record).close()
        except StoreError as error:
            found[record.event] = error
    return found


def check_parts(store: EventStore, world: World, grouping: str, sectors: int | None, seed: int) -> None:
    """Refuse events of which some of the ranks that share them would own nothing. Events are dealt to ranks.

    Args:
        store: The events.
        world: The ranks.
        grouping: How tiles are grouped into parts.
        sectors: Sectors of an event in naive mode; None for whole events.
        seed: Seed of the grouping.

    Raises:
        Problem: Naming one of this rank's events, and the ranks of a domain group that would own nothing.
    """
    size = world.domain.size
    for record in store.readable()[world.rank :: world.size]:
        with store.open(record) as event:
            empty = empty_parts(event, size, grouping, sectors, seed)
        if empty:
            names = ", ".join(map(str, empty[:8])) + (", ..." if len(empty) > 8 else "")
            raise Place(record.event, store.path / record.path).problem(
                f"{len(empty)} of the {several(size, 'rank')} that share it would own nothing ({names}): it has "
                f"{several(record.num_nodes, 'node')} in {several(record.num_tiles, 'tile')}",
                "fewer ranks, a smaller --domain-size or more tiles (prepare --tiles) give each some work; without "
                "--strict it is computed all the same",
            )
