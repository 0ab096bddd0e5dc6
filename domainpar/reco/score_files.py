"""Files of scores: one zarr zip an event and a list of them. The same bytes from any number of ranks.

A directory of scores holds

    scores.json                                what was scored, with which weights; the sha256 of each file
    timings.json                               seconds per event; not hashed
    event000001001.scores.zarr.zip             hit_id [N], edge_index [2, E], edge_logit, edge_score, edge_scored [E];
                                               with tracks track_id [N], and classical_track_id [N] if asked for

While they are written they lie in its folder `unfinished`; `scores.json` appears last of all.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from domainpar.atomic_files import write_whole
from domainpar.events.store import SUFFIX, event_file_name, write_arrays
from domainpar.own_files import UNFINISHED, remove, strangers_in_scores
from domainpar.problems import Problem
from domainpar.reco.scores import CLASSICAL, NETWORK, EventScores

LIST = "scores.json"
TIMINGS = "timings.json"
ARRAY_OF_TRACKS = {NETWORK: "track_id", CLASSICAL: "classical_track_id"}
SCORES_SUFFIX = f".scores{SUFFIX}"
SCHEMA_VERSION = 1


@dataclass(frozen=True)
class ScoredEvent:
    """One event as `scores.json` lists it.

    Attributes:
        event: Name of the event.
        path: File of its scores, relative to the directory.
        sha256: Hash of the file.
        logits_sha256: Hash of the logits alone, in the user's order: equal on any number of ranks.
        edges: Its edges.
        unscored: Those of them that got no score.
        tracks: Tracks that the scores gave; None if none were built.
        event_sha256: Hash of the event's own file.
    """

    event: str
    path: str
    sha256: str
    logits_sha256: str
    edges: int
    unscored: int
    tracks: int | None = None
    event_sha256: str = ""


def scores_file_name(event_id: str) -> str:
    """File name of an event's scores.

    Raises:
        ValueError: If the name of the event cannot be part of a file name.
    """
    return event_file_name(event_id).removesuffix(SUFFIX) + SCORES_SUFFIX


def choose_directory(path: Path, overwrite: bool) -> Path:
    """Make the directory of scores ready to be written to; called on rank 0.

    Returns:
        The folder in it that scores are written to. Until they are all there, nobody takes them for finished.

    Raises:
        Problem: If it holds other scores that are not to be replaced, or other files, or cannot be written.
    """
    try:
        if path.exists() and not path.is_dir():
            raise Problem(f"{path} is a file", "name a directory with --out")
        path.mkdir(parents=True, exist_ok=True)
        files = [file for file in path.iterdir() if file.name != UNFINISHED or any(file.iterdir())]
        if (stranger := next(strangers_in_scores(path), None)) is not None:
            name = stranger.relative_to(path)
            raise Problem(f"{path} holds files that are not scores ({name})", "move them away, or choose another --out")
        if files and not overwrite:
            raise Problem(f"{path} holds scores already", "choose another --out, or replace them with --overwrite")
        # The list goes first: without it nobody takes the remains for finished scores.
        remove(sorted(files, key=lambda file: file.name != LIST))
        (path / UNFINISHED).mkdir(exist_ok=True)
    except OSError as error:
        raise Problem(f"cannot write scores to {path}: {error.strerror}", "choose another --out") from error
    return path / UNFINISHED


def publish(unfinished: Path) -> Path:
    """Give finished scores their place: the files of all events appear, and `scores.json` last; called on rank 0.

    Args:
        unfinished: The folder that `choose_directory` returned, full.

    Returns:
        The directory of the scores.
    """
    for path in sorted(unfinished.iterdir(), key=lambda path: path.name == LIST):
        path.rename(unfinished.parent / path.name)
    unfinished.rmdir()
    return unfinished.parent


def write_scores(directory: Path, scores: EventScores, provenance: Mapping[str, Any]) -> ScoredEvent:
    """Write the scores of one event.

    Args:
        directory: Where the file goes.
        scores: The scores.
        provenance: Their origin, plain JSON values, the same on any number of ranks.
    """
    path = directory / scores_file_name(scores.event_id)
    logits_sha256 = hashlib.sha256(scores.edge_logit.tobytes()).hexdigest()
    names = ("hit_id", "edge_index", "edge_logit", "edge_score", "edge_scored")
    tracks = {name: scores.tracks[finder] for finder, name in ARRAY_OF_TRACKS.items() if finder in scores.tracks}
    num_tracks = int(tracks["track_id"].max(initial=-1)) + 1 if "track_id" in tracks else None
    attributes = {
        "format": "domainpar scores",
        "schema_version": SCHEMA_VERSION,
        "event": scores.event_id,
        "num_nodes": len(scores.hit_id),
        "num_edges": scores.num_edges,
        "num_unscored": scores.num_unscored,
        "num_tracks": num_tracks,
        "logits_sha256": logits_sha256,
        **provenance,
    }
    sha256 = write_arrays(path, {name: getattr(scores, name) for name in names} | tracks, attributes)
    return ScoredEvent(
        event=scores.event_id,
        path=path.name,
        sha256=sha256,
        logits_sha256=logits_sha256,
        edges=scores.num_edges,
        unscored=scores.num_unscored,
        tracks=num_tracks,
        event_sha256=str(provenance.get("event_sha256", "")),
    )


def write_list(directory: Path, events: Sequence[ScoredEvent], about: Mapping[str, Any]) -> None:
    """Write `scores.json`, the last file; called on rank 0."""
    content = {
        "format": "domainpar scores",
        "schema_version": SCHEMA_VERSION,
        **about,
        "events": [asdict(event) for event in events],
    }
    _write_json(directory / LIST, content)


def write_timings(directory: Path, num_ranks: int, events: Sequence[Mapping[str, Any]]) -> None:
    """Write `timings.json`: times differ from run to run, so nothing that is hashed holds any; called on rank 0."""
    _write_json(directory / TIMINGS, {"ranks": num_ranks, "events": list(events)})


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    write_whole(path, (json.dumps(content, indent=1, sort_keys=True) + "\n").encode())
