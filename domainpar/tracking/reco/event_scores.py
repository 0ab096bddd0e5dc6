"""The scores and tracks of one event: as arrays by finder, and by the names that they have in a file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from domainpar.common.problems import Problem
from domainpar.tracking.events.graph import BoolArray, FloatArray, IntArray
from domainpar.tracking.events.store import SCHEMA_VERSION, read_arrays
from domainpar.tracking.reco.performance.matching import memberships
from domainpar.tracking.reco.performance.rates import CKF, NETWORK
from domainpar.tracking.reco.perigee import Perigees

FORMAT = {"format": "domainpar scores", "schema_version": SCHEMA_VERSION}
"""What files of scores say that they are."""
ARRAYS_OF_FITS = {"track_parameters": "value", "track_covariance": "covariance", "track_chi2": "chi2"}
"""Arrays of a file, and the attributes of `Perigees` in them."""
ARRAYS_OF_EDGES = ("hit_id", "edge_index", "edge_logit", "edge_score", "edge_scored")
ARRAYS_OF_TRACKS = ("track_id", "ckf_track_id", "shared_hits", "built_track_id")
ARRAYS = (*ARRAYS_OF_EDGES, *ARRAYS_OF_TRACKS, *ARRAYS_OF_FITS, *(f"ckf_{name}" for name in ARRAYS_OF_FITS))
"""The arrays of a file but for labels, in their order there; attributes of `Scores`."""


@dataclass(frozen=True, eq=False)
class FoundTracks:
    """The tracks of a finder in one event: arrays as of `Scores`, and parameters at the beam line."""

    track_id: IntArray
    shared_hits: IntArray | None = None
    built_track_id: IntArray | None = None
    fits: Perigees | None = None


class _ArrayOf:
    """An array of the tracks of a finder as an attribute of `Scores`; None without."""

    def __init__(self, finder: str, name: str) -> None:
        self.finder, self.name = finder, name

    def __get__(self, scores: Scores | None, owner: type[Scores]) -> Any:
        if scores is None:
            return self
        tracks = scores.tracks.get(self.finder)
        of = tracks.fits if tracks is not None and self.name in ARRAYS_OF_FITS else tracks
        return getattr(of, ARRAYS_OF_FITS.get(self.name, self.name), None)


@dataclass(frozen=True, eq=False)
class Scores:
    """Scores, and tracks, of one event: N hits and E candidate edges, both in the order of the user's own files.

    `read_scores` reads what a file of scores does not hold from the store of the events; None where that is not there
    or does not know it.

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
        tracks: All of these by finder, and while an event is scored those of perfect scores.
        labels: Labels that the network predicts, by the names of their arrays: `node_NAME` [N] and `graph_NAME` [1], a
            class or a number each, and of classes the logits, `node_NAME_logits` [N, classes].
        readings: Outputs of the network for labels, by the name of the head: [N, columns] of nodes, [columns] of the
            event; not of a file.
        seconds: Time of the network, an equal share of that of a call for several events, and of building tracks from
            its scores, on this rank; compiling is left out. Not of a file.
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
    edge_logit: npt.NDArray[np.floating]
    edge_score: npt.NDArray[np.floating]
    edge_scored: BoolArray
    tracks: Mapping[str, FoundTracks] = field(default_factory=dict)
    labels: Mapping[str, npt.NDArray[Any]] = field(default_factory=dict)
    readings: Mapping[str, npt.NDArray[np.floating]] = field(default_factory=dict)
    seconds: Mapping[str, float] = field(default_factory=dict)
    about: Mapping[str, Any] = field(default_factory=dict)
    position: FloatArray | None = None
    volume: IntArray | None = None
    layer: IntArray | None = None
    module: IntArray | None = None
    particle_id: IntArray | None = None
    label: IntArray | None = None

    track_id = _ArrayOf(NETWORK, "track_id")
    shared_hits = _ArrayOf(NETWORK, "shared_hits")
    built_track_id = _ArrayOf(NETWORK, "built_track_id")
    track_parameters = _ArrayOf(NETWORK, "track_parameters")
    track_covariance = _ArrayOf(NETWORK, "track_covariance")
    track_chi2 = _ArrayOf(NETWORK, "track_chi2")
    ckf_track_id = _ArrayOf(CKF, "track_id")
    ckf_track_parameters = _ArrayOf(CKF, "track_parameters")
    ckf_track_covariance = _ArrayOf(CKF, "track_covariance")
    ckf_track_chi2 = _ArrayOf(CKF, "track_chi2")

    @classmethod
    def read(cls, path: Path) -> Scores:
        """The scores in a file.

        Raises:
            Problem: If it holds something else.
            StoreError: If it is missing or damaged.
        """
        arrays, about = read_arrays(path)
        if about.get("format") != FORMAT["format"]:
            raise Problem(f"it is {about.get('format')!r}, not scores", "name what infer wrote", file=path)
        if lacking := set(ARRAYS_OF_EDGES) - set(arrays):
            raise Problem(f"it lacks {', '.join(sorted(lacking))}", "run infer again", file=path)
        tracks = {}
        for finder, prefix in ((NETWORK, ""), (CKF, "ckf_")):
            if f"{prefix}track_id" in arrays:
                of = {name.removeprefix(prefix): values for name, values in arrays.items() if name.startswith(prefix)}
                own = FoundTracks(of["track_id"], of.get("shared_hits"), of.get("built_track_id"))
                if "track_parameters" in of:
                    _, track = memberships(own.track_id, own.shared_hits)
                    ndf = 2 * np.bincount(track[track >= 0], minlength=len(of["track_parameters"])) - 5
                    values = {attribute: of[name] for name, attribute in ARRAYS_OF_FITS.items()}
                    own = replace(own, fits=Perigees(**values, ndf=ndf))
                tracks[finder] = own
        labels = {name: arrays[name] for name in sorted(arrays) if name.startswith(("node_", "graph_"))}
        edges: dict[str, Any] = {name: arrays[name] for name in ARRAYS_OF_EDGES}
        return cls(about["event"], **edges, tracks=tracks, labels=labels, about=about)

    @property
    def arrays(self) -> dict[str, npt.NDArray[Any]]:
        """The arrays of a file, in their order there."""
        return _present({name: getattr(self, name) for name in ARRAYS}) | dict(self.labels)

    @property
    def num_edges(self) -> int:
        return len(self.edge_logit)

    @property
    def num_unscored(self) -> int:
        return int(np.count_nonzero(~self.edge_scored))

    @property
    def ranked_logit(self) -> npt.NDArray[np.floating]:
        """Logits with -inf for an edge without: it never passes and ranks below all others, so naive mode loses it."""
        return np.where(self.edge_scored, self.edge_logit, -np.inf)

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


def _present(columns: Mapping[str, npt.NDArray[Any] | None]) -> dict[str, npt.NDArray[Any]]:
    return {name: values for name, values in columns.items() if values is not None}
