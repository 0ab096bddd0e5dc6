"""A zarr zip opened with suspicion: what it declares is held against what it holds before anything is allocated.

zarr itself takes a missing chunk for zeros, and takes a file's word for the size of a chunk. So every file is looked
through when it is opened: it holds exactly the members that its arrays need, each once and stored as it is, arrays are
encoded as this program encodes them, no chunk is larger than `LARGEST_CHUNK`, and none claims to unpack to more than
its array says. Files may be links: what is read through one is checked like any other, nothing is written through one.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import math
import re
import zipfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import zarr
from zarr.storage import ZipStore

from domainpar.events.graph import Array

LARGEST_CHUNK = 2**28
"""Bytes that a chunk may unpack to: 256 MiB, some hundred times what this program writes."""

LARGEST_DESCRIPTION = 2**24
"""Bytes of the description of a file or an array."""

DESCRIPTION = "zarr.json"
CODECS = ("bytes", "zstd", "crc32c")

_MEMBER = re.compile(r"(?:[A-Za-z0-9_]+/)*(?:zarr\.json|c(?:/\d+)+)")
_ZSTD = b"\x28\xb5\x2f\xfd"


class Archive:
    """The arrays of one zarr zip. Use as a context manager, or call `close`.

    Args:
        path: The file.

    Attributes:
        attributes: The description of the file.
        layouts: Shape, type and chunks of each array, by name.

    Raises:
        Exception: Of many kinds (zip, zarr, JSON, and ValueError) and without the name of the file, if it is damaged or
            declares what it does not hold.
    """

    def __init__(self, path: Path) -> None:
        with contextlib.ExitStack() as opened:
            self._file = opened.enter_context(zipfile.ZipFile(path))
            self._members = _members(self._file)
            root, descriptions = _descriptions(self._file, self._members)
            self.attributes = dict(_mapping(root.get("attributes"), "attributes"))
            self.layouts = {
                name: _layout(name, about) for name, about in descriptions.items() if about.get("node_type") == "array"
            }
            _check_members(self._members, descriptions, self.layouts)
            group = zarr.open_group(opened.enter_context(ZipStore(path, mode="r")), mode="r", use_consolidated=False)
            # zarr would read the description of an array anew for every look-up.
            self._array: Callable[[str], Any] = functools.cache(group.__getitem__)
            self._opened = opened.pop_all()

    def rows(self, name: str, start: int, stop: int) -> Array:
        """Rows of one array, of which whole chunks are read.

        Chunks that claim to unpack to another size than the array gives them are refused: it would be allocated first.
        """
        layout = self.layouts[name]
        first, last = start // layout.chunks[0], -(-stop // layout.chunks[0])
        for member in layout.members(name, range(first, min(last, layout.grid[0]))):
            with self._file.open(member) as chunk:
                declared = unpacked_size(chunk.read(18))  # the longest header of a zstd frame
            if declared != layout.chunk_bytes:
                raise ValueError(f"{member} claims {declared} bytes, a chunk has {layout.chunk_bytes}")
        return np.asarray(self._array(name)[start:stop])

    def whole(self, name: str) -> Array:
        """All of one array."""
        return self.rows(name, 0, self.layouts[name].shape[0])

    def check_bytes(self, share: int = 0, of: int = 1) -> None:
        """Read every member, or one share of them, from end to end: a damaged one fails its checksum."""
        for name in sorted(self._members)[share::of]:
            self._file.read(name)

    def close(self) -> None:
        """Close the file; nothing can be read any more."""
        self._opened.close()

    def __enter__(self) -> Archive:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@dataclass(frozen=True)
class Layout:
    """Shape, type and chunks of an array."""

    shape: tuple[int, ...]
    dtype: str
    chunks: tuple[int, ...]

    @property
    def grid(self) -> tuple[int, ...]:
        """Chunks along each axis."""
        return tuple(-(-size // chunk) for size, chunk in zip(self.shape, self.chunks))

    @property
    def chunk_bytes(self) -> int:
        """Bytes of an unpacked chunk; those at the end are as large as the others."""
        return math.prod(self.chunks) * np.dtype(self.dtype).itemsize

    def members(self, name: str, along_first_axis: Iterable[int] | None = None) -> list[str]:
        """The members that hold the chunks, all of them or those at some places along the first axis."""
        first = range(self.grid[0]) if along_first_axis is None else along_first_axis
        places = itertools.product(first, *(range(count) for count in self.grid[1:]))
        return [f"{name}/c/{'/'.join(map(str, place))}" for place in places]


def unpacked_size(start: bytes) -> int | None:
    """The size that a zstd frame claims to unpack to, by its first 18 bytes; None if it does not say (RFC 8878)."""
    if start[:4] != _ZSTD or len(start) < 5:
        return None
    descriptor = start[4]
    # Then come a byte on the window unless there is one segment, the id of a dictionary, and the size.
    in_one_segment = bool(descriptor & 0x20)
    length = (int(in_one_segment), 2, 4, 8)[descriptor >> 6]
    at = 5 + (not in_one_segment) + (0, 1, 2, 4)[descriptor & 3]
    if length == 0 or len(start) < at + length:
        return None
    return int.from_bytes(start[at : at + length], "little") + (256 if length == 2 else 0)


def _members(file: zipfile.ZipFile) -> frozenset[str]:
    """Names of the members, of which none is packed or there twice."""
    members = file.infolist()
    names = frozenset(member.filename for member in members)
    if len(names) != len(members):
        raise ValueError(f"{len(members) - len(names)} of {len(members)} members are there twice")
    for member in members:
        if not _MEMBER.fullmatch(member.filename):
            raise ValueError(f"a member is called {member.filename[:80]!r}, which no array needs")
        if member.compress_type != zipfile.ZIP_STORED or member.file_size != member.compress_size:
            raise ValueError(f"{member.filename} is packed; members are stored as they are")
    return names


def _descriptions(file: zipfile.ZipFile, members: frozenset[str]) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """The descriptions of the file, and of each of its groups and arrays."""
    descriptions: dict[str, dict[str, Any]] = {}
    for member in sorted(members):
        if member == DESCRIPTION or member.endswith(f"/{DESCRIPTION}"):
            if (size := file.getinfo(member).file_size) > LARGEST_DESCRIPTION:
                raise ValueError(f"{member} has {size} bytes, at most {LARGEST_DESCRIPTION} are read")
            name = member.removesuffix(DESCRIPTION).rstrip("/")
            descriptions[name] = dict(_mapping(parsed_json(file.read(member)), member))
    root = descriptions.pop("", None)
    if root is None:
        raise ValueError(f"it has no {DESCRIPTION}")
    return root, descriptions


def parsed_json(text: bytes) -> Any:
    """The value of a JSON text.

    Raises:
        ValueError: If it is none, or nested too deep to be read.
    """
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("it is nested too deep") from error


def _mapping(value: Any, name: str) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{name} is a {type(value).__name__}, expected an object")
    return value


def _layout(name: str, about: Mapping[str, Any]) -> Layout:
    """The layout of an array by its description, as far as this program would have written it."""
    codecs = tuple(codec.get("name") for codec in about["codecs"])
    if codecs != CODECS or about["chunk_grid"]["name"] != "regular" or about.get("storage_transformers"):
        raise ValueError(f"{name} is encoded by {codecs}, expected {CODECS}")
    if about["chunk_key_encoding"] != {"name": "default", "configuration": {"separator": "/"}}:
        raise ValueError(f"{name} names its chunks {about['chunk_key_encoding']}")
    shape, chunks = tuple(about["shape"]), tuple(about["chunk_grid"]["configuration"]["chunk_shape"])
    if not all(isinstance(size, int) and size >= 0 for size in (*shape, *chunks)):
        raise ValueError(f"{name} has sizes {shape} in chunks of {chunks}")
    layout = Layout(shape, str(about["data_type"]), chunks)
    if len(shape) != len(chunks) or not shape or min(chunks) < 1:
        raise ValueError(f"{name} has shape {shape} in chunks of {chunks}")
    if np.dtype(layout.dtype).kind not in "biuf":
        raise ValueError(f"{name} holds {layout.dtype}, expected numbers")
    if layout.chunk_bytes > LARGEST_CHUNK:
        raise ValueError(f"{name} has chunks of {layout.chunk_bytes} bytes, at most {LARGEST_CHUNK} are read")
    return layout


def _check_members(members: frozenset[str], described: Iterable[str], layouts: Mapping[str, Layout]) -> None:
    """Refuse a file that lacks a chunk or holds what none of its arrays needs."""
    expected = {DESCRIPTION, *(f"{name}/{DESCRIPTION}" for name in described)}
    for name, layout in layouts.items():
        count = math.prod(layout.grid)
        # Counted before they are listed: a shape may claim more chunks than a machine can count.
        chunks = set(layout.members(name)) if count <= len(members) else None
        if chunks is None or not chunks <= members:
            there = sum(member.startswith(f"{name}/c/") for member in members)
            raise ValueError(f"{there} of {count} chunks of {name} are there")
        expected |= chunks
    if strangers := sorted(members - expected):
        raise ValueError(f"{strangers[0]} belongs to no array ({len(strangers)} such members)")
