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
from collections.abc import Iterable, Mapping, Sequence
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

    @property
    def stored_type(self) -> np.dtype[Any]:
        """Type of the values as they lie in the file."""
        return np.dtype(self.dtype).newbyteorder("<")

    @property
    def num_chunks(self) -> int:
        """Chunks along the first axis."""
        return -(-self.shape[0] // self.rows)

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

    layouts = {}
    for name, values in arrays.items():
        num_chunks = max(1, -(-len(values) // ROWS_PER_CHUNK))  # of one size: little is filled up
        layouts[name] = ArrayLayout(values.shape, str(values.dtype), max(1, -(-len(values) // num_chunks)))
    described = {
        "schema_version": SCHEMA_VERSION,
        "arrays": {name: layout._asdict() for name, layout in layouts.items()},
    }
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


def read_arrays(path: Path, names: Iterable[str] | None = None) -> tuple[dict[str, Array], dict[str, Any]]:
    """Named arrays of a file that `write_arrays` wrote, all or those of some names, and what describes them.

    Raises:
        StoreError: If the file is missing or damaged.
    """
    try:
        with ArrayFile(path) as file:
            return {name: file.whole(name) for name in (file.layouts if names is None else names)}, file.attributes
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
            with zipfile.ZipFile(self._file) as file:
                self._members = self._list_members(file)
                self.attributes: dict[str, Any] = dict(json.loads(file.read(_DESCRIPTION))["attributes"])
            if (version := self.attributes.get("schema_version")) != SCHEMA_VERSION:
                raise OtherVersion(version, path)
            listed = self.attributes.pop("arrays").items()
            self.layouts = {name: ArrayLayout(tuple(of["shape"]), of["dtype"], of["rows"]) for name, of in listed}
            self._check_members()
        except BaseException:
            self._file.close()
            raise

    def _list_members(self, file: zipfile.ZipFile) -> dict[str, zipfile.ZipInfo]:
        """The members by name, of which none is packed or there twice, and all claim no more than the file has."""
        members = file.infolist()
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
            (shape, _, rows), dtype, parts = layout, layout.stored_type, name.split("/")
            if not (shape and all(isinstance(size, int) and size >= 0 for size in (*shape, rows - 1))):
                raise ValueError(f"{name} has shape {shape} in chunks of {rows} rows")
            if dtype.kind not in "biuf":
                raise ValueError(f"{name} holds {dtype}, expected numbers")
            sizes |= {"/".join([*parts[:depth], _DESCRIPTION]): None for depth in range(1, len(parts) + 1)}
            # Counted before they are listed: a shape may claim more chunks than a machine can count.
            if (count := 0 if 0 in shape else layout.num_chunks) > len(self._members):
                raise ValueError(f"{name} has {count} chunks, the file {len(self._members)} members")
            size = rows * math.prod(shape[1:]) * dtype.itemsize + _CHECKSUM
            sizes |= {layout.member(name, number): size for number in range(count)}
        if missing := sorted(sizes.keys() - self._members.keys()):
            raise ValueError(f"{missing[0]} is missing ({len(missing)} of {len(sizes)} members)")
        if strangers := sorted(self._members.keys() - sizes.keys()):
            raise ValueError(f"{strangers[0][:80]} belongs to no array ({len(strangers)} such members)")
        for name, expected in sizes.items():
            if expected not in (None, held := self._members[name].file_size):
                raise ValueError(f"{name} has {held} bytes, expected {expected}")

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
        """Read every chunk, or one share of them, and what describes arrays to others: a damaged one is refused."""
        chunks = [(name, number) for name, layout in self.layouts.items() for number in range(layout.num_chunks)]
        for name, number in chunks[share::of]:
            self._chunks(name, [number])
        with zipfile.ZipFile(self._file) as file:
            for member in file.namelist()[share::of]:
                if member.endswith(_DESCRIPTION):
                    file.read(member)  # compared with its checksum

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
