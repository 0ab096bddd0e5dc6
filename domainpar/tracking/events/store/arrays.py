"""zarr zips of named arrays: the same bytes from the same values, read without an allocation that a file only claims.

zarr writes them, each chunk as it lies in memory with a crc32c behind it, and any program can read them with zarr.
Here the chunks are taken as they are: through zarr an array takes a third of a millisecond, however small it is, and an
event has some thirty (`bench/stored_events.py`). zarr also takes a missing chunk for zeros, and a file's word for every
size. So the attributes of a file list its arrays, and a reader first holds the members of the zip against the list: all
that the arrays need are there and no others, each as large as its array says.
"""

from __future__ import annotations

import io
import json
import math
import os
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import google_crc32c
import numpy as np

from domainpar.common.atomic_files import write_whole
from domainpar.tracking.events.graph import Array, IntArray
from domainpar.tracking.events.store.layout import OtherVersion, StoreError, sha256_of
from domainpar.tracking.events.store.schema import SCHEMA_VERSION

ROWS_PER_CHUNK = 65_536
"""Rows of a chunk at most; a rank reads the chunks that its tiles lie in."""

_DESCRIPTION = "zarr.json"
_HEADER = 30  # bytes of what stands before a member, without its name
_CHECKSUM = 4  # bytes of a crc32c


