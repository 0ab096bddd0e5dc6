"""`python -m domainpar.export`: a file that other programs run gives our logits of a whole event, or is refused."""

from __future__ import annotations

import contextlib
import io
import json
import os
import resource
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
from forked import forked
from jobs import without_signs_of_life
from marks import slow
from random_store import write_random_store
from test_infer import trained

from domainpar.export import _FORMATS, THREADS, Exact, _inputs, _program, export, main
from domainpar.nn.heads import EDGE, Head
from domainpar.nn.options import NetworkOptions
from domainpar.runs.own_files import strangers_in_run
from domainpar.tracking.config import MODELS, ExportConfig
from domainpar.tracking.config.train import IN_EXAMPLES
from domainpar.tracking.events.store import EventStore
from domainpar.tracking.networks.catalogue import build_model
from domainpar.tracking.networks.plain import EdgeLogits, in_float64, plain_form

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


def both_forms(run, **asked):
    """The files of a run in both formats, each with what was said of it."""
    made = {}
    for form in ("onnx", "pt2"):
        with contextlib.redirect_stdout(io.StringIO()) as said:
            path = export(ExportConfig(run=str(run), format=form, **asked.get(form, {})))
        made[form] = path, said.getvalue()
    return made


def trained_on(run):
    """The names of the events that a run has seen."""
    return sorted(name for name, _ in json.loads((run / "run.json").read_text())["store"]["events"]["train"])


@pytest.fixture(scope="module")
def exported(run):
    """Those of the run: the one in ONNX is checked on an event that it has seen, the other on one of its own choice."""
    return both_forms(run, onnx={"event": trained_on(run)[0]})


EXAMPLES = tuple(IN_EXAMPLES.values())
NETWORKS = {
    **{name: {"model": name} for name in (*MODELS, *EXAMPLES)},
    "bare": {"residual": False, "aggregate": "sum", "activation": "tanh", "norm": "none", "shared_weights": True},
    "node first": {"model": "interaction-node-first", "aggregate": "mean", "activation": "silu", "readouts": "all"},
    "standardised": {"standardise": True, "dropout": 0.3},
    "norms over rows": {"norm": "batch"},
    "own": {"model": "own_models:evolving", "graph_iters": 1},
    "acorn2 of one iteration": {"model": "acorn2", "graph_iters": 1},
    "in float64": {"dtype": "float64"},
    "acorn in float64": {"model": "acorn", "dtype": "float64"},
}


ALWAYS = ("interaction", "acorn2 of one iteration", "own")


@pytest.mark.parametrize("name", [name if name in ALWAYS else slow(name) for name in NETWORKS])
def test_each_network_gives_our_logits_in_both_formats(store, run, exported, tmp_path, name):
    if name != "interaction":
        flags, run = NETWORKS[name], tmp_path / "run"
        trained(store, run, epochs=1, lr=1e-2, **flags)
        own = {"model": flags["model"]} if name in ("own", *EXAMPLES) else {}
        exported = both_forms(run, onnx=own, pt2=own)
    for form, (path, printed) in exported.items():
        assert path == run / f"model.{form}"
        assert path.stat().st_size > 10_000
        assert printed.count("1, 2, 4 threads; ") == 1
    assert not list(run.glob(".partial*"))


def test_the_file_keeps_the_contract_of_acts_on_events_of_any_size(run, store, exported):
    path, _ = exported["onnx"]
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
    assert json.loads(told["node_features_divided_by"]) == [None] * len(events.feature_names), "nobody told"
    formulas = [formula for _, formula in events.feature_definitions["edge_features"]]
    assert json.loads(told["edge_features_formula"]) == formulas
    assert len(json.loads(told["node_features_formula"])) == len(events.feature_names)
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


@pytest.mark.parametrize("form", ["onnx", "pt2"])
def test_no_path_of_this_machine_is_in_the_file(run, exported, form):
    content = exported[form][0].read_bytes()
    places = [run.parent, Path.cwd(), sys.prefix, Path(torch.__file__).parent, plain_form.__code__.co_filename]
    assert [place for place in map(str, places) if place.encode() in content] == []


def test_it_tells_what_features_that_are_made_here_or_read_with_scales_are_divided_by(store):
    events = EventStore(store)
    events.settings = {"source": "simulate"}
    columns = len(events.feature_names), len(events.edge_feature_names)
    assert [len(defined) for defined in events.feature_definitions.values()] == [*columns]
    events.settings = {"source": "acorn", "node_features": ["a"], "node_scales": [2.0], "edge_features": None,
                       "edge_scales": None}  # fmt: skip
    assert [divisor for divisor, _ in events.feature_definitions["node_features"]] == [2.0]
    assert len(events.feature_definitions["edge_features"]) == columns[1], "those that are made here"


