"""The tracks of one event by every finder, and the files of them that other programs read; on one rank.

    trainset/event000000007.pyg           acorn: hits, edges, scores, labels (first track of each hit), truth if known
    trainset_tracks/event000000007.txt    acorn: one track a line, its hit ids from the inside out
    event000000007-tracks.csv             event_id, hit_id, track_id, as TrackML scores it: the first track of each hit
    event000000007-tracks.csv             ACTS: a track a row, the numbers of its measurements, chi2, momentum
    event000000007-trackparams.csv        ACTS: parameters of each track at the beam line, with covariances

acorn's track building and evaluation read the first, and so does `events.acorn`. Names and units are acorn's
(`acorn/utils/loading_utils.py`, GNN4ITkTeam/CommonFramework): no prefixes, pt in MeV. Files appear under their name
only when they are complete, and have the same bytes whenever the same is written, on any number of ranks; acorn keeps
the time that tracks took in its file, so that counts as well.
"""

from __future__ import annotations

import importlib
import io
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from domainpar.common import faults
from domainpar.common.atomic_files import write_whole
from domainpar.common.compiling import clock
from domainpar.common.problems import Problem
from domainpar.tracking.events.beam_spot import BeamSpot
from domainpar.tracking.events.detector import BEAM_SPOT, field_of
from domainpar.tracking.events.graph import FloatArray, Hits, IntArray
from domainpar.tracking.events.store import SUFFIX, StoredEvent, WholeEvent, event_file_name
from domainpar.tracking.events.truth_order import rows_of_table
from domainpar.tracking.reco.ckf.detector_layout import layout_of, why_not_followed
from domainpar.tracking.reco.ckf.finder import find_tracks
from domainpar.tracking.reco.event_scores import FoundTracks, Scores
from domainpar.tracking.reco.hit_table import TrackHits
from domainpar.tracking.reco.performance.matching import memberships
from domainpar.tracking.reco.performance.rates import CKF, NETWORK, PERFECT_SCORES
from domainpar.tracking.reco.perigee import NAMES, fit_perigees
from domainpar.tracking.reco.tracks import (
    TrackOptions,
    build_tracks,
    finished,
    shared_hits,
    tracks_from_scores,
)

Format = Literal["zarr", "acorn", "acts", "csv"]

CERTAIN = 20.0  # as a logit: what a perfect network would say of a true segment

DATASETS = {"train": "trainset", "val": "valset", "test": "testset"}
"""acorn's name of each split."""

CSV_SUFFIX, PARAMETERS_SUFFIX = "-tracks.csv", "-trackparams.csv"

BESIDE = {
    "acorn": "acorn's files in a folder of each split, such as testset/ and testset_tracks/",
    "acts": f"ACTS's lists of tracks and of their parameters, event<name>{CSV_SUFFIX} and {PARAMETERS_SUFFIX}",
    "csv": f"tables of hits and tracks, event<name>{CSV_SUFFIX}",
}
"""What is written beside the scores, by the format."""


@dataclass(frozen=True)
class TrackFinders:
    """Finds the tracks of an event, and writes what other programs read."""

    options: TrackOptions | None  # how tracks are built from scores; None: not at all
    directory: Path  # for files of other formats
    format: Format  # which; `zarr` for none
    ckf: bool  # whether to look for helices as well
    split_of: Mapping[str, str]  # split of each event by name
    beam_spot: BeamSpot = BEAM_SPOT  # where collisions lie along the beam, if the settings of an event do not tell

    def __call__(self, event: StoredEvent, scores: Scores) -> Scores:
        """The scores with all tracks.

        Raises:
            Problem: If the event lacks positions, or has a layer that is none of TrackML's, where a finder needs them;
                or if its name cannot name a file of the format.
        """
        whole = WholeEvent(event)
        if self.options is not None:
            faults.reach("tracks")
            scores = with_tracks(whole, scores, self.options)
        if self.ckf:
            check_positions(event, None, ckf=True)
            spot = event.settings.get("beam_spot")
            try:
                track_id = find_tracks(hits_of(whole), self.beam_spot if spot is None else BeamSpot(*spot))
            except ValueError as error:
                raise event.place.attach_to(error) from error
            if self.options is not None and self.options.refine:  # as those of the network are
                track_id = finished(track_id, hits_of(whole), replace(self.options, extend=False))
            scores = replace(scores, tracks={**scores.tracks, CKF: FoundTracks(track_id)})
        if scores.tracks and why_not_followed(event) is None:
            began, with_fits = clock(), fitted(hits_of(whole), scores.tracks)
            scores = replace(scores, tracks=with_fits, seconds={**scores.seconds, "fitting": clock() - began})
        if self.format == "acorn":
            dataset = DATASETS[self.split_of[event.event_id]]
            write_acorn(self.directory, dataset, whole.hits, scores, whole.edges("label"))
        if self.format == "acts":
            write_acts(self.directory, scores, whole.hits.position)
        if self.format == "csv":
            write_csv(self.directory, scores)
        return scores


