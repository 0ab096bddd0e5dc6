"""The hits of an event as track builders take them: measurements, with the axes and errors of their modules."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from domainpar.common.compiling import compiled
from domainpar.tracking.events import detector
from domainpar.tracking.events.field import Field
from domainpar.tracking.events.graph import BoolArray, FloatArray, IntArray, surface_numbers, volumes_and_layers
from domainpar.tracking.reco.ckf.detector_layout import NOWHERE, Layout, trackml
from domainpar.tracking.reco.kalman import HIT_DTYPE, UNMEASURED

OFF_MODULE = 0.5
"""mm in front of a module, or beside it, at which a hit is still on it."""


@dataclass(frozen=True, eq=False)
class TrackHits:
    """What track builders know of the hits of an event, in the user's order.

    Attributes:
        position: x, y, z of each hit in mm, [N, 3]; None without a geometry.
        surface: Volume and layer of each hit as one number, int64 [N]; 0 for all where there are none.
        module: Module of each hit within its surface, [N]; 0 where it is unknown.
        field: The field, or what `Field.of` makes one of.
        layout: The surfaces; by default those of TrackML.
        measured: Axes and errors of each hit (`Hits.measured`), [N, 8]; NaN where they are those of the modules of
            `detector.geometry` and of the surfaces: across, and along z of a barrel or r of a disk. None: of all.
    """

    position: FloatArray | None
    surface: IntArray
    module: IntArray
    field: float | FloatArray | Field = 2.0
    layout: Layout | None = None
    measured: FloatArray | None = None

    def __len__(self) -> int:
        return len(self.surface)

    @classmethod
    def of(
        cls,
        position: FloatArray | None,
        volume: IntArray,
        layer: IntArray,
        module: IntArray,
        field: Field | None = None,
        layout: Layout | None = None,
        measured: FloatArray | None = None,
    ) -> TrackHits:
        """From the columns of an event; in the field of the TrackML events by default."""
        field = detector.geometry().field if field is None else field
        return cls(position, surface_numbers(volume, layer), module, field, layout, measured)

    def take(self, kept: BoolArray | IntArray) -> TrackHits:
        """Some of them, in their order."""
        position = None if self.position is None else self.position[kept]
        measured = None if self.measured is None else self.measured[kept]
        some = replace(self, position=position, surface=self.surface[kept], module=self.module[kept], measured=measured)
        computed = (name for name in ("positions", "distance", "table") if name in vars(self))
        vars(some).update({name: vars(self)[name][kept] for name in computed})
        return some

    @cached_property
    def surfaces(self) -> Layout:
        """The surfaces."""
        return self.layout or trackml()

    @cached_property
    def places(self) -> npt.NDArray[np.void]:
        """Those of `table`: the surfaces, and then `NOWHERE`, `PLACE_DTYPE` [S + 1]."""
        return np.append(self.surfaces.places, NOWHERE)

    @cached_property
    def distance(self) -> npt.NDArray[np.float64]:
        """Square of each hit's distance from the origin, float64 [N]."""
        return np.asarray(np.sum(self.positions**2, axis=1))

    @cached_property
    def positions(self) -> npt.NDArray[np.float64]:
        """x, y, z, float64 [N, 3].

        Raises:
            ValueError: If there are none, not three to each hit, or one is not finite.
        """
        if self.position is None:
            raise ValueError("tracks are followed and fitted along helices, but their hits have no positions")
        position = np.ascontiguousarray(self.position, np.float64)
        if position.shape != (len(self), 3):
            raise ValueError(f"positions have shape {position.shape}; expected x, y, z of each of {len(self)} hits.")
        broken = np.flatnonzero(~np.isfinite(position).all(axis=1))
        if len(broken):
            raise ValueError(f"{len(broken)} positions are not finite, first at row {broken[0]}; remove these hits.")
        return position

    @cached_property
    def table(self) -> npt.NDArray[np.void]:
        """The measurements, in the user's order, `HIT_DTYPE` [N].

        Of a hit on no known surface the axes lie across its direction from the origin.

        Raises:
            ValueError: If there are no positions, shapes do not agree, or a position is not finite.
        """
        if np.shape(self.module) != (len(self),):
            raise ValueError(f"module has shape {np.shape(self.module)} for {len(self)} hits; give one to each hit.")
        hits = np.zeros(len(self), HIT_DTYPE)
        hits["x"], hits["y"], hits["z"] = self.positions.T
        hits["r"], hits["phi"] = np.hypot(hits["x"], hits["y"]), np.arctan2(hits["y"], hits["x"])
        hits["module"] = self.module
        rows = self.surfaces.rows_of(*volumes_and_layers(self.surface))[0]
        hits["surface"] = np.where(rows < 0, len(self.places) - 1, rows)
        for name in ("var_u", "var_v", "thickness"):
            hits[name] = self.places[name][hits["surface"]]
        geometry = detector.geometry()
        _set_axes(hits, self.places, geometry.surfaces, geometry.groups, geometry.modules, self.surfaces.of_modules)
        if self.measured is not None:
            measured = np.asarray(self.measured, np.float64)
            has_axes = np.isfinite(measured[:, :6]).all(axis=1)
            hits["u"][has_axes], hits["v"][has_axes] = measured[has_axes, :3], measured[has_axes, 3:6]
            has_errors = ~np.isnan(measured[:, 6:]).any(axis=1)
            hits["var_u"][has_errors], hits["var_v"][has_errors] = (
                np.minimum(measured[has_errors, 6:], UNMEASURED).T ** 2
            )
            hits["thickness"][has_errors] = 0.0
        hits["w"] = np.cross(hits["u"], hits["v"])
        return hits

    def by_surface(self) -> tuple[npt.NDArray[np.void], IntArray, IntArray]:
        """`table` sorted by (surface, phi, z, r), whatever order the hits come in.

        Returns:
            `HIT_DTYPE` [N]; the first hit of each surface, and N, int64 [S + 1]; the user's row of each, int64 [N].

        Raises:
            ValueError: As `table`, or if hits lie on no known surface, or elsewhere than their surfaces.
        """
        hits, layout = self.table, self.surfaces
        layout.surface_of(*volumes_and_layers(self.surface), self.positions)
        # By all columns: the order of the user's hits must not decide anything.
        rows = np.lexsort((hits["module"], hits["r"], hits["z"], hits["phi"], hits["surface"]))
        return hits[rows], np.searchsorted(hits["surface"][rows], np.arange(len(layout.places) + 1)), rows

    def outward(self, track: IntArray, rows: IntArray | None = None) -> IntArray:
        """Places in `track` of the hits on tracks, track after track, each outward from the origin, int64 [n].

        Args:
            track: Track of each hit, -1 for none, [N], or of each of `rows`.
            rows: Hits, int64; by default each once.

        Raises:
            ValueError: If there are no positions, or not as many tracks as hits.
        """
        rows = np.arange(len(self)) if rows is None else rows
        if np.shape(track) != rows.shape:
            raise ValueError(f"track ids have shape {np.shape(track)} for {len(rows)} hits; give one to each hit.")
        # By azimuth where two are as far away: the order of the user's hits must not decide anything.
        x, y, _ = self.positions[rows].T
        order = np.lexsort((np.arctan2(y, x), self.distance[rows], track))
        return np.asarray(order[track[order] >= 0])

    def by_track(
        self, track: IntArray, num_tracks: int, rows: IntArray | None = None
    ) -> tuple[IntArray, IntArray, IntArray]:
        """The hits of each track, outward from the origin, in whatever order they come.

        Args:
            track: Track of each hit, in [0, num_tracks), or -1 for none, [N], or of each of `rows`.
            num_tracks: Number of tracks T.
            rows: Hits, int64, where some lie on several tracks; by default each once.

        Returns:
            Rows of the hits, track after track, int64 [n]; the first of each track, and n, int64 [T + 1]; places of
            these hits in `track`, int64 [n].

        Raises:
            ValueError: As `outward`, or if a track id is out of range.
        """
        if len(track) and not -1 <= track.min() <= track.max() < num_tracks:
            raise ValueError(
                f"track ids run from {track.min()} to {track.max()}; with {num_tracks} tracks they are -1 (none) or "
                f"in [0, {num_tracks})."
            )
        places = self.outward(track, rows)
        ptr = np.searchsorted(track[places], np.arange(num_tracks + 1))
        return places if rows is None else rows[places], ptr, places


@compiled
def _set_axes(hits: Any, places: Any, surfaces: Any, groups: Any, modules: Any, of_modules: bool) -> None:
    """The axes of each hit: those of the module that it lies on, or of its surface; the last place is no surface."""
    for i in range(len(hits)):
        hit = hits[i]
        cosine, sine = np.cos(hit.phi), np.sin(hit.phi)
        hit.u[0], hit.u[1] = -sine, cosine
        if hit.surface == len(places) - 1:
            size = max(np.hypot(hit.r, hit.z), 1e-9)
            hit.v[0], hit.v[1], hit.v[2] = -cosine * hit.z / size, -sine * hit.z / size, hit.r / size
            continue
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
