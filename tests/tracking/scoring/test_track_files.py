"""Tracks in the formats of others: our reader gets back what was written, each list says what its reader expects."""

from __future__ import annotations

import io
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small_run import drawn, simulated, write_store
from source_files import pt_unit_of, read_file

from domainpar.tracking.events.graph import Hits, Particles
from domainpar.tracking.reco.ckf.detector_layout import why_not_followed
from domainpar.tracking.reco.event_scores import FoundTracks, Scores
from domainpar.tracking.reco.performance.rates import NETWORK
from domainpar.tracking.reco.perigee import NAMES, Perigees
from domainpar.tracking.scoring.event_tracks import (
    acorn_columns,
    track_lines,
    write_acorn,
    write_acts,
    write_csv,
)

POSITION = np.array(
    [[30, 1, 5], [70, 2, 10], [115, 4, 20], [0, -31, 4], [0, -72, 9], [-500, 3, 600], [31, 1, 5.5]], np.float32
)


HITS = ("event_id", "hit_id", "position", "volume", "layer", "module", "particle_id", "particles")


@dataclass
class Tracked:
    """An event as `write_acorn` takes it."""

    hits: Hits
    scores: Scores
    label: np.ndarray | None

    @property
    def track_id(self):
        return self.scores.track_id

    def lines(self):
        return track_lines(self.hits.hit_id, self.track_id, self.hits.position)

    def columns(self):
        return acorn_columns(self.hits, self.scores, self.label)


def tracked(**changes):
    """Particle 900 left hits 0, 6, 1, 2 outwards, particle 5 hits 3 and 4, and hit 5 is noise."""
    fields = {
        "event_id": "000000007",
        "hit_id": np.array([10, 11, 12, 13, 14, 15, 16]),
        "track_id": np.array([0, 0, 0, 1, 1, -1, -1]),
        "position": POSITION,
        "edge_index": np.array([[0, 1, 0, 6, 4], [6, 2, 1, 1, 5]]),
        "edge_score": np.array([0.9, 0.8, 0.7, 0.25, 0.0], np.float32),
        "label": np.array([1, 1, 0, 1, 0], np.uint8),
        "particle_id": np.array([900, 900, 900, 5, 5, 0, 900]),
        "particles": Particles(
            particle_id=np.array([900, 5, 44]),
            pt=np.array([2.5, 0.5, 1.0], np.float32),
            eta=np.array([0.25, -1.5, 0.0], np.float32),
            vertex=np.array([[3, 4, 1], [0, 0, 2], [0, 0, 0]], np.float32),
            nhits=np.array([6, 2, 1], np.int32),
            charge=np.array([1, -1, 1], np.int8),
            primary=np.array([1, 0, 1], np.int8),
            pdg_id=np.array([211, -13, 11]),
        ),
        "volume": np.array([8, 8, 8, 8, 8, 7, 8]),
        "layer": np.array([2, 4, 6, 2, 4, 2, 2]),
        "module": np.array([1, 2, 3, 4, 5, 6, 7]),
        **changes,
    }
    edge_score = fields["edge_score"]
    scores = Scores(
        event_id=fields["event_id"],
        hit_id=fields["hit_id"],
        edge_index=fields["edge_index"],
        edge_logit=edge_score,
        edge_score=edge_score,
        edge_scored=edge_score > 0,
        tracks={NETWORK: FoundTracks(fields["track_id"])},
    )
    return Tracked(Hits(**{name: fields[name] for name in HITS}), scores, fields["label"])


def found(scores, **changes):
    """Scores whose tracks have more."""
    return replace(scores, tracks={NETWORK: replace(scores.tracks[NETWORK], **changes)})


NOTHING = {
    **dict.fromkeys(("hit_id", "track_id", "label", "particle_id", "volume", "layer", "module"), np.zeros(0, np.int64)),
    "position": np.zeros((0, 3)),
    "edge_index": np.zeros((2, 0), np.int64),
    "edge_score": np.zeros(0),
}


def nothing():
    return tracked(**NOTHING)


def noise_only():
    return tracked(particle_id=np.zeros(7, np.int64), track_id=np.full(7, -1), label=np.zeros(5, np.uint8))


def without_truth():
    return tracked(label=None, particle_id=None, particles=None)


def one_hit():
    columns = dict.fromkeys(("hit_id", "volume", "layer", "module"), np.array([3]))
    hit = {"track_id": np.array([0]), "position": POSITION[:1], "particle_id": np.array([900])}
    return tracked(**NOTHING | columns | hit)


