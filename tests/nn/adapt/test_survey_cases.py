"""Cases of the survey: each runs whole, and none depends on the order of nodes or edges without saying so."""

import dataclasses
import functools

import pytest
import torch

pyg = pytest.importorskip("torch_geometric.nn")

from survey_cases import (  # noqa: E402  # imports PyG itself
    CANNOT_RUN,
    CONVOLUTIONS,
    MODELS,
    MODULES,
)
from survey_samples import (  # noqa: E402
    EDGE_FIELDS,
    NODE_FIELDS,
    NUM_GRAPHS,
    mesh,
    sample,
    sorted_by_dst,
    undirected,
)

CASES = [*(case for cases in CONVOLUTIONS.values() for case in cases), *MODELS, *MODULES]
SAMPLES = {make: make() for make in (sample, undirected, sorted_by_dst, mesh)}
OF_CLASS = {name: [case for case in CASES if case.name == name] for name in sorted({case.name for case in CASES})}
LEARNT_FROM = ("x", "edge_weight", "edge_attr")


def run(case, s, seed=1):
    """What a case gives on a sample, and the module."""
    with torch.random.fork_rng(devices=[]):
        module = case.make().double()
        torch.default_generator.manual_seed(seed)
        return case.call(module, s), module


@functools.cache
def result(case):
    """What a case gives on its own sample, that sample, and the module; once for all tests."""
    s = with_gradients(SAMPLES[case.graph])
    return *run(case, s), s


def with_gradients(s):
    return dataclasses.replace(s, **{name: getattr(s, name).clone().requires_grad_() for name in LEARNT_FROM})


def reordered(s, nodes, edges):
    """The same graph with row i of nodes and edges taken from row `nodes[i]` and `edges[i]`."""
    fields = {name: getattr(s, name)[nodes] for name in NODE_FIELDS}
    fields |= {name: getattr(s, name)[edges] for name in EDGE_FIELDS if name != "edge_index"}
    fields["edge_index"] = torch.argsort(nodes)[s.edge_index[:, edges]]
    return dataclasses.replace(s, **fields)


def shuffled(case, s, what, seed=3):
    """A sample with nodes, edges or both shuffled as far as the case allows, and the order of its rows."""
    generator = torch.Generator().manual_seed(seed)
    nodes, edges = torch.arange(s.x.size(0)), torch.arange(s.edge_index.size(1))
    if "nodes" in what:
        nodes = torch.randperm(len(nodes), generator=generator)
        if case.needs_sorted == "batch":
            nodes = nodes[torch.sort(s.batch[nodes], stable=True).indices]
    if "edges" in what:
        edges = torch.randperm(len(edges), generator=generator)
    if case.needs_sorted == "edges":
        dst = torch.argsort(nodes)[s.edge_index[1]]
        edges = edges[torch.sort(dst[edges], stable=True).indices]
    return reordered(s, nodes, edges), {"nodes": nodes, "edges": edges}


def difference(found, expected):
    found, expected = found.detach(), expected.detach()
    return float((found - expected).abs().max() / expected.abs().max().clamp_min(1e-30))


def test_every_convolution_has_a_case_or_a_reason():
    assert {*CONVOLUTIONS} | {*CANNOT_RUN} == {*pyg.conv.__all__}
    assert not {*CONVOLUTIONS} & {*CANNOT_RUN}


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("CuGraphSAGEConv", (16, 16)),
        ("CuGraphGATConv", (16, 16)),
        ("CuGraphRGCNConv", (16, 16, 3)),
        ("FusedGATConv", (16, 16, 1, True, 0.2, 0.0, False)),
        ("DynamicEdgeConv", (torch.nn.Linear(32, 16), 4)),
        ("GravNetConv", (16, 16, 3, 8, 4)),
        ("XConv", (16, 16, 3, 4)),
        ("SplineConv", (16, 16, 3, 2)),
        ("PANConv", (16, 16, 2)),
    ],
)
def test_what_cannot_run_cannot_be_built_or_called_here(name, arguments):
    assert name in CANNOT_RUN
    s = sample(dtype=torch.float32)
    with pytest.raises(ImportError):
        getattr(pyg, name)(*arguments)(s.x, s.edge_index)


def test_every_norm_and_aggregation_has_a_case():
    named = {case.name for case in MODULES}
    assert {*pyg.norm.__all__} <= named
    assert {*pyg.aggr.__all__} - {"Aggregation"} <= named  # the abstract base


def test_no_two_cases_have_one_name():
    assert len({str(case) for case in CASES}) == len(CASES)


