"""The values of events and the quality of their candidate edges: few numbers, looked at by a person.

Units and detectors are guessed from the values, and what looks odd is a warning. What leaves hardly an edge is refused.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from domainpar.common.problems import Problem
from domainpar.common.words import between, several, some_of
from domainpar.tracking.events import detector
from domainpar.tracking.events.graph import FloatArray, Hits, IntArray, surface_numbers
from domainpar.tracking.events.store import Settings
from domainpar.tracking.events.truth_order import rows_of_table
from domainpar.tracking.reco.performance.lost import FEW_SEGMENTS, count_segments
from domainpar.tracking.reco.performance.matching import DEFAULT_TARGET, TrackCuts
from domainpar.tracking.reco.performance.truth import EventTruth
from domainpar.tracking.reco.truth_check import Frame, mistakes, rows_of_hits

FAR = 10_000.0
"""Coordinate in mm that no tracker reaches."""

INNERMOST = 30.0
"""Below the radius of any tracker's first layer but the very smallest, in mm."""

UNITS = {0.1: "cm", 0.001: "m", 1000.0: "µm"}
"""Factors on a position in mm that is written in another unit."""

MOST_FILTERED = 0.03
"""Share of the segments in a graph that a filter may leave out; the shipped ones lose 0.018 on events of their kind."""

PT_LEVELS = (0.05, 0.5, 0.95)
NO_BREAK = "\N{NO-BREAK SPACE}"


@dataclass(frozen=True, kw_only=True)
class EventFacts:
    """The contents of one event; plain values, so that it travels as JSON. None where the source does not say.

    Attributes:
        event: Its name.
        hits: Hits.
        edges: Candidate edges.
        true_edges: Those with label 1.
        layers: Volume, layer and hits of each layer with hits; empty where hits have none.
        radius: Smallest, median and largest radius of a hit in mm; None also without hits.
        length: Median and largest |z| in mm; None also without hits.
        scale: Median of the hits' places over those of their TrackML layers: 1 in mm; None without such layers.
        polar: Whether x, y of all hits could be their r, phi.
        far: Hits of which a coordinate is beyond `FAR`.
        on_beam: Hits at x = y = 0.
        at_one_point: Whether there are several hits, all at one place.
        noise: Hits of no particle.
        seen: Particles that left hits.
        pt: Quantiles `PT_LEVELS` of their pT in GeV, of those whose pT is known.
        without_pt: Those of which it is not known, where it is of others.
        other_nhits: Those whose `nhits` in the particle table is not what their hits count.
        targets: Those that meet the conditions on targets.
        segments: Segments of the targets (`reco.performance.lost.SEGMENT`); of all particles without targets.
        in_graph: Those of them that are candidate edges.
        unfiltered: Those that were before a filter; None without one.
        rows: Particles against their hits (`truth_check`), None for NaN.
        tesla: B_z of the field, where it is the same everywhere.
    """

    event: str
    hits: int
    edges: int
    true_edges: int | None = None
    layers: Sequence[Sequence[int]] = ()
    radius: Sequence[float] | None = None
    length: Sequence[float] | None = None
    scale: float | None = None
    polar: bool = False
    far: int = 0
    on_beam: int = 0
    at_one_point: bool = False
    noise: int | None = None
    seen: int | None = None
    pt: Sequence[float] | None = None
    without_pt: int = 0
    other_nhits: int = 0
    targets: int | None = None
    segments: int | None = None
    in_graph: int | None = None
    unfiltered: int | None = None
    rows: Sequence[Sequence[float | None]] = ()
    tesla: float | None = None


