"""Cases of the survey: there is one for each class of PyG, and each says something."""

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
from survey_samples import NODE_FIELDS, mesh, sample, sorted_by_dst, undirected  # noqa: E402

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


@pytest.mark.parametrize("name", OF_CLASS)
def test_every_case_runs_and_learns_in_finite_numbers(name):
    """Else split and whole would agree that there is nothing."""
    for case in OF_CLASS[name]:
        out, module, s = result(case)
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


@pytest.mark.parametrize("case", [case for case in CASES if case.random], ids=str)
def test_a_random_case_is_repeated_by_its_seed_and_changed_by_another(case):
    """Else it could be compared with torch alone."""
    first, _, s = result(case)
    assert torch.equal(first, run(case, s)[0])
    assert not torch.equal(first, run(case, s, seed=2)[0])


@pytest.mark.parametrize("make", SAMPLES)
def test_a_sample_has_nodes_without_edges_and_loops_and_duplicates(make):
    s, ends = SAMPLES[make], SAMPLES[make].edge_index
    assert {getattr(s, name).size(0) for name in NODE_FIELDS} == {len(s.x)}
    if make is not mesh:  # which has four edges side by side at every node
        assert ends.max() < len(s.x) - 1
        assert len(ends.unique(dim=1).T) < ends.size(1)
        loops = ends[0][ends[0] == ends[1]]
        assert 0 < len(loops) == len(loops.unique())
    there, back = (sorted(zip(*it.tolist(), s.edge_weight.tolist())) for it in (ends, ends.flip(0)))
    assert (there == back) == (make is undirected)
