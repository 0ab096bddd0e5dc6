"""The acorn reader: the graph and the truth as acorn means them, units and names sorted out, no pickle ever run."""

from __future__ import annotations

import json
import math
from functools import partial

import numpy as np
import pytest
from acorn_files import EDGES, LABEL, PHI, TRUE_EDGES, R, Z, columns, save
from marks import fault
from refused import refused
from source_files import pt_unit_of, read_file
from test_pyg import payloads

torch = pytest.importorskip("torch")

from domainpar.tracking.events import construct, features  # noqa: E402
from domainpar.tracking.events.preparation import prepare  # noqa: E402
from domainpar.tracking.events.sources import find_source, open_source  # noqa: E402
from domainpar.tracking.events.targets import target_particles  # noqa: E402

INF = float("inf")
read_event = partial(read_file, "acorn")
listed = find_source("acorn").listed


def test_hits_lie_where_r_phi_and_z_say_and_y_is_derived(tmp_path):
    hits = read_event(save(tmp_path)).hits
    expected = [[r * math.cos(phi), r * math.sin(phi), z] for r, phi, z in zip(R, PHI, Z)]
    np.testing.assert_allclose(hits.position, expected, atol=1e-3)  # phi has float32 in the file
    assert hits.event_id == "000000007"
    assert hits.hit_id.tolist() == [0, 1, 2, 3, 4, 5]
    assert (hits.volume.tolist()[-1], hits.layer.tolist(), hits.module.tolist()[0]) == (13, [2, 4, 6, 2, 4, 6], 11)


def test_edges_and_labels_are_those_of_the_file_in_its_order(tmp_path):
    graph = read_event(save(tmp_path))
    assert graph.edge_index.tolist() == EDGES
    assert graph.label.tolist() == [int(label) for label in LABEL]
    assert graph.label.dtype == np.uint8
    assert graph.label_note is None


@pytest.mark.parametrize("data", [True, False])
def test_names_with_and_without_prefix_are_the_same_event(tmp_path, data):
    short = read_event(save(tmp_path / "short", data=data))
    long = read_event(save(tmp_path / "long", prefixed=True, data=data))
    for name in ("features", "edge_index", "edge_features", "label"):
        assert getattr(short, name).tolist() == getattr(long, name).tolist()
    for name in ("position", "volume", "layer", "module", "hit_id", "particle_id"):
        assert getattr(short.hits, name).tolist() == getattr(long.hits, name).tolist()
    for name in ("particle_id", "pt", "eta", "nhits"):
        assert getattr(short.hits.particles, name).tolist() == getattr(long.hits.particles, name).tolist()


def test_a_hit_has_the_particle_of_its_true_edges_and_others_are_noise(tmp_path):
    hits = read_event(save(tmp_path)).hits
    assert hits.particle_id.tolist() == [70, 70, 70, 80, 80, 0]


def test_the_particle_table_tells_what_true_edges_tell(tmp_path):
    table = read_event(save(tmp_path)).hits.particles
    assert table.particle_id.tolist() == [70, 80]
    np.testing.assert_allclose(table.pt, [2.0, 0.4], rtol=1e-6)
    np.testing.assert_allclose(table.eta, [0.1, -2.0], rtol=1e-6)
    np.testing.assert_allclose(np.hypot(table.vertex[:, 0], table.vertex[:, 1]), [0.5, 30.0])
    assert np.isnan(table.vertex[:, 2]).all()
    assert (table.nhits.tolist(), table.charge.tolist()) == ([3, 7], [0, 0])
    assert (table.primary.tolist(), table.pdg_id.tolist()) == ([1, 0], [13, 11])


def test_what_true_edges_do_not_tell_is_unknown_and_hits_are_counted(tmp_path):
    path = save(tmp_path, pt=None, radius=None, nhits=None, eta_particle=None, primary=None, pdgId=None)
    table = read_event(path).hits.particles
    for values in (table.pt, table.eta, table.vertex):
        assert np.isnan(values).all()
    assert table.nhits.tolist() == [3, 2]
    assert (table.primary, table.pdg_id) == (None, None)


