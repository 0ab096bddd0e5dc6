"""Find and replace tensors inside lists, tuples, dictionaries, dataclasses and PyG `Data`, to any depth."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

# Asked first: the watch looks at every argument of every call, and the other questions cost ten times as much.
_PLAIN = frozenset((Tensor, nn.Parameter, int, float, bool, str, type(None), slice, torch.dtype, torch.device))


def flat(value: Any) -> list[Any]:
    """Everything that is no nest itself, always in the same order."""
    leaves: list[Any] = []
    _collect(value, leaves)
    return leaves


def _collect(value: Any, leaves: list[Any]) -> None:
    items: Iterable[Any]
    if type(value) in _PLAIN:
        leaves.append(value)
        return
    if isinstance(value, (list, tuple)):
        items = value
    elif isinstance(value, Mapping):
        items = value.values()
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        items = [getattr(value, field.name) for field in dataclasses.fields(value)]
    elif is_data(value):
        items = value.to_dict().values()
    else:
        leaves.append(value)
        return
    for item in items:
        _collect(item, leaves)


def tensors_in(value: Any) -> list[Tensor]:
    """The tensors in a nest, always in the same order."""
    return [leaf for leaf in flat(value) if isinstance(leaf, Tensor)]


def rebuilt(value: Any, change: Callable[[Any], Any]) -> Any:
    """The same nest with everything changed that is no nest itself."""
    if type(value) in _PLAIN:
        return change(value)
    if isinstance(value, (tuple, list)):
        items = [rebuilt(item, change) for item in value]
        # A namedtuple takes its fields one by one; torch's own return types, which have no `_fields`, take a list.
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if isinstance(value, dict):
        return {name: rebuilt(item, change) for name, item in value.items()}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value)]
        return dataclasses.replace(value, **{name: rebuilt(getattr(value, name), change) for name in names})
    if is_data(value):
        return with_fields(value, rebuilt(value.to_dict(), change))
    return change(value)


def is_data(value: Any) -> bool:
    """Whether something is a PyG `Data`, by what it has: PyG itself need not be installed."""
    return hasattr(value, "to_dict") and hasattr(value, "edge_index")


def with_fields(data: Any, fields: dict[str, Any]) -> Any:
    """A copy of a `Data` with other values of some fields."""
    other = copy.copy(data)
    if "num_nodes" in other.to_dict():
        del other["num_nodes"]  # of the whole graph: with it gone, it is asked of the rows
    for name, value in fields.items():
        other[name] = value
    return other
