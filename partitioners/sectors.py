"""Partitioners that follow the detector: wedges in phi, slices in eta, and both."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from partitioners.ranges import split_along
from partitioners.topology import FloatArray, IntArray, Topology, check_assignment, check_num_blocks

BEST_ASPECT = 10
"""Phi wedges per eta slice that cut a full event best (`bench/partition.py`).

A slice in eta cuts some 20 times as many edges as a border between two wedges: vertices spread over +-200 mm along the
beam, so edges fan out in eta, while they bend little in phi.
"""


@dataclass(frozen=True)
class Phi:
    """Wedges of equal cost around the beam axis, numbered along phi from -pi; the last is a neighbour of the first."""

    def __call__(self, topology: Topology, num_blocks: int) -> IntArray:
        """Return the wedge of each node, int32 [N]; ValueError if the graph has no positions."""
        return split_along(phi_of(position_of(topology, "phi")), topology.costs(), num_blocks)


@dataclass(frozen=True)
class Eta:
    """Slices of equal cost in pseudorapidity, numbered from -infinity; a hit on the beam axis is in an outer one."""

    def __call__(self, topology: Topology, num_blocks: int) -> IntArray:
        """Return the slice of each node, int32 [N]; ValueError if the graph has no positions."""
        return split_along(eta_of(position_of(topology, "eta")), topology.costs(), num_blocks)


@dataclass(frozen=True)
class PhiEta:
    """Wedges in phi of equal cost, each cut into slices of equal cost in eta; numbered wedge by wedge.

    Attributes:
        num_wedges: Number of wedges, a divisor of the number of blocks; None takes the divisor for which wedges per
            slice come nearest to `BEST_ASPECT`.
    """

    num_wedges: int | None = None

    def __call__(self, topology: Topology, num_blocks: int) -> IntArray:
        """Return the block of each node, wedge * slices + slice, int32 [N].

        Raises:
            ValueError: If the graph has no positions, or `num_wedges` does not divide `num_blocks`.
        """
        position = position_of(topology, "phi-eta")
        return cut_in_both(phi_of(position), eta_of(position), topology.costs(), *self.grid(num_blocks))

    def grid(self, num_blocks: int) -> tuple[int, int]:
        """Return (wedges, slices), whose product is `num_blocks`; ValueError if `num_wedges` does not divide it."""
        check_num_blocks(num_blocks)
        if self.num_wedges is None:
            divisors = [wedges for wedges in range(1, num_blocks + 1) if num_blocks % wedges == 0]
            wedges = min(divisors, key=lambda wedges: abs(np.log(wedges * wedges / num_blocks / BEST_ASPECT)))
            return wedges, num_blocks // wedges
        if self.num_wedges < 1 or num_blocks % self.num_wedges:
            raise ValueError(f"{self.num_wedges} phi wedges do not divide {num_blocks} blocks; choose a divisor.")
        return self.num_wedges, num_blocks // self.num_wedges


def number_along_phi(assignment: IntArray, position: FloatArray, num_blocks: int) -> IntArray:
    """Number blocks along phi, so that ranges of block numbers are sensible sectors.

    Blocks are ordered by the circular mean of phi over their nodes, empty ones last. But when they follow phi already,
    that is when none lies wholly before a lower-numbered one, they keep their numbers: so wedges, the slices within a
    wedge and slices in eta stay in their own order, and numbering twice changes nothing.

    Args:
        assignment, position: Block of each node, [N], in [0, num_blocks), and x, y, z, [N, 3].

    Returns:
        The new number of each node's block, int32 [N]; ValueError if one does not exist.
    """
    check_assignment(assignment, len(position), num_blocks)
    phi = phi_of(position)
    lowest, highest = np.full(num_blocks, np.inf), np.full(num_blocks, -np.inf)
    np.minimum.at(lowest, assignment, phi)
    np.maximum.at(highest, assignment, phi)
    is_empty = lowest > highest  # such a block lies anywhere
    lowest[is_empty], highest[is_empty] = -np.inf, np.inf
    if (np.maximum.accumulate(lowest) <= highest).all():
        return assignment.astype(np.int32)
    order = np.argsort(circular_mean(phi, assignment, num_blocks), kind="stable")
    number = np.empty(num_blocks, np.int32)
    number[order] = np.arange(num_blocks, dtype=np.int32)
    return number[assignment]


def circular_mean(phi: FloatArray, assignment: IntArray, num_blocks: int) -> FloatArray:
    """Return the mean direction of each block in (-pi, pi], float64 [num_blocks]; infinity for an empty block."""
    sines = np.bincount(assignment, np.sin(phi), num_blocks)
    cosines = np.bincount(assignment, np.cos(phi), num_blocks)
    mean: FloatArray = np.arctan2(sines, cosines)
    mean[np.bincount(assignment, minlength=num_blocks) == 0] = np.inf
    return mean


def cut_in_both(phi: FloatArray, eta: FloatArray, costs: IntArray, num_wedges: int, num_slices: int) -> IntArray:
    """Cut items into wedges of equal cost in phi, and each into slices of equal cost in eta; numbered by wedge."""
    wedge = split_along(phi, costs, num_wedges)
    block = np.empty(len(phi), np.int32)
    order = np.argsort(wedge, kind="stable")
    borders = np.searchsorted(wedge[order], np.arange(1, num_wedges))
    for number, items in enumerate(np.split(order, borders)):
        block[items] = number * num_slices + split_along(eta[items], costs[items], num_slices)
    return block


def phi_of(position: FloatArray) -> FloatArray:
    """Return the angle of each node around the beam axis, in [-pi, pi], float64 [N]."""
    phi: FloatArray = np.arctan2(position[:, 1].astype(np.float64), position[:, 0].astype(np.float64))
    return phi


def eta_of(position: FloatArray) -> FloatArray:
    """Return pseudorapidity as seen from the origin, float64 [N]: infinite on the beam axis, 0 at the origin itself."""
    x, y, z = position.astype(np.float64).T
    r = np.hypot(x, y)
    slope = np.divide(z, r, out=np.where(z == 0, 0.0, np.copysign(np.inf, z)), where=r > 0)
    eta: FloatArray = np.arcsinh(slope)
    return eta


def position_of(topology: Topology, name: str) -> FloatArray:
    """The positions of a graph, [N, 3], for the partitioner of a name; ValueError if it has none."""
    if topology.position is None:
        raise ValueError(
            f"partitioner '{name}' needs positions and this graph has none; "
            "metis, contiguous and random need no positions."
        )
    return topology.position
