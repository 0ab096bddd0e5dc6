"""What every event must satisfy before anything is computed from it. Checked where data enters, once."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from domainpar.events.graph import EventGraph, FloatArray, Hits


def check_graph(graph: EventGraph, where: str) -> None:
    """Refuse a graph whose arrays do not fit together or hold values that nobody can compute with.

    Args:
        graph: The event.
        where: What the messages begin with: the event and its file.

    Raises:
        ValueError: Naming `where`, the array, and the first bad place with its value.
    """
    num_nodes, num_edges = graph.num_nodes, int(np.shape(graph.edge_index)[-1])
    _check_hits(graph.hits, where)
    _check_shape(where, "features", graph.features, (num_nodes, len(graph.feature_names)))
    _check_shape(where, "edge_index", graph.edge_index, (2, num_edges))
    _check_shape(where, "edge_features", graph.edge_features, (num_edges, len(graph.edge_feature_names)))
    _check_edge_index(graph.edge_index, num_nodes, where)
    check_finite(where, "features", graph.features)
    check_finite(where, "edge_features", graph.edge_features)
    if graph.label is not None:
        _check_shape(where, "label", graph.label, (num_edges,))
        _check_labels(graph.label, where)


def check_finite(where: str, name: str, values: FloatArray) -> None:
    """Refuse NaN and infinity, naming the first bad row."""
    # A sum is non-finite whenever a term is, and eight times faster than testing every term.
    # It may overflow without a bad term, so only its "finite" is a verdict.
    with np.errstate(over="ignore", invalid="ignore"):
        if np.isfinite(values.sum()):
            return
    bad = np.argwhere(~np.isfinite(values))
    if len(bad):
        place = tuple(int(i) for i in bad[0])
        value = values[place]
        raise ValueError(
            f"{where}: {name} holds {len(bad)} values that are not finite, the first is {value} at {list(place)}; "
            "repair or remove it in the input."
        )


def _check_hits(hits: Hits, where: str) -> None:
    for name in ("volume", "layer", "module", "particle_id", "weight"):
        values = getattr(hits, name)
        if values is not None:
            _check_shape(where, name, values, (len(hits),))
    if hits.position is not None:
        _check_shape(where, "position", hits.position, (len(hits), 3))
        check_finite(where, "position", hits.position)
    if hits.weight is not None:
        check_finite(where, "weight", hits.weight)


def _check_shape(where: str, name: str, values: npt.NDArray[Any], expected: tuple[int, ...]) -> None:
    if values.shape != expected:
        raise ValueError(f"{where}: {name} has shape {list(values.shape)}, expected {list(expected)}.")


def _check_edge_index(edge_index: npt.NDArray[Any], num_nodes: int, where: str) -> None:
    if not np.issubdtype(edge_index.dtype, np.integer):
        raise ValueError(f"{where}: edge_index has dtype {edge_index.dtype}, expected integers.")
    bad = np.flatnonzero(((edge_index < 0) | (edge_index >= num_nodes)).any(axis=0))
    if len(bad):
        src, dst = (int(i) for i in edge_index[:, bad[0]])
        raise ValueError(
            f"{where}: edge_index names nodes that do not exist in {len(bad)} edges, the first is edge {bad[0]}: "
            f"{src} -> {dst}; the event has nodes 0 to {num_nodes - 1}."
        )


def _check_labels(label: npt.NDArray[Any], where: str) -> None:
    bad = np.flatnonzero((label != 0) & (label != 1))
    if len(bad):
        raise ValueError(
            f"{where}: label of edge {bad[0]} is {label[bad[0]]}, expected 0 or 1 ({len(bad)} such edges)."
        )
