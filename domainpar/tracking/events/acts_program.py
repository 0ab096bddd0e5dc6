"""ACTS itself: its generic detector, its field, and one event at a time through its algorithms."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from domainpar.common.problems import Problem
from domainpar.tracking.events.detector import FIELD_ELSEWHERE
from domainpar.tracking.events.field import Field

_R, _Z = np.arange(0.0, 1_225.0, 12.0), np.arange(-3_200.0, 3_201.0, 20.0)
"""Nodes of the map that ACTS is given, in mm. The detector ends at 1,027 and 3,000, and no field is known beyond."""


def import_acts() -> Any:
    """The module `acts`, with `acts.examples` and all that is used of it.

    Raises:
        Problem: If the package is not there.
    """
    try:
        import acts
        import acts.examples
        import acts.examples.json
        import acts.examples.reconstruction
        import acts.examples.simulation
    except ImportError as error:
        what = f"this takes the packages pyacts and pythia8mc, and one is not here ({error})"
        raise Problem(what, "pip install 'domainpar[acts]' (Linux, x86-64)") from error
    return acts


@cache
def generic_detector() -> Any:
    """The generic detector of ACTS, which is that of TrackML. Its geometry lives as long as it does."""
    acts = import_acts()
    config = acts.examples.GenericDetector.Config()
    for name in ("logLevel", "surfaceLogLevel", "layerLogLevel", "volumeLogLevel"):
        setattr(config, name, acts.logging.WARNING)
    return acts.examples.GenericDetector(config)


def acts_field(field: Field | None, scratch: Path) -> Any:
    """A field as ACTS has it; None: 2 T. Maps pass through a file in `scratch`.

    Raises:
        Problem: If the axis of a map is not the beam.
    """
    if field is not None and (field.x or field.y):
        what = f"ACTS takes a map about the beam, and the axis of this one lies at x {field.x:g} and y {field.y:g} mm"
        raise Problem(what, "take a map without x and y")
    acts = import_acts()
    told = FIELD_ELSEWHERE if field is None else field.to_json()
    if isinstance(told, float | int):
        return acts.ConstantBField(acts.Vector3(0, 0, told * acts.UnitConstants.T))
    assert field is not None  # of None it was a number
    r, z = (axis.ravel() for axis in np.meshgrid(_R, _Z))  # ACTS takes rows in this order, the radius fastest, on trust
    bz, br = field.at(np.stack([r, np.zeros_like(r), z], axis=1))
    path = scratch / "field.txt"
    np.savetxt(path, np.stack([r, z, br, bz], axis=1), fmt="%.9g")
    return acts.MagneticFieldMapRz(str(path), acts.UnitConstants.mm, acts.UnitConstants.T)


def sequence(scratch: Path) -> Any:
    """An empty chain of ACTS's algorithms, to read its one event from `scratch`, where it writes its times, too."""
    acts = import_acts()
    # Without `skip`: a folder's first event is its own, and its number decides what is random.
    return acts.examples.Sequencer(
        events=1, numThreads=1, logLevel=acts.logging.WARNING, trackFpes=False, outputDir=str(scratch)
    )