class ArrayLayout(NamedTuple):
    """Shape and type of an array, and rows of a chunk: entries along the first axis. The last chunk is filled up."""

    shape: tuple[int, ...]
    dtype: str
    rows: int

    @classmethod
    def of(cls, values: Array) -> ArrayLayout:
        """The layout of an array in chunks of one size, so that little is filled up."""
        num_chunks = max(1, -(-len(values) // ROWS_PER_CHUNK))
        return cls(values.shape, str(values.dtype), max(1, -(-len(values) // num_chunks)))

    @classmethod
    def from_json(cls, item: Mapping[str, Any]) -> ArrayLayout:
        """A layout that a file claims.

        Raises:
            ValueError: If no array can have it.
        """
        layout = cls(tuple(item["shape"]), item["dtype"], item["rows"])
        sizes = (*layout.shape, layout.rows)
        if not all(isinstance(size, int) and size >= 0 for size in sizes) or not layout.shape or layout.rows < 1:
            raise ValueError(f"an array has shape {layout.shape} in chunks of {layout.rows} rows")
        if layout.stored_type.kind not in "biuf":
            raise ValueError(f"an array holds {layout.dtype}, expected numbers")
        return layout

    @property
    def stored_type(self) -> np.dtype[Any]:
        """Type of the values as they lie in the file."""
        return np.dtype(self.dtype).newbyteorder("<")

    @property
    def num_chunks(self) -> int:
        """Chunks along the first axis."""
        return -(-self.shape[0] // self.rows)

    @property
    def member_bytes(self) -> int:
        """Bytes of the member of a chunk."""
        return self.rows * math.prod(self.shape[1:]) * self.stored_type.itemsize + _CHECKSUM

    def member(self, name: str, number: int) -> str:
        """The member that holds a chunk of the array of this name."""
        return f"{name}/c/{number}{'/0' * (len(self.shape) - 1)}"


def write_arrays(path: Path, arrays: Mapping[str, Array], attributes: Mapping[str, Any]) -> str:
    """Write named arrays as one zarr zip of their own; the file appears under its name when it is complete.

    Args:
        path: File to write. Its directory is made where it is missing; a file of this name is replaced.
        arrays: The arrays by name.
        attributes: Their description, plain JSON values.

    Returns:
        sha256 of the file, in hex. The same arrays and attributes give the same bytes.
    """
    content = _zipped(arrays, attributes)
    write_whole(Path(path), content)
    return sha256_of(content)


def _zipped(arrays: Mapping[str, Array], attributes: Mapping[str, Any]) -> bytes:
    import zarr  # by those who write alone: it takes a while
    from zarr.codecs import BytesCodec, Crc32cCodec
    from zarr.storage import MemoryStore

    layouts = {name: ArrayLayout.of(values) for name, values in arrays.items()}
    described = {"schema_version": SCHEMA_VERSION, "arrays": {name: it._asdict() for name, it in layouts.items()}}
    # Written to memory first, so that the order and the dates of the members do not depend on timing.
    members: dict[str, Any] = {}
    group = zarr.create_group(MemoryStore(members), attributes={**attributes, **described})
    for name, values in arrays.items():
        group.create_array(
            name,
            data=values,
            chunks=(layouts[name].rows, *(max(1, size) for size in values.shape[1:])),
            serializer=BytesCodec(endian="little"),
            compressors=Crc32cCodec(),
            config={"write_empty_chunks": True},  # a missing chunk reads as zeros
        )
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_STORED) as file:
        for name in sorted(members):
            member = zipfile.ZipInfo(name, date_time=(1980, 1, 1, 0, 0, 0))
            # Unix and rw-r--r--, whatever the machine: else the same arrays would give other bytes elsewhere.
            member.create_system, member.external_attr = 3, 0o644 << 16
            file.writestr(member, members[name].to_bytes())
    return buffer.getvalue()


def read_attributes(path: Path) -> dict[str, Any]:
    """What describes the arrays of a file that `write_arrays` wrote; of them none is read.

    Raises:
        StoreError: If the file is missing or damaged.
    """
    return _read(path, with_arrays=False)[1]


def read_arrays(path: Path) -> tuple[dict[str, Array], dict[str, Any]]:
    """The named arrays of a file that `write_arrays` wrote, and what describes them.

    Raises:
        StoreError: If the file is missing or damaged.
    """
    return _read(path, with_arrays=True)


def _read(path: Path, with_arrays: bool) -> tuple[dict[str, Array], dict[str, Any]]:
    if not path.is_file():
        raise StoreError("no such file", file=path)
    try:
        with ArrayFile(path) as file:
            return {name: file.whole(name) for name in file.layouts if with_arrays}, file.attributes
    except OtherVersion:
        raise
    except Exception as error:  # of the zip, which does not name the file
        raise StoreError(f"cannot be read: {type(error).__name__}: {error}", "write it again", file=path) from error


class ArrayFile:
    """The arrays of one zarr zip. Use as a context manager, or call `close`.

    Members are read by their place in the file, without a position or a lock that processes or threads could share: an
    open file is read by every child of a fork. None is mapped: a file that is cut short later would end the process.

    Args:
        path: The file, or a link to it.

    Attributes:
        attributes: Those that `write_arrays` was given, and `schema_version`.
        layouts: Shape, type and chunks of each array, by name.

    Raises:
        OtherVersion: If the file is of another version.
        Exception: Of many kinds (zip, JSON, and ValueError) and without the name of the file, if it is damaged or
            claims what it does not hold. So do all readers.
    """

    def __init__(self, path: Path) -> None:
        self._file = path.open("rb")
        try:
            self._members = self._list_members()
            self.attributes: dict[str, Any] = dict(json.loads(self._checked(_DESCRIPTION))["attributes"])
            if (version := self.attributes.get("schema_version")) != SCHEMA_VERSION:
                raise OtherVersion(version, path)
            arrays = self.attributes.pop("arrays")
            self.layouts = {name: ArrayLayout.from_json(item) for name, item in arrays.items()}
            self._check_members()
        except BaseException:
            self._file.close()
            raise

    def _list_members(self) -> dict[str, zipfile.ZipInfo]:
        """The members by name, of which none is packed or there twice, and no byte in two."""
        with zipfile.ZipFile(self._file) as listed:
            members = listed.infolist()
        named = {member.filename: member for member in members}
        if len(named) != len(members):
            raise ValueError(f"{len(members) - len(named)} of {len(members)} members are there twice")
        for member in members:
            if member.compress_type != zipfile.ZIP_STORED or member.file_size != member.compress_size:
                raise ValueError(f"{member.filename[:80]} is packed; members are stored as they are")
        claimed, there = sum(member.file_size for member in members), os.fstat(self._file.fileno()).st_size
        if claimed > there:
            raise ValueError(f"its members claim {claimed} bytes, the file has {there}")
        return named

    def _check_members(self) -> None:
        """Refuse a file that lacks a chunk, has one of another size, or holds what none of its arrays needs."""
        sizes: dict[str, int | None] = {_DESCRIPTION: None}
        for name, layout in self.layouts.items():
            parts = name.split("/")
            sizes |= {"/".join([*parts[:depth], _DESCRIPTION]): None for depth in range(1, len(parts) + 1)}
            if 0 in layout.shape:
                continue
            # Counted before they are listed: a shape may claim more chunks than a machine can count.
            if layout.num_chunks > len(self._members):
                raise ValueError(f"{name} has {layout.num_chunks} chunks, the file {len(self._members)} members")
            sizes |= {layout.member(name, number): layout.member_bytes for number in range(layout.num_chunks)}
        if missing := sorted(sizes.keys() - self._members.keys()):
            raise ValueError(f"{missing[0]} is missing ({len(missing)} of {len(sizes)} members)")
        if strangers := sorted(self._members.keys() - sizes.keys()):
            raise ValueError(f"{strangers[0][:80]} belongs to no array ({len(strangers)} such members)")
        for name, size in sizes.items():
            if size not in (None, held := self._members[name].file_size):
                raise ValueError(f"{name} has {held} bytes, expected {size}")

    def rows(self, name: str, ids: IntArray) -> Array:
        """Rows of one array, [n, ...], by their places along its first axis, [n] in any order.

        Of chunks those are read that hold one of them, each once.
        """
        rows = self.layouts[name].rows
        chunk_of = ids // rows
        needed = np.flatnonzero(np.bincount(chunk_of))
        values = self._chunks(name, needed.tolist())
        # They lie as in the array, less the rows of chunks that are left out before each.
        left_out = np.zeros(needed.max(initial=0) + 1, np.int64)
        left_out[needed] = (needed - np.arange(len(needed))) * rows
        return values.take(ids - left_out[chunk_of], axis=0)

    def whole(self, name: str) -> Array:
        """All of one array."""
        layout = self.layouts[name]
        return self._chunks(name, range(layout.num_chunks))[: layout.shape[0]]

    def _chunks(self, name: str, numbers: Sequence[int]) -> Array:
        """The rows of some chunks, one behind the other, read to where they stay."""
        layout = self.layouts[name]
        values: Array = np.empty((len(numbers) * layout.rows, *layout.shape[1:]), layout.stored_type)
        for place, number in enumerate(numbers if values.size else ()):
            member, checksum = layout.member(name, number), bytearray(_CHECKSUM)
            chunk: Any = values[place * layout.rows :][: layout.rows].reshape(-1).view(np.uint8)
            os.preadv(self._file.fileno(), [chunk, checksum], self._start(member))
            if google_crc32c.value(chunk) != int.from_bytes(checksum, "little"):
                raise ValueError(f"{member} is damaged: its checksum is not that of its bytes")
        return values

    def check_bytes(self, share: int = 0, of: int = 1) -> None:
        """Read every member, or one share of them, from end to end: a damaged one fails its checksum."""
        for name in sorted(self._members)[share::of]:
            self._checked(name)

    def _checked(self, name: str) -> bytes:
        """The bytes of a member, if they have the checksum that the zip lists."""
        content = os.pread(self._file.fileno(), self._members[name].file_size, self._start(name))
        if zlib.crc32(content) != self._members[name].CRC:
            raise zipfile.BadZipFile(f"Bad CRC-32 of {name}, of which {len(content)} bytes are there")
        return content

    def _start(self, name: str) -> int:
        """The place of the first byte of a member, if it is where the zip lists it."""
        member = self._members[name]
        header = os.pread(self._file.fileno(), _HEADER + len(name), member.header_offset)
        if header[:4] != b"PK\x03\x04" or header[_HEADER:] != name.encode():
            raise zipfile.BadZipFile(f"{name} is not where the list of members has it")
        return member.header_offset + len(header) + int.from_bytes(header[28:30], "little")

    def close(self) -> None:
        """Close the file; nothing can be read any more."""
        self._file.close()

    def __enter__(self) -> ArrayFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
