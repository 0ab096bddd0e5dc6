"""Kernels have the same bits on machines with other instructions."""

import hashlib
from pathlib import Path

import numpy as np
import pytest
import torch
from one_operation import call, multiply, outer
from other_machines import OTHERS, needs_x86, printed_on

from domainpar.nn import operations
from domainpar.nn.kernels import EPS, NUM_CONSTANTS, SILU, TANH

ROWS, IN, OUT = 53, 21, 80


def kernels_hash():
    """Of products, norms and their sums on numbers that are the same everywhere."""
    generator = np.random.default_rng(0)

    def drawn(*shape):
        return generator.random(shape, np.float32) - np.float32(0.5)

    def zeros(*shape):
        return np.zeros(shape, np.float32)

    rows, product, of_weight = drawn(ROWS, IN), zeros(ROWS + 3, OUT), zeros(IN, OUT)
    multiply(rows, ROWS, drawn(IN, OUT), product, False)

    constants, exact = drawn(NUM_CONSTANTS, OUT), torch.float32
    constants[EPS] = 1e-5
    dst, src = generator.integers(0, ROWS, (2, ROWS))
    out, grad_product, grad_constants, inverse = zeros(ROWS, OUT), zeros(ROWS, OUT), zeros(3, OUT), zeros(1, ROWS + 3)
    layer = (constants, True, 1, 0, 0, 0, product, inverse, zeros(2, 8), zeros(ROWS + 3, OUT), src, dst, src, ROWS)
    sums, back = ((zeros(ROWS, 2 * OUT), zeros(ROWS, OUT)) for _ in range(2))
    gathered = drawn(ROWS, 2 * OUT)
    call(operations.layer_forward(OUT, exact, exact), *layer, *sums, gathered, 0, out, count=ROWS)
    kernel = operations.layer_backward(OUT, exact, exact, exact, exact)
    call(kernel, *layer, *back, gathered, drawn(ROWS, OUT), 0, grad_product, grad_constants, count=ROWS)
    outer(rows, grad_product, ROWS, of_weight)
    starts, at_ends, limbs = np.arange(ROWS + 1), zeros(ROWS, 2 * OUT), np.zeros(2 * IN * OUT + 2, np.int64)
    call(operations.sum_pairs(OUT, exact), starts, dst, back[1], at_ends, count=ROWS)
    call(operations.split(exact), of_weight, of_weight.size, limbs, count=0)
    made = [product, out, *sums, grad_product, grad_constants, *back, of_weight, at_ends, limbs]
    for activation in (SILU, TANH):  # with exponentials
        own = (constants, True, activation, 0, 0, 0, product.copy(), inverse, *layer[8:], 0, 0)
        made += [zeros(ROWS, OUT), zeros(ROWS, OUT), zeros(3, OUT)]
        call(operations.layer_forward(OUT, exact, exact), *own, gathered, 0, made[-3], count=ROWS)
        call(kernel, *own, gathered, drawn(ROWS, OUT), 0, *made[-2:], count=ROWS)
    assert all(np.isfinite(table).all() and table.any() for table in made)
    return hashlib.sha256(b"".join(table.tobytes() for table in made)).hexdigest()


OF_EVERY_MACHINE = "f97509117f1e927469bfefbb96c88d8854757220b37997e2d5e704db672468c4"
"""Bits that no machine may change, whatever its processor: a kernel that is changed on purpose writes others here."""


def test_products_and_norms_have_the_bits_of_every_other_machine():
    assert kernels_hash() == OF_EVERY_MACHINE


PROGRAM = """
import test_instructions
from domainpar.nn import operations, products
print(test_instructions.kernels_hash(), *products.WIDE)
print(any("zmm" in code for kernel in operations._alive for code in kernel.inspect_asm().values()))
"""


@needs_x86
@pytest.mark.slow
@pytest.mark.parametrize("machine", OTHERS)
def test_products_and_norms_have_the_same_bits_on_a_machine_with_other_instructions(machine, tmp_path):
    """There the blocks of products have another shape, too."""
    assert printed_on(machine, PROGRAM, Path(__file__).parent, tmp_path) == [kernels_hash(), "6", "1", "False"]