def check_positions(event: StoredEvent, options: TrackOptions | None, ckf: bool = False, acorn: bool = False) -> None:
    """Refuse an event whose hits have no positions, where the tracks or files that are asked for take them."""
    fits = options is not None and (options.method == "greedy" or options.refine or options.extend)
    shares = options is not None and options.shared_hits
    if (fits or shares or ckf or acorn) and not event.has_positions:
        what = "greedy, --refine, --extend, --shared-hits, --ckf and --format acorn"
        raise event.place.problem(
            f"its hits have no positions: {what} need them", "take --tracks cc without the others"
        )


def with_tracks(whole: WholeEvent, scores: Scores, options: TrackOptions) -> Scores:
    """Scores with the tracks that they, and perfect ones, give.

    In naive mode an edge between two sectors has no score: only stitching and following join tracks of two sectors.

    Raises:
        Problem: If a method asks for positions, and the hits have none.
    """
    check_positions(whole.event, options)
    began = clock()
    hits = hits_of(whole)
    edge_index = scores.edge_index[:, scores.edge_scored]

    def built(logits: FloatArray, seconds: dict[str, float] | None = None) -> FoundTracks:
        edges = edge_index, logits[scores.edge_scored]
        first = finished(build_tracks(*edges, hits, options), hits, options, seconds)
        track_id = tracks_from_scores(*edges, hits, options, seconds, first)
        shared = shared_hits(track_id, *edges, hits, options)
        return FoundTracks(track_id, shared, first if options.min_quality else None)

    seconds = {**scores.seconds}
    tracks = {NETWORK: built(scores.edge_logit, seconds)}
    seconds["tracks"] = clock() - began
    if (label := whole.edges("label")) is not None:
        tracks[PERFECT_SCORES] = built(np.where(label > 0, CERTAIN, -CERTAIN))
    return replace(scores, tracks=tracks, seconds=seconds)


def fitted(hits: TrackHits, tracks: Mapping[str, FoundTracks]) -> dict[str, FoundTracks]:
    """Tracks, with parameters those of the network and of the CKF; shared hits count on each of their tracks."""
    with_fits = dict(tracks)
    for finder in (NETWORK, CKF):
        if (found := tracks.get(finder)) is not None:
            rows, track = memberships(found.track_id, found.shared_hits)
            fits = fit_perigees(hits, track, int(found.track_id.max(initial=-1)) + 1, rows)
            with_fits[finder] = replace(found, fits=fits)
    return with_fits


def hits_of(whole: WholeEvent) -> TrackHits:
    """What track builders ask of the hits: five columns, not `whole.hits`, whose others take as long as tracks do."""
    volume, layer, module = (whole.event.read_nodes(name, whole.node_ids) for name in ("volume", "layer", "module"))
    field, layout = field_of(whole.event.settings, volume, layer), layout_of(whole.event.settings)
    return TrackHits.of(whole.nodes("position"), volume, layer, module, field, layout, whole.nodes("measured"))


# --- files of others -------------------------------------------------------------------------------------------------


def check_acorn_files_can_be_written() -> None:
    """Find out before anything is computed.

    Raises:
        Problem: If torch_geometric is not there.
    """
    try:
        importlib.import_module("torch_geometric.data")
    except ImportError as error:
        raise Problem(
            f"acorn's files are torch_geometric Data, which cannot be imported here ({error})",
            "install torch-geometric, or choose another format",
        ) from error


