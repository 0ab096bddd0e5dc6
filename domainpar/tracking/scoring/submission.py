"""Tracks as ColliderML's benchmark takes them, and what its scorer says of them.

    submission.parquet     a row for each hit that is on a track: event_id, hit_id (place in the event's row), track_id;
                           with truth majority_particle_id, the particle of most hits of the track

Hits on no track are left out: the scorer would take any number that they share for one more track. Its figures are made
as `colliderml.tasks.tracking.metrics` makes them, version 0.4.2, whatever one thinks of them:
`docs/recipes/data_colliderml.md` has what each counts.
"""

from __future__ import annotations

import io
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from domainpar.common.atomic_files import write_whole
from domainpar.common.problems import EventPlace
from domainpar.tracking.events.colliderml import PARTICLE_0, import_parquet
from domainpar.tracking.events.graph import IntArray, Particles

SUBMISSION = "submission.parquet"
PIECE = "-tracks.parquet"


def write_piece(
    directory: Path, stem: str, event: EventPlace, hit_id: IntArray, track_id: IntArray, truth: IntArray | None
) -> None:
    """Write the tracks of one event.

    Args:
        directory: Where the file goes.
        stem: Of its name.
        event: The event, whose name has to be a number.
        hit_id: Of each hit, [N].
        track_id: Track of each hit, -1 on none, [N].
        truth: Particle of each hit, [N], 0 for noise; None if it is not known.

    Raises:
        Problem: If the name of the event is no number.
    """
    pa, _ = import_parquet()
    if not event.event.isdecimal():
        raise event.problem(f"its name {event.event!r} is no number, which a submission needs", "take another --format")
    rows = np.flatnonzero(track_id >= 0)
    columns = {
        "event_id": pa.array(np.full(len(rows), int(event.event)), pa.int64()),
        "hit_id": pa.array(hit_id[rows], pa.int64()),
        "track_id": pa.array(track_id[rows], pa.int64()),
    }
    if truth is not None:
        majority, _ = majority_of_tracks(track_id[rows], truth[rows])
        majority = np.where(majority == PARTICLE_0, 0, majority)
        columns["majority_particle_id"] = pa.array(majority.view(np.uint64), pa.uint64())
    write_whole(directory / f"{stem}{PIECE}", _as_bytes(pa.table(columns)))


def join_pieces(directory: Path) -> Path:
    """Make one submission of the tracks of all events, in the order of their numbers; the pieces go."""
    pa, pq = import_parquet()
    pieces = sorted(directory.glob(f"*{PIECE}"), key=lambda piece: int(piece.name.removeprefix("event")[: -len(PIECE)]))
    path = directory / SUBMISSION
    write_whole(path, _as_bytes(pa.concat_tables([pq.read_table(piece) for piece in pieces])))
    for piece in pieces:
        piece.unlink()
    return path


def majority_of_tracks(track_id: IntArray, truth: IntArray) -> tuple[IntArray, IntArray]:
    """For each hit on a track the particle of most of the track's hits, of equal ones the first seen; and how many."""
    pairs, first, counts = np.unique(np.stack([track_id, truth]), axis=1, return_index=True, return_counts=True)
    order = np.lexsort((first, -counts, pairs[0]))
    tracks, best = np.unique(pairs[0][order], return_index=True)
    of_hits = order[best][np.searchsorted(tracks, track_id)]
    return pairs[1][of_hits], counts[of_hits]


@dataclass
class OfficialFigures:
    """What the benchmark's scorer counts, over any number of events; every hit has weight 1."""

    correct: int = 0
    hits: int = 0
    fakes: int = 0
    tracks: int = 0
    split: int = 0
    seen: int = 0
    wanted: set[int] = field(default_factory=set)
    found: set[int] = field(default_factory=set)

    def add(self, rows: IntArray, track_id: IntArray, truth: IntArray, particles: Particles | None) -> None:
        """Count one event.

        Args:
            rows: Hits that are on tracks, [n].
            track_id: Track of each of them, [n].
            truth: Particle of each hit of the event, [N].
            particles: Those of the event; None: none is looked for.
        """
        mine = truth[rows]
        majority, count = majority_of_tracks(track_id, mine)
        tracks, first, size = np.unique(track_id, return_index=True, return_counts=True)
        best, count = majority[first], count[first]
        ids, of_particle = np.unique(truth, return_counts=True)
        left = of_particle[np.searchsorted(ids, best)]
        self.correct += int(count[(2 * count >= size) & (2 * count >= left)].sum())
        self.hits += len(rows)
        self.fakes, self.tracks = self.fakes + int((2 * count < size).sum()), self.tracks + len(tracks)
        pairs = np.unique(np.stack([mine, track_id]), axis=1)
        _, tracks_of_particle = np.unique(pairs[0], return_counts=True)
        self.split, self.seen = self.split + int((tracks_of_particle > 1).sum()), self.seen + len(tracks_of_particle)
        if particles is not None:
            primary = np.ones(len(particles.pt), bool) if particles.primary is None else particles.primary > 0
            self.wanted |= set(particles.particle_id[primary & (particles.pt > 1.0)].tolist())
        self.found |= set(best.tolist())

    def in_words(self) -> str:
        """The four figures of its table, to four digits."""
        parts = {
            "trackml_eff": (self.correct, self.hits),
            "fake_rate": (self.fakes, self.tracks),
            "dup_rate": (self.split, self.seen),
            "physics_eff_pt1": (len(self.found & self.wanted), len(self.wanted)),
        }
        return ", ".join(f"{name} {part / whole if whole else 0.0:.4f}" for name, (part, whole) in parts.items())


def _as_bytes(table: object) -> bytes:
    _, pq = import_parquet()
    buffer = io.BytesIO()
    pq.write_table(table, buffer)
    return buffer.getvalue()
