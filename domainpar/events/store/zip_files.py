"""zarr zips of named arrays: the same bytes from the same values."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import zarr
from zarr.codecs import Crc32cCodec, ZstdCodec
from zarr.storage import MemoryStore

from domainpar.atomic_files import write_whole
from domainpar.events.graph import Array
from domainpar.events.store.archive import Archive
from domainpar.events.store.layout import StoreError, sha256_of
from domainpar.events.store.schema import JOINING_EDGES

NODES_PER_CHUNK = 16_384
EDGES_PER_CHUNK = 65_536


def write_arrays(path: Path, arrays: Mapping[str, Array], attributes: Mapping[str, Any]) -> str:
    """Write named arrays as one zarr zip of their own; the file appears under its name when it is complete.

    Args:
        path: File to write. Its directory is made where it is missing; a file of this name is replaced.
        arrays: The arrays by name, cut into chunks along their last axis.
        attributes: Their description, plain JSON values.

    Returns:
        sha256 of the file, in hex. The same arrays and attributes give the same bytes.
    """
    content = zip_content(arrays, attributes, _chunks_along_last_axis)
    write_whole(Path(path), content)
    return sha256_of(content)


def read_arrays(path: Path) -> tuple[dict[str, Array], dict[str, Any]]:
    """The named arrays of a file that `write_arrays` wrote, and what describes them.

    Raises:
        StoreError: If the file is missing or damaged.
    """
    if not path.is_file():
        raise StoreError("no such file", file=path)
    try:
        with Archive(path) as archive:
            return {name: archive.whole(name) for name in archive.layouts}, archive.attributes
    except Exception as error:  # of zarr, the zip and the codecs, none of which names the file
        raise StoreError(f"cannot be read: {type(error).__name__}: {error}", "write it again", file=path) from error


def zip_content(
    arrays: Mapping[str, Array], attributes: Mapping[str, Any], chunks: Callable[[str, Array], tuple[int, ...]]
) -> bytes:
    """The bytes of a zarr zip of named arrays, each cut into the chunks that `chunks(name, values)` says."""
    return _zipped(_encoded(arrays, dict(attributes), chunks))


def chunks_of_rows(name: str, values: Array) -> tuple[int, ...]:
    """Chunks of a stored event: rows of nodes or edges, so that a rank reads those of its tiles."""
    rows = EDGES_PER_CHUNK if name.startswith("edges/") or name == JOINING_EDGES else NODES_PER_CHUNK
    return (max(1, min(rows, len(values))), *(max(1, n) for n in values.shape[1:]))


def _chunks_along_last_axis(name: str, values: Array) -> tuple[int, ...]:
    return (*(max(1, n) for n in values.shape[:-1]), max(1, min(EDGES_PER_CHUNK, values.shape[-1])))


def _encoded(
    arrays: Mapping[str, Array],
    attributes: dict[str, Any],
    chunks: Callable[[str, Array], tuple[int, ...]],
) -> dict[str, bytes]:
    """The members of the zip. Written to memory first, so that their order and dates do not depend on timing."""
    members: dict[str, Any] = {}
    group = zarr.create_group(MemoryStore(store_dict=members), attributes=attributes)
    for name, values in arrays.items():
        array = group.create_array(
            name,
            shape=values.shape,
            dtype=values.dtype,
            chunks=chunks(name, values),
            compressors=[ZstdCodec(level=1), Crc32cCodec()],
            # A chunk of zeros is written too: a missing chunk reads as zeros, and must be told from a real one.
            config={"write_empty_chunks": True},
        )
        array[...] = values
    return {name: members[name].to_bytes() for name in sorted(members)}


def _zipped(members: Mapping[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_STORED) as archive:
        for name, content in members.items():
            member = zipfile.ZipInfo(name, date_time=(1980, 1, 1, 0, 0, 0))
            member.create_system, member.external_attr = 3, 0o644 << 16
            archive.writestr(member, content)
    return buffer.getvalue()
