"""Node and edge features of acorn events, as its training makes them: columns of the file over scales.

Edge features that the file lacks are differences of scaled values, outer minus inner hit, with r, phi, z and eta of a
hit and [ ] the mean of both:

    dr, dphi, dz, deta      dphi wrapped into [-pi, pi) first
    phislope                dphi / dr, at most 100; 0 for 0 / 0
    rphislope               [r] * phislope

as in GNN4ITkTeam/CommonFramework, `acorn/utils/loading_utils.py`, but for scales of phi other than pi, with which
differences there are wrapped at the wrong angle.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from domainpar.events.acorn_columns import Columns
from domainpar.events.construct import NODE_SCALE, SLOPE_LIMIT, TWO_PI
from domainpar.events.graph import FloatArray, IntArray

Float64 = npt.NDArray[np.float64]

SCALES = {"r": NODE_SCALE[0], "phi": NODE_SCALE[1], "z": NODE_SCALE[2], "eta": 1.0}
EDGE_FEATURES = ("dr", "dphi", "dz", "deta", "phislope", "rphislope")
# With clusters, a hit of these regions (strip endcaps) has none of its own: acorn's network takes the hit's instead.
_STRIP_ENDCAPS = (2, 6)


def wrapped(angle: Float64) -> Float64:
    """Angles in [-pi, pi)."""
    return np.asarray((angle + np.pi) % TWO_PI - np.pi)


def cylinder_of(columns: Columns) -> dict[str, Float64]:
    """r, phi in [-pi, pi), z in mm and rad, x, y and eta of each hit: of the file, or from what it has.

    A hit's y has no name of its own in acorn (`y` is the label of an edge): it is r sin(phi).

    Raises:
        Problem: If the columns do not tell, are not finite, or are not in mm and rad.
    """
    place = {name: columns.get("hit", name).astype(np.float64) for name in "xyz" if columns.has("hit", name)}
    if columns.has("hit", "r") and columns.has("hit", "phi"):
        r, phi = (columns.get("hit", name).astype(np.float64) for name in ("r", "phi"))
    elif "x" in place and "y" in place:
        r, phi = np.hypot(place["x"], place["y"]), np.arctan2(place["y"], place["x"])
    else:
        raise columns.place.problem(
            f"positions need r and phi, or x and hit_y, of every hit; found columns {columns.names('hit')}"
        )
    z = columns.get("hit", "z").astype(np.float64)
    _check_units(columns, r, phi, z, place.get("x"))
    with np.errstate(divide="ignore", invalid="ignore"):
        eta = columns.get("hit", "eta").astype(np.float64) if columns.has("hit", "eta") else np.arcsinh(z / r)
    # Computed, and not the file's x: its three numbers would not lie on one point to the last digit.
    return {"r": r, "phi": wrapped(phi), "z": z, "x": r * np.cos(phi), "y": r * np.sin(phi), "eta": eta}


def _check_units(columns: Columns, r: Float64, phi: Float64, z: Float64, x: Float64 | None) -> None:
    for name, values in (("r", r), ("phi", phi), ("z", z)):
        bad = np.flatnonzero(~np.isfinite(values))
        if len(bad):
            raise columns.place.problem(
                f"{name} of {len(bad)} hits is not finite, the first is {values[bad[0]]} in row {bad[0]}",
                "repair or remove it in the input",
            )
    if len(r) == 0:
        return
    if np.abs(phi).max() > TWO_PI * (1 + 1e-6):
        raise columns.place.problem(f"phi goes up to {np.abs(phi).max():.6g}, expected radians")
    if r.max() < 10:
        raise columns.place.problem(
            f"the largest r is {r.max():.6g}, expected mm",
            "acorn scales features when it loads a file, on disk they are not",
        )
    if x is not None and (far := np.abs(x - r * np.cos(phi)).max()) > 1 + 1e-3 * r.max():
        raise columns.place.problem(f"x and r cos(phi) differ by up to {far:.4g} mm", "are they in one unit?")


def node_features(
    columns: Columns, cylinder: Mapping[str, Float64], names: Sequence[str], scales: Sequence[float]
) -> FloatArray:
    """Columns over scales, float32 [N, F].

    Of hits in strip endcaps (`region` 2 or 6), `cluster_r_1` and `cluster_r_2` are r over its scale, and so on, as
    acorn's InteractionGNN2 makes them before anything else.

    Raises:
        Problem: If a column is missing.
    """
    scaled = {name: _node_column(columns, cylinder, name) / scale for name, scale in zip(names, scales)}
    if columns.has("hit", "region"):
        alone = np.isin(columns.get("hit", "region"), _STRIP_ENDCAPS)
        for name in names:
            hit_has = name.removeprefix("cluster_")[:-2]
            if name.startswith("cluster_") and name[-2:] in ("_1", "_2") and hit_has in scaled:
                scaled[name] = np.where(alone, scaled[hit_has], scaled[name])
    return _as_features([scaled[name] for name in names], columns.num_hits)


def _node_column(columns: Columns, cylinder: Mapping[str, Float64], name: str) -> Float64:
    return cylinder[name] if name in cylinder else columns.get("hit", name).astype(np.float64)


def edge_features(
    columns: Columns,
    cylinder: Mapping[str, Float64],
    names: Sequence[str],
    edge_scales: Sequence[float],
    node_scales: Mapping[str, float],
) -> FloatArray:
    """Columns of the file, or else computed ones, over scales, float32 [E, G].

    Args:
        columns: The event.
        cylinder: From `cylinder_of`.
        names: Which, in order.
        edge_scales: Divisor of each.
        node_scales: Scales of r, phi, z and eta within computed ones.

    Raises:
        Problem: If one is neither in the file nor one of `EDGE_FEATURES`.
    """
    scaled = {name: cylinder[name] / node_scales[name] for name in ("r", "z", "eta")}
    computed = _computed(scaled, cylinder["phi"], node_scales["phi"], columns.edge_index)
    values = []
    for name, scale in zip(names, edge_scales):
        if columns.has("edge", name):
            column = columns.get("edge", name).astype(np.float64)
        elif name in computed:
            column = computed[name]
        else:
            raise columns.place.problem(
                f"no column {name} of candidate edges; found {columns.names('edge')}, and computed can be "
                f"{', '.join(EDGE_FEATURES)}"
            )
        values.append(_tamed(name, column) / scale)
    return _as_features(values, columns.edge_index.shape[1])


def _computed(
    scaled: Mapping[str, Float64], phi: Float64, phi_scale: float, edge_index: IntArray
) -> dict[str, Float64]:
    src, dst = edge_index
    with np.errstate(divide="ignore", invalid="ignore"):  # the outer of two hits on the beam axis has no eta
        dr, dz, deta = (scaled[name][dst] - scaled[name][src] for name in ("r", "z", "eta"))
        dphi = wrapped(phi[dst] - phi[src]) / phi_scale
        slope = _tamed("phislope", dphi / dr)
    mean_r = 0.5 * (scaled["r"][src] + scaled["r"][dst])
    return dict(zip(EDGE_FEATURES, (dr, dphi, dz, deta, slope, mean_r * slope)))


def _tamed(name: str, values: Float64) -> Float64:
    """Slopes are at most 100 and never undefined; other columns stay as they are."""
    if name == "phislope":
        return np.clip(np.nan_to_num(values, nan=0.0, posinf=SLOPE_LIMIT, neginf=-SLOPE_LIMIT), -100.0, 100.0)
    return np.nan_to_num(values, nan=0.0, posinf=np.inf, neginf=-np.inf) if name == "rphislope" else values


def _as_features(values: Sequence[Float64], count: int) -> FloatArray:
    with np.errstate(over="ignore"):  # what float32 cannot hold becomes infinite, and is refused as that
        return np.stack(values, axis=1).astype(np.float32) if values else np.zeros((count, 0), np.float32)
