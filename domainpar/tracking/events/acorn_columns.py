"""The columns of an acorn event by their short names, whatever prefix the file gives them, and the features of them.

acorn keeps one value a hit, one a candidate edge or one a *true edge* (a column of `track_edges`: two consecutive hits
of a particle). On disk the names are short; with `variable_with_prefix` they begin with `hit_`, `edge_` or `track_`.

Features are columns of the file over scales, as acorn's training makes them. Edge features that the file lacks are
differences of scaled values, outer minus inner hit, with r, phi, z and eta of a hit and [ ] the mean of both:

    dr, dphi, dz, deta      dphi wrapped into [-pi, pi) first
    phislope                dphi / dr, at most 100; 0 for 0 / 0
    rphislope               [r] * phislope

Definitions follow GNN4ITkTeam/CommonFramework, `acorn/utils/loading_utils.py`, but for scales of phi other than pi,
with which differences there are wrapped at the wrong angle.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np

from domainpar.common.problems import EventPlace
from domainpar.tracking.events.features import NODE_SCALE, SLOPE_LIMIT
from domainpar.tracking.events.graph import Array, check_array, check_ends
from domainpar.tracking.events.joining import TWO_PI
from domainpar.tracking.events.pyg import as_array
from partitioners.topology import BoolArray, FloatArray, IntArray

Kind = Literal["hit", "edge", "track"]

SCALES = {"r": NODE_SCALE[0], "phi": NODE_SCALE[1], "z": NODE_SCALE[2], "eta": 1.0}
EDGE_FEATURES = ("dr", "dphi", "dz", "deta", "phislope", "rphislope")
# With clusters, a hit of these regions (strip endcaps) has none of its own: acorn's network takes the hit's instead.
_STRIP_ENDCAPS = (2, 6)

_OF_EDGES = ("y", "scores", "weights", "dr", "dphi", "dz", "deta", "phislope", "rphislope")
_OF_TRUE_EDGES = (
    "particle_id", "pt", "radius", "primary", "nhits", "pdgId", "eta_particle", "redundant_split_edges",
    "vx", "vy", "vz", "truth_map",
)  # fmt: skip
# Names whose prefix does not say what they are, or that are not values of hits, edges or true edges at all.
_SPECIAL: dict[str, tuple[Kind, str] | None] = {
    **dict.fromkeys(("edge_index", "track_edges", "event_id", "config", "num_nodes", "time_taken"), None),
    "hit_id": ("hit", "hit_id"),
    "labels": ("hit", "labels"),
    "edge_track_labels": ("hit", "labels"),
    "track_to_edge_map": ("track", "truth_map"),
    "track_particle_id": ("track", "particle_id"),
    "track_particle_eta": ("track", "eta_particle"),
}
_PER: dict[Kind, str] = {"hit": "hit", "edge": "candidate edge", "track": "true edge"}


def short_name(name: str) -> tuple[Kind, str] | None:
    """Kind and short form of a name in a file: `track_particle_pt` is the `pt` of a true edge.

    Returns:
        None for what is no column, such as `edge_index` or `config`. A name without a prefix that acorn does not know
        belongs to hits.
    """
    if name in _SPECIAL:
        return _SPECIAL[name]
    if name.startswith("hit_"):
        return "hit", name.removeprefix("hit_")
    if name.startswith("edge_"):
        return "edge", name.removeprefix("edge_")
    if name.startswith("track_"):
        return "track", name.removeprefix("track_").removeprefix("particle_")
    return ("edge" if name in _OF_EDGES else "track" if name in _OF_TRUE_EDGES else "hit"), name


class Columns:
    """The columns of one event. Each is checked at its first use: files may hold others, of any kind.

    Args:
        entries: Names and values of the file.
        place: The event and its file.

    Attributes:
        place: The same.
        num_hits: N.
        edge_index: Rows of the two hits of each candidate edge, int64 [2, E].
        track_edges: Rows of the two hits of each true edge, int64 [2, T]; None without truth.
        inside: Whether both hits of a true edge are in the event, bool [T]; acorn writes -1 for one that is not.

    Raises:
        Problem: If a column is there twice, there are no hits or candidate edges, or an edge names a hit that does
            not exist.
    """

    def __init__(self, entries: Mapping[str, Any], place: EventPlace) -> None:
        self.place = place
        self._values: dict[tuple[Kind, str], Any] = {}
        self._names: dict[tuple[Kind, str], str] = {}
        for name, value in entries.items():
            key = short_name(str(name))
            if key is None or value is None:
                continue
            if key in self._values:
                raise place.problem(f"{self._names[key]} and {name} are one column", "remove one of them")
            self._values[key], self._names[key] = value, str(name)
        self.num_hits = self._count_hits()
        if entries.get("edge_index") is None:
            raise place.problem(
                f"no edge_index; found {sorted(map(str, entries))}",
                "a file of acorn's data reading has hits only: give the directory of a later stage, in which candidate "
                "edges were built",
            )
        self.edge_index = self._ends(entries["edge_index"], "edge_index")
        self.track_edges: IntArray | None = None
        self.inside: BoolArray = np.zeros(0, np.bool_)
        if entries.get("track_edges") is not None:
            self.track_edges = self._ends(entries["track_edges"], "track_edges", least=-1)
            self.inside = np.asarray((self.track_edges >= 0).all(axis=0))
        self._counts = {"hit": self.num_hits, "edge": self.edge_index.shape[1], "track": len(self.inside)}

    def has(self, kind: Kind, name: str) -> bool:
        """Whether the file has this column."""
        return (kind, name) in self._values

    def names(self, kind: Kind) -> list[str]:
        """Short names of all columns of a kind, sorted."""
        return sorted(name for of, name in self._values if of == kind)

    def get(self, kind: Kind, name: str) -> Array:
        """One column, [N], [E] or [T] by its kind.

        Raises:
            Problem: If the file has no such column (with those it has), or it is not one number a row.
        """
        if not self.has(kind, name):
            raise self.place.problem(f"no column {name} of {_PER[kind]}s; found {self.names(kind)}")
        shown = self._names[kind, name]
        values = as_array(self._values[kind, name], shown, self.place)
        check_array(self.place, shown, values, (self._counts[kind],), f"one number per {_PER[kind]},")
        return values

    def floats(self, kind: Kind, name: str) -> FloatArray:
        """One column like `get`, float64."""
        return self.get(kind, name).astype(np.float64)

    def _count_hits(self) -> int:
        for name in ("hit_id", "r", "x", "z"):
            if self.has("hit", name):
                values = as_array(self._values["hit", name], self._names["hit", name], self.place)
                check_array(self.place, name, values, ("hits",), "one number per hit,")
                return len(values)
        raise self.place.problem(f"no hits; found columns {self.names('hit')}, expected at least r, phi and z")

    def _ends(self, value: Any, name: str, least: int = 0) -> IntArray:
        ends = as_array(value, name, self.place)
        check_ends(self.place, name, ends, self.num_hits, least)
        return ends.astype(np.int64)


# --- features --------------------------------------------------------------------------------------------------------


def wrapped(angle: FloatArray) -> FloatArray:
    """Angles in [-pi, pi)."""
    return np.asarray((angle + np.pi) % TWO_PI - np.pi)


def cylinder_of(columns: Columns) -> dict[str, FloatArray]:
    """r, phi in [-pi, pi), z in mm and rad, x, y and eta of each hit: of the file, or from what it has.

    A hit's y has no name of its own in acorn (`y` is the label of an edge): it is r sin(phi).

    Raises:
        Problem: If columns are missing, are not finite, or are not in mm and rad.
    """
    xy = {name: columns.floats("hit", name) for name in "xy" if columns.has("hit", name)}
    if columns.has("hit", "r") and columns.has("hit", "phi"):
        r, phi = columns.floats("hit", "r"), columns.floats("hit", "phi")
    elif len(xy) == 2:
        r, phi = np.hypot(xy["x"], xy["y"]), np.arctan2(xy["y"], xy["x"])
    else:
        raise columns.place.problem(
            f"positions need r and phi, or x and hit_y, of every hit; found columns {columns.names('hit')}"
        )
    z = columns.floats("hit", "z")
    _check_units(columns.place, r, phi, z, xy.get("x"))
    with np.errstate(divide="ignore", invalid="ignore"):
        eta = columns.floats("hit", "eta") if columns.has("hit", "eta") else np.arcsinh(z / r)
    # Computed, and not the file's x: its three numbers would not lie on one point to the last digit.
    return {"r": r, "phi": wrapped(phi), "z": z, "x": r * np.cos(phi), "y": r * np.sin(phi), "eta": eta}


def _check_units(place: EventPlace, r: FloatArray, phi: FloatArray, z: FloatArray, x: FloatArray | None) -> None:
    for name, values in (("r", r), ("phi", phi), ("z", z)):
        bad = np.flatnonzero(~np.isfinite(values))
        if len(bad):
            raise place.problem(
                f"{name} of {len(bad)} hits is not finite, the first is {values[bad[0]]} in row {bad[0]}",
                "repair or remove it in the input",
            )
    if len(r) == 0:
        return
    if np.abs(phi).max() > TWO_PI * (1 + 1e-6):
        raise place.problem(f"phi goes up to {np.abs(phi).max():.6g}, expected radians")
    if r.max() < 10:
        hint = "acorn scales features when it loads a file, on disk they are not"
        raise place.problem(f"the largest r is {r.max():.6g}, expected mm", hint)
    if x is not None and (far := np.abs(x - r * np.cos(phi)).max()) > 1 + 1e-3 * r.max():
        raise place.problem(f"x and r cos(phi) differ by up to {far:.4g} mm", "are they in one unit?")


def node_features(
    columns: Columns, cylinder: Mapping[str, FloatArray], names: Sequence[str], scales: Sequence[float]
) -> FloatArray:
    """Columns over scales, float32 [N, F].

    Of hits in strip endcaps (`region` 2 or 6), `cluster_r_1` and `cluster_r_2` are r over its scale, and so on, as
    acorn's InteractionGNN2 makes them before anything else.

    Raises:
        Problem: If a column is missing.
    """
    scaled = {
        name: (cylinder[name] if name in cylinder else columns.floats("hit", name)) / scale
        for name, scale in zip(names, scales)
    }
    if columns.has("hit", "region"):
        alone = np.isin(columns.get("hit", "region"), _STRIP_ENDCAPS)
        for name in names:
            hit_has = name.removeprefix("cluster_")[:-2]
            if name.startswith("cluster_") and name[-2:] in ("_1", "_2") and hit_has in scaled:
                scaled[name] = np.where(alone, scaled[hit_has], scaled[name])
    return _as_features([scaled[name] for name in names], columns.num_hits)


def edge_features(
    columns: Columns,
    cylinder: Mapping[str, FloatArray],
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
    src, dst = columns.edge_index
    r, z, eta = (cylinder[name] / node_scales[name] for name in ("r", "z", "eta"))
    with np.errstate(divide="ignore", invalid="ignore"):  # the outer of two hits on the beam axis has no eta
        dr, dz, deta = (scaled[dst] - scaled[src] for scaled in (r, z, eta))
        dphi = wrapped(cylinder["phi"][dst] - cylinder["phi"][src]) / node_scales["phi"]
        slope = _tamed("phislope", dphi / dr)
    computed = dict(zip(EDGE_FEATURES, (dr, dphi, dz, deta, slope, 0.5 * (r[src] + r[dst]) * slope)))
    values = []
    for name, scale in zip(names, edge_scales):
        if not columns.has("edge", name) and name not in computed:
            raise columns.place.problem(
                f"no column {name} of candidate edges; found {columns.names('edge')}, and computed can be "
                f"{', '.join(EDGE_FEATURES)}"
            )
        column = columns.floats("edge", name) if columns.has("edge", name) else computed[name]
        values.append(_tamed(name, column) / scale)
    return _as_features(values, columns.edge_index.shape[1])


def _tamed(name: str, values: FloatArray) -> FloatArray:
    """Slopes are at most 100 and never undefined; other columns stay as they are."""
    if name == "phislope":
        return np.clip(np.nan_to_num(values, posinf=SLOPE_LIMIT, neginf=-SLOPE_LIMIT), -SLOPE_LIMIT, SLOPE_LIMIT)
    return np.nan_to_num(values, posinf=np.inf, neginf=-np.inf) if name == "rphislope" else values


def _as_features(values: Sequence[FloatArray], count: int) -> FloatArray:
    with np.errstate(over="ignore"):  # what float32 cannot hold becomes infinite, and is refused as that
        return np.stack(values, axis=1).astype(np.float32) if values else np.zeros((count, 0), np.float32)
