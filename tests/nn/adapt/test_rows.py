"""What is said of rows: axes, marks, and numbers of rows."""

import copy
import math

import numpy as np
import pytest
import torch
from whole_and_split import USUAL

from domainpar import World
from domainpar.nn.adapt.rows import UNKNOWN, Axis, NotExact, RowCount, RowIndex, Rows, Unhashable, mark, rows_of
from domainpar.nn.adapt.split import split_graph
from domainpar.testing import run_ranks


def on_parts(function, edges="incoming"):
    """What a function of each rank's part gives."""

    def work(world):
        return function(
            split_graph(USUAL.edge_index, 13, world, edge_policy=edges, partitioner=np.array(USUAL.assignment))
        )

    return run_ranks(work, 4)


def alone():
    return split_graph(USUAL.edge_index, 13, World.alone())


def test_nobody_knows_a_tensor_until_it_is_marked():
    tensor = torch.ones(3)
    assert rows_of(tensor) is UNKNOWN
    assert mark(tensor, None) is tensor
    assert rows_of(tensor) is None
    assert rows_of(tensor.clone()) is UNKNOWN
    rows = Rows(alone().node_axis, 0)
    assert rows_of(mark(tensor, rows)) is rows


def test_a_change_of_rows_forgets_what_belongs_to_one_tensor():
    part = alone()
    rows = Rows(part.node_axis, 0, names=(RowIndex(part.node_axis, True, True),), equal_ends=True)
    rows.with_ghosts = (0, torch.ones(1))
    rows.selections[0] = part.edge_axis
    moved = rows.but(dim=1)
    assert (moved.dim, moved.axis, moved.names) == (1, part.node_axis, rows.names)
    assert moved.with_ghosts is moved.equal_ends is None
    assert not moved.selections
    assert rows.dim == 0
    assert rows.named is rows.names[0]


def test_names_are_joined_to_what_both_promise():
    axis = alone().node_axis
    both = RowIndex(axis, True, False).joined_with(RowIndex(axis, False, True))
    assert (both.of, both.complete, both.only_owned) == (axis, False, False)
    assert RowIndex(axis, True, True).joined_with(RowIndex(axis, True, True)).only_owned


@pytest.mark.parametrize("edges", ["incoming", "incident"])
def test_totals_count_every_row_once(edges):
    def totals(part):
        mask = part.edges(USUAL.edge_mask)
        some = part.edge_axis.selected(mask)
        both = Axis.joined((some, part.node_axis))
        return part.node_axis.total, part.edge_axis.total, some.total, both.total, Axis.joined((both, some)).total

    some = int(USUAL.edge_mask.sum())
    assert on_parts(totals, edges) == [(13, 40, some, some + 13, 2 * some + 13)] * 4


@pytest.mark.parametrize("edges", ["incoming", "incident"])
def test_keys_are_the_same_wherever_a_row_is_and_different_for_different_rows(edges):
    def keys(part):
        def of(axis):
            counted = axis.counted
            return axis.keys if counted is None else axis.keys[counted]

        some = part.edge_axis.selected(part.edges(USUAL.edge_mask))
        both = Axis.joined((some, part.node_axis))
        return of(some), of(both), of(Axis.joined((both, part.edge_axis)))

    ranks = on_parts(keys, edges)
    assert torch.cat([one[0] for one in ranks]).sort().values.tolist() == USUAL.edge_mask.nonzero().view(-1).tolist()
    for number in (1, 2):
        every = torch.cat([one[number] for one in ranks])
        assert len(every.unique()) == len(every)


def test_a_selection_is_named_once_however_often_it_is_made():
    axis = alone().node_axis
    some = axis.selected(torch.ones(13, dtype=torch.bool))
    assert some.name == some.selected(torch.ones(13, dtype=torch.bool)).name == "selected nodes"
    assert "13" in repr(some)


def test_a_number_of_rows_is_the_whole_graphs_wherever_python_looks():
    def looks(part):
        nodes, edges = RowCount(part.node_axis), RowCount(part.edge_axis)
        assert nodes == 13 == RowCount(part.node_axis)
        assert nodes != 12
        assert nodes != edges
        assert nodes < edges <= 40
        assert edges > nodes >= 13
        assert bool(nodes)
        assert nodes in (1, 13)
        with pytest.raises(Unhashable, match="looked up"):
            _ = nodes in {13}
        assert max(nodes, 5) == 13
        numbers = (
            int(nodes),
            float(nodes),
            len(range(nodes)),
            math.log(nodes),
            f"{nodes + 0}",
            nodes % 5,
            -nodes,
            nodes**2,
        )
        more = (
            nodes + 1,
            1 + nodes,
            nodes - 1,
            20 - nodes,
            nodes * 2,
            nodes / 2,
            26 / nodes,
            nodes // 2,
            divmod(nodes, 5),
            abs(nodes),
        )
        return (
            numbers,
            more,
            round(nodes),
            nodes & 1,
            nodes << 1,
            math.isqrt(nodes),
            sum([nodes, edges]),
            "x" * nodes,
            [0][nodes - 13],
        )

    n = 13
    wanted = (
        (n, 13.0, 13, math.log(13), "13", 3, -13, 169),
        (14, 14, 12, 7, 26, 6.5, 2.0, 6, (2, 3), 13),
        13, 1, 26, 3, 53, "x" * 13, 0,
    )  # fmt: skip
    try:
        found = on_parts(looks)
    except NotExact:
        pytest.fail("a number of rows that is the whole graph's may be computed with")
    assert found == [wanted] * 4


def test_no_rows_is_no_rows_of_the_whole_graph():
    empty = split_graph(torch.zeros(2, 0, dtype=torch.int64), 3, World.alone())
    assert not RowCount(empty.edge_axis)
    assert RowCount(empty.edge_axis) == 0
    assert RowCount(empty.node_axis)


def test_not_exact_is_no_runtime_error_that_libraries_explain():
    assert not issubclass(NotExact, (RuntimeError, ValueError, TypeError))


def test_marks_do_not_travel_with_copies_that_are_changed():
    part = alone()
    x = part.nodes(USUAL.x)
    other = copy.copy(x)
    assert rows_of(other) is UNKNOWN or rows_of(other) is rows_of(x)
    assert rows_of(x).axis is part.node_axis
