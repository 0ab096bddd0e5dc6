"""Candidate edges in CSV files: edge0, edge1 and weight, as ACTS writes graphs (`CsvGnnGraphWriter`).

    event000000007-graph.csv              edge0 and edge1 are rows of the event's hits, weight is a score

They are read in place of edges that are found here.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np

from domainpar.common.problems import EventPlace, Problem
from domainpar.tracking.events.graph import Hits, check_ends
from partitioners.topology import FloatArray, IntArray

SUFFIX = "-graph.csv"
_COLUMNS = ("edge0", "edge1", "weight")


class GivenEdges:
    """Candidate edges of files, one an event (see `construct.Candidates`).

    Args:
        directory: Where they lie.
    """

    def __init__(self, directory: str | Path) -> None:
        self._directory = Path(directory)

    @property
    def settings(self) -> dict[str, Any]:
        """What decides the edges, besides the files."""
        return {"edges_from": "files"}

    def path(self, event: str) -> Path:
        """The file of an event by its name; an event of a mere number may have one with nine digits.

        Raises:
            Problem: If there is none.
        """
        plain = self._directory / f"event{event}{SUFFIX}"
        padded = self._directory / f"event{event.zfill(9)}{SUFFIX}"
        found = padded if padded.is_file() and not plain.is_file() else plain
        if not found.is_file():
            hint = f"each event has one in --edges-from, event<name>{SUFFIX} with columns edge0, edge1"
            raise EventPlace(event, found).problem("no such file", hint)
        return found

    def edges(self, hits: Hits, cylinder: FloatArray) -> IntArray:
        """The edges of an event as its file has them, from edge0 to edge1; weights are left alone.

        Raises:
            Problem: If there is no such file, it lacks a column, or an edge names a hit that does not exist.
        """
        return read_edges(self.path(hits.event_id), hits.event_id, len(hits))


def read_edges(path: Path, event: str, num_hits: int) -> IntArray:
    """The edges of one file, int64 [2, E].

    Raises:
        Problem: As `GivenEdges.edges`.
    """
    place = EventPlace(event, path)
    try:
        with path.open(encoding="utf-8-sig") as file:
            names = [name.strip() for name in file.readline().split(",")]
            if absent := [name for name in _COLUMNS[:2] if name not in names]:
                found, hint = ", ".join(names), "the first line names the columns: edge0,edge1,weight"
                raise place.problem(f"no column {absent[0]}; found {found}", hint)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)  # of a file with no edges
                # All columns, so that a line that is cut off does not pass. Floats hold whole numbers to 2**53.
                table = np.loadtxt(file, np.float64, delimiter=",", comments=None, ndmin=2)
    except (OSError, ValueError) as error:
        if isinstance(error, Problem):
            raise
        raise place.problem(f"cannot be read: {error}", "expected are lines of numbers: edge0,edge1,weight") from error
    if table.size and table.shape[1] != len(names):
        raise place.problem(f"lines have {table.shape[1]} numbers, the first line names {len(names)} columns")
    ends = table.reshape(-1, len(names))[:, [names.index(name) for name in _COLUMNS[:2]]].T
    if not np.array_equal(ends, np.rint(ends)) or (np.abs(ends) >= 2.0**53).any():
        raise place.problem("edge0 and edge1 are not whole numbers", "they are rows of the event's hits, from 0")
    edge_index = np.ascontiguousarray(ends.astype(np.int64))
    check_ends(place, "edge0, edge1", edge_index, num_hits)
    return edge_index