def test_models_cover_all_pairs_of_norm_and_jump_within_sixty():
    named = [case.variant.split(", dropout")[0].removeprefix("v2, ") for case in MODELS if "jk" in case.variant]
    assert len(named) == len({*named}) == 50
    assert len(MODELS) <= 60


@pytest.mark.parametrize("name", OF_CLASS)
def test_every_case_runs_forward_and_backward(name):
    for case in OF_CLASS[name]:
        out, module, s = result(case)
        rows = {"nodes": s.x.size(0), "edges": s.edge_index.size(1)}
        if case.rows == "graph":
            assert out.ndim == 0 or out.size(0) in (1, NUM_GRAPHS), case
        else:
            assert out.size(0) == rows[case.rows], case
        assert torch.isfinite(out).all(), case
        if not out.is_floating_point():
            assert not [*module.parameters()], case
            continue
        assert out.dtype == torch.float64, case
        torch.tanh(out).sum().backward()
        tensors = (*(getattr(s, field) for field in LEARNT_FROM), *module.parameters())
        gradients = [tensor.grad for tensor in tensors if tensor.grad is not None]
        assert gradients, case
        assert all(torch.isfinite(gradient).all() for gradient in gradients), case


@pytest.mark.parametrize("name", [name for name, cases in OF_CLASS.items() if not all(case.random for case in cases)])
def test_every_case_says_whether_it_depends_on_order(name):
    for case in OF_CLASS[name]:
        if not case.random:
            assert depends_on(case) == case.order, case


def depends_on(case):
    """What of the order of nodes and edges changes the result of a case."""
    s = SAMPLES[case.graph]
    expected = result(case)[0]

    def changed_by(*what):
        other, rows = shuffled(case, s, what)
        found, _ = run(case, other)
        same = found if case.rows == "graph" else found[torch.argsort(rows[case.rows])]
        return difference(same, expected) > (1e-5 if case.single else 1e-10)

    if not changed_by("nodes", "edges"):
        return set()
    return {what for what in ("nodes", "edges") if changed_by(what)} or {"both together"}


@pytest.mark.parametrize("case", [case for case in CASES if case.random], ids=str)
def test_a_random_case_is_repeated_by_its_seed_and_changed_by_another(case):
    first, _, s = result(case)
    assert torch.equal(first, run(case, s)[0])
    assert not torch.equal(first, run(case, s, seed=2)[0])


def test_make_gives_the_same_weights_each_time_and_leaves_the_generator_alone():
    state = torch.get_rng_state()
    for cases in CONVOLUTIONS.values():
        first, second = (cases[0].make().state_dict() for _ in range(2))
        assert first.keys() == second.keys()
        assert all(torch.equal(first[name], second[name]) for name in first)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("make", SAMPLES)
def test_a_sample_has_rows_of_nodes_and_edges_only(make):
    s = SAMPLES[make]
    assert {field.name for field in dataclasses.fields(s)} == {*NODE_FIELDS, *EDGE_FIELDS}
    assert {getattr(s, name).size(0) for name in NODE_FIELDS} == {len(s.x)}
    assert {getattr(s, name).size(0) for name in EDGE_FIELDS if name != "edge_index"} == {s.edge_index.size(1)}


@pytest.mark.parametrize(("num_nodes", "num_edges"), [(60, 300), (4, 3), (30, 120), (200, 1001)])
@pytest.mark.parametrize("directed", [True, False])
def test_a_sample_has_isolated_nodes_and_one_self_loop_a_node_at_most(num_nodes, num_edges, directed):
    s = sample(5, num_nodes, num_edges, directed=directed)
    assert s.edge_index.shape == (2, num_edges)
    assert s.edge_index.max() < num_nodes - 1
    loops = s.edge_index[0][s.edge_index[0] == s.edge_index[1]]
    assert 0 < len(loops) == len(loops.unique())


def test_an_undirected_sample_has_every_edge_both_ways_with_the_same_values():
    s = undirected()
    there = sorted(zip(*s.edge_index.tolist(), s.edge_weight.tolist(), strict=True))
    back = sorted(zip(*s.edge_index.flip(0).tolist(), s.edge_weight.tolist(), strict=True))
    assert there == back


def test_samples_have_duplicates_unless_told_otherwise():
    assert len(sample().edge_index.unique(dim=1).T) == 144
    assert len(sample(duplicates=False).edge_index.unique(dim=1).T) == 150


def test_too_many_edges_are_refused():
    with pytest.raises(ValueError, match="no simple graph of 10 nodes has 100 edges"):
        sample(num_nodes=10, num_edges=100)