def facts_of(
    hits: Hits,
    edge_index: IntArray,
    label: IntArray | None,
    unfiltered: Callable[[str], tuple[Hits, IntArray]] | None = None,
    settings: Settings | None = None,
    target: Mapping[str, Any] = DEFAULT_TARGET,
) -> EventFacts:
    """Look at an event; the same in any order of its hits and edges.

    Args:
        hits: Its hits.
        edge_index: `src` and `dst` of each candidate edge, [2, E].
        label: 1 for true ones, [E]; None when there is no truth.
        unfiltered: See `Source`.
        settings: Those it was prepared with, with the field.
        target: Conditions on target particles.
    """
    surfaces, surface = np.unique(surface_numbers(hits.volume, hits.layer), return_inverse=True)
    values: dict[str, Any] = {}
    if surfaces.any():
        counts = np.bincount(surface, minlength=len(surfaces))
        layers = np.stack([surfaces >> 32, surfaces & 0xFFFFFFFF, counts], axis=1)
        values["layers"] = layers.tolist()
    if hits.position is not None and len(hits):
        values |= _position_facts(hits.position, surfaces, surface)
    if label is not None:
        values["true_edges"] = int(np.count_nonzero(label > 0))
    if hits.particle_id is not None:
        truth = EventTruth(hits.particle_id, surface, position=hits.position, particles=hits.particles)
        values |= _particle_facts(truth, target)
        field = detector.field_of(settings or {}, hits.volume, hits.layer)
        rows = rows_of_hits(hits, field).tolist()
        values["rows"] = [[value if np.isfinite(value) else None for value in row] for row in rows]  # as JSON has it
        values["tesla"] = Frame.of(field, {}).tesla
        held = count_segments(truth, edge_index, {} if values["targets"] is None else target)
        if held is not None:
            values |= {"segments": held.segments, "in_graph": held.in_graph}
            if unfiltered is not None:
                before = facts_of(*unfiltered(hits.event_id), None, settings=settings, target=target)
                values["unfiltered"] = before.in_graph
    return EventFacts(event=hits.event_id, hits=len(hits), edges=edge_index.shape[1], **values)


def _position_facts(position: FloatArray, surfaces: IntArray, surface: IntArray) -> dict[str, Any]:
    r, z = np.hypot(position[:, 0], position[:, 1]), np.abs(position[:, 2])
    along_r, along_z = np.zeros(len(surfaces)), np.zeros(len(surfaces))
    for sensitive in detector.SURFACES:
        rows = surfaces == surface_numbers(np.array(sensitive.volume), np.array(sensitive.layer))
        along = along_r if sensitive.is_barrel else along_z
        along[rows] = 1 / abs(sensitive.coordinate)
    place = r * along_r[surface] + z * along_z[surface]
    place = place[(along_r + along_z)[surface] > 0]
    return {
        "radius": [float(np.min(r)), float(np.median(r)), float(np.max(r))],
        "length": [float(np.median(z)), float(np.max(z))],
        "scale": float(np.median(place)) if len(place) else None,
        "polar": bool(position[:, 0].min() >= 0 and np.abs(position[:, 1]).max() <= 2 * np.pi and r.max() > INNERMOST),
        "far": int(np.sum(np.abs(position).max(axis=1) > FAR)),
        "on_beam": int(np.sum(r == 0)),
        "at_one_point": len(position) > 1 and bool((position == position[0]).all()),
    }


def _particle_facts(truth: EventTruth, target: Mapping[str, Any]) -> dict[str, Any]:
    particle_id, particles = truth.particle_id, truth.particles
    seen, count = np.unique(particle_id[particle_id != 0], return_counts=True)
    values: dict[str, Any] = {"noise": int(np.sum(particle_id == 0)), "seen": len(seen)}
    try:
        values["targets"] = int(np.sum(truth.targets_among(seen, target)))
    except ValueError:  # the table lacks a quantity of the conditions
        values["targets"] = None
    pt, nhits = (rows_of_table(particles, seen, name) for name in ("pt", "nhits"))
    momenta = pt[np.isfinite(pt)].astype(np.float32)  # as tables hold it
    if len(momenta):
        values["pt"] = [float(level) for level in np.quantile(momenta, PT_LEVELS)]
        values["without_pt"] = len(seen) - len(momenta)
    values["other_nhits"] = int(np.sum(np.isfinite(nhits) & (nhits != count)))
    return values