# --- lists of tracks -------------------------------------------------------------------------------------------------


def test_a_track_is_a_line_of_hit_ids_from_the_inside_out():
    assert tracked().lines() == "10 11 12\n13 14\n"
    inside_out = tracked(track_id=np.array([1, 1, 0, 1, -1, -1, 1]))
    assert inside_out.lines() == "12\n10 13 16 11\n"


def test_without_positions_the_hits_of_a_track_keep_the_users_order():
    assert tracked(position=None, track_id=np.array([1, 0, 1, 0, 1, -1, 0])).lines() == "11 13 16\n10 12 14\n"


def test_a_shared_hit_stands_in_the_line_of_each_of_its_tracks():
    event = tracked()
    lines = track_lines(event.hits.hit_id, event.track_id, event.hits.position, np.array([[0, 1], [3, 0]]))
    assert lines == "10 13 11 12\n10 13 14\n"


@given(st.lists(st.integers(-1, 4), max_size=12), st.integers(0, 2**32 - 1))
@settings(max_examples=40)
def test_every_track_is_written_once_with_all_its_hits(track_id, seed):
    rng = np.random.default_rng(seed)
    count = len(track_id)
    hit_id, position = rng.permutation(count) + 100, rng.normal(size=(count, 3))
    lines = [
        [int(hit) for hit in line.split()]
        for line in track_lines(hit_id, np.array(track_id, np.int64), position).splitlines()
    ]
    distance = dict(zip(hit_id.tolist(), (position**2).sum(axis=1).tolist()))
    expected = []
    for track in sorted(set(track_id) - {-1}):
        hits = [hit for hit, of in zip(hit_id.tolist(), track_id) if of == track]
        expected.append(sorted(hits, key=distance.__getitem__))
    assert lines == expected


@pytest.mark.parametrize("event", [nothing(), noise_only()])
def test_no_tracks_are_an_empty_list(event):
    assert event.lines() == ""


# --- CSV -------------------------------------------------------------------------------------------------------------


def trackml_score(truth, submission):
    """The score of the TrackML challenge, by its definition: it takes a hit of every number for one of a track."""
    event = truth.merge(submission[["hit_id", "track_id"]], on="hit_id", how="left", validate="one_to_one")
    assert (event.track_id >= 0).all()
    of_particle = event.particle_id.value_counts()
    score = 0.0
    for _, track in event.groupby("track_id"):
        particle, shared = track.particle_id.mode()[0], track.particle_id.value_counts().max()
        if particle != 0 and 2 * shared > len(track) and 2 * shared > of_particle[particle]:
            score += track.weight[track.particle_id == particle].sum()
    return score / event.weight.sum()


def test_the_table_is_what_the_trackml_scorer_takes(tmp_path):
    event = tracked()
    path = write_csv(tmp_path, event.scores)
    assert path.name == "event000000007-tracks.csv"
    table = pd.read_csv(path)
    assert list(table.columns) == ["event_id", "hit_id", "track_id"]
    assert table.hit_id.tolist() == event.hits.hit_id.tolist()
    assert table.track_id.tolist() == [1, 1, 1, 2, 2, 0, 0]
    truth = pd.DataFrame(
        {"hit_id": event.hits.hit_id, "particle_id": event.hits.particle_id, "weight": [1, 1, 1, 2, 2, 0, 1]}
    )
    assert trackml_score(truth, table) == pytest.approx(7 / 8)


def test_the_list_for_acts_has_a_row_for_each_track_and_its_hits_from_the_inside_out(tmp_path):
    shared = found(tracked().scores, shared_hits=np.array([[4, 0]]))
    path = write_acts(tmp_path, shared, POSITION)
    assert path.name == "event000000007-tracks.csv"
    table = pd.read_csv(path, index_col="track_id")
    assert table.nMeasurements.tolist() == [4, 2]
    assert table.Measurements_ID.tolist() == ["[10,11,14,12,]", "[13,14,]"]
    assert write_acts(tmp_path, nothing().scores, None).read_text() == "track_id,nMeasurements,Measurements_ID\n"


def test_in_the_table_a_shared_hit_is_on_its_first_track_alone(tmp_path):
    event = tracked()
    shared = found(event.scores, shared_hits=np.array([[0, 1], [3, 0]]))
    alone, table = (write_csv(tmp_path, scores).read_text() for scores in (event.scores, shared))
    assert table == alone