def test_it_is_checked_on_the_event_that_is_named_or_one_that_training_did_not_see(run, store, exported):
    seen = trained_on(run)
    unseen = next(record.event for record in EventStore(store).events() if record.event not in seen)
    assert f"edges of event {seen[0]} with" in exported["onnx"][1]
    assert f"edges of event {unseen} with" in exported["pt2"][1]


def export_on_a_full_disk(run):
    os.environ.pop("XDG_CACHE_HOME", None)
    resource.setrlimit(resource.RLIMIT_FSIZE, (5000, 5000))
    print([main([str(run), "--format", form]) for form in ("onnx", "pt2")])
    return 0


def test_a_full_disk_is_named_in_either_format_and_all_else_is_told_in_one_line(run):
    # In a process of its own: torch's writer of files ends it where a disk is full.
    with forked(export_on_a_full_disk, run, HOME="/proc") as program:
        code, printed = program.wait(400)
    *errors, codes = without_signs_of_life(printed).splitlines()
    assert (code, codes) == (0, "[1, 1]"), printed
    if "kernels for this machine" in errors[0]:  # none are kept yet
        assert "File too large" in errors.pop(0)
    for form, error in zip(("onnx", "pt2"), errors[::2], strict=True):
        assert error.endswith(f"(errno 27) | file {run}/model.{form}")
    assert all(hint.startswith("hint: make room") for hint in errors[1::2])
    assert not list(run.glob(".partial*"))


class Sums(torch.nn.Module):
    """Sums of whole numbers at nodes, read at edges; `wide` columns."""

    takes_edge_features = True
    wide = 64

    def at_nodes(self, x, index, rows):
        return x.new_zeros(x.size(0), self.wide).index_add(0, index, rows)

    def forward(self, x, edge_index, edge_attr):
        sums = self.at_nodes(x, edge_index[1], edge_attr.expand(-1, self.wide).contiguous())
        return sums.sum(1, keepdim=True)[edge_index[0]]


def whole_numbers(nodes=2_000, edges=60_000):
    """Tables of an event whose sums are whole, and so the same in any order."""
    random = torch.Generator().manual_seed(0)
    ends = torch.randint(0, nodes, (2, edges), generator=random)
    edge_attr = torch.randint(-9, 10, (edges, 1), generator=random).float()
    return {"x": torch.zeros(nodes, 1), "edge_index": ends, "edge_attr": edge_attr}


class ByScatterAdd(Sums):
    def at_nodes(self, x, index, rows):
        return x.new_zeros(x.size(0), self.wide).scatter_add(0, index[:, None].expand_as(rows), rows)


class ByScatterReduce(Sums):
    def at_nodes(self, x, index, rows):
        index = index[:, None].expand_as(rows)
        return x.new_zeros(x.size(0), self.wide).scatter_reduce(0, index, rows, "sum")


class OfColumns(Sums):
    """Added in place, along the last dimension, twice each, to what is not 0."""

    def at_nodes(self, x, index, rows):
        sums = x.new_ones(self.wide, x.size(0))
        sums.index_add_(1, index.int(), rows.t(), alpha=2)
        return sums.t()


class ByAll(torch.nn.Module):
    """In all of these forms, one after the other."""

    takes_edge_features = True

    def __init__(self):
        super().__init__()
        self.forms = torch.nn.ModuleList([Sums(), ByScatterAdd(), ByScatterReduce(), OfColumns()])

    def forward(self, x, edge_index, edge_attr):
        return torch.cat([form(x, edge_index, edge_attr) for form in self.forms], 1).sum(1, keepdim=True)


def test_sums_of_whole_numbers_are_exact_with_any_number_of_threads(tmp_path):
    inputs, module = whole_numbers(), ByAll()
    exact = module(**inputs)[:, 0].numpy()
    write, run = _FORMATS["onnx"]()
    write(module, inputs, {}, tmp_path / "sums.onnx")
    for threads in THREADS:
        for _ in range(3):
            assert np.array_equal(run(tmp_path / "sums.onnx", inputs, threads), exact), f"{threads} threads"


class ByIndexPut(Sums):
    def at_nodes(self, x, index, rows):
        return x.new_zeros(x.size(0), self.wide).index_put((index,), rows, accumulate=True)


def test_a_form_of_sums_that_loses_numbers_is_refused_with_one_that_does_not(tmp_path):
    write, _ = _FORMATS["onnx"]()
    with pytest.raises(ValueError, match="ONNX runtime") as refused:
        write(ByIndexPut(), whole_numbers(50, 200), {}, tmp_path / "sums.onnx")
    assert "index_add or scatter_add" in refused.value.hint
    assert not list(tmp_path.iterdir())