def write_acorn(
    directory: str | Path, dataset: str, hits: Hits, scores: Scores, label: IntArray | None
) -> tuple[Path, Path]:
    """Write one event as acorn's track building leaves it: a `.pyg` file and a list of tracks.

    Args:
        directory: Parent of the folders `{dataset}` and `{dataset}_tracks`.
        dataset: The folder, acorn's name of the split.
        hits: The hits of the event. acorn's evaluation wants a number for its name.
        scores: Its scores and tracks; acorn's evaluation averages the time that tracks took.
        label: 1 for a true segment, [E]; None without truth.

    Returns:
        Paths of the `.pyg` file and of the list.

    Raises:
        ValueError: If torch_geometric is not there, or the event has no positions or a name that cannot name a file.
    """
    check_acorn_files_can_be_written()
    stem = _stem(scores.event_id)
    path = Path(directory) / dataset / f"{stem}.pyg"
    data = importlib.import_module("torch_geometric.data").Data()
    for name, value in acorn_columns(hits, scores, label).items():
        # Copied: an array that shares memory with others, or may not be written, would be saved with all of it.
        data[name] = torch.from_numpy(np.array(value, order="C")) if isinstance(value, np.ndarray) else value
    buffer = io.BytesIO()
    torch.save(data, buffer)
    write_whole(path, buffer.getvalue())
    tracks = Path(directory) / f"{dataset}_tracks" / f"{stem}.txt"
    lines = track_lines(scores.hit_id, _track_id(scores), hits.position, scores.shared_hits)
    write_whole(tracks, lines.encode())
    return path, tracks


def write_csv(directory: str | Path, scores: Scores) -> Path:
    """Write the track of each hit as CSV: columns event_id, hit_id, track_id, every hit once, in the user's order.

    A shared hit has its first track: TrackML takes one.

    Tracks count from 1, and hits on no track have 0: TrackML's scorer wants no negative number. It takes such a table
    for one event as it is; the tables of several events, one below the other, are a submission.

    Raises:
        ValueError: If the name of the event cannot name a file.
    """
    path = Path(directory) / f"{_stem(scores.event_id)}{CSV_SUFFIX}"
    of_hits = zip(scores.hit_id.tolist(), _track_id(scores).tolist())
    rows = (f"{scores.event_id},{hit},{track + 1}" for hit, track in of_hits)
    write_whole(path, "\n".join(["event_id,hit_id,track_id", *rows, ""]).encode())
    return path


def write_acts(directory: str | Path, scores: Scores, position: FloatArray | None) -> Path:
    """Write tracks by the columns of ACTS's CsvTrackWriter that are known; returns the path.

    Measurements_ID are the ids of a track's hits as in `track_lines`, for `--source acts` of measurements, in brackets.
    Where the tracks were fitted, there are chi2, ndf, chi2/ndf, pT, eta and phi, too, `nan` without a fit, and beside
    the file one of CsvTrackParameterWriter's: `trackId`, the parameters in mm, rad and 1/GeV, variances, covariances.

    Raises:
        ValueError: If the name of the event cannot name a file.
    """
    path = Path(directory) / f"{_stem(scores.event_id)}{CSV_SUFFIX}"
    lines = track_lines(scores.hit_id, _track_id(scores), position, scores.shared_hits).splitlines()
    heading, columns = "", [""] * len(lines)
    if NETWORK in scores.tracks and (fits := scores.tracks[NETWORK].fits) is not None:
        heading, (over_pt, eta, phi, *_) = "chi2,ndf,chi2/ndf,pT,eta,phi,", fits.momenta.T
        rows = np.column_stack([fits.chi2, fits.ndf, fits.chi2 / fits.ndf, 1 / np.abs(over_pt), eta, phi])
        columns = ["".join(f"{number:.9g}," for number in row) for row in rows]
        pairs = [(a, a) for a in range(5)] + [(a, b) for a in range(5) for b in range(5) if a != b]
        names = [f"var_{NAMES[a]}" if a == b else f"cov_{NAMES[a]}{NAMES[b]}" for a, b in pairs]
        covariances = [fits.covariance[:, a, b] for a, b in pairs]
        parameters = np.column_stack([np.arange(len(fits.value)), fits.value, *covariances])
        of_fits = [",".join(f"{number:.9g}" for number in row) for row in parameters]
        text = "\n".join([",".join(["trackId", *NAMES, *names]), *of_fits, ""])
        write_whole(path.with_name(path.name.replace(CSV_SUFFIX, PARAMETERS_SUFFIX)), text.encode())
    of_tracks = zip(lines, columns, strict=True)
    table = (f'{i},{len(line.split())},{of}"[{line.replace(" ", ",")},]"' for i, (line, of) in enumerate(of_tracks))
    write_whole(path, "\n".join([f"track_id,nMeasurements,{heading}Measurements_ID", *table, ""]).encode())
    return path


