"""zarr reads what is written here, and rows are those that zarr reads, however arrays are cut into chunks."""

import copy
import os
import pickle

import numpy as np
import pytest
import zarr
from random_events import random_assignment, random_event
from zarr.storage import ZipStore

from domainpar.tracking.events.store import StoredEvent, arrays, event_file_name, write_arrays, write_event
from domainpar.tracking.events.store.arrays import ArrayFile

SHAPES = {
    "lines": ((23,), "int64"),
    "rows": ((23, 3), "float64"),
    "group/cubes": ((9, 3, 2), "float16"),
    "truths": ((9,), "bool"),
    "one": ((1, 7), "uint16"),
    "nothing": ((0, 3), "int8"),
    "no_columns": ((23, 0), "float32"),
}


@pytest.fixture(params=[1, 5, 1000])
def file(tmp_path, monkeypatch, request):
    monkeypatch.setattr(arrays, "ROWS_PER_CHUNK", request.param)
    path, generator = tmp_path / "arrays.zarr.zip", np.random.default_rng(0)
    values = {name: generator.integers(0, 90, shape).astype(kind) for name, (shape, kind) in SHAPES.items()}
    write_arrays(path, values, {"of": "a test"})
    return path


@pytest.mark.parametrize("name", SHAPES)
def test_any_rows_are_those_that_zarr_reads(file, name):
    with ArrayFile(file) as ours, ZipStore(file, mode="r") as store:
        group = zarr.open_group(store, mode="r")
        array = group[name]
        assert group.attrs["of"] == ours.attributes["of"] == "a test"
        for ids in ([], [0], [3, 4], [8, 0, 8, 2], [*range(array.shape[0])], [*range(array.shape[0])][::-3]):
            some = np.array([row for row in ids if row < array.shape[0]], np.int64)
            rows, expected = ours.rows(name, some), array[...][some]
            assert rows.dtype == expected.dtype
            assert rows.shape == expected.shape
            assert np.array_equal(rows, expected)
            assert rows.flags.writeable
            assert rows.flags.c_contiguous
        whole = ours.whole(name)
        assert whole.shape == array.shape
        assert np.array_equal(whole, array[...])


def test_a_file_that_is_cut_short_while_it_is_open_is_refused(file):
    with ArrayFile(file) as ours:
        os.truncate(file, 100)
        with pytest.raises(Exception, match="rows/c/0"):
            ours.whole("rows")


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
