"""Perceptrons on blocks: operands where they lie in their tables, and plain torch's results with every gradient."""

from dataclasses import dataclass

import dense
import numpy as np
import pytest
import torch
from torch import nn

from domainpar.nn import blocks
from domainpar.nn.blocks import Edges, Rows, TileGradients, WayBack, as_table, fold, no_rows, no_sums
from domainpar.nn.kernels import Ends, Sums, add_pairs
from domainpar.nn.mlp import MLP, padded
from domainpar.nn.program import Scratch

COUNT, NUM_NODES = 45, 11
UNTOUCHED = -5.0

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


def as_tensors(weight):
    return torch.from_numpy(weight.forward), torch.from_numpy(weight.back)


@each_shape
def test_folded_weights_are_the_weights_padded_with_zeros(node_width, widths, layers, plain):
    mlp = make(node_width, widths, layers, plain)
    folded = fold(mlp, [torch.empty(0, width, dtype=torch.float64) for width in widths], node_width)
    first, *later = (linear.weight.detach() for linear in mlp.linears)
    out = padded(layers[0], 16)
    assert folded.at_ends.forward.shape == (node_width, 2 * out)
    at_dst, at_src = as_tensors(folded.at_ends)[0].t().split(out)
    forward = [at_src, at_dst, *(as_tensors(weight)[0].t() for weight in folded.inputs)]
    assert torch.equal(torch.cat(forward, dim=1)[: layers[0]], first)
    assert not torch.cat(forward, dim=1)[layers[0] :].any()
    for found, weight in zip(folded.later, later, strict=True):
        assert torch.equal(as_tensors(found)[0].t()[: len(weight)], weight)
        assert not as_tensors(found)[0].t()[len(weight) :].any()
    for norm, width in zip(folded.norms, layers, strict=True):
        assert norm.bias.shape == (1, padded(width, 16))
        assert not norm.bias[0, width:].any()
    assert folded.width == out


@each_shape
def test_the_way_back_is_the_transpose_with_its_columns_padded_by_zeros(node_width, widths, layers, plain):
    mlp = make(node_width, widths, layers, plain)
    folded = fold(mlp, [torch.empty(0, width, dtype=torch.float64) for width in widths], node_width)
    for weight in (folded.at_ends, *folded.inputs, *folded.later):
        forward, back = as_tensors(weight)
        assert torch.equal(back[:, : len(forward)], forward.t())
        assert back.shape == (forward.shape[1], padded(len(forward), 16))
        assert not back[:, len(forward) :].any()


def test_operands_are_kept_in_the_type_of_what_comes_in_and_those_of_a_plain_output_in_that_of_the_parameters():
    mlp = make(0, (16,), (16, 16, 1), True, torch.float32)
    exact, narrow = torch.float32, torch.bfloat16
    assert fold(mlp, [torch.empty(0, 16, dtype=narrow)], 0, narrow).kinds == (narrow, narrow, exact)
    assert fold(mlp, [torch.empty(0, 16)], 0, narrow).kinds == (exact, narrow, exact)
    assert fold(mlp, [torch.empty(0, 16)]).kinds == (exact, exact, exact)
    assert fold(make(4, (), (16, 16), False, torch.float32), [], 4, narrow).kinds == (exact, narrow)


def test_weights_are_rounded_where_their_operands_are_and_kept_in_the_type_of_the_parameters():
    mlp, narrow = make(4, (16,), (16, 16, 1), True, torch.float32), torch.bfloat16
    folded = fold(mlp, [torch.empty(0, 16, dtype=narrow)], 4, narrow)
    for weight, is_rounded in zip((*folded.inputs, *folded.later, folded.at_ends), (True, True, False, False)):
        for table in as_tensors(weight):
            assert table.dtype == torch.float32
            assert torch.equal(table, table.to(narrow).float()) == is_rounded


def test_node_states_into_a_plain_output_alone_are_refused():
    with pytest.raises(ValueError, match="plain output alone cannot take node states; give the perceptron a hidden"):
        fold(make(4, (7,), (5,), True), [torch.empty(0, 7)], 4)


@dataclass
class Inputs:
    """What goes into a block of edges, rows `first` and on of its tables, and the gradient of what comes out."""

    nodes: torch.Tensor
    tables: list
    ends: Ends
    upstream: torch.Tensor
    first: int = 0


def inputs_of(node_width, widths, out):
    generator = torch.Generator().manual_seed(3)
    dst, src = np.random.default_rng(3).integers(0, NUM_NODES, (2, COUNT))
    drawn = [torch.randn(rows, width, dtype=torch.float64, generator=generator) for rows, width in
             [(NUM_NODES, node_width), *((COUNT, width) for width in widths), (COUNT, out)]]  # fmt: skip
    return Inputs(drawn[0], drawn[1:-1], Ends(src, dst, src, NUM_NODES), drawn[-1])


