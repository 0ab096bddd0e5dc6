"""The events that benchmarks run on: simulated ones by name, always the same for one seed, or real ones from a folder.

A case is prepared once, into a store in the cache folder, and found there the next time.
"""

from __future__ import annotations

import argparse
import getpass
import hashlib
import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from domainpar.tracking.events.construct import Cuts
from domainpar.tracking.events.preparation import prepare
from domainpar.tracking.events.sources import Events, open_source
from domainpar.tracking.events.store import EventRecord, EventStore
from domainpar.tracking.events.store.schema import SCHEMA_VERSION

HITS = {"tiny": 2_000, "small": 9_000, "medium": 30_000, "large": 100_000, "full": 170_000}
"""Hits of each case; at the default cuts 1e3, 1e4, 1e5, 1e6 and 3e6 candidate edges. `large` is a TrackML event."""

CACHE = Path(tempfile.gettempdir()) / f"domainpar-bench-{getpass.getuser()}"


@dataclass(frozen=True)
class Case:
    """Some prepared events.

    Attributes:
        name: Simulated or real, how many hits, which seed: what a JSON line calls it.
        store: Where they lie.
    """

    name: str
    store: Path

    @property
    def record(self) -> EventRecord:
        """The first of them, the only one for most benchmarks."""
        return EventStore(self.store).events()[0]

    def __str__(self) -> str:
        record = self.record
        return f"{self.name}: {record.num_nodes:,} nodes, {record.num_edges:,} edges, {record.num_tiles} tiles"


def add_flags(
    parser: argparse.ArgumentParser,
    case: str,
    events: int = 1,
    partitioner: str | None = "phi-eta",
    sizes: Sequence[int] = (),
) -> None:
    """Add the flags that say which events; `chosen_case` reads them.

    With `sizes` of events there is no default case, but an event with each of these hits; `chosen_cases` reads them.
    """
    group = parser.add_argument_group("events")
    if sizes:
        group.add_argument("--case", choices=HITS, help="one simulated event of this size")
        default = f"default {' '.join(map(str, sizes))}"
        group.add_argument("--hits", type=int, nargs="+", default=list(sizes), help=f"of simulated ones ({default})")
    else:
        group.add_argument("--case", choices=HITS, default=case, help=f"simulated events of this size (default {case})")
        group.add_argument("--hits", type=int, help="hits of a simulated event, instead of --case")
    group.add_argument("--num-events", type=int, default=events, help=f"how many (default {events})")
    group.add_argument("--data", type=Path, help="folder of real TrackML events, CSV, instead of simulated ones")
    group.add_argument("--event", nargs="+", help="which of them, by the end of their names; default: the first")
    if partitioner is not None:
        group.add_argument("--partitioner", default=partitioner, help=f"how tiles are cut (default {partitioner})")
    group.add_argument("--tiles", type=int, help="tiles of an event; default: some 4,600 edges each")
    group.add_argument("--seed", type=int, default=0, help="of the simulation, of the partitioner and of the network")
    group.add_argument("--phi-slope", type=float, default=6e-4, help="cut on candidate edges in rad/mm")
    group.add_argument("--z0", type=float, default=200.0, help="cut on candidate edges in mm")
    group.add_argument("--cache", type=Path, default=CACHE, help="where prepared events are kept")


def chosen_case(options: argparse.Namespace, val_split: float = 0.0) -> Case:
    """Prepare what the flags ask for, unless it lies in the cache; says so, for it takes a while."""
    source = source_of(options)
    how = {"partitioner": options.partitioner, "num_tiles": options.tiles, "seed": options.seed, "val_split": val_split}
    # Whatever decides the content of a store is in its name: another setting never finds it.
    content = [SCHEMA_VERSION, source.names, dict(source.settings), how, str(options.data)]
    settings = json.dumps(content, sort_keys=True)
    digest = hashlib.sha256(settings.encode()).hexdigest()[:10]
    name = f"hits{options.hits}-seed{options.seed}" if options.hits else f"{options.case}-seed{options.seed}"
    if options.data is not None:
        name = f"real-{'-'.join(options.event or ['first'])}"
    directory = options.cache / f"{name}-{digest}"
    print(f"events: {name} ({len(source.names)}), kept in {directory}", file=sys.stderr, flush=True)
    prepare(source, directory, test_split=0.0, **how)
    return Case(name, directory)


def chosen_cases(options: argparse.Namespace) -> list[Case]:
    """The cases of several sizes: simulated ones by hits, or the one that was named instead."""
    one = options.data is not None or options.case is not None
    return [
        chosen_case(argparse.Namespace(**vars(options) | {"hits": hits})) for hits in ([None] if one else options.hits)
    ]


def source_of(options: argparse.Namespace) -> Events:
    cuts = Cuts(phi_slope=options.phi_slope, z0=options.z0)
    if options.data is None:
        hits = options.hits or HITS[options.case]
        return open_source("simulate", num_events=options.num_events, cuts=cuts, num_hits=hits, seed=options.seed)
    source = open_source("trackml", directory=options.data, cuts=cuts)
    return replace(source, names=chosen_names(source.names, options.event, options.num_events))


def chosen_names(known: Sequence[str], wanted: Sequence[str] | None, count: int) -> tuple[str, ...]:
    """The events that were asked for by the end of their names: 1012 finds event000001012."""
    if wanted is None:
        return tuple(known[:count])
    names = tuple(name for end in wanted for name in known if name.endswith(end))
    if len(names) != len(wanted):
        raise SystemExit(f"events {' '.join(wanted)} match {list(names)} of {list(known)}; name each event once.")
    return names
