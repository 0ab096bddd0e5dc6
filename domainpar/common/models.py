"""Models: typed values of what comes from outside, by msgspec: files, flags, and JSON between ranks.

A model is a `Model`, a dataclass or a named tuple. Its annotations say what it takes.
"""

from __future__ import annotations

import json
import re
from typing import Any, Self, TypeVar

import msgspec
from msgspec import structs

T = TypeVar("T")


class Model(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Fields with types and no others."""

    def changed(self, **values: Any) -> Self:
        """The same with other values of some fields."""
        return structs.replace(self, **values)


def read_as(kind: type[T], values: Any) -> T:
    """Plain values as a model.

    Raises:
        ValueError: If a value is not of its type, naming its place and the value.
    """
    try:
        return msgspec.convert(values, kind, dec_hook=_made)
    except msgspec.ValidationError as error:
        raise ValueError(_refusal(kind, str(error), values)) from error


def plain(value: Any) -> Any:
    """A model as JSON has it: names with values, and lists for tuples."""
    return json.loads(json.dumps(value, default=as_json))


def as_json(value: Any) -> Any:
    """A model as names with values, and a path as its text: what `json.dumps` does not know."""
    return msgspec.to_builtins(value, enc_hook=str)


def _made(kind: type[Any], value: Any) -> Any:
    """A value of a class that is no model, such as a path."""
    return kind(value)


def _refusal(kind: Any, error: str, values: Any) -> str:
    """An error of msgspec, `Expected `str`, got `int` - at `$.store.path``, with the value."""
    what, _, place = error.replace("`", "").partition(" - at $")
    value = values
    for name, number in re.findall(r"\.(\w+)|\[(\d+)\]", place.partition("[...]")[0]):
        value = value[name] if name else value[int(number)]
    seen = repr(value) if len(repr(value)) <= 80 else f"{repr(value)[:80]}..."
    return f"{place.lstrip('.') or kind.__name__} is {seen}; {what[0].lower()}{what[1:]}"
