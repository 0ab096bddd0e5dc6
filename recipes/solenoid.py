"""Write a map of the field of an ideal coil, with its radial part: the second field of the networks NAME-hllhc.

python recipes/solenoid.py FILE

The coil has the radius 1,200 mm, the length 3,900 mm, 1,194 windings, and 2 T in its centre. Needs the extra [acts].
"""

from __future__ import annotations

import sys
from pathlib import Path

import acts
import numpy as np

MM, TESLA = acts.UnitConstants.mm, acts.UnitConstants.T
COIL = acts.SolenoidBField(radius=1200 * MM, length=3900 * MM, nCoils=1194, bMagCenter=2 * TESLA)


def rows() -> list[str]:
    """Lines of r, z in mm and B_r, B_z in T."""
    field = acts.solenoidFieldMap(rlim=(0, 1200 * MM), zlim=(-3200 * MM, 3200 * MM), nbins=(60, 160), field=COIL)
    cache = field.makeCache(acts.MagneticFieldContext())
    lines = []
    for r in np.arange(0, 1161, 40.0):
        for z in np.arange(-3160, 3161, 40.0):
            b = field.getField(acts.Vector3(r, 0, z), cache)
            lines.append(f"{r:.6g} {z:.6g} {b[0] / TESLA:.6g} {b[2] / TESLA:.6g}\n")
    return lines


if __name__ == "__main__":
    Path(sys.argv[1]).write_text("".join(rows()))
