"""`agnn_forms.py`: its forms compute one network, its sectors are heptrkx's, and it runs from the flags to the end."""

import agnn_forms
import attention_forms
import heptrkx_sectors
import numpy as np
import pytest
import short_runs
import torch
from attention_forms import FORMS
from drawn import EDGE_INDEX
from heptrkx_sectors import RECIPES, Recipe

from domainpar.nn.published import AttentionNetwork
from domainpar.testing import run_ranks
from domainpar.tracking.events.graph import Hits, Particles
from domainpar.tracking.events.simulate import simulate_event

NO_EDGES = np.zeros((2, 0), np.int64)
NUM_NODES = 11  # the drawn event and two hits without edges

pytestmark = pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")


def outcome(edge_index, logits_of):
    """Logits, and gradients at the features and at all weights."""
    network = AttentionNetwork(3, hidden=8, graph_iters=3, seed=1).double()
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(NUM_NODES, 3, generator=generator, dtype=torch.float64, requires_grad=True)
    edge_index = torch.from_numpy(edge_index)
    logits = logits_of(network, x, edge_index)
    torch.randn(len(logits), generator=generator, dtype=torch.float64).dot(logits).backward()
    return [logits.detach(), x.grad, *(weight.grad for weight in network.parameters())]


def of_form(name):
    def logits_of(network, x, edge_index):
        return attention_forms.logits_of(network, x, FORMS[name].make(edge_index, len(x), x.dtype))

    return logits_of


@pytest.mark.parametrize("edge_index", [EDGE_INDEX, NO_EDGES], ids=["drawn", "no edges"])
@pytest.mark.parametrize("form", FORMS)
def test_every_form_gives_the_logits_and_gradients_of_the_network(form, edge_index):
    expected = outcome(edge_index, lambda network, x, edge_index: network(x, edge_index))
    for mine, theirs in zip(outcome(edge_index, of_form(form)), expected, strict=True):
        assert mine.shape == theirs.shape
        if theirs.numel():
            assert (mine - theirs).abs().max() <= 1e-12 * theirs.abs().max()


def test_dense_bytes_are_those_of_the_matrices():
    graph = heptrkx_sectors.Graph(np.zeros((7, 3), np.float32), np.zeros((2, 5), np.int64), np.zeros(5, np.float32))
    ends = FORMS["dense"].make(torch.from_numpy(graph.edge_index), graph.num_nodes, torch.float32)
    made = {matrix.data_ptr(): matrix.nbytes for matrix in vars(ends).values()}  # a transpose shares its memory
    assert FORMS["dense"].dense_bytes(graph, 8) == sum(made.values()) == 2 * 7 * 5 * 4
    assert FORMS["weighted"].dense_bytes(graph, 8) == (2 + 2 * 8) * 7 * 5 * 4


# --- selection and sectors -------------------------------------------------------------------------------------------


def hits_of(*rows):
    """Hits (surface of the barrel, phi, z, particle), a surface -1 being a disk; particle p has pT = p GeV."""
    surface, phi, z, particle_id = (np.array(column) for column in zip(*rows))
    radius = np.array([32, 72, 116, 172, 260, 360, 500, 660, 820, 1020, 50.0])[surface]
    volume, layer = np.array([*heptrkx_sectors.BARREL, (7, 2)])[surface].T
    known = np.unique(particle_id[particle_id != 0])
    unknown = np.zeros(len(known))
    return Hits(
        event_id="some",
        hit_id=np.arange(len(rows)),
        position=np.stack([radius * np.cos(phi), radius * np.sin(phi), z], axis=1).astype(np.float32),
        volume=volume,
        layer=layer,
        module=np.arange(len(rows)),
        particle_id=particle_id,
        particles=Particles(
            known, known.astype(np.float32), unknown, np.zeros((len(known), 3)), unknown, unknown
        ),
    )  # fmt: skip


def test_one_hit_a_particle_and_barrel_layer_above_the_momentum_is_selected():
    event = hits_of((0, 0.1, 1, 2), (1, 0.1, 2, 2), (1, 0.1, 3, 2), (1, 0.1, 3, 0), (-1, 0.1, 3, 2), (2, 0.2, 1, 1))
    event.position[1] *= 1.001  # the other hit of particle 2 on this layer is nearer to the beam
    assert heptrkx_sectors.select_hits(event, 1.0).hit_id.tolist() == [0, 2]
    assert sorted(heptrkx_sectors.select_hits(event, 0.5).hit_id) == [0, 2, 5]
    assert len(heptrkx_sectors.select_hits(event, 3.0)) == 0


