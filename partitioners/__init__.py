"""Cutting an event into blocks of nodes, and grouping blocks into parts: numpy and METIS, no ranks, no models."""

from partitioners.grouping import GROUPINGS, TileGraph, group
from partitioners.metis import Metis
from partitioners.ranges import Contiguous, Random
from partitioners.sectors import Eta, Phi, PhiEta, number_along_phi
from partitioners.topology import Partitioner, Topology

PARTITIONERS = ("phi", "eta", "phi-eta", "metis", "contiguous", "random")
"""Names that `get_partitioner` knows; the first three need positions."""

__all__ = [
    "GROUPINGS",
    "PARTITIONERS",
    "Contiguous",
    "Eta",
    "Metis",
    "Partitioner",
    "Phi",
    "PhiEta",
    "Random",
    "TileGraph",
    "Topology",
    "get_partitioner",
    "group",
    "number_along_phi",
]


def get_partitioner(name: str, seed: int = 0) -> Partitioner:
    """Return the partitioner of a name.

    Args:
        name: One of `PARTITIONERS`.
        seed: Used by `metis` and `random`.

    Raises:
        ValueError: If the name is unknown.
    """
    known: dict[str, Partitioner] = {
        "phi": Phi(),
        "eta": Eta(),
        "phi-eta": PhiEta(),
        "metis": Metis(seed),
        "contiguous": Contiguous(),
        "random": Random(seed),
    }
    if name not in known:
        raise ValueError(f"partitioner '{name}' is unknown; choose one of {', '.join(known)}.")
    return known[name]
