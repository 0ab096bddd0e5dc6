"""Arguments of a model from the fields of a PyG `Data`, by their names."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from domainpar.nn.adapt.data import is_data, with_fields
from domainpar.nn.adapt.part import GraphPart

Inputs = Callable[[GraphPart], Any]

PASS_INPUTS = (
    "pass inputs, which makes the arguments from a part: inputs=lambda part: (part.nodes(x), part.edge_index)."
)


def edges_and_size(graph: Any) -> tuple[Tensor, int]:
    """Ends of the edges and the number of nodes.

    Raises:
        ValueError: If it is no graph.
    """
    if is_data(graph):
        return graph.edge_index, int(graph.num_nodes)
    if isinstance(graph, tuple) and len(graph) == 2 and isinstance(graph[0], Tensor):
        return graph[0], int(graph[1])
    raise ValueError(f"a graph is a PyG Data or a tuple (edge_index, num_nodes), not {type(graph).__name__}.")


def inputs_from(module: nn.Module, graph: Any) -> Inputs:
    """What makes the arguments of a module from the fields of a `Data` that its forward names.

    Raises:
        ValueError: If it is no `Data`, lacks one of them, or nobody knows what rows a field has.
    """
    if not is_data(graph):
        raise ValueError("of (edge_index, num_nodes) no arguments can be made; pass inputs=lambda part: (...).")
    parameters = list(inspect.signature(module.forward).parameters.values())
    fields = {name: value for name, value in graph.to_dict().items() if name != "num_nodes" and value is not None}
    if len(parameters) == 1 and parameters[0].name in ("data", "batch"):
        _check_rows(fields, graph)
        return lambda part: with_fields(graph, _taken(part, fields))
    named = [one for one in parameters if one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)]
    chosen = _chosen(named, fields)
    _check_rows(chosen, graph)
    if any(one.kind is one.POSITIONAL_ONLY for one in named if one.name in chosen):
        return lambda part: tuple(_taken(part, chosen).values())
    return lambda part: _taken(part, chosen)


def _chosen(named: list[inspect.Parameter], fields: dict[str, Any]) -> dict[str, Any]:
    missing = [one.name for one in named if one.name not in fields and one.default is one.empty]
    if missing:
        raise ValueError(f"forward asks for {', '.join(missing)}, the graph has {', '.join(fields)}; {PASS_INPUTS}")
    return {one.name: fields[one.name] for one in named if one.name in fields}


def _check_rows(fields: dict[str, Any], graph: Any) -> None:
    numbers = {"nodes": int(graph.num_nodes), "edges": graph.edge_index.size(1)}
    for name, value in fields.items():
        of = _rows_of_field(name)
        expected = numbers.get(of)
        if name != "edge_index" and isinstance(value, Tensor) and (not value.dim() or len(value) != expected):
            known = f"are taken for {of}, of which there are {expected}" if expected is not None else "are not known"
            raise ValueError(
                f"the rows of the graph's field {name}, of shape {tuple(value.shape)}, {known}; {PASS_INPUTS}"
            )


def _rows_of_field(name: str) -> str:
    if name in ("x", "pos", "batch", "y", "z") or name.startswith("node_") or name.endswith("_mask"):
        return "nodes"
    return "edges" if name.startswith("edge_") else ""


def _taken(part: GraphPart, fields: dict[str, Any]) -> dict[str, Any]:
    return {name: _one_taken(part, name, value) for name, value in fields.items()}


def _one_taken(part: GraphPart, name: str, value: Any) -> Any:
    if name == "edge_index":
        return part.edge_index
    if not isinstance(value, Tensor):
        return value
    return part.nodes(value) if _rows_of_field(name) == "nodes" else part.edges(value)