def test_a_vertex_that_is_written_down_is_taken_whole(tmp_path):
    vertices = {"vx": torch.tensor([1.0, 1.0, 4.0]), "vy": torch.tensor([2.0, 2.0, 5.0])}
    table = read_event(save(tmp_path, **vertices, vz=torch.tensor([3.0, 3.0, 6.0]))).hits.particles
    assert table.vertex.tolist() == [[1, 2, 3], [4, 5, 6]]


def test_a_true_edge_to_a_hit_outside_the_region_gives_no_particle_to_the_last_hit(tmp_path):
    hits = read_event(save(tmp_path, track_edges=torch.tensor([[0, 1, 3], [1, 2, -1]]))).hits
    assert hits.particle_id.tolist() == [70, 70, 70, 0, 0, 0]


def test_true_edges_of_particle_0_are_noise(tmp_path):
    hits = read_event(save(tmp_path, particle_id=torch.tensor([70, 70, 0]))).hits
    assert hits.particle_id.tolist() == [70, 70, 70, 0, 0, 0]
    assert hits.particles.particle_id.tolist() == [70]


@pytest.mark.parametrize(("unit", "scale"), [("MeV", 1e-3), ("GeV", 1.0)])
def test_pt_becomes_gev_from_the_unit_that_is_stated(tmp_path, unit, scale):
    table = read_event(save(tmp_path), pt_unit=unit).hits.particles
    np.testing.assert_allclose(table.pt, [2000 * scale, 400 * scale], rtol=1e-6)


def test_the_unit_of_pt_is_guessed_over_the_events_and_refused_where_it_may_be_either(tmp_path):
    nothing = save(tmp_path, "event1.pyg", track_edges=torch.zeros(2, 0, dtype=torch.long), truth_map=None,
                   **{name: torch.zeros(0) for name in
                      ("particle_id", "pt", "radius", "primary", "nhits", "pdgId", "eta_particle")})  # fmt: skip
    in_mev = save(tmp_path, "event2.pyg")
    in_gev = save(tmp_path, "event3.pyg", pt=torch.tensor([2.0, 2.0, 0.4]))
    either = save(tmp_path, "event4.pyg", pt=torch.tensor([30.0, 30.0, 30.0]))
    assert pt_unit_of([nothing, in_mev]) == "MeV"
    assert pt_unit_of([in_gev, in_mev]) == "GeV"
    assert pt_unit_of([nothing]) is None
    with refused("median pt is 30; is that MeV or GeV", "4", either):
        pt_unit_of([either])


def test_default_features_are_those_of_graphs_built_here(tmp_path):
    graph = read_event(save(tmp_path))
    np.testing.assert_allclose(graph.features, np.array([R, PHI, Z]).T / features.NODE_SCALE, rtol=1e-6)
    assert (graph.feature_names, graph.edge_feature_names) == (features.NODE_FEATURES, features.EDGE_FEATURES)
    np.testing.assert_allclose(
        graph.edge_features, construct.edge_features(graph.hits.position, graph.edge_index), rtol=1e-6
    )


def test_features_are_the_columns_that_are_asked_for_over_their_scales(tmp_path):
    options = {
        "node_features": ("z", "hit_r", "eta", "y", "count"),
        "node_scales": (2.0, 4.0, 0.5, 10.0, 1.0),
        "edge_features": (),
    }
    graph = read_event(save(tmp_path, count=torch.tensor([1, 2, 3, 4, 5, 6])), **options)
    assert graph.feature_names == ("z", "r", "eta", "y", "count")
    assert graph.edge_features.shape == (6, 0)
    for hit in range(6):
        eta = -math.log(math.tan(math.atan2(R[hit], Z[hit]) / 2))
        expected = [Z[hit] / 2, R[hit] / 4, eta / 0.5, R[hit] * math.sin(PHI[hit]) / 10, hit + 1]
        np.testing.assert_allclose(graph.features[hit], expected, rtol=1e-5)


