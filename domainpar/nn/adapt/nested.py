"""Tensors inside other values: nested lists and tuples, dictionaries, dataclasses, a PyG `Data`."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor


def flat(value: Any) -> list[Any]:
    """The values in nested lists, tuples and dictionaries, as torch calls take them."""
    values: list[Any] = []
    _collect((value,), values)
    return values


def _collect(nested: Iterable[Any], values: list[Any]) -> None:
    for value in nested:
        if isinstance(value, (list, tuple)):
            _collect(value, values)
        elif isinstance(value, dict):
            _collect(value.values(), values)
        else:
            values.append(value)


def tensors_in(value: Any) -> list[Tensor]:
    """The tensors in nested lists, tuples and dictionaries, as torch calls take them."""
    return [item for item in flat(value) if isinstance(item, Tensor)]


def mapped(change: Callable[[Tensor], Tensor], value: Any) -> Any:
    """A value with every tensor in it, at any depth of lists and tuples, changed."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, (list, tuple)) and not isinstance(value, torch.Size):
        items: Iterable[Any] = [mapped(change, item) for item in value]
        return items if isinstance(value, list) else tuple(items)
    return value


def every_tensor(value: Any) -> Iterator[Tensor]:
    """The tensors in anything that layers hand each other, always in the same order."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from every_tensor(item)
    elif isinstance(value, Mapping):
        yield from every_tensor(tuple(value.values()))
    elif is_data(value):
        yield from every_tensor(value.to_dict())
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        yield from every_tensor(tuple(getattr(value, field.name) for field in dataclasses.fields(value)))


def rebuilt(value: Any, change: Callable[[Any], Any]) -> Any:
    """The same nest of tuples, lists, dictionaries, dataclasses and `Data`, all else in it changed."""
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(rebuilt(item, change) for item in value))
    if isinstance(value, (tuple, list)):
        return type(value)(rebuilt(item, change) for item in value)
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
