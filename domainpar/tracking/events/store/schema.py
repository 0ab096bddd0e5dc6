"""The arrays of a stored event: one table for the writer, the checks of the reader, and docs/reference/store.md."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from domainpar.tracking.events.graph import Array

SCHEMA_VERSION = 3
"""Version of all zarr files and of the manifest. It changes with the table below, and with how arrays are stored."""

LETTERS = {
    "N": "nodes", "E": "edges", "K": "tiles", "K+1": "tiles + 1", "F": "node features", "G": "edge features",
    "P": "particles", "L": "labels of nodes",
    "J": "pairs of unequal tiles that edges join", "C": "edges that join unequal tiles",
}  # fmt: skip
"""Letters of the shapes. The description of a file gives N, E and K, and the names of the features."""


@dataclass(frozen=True)
class StoredArray:
    """One array of the file.

    Attributes:
        shape: Letters of `LETTERS` or numbers, rows first.
        dtype: Type in memory and in the file; `id` for numbers of nodes or edges, which are kept in 32 bits if all of
            them fit, and are int64 in memory; `truth` for 0 and 1, which are uint8, and int8 where a -1 is among them.
        meaning: For the documentation, with the unit.
        optional: Whether an event may lack it. Of particles: whether a particle table may.
    """

    shape: tuple[str, ...]
    dtype: str
    meaning: str
    optional: bool = False

    @property
    def file_dtypes(self) -> tuple[str, ...]:
        """The types that it may have in the file."""
        return {"id": ("int32", "int64"), "truth": ("uint8", "int8")}.get(self.dtype, (self.dtype,))

    @property
    def memory_dtype(self) -> str:
        """The type that a reader gets."""
        return {"id": "int64", "truth": "int8"}.get(self.dtype, self.dtype)


# Not `joining_edges`: zarr takes the chunks of an array whose name begins with another's for that other's.
JOINING_EDGES = "tiles/edges_by_src_tile"

# fmt: off
ARRAYS: dict[str, StoredArray] = {
    "nodes/features": StoredArray(("N", "F"), "float32", "features, by the names in the description"),
    "nodes/position": StoredArray(("N", "3"), "float32", "x, y, z in mm", optional=True),
    "nodes/volume": StoredArray(("N",), "int32", "detector volume, 0 where there is none"),
    "nodes/layer": StoredArray(("N",), "int32", "layer in the volume"),
    "nodes/module": StoredArray(("N",), "int32", "module in the layer"),
    "nodes/hit_id": StoredArray(("N",), "int64", "the source's own number of the hit"),
    "nodes/particle_id": StoredArray(("N",), "int64", "particle of the hit, 0 for noise", optional=True),
    "nodes/weight": StoredArray(("N",), "float32", "truth weight of the hit", optional=True),
    "nodes/measured": StoredArray(
        ("N", "8"), "float32", "axes u, v of the module and the errors along them in mm; unknown: NaN", optional=True
    ),
    "nodes/labels": StoredArray(("N", "L"), "float32", "labels by name; unknown: NaN, class -1", optional=True),
    "nodes/original_row": StoredArray(("N",), "id", "row of the node in the source"),
    "edges/src": StoredArray(("E",), "id", "node in which the edge starts"),
    "edges/dst": StoredArray(("E",), "id", "node in which the edge ends; edges ascend in (dst, src)"),
    "edges/label": StoredArray(("E",), "truth", "1: true segment, 0: none, -1: not known", optional=True),
    "edges/original_position": StoredArray(("E",), "id", "place of the edge in the source"),
    "edges/features": StoredArray(("E", "G"), "float32", "features, by the names in the description"),
    "tiles/node_ptr": StoredArray(("K+1",), "int64", "tile t holds the nodes [node_ptr[t], node_ptr[t + 1])"),
    "tiles/edge_ptr": StoredArray(("K+1",), "int64", "the edges [edge_ptr[t], edge_ptr[t + 1]) end in tile t"),
    "tiles/src_tile": StoredArray(("J",), "int64", "tile in which the edges of the pair start"),
    "tiles/dst_tile": StoredArray(("J",), "int64", "tile in which they end; pairs ascend in (src_tile, dst_tile)"),
    "tiles/joining": StoredArray(("J",), "int64", "number of edges of the pair, at least 1"),
    JOINING_EDGES: StoredArray(("C",), "id", "these edges, pair after pair, ascending in each"),
    "particles/particle_id": StoredArray(("P",), "int64", "particle, never 0"),
    "particles/pt": StoredArray(("P",), "float32", "transverse momentum at production in GeV, NaN where unknown"),
    "particles/eta": StoredArray(("P",), "float32", "pseudorapidity at production, NaN where unknown"),
    "particles/vertex": StoredArray(("P", "3"), "float32", "production vertex x, y, z in mm, NaN where unknown"),
    "particles/nhits": StoredArray(("P",), "int32", "hits that the particle left in the detector"),
    "particles/charge": StoredArray(("P",), "int8", "sign of the charge, 0 where unknown"),
    "particles/primary": StoredArray(("P",), "int8", "1 if it comes from the collision, else 0", optional=True),
    "particles/pdg_id": StoredArray(("P",), "int64", "kind by the Particle Data Group, 0 where unknown", optional=True),
    "particles/phi": StoredArray(("P",), "float32", "azimuth at production in rad, NaN where unknown", optional=True),
}
# fmt: on
"""Every array by its name in the file."""


def names_in(group: str) -> tuple[str, ...]:
    """Names of the arrays of `nodes`, `edges`, `tiles` or `particles`, without the group."""
    return tuple(name.partition("/")[2] for name in ARRAYS if name.startswith(f"{group}/"))


def in_file_type(name: str, values: Array) -> Array:
    """The values in the type that the file holds.

    Raises:
        ValueError: If a whole number does not fit that type.
    """
    dtypes = ARRAYS[name].file_dtypes
    for dtype in dtypes:
        if np.issubdtype(dtype, np.floating):
            return np.asarray(values, dtype)
        limits = np.iinfo(dtype)
        if values.size == 0 or limits.min <= values.min() <= values.max() <= limits.max:
            return np.asarray(values, dtype)
    raise ValueError(f"{name} has values from {values.min()} to {values.max()}, more than {dtypes[-1]} holds")


def in_memory_type(name: str, values: Array) -> Array:
    """The values in the type that a reader gets."""
    return values.astype(ARRAYS[name].memory_dtype, copy=False)


def check_arrays(arrays: Mapping[str, tuple[tuple[int, ...], str]], sizes: Mapping[str, int]) -> None:
    """Hold the arrays of a file against the table: all are there, and each has its shape and type.

    Args:
        arrays: Shape and type of each array of the file.
        sizes: The sizes that are known, by their letters. The others have to be the same wherever they occur.

    Raises:
        ValueError: Naming the first array that is missing, unknown, or does not fit.
    """
    with_particles = any(name.startswith("particles/") for name in arrays)
    for name, array in ARRAYS.items():
        if name not in arrays and not array.optional and (with_particles or not name.startswith("particles/")):
            raise ValueError(f"{name} is missing")
    sizes = dict(sizes)
    for name, (shape, dtype) in arrays.items():
        if name not in ARRAYS:
            raise ValueError(f"{name} is no array of schema version {SCHEMA_VERSION}")
        letters = ARRAYS[name].shape
        # A size that is not known is that of the first array which has it.
        for letter, size in zip(letters, shape):
            sizes.setdefault(letter, int(letter) if letter.isdigit() else size)
        expected = tuple(sizes.get(letter) for letter in letters)
        if shape != expected:
            raise ValueError(f"{name}: its shape is {shape}, expected {expected} in this event")
        if dtype not in ARRAYS[name].file_dtypes:
            raise ValueError(f"{name}: it holds {dtype}, expected {' or '.join(ARRAYS[name].file_dtypes)}")


def table() -> Iterator[str]:
    """The table of docs/reference/store.md, line by line."""
    yield from ("| array | shape | in the file | in memory | meaning |", "| --- | --- | --- | --- | --- |")
    for name, array in ARRAYS.items():
        shape, note = ", ".join(array.shape), " (may be absent)" if array.optional else ""
        dtypes = " or ".join(array.file_dtypes)
        yield f"| `{name}` | [{shape}] | {dtypes} | {array.memory_dtype} | {array.meaning}{note} |"
    yield from ("", "Letters: " + "; ".join(f"{letter} {meaning}" for letter, meaning in LETTERS.items()) + ".")
