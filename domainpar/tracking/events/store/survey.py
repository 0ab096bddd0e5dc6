"""What the events of a store have in common, in few numbers: a run keeps those of its own, and `infer` compares."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from domainpar.nn.standard import FeatureSums
from domainpar.tracking.events.detector import field_of
from domainpar.tracking.events.field import Field
from domainpar.tracking.events.store.event import StoredEvent
from domainpar.tracking.events.store.layout import EventRecord, Settings

LEVELS = (0.05, 0.5, 0.95)
"""Quantiles of a feature, in each event."""

ETAS = np.linspace(-3, 3, 13)
"""Directions along which fields are compared."""

# When events are others than those of a training. Among 14 simulated ones and six of TrackML, quantiles differ by 0.05
# of the distance of the outer two; by 0.37 where collisions lie within 30 mm (sigma) in place of 5.
MARGIN, OTHER_FIELD, OTHER_LAYERS, OTHER_LEVEL = 10.0, 0.05, 0.02, 0.25
"""One collision in 20 is farther out than three widths of the beam spot and these mm; tracks of one direction are bent
otherwise by this share of the most; this share of the hits is on layers that the others have none on; a quantile is off
by so many distances."""

FEW, TOO_FEW = 5_000, 1_000
"""Small events differ by chance: with so few hits each margin, but of fields, is twice as wide; and without end."""

UNLIKE = 2.0
"""They have more than this times the hits, or candidate edges a hit, or less than it."""


class EventSurvey(NamedTuple):
    """One event, read from end to end; plain values, so that it travels as JSON.

    Attributes:
        nodes, edges: Sums of their features.
        levels: Quantiles `LEVELS` of each node feature, then of each edge feature; none in an event without rows.
        layers: Hits by `volume.layer`.
        field: In words, and in T what bends tracks of `ETAS` on their way out; none without positions.
    """

    nodes: FeatureSums
    edges: FeatureSums
    levels: Sequence[Sequence[float]]
    layers: Mapping[str, int]
    field: tuple[str, Sequence[float]]

    @classmethod
    def of(cls, event: StoredEvent) -> EventSurvey:
        """Survey an event.

        Raises:
            StoreError: If the file is damaged.
        """
        every = np.arange(event.num_nodes)
        nodes, edges = event.read_nodes("features", every), event.read_edges("features", np.arange(event.num_edges))
        columns = (column for of in (nodes, edges) for column in of.T)
        levels = [np.quantile(column, LEVELS).round(6).tolist() if len(column) else [] for column in columns]
        places = zip(*(event.read_nodes(name, every).tolist() for name in ("volume", "layer")))
        layers = {f"{volume}.{layer}": hits for (volume, layer), hits in sorted(Counter(places).items())}
        x, y, z = event.read_nodes("position", every).T if event.has_positions else np.empty((3, 0))
        field = field_of(event.settings, *np.array([place.split(".") for place in layers], np.int64).reshape(-1, 2).T)
        bending = _bending(field, np.hypot(x, y).max(), np.abs(z).max()) if len(x) else []
        return cls(FeatureSums.of(nodes), FeatureSums.of(edges), levels, layers, (str(field), bending))

    @classmethod
    def from_json(cls, item: Sequence[Any]) -> EventSurvey:
        """One that travelled."""
        return cls(FeatureSums(*item[0]), FeatureSums(*item[1]), *item[2:])


def survey_of(surveys: Sequence[EventSurvey], records: Sequence[EventRecord], settings: Settings) -> dict[str, Any]:
    """What some events have in common, plain values: the same whichever rank surveyed which.

    Returns:
        `events`: how many; `hits`, `edges`, `edges_per_hit`: fewest and most of an event with hits; `beam_spot`: range
        of z and of widths in mm, None where it is not known; `layers`: hits of all; `fields`: those of events with
        hits, each once, as of `EventSurvey`; `features`: by name, the range of each of the quantiles `LEVELS`.
    """
    if not surveys:
        return {}
    given = settings.get("beam_spot")
    spots = [record.beam_spot if given is None else given for record in records]
    layers = sum((Counter(survey.layers) for survey in surveys), Counter[str]())
    filled = [record for record in records if record.num_nodes]
    fields = {survey.field[0]: list(survey.field) for survey in surveys if survey.layers}
    names = [*records[0].feature_names, *records[0].edge_feature_names]
    return {
        "events": len(surveys),
        "hits": _range([record.num_nodes for record in filled]),
        "edges": _range([record.num_edges for record in filled]),
        "edges_per_hit": _range([record.num_edges / record.num_nodes for record in filled]),
        "beam_spot": _range([spot for spot in spots if spot is not None]),
        "layers": dict(layers),
        "fields": [fields[words] for words in sorted(fields)],
        "features": {
            name: _range([of for of in of_events if of])
            for name, of_events in zip(names, zip(*(survey.levels for survey in surveys)))
        },
    }


def _range(values: Sequence[Any]) -> Any:
    """Least and largest of numbers, or of each place of sequences; None without any."""
    return np.stack([np.min(values, axis=0), np.max(values, axis=0)], axis=-1).tolist() if values else None


def _bending(field: Field, radius: float, length: float) -> list[float]:
    """Mean of what bends a track of each of `ETAS` on its way out of a cylinder, in T."""
    slope = np.sinh(ETAS)[:, None]
    r = np.minimum(radius, length / np.maximum(np.abs(slope), 1e-3)) * np.linspace(0.05, 1, 20)
    position = np.stack([r, np.zeros_like(r), r * slope], axis=-1).reshape(-1, 3)
    mean: list[float] = field.bending(position).reshape(r.shape).mean(axis=1).round(3).tolist()
    return mean


def outside(trained: Mapping[str, Any] | None, here: Mapping[str, Any]) -> list[str]:
    """In what events lie outside of what a network was trained on, in words; nothing where one of the two is not known.

    Args:
        trained: `survey_of` the events that it was trained on.
        here: `survey_of` the others.
    """
    if not (trained and here and trained["hits"] and here["hits"]):
        return []
    fewest, parts = min(trained["hits"][0], here["hits"][0]), []
    slack = 1 + (FEW / fewest) ** 0.5 if fewest >= TOO_FEW else np.inf
    if (known := trained["beam_spot"]) and (spot := here["beam_spot"]):
        (first, last), (least, most) = known
        (low, high), (narrow, wide) = spot
        reach = 3 * most + slack * MARGIN
        if low - 2 * wide < first - reach or high + 2 * wide > last + reach:
            there = f"{_shown(least, most)} at {_shown(first, last)}"
            parts.append(f"beam spot {_shown(narrow, wide)} mm wide at z {_shown(low, high)} mm ({there})")
    known_fields = [(was, np.array(bent)) for was, bent in trained.get("fields", ()) if bent]
    for field, bends in here.get("fields", ()):
        others = [np.abs(bent - bends).max() > OTHER_FIELD * np.abs(bent).max() for _, bent in known_fields if bends]
        if others and all(others):
            parts.append(f"field {field} ({' or '.join(was for was, _ in known_fields)})")
    for of, what in ("hits", "hits per event"), ("edges_per_hit", "candidate edges per hit"):
        then, now = trained[of], here[of]
        if now[0] * UNLIKE < then[0] or now[1] > UNLIKE * then[1]:
            parts.append(f"{_shown(*now)} {what} ({_shown(*then)})")
    for one, other, whose in (
        (here, trained, "the hits lie on layers that had none in the training"),
        (trained, here, "the training's hits lie on layers that have none here"),
    ):
        alone = sum(hits for layer, hits in one["layers"].items() if layer not in other["layers"])
        if (share := alone / max(sum(one["layers"].values()), 1)) > slack * OTHER_LAYERS:
            parts.append(f"{share:.0%} of {whose}")
    if np.isfinite(slack):
        parts += _other_features(trained["features"], here["features"], slack * OTHER_LEVEL)
    return parts


def _other_features(trained: Mapping[str, Any], here: Mapping[str, Any], most: float) -> list[str]:
    """The features that lie elsewhere by more than a multiple of their spread, and where the first of them does."""
    others = []
    for name in trained:
        if trained[name] and here.get(name):
            then, now = np.array(trained[name]), np.array(here[name])
            below, above = (then - now)[:, 0].max(), (now - then)[:, 1].max()
            if max(below, above) > most * (then[-1, 1] - then[0, 0]):
                others.append((name, _shown(now[0, 0], now[-1, 1]), _shown(then[0, 0], then[-1, 1])))
    if not others:
        return []
    name, now_text, then_text = others[0]
    more = f", likewise {', '.join(name for name, *_ in others[1:])}" if others[1:] else ""
    return [f"feature {name} {now_text} in 90 % ({then_text}){more}"]


def _shown(low: float, high: float) -> str:
    first, last = (f"{value:,.0f}" if value >= 1000 else f"{value:.3g}" for value in (low, high))
    return first if first == last else f"{first} to {last}"
