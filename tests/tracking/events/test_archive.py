"""Arrays of a zarr zip are read as zarr reads them, however they are cut into chunks."""

import copy
import os
import pickle

import numpy as np
import pytest
import zarr
from random_events import random_assignment, random_event
from zarr.codecs import Crc32cCodec, ZstdCodec
from zarr.storage import ZipStore

from domainpar.tracking.events.store import StoredEvent, event_file_name, write_event
from domainpar.tracking.events.store.archive import Archive

ARRAYS = {
    "lines": ((23,), (5,), "int64"),
    "one chunk": ((4, 3), (4, 3), "float32"),
    "rows": ((23, 3), (5, 3), "float64"),
    "both": ((23, 7), (5, 3), "uint16"),
    "last axis": ((2, 3, 17), (2, 3, 4), "float16"),
    "truths": ((9,), (4,), "bool"),
    "nothing": ((0, 3), (1, 3), "int8"),
}


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "arrays.zarr.zip"
    generator = np.random.default_rng(0)
    with ZipStore(path, mode="w") as store:
        group = zarr.create_group(store, attributes={"of": "a test"})
        for name, (shape, chunks, kind) in ARRAYS.items():
            codecs = [ZstdCodec(level=1), Crc32cCodec()]
            how = {"compressors": codecs, "config": {"write_empty_chunks": True}}
            array = group.create_array(name.replace(" ", "_"), shape=shape, dtype=kind, chunks=chunks, **how)
            array[...] = generator.integers(0, 90, shape).astype(kind)
    return path


@pytest.mark.parametrize("name", [name.replace(" ", "_") for name in ARRAYS])
def test_any_rows_are_those_that_zarr_reads(file, name):
    with Archive(file) as archive, ZipStore(file, mode="r") as store:
        array = zarr.open_group(store, mode="r")[name]
        assert archive.attributes == {"of": "a test"}
        for start, stop in ((0, array.shape[0]), (0, 0), (0, 1), (3, 5), (4, 6), (5, 20), (21, 23), (2, 99)):
            rows, expected = archive.rows(name, start, stop), array[start:stop]
            assert rows.dtype == expected.dtype
            assert np.array_equal(rows, expected)
            assert rows.flags.writeable
            assert rows.flags.c_contiguous
        assert np.array_equal(archive.whole(name), array[...])


def test_children_of_a_fork_read_an_open_event_and_spawned_ones_open_it_anew(tmp_path):
    path = tmp_path / event_file_name("1")
    write_event(path, random_event(1, num_nodes=3000, num_edges=9000), random_assignment(1, 3000, 6), 6)
    with StoredEvent(path) as event:
        ids = np.arange(0, event.num_nodes, 97)
        first, last = (event.read_nodes("features", ids[::step]).tobytes() for step in (1, -1))
        children = []
        for _ in range(4):
            if (child := os.fork()) == 0:
                wrong = 1
                try:
                    order = 400 * [ids, ids[::-1]]
                    reads = [event.read_nodes("features", of).tobytes() for of in order]
                    wrong = int(reads != 400 * [first, last])
                finally:
                    os._exit(wrong)
            children.append(child)
        assert [os.waitpid(child, 0)[1] for child in children] == [0] * 4
        for again in (pickle.loads(pickle.dumps(event)), copy.deepcopy(event)):
            with again:
                assert again.read_nodes("features", ids).tobytes() == first