# --- lines about a store ---------------------------------------------------------------------------------------------


def described(facts: Sequence[EventFacts], settings: Settings, target: Mapping[str, Any] = DEFAULT_TARGET) -> list[str]:
    """Lines about the values of a store's events, warnings last.

    Args:
        facts: Of its events, in their order.
        settings: Those it was prepared with.
        target: Conditions on the target particles that were counted.
    """
    conditions = TrackCuts(target=target).target_text
    lines = [*_hits(facts), *_particles(facts, conditions), *_edges(facts)]
    if unlabelled := [event for event in facts if event.true_edges is None]:
        names = some_of([event.event for event in unlabelled])
        lines.append(f"truth of edges: none in {len(unlabelled)} of {several(len(facts), 'event')}: {names}")
    oddities = _oddity_lines(facts, lambda event: _odd_truth(event, conditions))
    return [*lines, *(f"WARNING: {text}" for text in (*_causes(facts, settings), *oddities, *_few(facts)))]


def too_few_segments(facts: Sequence[EventFacts], settings: Settings, least: float) -> Problem | None:
    """Why events have hardly an edge to find tracks with, with the likeliest cause; None where they have enough.

    Args:
        facts, settings: As for `described`.
        least: Share of the segments of targets that must be candidate edges; 0: none at all will do.
    """
    held, segments = _held(facts)
    joined = any(name in settings for name in ("layer_pairs", "module_map", "embedding"))
    if joined and least and any(event.hits for event in facts) and not any(event.edges for event in facts):
        what = f"no candidate edge in {several(len(facts), 'event')}"
    elif segments and held < least * segments:
        what = f"only {held / segments:.1%} of {segments:,} true segments of target particles are candidate edges"
    else:
        return None
    learned = [name.replace("_", " ") for name in ("module_map", "embedding") if name in settings]
    of_edges = (
        f"their {learned[0]} makes too few, or was learned from other events" if learned else "cuts are too tight"
    )
    causes = [*_causes(facts, settings), of_edges]
    return Problem(f"{what}: {causes[0]}", "--least-segments 0 makes the store all the same")


def _hits(facts: Sequence[EventFacts]) -> list[str]:
    """How far out hits lie, and how many each volume has."""
    lines = []
    placed = [event for event in facts if event.radius is not None and event.length is not None]
    if placed:
        least, middle, most = np.array([event.radius for event in placed]).T
        usual, longest = np.array([event.length for event in placed]).T
        lines.append(
            f"hits: radius {least.min():,.4g} to {most.max():,.4g} mm, median {np.median(middle):,.4g}; "
            f"|z| up to {longest.max():,.4g} mm, median {np.median(usual):,.4g}"
        )
    layers: dict[int, dict[int, int]] = {}
    for event in facts:
        for volume, layer, count in event.layers:
            of_volume = layers.setdefault(volume, {})
            of_volume[layer] = of_volume.get(layer, 0) + count
    if layers:
        texts = (
            f"volume {volume}: {sum(hits.values()) / len(facts):,.0f} in {several(len(hits), 'layer')}"
            for volume, hits in sorted(layers.items())
        )
        # Blanks that do not break, while lines are broken: between volumes only.
        text = f"hits per event, by volume: {'; '.join(text.replace(' ', NO_BREAK) for text in texts)}"
        lines += [line.replace(NO_BREAK, " ") for line in textwrap.wrap(text, 118, subsequent_indent="  ")]
    return lines