def test_edge_features_are_differences_of_scaled_values_with_phi_wrapped(tmp_path):
    names = ("rphislope", "dr", "dphi", "dz", "edge_deta", "phislope")
    scales = (1000.0, math.pi, 1000.0)
    graph = read_event(save(tmp_path), node_scales=scales, edge_features=names)
    assert graph.edge_feature_names == ("rphislope", "dr", "dphi", "dz", "deta", "phislope")
    for edge, (src, dst) in enumerate(zip(*EDGES)):
        dphi = math.remainder(PHI[dst] - PHI[src], 2 * math.pi) / math.pi
        dr, dz = (R[dst] - R[src]) / 1000, (Z[dst] - Z[src]) / 1000
        deta = math.asinh(Z[dst] / R[dst]) - math.asinh(Z[src] / R[src])
        slope = 0.0 if dr == dphi == 0 else math.copysign(100, dphi) if dr == 0 else max(-100, min(100, dphi / dr))
        expected = [(R[src] + R[dst]) / 2000 * slope, dr, dphi, dz, deta, slope]
        np.testing.assert_allclose(graph.edge_features[edge], expected, rtol=2e-5, atol=1e-6)
    crossing = EDGES[1].index(4, 3)
    assert abs(graph.edge_features[crossing, 2]) < 0.1


def test_edge_features_of_the_file_win_and_slopes_are_tamed(tmp_path):
    given = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 6.0])
    slopes = torch.tensor([INF, -INF, math.nan, 200.0, 1.0, -1.0])
    options = {"edge_features": ("dr", "phislope"), "edge_scales": (2.0, 1.0)}
    graph = read_event(save(tmp_path, dr=given, phislope=slopes), **options)
    assert graph.edge_features[:, 0].tolist() == [0.5, 1.0, 1.5, 2.0, 2.5, 3.0]
    assert graph.edge_features[:, 1].tolist() == [100.0, -100.0, 0.0, 100.0, 1.0, -1.0]


def test_hits_of_strip_endcaps_take_their_own_place_for_that_of_clusters(tmp_path):
    clusters = {f"cluster_{name}_{i}": torch.full((6,), 7.0 * i) for name in ("r", "z") for i in (1, 2)}
    names = ("r", "z", "cluster_r_1", "cluster_z_1", "cluster_r_2", "cluster_z_2")
    path = save(tmp_path, region=torch.tensor([1, 2, 3, 4, 5, 6]), **clusters)
    graph = read_event(path, node_features=names, node_scales=(1000.0, 500.0) * 3, edge_features=())
    for hit in range(6):
        own = [R[hit] / 1000, Z[hit] / 500]
        others = own * 2 if hit in (1, 5) else [0.007, 0.014, 0.014, 0.028]
        np.testing.assert_allclose(graph.features[hit], [*own, *others], rtol=1e-6)


@pytest.mark.parametrize(
    ("cuts", "passing"),
    [
        ({"pt": [1, INF]}, [0, 1]),
        ({"pt": [0, 1]}, [2]),
        ({"primary": False}, [2]),
        ({"pdgId": ["not_in", [11, -11]], "nhits": [3, INF]}, [0, 1]),
        ({"eta": [-3, 0]}, [2]),
        ({"eta_particle": ["not_within", [-3, 0]]}, [0, 1]),
        ({"track_particle_radius": ["within", [0, 1]]}, [0, 1]),
        ({"pt": [5, 6]}, []),
    ],
)
def test_hard_cuts_keep_edges_whose_two_hits_lie_on_passing_true_edges(tmp_path, cuts, passing):
    everything = read_event(save(tmp_path))
    graph = read_event(save(tmp_path), hard_cuts=cuts)
    hits_that_pass = {hit for edge in passing for hit in (TRUE_EDGES[0][edge], TRUE_EDGES[1][edge])}
    kept = [e for e in range(6) if EDGES[0][e] in hits_that_pass and EDGES[1][e] in hits_that_pass]
    assert graph.edge_index.tolist() == everything.edge_index[:, kept].tolist()
    assert graph.label.tolist() == everything.label[kept].tolist()
    assert graph.edge_features.tolist() == everything.edge_features[kept].tolist()
    assert graph.num_nodes == 6
    assert graph.label_note == f"hard cuts by truth kept {len(kept)} of 6 candidate edges"


