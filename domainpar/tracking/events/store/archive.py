"""A zarr zip opened with suspicion: what it declares is held against what it holds before anything is allocated.

zarr itself takes a missing chunk for zeros, and takes a file's word for the size of a chunk. So every file is looked
through when it is opened: it holds exactly the members that its arrays need, each once and stored as it is, arrays are
encoded as this program encodes them, no chunk is larger than `LARGEST_CHUNK`, and none claims to unpack to more than
its array says. Files may be links: what is read through one is checked like any other, nothing is written through one.

What has passed needs no more of zarr than its codecs. Through zarr a table takes half a millisecond to read, however
small it is, and an event has some thirty.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import re
import zipfile
import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np
from numcodecs.zstd import Zstd

from domainpar.tracking.events.graph import Array

LARGEST_CHUNK = 2**28
"""Bytes that a chunk may unpack to: 256 MiB, some hundred times what this program writes."""

LARGEST_DESCRIPTION = 2**24
"""Bytes of the description of a file or an array."""

DESCRIPTION = "zarr.json"
CODECS = ("bytes", "zstd", "crc32c")
TYPES = (
    *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float16", "float32", "float64"),
)

_FIELDS = {
    *("zarr_format", "node_type", "attributes", "shape", "data_type", "chunk_grid", "chunk_key_encoding"),
    *("fill_value", "codecs", "dimension_names", "storage_transformers"),
}
"""Of an array; a description with others may mean something else."""

_MEMBER = re.compile(r"(?:[A-Za-z0-9_]+/)*(?:zarr\.json|c(?:/\d+)+)")
_HEADER = 30  # bytes of what stands before a member, without its name
_FRAME = b"\x28\xb5\x2f\xfd"
_ZSTD = Zstd()


class Archive:
    """The arrays of one zarr zip. Use as a context manager, or call `close`.

    Members are read by their place in the file, without a position or a lock that processes or threads could share: an
    archive that was opened before a fork is read by every child.

    Args:
        path: The file.

    Attributes:
        attributes: The description of the file.
        layouts: Shape, type and chunks of each array, by name.

    Raises:
        Exception: Of many kinds (zip, zstd, JSON, and ValueError) and without the name of the file, if it is damaged or
            declares what it does not hold.
    """

    def __init__(self, path: Path) -> None:
        self._file = path.open("rb")
        try:
            with zipfile.ZipFile(self._file) as listed:
                self._members = _members(listed)
            sizes = {name: member.file_size for name, member in self._members.items()}
            root, descriptions = _descriptions(self._read, sizes)
            self.attributes = dict(_mapping(root.get("attributes"), "attributes"))
            self.layouts = {
                name: _layout(name, about) for name, about in descriptions.items() if about.get("node_type") == "array"
            }
            _check_members(sizes, descriptions, self.layouts)
        except BaseException:
            self._file.close()
            raise

    def rows(self, name: str, start: int, stop: int) -> Array:
        """Rows of one array, of which whole chunks are read.

        Chunks that claim to unpack to another size than the array gives them are refused: it would be allocated first.
        """
        layout = self.layouts[name]
        wanted = [(start, min(stop, layout.shape[0])), *((0, size) for size in layout.shape[1:])]
        values: Array = np.empty([max(0, high - low) for low, high in wanted], layout.stored_type)
        for place in layout.places(range(start // layout.chunks[0], -(-wanted[0][1] // layout.chunks[0]))):
            here, there = [], []
            for at, size, (low, high) in zip(place, layout.chunks, wanted):
                begin, end = max(at * size, low), min((at + 1) * size, high)
                here.append(slice(begin - at * size, end - at * size))
                there.append(slice(begin - low, end - low))
            values[tuple(there)] = self._chunk(layout, layout.member(name, place))[tuple(here)]
        return values

    def _chunk(self, layout: ArrayLayout, member: str) -> Array:
        packed = self._read(member)
        frame, checksum = packed[:-4], int.from_bytes(packed[-4:], "little")
        if (declared := unpacked_size(frame[:18])) != layout.chunk_bytes:  # the longest header of a zstd frame
            raise ValueError(f"{member} claims {declared} bytes, a chunk has {layout.chunk_bytes}")
        if google_crc32c.value(frame) != checksum:
            raise ValueError(f"{member} is damaged: its checksum is not that of its bytes")
        # Into memory of this size, which is not enough for what frames behind the first one may hold.
        chunk: Array = np.empty(layout.chunks, layout.stored_type)
        _ZSTD.decode(frame, out=chunk)
        return chunk

    def whole(self, name: str) -> Array:
        """All of one array."""
        return self.rows(name, 0, self.layouts[name].shape[0])

    def check_bytes(self, share: int = 0, of: int = 1) -> None:
        """Read every member, or one share of them, from end to end: a damaged one fails its checksum."""
        for name in sorted(self._members)[share::of]:
            self._read(name)

    def _read(self, name: str) -> bytes:
        """The bytes of one member."""
        member, file = self._members[name], self._file.fileno()
        header = os.pread(file, _HEADER + len(name), member.header_offset)
        if header[:4] != b"PK\x03\x04" or header[_HEADER:] != name.encode():
            raise zipfile.BadZipFile(f"{name} is not where the list of members has it")
        start = member.header_offset + len(header) + int.from_bytes(header[28:30], "little")
        content = os.pread(file, member.file_size, start)
        if zlib.crc32(content) != member.CRC:
            raise zipfile.BadZipFile(f"Bad CRC-32 of {name}, of which {len(content)} bytes are there")
        return content

    def close(self) -> None:
        """Close the file; nothing can be read any more."""
        self._file.close()

    def __enter__(self) -> Archive:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@dataclass(frozen=True)
class ArrayLayout:
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

    @property
    def most_packed(self) -> int:
        """Bytes of a packed chunk at most: what zstd makes of one that cannot be packed, and the checksum."""
        return self.chunk_bytes + self.chunk_bytes // 256 + 1024

    @property
    def stored_type(self) -> np.dtype[Any]:
        """Type of the values as they lie in the file."""
        return np.dtype(self.dtype).newbyteorder("<")

    def places(self, along_first_axis: Iterable[int] | None = None) -> Iterable[tuple[int, ...]]:
        """Places of chunks in the grid, all of them or those at some places along the first axis."""
        if 0 in self.grid:
            return ()  # however long the other axes claim to be
        first = range(self.grid[0]) if along_first_axis is None else along_first_axis
        return itertools.product(first, *(range(count) for count in self.grid[1:]))

    def member(self, name: str, place: Iterable[int]) -> str:
        """The member that holds a chunk of the array of this name."""
        return f"{name}/c/{'/'.join(map(str, place))}"


def unpacked_size(start: bytes) -> int | None:
    """The size that a zstd frame claims to unpack to, by its first 18 bytes; None if it does not say (RFC 8878)."""
    if start[:4] != _FRAME or len(start) < 5:
        return None
    descriptor = start[4]
    # Then come a byte on the window unless there is one segment, the id of a dictionary, and the size.
    in_one_segment = bool(descriptor & 0x20)
    length = (int(in_one_segment), 2, 4, 8)[descriptor >> 6]
    at = 5 + (not in_one_segment) + (0, 1, 2, 4)[descriptor & 3]
    if length == 0 or len(start) < at + length:
        return None
    return int.from_bytes(start[at : at + length], "little") + (256 if length == 2 else 0)


def _members(file: zipfile.ZipFile) -> dict[str, zipfile.ZipInfo]:
    """The members by name, of which none is packed or there twice."""
    members = file.infolist()
    named = {member.filename: member for member in members}
    if len(named) != len(members):
        raise ValueError(f"{len(members) - len(named)} of {len(members)} members are there twice")
    for member in members:
        if not _MEMBER.fullmatch(member.filename):
            raise ValueError(f"a member is called {member.filename[:80]!r}, which no array needs")
        if member.compress_type != zipfile.ZIP_STORED or member.file_size != member.compress_size:
            raise ValueError(f"{member.filename} is packed; members are stored as they are")
    return named


def _descriptions(
    read: Callable[[str], bytes], members: Mapping[str, int]
) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """The descriptions of the file, and of each of its groups and arrays."""
    descriptions: dict[str, dict[str, Any]] = {}
    for member in sorted(members):
        if member == DESCRIPTION or member.endswith(f"/{DESCRIPTION}"):
            if (size := members[member]) > LARGEST_DESCRIPTION:
                raise ValueError(f"{member} has {size} bytes, at most {LARGEST_DESCRIPTION} are read")
            name = member.removesuffix(DESCRIPTION).rstrip("/")
            descriptions[name] = dict(_mapping(parsed_json(read(member)), member))
            if descriptions[name].get("zarr_format") != 3:
                raise ValueError(f"{member} is of zarr's format {descriptions[name].get('zarr_format')}, expected 3")
    root = descriptions.pop("", None)
    if root is None or root.get("node_type") != "group":
        raise ValueError(f"it has no {DESCRIPTION} of a group")
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


def _layout(name: str, about: Mapping[str, Any]) -> ArrayLayout:
    """The layout of an array by its description, as far as this program would have written it."""
    if unknown := sorted(about.keys() - _FIELDS):
        raise ValueError(f"{name} is described by {unknown[0]}, which is not known here")
    codecs = tuple(codec.get("name") for codec in about["codecs"])
    if codecs != CODECS or about["chunk_grid"]["name"] != "regular" or about.get("storage_transformers"):
        raise ValueError(f"{name} is encoded by {codecs}, expected {CODECS}")
    in_bytes, _, checked = (codec.get("configuration") or {} for codec in about["codecs"])
    if in_bytes not in ({}, {"endian": "little"}) or checked:
        raise ValueError(f"{name} is encoded with {in_bytes} and {checked}, expected little-endian bytes")
    if about["chunk_key_encoding"] != {"name": "default", "configuration": {"separator": "/"}}:
        raise ValueError(f"{name} names its chunks {about['chunk_key_encoding']}")
    shape, chunks = tuple(about["shape"]), tuple(about["chunk_grid"]["configuration"]["chunk_shape"])
    if not all(isinstance(size, int) and size >= 0 for size in (*shape, *chunks)):
        raise ValueError(f"{name} has sizes {shape} in chunks of {chunks}")
    layout = ArrayLayout(shape, str(about["data_type"]), chunks)
    if len(shape) != len(chunks) or not shape or min(chunks) < 1:
        raise ValueError(f"{name} has shape {shape} in chunks of {chunks}")
    if layout.dtype not in TYPES:
        raise ValueError(f"{name} holds {layout.dtype}, expected numbers")
    if layout.chunk_bytes > LARGEST_CHUNK:
        raise ValueError(f"{name} has chunks of {layout.chunk_bytes} bytes, at most {LARGEST_CHUNK} are read")
    return layout


def _check_members(members: Mapping[str, int], described: Iterable[str], layouts: Mapping[str, ArrayLayout]) -> None:
    """Refuse a file that lacks a chunk, has one larger than it can be, or holds what none of its arrays needs."""
    expected = {DESCRIPTION, *(f"{name}/{DESCRIPTION}" for name in described)}
    for name, layout in layouts.items():
        count = math.prod(layout.grid)
        # Counted before they are listed: a shape may claim more chunks than a machine can count.
        chunks = {layout.member(name, place) for place in layout.places()} if count <= len(members) else None
        if chunks is None or not chunks <= members.keys():
            there = sum(member.startswith(f"{name}/c/") for member in members)
            raise ValueError(f"{there} of {count} chunks of {name} are there")
        if (largest := max((members[chunk] for chunk in chunks), default=0)) > layout.most_packed:
            raise ValueError(f"a chunk of {name} has {largest} bytes, at most {layout.most_packed} are read")
        expected |= chunks
    if strangers := sorted(members.keys() - expected):
        raise ValueError(f"{strangers[0]} belongs to no array ({len(strangers)} such members)")
