"""Perceptrons on blocks: operands where and how products want them, and plain torch's results with every gradient."""

from dataclasses import dataclass

import dense
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from domainpar.nn import blocks
from domainpar.nn.blocks import Edges, TileGradients, WayBack, as_table, fold, no_rows, no_sums, rows_of
from domainpar.nn.kernels import Ends, Sums, add_pairs
from domainpar.nn.mlp import MLP, padded
from domainpar.nn.team import Scratch

FLOATS = [torch.float32, torch.float64, torch.bfloat16]
COUNT, NUM_NODES = 45, 11


def dirty_scratch(*names, rows=64, columns=80, dtypes=FLOATS):
    """Blocks that were used before and hold what must reach nothing."""
    scratch = Scratch()
    for name in names:
        for dtype in dtypes:
            scratch.take(name, rows, columns, dtype).fill_(torch.nan)
    return scratch


def table_of(rows, width, dtype=torch.float32, offset=0):
    """A table of random numbers whose memory starts `offset` bytes after a multiple of 64."""
    numbers = torch.empty(rows * width + 64, dtype=dtype)
    assert numbers.data_ptr() % 64 == 0
    table = numbers[offset // numbers.itemsize :][: rows * width].view(rows, width)
    table.copy_(torch.randn(rows, width, generator=torch.Generator().manual_seed(0)))
    return table


@pytest.mark.parametrize(
    ("table", "rows", "is_view"),
    {
        "whole steps of 32": (table_of(128, 64), slice(32, 64), True),
        "a ragged end that the table goes on after": (table_of(128, 64), slice(5, 40), True),
        "16 columns of float32": (table_of(128, 16), slice(3, 20), True),
        "16 columns of float64": (table_of(128, 16, torch.float64), slice(3, 20), True),
        "32 columns of bfloat16": (table_of(128, 32, torch.bfloat16), slice(3, 20), True),
        "up to the last row": (table_of(128, 64), slice(96, 128), True),
        "the ragged tail of the table": (table_of(128, 64), slice(97, 128), False),
        "rows of 32 bytes": (table_of(128, 16, torch.bfloat16), slice(32, 64), False),
        "a table that starts elsewhere": (table_of(128, 64, offset=16), slice(32, 64), False),
        "a table that starts a whole row later": (table_of(128, 16, offset=64), slice(32, 64), True),
        "columns to be padded": (table_of(128, 19), slice(32, 64), False),
    }.values(),
)
def test_rows_are_the_tables_own_where_they_are_aligned_and_go_on_and_a_copy_elsewhere(table, rows, is_view):
    found = rows_of(table, rows, Scratch(), "operand")
    own = table.data_ptr() <= found.data_ptr() < table.data_ptr() + table.numel() * table.itemsize
    assert own == is_view
    if is_view:
        assert found.data_ptr() == table[rows.start].data_ptr()


@given(
    num_rows=st.integers(0, 100),
    width=st.integers(1, 70),
    ends=st.tuples(st.integers(0, 100), st.integers(0, 100)),
    dtype=st.sampled_from(FLOATS),
    offset=st.sampled_from([0, 8, 16, 32]),
)
@settings(max_examples=150, deadline=None)
def test_operands_are_aligned_and_padded_and_columns_beyond_the_width_are_zero(num_rows, width, ends, dtype, offset):
    table = table_of(num_rows, width, dtype, offset)
    rows = slice(*(min(end, num_rows) for end in sorted(ends)))
    scratch = dirty_scratch("operand", rows=128)
    found = rows_of(table, rows, scratch, "operand")
    count = rows.stop - rows.start
    assert found.shape == (padded(count, 32), padded(width, 16))
    assert found.is_contiguous()
    assert found.data_ptr() % 64 == 0 or count == 0
    assert torch.equal(found[:count, :width], table[rows])
    assert not found[:, width:].any()


def test_a_table_that_requires_grad_is_an_operand_without_autograd():
    """Threads of a team do not inherit that autograd is off in those that call them."""
    for width in (16, 5):
        table = torch.ones(64, width, requires_grad=True)
        assert not rows_of(table, slice(0, 32), Scratch(), "operand").requires_grad


SHAPES = {
    # node width, widths of tables, widths of layers, plain output
    "nodes and a table": (16, (16,), (32, 16), False),
    "odd widths": (5, (7,), (32, 16), False),
    "one layer with nodes": (5, (7,), (48,), False),
    "one layer without nodes": (0, (21,), (16,), False),
    "nodes alone": (9, (), (16, 16), False),
    "one layer of nodes alone": (16, (), (32,), False),
    "three layers": (16, (16,), (64, 48, 32), False),
    "three tables": (0, (3, 16, 10), (32, 32), False),
    "a plain output of width 1": (16, (16,), (32, 1), True),
    "a plain output of width 5 after three layers": (0, (16,), (16, 32, 16, 5), True),
    "a plain output alone": (0, (3,), (5,), True),
    "a plain output of width 1 alone": (0, (16,), (1,), True),
}
each_shape = pytest.mark.parametrize(("node_width", "widths", "layers", "plain"), SHAPES.values(), ids=SHAPES)


def make(node_width, widths, layers, plain, dtype=torch.float64):
    """A perceptron with other norms than the ones and zeros that they begin with."""
    mlp = MLP(2 * node_width + sum(widths), layers, torch.Generator().manual_seed(1), plain).to(dtype)
    generator = torch.Generator().manual_seed(2)
    for norm in mlp.norms:
        nn.init.normal_(norm.weight, generator=generator)
        nn.init.normal_(norm.bias, generator=generator)
    return mlp


@each_shape
def test_folded_weights_are_the_weights_padded_with_zeros(node_width, widths, layers, plain):
    mlp = make(node_width, widths, layers, plain)
    folded = fold(mlp, [torch.empty(0, width, dtype=torch.float64) for width in widths], node_width)
    first, *later = (linear.weight.detach() for linear in mlp.linears)
    at_dst, at_src = folded.at_ends.chunk(2)
    parts = [(at_src, node_width), (at_dst, node_width), *zip(folded.inputs, widths)]
    whole = torch.cat([part[: layers[0], :width] for part, width in parts], dim=1)
    assert torch.equal(whole, first)
    for part, width in parts:
        assert part.shape == (padded(layers[0], 16), padded(width, 16))
        assert part[: layers[0], :width].abs().sum() == part.abs().sum()
    for padded_weight, weight in zip(folded.later, later, strict=True):
        assert torch.equal(padded_weight[: len(weight), : weight.shape[1]], weight)
        assert weight.abs().sum() == padded_weight.abs().sum()
    for norm, width in zip(folded.norms, layers, strict=True):
        assert norm.bias.shape == (1, padded(width, 16))
        assert not norm.bias[0, width:].any()
    assert folded.width == padded(layers[0], 16)


def test_products_are_computed_in_the_type_of_what_comes_in_and_a_plain_output_in_that_of_the_parameters():
    mlp = make(0, (16,), (16, 16, 1), True, torch.float32)
    exact, narrow = torch.float32, torch.bfloat16
    folded = fold(mlp, [torch.empty(0, 16, dtype=narrow)], 0, narrow)
    assert [folded.product_type(layer) for layer in range(3)] == [narrow, narrow, exact]
    folded = fold(mlp, [torch.empty(0, 16)], 0, narrow)
    assert [folded.product_type(layer) for layer in range(3)] == [exact, narrow, exact]
    folded = fold(mlp, [torch.empty(0, 16)])
    assert [folded.product_type(layer) for layer in range(3)] == [exact, exact, exact]
    folded = fold(make(4, (), (16, 16), False, torch.float32), [], 4, narrow)
    assert [folded.product_type(layer) for layer in range(2)] == [exact, narrow]
    assert folded.at_ends.dtype == exact


def test_node_states_into_a_plain_output_alone_are_refused():
    with pytest.raises(ValueError, match="plain output alone cannot take node states; give the perceptron a hidden"):
        fold(make(4, (7,), (5,), True), [torch.empty(0, 7)], 4)


@dataclass
class Inputs:
    """What goes into a block of edges, and the gradient of what comes out."""

    nodes: torch.Tensor
    tables: list
    ends: Ends
    upstream: torch.Tensor


def inputs_of(node_width, widths, out):
    generator = torch.Generator().manual_seed(3)
    dst, src = np.random.default_rng(3).integers(0, NUM_NODES, (2, COUNT))
    drawn = [torch.randn(rows, width, dtype=torch.float64, generator=generator) for rows, width in
             [(NUM_NODES, node_width), *((COUNT, width) for width in widths), (COUNT, out)]]  # fmt: skip
    return Inputs(drawn[0], drawn[1:-1], Ends(dst, src, src, NUM_NODES), drawn[-1])


def on_blocks(mlp, inputs):
    """Outputs, their sums at both ends, gradients of nodes and tables, and those of the parameters."""
    node_width = inputs.nodes.shape[1]
    folded, scratch = fold(mlp, inputs.tables, node_width), Scratch()
    operands = [rows_of(table, slice(0, COUNT), scratch, f"table {i}") for i, table in enumerate(inputs.tables)]
    states = rows_of(inputs.nodes, slice(0, NUM_NODES), scratch, "states")
    at_nodes = as_table(states @ folded.at_ends.T) if node_width else no_rows(folded.norms[0])
    edges = Edges(0, inputs.ends, at_nodes)

    out = torch.empty(COUNT, mlp.out_features, dtype=torch.float64)
    sums = no_sums(folded.norms[-1]) if mlp.plain else new_sums(mlp.out_features)
    made = blocks.forward(folded, operands, COUNT, edges, scratch)
    blocks.finish(folded, made, COUNT, edges, out, 0, sums)

    made = blocks.forward(folded, operands, COUNT, edges, scratch, keep=True)
    given, of_ends = TileGradients(folded, scratch), new_sums(folded.width)
    came = edges.with_(no_rows(folded.norms[-1]))
    back = WayBack(folded, made, COUNT, came, of_ends if node_width else no_sums(folded.norms[0]), given, scratch)
    into = back.run(inputs.upstream)
    of_tables = [(into @ weight)[:COUNT, :width] for weight, width in zip(folded.inputs, folded.widths)]
    partials = given.partials()
    if node_width:  # the rest is summed at nodes
        of_nodes = torch.from_numpy(added_pairs(of_ends))
        of_tables.insert(0, (of_nodes @ folded.at_ends)[:, :node_width])
        at_dst, at_src = (of_nodes.T @ states[:NUM_NODES]).chunk(2)
        width, rows = node_width, mlp.linears[0].out_features
        assert not partials[0][:, : 2 * width].any()
        partials[0][:, : 2 * width] = torch.cat([at_src[:rows, :width], at_dst[:rows, :width]], dim=1)
    return out, added_pairs(sums), of_tables, partials


def new_sums(width):
    return Sums(np.zeros((NUM_NODES, 2 * width)), np.zeros((NUM_NODES, width)))


def added_pairs(sums):
    add_pairs(sums.at_pairs, np.arange(len(sums.at_pairs)), sums.at_ends)
    return sums.at_ends


def by_autograd(mlp, inputs):
    """The same from plain torch."""
    nodes, *tables = (table.clone().requires_grad_() for table in (inputs.nodes, *inputs.tables))
    src, dst = torch.from_numpy(inputs.ends.src), torch.from_numpy(inputs.ends.dst)
    out = dense.mlp(mlp, torch.cat([nodes[src], nodes[dst], *tables], dim=1))
    zeros = out.new_zeros(0 if mlp.plain else NUM_NODES, out.shape[1])
    sums = [zeros if mlp.plain else zeros.index_add(0, end, out) for end in (dst, src)]
    given = [nodes, *tables] if nodes.shape[1] else tables
    gradients = torch.autograd.grad(out, [*given, *mlp.parameters()], inputs.upstream)
    return out.detach(), torch.cat(sums, dim=1).detach(), gradients[: len(given)], gradients[len(given) :]


def assert_close(found, expected):
    """max |difference| / max |value| of at most 1e-12."""
    found, expected = torch.as_tensor(found), torch.as_tensor(expected)
    assert found.shape == expected.shape
    if expected.numel():
        assert (found - expected).abs().max() <= 1e-12 * expected.abs().max()


@each_shape
def test_a_block_is_the_perceptron_of_plain_torch_with_every_gradient(node_width, widths, layers, plain):
    mlp, inputs = make(node_width, widths, layers, plain), inputs_of(node_width, widths, layers[-1])
    found, expected = on_blocks(mlp, inputs), by_autograd(mlp, inputs)
    assert_close(found[0], expected[0])
    if not plain:
        assert_close(found[1], expected[1])
    for ours, theirs in zip((*found[2], *found[3]), (*expected[2], *expected[3]), strict=True):
        assert_close(ours, theirs)


def test_rows_that_are_not_finite_get_a_gradient_as_in_plain_torch():
    """A product's padding columns are NaN then, and its gradient's must not be."""
    mlp, inputs = make(0, (3,), (5,), True), inputs_of(0, (3,), 5)
    inputs.tables[0][7] = torch.nan
    found, expected = on_blocks(mlp, inputs), by_autograd(mlp, inputs)
    assert_close(found[2][0], expected[2][0])
    assert found[2][0].isfinite().all()


def test_what_is_normalised_is_kept_in_the_type_of_the_parameters_in_place_where_that_is_the_products(monkeypatch):
    monkeypatch.setattr("domainpar.nn.products.HAS_ONEDNN", False)  # which takes memory of its own
    for products in (None, torch.bfloat16):
        mlp = make(0, (16,), (32, 16, 16), False, torch.float32)
        table = torch.ones(COUNT, 16, dtype=products or torch.float32)
        folded, scratch = fold(mlp, [table], 0, products), Scratch()
        edges = Edges(0, inputs_of(0, (16,), 16).ends, no_rows(folded.norms[0]))
        made = blocks.forward(folded, [rows_of(table, slice(0, COUNT), scratch, "t")], COUNT, edges, scratch, keep=True)
        assert [kept.dtype for kept in made.kept] == [torch.float32] * 2
        memory = {folded.product(layer, 64, scratch).data_ptr() for layer in range(3)}
        assert all((kept.data_ptr() in memory) == (products is None) for kept in made.kept)
        assert made.product.dtype == (products or torch.float32)


def test_what_a_scratch_held_before_reaches_nothing(monkeypatch):
    """Padding rows hold anything: NaN here."""
    mlp, inputs = make(5, (7,), (32, 16, 1), True), inputs_of(5, (7,), 1)
    expected = on_blocks(mlp, inputs)
    plain_take = Scratch.take
    monkeypatch.setattr(Scratch, "take", lambda self, *what: _spoil_new(self, plain_take, *what))
    found = on_blocks(mlp, inputs)
    for ours, theirs in zip((found[0], *found[2], *found[3]), (expected[0], *expected[2], *expected[3]), strict=True):
        assert torch.equal(ours, theirs)


def _spoil_new(scratch, take, name, rows, columns, dtype):
    is_new = (name, dtype) not in scratch._kept
    block = take(scratch, name, rows, columns, dtype)
    return block.fill_(torch.nan) if is_new else block


def test_a_block_whose_owner_gives_the_gradients_computes_none_of_weights():
    mlp, inputs = make(0, (16,), (16, 16), False), inputs_of(0, (16,), 16)
    folded, scratch = fold(mlp, inputs.tables), Scratch()
    edges = Edges(0, inputs.ends, no_rows(folded.norms[0]))
    gradients = []
    for owned in (True, False):
        operands = [rows_of(inputs.tables[0], slice(0, COUNT), scratch, "table")]
        made = blocks.forward(folded, operands, COUNT, edges, scratch, keep=True)
        given = TileGradients(folded, scratch)
        back = WayBack(folded, made, COUNT, edges, no_sums(folded.norms[0]), given, scratch, owned)
        gradients.append(back.run(inputs.upstream)[:COUNT].clone())
        assert [len(of_weight) for of_weight in given._of_weights] == [int(owned)] * 2
    assert torch.equal(*gradients)
