"""Metric learning: a network places hits so that those which follow each other along a track are near each other.

Each hit has two places, one as the inner and one as the outer hit of an edge. An edge joins two hits if the inner place
of the one is nearer than a radius to the outer place of the other. An MLP computes both places:

    r, z, |z|, eta, log r, log R  --MLP-->  8 numbers a place:  4 stay as they are
                                                                4 become g cos(phi), g sin(phi): 12 coordinates

The network does not see phi. The distance of two places depends on phi through the cosine of the hits' difference only:
a turned event has the same edges, and there is no seam. The network is kept in a file:

    embedding.safetensors   weights and biases of the MLP, the layers that its hits lay on, and how many pairs of hits
                            were counted, by their distance
        its metadata        JSON: numbers of events and hits, the radius, where it comes from
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np

from domainpar.common.compiling import compiled
from domainpar.common.problems import EventPlace
from domainpar.nn.products import multiply
from domainpar.tracking.events.graph import Hits, surface_numbers
from domainpar.tracking.events.joining import longer
from domainpar.tracking.events.module_map import LearnedCandidates
from partitioners.topology import FloatArray, IntArray

FEATURES = ("r", "z", "|z|", "eta", "log r", "log R")

STAY, TURN = 4, 4
"""Numbers of a place that do not depend on phi, and numbers that become two coordinates each, which do."""

PLACE = STAY + TURN

UNIT = 10.0
"""A number of the network makes a coordinate so large; the margin of the training is 1."""

LARGEST, BINS = 2.0, 400
"""Largest radius, in margins; pairs of hits are counted by their distance up to it, in so many bins."""

STRIP = 256
"""Rows that are multiplied at once."""

_ROWS = 16_384  # whose results are held at once

Layers = Sequence[tuple[FloatArray, FloatArray]]
"""Weight [in, out] and bias [out] of each layer, float32; a ReLU follows each but the last."""


@dataclass(frozen=True, eq=False)
class Embedding(LearnedCandidates):
    """A trained network with the radius of its edges.

    Attributes:
        layers: Of the MLP.
        radius: Pairs that are nearer become edges; at most `LARGEST`.
        surfaces: Of the hits that it was learned from (`surface_numbers`), ascending, int64 [L].
        pairs: How many pairs of hits lie at each distance, over the events counted, int64 [BINS].
        counted_hits: Hits of these events.
    """

    WHAT = "embedding"
    FORMAT = "domainpar embedding 1"
    layers: Layers
    radius: float
    surfaces: IntArray
    pairs: IntArray
    counted_hits: int

    def __str__(self) -> str:
        pairs = self.pairs[: round(self.radius / LARGEST * BINS)].sum() / max(self.counted_hits, 1)
        return f"embedding: radius {self.radius:.3g}, {pairs:.3g} edges per hit; {self._training}"

    def best(self, edges_per_hit: float) -> Self:
        """The same with the largest radius, up to `LARGEST`, that made no more edges a hit in the events counted."""
        bins = np.searchsorted(np.cumsum(self.pairs), edges_per_hit * self.counted_hits, side="right")
        return replace(self, radius=max(int(bins), 1) * LARGEST / BINS)

    def edges(self, hits: Hits, cylinder: FloatArray) -> IntArray:
        """Pairs of hits with near places (see `Candidates`), by phi of `src`, then of `dst`."""
        surface = surface_numbers(hits.volume, hits.layer)
        if len(hits) and not np.isin(surface, self.surfaces).any():
            raise EventPlace(hits.event_id).problem(
                f"none of {len(hits):,} hits lies on a layer of the embedding",
                "it was learned in another detector: learn one from events of this one, --embedding build",
            )
        src, dst = self.near(surface, cylinder, self.radius)[0]
        order = np.lexsort((cylinder[dst, 1], cylinder[src, 1]))
        return np.stack([src[order], dst[order]])

    def near(self, surface: IntArray, cylinder: FloatArray, radius: float) -> tuple[IntArray, FloatArray]:
        """Edges within a radius, int64 [2, E], and their squared distances, float32 [E]; `surface` as a number."""
        pairs, squares = near_pairs(*places_of(numbers_of(self.layers, cylinder), cylinder[:, 1]), radius)
        kept = may_join(pairs, surface, cylinder)
        return pairs[:, kept], squares[kept]

    def _content(self) -> tuple[dict[str, Any], dict[str, Any]]:
        arrays = {f"weight{i}": weight for i, (weight, _) in enumerate(self.layers)}
        arrays |= {f"bias{i}": bias for i, (_, bias) in enumerate(self.layers)}
        meta = {
            "features": FEATURES, "numbers": [STAY, TURN], "unit": UNIT, "layers": len(self.layers),
            "radius": self.radius, "counted_hits": self.counted_hits,
        }  # fmt: skip
        return {**arrays, "surfaces": self.surfaces, "pairs": self.pairs}, meta

    @classmethod
    def _from_content(cls, arrays: Mapping[str, Any], meta: Mapping[str, Any], common: Mapping[str, Any]) -> Self:
        for name, value in {"features": list(FEATURES), "numbers": [STAY, TURN], "unit": UNIT}.items():
            if meta[name] != value:
                raise ValueError(f"its {name} are {meta[name]}, not {value}")
        layers = [(arrays[f"weight{i}"], arrays[f"bias{i}"]) for i in range(meta["layers"])]
        widths = [len(FEATURES), *(len(bias) for _, bias in layers)]
        fit = all(weight.shape == (a, b) for (weight, _), a, b in zip(layers, widths, widths[1:]))
        if not fit or widths[-1] != 2 * PLACE or any(width % 16 for width in widths[1:]):
            raise ValueError(f"its layers {[weight.shape for weight, _ in layers]} do not fit each other")
        if not all(array.dtype == np.float32 and np.isfinite(array).all() for layer in layers for array in layer):
            raise ValueError("its weights are not all finite float32")
        if not 0 < meta["radius"] <= LARGEST or arrays["pairs"].shape != (BINS,):
            raise ValueError(f"radius {meta['radius']}, or the shape of its counts, is impossible")
        counts = arrays["surfaces"], arrays["pairs"], meta["counted_hits"]
        return cls(layers, meta["radius"], *counts, **common)


def numbers_of(layers: Layers, cylinder: FloatArray) -> FloatArray:
    """What the network makes of hits, float32 [N, 16], given `cylindrical` of them."""
    starts = range(0, max(len(cylinder), 1), _ROWS)
    return np.concatenate([activations(layers, features_of(cylinder[start : start + _ROWS]))[-1] for start in starts])


def features_of(cylinder: FloatArray) -> FloatArray:
    """What the network sees of each hit, `FEATURES` of about unit size, float32 [N, 6]."""
    r, _, z, eta = cylinder.T
    logs = np.log(np.maximum(r, 1.0) / 200.0), np.log(np.maximum(np.hypot(r, z), 1.0) / 500.0)
    return np.stack([r / 500, z / 1500, np.abs(z) / 1500, eta / 2, *logs], axis=1).astype(np.float32)


def activations(layers: Layers, features: FloatArray) -> list[FloatArray]:
    """The features and the results of each layer, float32 [N, out]. No bit of a row depends on other rows."""
    results = [np.ascontiguousarray(features)]
    for i, (weight, bias) in enumerate(layers):
        product = times(results[-1], weight)
        product += bias
        results.append(np.maximum(product, np.float32(0)) if i + 1 < len(layers) else product)
    return results


@compiled
def times(rows: Any, weight: Any) -> Any:
    """`rows @ weight`, float32."""
    out = np.empty((len(rows), weight.shape[1]), np.float32)
    for start in range(0, len(rows), STRIP):
        strip = rows[start : start + STRIP]
        multiply(strip, len(strip), weight, out[start : start + STRIP], False, 0, 0)
    return out


def turning(phi: FloatArray) -> FloatArray:
    """cos and sin of the azimuths of hits in `UNIT`, float32 [N, 1, 2]."""
    way = UNIT * np.stack([np.cos(phi), np.sin(phi)], axis=1)
    return np.asarray(way[:, None], np.float32)


def places_of(numbers: FloatArray, phi: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Inner and outer places of hits, float32 [N, 12] each, given the numbers of the network [N, 16]."""
    way, unit = turning(phi), np.float32(UNIT)
    inner, outer = (
        np.concatenate([of[:, :STAY] * unit, (of[:, STAY:, None] * way).reshape(len(of), 2 * TURN)], axis=1)
        for of in (numbers[:, :PLACE], numbers[:, PLACE:])
    )
    return inner, outer


