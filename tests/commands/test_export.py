"""`python -m domainpar.export`: a file that other programs run gives our logits of a whole event, or is refused."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
from marks import slow
from random_store import write_random_store
from test_infer import trained

from domainpar.config import ExportConfig
from domainpar.events.store import EventStore
from domainpar.export import Inputs, _inputs, _program, compared, export, main
from domainpar.nn.catalogue import build_model
from domainpar.nn.heads import EDGE, Head
from domainpar.nn.plain import plain_form
from domainpar.own_files import strangers_in_run

onnxruntime = pytest.importorskip("onnxruntime", reason="onnxruntime is not installed (pip install '.[export]')")
pytest.importorskip("onnxscript", reason="onnxscript is not installed (pip install '.[export]')")


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return write_random_store(tmp_path_factory.mktemp("store"))


@pytest.fixture(scope="module")
def run(store, tmp_path_factory):
    out = tmp_path_factory.mktemp("run") / "run"
    trained(store, out, epochs=2, lr=1e-2)
    return out


NETWORKS = {
    "interaction": {},
    "bare": {"residual": False, "aggregate": "sum", "activation": "tanh", "norm": "none", "shared_weights": True},
    "node first": {"model": "interaction-node-first", "aggregate": "mean", "activation": "silu", "readouts": "all"},
    "standardised": {"standardise": True, "dropout": 0.3},
    "norms over rows": {"norm": "batch"},
    "acorn": {"model": "acorn"},
    "gcn": {"model": "gcn"},
    "own": {"model": "own_models:evolving"},
    "in float64": {"dtype": "float64"},
    "acorn in float64": {"model": "acorn", "dtype": "float64"},
}


ALWAYS = ("interaction", "own")


@pytest.mark.parametrize("name", [name if name in ALWAYS else slow(name) for name in NETWORKS])
def test_each_network_gives_our_logits_in_both_formats(store, tmp_path, name, capsys):
    flags = NETWORKS[name]
    trained(store, tmp_path / "run", epochs=1, lr=1e-2, **flags)
    for form in ("onnx", "pt2"):
        own = flags["model"] if name == "own" else None
        path = export(ExportConfig(run=str(tmp_path / "run"), format=form, model=own))
        assert path == tmp_path / "run" / f"model.{form}"
        assert path.stat().st_size > 10_000
    printed = capsys.readouterr().out
    assert printed.count("largest difference over 1 + |logit|") == 2
    assert not list((tmp_path / "run").glob(".partial*"))


def test_the_file_keeps_the_contract_of_acts_on_events_of_any_size(run, store):
    path = export(ExportConfig(run=str(run)))
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    inputs, outputs = session.get_inputs(), session.get_outputs()
    assert [(it.name, it.type) for it in inputs] == [
        ("x", "tensor(float)"), ("edge_index", "tensor(int64)"), ("edge_attr", "tensor(float)"),
    ]  # fmt: skip
    assert [(it.name, it.type) for it in outputs] == [("logits", "tensor(float)")]
    told = session.get_modelmeta().custom_metadata_map
    events = EventStore(store)
    assert json.loads(told["node_features"]) == list(events.feature_names)
    assert json.loads(told["edge_features"]) == list(events.edge_feature_names)
    saved = json.loads((run / "run.json").read_text())["saved"]
    assert told["parameters_sha256"] == saved[told["step"]], "of the weights that are in the file"
    columns = len(events.feature_names), len(events.edge_feature_names)
    random = np.random.default_rng(0)
    for nodes, edges in ((1, 1), (7, 300), (900, 2)):
        x = random.normal(size=(nodes, columns[0])).astype(np.float32)
        ends, e = random.integers(0, nodes, (2, edges)), random.normal(size=(edges, columns[1])).astype(np.float32)
        (logits,) = session.run(None, {"x": x, "edge_index": ends, "edge_attr": e})
        assert logits.shape == (edges, 1)
        assert np.isfinite(logits).all()


def test_it_is_checked_on_the_event_that_is_named_or_one_that_training_did_not_see(run, store, capsys):
    export(ExportConfig(run=str(run), format="pt2"))
    seen = {name for name, _ in json.loads((run / "run.json").read_text())["store"]["events"]["train"]}
    unseen = next(record.event for record in EventStore(store).events() if record.event not in seen)
    assert f"edges of event {unseen}," in capsys.readouterr().out
    named = sorted(seen)[0]
    export(ExportConfig(run=str(run), format="pt2", event=named))
    assert f"edges of event {named}," in capsys.readouterr().out


def test_other_logits_are_refused_with_the_worst_edge_and_leave_no_file(run, tmp_path, capsys, monkeypatch):
    out = tmp_path / "model.pt2"
    assert main([str(run), "--format", "pt2", "--out", str(out), "--tolerance", "1e-12"]) == 2
    said = capsys.readouterr().err
    assert "the file computes other logits: largest difference over 1 + |logit|" in said
    assert " at edge " in said
    assert not list(tmp_path.iterdir())


def test_the_worst_edge_is_the_one_that_is_furthest_or_not_finite(store):
    events = EventStore(store)
    with events.open(events.events()[0]) as event:
        inputs, count = _inputs(event), event.num_edges
        expected = np.linspace(-1, 1, count).astype(np.float32)
        found = expected.copy()
        found[7] += 1e-3
        with pytest.raises(ValueError, match="at edge 7 "):
            compared(found, expected, 1e-5, event, inputs)
        found[3] = np.nan
        with pytest.raises(ValueError, match="at edge 3 "):
            compared(found, expected, 1e-5, event, inputs)
        with pytest.raises(ValueError, match=r"logits of shape \(2,\)"):
            compared(found[:2], expected, 1e-5, event, inputs)


@pytest.mark.parametrize(("asked", "said"), [({"event": "nobody"}, "has no event nobody"), ({"store": "no"}, "no")])
def test_an_event_that_is_not_there_is_refused(run, tmp_path, asked, said):
    with pytest.raises(ValueError, match=said):
        export(ExportConfig(run=str(run), out=str(tmp_path / "model.onnx"), **asked))
    assert not list(tmp_path.iterdir())


def test_without_packages_or_a_run_it_says_what_to_do(run, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main([]) == 2
    assert "runs" in capsys.readouterr().err
    monkeypatch.setitem(__import__("sys").modules, "onnxruntime", None)
    assert main([str(run)]) == 2
    said = capsys.readouterr().err
    assert "onnxruntime is not here" in said
    assert "pip install 'domainpar[export]', or take --format pt2" in said


def test_a_network_without_a_head_of_edges_or_of_two_precisions_has_no_plain_form():
    heads = (Head("kind", "node", 3),)
    network = build_model("interaction", 3, 2, hidden=16, graph_iters=1, heads=heads)
    with pytest.raises(ValueError, match="scores no edges"):
        plain_form(network, 2)
    with pytest.raises(ValueError, match="makes products in bfloat16"):
        plain_form(build_model("interaction", 3, 2, hidden=16, graph_iters=1, products=torch.bfloat16), 2)
    bare = build_model("interaction", 3, 0, hidden=16, graph_iters=1)
    x, ends = torch.randn(5, 3), torch.randint(0, 5, (2, 9))
    assert not plain_form(bare, 0).takes_edge_features
    assert plain_form(bare, 0)(x, ends).shape == (9, 1)
    assert not list(strangers_in_run_with_a_model())
    both = build_model("interaction", 3, 2, hidden=16, graph_iters=2, heads=(EDGE, *heads))
    x, ends, e = torch.randn(5, 3), torch.randint(0, 5, (2, 9)), torch.randn(9, 2)
    assert plain_form(both, 2)(x, ends, e).shape == (9, 1)


def strangers_in_run_with_a_model():
    """`train --overwrite` knows exported files for its own."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "model.onnx").touch()
        return list(strangers_in_run(Path(folder)))


class AsksTheHost(torch.nn.Module):
    """What it does depends on a number in a tensor."""

    takes_edge_features = False

    def forward(self, x, edge_index):
        return x[edge_index[0]].sum(1, keepdim=True) if x.sum().item() > 0 else x[edge_index[1]][:, :1]


def test_a_call_that_cannot_be_traced_is_said():
    inputs = Inputs(torch.randn(4, 2), torch.randint(0, 4, (2, 5)), torch.randn(5, 1))
    with pytest.raises(ValueError, match="the network cannot be exported: "):
        _program(AsksTheHost(), inputs)
