"""The way from the files of a source to events: listing, tables, and what its module makes of them, then selection and
candidate edges. `source_table` names the sources; the module of each has its `SOURCE`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from domainpar.common.problems import EventPlace, Problem
from domainpar.common.words import several
from domainpar.tracking.events.beam_spot import BeamSpot
from domainpar.tracking.events.construct import Candidates, Cuts, build_graph
from domainpar.tracking.events.detector import DEFAULT_LAYER_PAIRS, LayerPair
from domainpar.tracking.events.field import Field
from domainpar.tracking.events.graph import EventGraph, Hits, IntArray
from domainpar.tracking.events.selection import Selection
from domainpar.tracking.events.source_table import SOURCES
from domainpar.tracking.events.store import Settings, Split
from domainpar.tracking.events.surfaces import SurfaceRow
from domainpar.tracking.events.tables import InputTable, list_files

if TYPE_CHECKING:
    from domainpar.tracking.events.csv_tables import Frame

Options = Mapping[str, Any]


@dataclass(frozen=True)
class Events:
    """The events of one origin, ready to be prepared.

    Attributes:
        names: Names of the events, in order.
        read: Reads or makes one, with candidate edges.
        files: The input files of one, empty for a simulated one.
        settings: All that decides what `read` returns, besides the files; plain JSON values.
        splits: Split of each event where the source has them; None: events are dealt into splits.
        whole: Name of the event of which the one of a name is all or a sector.
        hits: Reads or makes the hits of one; None where the files are graphs.
        surveyed: The hits of one, with errors as far as files have them, that the surfaces of the detector are learned
            from (`surfaces.learned_surfaces`) unless they are given; None where they are known.
        learned_from: See `EventStore`.
        unfiltered: Hits and `edge_index` of one before a filter left edges out; None where there was none.
        event_settings: Settings of one event alone, by its name, which its file keeps as well: its field. None of a
            name that is not of the source.
    """

    names: tuple[str, ...]
    read: Callable[[str], EventGraph]
    files: Callable[[str], list[Path]]
    settings: Settings
    splits: Mapping[str, Split] | None = None
    whole: Callable[[str], str] = str
    hits: Callable[[str], Hits] | None = None
    surveyed: Callable[[str], Hits] | None = None
    learned_from: Mapping[str, str] | None = None
    unfiltered: Callable[[str], tuple[Hits, IntArray]] | None = None
    event_settings: Callable[[str], Settings] = lambda _: {}


class InputFiles(NamedTuple):
    """The files of one event, as the module of a source reads them.

    Attributes:
        event: Its name.
        directory: Where they lie.
        listed: The file by which it was listed, of the first table.
    """

    event: str
    directory: Path
    listed: Path

    @property
    def place(self) -> EventPlace:
        """The event and this file, for errors."""
        return EventPlace(self.event, self.listed)

    def read(
        self, table: InputTable, needed: Sequence[str] = (), unique: Sequence[str] = ()
    ) -> tuple[Frame, EventPlace] | None:
        """The columns of a CSV file and its place for errors (`csv_tables.read_table`); None where there is none."""
        from domainpar.tracking.events.csv_tables import read_table  # which loads pandas

        if (path := table.find(self.directory, self.event)) is None:
            return None
        return read_table(table, path, self.event, needed, unique), EventPlace(self.event, path)


@dataclass(frozen=True)
class Source:
    """How events of one format are listed and read.

    Attributes:
        read: Given the files of an event and the options by name, returns its `Hits`, or its `EventGraph` (through
            `graph.checked`). What is wrong in a file is a `Problem` of its `EventPlace`. None where `opens` lists.
        tables: The files of an event; the first, of which each event has one, lists them.
        what: The events, in words: `TrackML events`.
        options: Options of the reader with their defaults; flags of these names set them.
        settings: What the store keeps of the options, all that decides the result: plain JSON values.
        settle: The options where files decide some, alike for all events.
        hint: What to do where a directory holds no event; "": the names of files that are expected.
        folders: Folders that a directory may have, and the split of the events in each.
        whole: See `Events`.
        opens: The events, in place of all that, where they have no file each; None for other files. Besides the options
            there are `num_events` and `conditions`. Sources of hits `read` hits.
        layer_pairs: Pairs of layers that hits are joined between by default.
        default_field: The field, unless one is given; None: as `detector.field_of` takes it to be.
        learns_surfaces: Whether surfaces may be learned from its hits: not if they are known, or hits have no layers.
    """

    read: Callable[..., Any] | None
    tables: tuple[InputTable, ...] = ()
    what: str = "events"
    options: Options = field(default_factory=dict)
    settings: Callable[[Options], Settings] = lambda options: {}
    settle: Callable[[Sequence[InputFiles], Options], Options] = lambda files, options: options
    hint: Callable[[Path], str] = lambda directory: ""
    folders: Mapping[str, Split] = field(default_factory=dict)
    whole: Callable[[str], str] = str
    opens: Callable[[Path, Options], Events | None] = lambda directory, options: None
    layer_pairs: tuple[LayerPair, ...] = DEFAULT_LAYER_PAIRS
    default_field: Field | None = None
    learns_surfaces: bool = True

    def listed(self, directory: Path) -> tuple[dict[str, InputFiles], dict[str, Split]]:
        """The files of each event of a directory by its name, and its split where it lies in a folder of one.

        Raises:
            Problem: If the directory does not exist or holds no events, or two files are of one event.
        """
        if not directory.is_dir():
            raise Problem(f"{directory} is not a directory", f"name the one that holds the {self.what}")
        folders = {directory / name: split for name, split in self.folders.items() if (directory / name).is_dir()}
        listed = [(folder, *file) for folder in folders or [directory] for file in list_files(folder, self.tables)]
        events: dict[str, InputFiles] = {}
        for folder, event, path in listed:
            if event in events:
                what = f"{path} and {events[event].listed} are of one event by their names"
                raise Problem(what, "remove one of the two", event=event)
            events[event] = InputFiles(event, folder, path)
        if not events:
            expected = " or ".join(name.format("000001001") for name in self.tables[0].names)
            hint = self.hint(directory) or f"expected are files like {expected}"
            raise Problem(f"{', '.join(map(str, folders or [directory]))} holds no {self.what}", hint)
        return events, {event: folders[folder] for folder, event, _ in listed if folders}

    def open(self, directory: Path, options: Options, **further: Any) -> Events:
        """The events of a directory; those of sources of hits are not selected and joined yet."""
        if (opened := self.opens(directory, {**options, **further})) is not None:
            return opened
        read = self.read
        assert read is not None  # else `opens` lists
        events, splits = self.listed(directory)
        settled = self.settle([*events.values()], options)

        def files(name: str) -> list[Path]:
            tables = [table for table in self.tables[1:] if table.only_with is None or settled[table.only_with]]
            others = [table.find(events[name].directory, name) for table in tables]
            return [events[name].listed, *filter(None, others)]

        return Events(
            tuple(events),
            lambda name: read(events[name], **settled),
            files,
            self.settings(settled),
            splits or None,
            self.whole,
        )


@dataclass(frozen=True)
class DetectorConditions:
    """What is given of the detector, and kept by a store; None: not given.

    Attributes:
        field: The field around the hits.
        beam_spot: Where collisions lie along the beam; else it is measured where there is truth.
        surfaces: The surfaces of the detector; else those of TrackML, or if hits lie elsewhere, learned ones.
        beam_line: x and y of the beam in mm, for sources of hits: positions are taken from there on.
    """

    field: Field | None = None
    beam_spot: BeamSpot | None = None
    surfaces: Sequence[SurfaceRow] | None = None
    beam_line: tuple[float, float] | None = None

    @property
    def settings(self) -> dict[str, Any]:
        """Those that are given, as plain JSON values."""
        values: dict[str, Any] = {
            "beam_line": self.beam_line and [*self.beam_line],
            "field": self.field and self.field.to_json(),
            "beam_spot": self.beam_spot and [*self.beam_spot],
            "surfaces": self.surfaces and [[*row] for row in self.surfaces],
        }
        return {name: value for name, value in values.items() if value is not None}

    def from_beam(self, hits: Hits) -> Hits:
        """Hits and vertices with positions from the beam on."""
        if self.beam_line is None:
            return hits
        away = np.array([*self.beam_line, 0.0])
        assert hits.position is not None, "sources of hits have positions"
        position = (hits.position - away).astype(hits.position.dtype)
        if (particles := hits.particles) is not None:
            vertex = (particles.vertex - away).astype(particles.vertex.dtype)
            particles = replace(particles, vertex=vertex)
        return replace(hits, position=position, particles=particles)


def find_source(name: str) -> Source:
    """The source of a name, except those that read stores.

    Raises:
        ValueError: If there is none.
    """
    known = [source for source, row in SOURCES.items() if row.gives != "stores"]
    if name not in known:
        raise ValueError(f"unknown source {name!r}; known: {', '.join(known)}.")
    # Modules are imported when they are used: pandas and torch take seconds to load, and a simulation needs neither.
    source: Source = import_module(f"domainpar.tracking.events.{name}").SOURCE
    return source


def open_source(
    name: str,
    directory: str | Path | None = None,
    *,
    num_events: int | None = None,
    cuts: Candidates | None = None,
    selection: Selection | None = None,
    conditions: DetectorConditions | None = None,
    **options: Any,
) -> Events:
    """List the events of a source.

    Args:
        name: Of `source_table.SOURCES`.
        directory: Where the files are; needed but for `simulate`.
        num_events: Take the first `num_events`. Default: all, or 10 simulated ones.
        cuts: Candidate edges, for sources of hits; by default `Cuts()`, of the source's layer pairs.
        selection: Hits to keep, for sources of hits; by default all.
        conditions: What is given of the detector.
        options: Of the source (`Source.options`).

    Raises:
        ValueError: If the source or an option is unknown, its directory holds no events, or fewer than `num_events`.
    """
    source, conditions = find_source(name), conditions or DetectorConditions()
    conditions = replace(conditions, field=conditions.field or source.default_field)
    if unknown := sorted(options.keys() - source.options.keys()):
        raise ValueError(f"source {name} has no option {unknown[0]}; it has {', '.join(source.options) or 'none'}.")
    if source.tables and directory is None:
        raise Problem(f"source {name} needs the directory of its files", "name it with --input")
    directory = Path(directory or "")
    opened = source.open(directory, {**source.options, **options}, num_events=num_events, conditions=conditions)
    if num_events is not None and num_events > len(opened.names):
        number = several(num_events, "event")
        raise Problem(f"{number} asked for, but {directory} holds {len(opened.names)}", "ask for fewer --events")
    select, join = selection or Selection(), cuts or Cuts(layer_pairs=source.layer_pairs)
    of_hits, survey = SOURCES[name].gives == "hits", opened.surveyed or opened.read

    def kept(event: str, read: Callable[[str], Any] = opened.read) -> Hits:
        return select.select(conditions.from_beam(read(event)))

    def surveyed(event: str) -> Hits:
        return kept(event, survey) if of_hits else opened.read(event).hits

    joining = {**select.settings, **join.settings} if of_hits else {}
    return replace(
        opened,
        names=opened.names[:num_events],
        read=(lambda event: build_graph(kept(event), join)) if of_hits else opened.read,
        settings={"source": name, **opened.settings, **joining, **conditions.settings},
        hits=kept if of_hits else None,
        surveyed=surveyed if source.learns_surfaces else None,
    )
