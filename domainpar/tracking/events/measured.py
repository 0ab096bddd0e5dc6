"""How a hit is measured, of files: the axes of its module, and the errors along them (`Hits.measured`)."""

from __future__ import annotations

import numpy as np
import pandas as pd

from domainpar.common.problems import EventPlace
from domainpar.tracking.events.graph import FloatArray, IntArray
from domainpar.tracking.events.sources import InputFiles
from domainpar.tracking.events.tables import InputTable

SIGMAS, AXES = ("sigma_u", "sigma_v"), ("u_x", "u_y", "u_z", "v_x", "v_y", "v_z")
"""Columns that a table of hits may have, for any detector: errors in mm, and unit vectors along which they are."""

MEASURED_COLUMNS = f"{', '.join(SIGMAS)}: f8 mm; {', '.join(AXES)}: f8"
"""These columns, for a table of hits."""

_ROTATIONS = tuple(f"rot_{axis}{of}" for of in "uv" for axis in "xyz")
MODULE_KEY = ("volume_id", "layer_id", "module_id")
_ROTATED = InputTable("detectors.csv", "", f"{', '.join(_ROTATIONS)}: f8; {', '.join(MODULE_KEY)}: i8; geometry_id: u8")
"""The table of the modules, the same for all events of a directory, as TrackML and ACTS write it."""

_UNIT = 1e-3  # how far from 1 the length of an axis may be, and from 0 the product of both


def measured(hits: pd.DataFrame, variances: FloatArray | None, place: EventPlace, files: InputFiles | None
             ) -> FloatArray | None:  # fmt: skip
    """How each hit is measured, as far as files have it, float32 [N, 8]; None where they have nothing.

    Args:
        hits: The table of hits, with any of `SIGMAS` and `AXES`, and a column `geometry_id` or volume_id, layer_id and
            module_id, [N].
        variances: Along both axes in mm^2, [N, 2]; 0 of the second where the hit measures the first alone. None: those
            of `SIGMAS` of the table.
        place: The event and the file of its hits.
        files: The files of the event, whose table of modules has their rotations; None: they are known.

    Raises:
        Problem: If an error is not positive, axes are not unit vectors at right angles, or modules are not listed.
    """
    axes_and_errors = np.full((len(hits), 8), np.nan, np.float32)
    if set(AXES) <= set(hits):
        axes_and_errors[:, :6] = hits[list(AXES)]
    elif files is not None:
        key = ["geometry_id"] if "geometry_id" in hits else [*MODULE_KEY]
        read = files.read(_ROTATED, unique=key)
        if read is not None and set(_ROTATIONS) <= set(read[0]):
            modules, of_modules = read
            if absent := [name for name in key if name not in modules]:
                raise of_modules.problem(f"no column {', '.join(absent)}, by which hits name their module")
            axes_and_errors[:, :6] = modules[list(_ROTATIONS)].to_numpy()[rows_of_modules(modules, hits, key, place)]
    u, v = axes_and_errors[:, :3].astype(np.float64), axes_and_errors[:, 3:6].astype(np.float64)
    lengths = np.stack([np.linalg.norm(u, axis=1) - 1, np.linalg.norm(v, axis=1) - 1, np.sum(u * v, axis=1)])
    if len(bad := np.flatnonzero((np.abs(lengths) > _UNIT).any(axis=0))):
        what = (
            f"{len(bad)} hits are measured along axes that are no unit vectors at right angles, first in row {bad[0]}"
        )
        raise place.problem(what, f"columns are {', '.join(AXES)}")
    if variances is None and set(SIGMAS) <= set(hits):
        variances = hits[list(SIGMAS)].to_numpy(np.float64) ** 2 * np.sign(hits[list(SIGMAS)])
    if variances is not None:
        if len(bad := np.flatnonzero(~((variances >= 0).all(axis=1) & (variances[:, 0] > 0)))):
            what = (
                f"{len(bad)} hits have an error that is not positive, first in row {bad[0]}: {variances[bad[0]]} mm^2"
            )
            raise place.problem(what, "the second may be 0, where a hit measures along the first axis alone")
        axes_and_errors[:, 6:] = np.sqrt(np.where(variances > 0, variances, np.inf))
    return None if np.isnan(axes_and_errors).all() else axes_and_errors


def rows_of_modules(modules: pd.DataFrame, hits: pd.DataFrame, key: list[str], place: EventPlace) -> IntArray:
    """The row of each hit's module in a table of modules, [N], by the columns of a key, which both have.

    Raises:
        Problem: Of the place of the hits, if a module is not listed.
    """
    rows = pd.MultiIndex.from_frame(modules[key]).get_indexer(pd.MultiIndex.from_frame(hits[key]))
    if (rows < 0).any():
        first = ", ".join(map(str, hits[key].to_numpy()[rows < 0][0].tolist()))
        what = f"detectors.csv does not list the module of {int((rows < 0).sum())} of {len(hits)} hits"
        hint = "take the file of the same detector; or remove it, and leave --cluster-features out"
        raise place.problem(f"{what}, the first is {', '.join(key)} {first}", hint)
    return np.asarray(rows)
