"""MLPs on blocks: operands where they lie in their tables, and plain torch's results with every gradient."""

from dataclasses import dataclass

import dense
import numpy as np
import pytest
import torch
from one_mlp import UNTOUCHED, an_mlp, as_operands, back, forward, new_sums, rows_of
from torch import nn

from domainpar.nn.blocks import AtEnds, fold
from domainpar.nn.kernels import BIAS, EPS, KEPT, SCALE, SHIFT
from domainpar.nn.mlp import padded
from domainpar.nn.program import NOTHING, shared

COUNT, NUM_NODES = 45, 11

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
    "a readout of width 1": (16, (16,), (32, 1), True),
    "a readout of width 5 after three layers": (0, (16,), (16, 32, 16, 5), True),
    "a readout alone": (0, (3,), (5,), True),
    "a readout of width 1 alone": (0, (16,), (1,), True),
}
each_shape = pytest.mark.parametrize(("node_width", "widths", "layers", "plain"), SHAPES.values(), ids=SHAPES)


def make(node_width, widths, layers, plain, dtype=torch.float64):
    """An MLP with other norms than the ones and zeros that they begin with."""
    mlp = an_mlp(2 * node_width + sum(widths), layers, torch.Generator().manual_seed(1), plain).to(dtype)
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
    out = padded(layers[0], 16)
    assert folded.at_ends.forward.shape == (node_width, 2 * out)
    at_dst, at_src = folded.at_ends.forward.t().split(out)
    forward = [at_src, at_dst, *(weight.forward.t() for weight in folded.inputs)]
    assert torch.equal(torch.cat(forward, dim=1)[: layers[0]], first)
    assert not torch.cat(forward, dim=1)[layers[0] :].any()
    for found, weight in zip(folded.later, later, strict=True):
        assert torch.equal(found.forward.t()[: len(weight)], weight)
        assert not found.forward.t()[len(weight) :].any()
    for constants, (linear, norm, _) in zip(folded.constants, mlp.layers, strict=True):
        width = linear.out_features
        assert constants.shape[1] == padded(width, 16)
        assert torch.equal(constants[BIAS, :width], linear.bias)
        assert not constants[[BIAS, SCALE, SHIFT], width:].any()
        if norm is not None:
            assert torch.equal(constants[SCALE], norm.weight)
            assert torch.equal(constants[SHIFT], norm.bias)
        assert (constants[EPS] == (0 if norm is None else norm.eps)).all()
        assert (constants[KEPT] == 1).all()
    assert folded.width == out


@each_shape
def test_the_way_back_is_the_transpose_with_its_columns_padded_by_zeros(node_width, widths, layers, plain):
    mlp = make(node_width, widths, layers, plain)
    folded = fold(mlp, [torch.empty(0, width, dtype=torch.float64) for width in widths], node_width)
    for weight in (folded.at_ends, *folded.inputs, *folded.later):
        forward, back = weight
        assert torch.equal(back[:, : len(forward)], forward.t())
        assert back.shape == (forward.shape[1], padded(len(forward), 16))
        assert not back[:, len(forward) :].any()


def test_operands_are_kept_in_the_type_of_what_comes_in_and_those_of_a_readout_in_that_of_the_parameters():
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
        for table in weight:
            assert table.dtype == torch.float32
            assert torch.equal(table, table.to(narrow).float()) == is_rounded


def test_node_states_into_a_readout_alone_are_refused():
    with pytest.raises(ValueError, match="a readout alone cannot take node states; give the MLP a hidden"):
        fold(make(4, (7,), (5,), True), [torch.empty(0, 7)], 4)


@dataclass
class Inputs:
    """What goes into a tile of edges, rows `first` and on of its tables, and the gradient of what comes out."""

    nodes: torch.Tensor
    tables: list
    src: np.ndarray
    dst: np.ndarray
    upstream: torch.Tensor
    first: int = 0

    @property
    def rows(self):
        return slice(self.first, self.first + COUNT)


