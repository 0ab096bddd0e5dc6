"""Arguments of a model to be verified: from the fields of a PyG `Data`, by their names; all of them in float64."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from domainpar.nn.adapt.nested import is_data, rebuilt, with_fields
from domainpar.nn.adapt.part import GraphPart
from domainpar.nn.adapt.rows import UNKNOWN, mark, rows_of
from domainpar.nn.adapt.trial import Inputs

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
    """A function that makes the arguments of a module from the fields of a `Data` that its forward names.

    Raises:
        ValueError: If it is no `Data`, lacks one of them, or nobody knows what rows a field has.
    """
    if not is_data(graph):
        raise ValueError("of (edge_index, num_nodes) no arguments can be made; pass inputs=lambda part: (...).")
    parameters = list(inspect.signature(module.forward).parameters.values())
    fields = {name: value for name, value in graph.to_dict().items() if name != "num_nodes" and value is not None}
    if len(parameters) == 1 and parameters[0].name in ("data", "batch"):
        _check_rows(fields, graph)
        return lambda part, leaves: with_fields(graph, _rows_of_fields(part, fields, leaves))
    named = [one for one in parameters if one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)]
    missing = [one.name for one in named if one.name not in fields and one.default is one.empty]
    if missing:
        raise ValueError(f"forward asks for {', '.join(missing)}, the graph has {', '.join(fields)}; {PASS_INPUTS}")
    chosen = {one.name: fields[one.name] for one in named if one.name in fields}
    _check_rows(chosen, graph)
    if any(one.kind is one.POSITIONAL_ONLY for one in named if one.name in chosen):
        return lambda part, leaves: tuple(_rows_of_fields(part, chosen, leaves).values())
    return lambda part, leaves: _rows_of_fields(part, chosen, leaves)


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


def _rows_of_fields(part: GraphPart, fields: dict[str, Any], leaves: Mapping[str, Tensor]) -> dict[str, Any]:
    def rows_of_field(name: str, value: Any) -> Any:
        if name == "edge_index":
            return part.edge_index
        if not isinstance(value, Tensor):
            return value
        value = leaves.get(name, value)
        return part.nodes(value) if _rows_of_field(name) == "nodes" else part.edges(value)

    return {name: rows_of_field(name, value) for name, value in fields.items()}


def leaves_of(graph: Any) -> dict[str, Tensor]:
    """The fields of a `Data` that want a gradient, in float64."""
    fields = graph.to_dict() if is_data(graph) else {}
    return {name: one.double() for name, one in fields.items() if isinstance(one, Tensor) and one.requires_grad}


def doubled_module(module: nn.Module) -> nn.Module:
    """A copy on the CPU in float64, tensors that are no parameters or buffers included."""
    module = copy.deepcopy(module).cpu().double()
    for child in module.modules():
        for name, value in list(vars(child).items()):
            if isinstance(value, Tensor) and value.is_floating_point():
                setattr(child, name, value.cpu().double())
    return module


def doubled(arguments: Any) -> Any:
    """Arguments in float64, their tensors marked as they were."""
    return rebuilt(arguments, _doubled_tensor)


def _doubled_tensor(value: Any) -> Any:
    if not isinstance(value, Tensor) or not value.is_floating_point() or value.dtype is torch.float64:
        return value
    rows = rows_of(value)
    double = value.detach().double().requires_grad_(value.requires_grad)
    return double if rows is UNKNOWN else mark(double, None if rows is None else rows.but())
