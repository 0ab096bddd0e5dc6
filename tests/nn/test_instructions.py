"""Kernels have the same bits on machines with other instructions."""

import hashlib
import os
import platform
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from domainpar.nn.kernels import Ends, Norm, Sums, norm_backward, norm_forward
from domainpar.nn.lanes import wide
from domainpar.nn.noise import no_drop
from domainpar.nn.products import multiply, outer

ROWS, IN, OUT = 53, 21, 80
OTHERS = {
    "vectors of 256 bits": {"NUMBA_CPU_NAME": "haswell", "NUMBA_CPU_FEATURES": "+avx2,+fma,-avx512f"},
    "of 128 bits, no multiply-add": {"NUMBA_CPU_NAME": "x86-64", "NUMBA_CPU_FEATURES": "-avx,-fma"},
}


def kernels_hash():
    """Of products, norms and their sums on numbers that are the same everywhere."""
    generator = np.random.default_rng(0)

    def drawn(*shape):
        return generator.random(shape, np.float32) - np.float32(0.5)

    product, of_weight = np.empty((ROWS, OUT), np.float32), np.zeros((IN, OUT), np.float32)
    rows = drawn(ROWS, IN)
    multiply(rows, 0, ROWS, drawn(IN, OUT), product, 0, False)

    norm = Norm(drawn(1, OUT), drawn(1, OUT), drawn(1, OUT), np.float32(1e-5), wide(OUT))
    dst, src = generator.integers(0, ROWS, (2, ROWS))
    ends, gathered, drop = Ends(src, dst, src, ROWS), drawn(ROWS, 2 * OUT), no_drop(product.dtype)
    kept, out, of_product, of_norm = (np.zeros((n, OUT), np.float32) for n in (ROWS, ROWS, ROWS, 3))
    sums, back = (Sums(np.zeros((ROWS, 2 * OUT), np.float32), np.zeros((ROWS, OUT), np.float32)) for _ in range(2))
    norm_forward(product, 0, ROWS, norm, ends, gathered, kept, out, 0, drop, sums)
    norm_backward(product, 0, ROWS, norm, ends, drawn(ROWS, OUT), 0, gathered, drop, of_product, of_norm, back)
    outer(rows, 0, of_product, 0, ROWS, of_weight)
    made = (product, kept, out, *sums, of_product, of_norm, *back, of_weight)
    assert all(np.isfinite(table).all() and table.any() for table in made)
    return hashlib.sha256(b"".join(table.tobytes() for table in made)).hexdigest()


WITHOUT_512_BITS = """
import llvmlite.binding
llvmlite.binding.get_host_cpu_features = dict  # as a machine would say that has none
import test_instructions
from domainpar.nn import microkernel, products
print(test_instructions.kernels_hash(), *microkernel.WIDE)
print(*("zmm" in code for code in products.multiply.inspect_asm().values()))
"""


@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="not an x86-64")
@pytest.mark.slow
@pytest.mark.parametrize("machine", OTHERS.values(), ids=OTHERS)
def test_products_and_norms_have_the_same_bits_on_a_machine_with_other_instructions(machine, tmp_path):
    """There the blocks of products have another shape, too."""
    environment = {**os.environ, **machine, "NUMBA_CACHE_DIR": str(tmp_path)}
    program = [sys.executable, "-c", WITHOUT_512_BITS]
    folder = Path(__file__).parent
    other = subprocess.run(program, cwd=folder, env=environment, capture_output=True, text=True, timeout=120)
    assert other.returncode == 0, other.stderr
    assert other.stdout.split() == [kernels_hash(), "6", "1", "False"]
