"""The columns of an acorn event by their short names, whatever prefix the file gives them.

acorn keeps one value a hit, one a candidate edge or one a *true edge* (a column of `track_edges`: two consecutive hits
of a particle). On disk the names are short; with `variable_with_prefix` they begin with `hit_`, `edge_` or `track_`.
Definitions follow GNN4ITkTeam/CommonFramework, `acorn/utils/loading_utils.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import numpy as np

from domainpar.events.graph import Array, BoolArray, IntArray
from domainpar.events.pyg import as_array
from domainpar.problems import Place

Kind = Literal["hit", "edge", "track"]

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
    if name in _OF_EDGES:
        return "edge", name
    return ("track", name) if name in _OF_TRUE_EDGES else ("hit", name)


class Columns:
    """The columns of one event. Each is looked at when it is asked for: files may hold others, of any kind.

    Args:
        entries: Names and values of the file.
        place: The event and its file.

    Attributes:
        place: The same.
        num_hits: N.
        edge_index: Rows of the two hits of each candidate edge, int64 [2, E].
        track_edges: Rows of the two hits of each true edge, int64 [2, T]; None without truth.
        known: Whether both hits of a true edge are in the event, bool [T]; acorn writes -1 for one that is not.

    Raises:
        Problem: If a column is there twice, there are no hits or candidate edges, or an edge names a hit that does
            not exist.
    """

    def __init__(self, entries: Mapping[str, Any], place: Place) -> None:
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
        self.edge_index = self._ends(entries, "edge_index")
        self.track_edges = None if entries.get("track_edges") is None else self._ends(entries, "track_edges", least=-1)
        self.known: BoolArray = np.zeros(0, np.bool_)
        if self.track_edges is not None:
            self.known = np.asarray((self.track_edges >= 0).all(axis=0))

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
        if (kind, name) not in self._values:
            raise self.place.problem(f"no column {name} of {_PER[kind]}s; found {self.names(kind)}")
        shown = self._names[kind, name]
        values = as_array(self._values[kind, name], shown, self.place)
        count = {
            "hit": self.num_hits,
            "edge": self.edge_index.shape[1],
            "track": 0 if self.track_edges is None else self.track_edges.shape[1],
        }[kind]
        if values.shape != (count,) or values.dtype.kind not in "biuf":
            raise self.place.problem(
                f"{shown} is {values.dtype} of shape {list(values.shape)}, expected one number per "
                f"{_PER[kind]}, [{count}]"
            )
        return values

    def _count_hits(self) -> int:
        for name in ("hit_id", "r", "x", "z"):
            if self.has("hit", name):
                values = as_array(self._values["hit", name], self._names["hit", name], self.place)
                if values.ndim != 1:
                    raise self.place.problem(f"{name} has shape {list(values.shape)}, expected one per hit")
                return len(values)
        raise self.place.problem(f"no hits; found columns {self.names('hit')}, expected at least r, phi and z")

    def _ends(self, entries: Mapping[str, Any], name: str, least: int = 0) -> IntArray:
        if entries.get(name) is None:
            raise self.place.problem(
                f"no {name}; found {sorted(map(str, entries))}",
                "a file of acorn's data reading has hits only: give the directory of a later stage, in which candidate "
                "edges were built",
            )
        ends = as_array(entries[name], name, self.place)
        if ends.ndim != 2 or len(ends) != 2 or not np.issubdtype(ends.dtype, np.integer):
            raise self.place.problem(f"{name} is {ends.dtype} of shape {list(ends.shape)}, expected integers")
        bad = np.flatnonzero(((ends < least) | (ends >= self.num_hits)).any(axis=0))
        if len(bad):
            src, dst = ends[:, bad[0]].tolist()
            raise self.place.problem(
                f"{name} names hits that do not exist in {len(bad)} columns, the first is {bad[0]}: "
                f"{src} -> {dst}; the event has hits 0 to {self.num_hits - 1}"
            )
        return ends.astype(np.int64)
