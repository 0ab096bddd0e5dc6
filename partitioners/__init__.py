"""Cutting an event into blocks of nodes, and grouping blocks into parts: numpy and METIS, no ranks, no models."""

from collections.abc import Callable

from partitioners.grouping import GROUPINGS, Sectors, TileGraph, group, number_of_sectors, sectors_of_tiles
from partitioners.hilbert import Hilbert
from partitioners.metis import Metis
from partitioners.ranges import Contiguous, Random
from partitioners.sectors import Eta, Phi, PhiEta, number_along_phi
from partitioners.topology import Partitioner, Topology

_BY_SEED: dict[str, Callable[[int], Partitioner]] = {
    "phi": lambda _: Phi(), "eta": lambda _: Eta(), "phi-eta": lambda _: PhiEta(), "metis": Metis,
    "contiguous": lambda _: Contiguous(), "random": Random, "hilbert": lambda _: Hilbert(),
}  # fmt: skip
PARTITIONERS = tuple(_BY_SEED)
"""Names that `get_partitioner` knows."""

BY_POSITION = ("phi", "eta", "phi-eta", "hilbert")
"""Those that need positions."""

ANYWHERE = ("contiguous", "hilbert")
"""Those that give the same blocks on any machine, so that each rank may compute them alone."""

SEEDED = tuple(name for name, make in _BY_SEED.items() if make(0) != make(1))
"""Those whose blocks depend on the seed."""

__all__ = [
    "ANYWHERE", "BY_POSITION", "GROUPINGS", "PARTITIONERS", "SEEDED", "Contiguous", "Eta", "Hilbert", "Metis",
    "Partitioner", "Phi", "PhiEta", "Random", "Sectors", "TileGraph", "Topology", "get_partitioner", "group",
    "number_along_phi", "number_of_sectors", "sectors_of_tiles",
]  # fmt: skip


def get_partitioner(name: str, seed: int = 0) -> Partitioner:
    """Return the partitioner of a name, one of `PARTITIONERS`; those of `SEEDED` use the seed."""
    if name not in _BY_SEED:
        raise ValueError(f"partitioner '{name}' is unknown; choose one of {', '.join(PARTITIONERS)}.")
    return _BY_SEED[name](seed)