def may_join(pairs: IntArray, surface: IntArray, cylinder: FloatArray) -> IntArray:
    """Whether pairs of hits run to a larger radius, and to another layer, bool [P]."""
    src, dst = pairs
    return np.asarray((cylinder[src, 0] < cylinder[dst, 0]) & (surface[src] != surface[dst]))


def near_pairs(inner: FloatArray, outer: FloatArray, radius: float) -> tuple[IntArray, FloatArray]:
    """Pairs of an inner and an outer place, float32 [N, 12] and [M, 12], whose distance is less than a radius.

    Returns:
        Rows of both, int64 [2, P], ascending in the first; and the square of each distance, float32 [P].
    """
    # Cells in the three coordinates in which places differ most; any three give the same pairs. A cell is a little
    # wider than the radius, because squares are rounded.
    axes = np.argsort(-np.ptp(outer, axis=0), kind="stable")[:3] if len(outer) else np.arange(3)
    low, width = outer[:, axes].min(axis=0, initial=np.inf).astype(np.float64), radius * (1 + 1e-5)
    cell = np.floor((outer[:, axes] - low) / width).astype(np.int64)
    sizes = cell.max(axis=0, initial=0) + 3
    key = ((cell[:, 0] + 1) * sizes[1] + cell[:, 1] + 1) * sizes[2] + cell[:, 2] + 1
    rows = np.argsort(key, kind="stable")
    at = np.floor((inner[:, axes] - low) / width)
    edges, squares = _near(inner, outer[rows], rows, key[rows], at, sizes, np.float32(radius) ** 2)
    return edges, squares


