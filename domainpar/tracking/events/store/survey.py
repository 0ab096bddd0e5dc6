"""What events of a kind have in common, in few numbers: a run keeps those of its events, and `infer` compares."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from domainpar.common.words import between, some_of
from domainpar.nn.standard import FeatureSums
from domainpar.tracking.events.detector import field_of
from domainpar.tracking.events.field import Field
from domainpar.tracking.events.graph import Array, FloatArray, surface_numbers, volumes_and_layers
from domainpar.tracking.events.store.event import StoredEvent
from domainpar.tracking.events.store.layout import EventRecord, Settings

LEVELS = (0.05, 0.5, 0.95)
"""Quantiles of a feature, in each event."""

ETAS = np.linspace(-3, 3, 13)
"""Directions along which fields are compared."""


class EventSurvey(NamedTuple):
    """One event, looked at from end to end; plain values, so that it travels as JSON.

    Attributes:
        nodes, edges: Sums of their features.
        levels: Quantiles `LEVELS` of each node feature, then of each edge feature; none in an event without rows.
        layers: Volume, layer and hits of each layer.
        reach: Largest radius and |z| of a hit in mm; None without positions.
    """

    nodes: FeatureSums
    edges: FeatureSums
    levels: Sequence[Sequence[float]]
    layers: Sequence[Sequence[int]]
    reach: Sequence[float] | None

    @classmethod
    def of(cls, event: StoredEvent) -> EventSurvey:
        """Survey an event.

        Raises:
            StoreError: If the file is damaged.
        """
        everything = np.arange(event.num_nodes)
        nodes = event.read_nodes("features", everything)
        edges = event.read_edges("features", np.arange(event.num_edges))
        surface = surface_numbers(*(event.read_nodes(name, everything) for name in ("volume", "layer")))
        surfaces, counts = np.unique(surface, return_counts=True)
        reach = None
        if event.has_positions and len(everything):
            x, y, z = event.read_nodes("position", everything).T
            reach = [float(np.hypot(x, y).max()), float(np.abs(z).max())]
        return cls(
            FeatureSums.of(nodes),
            FeatureSums.of(edges),
            [*_levels(nodes), *_levels(edges)],
            np.stack([*volumes_and_layers(surfaces), counts], axis=1).tolist(),
            reach,
        )

    @classmethod
    def of_json(cls, item: Sequence[Any]) -> EventSurvey:
        """One that travelled."""
        return cls(FeatureSums(*item[0]), FeatureSums(*item[1]), *item[2:])


def _levels(table: FloatArray) -> list[list[float]]:
    """Of each column; in single precision, as features are."""
    if not len(table):
        return [[] for _ in table.T]
    return [[float(f"{level:.6g}") for level in np.quantile(column, LEVELS)] for column in table.T]


def survey_of(surveys: Sequence[EventSurvey], records: Sequence[EventRecord], settings: Settings) -> dict[str, Any]:
    """What some events have in common: the same whichever rank looked at which.

    Returns:
        Plain values. `events`: how many; `hits` and `edges`: fewest and most of an event; `beam_spot`: least and
        largest z, least and largest width in mm, None where it is not known; `layers`: hits by volume and layer;
        `field`: in words, and in T what bends tracks of `ETAS` on average, none without positions; `features`: least
        and largest of each of the quantiles `LEVELS`, by name.
    """
    if not surveys:
        return {}
    told = settings.get("beam_spot")
    spots = [told] if told is not None else [it.beam_spot for it in records if it.beam_spot is not None]
    layers: dict[tuple[int, int], int] = {}
    for survey in surveys:
        for volume, layer, hits in survey.layers:
            layers[volume, layer] = layers.get((volume, layer), 0) + hits
    field = field_of(settings, *np.array(sorted(layers), np.int64).reshape(-1, 2).T)
    reaches = [survey.reach for survey in surveys if survey.reach is not None]
    names = [*records[0].feature_names, *records[0].edge_feature_names]
    of_each = zip(names, zip(*(survey.levels for survey in surveys)))
    levels = {name: _range([of for of in of_events if of]) for name, of_events in of_each}
    return {
        "events": len(surveys),
        "hits": _range([record.num_nodes for record in records]),
        "edges": _range([record.num_edges for record in records]),
        "beam_spot": _range(spots) if spots else None,
        "layers": {f"{volume}.{layer}": layers[volume, layer] for volume, layer in sorted(layers)},
        "field": [str(field), _bending(field, *np.max(reaches, axis=0)) if reaches else []],
        "features": {name: of for name, of in levels.items() if of},  # none without a row
    }


def _range(values: Sequence[Any]) -> list[Any]:
    """Least and largest of numbers, or of each place of sequences."""
    if not values:
        return []
    table: Array = np.array(values)
    return np.stack([table.min(axis=0), table.max(axis=0)], axis=-1).tolist()  # type: ignore[no-any-return]


def _bending(field: Field, radius: float, length: float) -> list[float]:
    """Mean of what bends a track of each of `ETAS` on its way out of a cylinder, in T."""
    slope = np.sinh(ETAS)
    out = np.minimum(radius, length / np.maximum(np.abs(slope), 1e-3))
    r = np.multiply.outer(out, np.linspace(0.05, 1, 20))
    position = np.stack([r, np.zeros_like(r), r * slope[:, None]], axis=-1)
    mean = field.bending(position.reshape(-1, 3)).reshape(r.shape).mean(axis=1)
    return [round(float(value), 3) for value in mean]


# --- two of them -----------------------------------------------------------------------------------------------------
# Events of one kind differ by less than a twentieth of each of these: 120 simulated ones, six of TrackML beside them.

WIDTHS = 3.0
"""Collisions within so many widths of the beam spot were seen in a training."""

OTHER_FIELD = 0.05
"""A field is another one where it bends tracks of one direction otherwise by this share of its largest value."""

OTHER_LAYERS = 0.02
"""Share of the hits on layers that the other events have no hits on, that is much."""

OTHER_LEVEL = 0.25
"""A quantile of a feature is elsewhere by more than this times the distance of the outer two quantiles."""

UNLIKE = 2.0
"""Events are unlike with more than this times their hits, or less than it; and with candidate edges a hit likewise."""


def outside(trained: Mapping[str, Any] | None, here: Mapping[str, Any]) -> list[str]:
    """In what some events lie outside of what a network was trained on, in words; nothing where either is not known.

    Args:
        trained: `survey_of` of the events that it was trained on.
        here: `survey_of` of the others.
    """
    if not trained or not here:
        return []
    parts = [*_other_spot(trained["beam_spot"], here["beam_spot"])]
    (there, bent), (field, bends) = trained["field"], here["field"]
    if bent and bends and np.abs(np.subtract(bent, bends)).max() > OTHER_FIELD * np.abs(bent).max():
        parts.append(f"field {field} ({there})")
    few, many = trained["hits"]
    if here["hits"][0] * UNLIKE < few or here["hits"][1] > UNLIKE * many:
        parts.append(f"{between(here['hits'], 'hit')} an event ({between(trained['hits'], 'hit')})")
    new, gone = (_share_beside(one["layers"], other["layers"]) for one, other in ((here, trained), (trained, here)))
    if new > OTHER_LAYERS:
        parts.append(f"{new:.0%} of the hits on layers that had none")
    if gone > OTHER_LAYERS:
        parts.append(f"no hits on layers that had {gone:.0%} of them")
    return parts + _other_features(trained["features"], here["features"])


def _other_spot(trained: Any, here: Any) -> list[str]:
    """A beam spot of which an event reaches out of those that were seen."""
    if trained is None or here is None:
        return []
    (first, last), (least, most) = trained
    (low, high), (_, width) = here
    # Two widths of one hold 95 % of its collisions.
    if first - WIDTHS * most <= low - 2 * width and high + 2 * width <= last + WIDTHS * most:
        return []
    place = "" if first - most <= low and high <= last + most else f"at z {_shown(low, high)} mm, "
    return [f"beam spot {place}{_shown(*here[1])} mm wide ({_shown(least, most)} mm at z {_shown(first, last)} mm)"]


def _share_beside(layers: Mapping[str, int], others: Mapping[str, int]) -> float:
    """Share of the hits on layers that others have none on."""
    return sum(hits for layer, hits in layers.items() if not others.get(layer)) / max(sum(layers.values()), 1)


def _other_features(trained: Mapping[str, Any], here: Mapping[str, Any]) -> list[str]:
    """The feature that lies farthest from where it was, and how many others do."""
    away: dict[str, float] = {}
    for name in trained.keys() & here.keys():
        then, now = np.array(trained[name]), np.array(here[name])
        spread = max(then[-1, 1] - then[0, 0], 1e-12)
        away[name] = float(max((then[:, 0] - now[:, 0]).max(), (now[:, 1] - then[:, 1]).max()) / spread)
    names = sorted((name for name in away if away[name] > OTHER_LEVEL), key=lambda name: (-away[name], name))
    if not names:
        return []
    now, then = (f"{of[names[0]][0][0]:.3g} to {of[names[0]][-1][1]:.3g}" for of in (here, trained))
    more = f"; and {some_of(names[1:], 3)}" if names[1:] else ""
    return [f"feature {names[0]} from {now} for 90 % ({then}){more}"]


def _shown(low: float, high: float) -> str:
    return f"{low:.3g}" if f"{low:.3g}" == f"{high:.3g}" else f"{low:.3g} to {high:.3g}"