@pytest.mark.parametrize(
    ("cuts", "message"),
    [
        ({"charge": 1}, r"no column charge of true edges; found \['eta_particle', 'nhits'"),
        ({"pt": [2, 1]}, "hard_cuts on pt: .*empty interval"),
    ],
)
def test_hard_cuts_that_cannot_be_made_are_refused(tmp_path, cuts, message):
    with refused(message, "000000007", tmp_path / "event000000007.pyg"):
        read_event(save(tmp_path), hard_cuts=cuts)
    with pytest.raises(ValueError, match="hard_cuts need the truth"):
        read_event(save(tmp_path, track_edges=None), hard_cuts={"pt": [1, INF]})


def test_an_event_needs_no_truth_no_ids_and_no_detector(tmp_path):
    absent = ("hit_id", "x", "volume_id", "layer_id", "module_id", "y", "track_edges", "truth_map", "particle_id", "pt",
              "radius", "primary", "nhits", "pdgId", "eta_particle", "event_id", "config")  # fmt: skip
    graph = read_event(save(tmp_path, **dict.fromkeys(absent)))
    assert (graph.label, graph.hits.particle_id, graph.hits.particles) == (None, None, None)
    assert graph.hits.hit_id.tolist() == [0, 1, 2, 3, 4, 5]
    for ids in (graph.hits.volume, graph.hits.layer, graph.hits.module):
        assert not ids.any()


def test_x_and_y_do_for_r_and_phi_when_y_has_its_prefix(tmp_path):
    expected = read_event(save(tmp_path))
    xy = {
        "x": None,
        "hit_x": torch.tensor(expected.hits.position[:, 0]),
        "hit_y": torch.tensor(expected.hits.position[:, 1]),
    }
    graph = read_event(save(tmp_path, r=None, phi=None, **xy))
    np.testing.assert_allclose(graph.hits.position, expected.hits.position, rtol=1e-6)
    np.testing.assert_allclose(graph.features, expected.features, rtol=1e-5)


@fault(22)
def test_phi_from_0_to_two_pi_is_wrapped(tmp_path):
    graph = read_event(save(tmp_path, phi=torch.tensor(PHI) % (2 * math.pi)))
    np.testing.assert_allclose(graph.features[:, 1], np.array(PHI) / math.pi, rtol=1e-5)


def test_module_numbers_beyond_32_bits_are_numbered_within_the_event(tmp_path):
    graph = read_event(save(tmp_path, module_id=torch.tensor([2**40, 5, 2**41, 5, -(2**40), 0])))
    assert graph.hits.module.tolist() == [2, 1, 3, 1, -1, 0]


def test_hit_ids_may_repeat_and_start_anywhere(tmp_path):
    graph = read_event(save(tmp_path, hit_id=torch.tensor([0, 4, 4, 9, 2**40, 1])))
    assert graph.hits.hit_id.tolist() == [0, 4, 4, 9, 2**40, 1]


EMPTY = {name: torch.zeros(0) for name in ("x", "r", "phi", "z")} | {
    name: torch.zeros(0, dtype=torch.long) for name in ("hit_id", "volume_id", "layer_id", "module_id", "y")
}
NO_EDGES = torch.zeros(2, 0, dtype=torch.long)
NO_TRUTH = {name: torch.zeros(0) for name in
            ("particle_id", "pt", "radius", "primary", "nhits", "pdgId", "eta_particle", "truth_map")}  # fmt: skip


