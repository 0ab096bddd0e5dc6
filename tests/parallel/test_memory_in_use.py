"""Memory in use: of tables that somebody refers to, and of the C library."""

import gc

import numpy as np
import pytest
import torch

from domainpar.parallel.allocator import bytes_in_use
from domainpar.parallel.tables import BlockPool


def test_blocks_count_as_long_as_somebody_refers_to_them():
    kept, size = BlockPool(), 2**21
    first, second = kept.lend(size), kept.lend(size)
    assert kept.bytes_lent == 2 * size
    del first
    gc.collect()
    assert kept.bytes_lent == size
    again = kept.lend(size)
    assert kept.bytes_lent == 2 * size
    del again, second
    gc.collect()
    assert kept.bytes_lent == 0
    larger = kept.lend(int(1.5 * size))  # in the place of a free one
    assert kept.bytes_lent == larger.nbytes


def test_the_c_library_tells_what_is_in_use():
    before = bytes_in_use()
    if before is None:
        pytest.skip("this C library does not tell")
    held = [torch.ones(2**22), np.ones(2**22)]
    assert bytes_in_use() - before > 0.9 * (16 + 32) * 2**20
    held.clear()
    assert bytes_in_use() - before < 2**22
