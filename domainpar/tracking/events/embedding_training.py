"""The training of an embedding: segments of targets are pulled together, near pairs of other hits pushed apart.

A step takes a wedge of one event, some ten thousand hits, and all true segments in it. For some hits drawn from it, it
takes the pairs with all that the network places within the margin (*hard negatives*). With q the squared distance of a
pair, in margins:

    loss  =  mean of log(1 + q) over segments  +  REPULSION x sum of max(0, 1 - q) over other pairs / hits drawn

The logarithm makes far segments, those of displaced tracks, pull as little as they can be reached. Pairs that no edge
can join, and pairs of hits of one particle that are no target segment, have no part in it.

Every rank has all events, draws the same numbers and takes the same steps, with products whose sums have one order:
the same bits on any number of ranks and threads.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, Self

import numpy as np

from domainpar.common.agreement import Ranks, agree_on, on_all
from domainpar.common.compiling import compiled
from domainpar.common.problems import Problem
from domainpar.common.words import several
from domainpar.nn.products import outer as add_outer
from domainpar.tracking.events.embedding import (
    BINS,
    FEATURES,
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
from domainpar.tracking.events.map_building import COUNTED_EVENTS, rounds
from domainpar.tracking.events.module_map import learned_bytes, of_learned_bytes, segments_outward
from partitioners.topology import FloatArray, IntArray

HIDDEN = (128, 128)
STEPS = 2000
WEDGE = 12_000
"""Hits of a step, about."""

DRAWN, MOST_PAIRS = 1000, 100_000
"""Hits of a step whose near pairs are taken, and how many pairs at most."""

REPULSION = 0.05
RATE, MOMENTUM, SQUARES = 3e-3, 0.9, 0.99
"""Of Adam. The rate falls to 0 linearly."""

MEETING = 50
"""Steps after which ranks compare what they have: a long silence would look like a hang."""

_FORM = "domainpar lesson 1"


@dataclass(frozen=True, eq=False)
class Lesson:
    """What is learned from an event.

    Attributes:
        cylinder: Of its hits, as of `cylindrical`, float64 [N, 4].
        layer: Volume and layer of each, int64 [N, 2].
        particle: Particle of each, int64 [N].
        segments: Of the targets, int64 [2, S].
        name: Of the event.
        fingerprint: Of its hits.
    """

    cylinder: FloatArray
    layer: IntArray
    particle: IntArray
    segments: IntArray
    name: str
    fingerprint: str

    @classmethod
    def of(cls, hits: Hits, target: Mapping[str, Any]) -> Self:
        """The lesson of an event; see `segments_outward`."""
        cylinder, segments = segments_outward(hits, target)
        assert hits.particle_id is not None
        layer = np.stack([hits.volume, hits.layer], axis=1).astype(np.int64)
        return cls(cylinder, layer, hits.particle_id, segments, hits.event_id, hits.fingerprint)

    def to_bytes(self) -> bytes:
        """All of it, to travel between ranks."""
        arrays = {name: getattr(self, name) for name in ("cylinder", "layer", "particle", "segments")}
        return learned_bytes(arrays, {"format": _FORM, "name": self.name, "fingerprint": self.fingerprint})

    @classmethod
    def from_bytes(cls, content: bytes) -> Self:
        """What `to_bytes` gave."""
        arrays, meta = of_learned_bytes(content, _FORM)
        return cls(**arrays, name=meta["name"], fingerprint=meta["fingerprint"])

    def wedge(self, rng: np.random.Generator) -> Self:
        """The hits in a random interval of azimuth, of `WEDGE` hits on average, and the segments between them."""
        turns = (self.cylinder[:, 1] / (2 * np.pi) + rng.random()) % 1.0
        rows = np.flatnonzero(turns * len(turns) < WEDGE)
        place = np.full(len(turns), -1)
        place[rows] = np.arange(len(rows))
        segments = place[self.segments]
        arrays = self.cylinder[rows], self.layer[rows], self.particle[rows], segments[:, (segments >= 0).all(axis=0)]
        return type(self)(*arrays, self.name, self.fingerprint)

    @property
    def surface(self) -> IntArray:
        """A number for the layer of each hit, [N]."""
        return surface_numbers(*self.layer.T)


def build_embedding(
    read: Callable[[str], Hits],
    names: Sequence[str],
    target: Mapping[str, Any],
    origin: Mapping[str, Any],
    ranks: Ranks,
    on_event: Callable[[], object] = lambda: None,
    steps: int = STEPS,
) -> Embedding:
    """Train an embedding; the same on any number of ranks. *Collective*.

    Args:
        read: Reads or makes the hits of an event, with truth.
        names: The events to learn from.
        target: Conditions on the particles whose segments are to become edges.
        origin: What they are, for the reader of the file: plain JSON values.
        ranks: The ranks, to which events are dealt for reading and counting, one each at a time.
        on_event: Called on every rank, `work_of(names, steps)` times in all.
        steps: Steps of the training.

    Raises:
        Refused: On all ranks alike, if an event cannot be read or has no truth, or no event has a segment.
    """
    lessons: list[Lesson] = []
    for mine, of_round in rounds(names, ranks):
        content = on_all(ranks, partial(_read, read, mine, target))
        lessons += [Lesson.from_bytes(of_rank) for of_rank in ranks.all_gather(content) if of_rank]
        for _ in of_round:
            on_event()
    lessons_with = [lesson for lesson in lessons if lesson.segments.shape[1]]
    on_all(ranks, partial(_check, lessons_with, len(names)))
    layers = first_layers()
    for done in training(layers, lessons_with, steps):
        if done % MEETING == 0 or done == steps:
            digest = hashlib.sha256(b"".join(array.tobytes() for layer in layers for array in layer)).hexdigest()
            agree_on(ranks, {f"the embedding after {done} steps": digest[:16]}, "run on machines of one kind")
            on_event()
    surfaces = np.unique(np.concatenate([lesson.layer for lesson in lessons]), axis=0)
    known = {lesson.name: lesson.fingerprint for lesson in lessons}
    whole = {**origin, "target": dict(target)}
    found = Embedding(layers, 1.0, surfaces, np.zeros(BINS, np.int64), 0, len(names), whole, known)
    counts = np.zeros(1 + BINS, np.int64)
    for mine, of_round in rounds([str(i) for i in range(min(len(lessons), COUNTED_EVENTS))], ranks):
        own = on_all(ranks, partial(_counted, found, None if mine is None else lessons[int(mine)]))
        counts += sum(np.frombuffer(of_rank, np.int64) for of_rank in ranks.all_gather(own.tobytes()))
        for _ in of_round:
            on_event()
    return Embedding(layers, 1.0, surfaces, counts[1:], int(counts[0]), len(names), whole, known)


def work_of(names: Sequence[str], steps: int = STEPS) -> int:
    """How many times `build_embedding` calls `on_event`."""
    return len(names) + -(-steps // MEETING) + min(len(names), COUNTED_EVENTS)


def first_layers() -> list[tuple[FloatArray, FloatArray]]:
    """The layers that a training begins with: of random weights, and azimuth as what tells hits apart."""
    rng, widths = np.random.default_rng(0), (len(FEATURES), *HIDDEN, 2 * PLACE)
    layers = []
    for i, (columns, out) in enumerate(pairwise(widths)):
        spread = 0.3 / np.sqrt(columns) if i == len(HIDDEN) else np.sqrt(2 / columns)
        layers.append((rng.normal(0, spread, (columns, out)).astype(np.float32), np.zeros(out, np.float32)))
    layers[-1][1][[STAY, PLACE + STAY]] = 2.0
    return layers


def training(layers: Layers, lessons: Sequence[Lesson], steps: int) -> Iterator[int]:
    """Train layers in place by Adam; gives the number of steps done after each."""
    arrays = [array for layer in layers for array in layer]
    mean, square = [np.zeros_like(array) for array in arrays], [np.zeros_like(array) for array in arrays]
    for step in range(steps):
        rng = np.random.default_rng([1, step])
        found = gradient(layers, lessons[step % len(lessons)].wedge(rng), rng)
        rate = RATE * (1 - step / steps)
        for i, array in enumerate(arrays):
            mean[i] += np.float32(1 - MOMENTUM) * (found[i] - mean[i])
            square[i] += np.float32(1 - SQUARES) * (found[i] * found[i] - square[i])
            root = np.sqrt(square[i] / np.float32(1 - SQUARES ** (step + 1))) + np.float32(1e-8)
            array -= np.float32(rate / (1 - MOMENTUM ** (step + 1))) * mean[i] / root
        yield step + 1


def gradient(layers: Layers, lesson: Lesson, rng: np.random.Generator) -> list[FloatArray]:
    """Gradient of the loss in weight and bias of each layer."""
    results = activations(layers, features_of(lesson.cylinder))
    inner, outer = places_of(results[-1], lesson.cylinder[:, 1])
    drawn = rng.permutation(len(inner))[:DRAWN]
    near = near_pairs(inner[drawn], outer, 1.0, MOST_PAIRS)[0]
    # A search that was stopped took the pairs of the first of them only.
    taken = len(drawn) if near.shape[1] < MOST_PAIRS else near[0, -1] + 1
    near[0] = drawn[near[0]]
    particle = lesson.particle[near]
    others = may_join(near, lesson.surface, lesson.cylinder) & ((particle[0] != particle[1]) | (particle[0] == 0))
    to_inner, to_outer = np.zeros_like(inner), np.zeros_like(outer)
    num_true, repulsion = np.float32(max(lesson.segments.shape[1], 1)), np.float32(REPULSION / max(taken, 1))
    _pull(lesson.segments, inner, outer, np.float32(2) / num_true, to_inner, to_outer)
    _push(near[:, others], inner, outer, np.float32(2) * repulsion, to_inner, to_outer)
    way, numbers = turning(lesson.cylinder[:, 1]), []
    for to in (to_inner, to_outer):
        turned = to[:, STAY:].reshape(len(to), TURN, 2) * way
        numbers += [to[:, :STAY] * np.float32(UNIT), turned[:, :, 0] + turned[:, :, 1]]
    return backward(layers, results, np.concatenate(numbers, axis=1))


def backward(layers: Layers, results: Sequence[FloatArray], numbers: FloatArray) -> list[FloatArray]:
    """Gradient in weight and bias of each layer, given `activations` and the gradient in the last of them."""
    found: list[FloatArray] = []
    for i in reversed(range(len(layers))):
        weight, _ = layers[i]
        found = [_outer(results[i], numbers), _outer(np.ones((len(numbers), 1), np.float32), numbers)[0], *found]
        if i:
            numbers = np.where(results[i] > 0, times(numbers, np.ascontiguousarray(weight.T)), np.float32(0))
    return found


def _read(read: Callable[[str], Hits], name: str | None, target: Mapping[str, Any]) -> bytes:
    """The lesson of an event; nothing without an event."""
    return b"" if name is None else Lesson.of(read(name), target).to_bytes()


def _check(lessons: Sequence[Lesson], events: int) -> None:
    """Refuse to learn from no segment."""
    if not lessons:
        what = f"no target particle in {several(events, 'event')} has two hits that follow each other"
        raise Problem(what, "an embedding needs other events, or a wider target of --map-target")


def _counted(found: Embedding, lesson: Lesson | None) -> IntArray:
    """Hits of an event, and its pairs that may become edges by distance, int64 [1 + BINS]; zeros without an event."""
    if lesson is None:
        return np.zeros(1 + BINS, np.int64)
    squares = found.near(lesson.surface, lesson.cylinder, 1.0)[1]
    bins = np.minimum((np.sqrt(squares) * BINS).astype(np.int64), BINS - 1)
    return np.concatenate([[len(lesson.cylinder)], np.bincount(bins, minlength=BINS)])


@compiled
def _outer(rows: Any, gradient: Any) -> Any:
    out = np.zeros((rows.shape[1], gradient.shape[1]), np.float32)
    for start in range(0, len(rows), STRIP):
        strip = rows[start : start + STRIP]
        add_outer(strip, gradient[start : start + STRIP], len(strip), out, 0, 0)
    return out


@compiled
def _pull(pairs: Any, inner: Any, outer: Any, factor: Any, to_inner: Any, to_outer: Any) -> None:
    """Add the gradients of log(1 + q), of half a factor, for each pair in turn."""
    for p in range(pairs.shape[1]):
        a, b = pairs[0, p], pairs[1, p]
        square = np.float32(0.0)
        for k in range(inner.shape[1]):
            square += (inner[a, k] - outer[b, k]) * (inner[a, k] - outer[b, k])
        for k in range(inner.shape[1]):
            change = factor / (np.float32(1.0) + square) * (inner[a, k] - outer[b, k])
            to_inner[a, k] += change
            to_outer[b, k] -= change


@compiled
def _push(pairs: Any, inner: Any, outer: Any, factor: Any, to_inner: Any, to_outer: Any) -> None:
    """Add the gradients of 1 - q, of half a factor, for each pair in turn; all lie within the margin."""
    for p in range(pairs.shape[1]):
        a, b = pairs[0, p], pairs[1, p]
        for k in range(inner.shape[1]):
            change = factor * (inner[a, k] - outer[b, k])
            to_inner[a, k] -= change
            to_outer[b, k] += change