def test_hits_on_borders_and_beyond_eta_are_in_no_sector_and_what_is_lost_is_counted():
    outwards = [(surface, 1e-3 * (1 - surface), 5.0 * (surface + 1), 2) for surface in range(4)]  # through phi = 0
    steep = [(0, 2.0, 400.0, 3), (1, 2.0, 800.0, 3)]  # |eta| = 3.2 and 3.1
    event = heptrkx_sectors.divide(hits_of(*outwards, *steep), Recipe(0.5, 6e-4, 100.0, 2, 1, 3.15, 1.0))
    assert event.sector.tolist() == [1, -1, 0, 0, -1, 1]
    assert event.whole.num_edges == 4
    assert [sector.num_edges for sector in event.sectors] == [1, 0]
    lost = heptrkx_sectors.losses_of(event)
    assert (lost["edges"], lost["edges_of"], lost["true"], lost["true_of"]) == (3, 4, 3, 4)
    assert (lost["target"], lost["target_of"]) == (2, 3)  # the steep particle has two hits and is none
    assert (lost["broken"], lost["broken_of"], lost["nodes"]) == (1, 1, 2)


@pytest.mark.parametrize("name", RECIPES)
def test_sectors_hold_all_edges_that_are_not_cut_and_features_are_centred(name):
    event = heptrkx_sectors.divide(simulate_event(3, 6_000), RECIPES[name])
    lost = heptrkx_sectors.losses_of(event)
    assert 0 < lost["edges"] < lost["edges_of"]
    assert len(event.sectors) == RECIPES[name].num_sectors
    assert sum(sector.num_edges for sector in event.sectors) == lost["edges_of"] - lost["edges"]
    assert sum(sector.num_nodes for sector in event.sectors) == lost["nodes_of"] - lost["nodes"]
    assert sum(sector.label.sum() for sector in event.sectors) == lost["true_of"] - lost["true"]
    for sector in event.sectors:
        assert sector.edge_index.max(initial=-1) < sector.num_nodes
        r, phi, _ = sector.features.T
        assert np.abs(phi).max() <= 1
        assert (r[sector.edge_index[1]] > r[sector.edge_index[0]]).all()


# --- from the flags to the last line ---------------------------------------------------------------------------------


def test_sizes_losses_and_steps_are_kept(tmp_path, monkeypatch, capsys):
    def in_threads(*args, **how):
        return run_ranks(*args, **{**how, "transport": "threads"})

    monkeypatch.setattr(agnn_forms, "run_ranks", in_threads)
    flags = ["--quick", "--whole", "--dense-gb", "0.0001", "--results", str(tmp_path / "lines.jsonl")]
    agnn_forms.main([*flags, "--data", str(tmp_path / "absent")])
    assert "no real events, a simulated one instead" in capsys.readouterr().out
    rows, (sizes, losses, steps) = short_runs.lines(tmp_path)
    (size,) = (row for row in rows if row["measured"] == "size")
    assert size["sectors"] == RECIPES["med"].num_sectors
    assert size["sector_nodes"]["low"] <= size["sector_nodes"]["mean"] <= size["sector_nodes"]["high"]
    assert [row["form"] for row in rows if row["measured"] == "step"] == 2 * list(FORMS)
    measured = {(row["graph"], row["form"]): row for row in rows if row["measured"] == "step"}
    fitting = {key for key, row in measured.items() if row["problem"] is None}
    assert fitting == {("sector", "dense")} | {(g, f) for g in ("sector", "whole") for f in ("index", "csr", "coo")}
    assert all(measured[key]["seconds"]["median"] > 0 for key in fitting)
    assert measured["whole", "dense"]["problem"].startswith("does not fit: ")
    assert len(sizes["cells"]) == len(losses["cells"]) == 1
    assert len(steps["cells"]) == 2 * len(FORMS)


def test_forms_that_do_not_agree_end_the_program():
    agree = {"index": [{"first_loss": 1.0}], "csr": [{"first_loss": 1.0 + 1e-7}]}
    assert agnn_forms.refuse_if_losses_differ(agree) == pytest.approx(1e-7)
    for other in (1.001, float("nan")):
        with pytest.raises(SystemExit, match="first losses differ"):
            agnn_forms.refuse_if_losses_differ({**agree, "dense": [{"first_loss": other}]})


def test_an_event_by_name_needs_a_folder(capsys):
    with pytest.raises(SystemExit):
        agnn_forms.parse(["--event", "1012"])
    assert "say with --data" in capsys.readouterr().err


def test_epochs_of_a_set_hold_out_an_eighth_and_all_forms_end_with_one_loss(tmp_path, monkeypatch):
    def in_threads(*args, **how):
        return run_ranks(*args, **{**how, "transport": "threads"})

    monkeypatch.setattr(agnn_forms, "run_ranks", in_threads)
    agnn_forms.main(["--quick", "--epochs", "1", "--results", str(tmp_path / "lines.jsonl")])
    rows, _ = short_runs.lines(tmp_path)
    found = [row for row in rows if row["measured"] == "epoch"]
    assert [row["form"] for row in found] == list(FORMS)
    assert {row["graphs"] for row in found} == {"7/1"}
    assert np.ptp([row["loss"] for row in found]) < 1e-5
    assert all(row["seconds"]["low"] > 0 for row in found)
    assert {row["form"]: row["deck"] for row in found if row["deck"]} == {"index": 9.63, "coo": 10.64, "dense": 24.04}