def _particles(facts: Sequence[EventFacts], target: str) -> list[str]:
    with_targets = [event for event in facts if event.targets is not None]
    if not with_targets:
        any_truth = any(event.seen is not None for event in facts)
        return [f"particles: no pT is known, so there is no target particle ({target})"] if any_truth else []
    targets = between([event.targets or 0 for event in with_targets], "target particle")
    lines = [f"particles: {targets} per event ({target})"]
    pt = np.array([event.pt for event in with_targets if event.pt is not None])
    if len(pt):
        values = ", ".join(f"{value:,.4g}" for value in np.median(pt, axis=0))
        levels = ", ".join(f"{level:.0%}" for level in PT_LEVELS)
        lines.append(f"pT of particles with hits: {values} GeV (quantiles at {levels})")
    return lines


def _edges(facts: Sequence[EventFacts]) -> list[str]:
    labelled = [event for event in facts if event.true_edges is not None]
    edges, true = sum(event.edges for event in labelled), sum(event.true_edges or 0 for event in labelled)
    if not edges:
        return []
    lines = [f"edges: {true:,} of {edges:,} candidate edges are true ({true / edges:.1%})"]
    segments = sum(event.segments or 0 for event in labelled)
    if segments:
        held = sum(event.in_graph or 0 for event in labelled)
        targets_known = all(event.targets is not None for event in labelled if event.segments)
        whose = "target particles" if targets_known else "particles"
        lines.append(f"segments: {held / segments:.1%} of {segments:,} true segments of {whose} are candidate edges")
    return lines


# --- oddities --------------------------------------------------------------------------------------------------------

_TRACKML_PAIRS = [[list(end) for end in pair] for pair in detector.DEFAULT_LAYER_PAIRS]  # as settings have them


class _Oddity(NamedTuple):
    """An oddity of an event: its rank among the lines, its kind, the values seen, and the consequence."""

    rank: int
    what: str
    values: str = ""
    so: str = ""


def _odd_places(event: EventFacts) -> Iterator[_Oddity]:
    """Positions in another unit, of another detector, or of none."""
    if event.at_one_point:
        yield _Oddity(0, "all hits at one point")
    elif event.scale is not None:
        seen = f"hits at {event.scale:.3g} times the places of their TrackML layers"
        if unit := next((name for factor, name in UNITS.items() if 0.8 < event.scale / factor < 1.25), None):
            yield _Oddity(0, f"positions look like {unit}, not mm,", seen)
        elif not 0.5 < event.scale < 2:
            yield _Oddity(0, "hits are not where TrackML's layers are", seen, "another detector needs --layer-pairs")
    elif event.radius is not None and event.length is not None:
        farthest = max(event.radius[2], event.length[1])
        if 0 < farthest < INNERMOST:
            yield _Oddity(0, "positions look like cm or m, not mm,", f"no hit beyond {farthest:.3g} mm")
    if event.far:
        yield _Oddity(1, f"hits beyond {FAR / 1000:.0f} m", f"{event.far:,} of {event.hits:,}")
    if event.on_beam:
        yield _Oddity(2, "hits on the beam line, x = y = 0,", f"{event.on_beam:,} of {event.hits:,}")
    if event.polar and event.radius is not None:
        seen = f"0 <= x <= {event.radius[2]:.4g}, |y| < 2 pi"
        yield _Oddity(0, "x, y look like r, phi of hits", seen, "write x and y in mm")


def _odd_truth(event: EventFacts, target: str) -> Iterator[_Oddity]:
    """The first link that is missing in the chain from hits to target particles; momenta and hits that do not fit."""
    if event.hits == 0:
        yield _Oddity(3, "no hits")
    elif event.noise == event.hits:
        yield _Oddity(3, "all hits noise")
    elif event.edges == 0:
        yield _Oddity(3, "no candidate edge")
    elif event.true_edges == 0:
        yield _Oddity(3, "no true edge", f"of {several(event.edges, 'candidate edge')}")
    elif event.targets == 0:
        yield _Oddity(3, f"no target particle ({target})")
    with_hits = f"of {several(event.seen or 0, 'particle')} with hits"
    if event.without_pt:
        values = f"{event.without_pt:,} {with_hits}"
        yield _Oddity(5, "momenta missing in the particle table", values, "they meet no condition on pt")
    if event.other_nhits:
        values = f"{event.other_nhits:,} {with_hits}"
        what = "nhits of the particle table is not the number of hits with this particle_id"
        yield _Oddity(6, what, values, "--target of train uses the table, --track-target of infer counts hits")


