"""Curves of a training: what its records say of each step, as plain numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from domainpar.display.reading import RunFiles, Table
from domainpar.events.graph import FloatArray

QUANTITIES = ("loss", "edge_auc", "edge_efficiency", "edge_purity", "lr", "grad_norm")
"""What the curves are about: keys of a record."""

MOST_POINTS = 2000


@dataclass(frozen=True, eq=False)
class Curve:
    """One quantity along a training.

    Attributes:
        step: Optimiser steps done, [n].
        value: The quantity after them, [n]; finite.
    """

    step: FloatArray
    value: FloatArray


def training_curves(run: RunFiles) -> dict[str, dict[str, Curve]]:
    """Curves of a run by quantity and split (`train`, `val`); what no record tells is left out."""
    curves: dict[str, dict[str, Curve]] = {}
    for quantity in QUANTITIES:
        for split in ("train", "val"):
            curve = _curve(run.records_of(split), quantity)
            if len(curve.step) and not (split == "val" and quantity in ("lr", "grad_norm")):
                curves.setdefault(quantity, {})[split] = curve
    return curves


def _curve(records: Sequence[Table], quantity: str) -> Curve:
    known = [(record["step"], record[quantity]) for record in records if record.get(quantity) is not None]
    points = np.array(known, dtype=np.float64).reshape(-1, 2)
    points = points[np.isfinite(points).all(axis=1)]
    # A figure has some 1000 pixels; the last point is always among them.
    every = -(-len(points) // MOST_POINTS) or 1
    points = points[::-1][::every][::-1]
    return Curve(points[:, 0], points[:, 1])