@pytest.mark.parametrize(("event", "rows"), [(nothing(), 0), (noise_only(), 7), (one_hit(), 1), (without_truth(), 7)])
def test_every_hit_has_one_row(tmp_path, event, rows):
    text = write_csv(tmp_path, event.scores).read_text()
    table = pd.read_csv(io.StringIO(text))
    assert len(table) == rows
    assert table.hit_id.tolist() == event.hits.hit_id.tolist()
    assert (table.track_id - 1).tolist() == event.track_id.tolist()


def test_a_name_that_cannot_name_a_file_is_refused(tmp_path):
    with pytest.raises(ValueError, match="cannot name a file"):
        write_csv(tmp_path, tracked(event_id="../7").scores)


# --- acorn -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def written(tmp_path):
    """Write an event to acorn's folders and give the paths of its files."""
    pytest.importorskip("torch_geometric")

    def write(event, dataset="testset"):
        return write_acorn(tmp_path, dataset, event.hits, event.scores, event.label)

    return write


def test_files_lie_where_acorn_puts_them(written, tmp_path):
    path, tracks = written(tracked(), "valset")
    assert path == tmp_path / "valset" / "event000000007.pyg"
    assert tracks == tmp_path / "valset_tracks" / "event000000007.txt"
    assert tracks.read_text() == tracked().lines()
    assert sorted(file.name for file in tmp_path.rglob("*") if file.is_file()) == [
        "event000000007.pyg", "event000000007.txt"
    ]  # fmt: skip


def test_acorns_list_of_tracks_knows_shared_hits(written):
    event = tracked()
    event.scores = found(event.scores, shared_hits=np.array([[6, 1]]))
    assert written(event)[1].read_text() == "10 11 12\n13 16 14\n"


def test_our_reader_gets_back_what_was_written(written):
    event = tracked()
    path, _ = written(event)
    assert pt_unit_of([path]) == "MeV"
    graph = read_file("acorn", path, edge_features=("scores",))
    hits, table = graph.hits, graph.hits.particles
    assert hits.event_id == event.hits.event_id
    for name in ("hit_id", "particle_id", "volume", "layer", "module"):
        assert getattr(hits, name).tolist() == getattr(event.hits, name).tolist()
    np.testing.assert_allclose(hits.position, event.hits.position, rtol=1e-6, atol=1e-9)
    assert graph.edge_index.tolist() == event.scores.edge_index.tolist()
    assert graph.label.tolist() == event.label.tolist()
    assert graph.edge_features[:, 0].tolist() == event.scores.edge_score.tolist()
    assert table.particle_id.tolist() == [5, 900]
    np.testing.assert_allclose(table.pt, [0.5, 2.5], rtol=1e-6)
    assert (table.eta.tolist(), table.nhits.tolist()) == ([-1.5, 0.25], [2, 6])
    assert (table.primary.tolist(), table.pdg_id.tolist()) == ([0, 1], [-13, 211])
    assert np.hypot(*table.vertex[:, :2].T).tolist() == [0.0, 5.0]


@pytest.mark.parametrize("event", [nothing(), noise_only(), without_truth(), one_hit()])
def test_events_with_little_in_them_come_back_too(written, event):
    graph = read_file("acorn", written(event)[0])
    assert graph.hits.hit_id.tolist() == event.hits.hit_id.tolist()
    assert graph.edge_index.tolist() == event.scores.edge_index.tolist()
    if event.hits.particle_id is None:
        assert (graph.hits.particle_id, graph.label) == (None, None)
    else:
        assert not graph.hits.particle_id.any()  # acorn knows particles by their true edges only


def test_acorns_evaluation_finds_what_it_reads(written):
    """What `load_reconstruction_df` and `evaluate_labelled_graph` of acorn look up, by the same names."""
    import torch

    event = tracked()
    graph = torch.load(written(event)[0], weights_only=False)  # our own file
    assert graph.labels.tolist() == event.track_id.tolist()
    assert graph.hit_id.tolist() == event.hits.hit_id.tolist()
    particle_id = torch.zeros(7, dtype=torch.int64)
    for ends in graph.track_edges:
        particle_id[ends] = graph.particle_id
    assert particle_id.tolist() == event.hits.particle_id.tolist()
    assert int(graph.event_id[0]) == 7
    assert graph.num_nodes == 7
    graph.config.append({})
    assert graph.time_taken == 0.0
    assert graph.pt.tolist() == [500.0, 2500.0, 2500.0, 2500.0]
    assert len(graph.scores) == len(graph.y) == 5
    assert graph.y.dtype == torch.bool


