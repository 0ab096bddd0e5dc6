"""Sources of events: the built-in simulation, and directories of files of one format each."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import numpy as np

from domainpar.common.problems import Problem
from domainpar.common.words import several
from domainpar.tracking.events.beam_spot import BeamSpot
from domainpar.tracking.events.construct import Candidates, Cuts, build_graph
from domainpar.tracking.events.detector import DEFAULT_LAYER_PAIRS, FIELD_ELSEWHERE, LayerPair
from domainpar.tracking.events.field import Field
from domainpar.tracking.events.graph import EventGraph, Hits, IntArray
from domainpar.tracking.events.kinds import SourceKind
from domainpar.tracking.events.selection import Selection
from domainpar.tracking.events.store import Settings, Split
from domainpar.tracking.events.surfaces import SurfaceRow

if TYPE_CHECKING:
    from domainpar.tracking.events.acorn import AcornOptions

DEFAULT_SIMULATED_EVENTS = 10


@dataclass(frozen=True)
class Source:
    """The events of one origin.

    Attributes:
        names: Names of the events, in order.
        read: Reads or makes one, with candidate edges.
        hits: Reads or makes the hits of one; None where the files are graphs.
        surveyed: The hits of one, with errors as far as files tell them, that the surfaces of the detector are learned
            from (`surfaces.learned_surfaces`) unless they are given; None where they are known.
        learned_from: See `EventStore`.
        unfiltered: Hits and `edge_index` of one before a filter left edges out; None where there was none.
        files: The input files of one, empty for a simulated one.
        settings: All that decides what `read` returns, besides the files; plain JSON values.
        of_event: Settings of one event alone, by its name, which its file keeps as well: its field. None of a name
            that is not of the source.
        splits: Split of each event where the source itself tells; None: events are dealt into splits.
        whole: Name of the event of which the one of a name is all or a sector.
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
    of_event: Callable[[str], Settings] = lambda _: {}


def open_source(
    kind: SourceKind,
    *,
    directory: str | Path | None = None,
    num_events: int | None = None,
    cuts: Candidates | None = None,
    selection: Selection | None = None,
    num_hits: int = 100_000,
    seed: int = 0,
    num_phi_sectors: int = 1,
    acorn: AcornOptions | None = None,
    clusters: bool = False,
    field: Field | None = None,
    beam_spot: BeamSpot | None = None,
    beam_line: tuple[float, float] | None = None,
    surfaces: Sequence[SurfaceRow] | None = None,
) -> Source:
    """List the events of a source.

    Args:
        kind: Of hits or of graphs, see `events.kinds`.
        directory: Where the files are; needed but for `simulate`.
        num_events: Take the first `num_events`. Default: all, or 10 simulated ones.
        cuts: Candidate edges, for sources of hits; by default `Cuts()`, of the source's layer pairs.
        selection: Hits to keep, for sources of hits; by default all.
        num_hits: Hits of a simulated event, about.
        seed: Event i is simulated from seed + i.
        num_phi_sectors: Sectors that a heptrkx event was cut into.
        acorn: Options for acorn files.
        clusters: Features of clusters as well, from the cells of TrackML files.
        field: The field around the hits; None: as `detector.field_of` takes it to be; 2 T of `acts` and `colliderml`.
        beam_spot: Where collisions lie along the beam; None: measured where there is truth.
        beam_line: x and y of the beam in mm, for sources of hits: positions are taken from there on; None: 0, 0.
        surfaces: The surfaces of the detector; None: those of TrackML, or if hits lie elsewhere, `prepare` learns them.

    Raises:
        ValueError: If the source is unknown, its directory holds no events, or fewer than were asked for.
    """
    cuts, selection = cuts or Cuts(layer_pairs=layer_pairs_of(kind)), selection or Selection()
    if kind in ("acts", "colliderml"):  # simulated with ACTS: on TrackML's layers, but never in TrackML's field
        field = field or Field.of(FIELD_ELSEWHERE)
    if kind == "simulate":
        count = DEFAULT_SIMULATED_EVENTS if num_events is None else num_events
        return _simulated(count, seed, num_hits, selection, cuts, field, beam_spot)
    if directory is None:
        raise Problem(f"source {kind} needs the directory of its files", "name it with --input")
    path = Path(directory)
    # Readers are imported when they are used: pandas and torch take seconds to load, and a simulation needs neither.
    if kind == "trackml":
        from domainpar.tracking.events import trackml

        source = _of_hits(
            tuple(trackml.list_events(path)),
            lambda name: trackml.read_event(path, name, clusters),
            lambda name: trackml.event_files(path, name, clusters),
            {"source": kind, **({"cluster_features": True} if clusters else {})},
            selection,
            cuts,
            beam_line,
        )
    elif kind == "acts" and (any(path.glob("event*-measurements.csv*")) or not any(path.rglob("*.parquet"))):
        from domainpar.tracking.events import acts

        names = tuple(acts.list_events(path))
        at_true = acts.at_true_positions(path, names[0])
        source = _of_hits(
            names,
            lambda name: acts.read_event(path, name, at_true),
            lambda name: acts.event_files(path, name),
            {"source": kind, **({"positions": "of true hits"} if at_true else {})},
            selection,
            cuts,
            beam_line,
        )
    elif kind in ("acts", "colliderml"):
        from domainpar.tracking.events.colliderml import ColliderMLEvents

        sample = ColliderMLEvents(path, measured=kind == "acts")
        of_sample = sample.names, sample.read, sample.files, {"source": kind}
        source = _of_hits(*of_sample, selection, cuts, beam_line, sample.with_errors)
    elif kind == "heptrkx":
        from domainpar.tracking.events import heptrkx

        source = Source(
            tuple(heptrkx.list_events(path)),
            lambda name: heptrkx.read_event(path, name, num_phi_sectors),
            lambda name: heptrkx.event_files(path, name),
            {"source": kind, "num_phi_sectors": num_phi_sectors},
            whole=heptrkx.whole_event,
        )
    elif kind == "pyg":
        from domainpar.tracking.events import pyg

        source = Source(
            tuple(pyg.list_events(path)),
            lambda name: pyg.read_event(pyg.event_path(path, name)),
            lambda name: [pyg.event_path(path, name)],
            {"source": kind, "labels": "y, y_NAME"},
        )
    elif kind == "acorn":
        source = _acorn(path, acorn)
    else:
        raise ValueError(f"unknown source {kind!r}; known: {', '.join(get_args(SourceKind))}.")
    if num_events is not None and num_events > len(source.names):
        asked = several(num_events, "event")
        raise Problem(f"{asked} asked for, but {directory} holds {len(source.names)}", "ask for fewer --events")
    settings = {**source.settings, **given_conditions(field, beam_spot, surfaces)}
    return replace(source, names=source.names[:num_events], settings=settings)