def inputs_of(node_width, widths, out):
    generator = torch.Generator().manual_seed(3)
    dst, src = np.random.default_rng(3).integers(0, NUM_NODES, (2, COUNT))
    drawn = [torch.randn(rows, width, dtype=torch.float64, generator=generator) for rows, width in
             [(NUM_NODES, node_width), *((COUNT, width) for width in widths), (COUNT, out)]]  # fmt: skip
    return Inputs(drawn[0], drawn[1:-1], src, dst, drawn[-1])


def moved(inputs, first):
    """The same tile further down in tables that hold NaN elsewhere, and edges elsewhere that end at node 0."""

    def among_nan(table):
        around = table.new_full((1, table.shape[1]), torch.nan)
        return torch.cat([around.expand(first, -1), table, around])

    ends = (np.concatenate([np.zeros(first, np.int64), end, [0]]) for end in (inputs.src, inputs.dst))
    return Inputs(inputs.nodes, [among_nan(table) for table in inputs.tables], *ends, among_nan(inputs.upstream), first)


def on_a_tile(mlp, inputs):
    """Outputs, their sums at both ends, gradients of nodes and tables, and those of the parameters."""
    node_width = inputs.nodes.shape[1]
    folded = fold(mlp, inputs.tables, node_width)
    ends = AtEnds.of(inputs.src, inputs.dst, inputs.src, NUM_NODES)
    at_nodes = inputs.nodes @ folded.at_ends.forward
    how = {"node_width": node_width, "ends": ends, "at_nodes": shared(at_nodes) if node_width else NOTHING}

    out, sums = torch.full_like(inputs.upstream, UNTOUCHED), new_sums(NUM_NODES, 0 if mlp.readout else mlp.out_features)
    forward(mlp, inputs.tables, inputs.rows, out, **how, sums=None if mlp.readout else as_operands(sums))

    of_ends = new_sums(NUM_NODES, folded.width)
    found = back(
        mlp, inputs.tables, inputs.rows, inputs.upstream, **how, sums=as_operands(of_ends) if node_width else None
    )
    assert found.rejected == 0
    grad_tables = [table[:, :width] for table, width in zip(found.grad_tables, folded.widths)]
    of_parameters = found.of_parameters
    if node_width:  # the rest is summed at nodes
        grad_nodes = with_pairs(of_ends)
        grad_tables.insert(0, (grad_nodes @ folded.at_ends.back)[:, :node_width])
        at_dst, at_src = (grad_nodes.T @ inputs.nodes).chunk(2)
        rows = mlp.linears[0].out_features
        assert not of_parameters[0][:, : 2 * node_width].any()
        of_parameters[0][:, : 2 * node_width] = torch.cat([at_src[:rows], at_dst[:rows]], dim=1)
    return out, with_pairs(sums), grad_tables, of_parameters


def with_pairs(sums):
    at_ends, at_pairs = sums
    at_ends[:, at_pairs.shape[1] :] += at_pairs
    return at_ends


def by_autograd(mlp, inputs):
    """The same from plain torch."""
    nodes, *tables = (table.clone().requires_grad_() for table in (inputs.nodes, *inputs.tables))
    src, dst = torch.from_numpy(inputs.src), torch.from_numpy(inputs.dst)
    out = dense.mlp(mlp, torch.cat([nodes[src], nodes[dst], *tables], dim=1))
    zeros = out.new_zeros(0 if mlp.readout else NUM_NODES, out.shape[1])
    sums = [zeros if mlp.readout else zeros.index_add(0, end, out) for end in (dst, src)]
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
def test_a_tile_is_the_perceptron_of_plain_torch_with_every_gradient(node_width, widths, layers, plain):
    mlp, inputs = make(node_width, widths, layers, plain), inputs_of(node_width, widths, layers[-1])
    found, expected = on_a_tile(mlp, inputs), by_autograd(mlp, inputs)
    assert_close(found[0], expected[0])
    if not plain:
        assert_close(found[1], expected[1])
    for ours, theirs in zip((*found[2], *found[3]), (*expected[2], *expected[3]), strict=True):
        assert_close(ours, theirs)


