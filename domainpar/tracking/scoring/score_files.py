"""Files of scores, written and read: one zarr zip an event and a list of them. The same bytes from any number of ranks.

A directory of scores holds

    scores.json                                what was scored, with which weights; the sha256 of each file
    timings.json                               seconds per event, and memory; not hashed
    event000001001.scores.zarr.zip             hit_id [N], edge_index [2, E], edge_logit, edge_score, edge_scored [E];
                                               with tracks track_id [N], and with --ckf ckf_track_id [N] and
                                               shared_hits [S, 2], and of each of T tracks track_parameters [T, 5],
                                               track_covariance [T, 5, 5] and track_chi2 [T], with --ckf the same behind
                                               ckf_; of labels that were trained on node_NAME [N] or
                                               graph_NAME [1], of classes also node_NAME_logits [N, classes]

While they are written they lie in its folder `unfinished`; `scores.json` appears last of all. `read_scores` gives them
to a user's own program: numpy arrays by name, and tables of hits and edges.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy.typing as npt

from domainpar.common.atomic_files import json_bytes, sync_directory, write_whole
from domainpar.common.problems import Problem
from domainpar.common.words import some_of
from domainpar.runs.own_files import UNFINISHED, remove, strangers_in_scores
from domainpar.runs.records import SCORES_FILE, ScoredEvent, ScoresRecord, StoreRecord, scores_record
from domainpar.tracking.events.graph import BoolArray, FloatArray, IntArray
from domainpar.tracking.events.own_events import difference, find_store, not_there, places
from domainpar.tracking.events.store import (
    SCHEMA_VERSION,
    SUFFIX,
    EventRecord,
    EventStore,
    WholeEvent,
    event_file_name,
    read_arrays,
    write_arrays,
)
from domainpar.tracking.reco.performance.rates import CKF, NETWORK
from domainpar.tracking.scoring.scores import EventScores

LIST = SCORES_FILE
TIMINGS = "timings.json"
ARRAY_OF_TRACKS = {NETWORK: "track_id", CKF: "ckf_track_id"}
PREFIX_OF_TRACKS = {NETWORK: "", CKF: "ckf_"}
ARRAYS_OF_FITS = {"track_parameters": "value", "track_covariance": "covariance", "track_chi2": "chi2"}
"""The arrays of a file, and the attributes of `Perigees` in them."""
SCORES_SUFFIX = f".scores{SUFFIX}"
FORMAT = {"format": "domainpar scores", "schema_version": SCHEMA_VERSION}


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


def write_scores(directory: Path, scores: EventScores, provenance: Mapping[str, Any]) -> ScoredEvent:
    """Write the scores of one event.

    Args:
        provenance: Their origin, plain JSON values, the same on any number of ranks.

    Raises:
        ValueError: If the name of the event cannot be part of a file name.
    """
    path = directory / (event_file_name(scores.event_id).removesuffix(SUFFIX) + SCORES_SUFFIX)
    outputs = [scores.edge_logit, *(scores.readings[name] for name in sorted(scores.readings))]
    logits_sha256 = hashlib.sha256(b"".join(numbers.tobytes() for numbers in outputs)).hexdigest()
    names = ("hit_id", "edge_index", "edge_logit", "edge_score", "edge_scored")
    tracks = {name: scores.tracks[finder] for finder, name in ARRAY_OF_TRACKS.items() if finder in scores.tracks}
    if NETWORK in scores.shared_hits:
        tracks["shared_hits"] = scores.shared_hits[NETWORK]
    if NETWORK in scores.built:
        tracks["built_track_id"] = scores.built[NETWORK]
    for finder, fits in scores.parameters.items():
        tracks |= {f"{PREFIX_OF_TRACKS[finder]}{name}": getattr(fits, of) for name, of in ARRAYS_OF_FITS.items()}
    num_tracks = int(tracks["track_id"].max(initial=-1)) + 1 if "track_id" in tracks else None
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
    sha256 = write_arrays(
        path, {name: getattr(scores, name) for name in names} | tracks | dict(scores.labels), attributes
    )
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


@dataclass(frozen=True, eq=False)
class Scores:
    """Scores, and tracks, of one event: N hits and E candidate edges, both in the order of the user's own files.

    What a file of scores does not hold is read from the store of the events, and None where that is not there or does
    not know it.

    Attributes:
        event_id: Name of the event.
        hit_id: The user's own number of each hit, int64 [N].
        edge_index: The two hits of each edge, from the inside out, as rows of `hit_id`, int64 [2, E].
        edge_logit: Logit of each edge, in the precision of the training, [E]; above 0 for a segment.
        edge_score: The sigmoid of it, from 0 to 1, [E].
        edge_scored: False for an edge that joins two sectors of naive mode: the network never saw it, and its logit and
            score are 0. True for every edge of an event that was scored whole. bool [E].
        track_id: Track of each hit that was built from the scores (`infer --tracks`), 0, 1, ... by first hits, -1 for
            none, int64 [N]; None without tracks.
        ckf_track_id: The same of a finder that follows helices through the hits and knows neither network nor
            edges (`infer --ckf`), to compare with; the two number their tracks each for itself.
        shared_hits: Row of each hit that lies on several tracks, and each track of it but `track_id`, ascending, int64
            [S, 2] (`infer --shared-hits`); of the tracks that were built from the scores.
        built_track_id: The tracks as they were built at first, int64 [N], where some are dropped for their quality
            (`infer --min-quality`).
        track_parameters: d0, z0, phi, theta, q/p of each track at the beam line in mm, rad and 1/GeV, by the
            definitions of `reco.perigee`, NaN where a track has no fit, float64 [T, 5]; row `track_id`. None where none
            could be fitted.
        track_covariance: Their covariance, float64 [T, 5, 5].
        track_chi2: chi^2 of the hits of each track, of twice their number less 5 degrees of freedom, float64 [T].
        ckf_track_parameters, ckf_track_covariance, ckf_track_chi2: The same of the tracks `ckf_track_id`.
        labels: Labels that the network predicts, by the names of their arrays: `node_NAME` [N] and `graph_NAME` [1], a
            class or a number each, and of classes the logits, `node_NAME_logits` [N, classes].
        about: Origin of the scores: mode, sectors, checkpoint step, hashes; the attributes of the file.
        position: x, y, z of each hit in mm, float32 [N, 3]; from the store, as all that follows.
        volume, layer, module: Place of each hit in the detector, int32 [N].
        particle_id: The particle that made each hit, 0 for noise, int64 [N].
        label: 1 for an edge that is a segment of a particle, 0 for another, -1 where that is not
            known, int8 [E].
    """

    event_id: str
    hit_id: IntArray
    edge_index: IntArray
    edge_logit: FloatArray
    edge_score: FloatArray
    edge_scored: BoolArray
    track_id: IntArray | None = None
    ckf_track_id: IntArray | None = None
    shared_hits: IntArray | None = None
    built_track_id: IntArray | None = None
    track_parameters: FloatArray | None = None
    track_covariance: FloatArray | None = None
    track_chi2: FloatArray | None = None
    ckf_track_parameters: FloatArray | None = None
    ckf_track_covariance: FloatArray | None = None
    ckf_track_chi2: FloatArray | None = None
    labels: Mapping[str, npt.NDArray[Any]] = field(default_factory=dict)
    about: Mapping[str, Any] = field(default_factory=dict)
    position: FloatArray | None = None
    volume: IntArray | None = None
    layer: IntArray | None = None
    module: IntArray | None = None
    particle_id: IntArray | None = None
    label: IntArray | None = None

    def to_pandas(self) -> tuple[Any, Any]:
        """The event as two `pandas.DataFrame`s; a column that is not known is left out.

        Returns:
            One row a hit: `hit_id x y z volume layer module particle_id track_id ckf_track_id`, and labels that
            the network predicts of it. One row an edge: `src dst` (rows of the hits), `src_hit_id dst_hit_id logit
            score scored label`.
        """
        import pandas

        x, y, z = (None, None, None) if self.position is None else self.position.T
        detector = {"volume": self.volume, "layer": self.layer, "module": self.module}
        tracks = {"track_id": self.track_id, "ckf_track_id": self.ckf_track_id}
        hits = {"hit_id": self.hit_id, "x": x, "y": y, "z": z, **detector, "particle_id": self.particle_id, **tracks}
        hits |= {name: of for name, of in self.labels.items() if name.startswith("node_") and of.ndim == 1}
        src, dst = self.edge_index
        ends = {"src": src, "dst": dst, "src_hit_id": self.hit_id[src], "dst_hit_id": self.hit_id[dst]}
        values = {"logit": self.edge_logit, "score": self.edge_score, "scored": self.edge_scored, "label": self.label}
        return pandas.DataFrame(_present(hits)), pandas.DataFrame(_present({**ends, **values}))


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
    arrays, about = read_arrays(file)
    if about.get("format") != FORMAT["format"]:
        raise Problem(f"it is {about.get('format')!r}, not scores", "name what infer wrote", file=file)
    if store is not None:
        columns = _columns_of_store(about, Path(store))
        if not columns:
            what = f"store {store} does not hold the event as it was scored"
            raise Problem(what, "name its store", event=about["event"])
    else:  # as seen from the scores, and where it was
        stores = filter(Path.is_dir, places(kept, file.parent))
        columns = next(filter(None, (_columns_of_store(about, place) for place in stores)), {})
    labels = {name: arrays.pop(name) for name in sorted(arrays) if name.startswith(("node_", "graph_"))}
    return Scores(about["event"], **arrays, labels=labels, about=about, **columns)


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
        return _present({**nodes, "label": whole.edges("label")})


def _present(columns: Mapping[str, npt.NDArray[Any] | None]) -> dict[str, npt.NDArray[Any]]:
    return {name: values for name, values in columns.items() if values is not None}
