"""Tracks as ColliderML's benchmark takes them: parquet, a row for each hit that is on a track.

    submission.parquet     event_id, hit_id (place in the event's row), track_id; with truth majority_particle_id

Hits on no track are left out, as they are from tracks of a Kalman filter: its scorer would take any number that they
share for one more track. What its figures count is told in `docs/your_data.md`.
"""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np

from domainpar.atomic_files import write_whole
from domainpar.events.colliderml import PARTICLE_0, import_parquet
from domainpar.events.graph import IntArray
from domainpar.problems import Place

SUBMISSION = "submission.parquet"
PIECE = "-tracks.parquet"


def write_piece(
    directory: Path, stem: str, event: Place, hit_id: IntArray, track_id: IntArray, truth: IntArray | None
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
        majority = majority_of_tracks(track_id[rows], truth[rows])
        majority = np.where(majority == PARTICLE_0, 0, majority)
        columns["majority_particle_id"] = pa.array(majority.view(np.uint64), pa.uint64())
    write_whole(directory / f"{stem}{PIECE}", _as_bytes(pa.table(columns)))


def majority_of_tracks(track_id: IntArray, truth: IntArray) -> IntArray:
    """For each hit on a track the particle of most hits of that track, the smaller number of equal ones, [N]."""
    pairs, counts = np.unique(np.stack([track_id, truth]), axis=1, return_counts=True)
    order = np.lexsort((pairs[1], -counts, pairs[0]))
    tracks, first = np.unique(pairs[0][order], return_index=True)
    of_tracks: IntArray = pairs[1][order][first]
    return of_tracks[np.searchsorted(tracks, track_id)]


def join_pieces(directory: Path) -> Path:
    """Make one submission of the tracks of all events, in the order of their numbers; the pieces go."""
    pa, pq = import_parquet()
    pieces = sorted(directory.glob(f"*{PIECE}"))
    path = directory / SUBMISSION
    write_whole(path, _as_bytes(pa.concat_tables([pq.read_table(piece) for piece in pieces])))
    for piece in pieces:
        piece.unlink()
    return path


def _as_bytes(table: object) -> bytes:
    _, pq = import_parquet()
    buffer = io.BytesIO()
    pq.write_table(table, buffer)
    return buffer.getvalue()
