"""Arrays of a zarr zip are read as zarr reads them, however they are cut into chunks."""

import numpy as np
import pytest
import zarr
from zarr.codecs import Crc32cCodec, ZstdCodec
from zarr.storage import ZipStore

from domainpar.events.store.archive import Archive

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
