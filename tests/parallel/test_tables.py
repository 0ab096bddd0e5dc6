"""Tables are aligned, of any shape and type, and take the gap that a freed one left."""

import errno
import mmap
import os
import sys
import threading

import pytest
import torch

from domainpar.parallel import tables
from domainpar.parallel.tables import ALIGNMENT, empty_table


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize(("rows", "columns"), [(0, 16), (7, 0), (1, 1), (33, 48), (1000, 5)])
def test_a_table_has_its_shape_and_type_and_begins_at_a_multiple_of_64_bytes(rows, columns, dtype):
    for _ in range(5):  # the C library gives other places
        table = empty_table(rows, columns, torch.empty(0), dtype)
        assert (table.shape, table.dtype, table.is_contiguous()) == ((rows, columns), dtype, True)
        assert table.numel() == 0 or table.data_ptr() % ALIGNMENT == 0
        table.fill_(3)
        assert (table == 3).all()


def test_without_a_type_it_has_that_of_the_other_table():
    assert empty_table(2, 3, torch.empty(0, dtype=torch.float64)).dtype == torch.float64


def test_autograd_takes_it_as_a_result():
    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx, rows):
            return torch.mul(rows, 2, out=empty_table(*rows.shape, rows))

        @staticmethod
        def backward(ctx, grad):
            return 2 * grad

    rows = torch.ones(4, 3, requires_grad=True)
    Double.apply(rows).sum().backward()
    assert (rows.grad == 2).all()


def test_a_large_block_is_lent_again_when_nothing_refers_to_it_and_not_before():
    kept = tables.BlockPool()
    first = kept.lend(2**21)
    place = first.__array_interface__["data"][0]
    second = kept.lend(2**21)
    assert second.__array_interface__["data"][0] != place
    view = torch.from_numpy(first)[5:]
    del first
    third = kept.lend(2**21)
    assert third.__array_interface__["data"][0] != place  # the view still refers to it
    del view
    again = kept.lend(2**21 - 1000)  # about the size will do
    assert again.__array_interface__["data"][0] == place


def test_a_block_is_not_given_to_a_table_that_is_much_smaller_or_larger():
    kept = tables.BlockPool()
    block, room = kept.lend(2**22), [kept.lend(size) for size in (2**21 + 2**20, 2**23 + 2**22)]
    place = block.__array_interface__["data"][0]
    del room, block  # those of a more alike size make place
    others = [kept.lend(size) for size in (2**21, 2**23)]
    assert place not in [other.__array_interface__["data"][0] for other in others]
    assert kept.lend(2**22).__array_interface__["data"][0] == place


def bytes_there(kept):
    return kept.bytes_lent + sum(size * len(blocks) for size, blocks in kept._free.items())


def test_blocks_of_events_of_all_sizes_are_never_more_than_the_most_that_were_lent_at_once():
    kept, sizes = tables.BlockPool(), [5, 11, 2, 7, 3, 11, 2, 5]
    for size in sizes:
        lent = [kept.lend(size * 2**20 + number) for number in range(3)]
        kept.lend(2**20)  # what came back is counted
        assert bytes_there(kept) <= 3 * max(sizes) * 2**20 + 2**20 + 3
        assert kept.bytes_lent >= sum(block.nbytes for block in lent)
        del lent


def test_the_block_of_the_most_alike_size_makes_place_and_others_stay_while_there_is_room():
    kept = tables.BlockPool()
    first, second = kept.lend(2**22), kept.lend(2**25)
    del first
    del second
    block = kept.lend(2**24)
    assert list(kept._free) == [2**22], "and not the one that came back first"
    assert block.nbytes == 2**24


def test_a_table_that_there_is_no_memory_for_counts_for_nothing():
    kept = tables.BlockPool()
    with pytest.raises((OSError, ValueError, OverflowError)):
        kept.lend(2**62)
    assert (kept._lent, kept._most_lent) == (0, 0)


def test_a_block_that_no_table_takes_for_long_is_given_back(monkeypatch):
    monkeypatch.setattr(tables, "PATIENCE", 3)
    kept = tables.BlockPool()
    kept._most_lent = 2**30  # room for all
    kept.lend(2**22)
    lent = [kept.lend(2**20 * (10 + i)) for i in range(3)]
    assert sum(map(len, kept._free.values())) == 1
    lent += [kept.lend(2**20 * (20 + i)) for i in range(3)]
    assert not any(kept._free.values())


def test_a_forked_process_has_blocks_of_its_own():
    block = tables.BlockPool().lend(2**21)
    block[:] = 1
    child = os.fork()
    if child == 0:
        block[:] = 2
        os._exit(0)
    os.waitpid(child, 0)
    assert (block == 1).all()


def test_a_system_without_huge_pages_lends_blocks_of_the_usual_pages(monkeypatch):
    class Pages(mmap.mmap):
        def madvise(self, *advice):
            raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(tables.mmap, "mmap", Pages)
    block = tables._new_block(2**22)
    block[:] = 1
    assert len(block) == 2**22


def test_threads_never_share_a_block():
    kept, wrong = tables.BlockPool(), []

    def work(number):
        for _ in range(200):
            block = kept.lend(2**20)
            block[:] = number
            if not (block == number).all():
                wrong.append(number)
            del block

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_a_thread_makes_tables_in_files_while_another_lets_go(tmp_path):
    files, failed, ended = tables.Files(tmp_path), [], threading.Event()

    def let_go():
        try:
            while not ended.is_set():
                files.let_go()
        except RuntimeError as error:
            failed.append(error)

    others = threading.Thread(target=let_go)
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        others.start()
        blocks = [files.new_block(4096) for _ in range(500)]
    finally:
        ended.set()
        others.join()
        sys.setswitchinterval(before)
    assert failed == []
    assert len(blocks) == 500
