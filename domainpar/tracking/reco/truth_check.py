"""Truth held against hits and tracks: a field, a beam line, axes or units that do not fit are named, with the values.

Each row is a particle, [n, 10]: `COLUMNS` as fitted, and as the table of particles has them. A particle that began near
the beam line is taken back to it along a straight line.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import permutations, product
from typing import Any, NamedTuple

import numpy as np

from domainpar.common.words import several
from domainpar.tracking.events.field import Field
from domainpar.tracking.events.graph import FloatArray, Hits, IntArray
from domainpar.tracking.events.truth_order import rows_of_table
from domainpar.tracking.reco.helix import fit_helices
from domainpar.tracking.reco.hit_table import TrackHits
from domainpar.tracking.reco.performance.layers import median_and_width
from domainpar.tracking.reco.performance.matching import TrackCuts, find_overlaps, pure_pairs
from domainpar.tracking.reco.performance.truth import EventTruth
from domainpar.tracking.reco.perigee import Perigees

COLUMNS = ("q/pT", "eta", "phi", "d0", "z0")
"""Charge over pT in 1/GeV, pseudorapidity, direction in rad, d0 and z0 in mm, as `reco.perigee` defines them."""

NEAR, LEAST_HITS = 10.0, 5
"""Particles that are looked at began within these mm of the beam line, and left so many hits."""

MOST, FEWEST = 100, 20
"""Rows of an event that are kept; and rows of all events from which on they say something."""

PT_OFF, BEAM_OFF, Z0_OFF = 0.05, 0.1, 1.0
"""Largest deviation of the ratio of pT from 1; and of the beam line, and of z0, in mm: what lies beyond is reported."""

SURE = 5.0
"""Standard errors from which on a deviation is none of chance."""

MEV = (500.0, 2000.0)
"""A momentum over that of the curvature, where MeV stand for GeV."""

STRONGEST = 10.0
"""No field is taken for one that is so many times as strong."""

ALIKE = 0.9, 0.97
"""Cosine that three quarters of the directions of fits and of particles have, at least: below the first something is
wrong, above the second two frames are the same."""

WRONG = "hits do not lie as their particles fly"


class Frame(NamedTuple):
    """What was taken for granted: B_z in T of a field that is the same everywhere, else None; x and y of the beam."""

    tesla: float | None = None
    beam_line: tuple[float, float] = (0.0, 0.0)

    @classmethod
    def of(cls, field: Any, settings: Mapping[str, Any]) -> Frame:
        """That of an event in a field, as `Field.of` takes it, of a store with these settings."""
        x, y = settings.get("beam_line", (0.0, 0.0))
        return cls(value if isinstance(value := Field.of(field).to_json(), float) else None, (x, y))


def rows_of_hits(hits: Hits, field: Field) -> FloatArray:
    """Rows of the hardest particles of an event, in whatever unit, each fitted to its own hits; none without truth."""
    if hits.position is None or hits.particle_id is None or hits.particles is None:
        return np.zeros((0, 10))
    ids, of_hit, count = np.unique(hits.particle_id, return_inverse=True, return_counts=True)
    pt = rows_of_table(hits.particles, ids, "pt")
    rows = np.flatnonzero((ids != 0) & (count >= LEAST_HITS) & (pt > 0) & _near(hits.particles, ids))
    rows = rows[np.argsort(-pt[rows], kind="stable")[: min(MOST, -(-len(rows) // 2))]]
    number = np.full(len(ids), -1)
    number[rows] = np.arange(len(rows))
    nowhere = np.zeros(len(hits), np.int64)
    fitted = fit_helices(TrackHits(hits.position, nowhere, nowhere, field), number[of_hit], len(rows))
    with np.errstate(divide="ignore"):
        fitted[:, 0] = 1 / fitted[:, 0]
    return _joined(fitted, hits.particles, ids[rows])


def rows_of_tracks(
    truth: EventTruth, track_id: IntArray, shared: IntArray | None, fits: Perigees, cuts: TrackCuts
) -> FloatArray:
    """Rows of the targets that some tracks match, given the fits of the tracks."""
    if truth.particles is None:
        return np.zeros((0, 10))
    track, ids = matched(truth, track_id, shared, cuts, cuts.target)
    rows = np.flatnonzero(_near(truth.particles, ids))
    rows = rows[:: -(-max(len(rows), 1) // MOST)]  # spread over all
    return _joined(fits.momenta[track[rows]], truth.particles, ids[rows])


def matched(
    truth: EventTruth, track_id: IntArray, shared: IntArray | None, cuts: TrackCuts, target: Any
) -> tuple[IntArray, IntArray]:
    """Rows of the tracks of which enough hits are of one target particle, and the ids of these particles."""
    overlaps = find_overlaps(track_id, truth.particle_id, shared)
    pure = pure_pairs(overlaps, cuts) & truth.targets_among(overlaps.particle_ids, target)[overlaps.particle]
    return overlaps.track[pure], overlaps.particle_ids[overlaps.particle[pure]]


def summary(rows: FloatArray) -> str:
    """Medians and widths of pT over its true value, and of d0 and z0 less theirs, in words."""
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio, width = median_and_width(np.abs(rows[:, 5] / rows[:, 0]))
    texts = [f"pT ratio {ratio:.4f} ({width:.2g})"]
    for name in ("d0", "z0"):
        column = COLUMNS.index(name)
        median, width = median_and_width(rows[:, column] - rows[:, 5 + column])
        texts += [f"{name} {median:+.3f} mm ({width:.2g})"] if np.isfinite(median) else []
    return f"{', '.join(texts)}; medians (half of the central 68.3 %), {several(len(rows), 'target')}"


def mistakes(rows: FloatArray, frame: Frame) -> list[str]:
    """What does not fit in rows of many events, a sentence with the likely cause and its remedy each."""
    if len(rows) < FEWEST:
        return []
    if other_axes := _other_axes(rows):
        return other_axes
    return [*_other_field(rows, frame.tesla), *(_other_vertices(rows) or _other_beam(rows, frame.beam_line))]


def _near(particles: Any, ids: IntArray) -> Any:
    """Whether particles began near the beam line, as far as is known."""
    return ~(np.hypot(*rows_of_table(particles, ids, "vertex")[:, :2].T) > NEAR)


def _joined(fitted: FloatArray, particles: Any, ids: IntArray) -> FloatArray:
    """Those of the fitted that have a fit, and the same of their particles."""
    pt, eta, charge = (rows_of_table(particles, ids, name) for name in ("pt", "eta", "charge"))
    phi = np.full(len(ids), np.nan) if particles.phi is None else rows_of_table(particles, ids, "phi")
    x, y, z = rows_of_table(particles, ids, "vertex").T
    charge = np.where(charge == 0, np.sign(fitted[:, 0]), np.sign(charge))  # where it is unknown it is right
    d0, z0 = y * np.cos(phi) - x * np.sin(phi), z - (x * np.cos(phi) + y * np.sin(phi)) * np.sinh(eta)
    rows: FloatArray = np.column_stack([fitted, charge / pt, eta, phi, d0, z0])
    return rows[np.isfinite(rows[:, :5]).all(axis=1) & np.isfinite(rows[:, 5:7]).all(axis=1)]


def _directions(eta: FloatArray, phi: FloatArray) -> FloatArray:
    """Unit vectors, [n, 3]."""
    vectors = np.column_stack([np.cos(phi), np.sin(phi), np.sinh(eta)])
    return np.asarray(vectors / np.cosh(eta)[:, None])


def _other_axes(rows: FloatArray) -> list[str]:
    """That the hits are written in another frame than momenta, or are those of others."""
    rows = rows[np.isfinite(rows[:, 7])]
    if len(rows) < FEWEST:
        return []
    fitted, true = _directions(rows[:, 1], rows[:, 2]), _directions(rows[:, 6], rows[:, 7])
    alike = {
        (order, signs): float(np.quantile(np.sum(fitted * true[:, order] * signs, axis=1), 0.25))
        for order in permutations(range(3))
        for signs in product((1, -1), repeat=3)
    }
    as_written = alike[(0, 1, 2), (1, 1, 1)]
    if as_written >= ALIKE[0]:
        return []
    (order, signs), best = max(alike.items(), key=lambda item: item[1])
    if best < ALIKE[1]:
        angle = np.degrees(np.arccos(as_written))
        return [
            f"{WRONG}: a quarter of {several(len(rows), 'particle')} go {angle:.0f} degrees or more off the direction "
            "in the table of particles; is that of another event, or are columns of it, or of hits, in disorder?"
        ]
    names = ", ".join("-" * (sign < 0) + "xyz"[axis] for axis, sign in zip(order, signs))
    return [
        f"{WRONG}: x, y, z of hits look like {names} of the momenta (cosines of three quarters of "
        f"{several(len(rows), 'particle')} above {best:.3f}, as they are above {as_written:.3f}); write both in one "
        "frame"
    ]


def _other_field(rows: FloatArray, tesla: float | None) -> list[str]:
    """That curvatures give other momenta than the table: another field, or another unit."""
    middle, width = median_and_width(rows[:, 0] / rows[:, 5])
    error = 1.25 * width / len(rows) ** 0.5
    ratio = 1 / middle if middle else np.inf
    if not abs(middle) > SURE * error or abs(ratio - 1) <= PT_OFF or abs(middle - 1) <= SURE * error:
        return []
    seen = f"fitted pT is {ratio:.3g} times the true one (median of {several(len(rows), 'particle')})"
    if MEV[0] < middle < MEV[1]:
        return [f"momenta look like MeV, not GeV: {seen}; write GeV"]
    if not 1 / STRONGEST < abs(middle) < STRONGEST:
        return [f"{seen}: are momenta in GeV, and positions in mm?"]
    right = f"a field of {middle:.3g} times the strength would make it 1: name it with prepare --field"
    if tesla is not None:
        right = f"{tesla * middle:.3g} T would make it 1, not {tesla:g} T: prepare --field {tesla * middle:.3g}"
    other = "; or charges have the other sign" if middle < 0 else ""
    return [f"{seen}; {right}{other}"]


def _other_beam(rows: FloatArray, beam_line: Sequence[float]) -> list[str]:
    """That the beam passes elsewhere, by d0 against phi."""
    x, y, error = _beam_of(rows, rows[:, 3])
    if np.hypot(x, y) <= max(BEAM_OFF, SURE * error):
        return []
    place = f"{_mm(x + beam_line[0])},{_mm(y + beam_line[1])}"
    return [
        f"tracks come from x {_mm(x)}, y {_mm(y)} mm, by their d0 against phi, not from the beam line of the store; "
        f"prepare --beam-line={place}"
    ]


def _other_vertices(rows: FloatArray) -> list[str]:
    """That hits and the vertices of their particles lie aside of each other."""
    rows = rows[np.isfinite(rows[:, 8:]).all(axis=1)]
    if len(rows) < FEWEST:
        return []
    x, y, error = _beam_of(rows, rows[:, 3] - rows[:, 8])
    z, width = median_and_width(rows[:, 4] - rows[:, 9])
    if np.hypot(x, y) <= max(BEAM_OFF, SURE * error) and abs(z) <= max(Z0_OFF, 3 * width):
        return []
    beside = ", ".join(map(_mm, (x, y, z)))
    return [f"hits lie {beside} mm in x, y, z beside the vertices of their particles; check the table"]


def _mm(value: float) -> str:
    """A length to a hundredth."""
    return f"{round(value, 2) + 0.0:g}"


def _beam_of(rows: FloatArray, d0: FloatArray) -> tuple[float, float, float]:
    """x and y in mm of where tracks of these d0 come from, and their standard error; what lies far away is left out."""
    weight, phi = 1 / (0.05 + np.abs(rows[:, 0])), rows[:, 2]  # soft ones are scattered
    slopes, kept, x, y, width = np.column_stack([-np.sin(phi), np.cos(phi)]), weight > 0, 0.0, 0.0, 0.0
    for _ in range(5):
        x, y = np.linalg.lstsq((slopes * weight[:, None])[kept], (d0 * weight)[kept], rcond=None)[0]
        left = (d0 - slopes @ (x, y)) * weight
        width = median_and_width(left)[1]
        kept = np.abs(left) <= 3 * width
    return float(x), float(y), width * float(2 / max(np.sum(weight[kept] ** 2), 1e-9)) ** 0.5
