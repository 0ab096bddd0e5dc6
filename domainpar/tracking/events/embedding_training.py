"""The training of an embedding: segments of targets are pulled together, near pairs of other hits pushed apart.

A step takes a wedge of one event, some ten thousand hits, and all true segments in it. For some hits drawn from it, it
takes the pairs with all that the network places within the margin (*hard negatives*). With q the squared distance of a
pair, in margins:

    loss  =  mean of log(1 + q) over segments  +  REPULSION x sum of max(0, 1 - q) over other pairs / hits drawn

Far segments, those of displaced tracks, pull little. Pairs that no edge can join, and other pairs of hits of one
particle, have no part in it. Every rank has all events, draws the same numbers and takes the same steps, with products
whose sums have one order: the same bits on any number of ranks and threads.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any, Self

import numpy as np

from domainpar.common.agreement import Ranks, agree, agree_on, on_all
from domainpar.common.compiling import compiled
from domainpar.nn.products import outer as add_outer
from domainpar.tracking.events.embedding import (
    BINS,
    FEATURES,
    LARGEST,
    PLACE,
    STAY,
    STRIP,
    TURN,
    UNIT,
    Embedding,
    Layers,
    activations,
    features_of,
    may_join,
    near_pairs,
    places_of,
    times,
    turning,
)
from domainpar.tracking.events.graph import Hits, surface_numbers
from domainpar.tracking.events.map_building import COUNTED_EVENTS, without_segments
from domainpar.tracking.events.module_map import segments_outward
from partitioners.topology import FloatArray, IntArray

HIDDEN = (128, 128)
STEPS = 2000
WEDGE = 12_000
"""Hits of a step, about."""

DRAWN = 1000
"""Hits of a step whose near pairs are taken."""

REPULSION = 0.05
RATE, MOMENTUM, SQUARES = 3e-3, 0.9, 0.99
"""Of Adam. The rate falls to 0 linearly."""

MEETING = 50
"""Steps after which ranks compare what they have: a long silence would look like a hang."""


@dataclass(frozen=True, eq=False)
class EmbeddingSample:
    """What is learned from an event: `cylindrical`, surface and particle of its hits, and the targets' segments."""

    cylinder: FloatArray
    surface: IntArray
    particle: IntArray
    segments: IntArray

    @classmethod
    def of(cls, hits: Hits, target: Mapping[str, Any]) -> Self:
        """The sample of an event; see `segments_outward`."""
        cylinder, segments = segments_outward(hits, target)
        assert hits.particle_id is not None
        return cls(cylinder, surface_numbers(hits.volume, hits.layer), hits.particle_id, segments)

    def wedge(self, rng: np.random.Generator) -> Self:
        """The hits in a random interval of azimuth, of `WEDGE` hits on average, and the segments between them."""
        turns = (self.cylinder[:, 1] / (2 * np.pi) + rng.random()) % 1.0
        rows = np.flatnonzero(turns * len(turns) < WEDGE)
        place = np.full(len(turns), -1)
        place[rows] = np.arange(len(rows))
        segments = place[self.segments]
        within = segments[:, (segments >= 0).all(axis=0)]
        return type(self)(self.cylinder[rows], self.surface[rows], self.particle[rows], within)


def build_embedding(
    read: Callable[[str], Hits],
    names: Sequence[str],
    target: Mapping[str, Any],
    origin: Mapping[str, Any],
    ranks: Ranks,
    on_event: Callable[[], object] = lambda: None,
    steps: int = STEPS,
) -> Embedding:
    """Train an embedding; every rank does all the work, with the same bits. *Collective*.

    Arguments and errors are those of `map_building.build_map`, and the number of `steps`. `on_event` is called
    `work_of(names, steps)` times on every rank.
    """
    samples, known = [], {}

    def learn(name: str) -> None:
        hits = read(name)
        samples.append(EmbeddingSample.of(hits, target))
        known[hits.event_id] = hits.fingerprint

    for name in names:
        on_all(ranks, partial(learn, name))
        on_event()
    with_segments = [sample for sample in samples if sample.segments.shape[1]]
    if not with_segments:
        agree(ranks, without_segments("an embedding", names))
    layers = first_layers()
    for done in training(layers, with_segments, steps):
        if done % MEETING == 0 or done == steps:
            digest = hashlib.sha256(b"".join(array.tobytes() for layer in layers for array in layer)).hexdigest()
            agree_on(ranks, {f"the embedding after {done} steps": digest[:16]}, "run on machines of one kind")
            on_event()
    surfaces = np.unique(np.concatenate([sample.surface for sample in samples]))
    none = np.zeros(BINS, np.int64)
    origin = {**origin, "target": dict(target)}
    embedding = Embedding(layers, LARGEST, surfaces, none, 0, events=len(names), origin=origin, learned_from=known)
    for sample in samples[:COUNTED_EVENTS]:
        squares = embedding.near(sample.surface, sample.cylinder, LARGEST)[1]
        pairs = np.histogram(np.sqrt(squares), BINS, (0, LARGEST))[0]
        embedding = replace(
            embedding, pairs=embedding.pairs + pairs, counted_hits=embedding.counted_hits + len(sample.surface)
        )
        on_event()
    return embedding


