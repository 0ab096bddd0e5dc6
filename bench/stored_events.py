"""In which chunks and codecs is a stored event read fastest, and what does reading it through zarr cost?

    OMP_NUM_THREADS=1 python bench/stored_events.py --hits 20000         a minute
    python bench/stored_events.py --case tiny --repeats 2                seconds, to see that it runs

The arrays of one event are written by zarr in several ways, each beside its checksums, and read with the file in the
cache of the system. `MB`: size of the file. `event`: open it and read every array. `rows`: 8,000 neighbouring rows of
the edges' features, the file and the array open. `domainpar` is the form of a store, as it is read by `ArrayFile`;
`mapped` gives zarr the members of the zip in memory, without copying them.
"""

from __future__ import annotations

import argparse
import tempfile
import zipfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import cases
import flags
import measuring
import numpy as np
import zarr
from zarr.buffer.cpu import Buffer
from zarr.codecs import BloscCodec, Crc32cCodec, ZstdCodec
from zarr.storage import LocalStore, MemoryStore, StoreLike, ZipStore

from domainpar.tracking.events.graph import Array
from domainpar.tracking.events.store import write_arrays
from domainpar.tracking.events.store.arrays import ArrayFile

CODECS: dict[str, list[Any]] = {
    "none": [],
    "crc32c": [Crc32cCodec()],
    "zstd 1, crc32c": [ZstdCodec(level=1), Crc32cCodec()],
    "lz4, crc32c": [BloscCodec(cname="lz4", clevel=1), Crc32cCodec()],
}
ROWS, OF = 8_000, "edges/features"


def main(argv: Sequence[str] | None = None) -> None:
    options = parse(argv)
    case = cases.chosen_case(options)
    results = measuring.Results("stored_events", options)
    with ArrayFile(case.store / case.record.path) as file:
        arrays = {name: file.whole(name) for name in file.layouts}
    start = max(0, len(arrays[OF]) // 2 - ROWS)
    ids = np.arange(start, min(start + ROWS, len(arrays[OF])))
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "arrays.zarr.zip"
        write_arrays(path, arrays, {})
        with ArrayFile(path) as file:
            row = {"opened": "domainpar", "chunk": "65,536", "codecs": "crc32c", "bytes": path.stat().st_size}
            row["event"] = measuring.timed(lambda: read_by_domainpar(path), options.repeats)
            results.add(**row, rows=measuring.timed(lambda: file.rows(OF, ids), options.repeats))
        for chunk in options.chunks:
            for codecs in options.codecs:
                folder = Path(scratch) / f"{chunk}-{codecs}"
                size = write(path, folder, arrays, chunk, CODECS[codecs])
                for name, opened in OPENED.items():
                    place = folder if name == "folder" else path
                    array: Any = zarr.open_group(opened(place), mode="r")[OF]
                    row = {"opened": f"zarr, {name}", "chunk": f"{chunk:,}" if chunk else "whole", "codecs": codecs}
                    row |= {"bytes": size, "event": measuring.timed(reading(opened, place, arrays), options.repeats)}
                    results.add(**row, rows=measuring.timed(lambda a=array: a[ids[0] : ids[-1] + 1], options.repeats))
    note = f"{case}; {len(arrays)} arrays; milliseconds: median [least, most]"
    results.show("Stored events", COLUMNS, results.rows, note)
    results.end()


COLUMNS: measuring.Columns = {
    "opened by": lambda row: row["opened"],
    "rows of a chunk": lambda row: row["chunk"],
    "codecs": lambda row: row["codecs"],
    "MB": lambda row: f"{row['bytes'] / 1e6:.2f}",
    "event": lambda row: row["event"].text("{:.2f}", 1e3),
    "rows": lambda row: row["rows"].text("{:.2f}", 1e3),
}


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = flags.parser(__doc__, "stored_events", case="medium")
    parser.add_argument("--chunks", type=int, nargs="+", default=[0, 65_536, 8_192], help="rows of a chunk; 0: all")
    parser.add_argument("--codecs", nargs="+", choices=CODECS, default=list(CODECS))
    parser.add_argument("--repeats", type=int, default=30, help="timings are medians of this many, after one more")
    return parser.parse_args(argv)


def write(path: Path, folder: Path, arrays: Mapping[str, Array], chunk: int, codecs: list[Any]) -> int:
    """Write arrays as a zip and as a folder; returns the bytes of the zip."""
    group = zarr.create_group(LocalStore(folder))
    for name, values in arrays.items():
        rows = max(1, min(chunk or len(values), len(values)))
        shape = (rows, *(max(1, size) for size in values.shape[1:]))
        group.create_array(name, data=values, chunks=shape, compressors=codecs, config={"write_empty_chunks": True})
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as file:
        for member in sorted(folder.rglob("*")):
            if member.is_file():
                file.write(member, member.relative_to(folder))
    return path.stat().st_size


def mapped(path: Path) -> MemoryStore:
    """The members of a zip, where they lie."""
    content = np.memmap(path, np.uint8, "r")
    with zipfile.ZipFile(path) as file:
        places = {it.filename: (it.header_offset + 30 + len(it.filename), it.file_size) for it in file.infolist()}
    members = {name: Buffer.from_array_like(content[at : at + size]) for name, (at, size) in places.items()}
    return MemoryStore(members, read_only=True)


OPENED: dict[str, Callable[[Path], StoreLike]] = {
    "mapped": mapped,
    "zip": lambda path: ZipStore(path, mode="r"),
    "folder": lambda path: LocalStore(path, read_only=True),
}


def reading(opened: Callable[[Path], StoreLike], path: Path, arrays: Mapping[str, Array]) -> Callable[[], object]:
    """Reads all arrays through zarr."""

    def read() -> object:
        group: Any = zarr.open_group(opened(path), mode="r")
        return [group[name][...] for name in arrays]

    return read


def read_by_domainpar(path: Path) -> object:
    """Reads all arrays."""
    with ArrayFile(path) as file:
        return [file.whole(name) for name in file.layouts]


if __name__ == "__main__":
    measuring.run(__file__)
