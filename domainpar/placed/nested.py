"""Find and replace what lies in lists, tuples, dictionaries, dataclasses and PyG `Data`, to any depth."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any


def flat(value: Any) -> list[Any]:
    """Everything that is no nest itself, always in the same order."""
    if isinstance(value, (list, tuple)):
        items = list(value)
    elif isinstance(value, Mapping):
        items = list(value.values())
    elif (fields := _fields(value)) is not None:
        items = list(fields.values())
    else:
        return [value]
    return [leaf for item in items for leaf in flat(item)]


def rebuilt(value: Any, change: Callable[[Any], Any]) -> Any:
    """The same nest with everything changed that is no nest itself; the nest that was given stays as it is."""
    if isinstance(value, (list, tuple)):
        items = [rebuilt(item, change) for item in value]
        # A namedtuple takes its fields one by one; torch's own return types, which have no `_fields`, take a list.
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if isinstance(value, dict):
        return {name: rebuilt(item, change) for name, item in value.items()}
    if (fields := _fields(value)) is None:
        return change(value)
    other = copy.copy(value)
    put = object.__setattr__ if dataclasses.is_dataclass(value) else setattr  # a dataclass may be frozen
    for name, item in fields.items():
        put(other, name, rebuilt(item, change))
    return other


def _fields(value: Any) -> dict[str, Any] | None:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    # By what a PyG `Data` has: PyG itself need not be installed.
    return value.to_dict() if hasattr(value, "to_dict") and hasattr(value, "edge_index") else None