def work_of(names: Sequence[str], steps: int = STEPS) -> int:
    """How many times `build_embedding` calls `on_event`."""
    return len(names) + -(-steps // MEETING) + min(len(names), COUNTED_EVENTS)


def first_layers() -> list[tuple[FloatArray, FloatArray]]:
    """The layers that a training begins with: of random weights, and azimuth as what distinguishes hits."""
    rng, widths = np.random.default_rng(0), (len(FEATURES), *HIDDEN, 2 * PLACE)
    layers = []
    for i, (columns, out) in enumerate(pairwise(widths)):
        spread = 0.3 / np.sqrt(columns) if i == len(HIDDEN) else np.sqrt(2 / columns)
        layers.append((rng.normal(0, spread, (columns, out)).astype(np.float32), np.zeros(out, np.float32)))
    layers[-1][1][[STAY, PLACE + STAY]] = 2.0
    return layers


def training(layers: Layers, samples: Sequence[EmbeddingSample], steps: int) -> Iterator[int]:
    """Train layers in place by Adam; gives the number of steps done after each."""
    arrays = [array for layer in layers for array in layer]
    mean, square = [np.zeros_like(array) for array in arrays], [np.zeros_like(array) for array in arrays]
    for step in range(steps):
        rng = np.random.default_rng([1, step])
        gradients = gradient(layers, samples[step % len(samples)].wedge(rng), rng)
        rate = RATE * (1 - step / steps)
        for i, array in enumerate(arrays):
            mean[i] += np.float32(1 - MOMENTUM) * (gradients[i] - mean[i])
            square[i] += np.float32(1 - SQUARES) * (gradients[i] * gradients[i] - square[i])
            root = np.sqrt(square[i] / np.float32(1 - SQUARES ** (step + 1))) + np.float32(1e-8)
            array -= np.float32(rate / (1 - MOMENTUM ** (step + 1))) * mean[i] / root
        yield step + 1


def gradient(layers: Layers, sample: EmbeddingSample, rng: np.random.Generator) -> list[FloatArray]:
    """Gradient of the loss in weight and bias of each layer."""
    results = activations(layers, features_of(sample.cylinder))
    inner, outer = places_of(results[-1], sample.cylinder[:, 1])
    drawn = rng.permutation(len(inner))[:DRAWN]
    near = near_pairs(inner[drawn], outer, 1.0)[0]
    near[0] = drawn[near[0]]
    particle = sample.particle[near]
    others = may_join(near, sample.surface, sample.cylinder) & ((particle[0] != particle[1]) | (particle[0] == 0))
    to_inner, to_outer = np.zeros_like(inner), np.zeros_like(outer)
    factors = np.array([2 / max(sample.segments.shape[1], 1), 2 * REPULSION / max(len(drawn), 1)], np.float32)
    _move(sample.segments, True, inner, outer, factors[0], to_inner, to_outer)
    _move(near[:, others], False, inner, outer, factors[1], to_inner, to_outer)
    way, numbers = turning(sample.cylinder[:, 1]), []
    for to in (to_inner, to_outer):
        turned = to[:, STAY:].reshape(len(to), TURN, 2) * way
        numbers += [to[:, :STAY] * np.float32(UNIT), turned[:, :, 0] + turned[:, :, 1]]
    return backward(layers, results, np.concatenate(numbers, axis=1))


def backward(layers: Layers, results: Sequence[FloatArray], numbers: FloatArray) -> list[FloatArray]:
    """Gradient in weight and bias of each layer, given `activations` and the gradient in the last of them."""
    gradients: list[FloatArray] = []
    for i in reversed(range(len(layers))):
        weight, _ = layers[i]
        gradients = [
            _outer(results[i], numbers),
            _outer(np.ones((len(numbers), 1), np.float32), numbers)[0],
            *gradients,
        ]
        if i:
            numbers = np.where(results[i] > 0, times(numbers, np.ascontiguousarray(weight.T)), np.float32(0))
    return gradients


@compiled
def _outer(rows: Any, gradient: Any) -> Any:
    out = np.zeros((rows.shape[1], gradient.shape[1]), np.float32)
    for start in range(0, len(rows), STRIP):
        strip = rows[start : start + STRIP]
        add_outer(strip, gradient[start : start + STRIP], len(strip), out, 0, 0)
    return out


@compiled
def _move(pairs: Any, pull: bool, inner: Any, outer: Any, factor: Any, to_inner: Any, to_outer: Any) -> None:
    """Add half a factor times the gradient of log(1 + q), or of 1 - q where not pulled, for each pair in turn."""
    for p in range(pairs.shape[1]):
        a, b = pairs[0, p], pairs[1, p]
        square = np.float32(0.0)
        for k in range(inner.shape[1]):
            square += (inner[a, k] - outer[b, k]) * (inner[a, k] - outer[b, k])
        scale = factor / (np.float32(1.0) + square) if pull else -factor
        for k in range(inner.shape[1]):
            change = scale * (inner[a, k] - outer[b, k])
            to_inner[a, k] += change
            to_outer[b, k] -= change
