"""Every form multiplies right on its own layout of ranks, and sends what its layout says."""

import cagnet
import numpy as np
import pytest
import torch

from domainpar.testing import run_ranks

NODES, COLUMNS = 40, 8


@pytest.fixture(scope="module")
def graph():
    rng = np.random.default_rng(0)
    edge_index = rng.integers(0, NODES, (2, 300))
    return cagnet.Graph("some", NODES, edge_index, {n: rng.integers(0, n, NODES) for n in (2, 4, 8, 9)})


@pytest.mark.parametrize("ranks", [2, 4, 8, 9])
def test_all_forms_have_the_product_and_both_ways(graph, ranks):
    for name in cagnet.forms_of(ranks):
        found = run_ranks(cagnet.measured, ranks, graph, name, COLUMNS, 1, domain_size=ranks)
        assert max(rank["apart"] for rank in found) < 1e-6, name
        assert all(rank["seconds"][0] > 0 for rank in found)


def test_one_dimension_sends_every_row_to_every_other_rank(graph):
    found = run_ranks(cagnet.measured, 4, graph, "1D", COLUMNS, 1, domain_size=4)
    assert [rank["bytes"] for rank in found] == [2 * 3 * 10 * COLUMNS * 4] * 4


def test_the_halo_sends_what_others_need(graph):
    part, src, dst = graph.parts[4], *graph.edge_index
    needed = sum(
        len(np.unique(ends[0][(part[ends[0]] == 1) & (part[ends[1]] == other)]))
        for ends in ((src, dst), (dst, src))
        for other in (0, 2, 3)
    )
    found = run_ranks(cagnet.measured, 4, graph, "halo", COLUMNS, 1, domain_size=4)
    assert found[1]["bytes"] == needed * COLUMNS * 4


def test_a_wrong_product_is_seen(graph, monkeypatch):
    def forgets(y, block, x):
        y.index_add_(0, block[1:, 1].long(), x[block[1:, 0].long()])

    monkeypatch.setattr(cagnet, "add_product", forgets)
    cagnet._blocks.clear()
    found = run_ranks(cagnet.measured, 4, graph, "2D", COLUMNS, 1, domain_size=4)
    assert max(rank["apart"] for rank in found) > 1e-3


def test_formulas_are_those_of_the_talk():
    """MB a process and layer, forward and back, of an event of 110,542 hits and 1,224,025 edges, 64 columns."""
    for form, ranks, expected in [("1D", 8, 56.6), ("1.5D, c = 2", 8, 42.4), ("2D", 8, 83.5), ("3D", 8, 87.3)]:
        assert cagnet.formula(form, 110_542, 1_224_025, 64, ranks) == pytest.approx(expected, rel=2e-3)
    assert cagnet.formula("halo", 1, 1, 1, 1) is None


def test_pieces_cover_all_rows():
    assert cagnet.pieces(10, 4) == [0, 2, 5, 7, 10]
    assert torch.equal(cagnet.block_of(np.array([[0, 5], [1, 6]]), (5, 8), (4, 6)), torch.tensor([[1, 1]]).int())