def moved(inputs, first):
    """The same block further down in tables that hold NaN elsewhere, and edges elsewhere that end at node 0."""

    def among_nan(table):
        around = table.new_full((1, table.shape[1]), torch.nan)
        return torch.cat([around.expand(first, -1), table, around])

    ends = (np.concatenate([np.zeros(first, np.int64), end, [0]]) for end in inputs.ends[:3])
    tables = [among_nan(table) for table in inputs.tables]
    return Inputs(inputs.nodes, tables, Ends(*ends, NUM_NODES), among_nan(inputs.upstream), first)


def on_blocks(mlp, inputs):
    """Outputs, their sums at both ends, gradients of nodes and tables, and those of the parameters."""
    node_width = inputs.nodes.shape[1]
    folded, scratch = fold(mlp, inputs.tables, node_width), Scratch()
    operands = [Rows(as_table(table), inputs.first) for table in inputs.tables]
    at_nodes = no_rows(folded.norms[0])
    if node_width:
        at_nodes = as_table(multiplied(inputs.nodes, folded.at_ends.forward))
    edges = Edges(inputs.first, inputs.ends, at_nodes)

    out = torch.full_like(inputs.upstream, UNTOUCHED)
    sums = no_sums(folded.norms[-1]) if mlp.plain else new_sums(mlp.out_features)
    made = blocks.forward(folded, operands, COUNT, edges, scratch)
    blocks.finish(folded, made, COUNT, edges, out, inputs.first, sums)

    made = blocks.forward(folded, operands, COUNT, edges, scratch, keep=True)
    given, of_ends = TileGradients(folded, scratch), new_sums(folded.width)
    came = edges.with_(no_rows(folded.norms[-1]))
    back = WayBack(folded, made, COUNT, came, of_ends if node_width else no_sums(folded.norms[0]), given, scratch)
    into = back.run(inputs.upstream)
    of_tables = [multiplied(into, weight.back)[:, :width] for weight, width in zip(folded.inputs, folded.widths)]
    partials = given.partials()
    if node_width:  # the rest is summed at nodes
        of_nodes = torch.from_numpy(added_pairs(of_ends))
        of_tables.insert(0, multiplied(of_nodes, folded.at_ends.back)[:, :node_width])
        at_dst, at_src = (of_nodes.T @ inputs.nodes).chunk(2)
        width, rows = node_width, mlp.linears[0].out_features
        assert not partials[0][:, : 2 * width].any()
        partials[0][:, : 2 * width] = torch.cat([at_src[:rows, :width], at_dst[:rows, :width]], dim=1)
    return out, torch.from_numpy(added_pairs(sums)), of_tables, partials


def multiplied(rows, weight):
    return rows @ torch.from_numpy(weight)


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


@each_shape
def test_a_block_that_lies_elsewhere_has_the_same_bits_and_touches_no_other_row(node_width, widths, layers, plain):
    mlp, inputs = make(node_width, widths, layers, plain), inputs_of(node_width, widths, layers[-1])
    expected, found = on_blocks(mlp, inputs), on_blocks(mlp, moved(inputs, 13))
    assert torch.equal(found[0][13 : 13 + COUNT], expected[0])
    assert (torch.cat([found[0][:13], found[0][13 + COUNT :]]) == UNTOUCHED).all()
    for ours, theirs in zip((found[1], *found[2], *found[3]), (expected[1], *expected[2], *expected[3]), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("products", [None, torch.bfloat16])
def test_products_keep_the_type_of_the_parameters_and_what_is_normalised_is_kept_in_their_place(products):
    mlp, kind = make(0, (16,), (32, 16, 16), False, torch.float32), products or torch.float32
    table = torch.ones(COUNT, 16, dtype=kind)
    folded, scratch = fold(mlp, [table], 0, products), Scratch()
    edges = Edges(0, inputs_of(0, (16,), 16).ends, no_rows(folded.norms[0]))
    made = blocks.forward(folded, [Rows(as_table(table), 0)], COUNT, edges, scratch, keep=True)
    of_products = [folded.product(layer, COUNT, scratch) for layer in range(3)]
    assert [kept.data_ptr() for kept in (*made.kept, made.product)] == [one.data_ptr() for one in of_products]
    assert {one.dtype for one in (*made.kept, made.product)} == {torch.float32}
    assert {one.dtype for one in made.normed} == {kind}
    given = TileGradients(folded, scratch)
    into = WayBack(folded, made, COUNT, edges, no_sums(folded.norms[0]), given, scratch).run(table)
    assert into.dtype == kind
    assert {partial.dtype for partial in given.partials()} == {torch.float32}


def test_what_a_scratch_held_before_reaches_nothing(monkeypatch):
    """What is new holds anything: NaN here."""
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
        made = blocks.forward(folded, [Rows(as_table(inputs.tables[0]), 0)], COUNT, edges, scratch, keep=True)
        given = TileGradients(folded, scratch)
        back = WayBack(folded, made, COUNT, edges, no_sums(folded.norms[0]), given, scratch, owned)
        gradients.append(back.run(inputs.upstream).clone())
        assert [len(of_weight) for of_weight in given._of_weights] == [int(owned)] * 2
    assert torch.equal(*gradients)