class NamesFloat32(torch.nn.Module):
    """Says float32 in all ways there are."""

    def __init__(self):
        super().__init__()
        self.linear, self.kept = torch.nn.Linear(3, 1), torch.full((1,), 1 / 3)

    def forward(self, x, edge_index):
        x = self.linear(x.float()) + self.kept + torch.zeros(1, dtype=torch.float32) + torch.ones(x.size(0), 1)
        return (torch.zeros(x.size(0), 1).index_add(0, edge_index[1], x[edge_index[0]])[edge_index[0]]).to(
            torch.float32
        )


def test_a_network_that_names_float32_is_computed_in_float64_and_left_as_it_is():
    network = NamesFloat32()
    x, ends = torch.randn(30, 3), torch.randint(0, 30, (2, 90))
    logits = in_float64(EdgeLogits(network, False), {"x": x, "edge_index": ends})
    nodes = x.double() @ network.linear.weight.double().t() + network.linear.bias.double()
    nodes = nodes + network.kept.double() + 1
    expected = torch.zeros(30, 1).double().index_add(0, ends[1], nodes[ends[0]])[ends[0]]
    assert logits.dtype == torch.float64
    assert (logits - expected).abs().max() < 1e-14
    assert network(x, ends).dtype == network.linear.weight.dtype == torch.float32


def test_other_logits_are_refused_with_the_worst_edge_and_leave_no_file(run, tmp_path, capsys):
    out = tmp_path / "model.pt2"
    assert main([str(run), "--format", "pt2", "--out", str(out), "--tolerance", "1e-12"]) == 2
    said = capsys.readouterr().err
    assert " at edge " in said
    assert "float32" in said
    assert not list(tmp_path.iterdir())


def test_a_plain_form_that_is_another_network_is_refused_however_exact_the_file_is(run, tmp_path, monkeypatch):
    from domainpar import export as command

    ours = command._own_logits
    monkeypatch.setattr(command, "_own_logits", lambda *given: ours(*given) + 1e-4)
    with pytest.raises(ValueError, match="our network"):
        export(ExportConfig(run=str(run), format="pt2", out=str(tmp_path / "model.pt2")))
    assert not list(tmp_path.iterdir())


def test_the_worst_edge_is_the_one_that_is_furthest_or_not_finite(store):
    events = EventStore(store)
    with events.open(events.events()[0]) as event:
        inputs, count = _inputs(event, True), event.num_edges
        logits = np.linspace(-1, 1, count)
        exact, found = Exact(logits, 1e-6, 1e-5, event, inputs["edge_index"]), logits.astype(np.float32)
        assert exact.compared("it makes", found) < 1e-7
        found[7] += 1e-3
        with pytest.raises(ValueError, match="at edge 7 "):
            exact.compared("it makes", found)
        found[3] = np.nan
        # Where float32 itself overflows no multiple of its rounding allows anything.
        for bound in (exact, exact._replace(rounding=np.inf, allowed=np.inf)):
            with pytest.raises(ValueError, match="at edge 3 "):
                bound.compared("it makes", found)
        with pytest.raises(ValueError, match=r"\(2,\)"):
            exact.compared("it makes", found[:2])


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
    assert "pip install 'domainpar[export]'" in said
    assert "--format pt2" in said


def test_a_network_without_a_head_of_edges_or_of_two_precisions_has_no_plain_form():
    heads = (Head("kind", "node", 3),)
    network = build_model("interaction", 3, 2, NetworkOptions(hidden=16, graph_iters=1, heads=heads))
    with pytest.raises(ValueError, match="scores no edges"):
        plain_form(network)
    network = build_model("interaction", 3, 2, NetworkOptions(hidden=16, graph_iters=1, products=torch.bfloat16))
    with pytest.raises(ValueError, match="makes products in bfloat16"):
        plain_form(network)
    bare = build_model("interaction", 3, 0, NetworkOptions(hidden=16, graph_iters=1))
    x, ends = torch.randn(5, 3), torch.randint(0, 5, (2, 9))
    assert not plain_form(bare).takes_edge_features
    assert plain_form(bare)(x, ends).shape == (9, 1)
    assert not list(strangers_in_run_with_a_model())
    both = build_model("interaction", 3, 2, NetworkOptions(hidden=16, graph_iters=2, heads=(EDGE, *heads)))
    x, ends, e = torch.randn(5, 3), torch.randint(0, 5, (2, 9)), torch.randn(9, 2)
    assert plain_form(both)(x, ends, e).shape == (9, 1)


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
    inputs = {"x": torch.randn(4, 2), "edge_index": torch.randint(0, 4, (2, 5))}
    with pytest.raises(ValueError, match="cannot be exported"):
        _program(AsksTheHost(), inputs)