def track_lines(
    hit_id: IntArray, track_id: IntArray, position: FloatArray | None, shared_hits: IntArray | None = None
) -> str:
    """The tracks, one a line in the order of their numbers: hit ids from the inside out (by r^2 + z^2), blanks between.

    A shared hit stands in each of its tracks. Without positions the hits of a track are in the user's order.
    """
    hit, track = memberships(track_id, shared_hits)
    distance = np.zeros(len(hit_id)) if position is None else (position.astype(np.float64) ** 2).sum(axis=1)
    order = np.lexsort((hit, distance[hit], track))
    order = order[track[order] >= 0]
    starts = np.flatnonzero(np.diff(track[order], prepend=-1))
    of_tracks = np.split(hit_id[hit[order]].astype(str), starts[1:])
    return "".join(" ".join(of_track) + "\n" for of_track in of_tracks if len(of_track))


def acorn_columns(hits: Hits, scores: Scores, label: IntArray | None) -> dict[str, Any]:
    """The columns of the `.pyg` file by acorn's names, as numpy arrays.

    True edges join the hits of a particle one after the other, by distance from the origin. With them come columns of
    the particle table: pt in MeV, nhits, radius and eta_particle, one value a true edge. A particle with one hit has no
    true edge, so acorn cannot know of it.

    Raises:
        Problem: If the event has no positions.
    """
    if hits.position is None:
        raise Problem("it has no positions, which acorn's files need", "write another format", event=hits.event_id)
    x, y, z = hits.position.astype(np.float64).T
    r = np.hypot(x, y)
    with np.errstate(divide="ignore", invalid="ignore"):
        eta = np.arcsinh(z / r)
    return {
        "hit_id": hits.hit_id,
        "x": x,
        "z": z,
        "r": r,
        "phi": np.arctan2(y, x),
        "eta": eta,
        "volume_id": hits.volume,
        "layer_id": hits.layer,
        "module_id": hits.module,
        "edge_index": scores.edge_index,
        "scores": scores.edge_score,
        "labels": _track_id(scores),
        **({} if label is None else {"y": label > 0}),
        **_truth(hits, scores.edge_index, r * r + z * z),
        "num_nodes": len(hits),
        "event_id": [hits.event_id],
        "config": [{}],
        "time_taken": scores.seconds.get("tracks", 0.0),
    }


def _track_id(scores: Scores) -> IntArray:
    return np.full(len(scores.hit_id), -1) if scores.track_id is None else scores.track_id


def _truth(hits: Hits, edge_index: IntArray, distance: FloatArray) -> dict[str, Any]:
    """Columns of the true edges; none without truth. `distance` is that of each hit from the origin, squared."""
    if hits.particle_id is None:
        return {}
    order = np.lexsort((distance, hits.particle_id))
    inner, outer = order[:-1], order[1:]
    joined = (hits.particle_id[inner] == hits.particle_id[outer]) & (hits.particle_id[inner] != 0)
    track_edges = np.stack([inner[joined], outer[joined]])
    of_edge = hits.particle_id[track_edges[0]]
    # Place among the candidate edges of each true edge, in either direction; -1 if it is none of them.
    truth_map = np.full(track_edges.shape[1], -1)
    if edge_index.shape[1]:
        key_of_edges = edge_index.min(axis=0) * len(hits) + edge_index.max(axis=0)
        order = np.argsort(key_of_edges, kind="stable")
        wanted = track_edges.min(axis=0) * len(hits) + track_edges.max(axis=0)
        place = order[np.minimum(np.searchsorted(key_of_edges[order], wanted), len(order) - 1)]
        truth_map = np.where(key_of_edges[place] == wanted, place, -1)
    columns = {"track_edges": track_edges, "truth_map": truth_map, "particle_id": of_edge}
    if (particles := hits.particles) is None:
        return columns
    # NaN, or 0 hits, for a particle that the table does not list.
    known = [name for name in ("primary", "pdg_id") if getattr(particles, name) is not None]
    pt, eta = (rows_of_table(particles, of_edge, name) for name in ("pt", "eta"))
    whole = {
        name: np.nan_to_num(rows_of_table(particles, of_edge, name)).astype(np.int64) for name in (*known, "nhits")
    }
    x, y, _ = rows_of_table(particles, of_edge, "vertex").astype(particles.vertex.dtype).T
    return columns | {
        **{name: whole[of] for name, of in {"primary": "primary", "pdgId": "pdg_id"}.items() if of in whole},
        "pt": pt * 1000.0,
        "eta_particle": eta,
        "radius": np.hypot(x, y).astype(np.float64),
        "nhits": whole["nhits"],
    }


def _stem(event_id: str) -> str:
    return event_file_name(event_id).removesuffix(SUFFIX)
