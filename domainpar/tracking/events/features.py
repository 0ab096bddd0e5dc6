"""The features of nodes and edges that are made here: one table of formulas, units and signs, for the kernels that
compute them, docs/reference/features.md and the metadata of an exported network."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

SLOPE_LIMIT = 100.0
"""`phi_slope` as an edge feature is clamped to this; hits at one radius have none."""


@dataclass(frozen=True)
class Feature:
    """One feature.

    Attributes:
        formula: Before it is divided, as an expression: x, y, z in mm and phi in rad of hits, `[src]` and `[dst]` those
            of both ends of an edge; features further up in the table by their names, not divided.
        unit: Of that.
        divisor: What it is divided by, to be what a store holds and a network is given.
        sign: When it is positive, and its range.
    """

    formula: str
    unit: str
    divisor: float
    sign: str

    @property
    def words(self) -> str:
        """The whole definition in one line."""
        over = "" if self.divisor == 1 else f", over {_number(self.divisor)}"
        return f"{self.formula}{f' [{self.unit}]' if self.unit else ''}{over}; {self.sign}"


OF_NODES = {
    "r": Feature("hypot(x, y)", "mm", 1000.0, "never negative"),
    "phi": Feature("arctan2(y, x)", "rad", math.pi, "in [-pi, pi); grows from the x axis to the y axis"),
    "z": Feature("z", "mm", 1000.0, "sign of the source's z axis"),
}
OF_CLUSTERS = {
    "log_cells": Feature("log(cells)", "", 1.0, "never negative; cells: number of cells; natural logarithm"),
    "log_charge": Feature("log(charge)", "", 1.0, "any sign; charge: sum of `value` over the cells; natural logarithm"),
    "size_u": Feature("(max(ch0) - min(ch0) + 1) * pitch_u", "mm", 1.0, "positive"),
    "size_v": Feature("(max(ch1) - min(ch1) + 1) * pitch_v", "mm", 1.0, "positive"),
    "angle_u": Feature("arctan2(size_u, 2 * module_t)", "rad", 1.0, "in (0, pi/2): cells do not show the sign"),
    "angle_v": Feature("arctan2(size_v, 2 * module_t)", "rad", 1.0, "in (0, pi/2): cells do not show the sign"),
}
OF_EDGES = {
    "dr": Feature("r[dst] - r[src]", "mm", 1000.0, "positive if dst is further from the beam"),
    "dphi": Feature("wrapped(phi[dst] - phi[src])", "rad", math.pi, "in [-pi, pi); positive if phi grows"),
    "dz": Feature("z[dst] - z[src]", "mm", 1000.0, "positive if z grows"),
    "deta": Feature("eta[dst] - eta[src]", "", 1.0, "positive if eta grows; eta = arcsinh(z / max(r, 0.001 mm))"),
    "phi_slope": Feature(
        "dphi / dr", "rad/mm", math.pi / 1000.0,
        f"sign of dphi for outward edges; after division limited to [-{SLOPE_LIMIT:g}, {SLOPE_LIMIT:g}]; 0 where dphi "
        f"is 0; {SLOPE_LIMIT:g} with the sign of dphi where only dr is 0",
    ),
    "r_phi_slope": Feature("(r[src] + r[dst]) / 2 * phi_slope", "rad", math.pi, "sign of phi_slope, after its limit"),
}  # fmt: skip
FEATURES = {**OF_NODES, **OF_CLUSTERS, **OF_EDGES}
"""Every feature that is made here, by its name."""

NODE_FEATURES = tuple(OF_NODES)
CLUSTER_FEATURES = tuple(OF_CLUSTERS)
EDGE_FEATURES = tuple(OF_EDGES)

NODE_SCALE = (FEATURES["r"].divisor, FEATURES["phi"].divisor, FEATURES["z"].divisor)
"""Node features are r, phi and z over these: m, half turns, m."""


def table() -> Iterator[str]:
    """The table of docs/reference/features.md, line by line."""
    yield from ("| feature | of | formula | unit | over | sign and range |", "| --- | --- | --- | --- | --- | --- |")
    for of, features in (("nodes", OF_NODES), ("nodes, clusters", OF_CLUSTERS), ("edges", OF_EDGES)):
        for name, one in features.items():
            yield f"| `{name}` | {of} | `{one.formula}` | {one.unit} | {_number(one.divisor)} | {one.sign} |"


def _number(value: float) -> str:
    """A divisor as one writes it."""
    known = {math.pi: "pi", math.pi / 1000.0: "pi / 1000"}
    return known.get(value, f"{value:g}")
