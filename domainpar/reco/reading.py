"""The scores that `infer` wrote, for a user's own program: numpy arrays by name, and tables of hits and edges."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy.typing as npt

from domainpar.events.graph import FloatArray, IntArray
from domainpar.events.own_events import places
from domainpar.events.store import EventStore, StoredEvent, WholeEvent, read_arrays
from domainpar.plan import BoolArray
from domainpar.problems import Problem
from domainpar.reco.score_files import LIST, SCHEMA_VERSION, SCORES_SUFFIX


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
        classical_track_id: The same of a finder that follows helices through the hits and knows neither network nor
            edges (`infer --classical`), to compare with; the two number their tracks each for itself.
        about: Origin of the scores: mode, sectors, checkpoint step, hashes; the attributes of the file.
        position: x, y, z of each hit in mm, float32 [N, 3]; from the store, as all that follows.
        volume, layer, module: Place of each hit in the detector, int32 [N].
        particle_id: The particle that made each hit, 0 for noise, int64 [N].
        label: 1 for an edge that is a segment of a particle, 0 for another, uint8 [E].
    """

    event_id: str
    hit_id: IntArray
    edge_index: IntArray
    edge_logit: FloatArray
    edge_score: FloatArray
    edge_scored: BoolArray
    track_id: IntArray | None = None
    classical_track_id: IntArray | None = None
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
            One row a hit: `hit_id x y z volume layer module particle_id track_id classical_track_id`. One row an edge:
            `src dst` (rows of the hits), `src_hit_id dst_hit_id logit score scored label`.
        """
        import pandas

        x, y, z = (None, None, None) if self.position is None else self.position.T
        detector = {"volume": self.volume, "layer": self.layer, "module": self.module}
        tracks = {"track_id": self.track_id, "classical_track_id": self.classical_track_id}
        hits = {"hit_id": self.hit_id, "x": x, "y": y, "z": z, **detector, "particle_id": self.particle_id, **tracks}
        src, dst = self.edge_index
        ends = {"src": src, "dst": dst, "src_hit_id": self.hit_id[src], "dst_hit_id": self.hit_id[dst]}
        said = {"logit": self.edge_logit, "score": self.edge_score, "scored": self.edge_scored, "label": self.label}
        tables = [pandas.DataFrame(_known(columns)) for columns in (hits, {**ends, **said})]
        return tables[0], tables[1]


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
    file, about_all = _find(Path(path), event)
    arrays, about = read_arrays(file)
    if (about.get("format"), about.get("schema_version")) != ("domainpar scores", SCHEMA_VERSION):
        kind = f"{about.get('format')!r} version {about.get('schema_version')!r}"
        raise Problem(f"it is {kind}, not scores of version {SCHEMA_VERSION}", "name what infer wrote", file=file)
    if store is None:  # as seen from the scores, and where it was
        kept: Mapping[str, str] = about_all.get("store") or {}
        tried = (_of_the_store(about, place, named=False) for place in places(kept, file.parent))
        known = next(filter(None, tried), {})
    else:
        known = _of_the_store(about, Path(store), named=True)
    return Scores(about["event"], **arrays, about=about, **known)


def _find(path: Path, event: str | None) -> tuple[Path, Mapping[str, Any]]:
    """The file of an event, and what the list of all of them says."""
    if path.name.endswith(SCORES_SUFFIX):
        beside = path.parent / LIST
        return path, json.loads(beside.read_text()) if beside.is_file() else {}
    directory = next((place for place in (path, path / "scores") if (place / LIST).is_file()), None)
    if directory is None:
        raise Problem(f"{path} holds no scores: no {LIST}", f"write them: python -m domainpar.infer --run {path}")
    about = json.loads((directory / LIST).read_text())
    files = {listed["event"]: listed["path"] for listed in about["events"]}
    if event is None and len(files) == 1:
        (event,) = files
    if event not in files:
        names = ", ".join(sorted(files)[:8]) + (", ..." if len(files) > 8 else "")
        what = "scores of several events" if event is None else f"no scores of event {event!r}"
        raise Problem(f"{directory} holds {what}", f"take one of {names}: read_scores(path, event)")
    return directory / files[event], about


def _of_the_store(about: Mapping[str, Any], path: Path, named: bool) -> dict[str, Any]:
    """Arrays of a scored event in a store; none if the store is missing or holds another, unless the user named it."""
    if not named and not path.is_dir():
        return {}
    store = EventStore(path, check_files=False)
    same = (record for record in store.events() if record.sha256 == about.get("event_sha256"))
    record = next(same, None)
    if record is not None:
        with store.open(record) as event:
            return _in_users_order(event)
    if named:
        raise Problem(f"store {path} does not hold the event as it was scored", "name its store", event=about["event"])
    return {}


def _in_users_order(event: StoredEvent) -> dict[str, Any]:
    whole = WholeEvent(event)
    columns = {name: whole.nodes(name) for name in ("volume", "layer", "module", "position", "particle_id")}
    return _known({**columns, "label": whole.edges("label")})


def _known(columns: Mapping[str, npt.NDArray[Any] | None]) -> dict[str, npt.NDArray[Any]]:
    return {name: values for name, values in columns.items() if values is not None}