@compiled
def _near(inner: Any, outer: Any, rows: Any, key: Any, cell: Any, sizes: Any, square: Any) -> Any:
    """See `near_pairs`; `outer` in the order of `key`, `cell` of the inner places as floats: they may lie far out."""
    edges, squares = np.empty((2, 1024), np.int64), np.empty(1024, np.float32)
    count = 0
    for i in range(len(inner)):
        x, y, z = cell[i, 0], cell[i, 1], cell[i, 2]
        if not (-1 <= x <= sizes[0] - 2 and -1 <= y <= sizes[1] - 2 and -1 <= z <= sizes[2] - 2):
            continue
        for a in range(max(int(x), 0), min(int(x) + 3, sizes[0])):
            for b in range(max(int(y), 0), min(int(y) + 3, sizes[1])):
                first = (a * sizes[1] + b) * sizes[2] + int(z)
                for j in range(np.searchsorted(key, first), np.searchsorted(key, first + 3)):
                    distance = np.float32(0.0)
                    for k in range(inner.shape[1]):
                        difference = inner[i, k] - outer[j, k]
                        distance += difference * difference
                        if distance >= square:
                            break
                    if distance < square:
                        if count == len(squares):
                            edges, squares = longer(edges), np.concatenate((squares, squares))
                        edges[0, count], edges[1, count], squares[count] = i, rows[j], distance
                        count += 1
    return edges[:, :count].copy(), squares[:count].copy()
