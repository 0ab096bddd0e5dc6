"""Measurements: hits with the axes and errors along which their modules measure, by the surfaces of a detector."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from domainpar.common.compiling import compiled
from domainpar.tracking.events import detector
from domainpar.tracking.events.graph import FloatArray, IntArray
from domainpar.tracking.reco.ckf.layout import Layout
from domainpar.tracking.reco.helix import check_finite, check_positions
from domainpar.tracking.reco.kalman import HIT_DTYPE, UNMEASURED

OFF_MODULE = 0.5
"""mm in front of a module, or beside it, at which a hit is still on it."""


def table_of(
    position: FloatArray,
    volume: IntArray,
    layer: IntArray,
    module: IntArray,
    layout: Layout,
    measured: FloatArray | None = None,
    on_surfaces: bool = True,
) -> tuple[npt.NDArray[np.void], IntArray, IntArray]:
    """Sort the hits of an event by (surface, phi, z, r), whatever order they come in.

    Args:
        position, volume, layer, module: Of each hit, as for `find_tracks`.
        layout: The surfaces.
        measured: Axes and errors that are told (`Hits.measured`), [N, 8]; what is not, NaN, is that of the modules of
            `detector.geometry` and of the surfaces: across, and along z of a barrel or r of a disk.
        on_surfaces: Refuse hits that lie elsewhere than their surfaces, which no track would meet.

    Returns:
        `HIT_DTYPE` [N]; the first hit of each surface, and N, int64 [S + 1]; the caller's row of each, int64 [N].

    Raises:
        ValueError: If shapes do not agree, a position is not finite, or hits lie on none of the surfaces.
    """
    position = np.asarray(position, np.float64)
    check_positions(position)
    for name, column in {"volume": volume, "layer": layer, "module": module}.items():
        if np.shape(column) != (len(position),):
            raise ValueError(f"{name} has shape {np.shape(column)} for {len(position)} hits; give one to each hit.")
    check_finite(position)
    hits = np.zeros(len(position), HIT_DTYPE)
    hits["x"], hits["y"], hits["z"] = position.T
    hits["r"], hits["phi"] = np.hypot(hits["x"], hits["y"]), np.arctan2(hits["y"], hits["x"])
    hits["module"] = module
    hits["surface"] = layout.surface_of(np.asarray(volume), np.asarray(layer), position if on_surfaces else None)
    of_surface = layout.places[hits["surface"]]
    for name in ("var_u", "var_v", "thickness"):
        hits[name] = of_surface[name]
    geometry = detector.geometry()
    _set_axes(hits, layout.places, geometry.surfaces, geometry.groups, geometry.modules, layout.of_modules)
    if measured is not None:
        measured = np.asarray(measured, np.float64)
        told = np.isfinite(measured[:, :6]).all(axis=1)
        hits["u"][told], hits["v"][told] = measured[told, :3], measured[told, 3:6]
        told = ~np.isnan(measured[:, 6:]).any(axis=1)
        hits["var_u"][told], hits["var_v"][told] = np.minimum(measured[told, 6:], UNMEASURED).T ** 2
        hits["thickness"][told] = 0.0
    hits["w"] = np.cross(hits["u"], hits["v"])
    # By all columns: the order of the caller's hits must not decide anything.
    rows = np.lexsort((hits["module"], hits["r"], hits["z"], hits["phi"], hits["surface"]))
    hits = hits[rows]
    return hits, np.searchsorted(hits["surface"], np.arange(len(layout.places) + 1)), rows


@compiled
def _set_axes(hits: Any, places: Any, surfaces: Any, groups: Any, modules: Any, of_modules: bool) -> None:
    """The axes of each hit: those of the module that it lies on, or of its surface."""
    for i in range(len(hits)):
        hit = hits[i]
        cosine, sine = np.cos(hit.phi), np.sin(hit.phi)
        hit.u[0], hit.u[1] = -sine, cosine
        if places[hit.surface].is_barrel:
            hit.v[2] = 1.0
        else:
            hit.v[0], hit.v[1] = cosine, sine
        if not of_modules:
            continue
        nearest = OFF_MODULE
        surface = surfaces[hit.surface]
        for g in range(surface.first_group, surface.first_group + surface.num_groups):
            group = groups[g]
            turn = int(np.floor((hit.phi + np.pi) / (2 * np.pi) * group.num_phi))
            row = int(np.floor(hit.z / group.row_pitch + 0.5 * group.num_rows)) if group.is_barrel else 0
            for r in range(max(row - 1, 0), min(row + 2, group.num_rows)):
                for j in range(turn - group.phi_reach, turn + group.phi_reach + 1):
                    module = modules[group.first_module + r * group.num_phi + j % group.num_phi]
                    x, y, z = hit.x - module.centre[0], hit.y - module.centre[1], hit.z - module.centre[2]
                    away = abs(x * module.normal[0] + y * module.normal[1] + z * module.normal[2])
                    u = x * module.u_axis[0] + y * module.u_axis[1]
                    v = x * module.v_axis[0] + y * module.v_axis[1] + z * module.v_axis[2]
                    half = max(module.half_inner, module.half_outer) + OFF_MODULE
                    if away < nearest and abs(u) < half and abs(v) < module.half_v + OFF_MODULE:
                        nearest = away
                        for n in range(3):
                            hit.u[n], hit.v[n] = module.u_axis[n], module.v_axis[n]
