"""Candidate edges in CSV files: edge0, edge1 and weight, as ACTS writes graphs (`CsvGnnGraphWriter`).

    event000000007-graph.csv              edge0 and edge1 are rows of the event's hits, weight is a score

They are read in place of edges that are found here.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from domainpar.common.problems import EventPlace
from domainpar.tracking.events.graph import Hits, check_ends
from domainpar.tracking.events.tables import InputTable
from partitioners.topology import FloatArray, IntArray

GRAPH = InputTable("event{}-graph.csv", "edge0, edge1: i8")


class GivenEdges:
    """Candidate edges of files, one an event (see `construct.Candidates`).

    Args:
        directory: Where they lie.
    """

    settings: ClassVar[dict[str, Any]] = {"edges_from": "files"}

    def __init__(self, directory: str | Path) -> None:
        self._directory = Path(directory)

    def path(self, event: str) -> Path:
        """The file of an event by its name; an event of a mere number may have one with nine digits.

        Raises:
            Problem: If there is none.
        """
        for name in (event, event.zfill(9)):
            if (path := GRAPH.find(self._directory, name)) is not None:
                return path
        hint = "each event has one in --edges-from, event<name>-graph.csv with columns edge0, edge1"
        raise EventPlace(event, self._directory / f"event{event}-graph.csv").problem("no such file", hint)

    def edges(self, hits: Hits, cylinder: FloatArray) -> IntArray:
        """The edges of an event as its file has them, from edge0 to edge1, int64 [2, E]; weights are left alone.

        Raises:
            Problem: If there is no such file, it lacks a column, or an edge names a hit that does not exist.
        """
        from domainpar.tracking.events.csv_tables import read_table  # which loads pandas

        path = self.path(hits.event_id)
        edges = read_table(GRAPH, path, hits.event_id)[GRAPH.must].to_numpy().T
        check_ends(EventPlace(hits.event_id, path), "edge0, edge1", edges, len(hits))
        return np.ascontiguousarray(edges)