def given_conditions(
    field: Field | None, beam_spot: BeamSpot | None, surfaces: Sequence[SurfaceRow] | None = None
) -> dict[str, Any]:
    """What a store's settings keep of the field, the beam spot and the surfaces, where they were given."""
    given: dict[str, Any] = {}
    if field is not None:
        given["field"] = field.to_json()
    if beam_spot is not None:
        given["beam_spot"] = list(beam_spot)
    if surfaces is not None:
        given["surfaces"] = [list(row) for row in surfaces]
    return given


def layer_pairs_of(kind: str) -> tuple[LayerPair, ...]:
    """The pairs of layers that hits of a source are joined between by default."""
    if kind == "colliderml":
        from domainpar.tracking.events.colliderml import LAYER_PAIRS

        return LAYER_PAIRS
    return DEFAULT_LAYER_PAIRS


def _of_hits(
    names: tuple[str, ...],
    hits: Callable[[str], Hits],
    files: Callable[[str], list[Path]],
    settings: Settings,
    selection: Selection,
    cuts: Candidates,
    beam_line: tuple[float, float] | None = None,
    surveyed: Callable[[str], Hits] | None = None,
) -> Source:
    """A source of hits that are selected and joined here."""

    def kept(name: str, read: Callable[[str], Hits] = hits) -> Hits:
        return selection.of(read(name) if beam_line is None else _from_beam(read(name), beam_line))

    settings = {**settings, **selection.settings, **cuts.settings}
    if beam_line is not None:
        settings["beam_line"] = list(beam_line)
    survey = partial(kept, read=surveyed or hits)
    return Source(names, lambda name: build_graph(kept(name), cuts), files, settings, hits=kept, surveyed=survey)


def _from_beam(hits: Hits, beam_line: tuple[float, float]) -> Hits:
    """Hits and vertices with positions from the beam on."""
    away = np.array([*beam_line, 0.0])
    assert hits.position is not None, "sources of hits have positions"
    position = (hits.position - away).astype(hits.position.dtype)
    if (particles := hits.particles) is not None:
        vertex = (particles.vertex - away).astype(particles.vertex.dtype)
        particles = replace(particles, vertex=vertex)
    return replace(hits, position=position, particles=particles)


def _simulated(
    num_events: int,
    seed: int,
    num_hits: int,
    selection: Selection,
    cuts: Candidates,
    field: Field | None,
    beam_spot: BeamSpot | None,
) -> Source:
    from domainpar.tracking.events.simulate import simulate_event

    seeds = {f"{seed + i:09d}": seed + i for i in range(num_events)}

    def hits(name: str) -> Hits:
        return simulate_event(seeds[name], num_hits, name, field, beam_spot)

    settings = {"source": "simulate", "num_hits": num_hits, **given_conditions(field, beam_spot)}
    return replace(_of_hits(tuple(seeds), hits, lambda _: [], settings, selection, cuts), surveyed=None)


def _acorn(directory: Path, options: AcornOptions | None) -> Source:
    from domainpar.tracking.events import acorn

    events = acorn.find_events(directory)
    paths = {name: event.path for name, event in events.items()}
    options = options or acorn.AcornOptions()
    if options.pt_unit is None:
        # One unit for all events: guessed anew for each, a small event could differ.
        options = replace(options, pt_unit=acorn.guess_pt_unit(paths.values()))
    splits = {name: event.split for name, event in events.items() if event.split is not None}
    return Source(
        tuple(paths),
        lambda name: acorn.read_event(paths[name], options),
        lambda name: [paths[name]],
        {"source": "acorn", **json.loads(json.dumps(asdict(options)))},  # tuples become lists, as in a manifest
        splits or None,
        surveyed=lambda name: acorn.read_event(paths[name], options).hits,
    )