def test_an_empty_event_is_read(tmp_path):
    for cuts in (None, {"pt": [1, INF]}):
        path = save(tmp_path, **EMPTY, **NO_TRUTH, edge_index=NO_EDGES, track_edges=NO_EDGES)
        graph = read_event(path, hard_cuts=cuts, edge_features=("dr", "phislope"))
        assert (graph.num_nodes, graph.num_edges, len(graph.hits.particles.particle_id)) == (0, 0, 0)
        assert graph.edge_features.shape == (0, 2)


def test_noise_only_and_no_edges_are_read(tmp_path):
    noise = read_event(save(tmp_path, track_edges=NO_EDGES, y=torch.zeros(6), **NO_TRUTH))
    assert not noise.hits.particle_id.any()
    assert not noise.label.any()
    assert read_event(save(tmp_path, edge_index=NO_EDGES, y=torch.zeros(0))).num_edges == 0


@fault(21)
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"edge_index": None}, "no edge_index; .*hits only"),
        ({"r": None, "hit_y": None}, r"r and phi, or x and hit_y, .*\['hit_id'"),
        ({"z": None}, r"no column z of hits; found \['hit_id', 'layer_id'"),
        ({"hit_r": torch.tensor(R)}, "r and hit_r are one column"),
        ({"r": torch.tensor(R[:5])}, r"^r .*\[5\],.*\[6\]"),
        ({"y": torch.tensor([0, 1, 2, 0, 0, 0])}, "edge 2 is 2,"),
        ({"y": torch.tensor([0, 1])}, r"^y .*\[2\],.*\[6\]"),
        ({"pt": torch.tensor([1.0])}, r"^pt .*\[1\],.*true edge, \[3\]"),
        ({"edge_index": torch.tensor([[0], [6]])}, "edge_index .*0 -> 6; .*0 to 5"),
        ({"edge_index": torch.tensor([[-1], [2]])}, "edge_index .*-1 -> 2"),
        ({"track_edges": torch.tensor([[0], [6]])}, "track_edges .*0 -> 6"),
        ({"edge_index": torch.zeros(2, 3)}, "edge_index is float64"),
        ({"z": torch.tensor([math.nan] * 6)}, "z of 6 hits is not finite"),
        ({"phi": torch.tensor(PHI) * 57.3}, "phi .*178.776, .*radians"),
        ({"r": torch.tensor(R) / 1000, "x": None}, "r is 0.5, .*mm"),
        ({"x": torch.tensor(R) * 3}, r"x and r cos\(phi\) differ"),
        ({"r": torch.zeros(6) + torch.tensor([0, 1, 1, 1, 1, 50.0]), "x": None}, "edge_features holds .* not finite"),
    ],
)
def test_bad_events_are_refused_with_event_and_file(tmp_path, changes, message):
    path = save(tmp_path, **changes)
    with refused(message, "000000007", path):
        read_event(path, edge_features=("deta",))


def test_a_feature_that_nobody_knows_is_refused_with_those_there_are(tmp_path):
    with pytest.raises(ValueError, match=r"cell_count .*\['hit_id', 'layer_id'"):
        read_event(save(tmp_path), node_features=("r", "cell_count"), node_scales=(1.0, 1.0))
    with pytest.raises(ValueError, match="dR .*dr, dphi"):
        read_event(save(tmp_path), edge_features=("dR",))


def test_features_and_scales_belong_together(tmp_path):
    save(tmp_path)
    with pytest.raises(ValueError, match="2 node_features but 3 node_scales"):
        open_source("acorn", tmp_path, node_features=("r", "z"))
    with pytest.raises(ValueError, match="0 edge_features but 1 edge_scales"):
        open_source("acorn", tmp_path, edge_scales=(1.0,))
    with pytest.raises(ValueError, match="node_scales are .*other than 0"):
        open_source("acorn", tmp_path, node_features=("r",), node_scales=(0.0,))


