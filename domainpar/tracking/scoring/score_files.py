"""Files of scores, written and read: one zarr zip an event and a list of them. The same bytes from any number of ranks.

A directory of scores holds

    scores.json                                what was scored, with which weights; the sha256 of each file
    timings.json                               seconds per event, and memory; not hashed
    event000001001.scores.zarr.zip             the arrays of `Scores` that are not of the store

While they are written they lie in its folder `unfinished`; `scores.json` appears last of all. `read_scores` gives them
to a user's own program: numpy arrays by name, and tables of hits and edges.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from domainpar.common.atomic_files import json_bytes, sync_directory, write_whole
from domainpar.common.problems import Problem
from domainpar.common.words import some_of
from domainpar.runs.own_files import UNFINISHED, remove, strangers_in_scores
from domainpar.runs.records import SCORES_FILE, ScoredEvent, ScoresRecord, StoreRecord, scores_record
from domainpar.tracking.events.own_events import difference, find_store, not_there, places
from domainpar.tracking.events.store import (
    SUFFIX,
    EventRecord,
    EventStore,
    WholeEvent,
    event_file_name,
    write_arrays,
)
from domainpar.tracking.reco.event_scores import FORMAT, Scores

LIST = SCORES_FILE
TIMINGS = "timings.json"
SCORES_SUFFIX = f".scores{SUFFIX}"


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
    # The list last: where it is, all files are.
    for path in sorted(unfinished.iterdir(), key=lambda path: path.name == LIST):
        path.rename(unfinished.parent / path.name)
    unfinished.rmdir()
    sync_directory(unfinished.parent)
    return unfinished.parent


def write_scores(directory: Path, scores: Scores, provenance: Mapping[str, Any]) -> ScoredEvent:
    """Write the scores of one event.

    Args:
        provenance: Their origin, plain JSON values, the same on any number of ranks.

    Raises:
        ValueError: If the name of the event cannot be part of a file name.
    """
    path = directory / (event_file_name(scores.event_id).removesuffix(SUFFIX) + SCORES_SUFFIX)
    outputs = [scores.edge_logit, *(scores.readings[name] for name in sorted(scores.readings))]
    logits_sha256 = hashlib.sha256(b"".join(numbers.tobytes() for numbers in outputs)).hexdigest()
    num_tracks = None if scores.track_id is None else int(scores.track_id.max(initial=-1)) + 1
    attributes = {
        **FORMAT,
        "event": scores.event_id,
        "num_nodes": len(scores.hit_id),
        "num_edges": scores.num_edges,
        "num_unscored": scores.num_unscored,
        "num_tracks": num_tracks,
        "logits_sha256": logits_sha256,
        **provenance,
    }
    sha256 = write_arrays(path, scores.arrays, attributes)
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


def write_list(directory: Path, record: ScoresRecord) -> None:
    """Write `scores.json`, the last file; called on rank 0."""
    write_whole(directory / LIST, json_bytes(record.content))


# --- read back -------------------------------------------------------------------------------------------------------


def read_scores(path: str | Path, event: str | None = None, store: str | Path | None = None) -> Scores:
    """Read the scores of one event.

    Args:
        path: A run, a directory of scores, or the file of one event in it.
        event: Name of the event; not needed for a file, nor where there is only one.
        store: The prepared events, for positions and truth. Default: where the scores say they are, if they are there.

    Raises:
        Problem: If there are no scores, or not of this event, or the store that is named does not hold it as it was
            scored.
        StoreError: If a file is missing or damaged.
    """
    file, kept = _find(Path(path), event)
    scores = Scores.read(file)
    if store is not None:
        columns = _columns_of_store(scores.about, Path(store))
        if not columns:
            what = f"store {store} does not hold the event as it was scored"
            raise Problem(what, "name its store", event=scores.event_id)
    else:  # as seen from the scores, and where it was
        stores = filter(Path.is_dir, places(kept, file.parent))
        columns = next(filter(None, (_columns_of_store(scores.about, place) for place in stores)), {})
    return replace(scores, **columns)


def list_of(path: Path) -> tuple[Path, ScoresRecord]:
    """The directory of the scores of a run, or of a directory of scores, and their record.

    Raises:
        Problem: If there are none.
    """
    directory = next((place for place in (path, path / "scores") if (place / LIST).is_file()), None)
    if directory is None:
        raise Problem(f"{path} holds no scores: no {LIST}", f"write them: python -m domainpar.infer --run {path}")
    return directory, scores_record(directory / LIST)


def store_of_scores(directory: Path, record: ScoresRecord) -> tuple[EventStore, dict[str, EventRecord]]:
    """The store of scored events, and these by name.

    Raises:
        Problem: If it is not found, or does not hold an event as it was scored.
    """
    hashes = [(name, listed.event_sha256) for name, listed in record.by_event.items()]
    place = find_store(record.store, directory, hashes)
    if place is None:
        what = f"the store of the events in {directory} is not found: {not_there(record.store, directory)}"
        raise Problem(what, "bring it back, or score its events again")
    store = EventStore(place)
    if (differs := difference(store, hashes)) is not None:
        raise Problem(f"{place} does not hold the event as it was scored", "score it again", event=differs[0])
    return store, {each.event: each for each in store.events() if each.event in record.by_event}


def _find(path: Path, event: str | None) -> tuple[Path, StoreRecord]:
    """The file of an event, and the store of all of them."""
    if path.name.endswith(SCORES_SUFFIX):
        beside = path.parent / LIST
        return path, scores_record(beside).store if beside.is_file() else StoreRecord.of()
    directory, record = list_of(path)
    files = {listed.event: listed.path for listed in record.events}
    if event is None and len(files) == 1:
        (event,) = files
    if event not in files:
        what = "scores of several events" if event is None else f"no scores of event {event!r}"
        raise Problem(f"{directory} holds {what}", f"take one of {some_of(sorted(files))}: read_scores(path, event)")
    return directory / files[event], record.store


def _columns_of_store(about: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """Columns of a scored event in a store, in the user's order; none if it is not there as it was scored."""
    store = EventStore(path, check_files=False)
    # By its hash: an event of the same name may have other hits.
    record = next((record for record in store.events() if record.sha256 == about.get("event_sha256")), None)
    if record is None:
        return {}
    with store.open(record) as event:
        whole = WholeEvent(event)
        nodes = {name: whole.nodes(name) for name in ("volume", "layer", "module", "position", "particle_id")}
        return nodes | {"label": whole.edges("label")}
