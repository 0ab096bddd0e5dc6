"""A PyG `Data`, known by what it has: PyG itself need not be installed."""

from __future__ import annotations

import copy
from typing import Any


def is_data(value: Any) -> bool:
    """Whether something is a PyG `Data`."""
    return hasattr(value, "to_dict") and hasattr(value, "edge_index")


def with_fields(data: Any, fields: dict[str, Any]) -> Any:
    """A copy with other values of some fields."""
    made = copy.copy(data)
    if "num_nodes" in made.to_dict():
        del made["num_nodes"]  # of the whole graph: with it gone, it is asked of the rows
    for name, value in fields.items():
        made[name] = value
    return made