@fault(20)
def test_numpy_values_and_strings_need_no_permission(tmp_path):
    path = save(tmp_path, event_id=np.str_("7"), names=np.array(["a", "b"]), mean=np.float32(1), config=[np.int8(1)])
    assert read_event(path).num_edges == 6


def test_a_hostile_file_is_not_run_either_where_the_unit_of_pt_is_guessed(tmp_path):
    path, mark = tmp_path / "event7.pyg", tmp_path / "was-run"
    torch.save({**columns(), "config": [payloads(mark)["system"]]}, path)
    with refused(r"^refused.*asks for .*\.system", "7", path):
        pt_unit_of([path])
    assert not mark.exists()


# --- directories -----------------------------------------------------------------------------------------------------


def test_folders_tell_the_splits_and_names_lose_what_acorn_adds(tmp_path):
    for name in ("trainset/event2-graph.pyg", "trainset/event1.pyg", "valset/event0.pyg", "testset/event9.pyg"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / "valset" / "event3-truth.csv").touch()
    assert listed(tmp_path)[1] == {"1": "train", "2": "train", "0": "val", "9": "test"}
    events, splits = listed(tmp_path / "trainset")
    assert (events.keys(), splits) == ({"1", "2"}, {})


def test_directories_without_events_and_events_of_one_name_are_refused(tmp_path):
    with pytest.raises(ValueError, match="not a directory"):
        listed(tmp_path / "nowhere")
    with refused("holds no acorn events; expected are files like event"):
        listed(tmp_path)
    (tmp_path / "event1.pyg").touch()
    (tmp_path / "event1-graph.pyg").touch()
    with refused("are of one event by their names", "1"):
        listed(tmp_path)


def prepared(tmp_path, **options):
    source = open_source("acorn", directory=tmp_path / "files", **options)
    return source, prepare(source, tmp_path / "store", partitioner="contiguous", num_tiles=2)


def test_a_store_has_the_splits_of_the_folders(tmp_path):
    for folder, names in (("trainset", "12"), ("valset", "3"), ("testset", "45")):
        for name in names:
            save(tmp_path / "files" / folder, f"event{name}.pyg")
    _, store = prepared(tmp_path)
    assert {split: [r.event for r in store.events(split)] for split in ("train", "val", "test")} == {
        "train": ["1", "2"], "val": ["3"], "test": ["4", "5"]
    }  # fmt: skip


def test_a_store_of_a_flat_directory_is_dealt_into_splits_and_says_how_it_was_read(tmp_path):
    for name in "123456":
        save(tmp_path / "files", f"event{name}.pyg")
    source, store = prepared(tmp_path, hard_cuts={"pt": [1, INF]}, edge_features=("dr",))
    assert [len(store.events(split)) for split in ("train", "val", "test")] == [4, 1, 1]
    assert source.settings.items() <= store.settings.items()
    assert store.settings["pt_unit"] == "MeV"
    assert store.settings["hard_cuts"] == {"pt": [1, INF]}
    assert json.loads(json.dumps(store.settings)) == store.settings
    with store.open(store.events()[0]) as event:
        assert event.num_edges == 2
        assert event.edge_feature_names == ("dr",)
        table = event.particles()
    np.testing.assert_allclose(table.pt, [2.0, 0.4], rtol=1e-6)
    assert table.particle_id[target_particles(table, {"primary": True})].tolist() == [70]
    assert table.particle_id[target_particles(table, {"pdgId": ["in", [11, -11]]})].tolist() == [80]


def test_a_store_without_kinds_of_particles_says_so_when_it_is_asked(tmp_path):
    save(tmp_path / "files", primary=None, pdgId=None)
    _, store = prepared(tmp_path)
    with store.open(store.events()[0]) as event:
        table = event.particles()
    assert (table.primary, table.pdg_id) == (None, None)
    for name in ("primary", "pdgId"):
        with pytest.raises(ValueError, match=f"'{name}', but the source"):
            target_particles(table, {name: 1})