def test_true_edges_follow_a_particle_outwards_and_know_their_candidates():
    columns = tracked().columns()
    assert columns["track_edges"].tolist() == [[3, 0, 6, 1], [4, 6, 1, 2]]
    assert columns["particle_id"].tolist() == [5, 900, 900, 900]
    assert columns["truth_map"].tolist() == [-1, 0, 3, 1]
    flipped = tracked(edge_index=tracked().scores.edge_index[::-1]).columns()
    assert flipped["truth_map"].tolist() == [-1, 0, 3, 1]


def test_what_the_particle_table_does_not_list_is_unknown():
    columns = tracked(particle_id=np.array([901, 901, 901, 5, 5, 0, 901])).columns()
    assert np.isnan(columns["pt"]).tolist() == [False, True, True, True]
    assert columns["nhits"].tolist() == [2, 0, 0, 0]
    empty = Particles(*(np.zeros((0, 3)) if name == "vertex" else np.zeros(0, np.int64)
                        for name in ("particle_id", "pt", "eta", "vertex", "nhits", "charge")))  # fmt: skip
    assert np.isnan(tracked(particles=empty).columns()["pt"]).all()


def test_the_same_event_is_the_same_bytes(written, tmp_path):
    path, _ = written(tracked())
    first = path.read_bytes()
    written(tracked(), "valset")
    assert written(tracked())[0].read_bytes() == first
    assert (tmp_path / "valset" / path.name).read_bytes() == first


def test_an_event_without_positions_and_a_missing_library_are_refused(written, tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="no positions, .*event 000000007"):
        written(tracked(position=None))
    monkeypatch.setitem(__import__("sys").modules, "torch_geometric.data", None)
    with pytest.raises(ValueError, match="install torch-geometric"):
        written(tracked())
    assert not list(tmp_path.iterdir())


# --- parameters at the beam line -------------------------------------------------------------------------------------


def fitted():
    """Tracked with parameters of its two tracks, the second of which has no fit."""
    value, root = np.array([[0.1, 5.0, 0.5, 1.2, -0.4], [np.nan] * 5]), np.random.default_rng(0).normal(size=(5, 5))
    covariance = np.stack([root @ root.T, np.full((5, 5), np.nan)])
    return Perigees(value, covariance, np.array([3.0, np.nan]), np.array([1, -1]))


def test_the_files_for_acts_have_fitted_momenta_and_parameters_with_covariances(tmp_path):
    fits = fitted()
    path = write_acts(tmp_path, found(tracked().scores, fits=fits), POSITION)
    table = pd.read_csv(path, index_col="track_id")
    assert table.Measurements_ID.tolist() == ["[10,11,12,]", "[13,14,]"]
    momentum = [np.sin(1.2) / 0.4, -np.log(np.tan(0.6)), 0.5]
    np.testing.assert_allclose(
        table.loc[0, ["chi2", "ndf", "chi2/ndf", "pT", "eta", "phi"]].tolist(), [3, 1, 3, *momentum]
    )
    assert table.loc[1, ["chi2", "pT", "eta", "phi"]].isna().all()
    parameters = pd.read_csv(tmp_path / "event000000007-trackparams.csv", index_col="trackId")
    assert list(parameters)[:10] == [*NAMES, *(f"var_{name}" for name in NAMES)]
    np.testing.assert_allclose(parameters.loc[0, list(NAMES)].tolist(), fits.value[0])
    for i, a in enumerate(NAMES):
        for j, b in enumerate(NAMES):
            name = f"var_{a}" if a == b else f"cov_{a}{b}"
            assert parameters.loc[0, name] == pytest.approx(fits.covariance[0, i, j], rel=1e-8)
    assert parameters.loc[1].isna().all()


def test_why_the_tracks_of_an_event_have_no_parameters_is_said(tmp_path):
    reasons = {}
    for graph in (simulated(0), drawn(6, event_id="elsewhere"), drawn(6, positions=False, event_id="nowhere")):
        store = write_store(tmp_path / graph.hits.event_id, [graph])
        with store.open(store.records[0]) as event:
            reasons[event.event_id] = why_not_followed(event)
    assert reasons.pop("000") is None
    assert "no surface" in reasons.pop("elsewhere")
    assert reasons == {"nowhere": "their hits have no positions"}