def test_rows_that_are_not_finite_get_a_gradient_as_in_plain_torch():
    """A product's padding columns are NaN then, and its gradient's must not be."""
    mlp, inputs = make(0, (3,), (5,), True), inputs_of(0, (3,), 5)
    inputs.tables[0][7] = torch.nan
    found, expected = back(mlp, inputs.tables, inputs.rows, inputs.upstream), by_autograd(mlp, inputs)
    assert found.rejected > 0
    assert_close(found.grad_tables[0][:, :3], expected[2][0])
    assert found.grad_tables[0].isfinite().all()


@each_shape
def test_a_tile_that_lies_elsewhere_has_the_same_bits_and_touches_no_other_row(node_width, widths, layers, plain):
    mlp, inputs = make(node_width, widths, layers, plain), inputs_of(node_width, widths, layers[-1])
    expected, found = on_a_tile(mlp, inputs), on_a_tile(mlp, moved(inputs, 13))
    for ours, theirs in zip((found[0], *found[2]), (expected[0], *expected[2]), strict=True):
        if len(theirs) != COUNT:
            assert torch.equal(ours, theirs), "nodes"
            continue
        assert torch.equal(ours[13 : 13 + COUNT], theirs)
        assert (torch.cat([ours[:13], ours[13 + COUNT :]]) == UNTOUCHED).all()
    for ours, theirs in zip((found[1], *found[3]), (expected[1], *expected[3]), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("products", [None, torch.bfloat16])
def test_products_keep_the_type_of_the_parameters_and_operands_have_their_own(products):
    mlp, kind = make(0, (16,), (32, 16, 16), False, torch.float32), products or torch.float32
    table, rows = torch.ones(COUNT, 16, dtype=kind), slice(0, COUNT)
    mlp_program = forward(mlp, [table], rows, torch.empty(COUNT, 16, dtype=kind), products=products)
    assert {rows.dtype for rows in mlp_program._rows} == {torch.float32}
    assert {operand.dtype for operand in mlp_program._operands} == {kind}
    assert len(mlp_program._operands) == 2
    assert back(mlp, [table], rows, table, products=products).kind == kind


def test_what_is_left_of_a_layer_is_its_normed_rows():
    mlp, inputs = make(0, (16,), (32, 16), False), inputs_of(0, (16,), 16)
    mlp_program = forward(mlp, inputs.tables, inputs.rows, torch.empty_like(inputs.upstream))
    left = rows_of(mlp_program, 0, COUNT)
    linear, norm, _ = mlp.layers[0]
    product = nn.functional.linear(inputs.tables[0], linear.weight, linear.bias)
    assert_close(left, nn.functional.layer_norm(product, (32,), eps=norm.eps).detach())


def test_a_tile_whose_owner_gives_the_gradients_computes_none_of_parameters():
    mlp, inputs = make(0, (16,), (16, 16), False), inputs_of(0, (16,), 16)
    own, foreign = (back(mlp, inputs.tables, inputs.rows, inputs.upstream, owned=owned) for owned in (True, False))
    assert torch.equal(own.grad_product, foreign.grad_product)
    assert torch.equal(own.grad_tables[0], foreign.grad_tables[0])
    assert all(gradient.any() for gradient in own.of_parameters)
    assert not any(gradient.any() for gradient in foreign.of_parameters)


def test_partials_that_are_not_finite_are_counted_and_those_of_a_foreign_tile_are_not():
    mlp, inputs = make(0, (16,), (16, 16), False), inputs_of(0, (16,), 16)
    inputs.upstream[5] = torch.inf
    found, foreign = (back(mlp, inputs.tables, inputs.rows, inputs.upstream, owned=owned) for owned in (True, False))
    assert found.rejected > 0
    assert foreign.rejected == 0
