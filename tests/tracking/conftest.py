"""Events that tests write again and again are made into the bytes of a file once: zarr takes 0.1 s for each."""

import hashlib

import pytest

from domainpar.tracking.events.store import arrays as files

LARGEST_KEPT = 2**20
_made: dict[bytes, bytes] = {}


@pytest.fixture(autouse=True)
def the_same_arrays_are_zipped_once(monkeypatch):
    """The bytes are a function of arrays, attributes and chunks: `tests/tracking/events/test_store.py`."""

    def zipped(arrays, attributes, plain=files._zipped):
        about = [files.ROWS_PER_CHUNK, *((name, one.dtype, one.shape) for name, one in arrays.items())]
        digest = hashlib.sha256(repr((about, attributes)).encode())
        for one in arrays.values():
            digest.update(one.tobytes())
        content = _made.get(digest.digest()) or plain(arrays, attributes)
        if len(content) <= LARGEST_KEPT:
            _made[digest.digest()] = content
        return content

    monkeypatch.setattr(files, "_zipped", zipped)
