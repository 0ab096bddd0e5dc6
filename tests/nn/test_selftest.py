"""The self-test passes on this machine and finds an MLP whose rows depend on each other."""

import threading
from functools import cache

import pytest
import torch
from one_mlp import an_mlp
from one_operation import CODE, in_python, table_at
from torch import nn

from domainpar.nn import blocks, operations
from domainpar.nn.interaction import InteractionNetwork
from domainpar.nn.selftest import rows_are_independent
from domainpar.nn.stages import EdgeStage, NodeStage
from domainpar.testing import run_ranks

A_BIT = 1 + 2.0**-20
KINDS = {
    "float32": {"dtype": torch.float32},
    "float64": {"dtype": torch.float64},
    "bfloat16 edges": {"products": torch.bfloat16},
}


@pytest.fixture
def spoil(monkeypatch):
    """Let an operation do what it does, and then something else to what it made.

    `spoil(name, slot, columns, after)`: `after(out, kinds, arguments, first)` gets the table at that operand, and the
    types that the operation was made for.
    """

    def spoil(name, slot, columns, after):
        plain = getattr(operations, name)

        @cache
        def made(*kinds):
            ours, of_types = CODE(plain(*kinds)), [kind for kind in kinds if isinstance(kind, torch.dtype)]

            def spoilt(arguments, first, count):
                ours(arguments, first, count)
                rows = arguments[1] if name == "outer_of_rows" else count
                out = table_at(arguments[slot], rows, columns(arguments, kinds), of_types[-1])
                after(out, of_types, arguments, first)

            return in_python(spoilt)

        monkeypatch.setattr(operations, name, made)

    return spoil


@pytest.fixture
def spoil_products(spoil):
    """`after(out, kinds, arguments, first)` every product."""
    return lambda after: spoil("multiply_rows", 3, lambda arguments, kinds: arguments[4], after)


def a_bit_more(table):
    """Also of bfloat16, whose next number is the next integer."""
    table[:] = table + 1 if table.dtype.kind == "u" else table * A_BIT


@pytest.fixture
def goes_back(monkeypatch):
    """Whether a product is one of a gradient: by its weight."""
    plain, backs = blocks._weight, []

    def weight(*given):
        made = plain(*given)
        backs.append(made.back)  # alive, so that no other weight has its address
        return made

    monkeypatch.setattr(blocks, "_weight", weight)
    return lambda arguments: arguments[2] in [back.data_ptr() for back in backs]


def _self_test(world, model):
    return rows_are_independent(model, world.transport)


def _network(order="edge-first", **flags):
    return InteractionNetwork(3, 6, hidden=16, graph_iters=2, order=order, **flags)


@pytest.mark.parametrize("order", ["edge-first", "node-first"])
@pytest.mark.parametrize("flags", KINDS.values(), ids=KINDS)
def test_this_machine_keeps_rows_apart(flags, order):
    assert run_ranks(_self_test, 2, _network(order, **flags)) == [None, None]


def test_stages_of_other_shapes_are_tried_too():
    generator = torch.Generator().manual_seed(0)
    mlp_programs = [an_mlp(21, (48,), generator), an_mlp(7, (5,), generator, True), an_mlp(64, (5,), generator, True),
                   an_mlp(40, (16, 32, 16), generator), an_mlp(32, (16,), generator)]  # fmt: skip
    stages = [stage(mlp) for mlp in mlp_programs for stage in (EdgeStage, NodeStage)]
    assert run_ranks(_self_test, 1, nn.ModuleList(stages)) == [None]
    assert run_ranks(_self_test, 1, nn.ModuleList()) == [None]


MANY = 100
"""Rows of a strip from which on a library might take another kernel; the smaller subsets have none."""

# Products of which types, and of which widths; weights of node states at both ends are twice as wide as the others, of
# a network of 16 columns.
IN_PRODUCTS = {
    "all": (None, None, None, "float32"),
    "all, float64": (None, None, None, "float64"),
    "back only": (None, None, "backward", "float32"),
    "of node states": (None, (16, 32), "forward", "float32"),
    "of node states, back": (None, (32, 16), "backward", "float32"),
    "of bfloat16": (torch.bfloat16, None, "forward", "bfloat16 edges"),
    "of bfloat16, back": (torch.bfloat16, None, "backward", "bfloat16 edges"),
}


@pytest.mark.parametrize(("of", "shape", "direction", "kind"), IN_PRODUCTS.values(), ids=IN_PRODUCTS)
def test_products_whose_rows_depend_on_their_company_are_found(spoil_products, goes_back, of, shape, direction, kind):
    def leak(out, kinds, arguments, first):
        fits = of in (None, kinds[0]) and shape in (None, (arguments[1], arguments[4]))
        if len(out) > MANY and fits and (direction is None or goes_back(arguments) == (direction == "backward")):
            out[:] = out + 1 if out.dtype.kind == "u" else out * (1.01 if of else A_BIT)

    spoil_products(leak)
    problems = run_ranks(_self_test, 3, _network(**KINDS[kind]))
    assert len(set(problems)) == 1
    found = f" block change with the other rows of the block ({direction or 'forward'}, 1 of 1000 rows)"
    assert found in problems[0]


def _neighbour_leaks(out, kinds, arguments, first):
    """Each row of a group of 32 feels the last one of it."""
    for begin in range(0, len(out), 32):
        group = out[begin : begin + 32]
        group[:-1] += 1e-4 * group[-1:]


def test_products_whose_rows_depend_on_their_neighbours_are_found(spoil_products):
    spoil_products(_neighbour_leaks)
    assert "(forward, 1 of 1000 rows)" in run_ranks(_self_test, 1, _network())[0]


LAYERS = {"layer_forward": (18, "forward"), "layer_backward": (19, "backward")}


@pytest.mark.parametrize("cause", ["company", "place"])
@pytest.mark.parametrize("name", LAYERS)
def test_layers_whose_rows_depend_on_their_company_or_place_are_found(spoil, name, cause):
    slot, direction = LAYERS[name]

    def leak(out, kinds, arguments, first):
        if len(out) > MANY if cause == "company" else first % 2:
            a_bit_more(out)

    spoil(name, slot, lambda arguments, kinds: kinds[0], leak)
    assert f"({direction}, 1 of 1000 rows)" in run_ranks(_self_test, 1, _network())[0]


def _on_rank_1_only(out, kinds, arguments, first):
    if threading.current_thread().name == "rank 1":
        a_bit_more(out)


def test_ranks_that_compute_other_bits_are_found_and_all_are_told(spoil_products):
    spoil_products(_on_rank_1_only)
    problems = run_ranks(_self_test, 3, _network())
    expected = "ranks compute different bits from the same numbers: their machines or numba versions differ"
    assert problems == [expected] * 3


def test_ranks_whose_sums_over_rows_differ_are_found_although_all_rows_agree(spoil):
    spoil("outer_of_rows", 4, lambda arguments, kinds: arguments[3], _on_rank_1_only)
    assert "ranks compute different bits from the same numbers" in run_ranks(_self_test, 2, _network())[0]


def test_one_rank_with_broken_products_is_reason_enough(spoil_products):
    spoil_products(lambda out, *given: _on_rank_1_only(out, *given) if len(out) > MANY else None)
    problems = run_ranks(_self_test, 3, _network())
    assert len(set(problems)) == 1
    assert "does not keep rows apart" in problems[0]
