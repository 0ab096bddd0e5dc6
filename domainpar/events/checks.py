"""What every event must satisfy before anything is computed from it. Checked where data enters, once."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from domainpar.events.graph import EventGraph, FloatArray, Hits
from domainpar.events.place import Place
from domainpar.words import several


def check_graph(graph: EventGraph, place: Place) -> None:
    """Refuse a graph whose arrays do not fit together or hold values that nobody can compute with.

    Args:
        graph: The event.
        place: The event and its file.

    Raises:
        Problem: Naming event, file, the array, and the first bad value with its place in it.
    """
    num_nodes, num_edges = graph.num_nodes, int(np.shape(graph.edge_index)[-1])
    _check_hits(graph.hits, place)
    _check_shape(place, "features", graph.features, (num_nodes, len(graph.feature_names)))
    _check_shape(place, "edge_index", graph.edge_index, (2, num_edges))
    _check_shape(place, "edge_features", graph.edge_features, (num_edges, len(graph.edge_feature_names)))
    _check_edge_index(graph.edge_index, num_nodes, place)
    check_finite(place, "features", graph.features)
    check_finite(place, "edge_features", graph.edge_features)
    if graph.label is not None:
        _check_shape(place, "label", graph.label, (num_edges,))
        _check_labels(graph.label, place)


def check_finite(place: Place, name: str, values: FloatArray) -> None:
    """Refuse NaN and infinity, naming the first bad row."""
    # A sum is non-finite whenever a term is, and eight times faster than testing every term.
    # It may overflow without a bad term, so only its "finite" is a verdict.
    with np.errstate(over="ignore", invalid="ignore"):
        if np.isfinite(values.sum()):
            return
    bad = np.argwhere(~np.isfinite(values))
    if len(bad):
        first = tuple(int(i) for i in bad[0])
        raise place.problem(
            f"{name} holds {several(len(bad), 'value')} not finite, the first is {values[first]} at {list(first)}",
            "repair or remove it in the input",
        )


def _check_hits(hits: Hits, place: Place) -> None:
    for name in ("volume", "layer", "module", "particle_id", "weight"):
        values = getattr(hits, name)
        if values is not None:
            _check_shape(place, name, values, (len(hits),))
    if hits.position is not None:
        _check_shape(place, "position", hits.position, (len(hits), 3))
        check_finite(place, "position", hits.position)
    if hits.weight is not None:
        check_finite(place, "weight", hits.weight)


def _check_shape(place: Place, name: str, values: npt.NDArray[Any], expected: tuple[int, ...]) -> None:
    if values.shape != expected:
        raise place.problem(f"{name} has shape {list(values.shape)}, expected {list(expected)}")


def _check_edge_index(edge_index: npt.NDArray[Any], num_nodes: int, place: Place) -> None:
    if not np.issubdtype(edge_index.dtype, np.integer):
        raise place.problem(f"edge_index has dtype {edge_index.dtype}, expected integers")
    bad = np.flatnonzero(((edge_index < 0) | (edge_index >= num_nodes)).any(axis=0))
    if len(bad):
        src, dst = (int(i) for i in edge_index[:, bad[0]])
        raise place.problem(
            f"edge_index names nodes that do not exist in {len(bad)} edges, the first is edge {bad[0]}: "
            f"{src} -> {dst}; the event has nodes 0 to {num_nodes - 1}"
        )


def _check_labels(label: npt.NDArray[Any], place: Place) -> None:
    bad = np.flatnonzero((label != 0) & (label != 1))
    if len(bad):
        raise place.problem(f"label of edge {bad[0]} is {label[bad[0]]}, expected 0 or 1 ({len(bad)} such edges)")