def _held(facts: Sequence[EventFacts]) -> tuple[int, int]:
    """Segments of targets that are candidate edges, and all."""
    labelled = [event for event in facts if event.true_edges is not None and event.targets is not None]
    return sum(event.in_graph or 0 for event in labelled), sum(event.segments or 0 for event in labelled)


def _few(facts: Sequence[EventFacts]) -> list[str]:
    """That few segments are candidate edges, or that a filter left out many of those that it was given."""
    held, all_of_them = _held(facts)
    lost = f"{all_of_them - held:,} of {all_of_them:,} true segments of target particles are no candidate edges"
    few = f"{lost} ({held / max(all_of_them, 1):.1%} are): no network finds them"
    filtered = [event for event in facts if event.unfiltered is not None]
    segments, before, left = (
        sum(getattr(event, name) for event in filtered) for name in ("segments", "unfiltered", "in_graph")
    )
    lines = [few] if held < FEW_SEGMENTS * all_of_them else []
    if not before or left >= (1 - MOST_FILTERED) * before:
        return lines
    return [
        *lines,
        f"the filter lost {1 - left / before:.1%} of the true segments that its graph had: of "
        f"{segments:,}, {before / segments:.1%} were candidate edges, {left / segments:.1%} are left; lower "
        "--min-score, or train a filter on such events",
    ]


def _causes(facts: Sequence[EventFacts], settings: Settings) -> list[str]:
    """What makes events lack segments: layers, positions and momenta that do not belong together."""
    lines, pairs = [], settings.get("layer_pairs")
    if pairs not in (None, _TRACKML_PAIRS):
        # Of all events together: one may have no hits on a layer, all rarely have none.
        present = {(volume, layer) for event in facts for volume, layer, _ in event.layers}
        missing = sorted({(volume, layer) for pair in pairs for volume, layer in pair} - present)
        if missing and facts:
            names = ", ".join(f"{volume}.{layer}" for volume, layer in missing)
            turned = all((layer, volume) in present for volume, layer in missing)
            lines.append(
                f"--layer-pairs names layers without a hit in any event: {names}"
                + "; volume and layer look swapped" * turned
            )
        facts = [replace(event, scale=None) for event in facts]  # its layers may be named as TrackML's, and are not
    # A plain graph may lie anywhere, on a sphere of radius 1 too.
    places = [] if settings.get("source") == "pyg" else _oddity_lines(facts, _odd_places)
    rows = [row for event in facts for row in event.rows]
    if places or not rows:
        return [*lines, *places]
    frame = Frame(next(event.tesla for event in facts if event.rows), settings.get("beam_line", (0.0, 0.0)))
    return [*lines, *mistakes(np.array(rows, float), frame)]


def _oddity_lines(facts: Sequence[EventFacts], odd: Callable[[EventFacts], Iterator[_Oddity]]) -> list[str]:
    """One line for each kind of oddity: in how many events, and the values of the first of them."""
    oddities: dict[str, list[tuple[str, _Oddity]]] = {}
    for event in facts:
        for oddity in odd(event):
            oddities.setdefault(oddity.what, []).append((event.event, oddity))
    lines = []
    for (name, first), *others in sorted(oddities.values(), key=lambda events: events[0][1].rank):
        values, so = (f"{mark}{text}" if text else "" for mark, text in ((", ", first.values), ("; ", first.so)))
        count = f"{1 + len(others)} of {several(len(facts), 'event')}"
        lines.append(f"{first.what} in {count} (first: {name}{values}){so}")
    return lines
