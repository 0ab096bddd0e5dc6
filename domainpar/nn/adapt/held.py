"""What a module holds: what all ranks have in common, rows of parts, and parameters with a row for each node."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager

from torch import Tensor, nn

from domainpar.nn.adapt.nested import tensors_in
from domainpar.nn.adapt.part import GraphPart, holds_rows
from domainpar.nn.adapt.rows import NotExact, version_of


def common_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Every tensor that a module holds, by name, also outside its parameters and buffers, but for rows of parts."""
    found: dict[str, Tensor] = {}
    for path, child in module.named_modules():
        for name, value in {**vars(child), **child._parameters, **child._buffers}.items():
            if name not in _KEPT_APART and isinstance(value, (Tensor, list, tuple, dict)):
                for number, tensor in enumerate(tensors_in(value)):
                    place = name if tensor is value else f"{name}[{number}]"
                    found[f"{path}.{place}" if path else place] = tensor
    return {name: tensor for name, tensor in found.items() if not holds_rows(tensor)}


_KEPT_APART = frozenset(("_parameters", "_buffers", "_modules"))


def owner_of(module: nn.Module, name: str) -> nn.Module:
    """The module inside a module that holds a parameter or a buffer itself.

    Raises:
        ValueError: If none has this name.
    """
    path, _, attribute = name.rpartition(".")
    owner: nn.Module | None = dict(module.named_modules(remove_duplicate=False)).get(path)
    if owner is None or {**owner._parameters, **owner._buffers}.get(attribute) is None:
        known = [name for name, tensor in [*module.named_parameters(), *module.named_buffers()] if tensor.dim()]
        raise ValueError(f"the module has no parameter or buffer {name!r}; it has {', '.join(known) or 'none'}.")
    return owner


@contextmanager
def read_as_nodes(owners: Mapping[str, nn.Module], part: GraphPart) -> Iterator[None]:
    """While it lasts, modules read this part's rows, marked, where they hold a row for each node of the graph.

    Args:
        owners: Of each parameter and buffer that is meant, by name, the module that holds it.
        part: The part.

    Raises:
        ValueError: If one has not as many rows as the graph has nodes.
        NotExact: If the module has changed one.
    """
    with ExitStack() as stack:
        for name, owner in owners.items():
            stack.enter_context(_read_as_nodes(name, owner, part))
        yield


@contextmanager
def _read_as_nodes(name: str, owner: nn.Module, part: GraphPart) -> Iterator[None]:
    attribute = name.rpartition(".")[2]
    whole = getattr(owner, attribute)
    try:
        rows = part.read_nodes(whole)
    except ValueError as problem:
        raise ValueError(f"{name} is to have a row for each node: {problem}") from None
    version = version_of(rows)
    # Python looks here first; optimisers and state_dict find the whole one where it was.
    vars(owner)[attribute] = rows
    try:
        yield
        same = vars(owner).get(attribute) is rows and {**owner._parameters, **owner._buffers}.get(attribute) is whole
    finally:
        vars(owner).pop(attribute, None)
    if not same or not (rows.is_inference() or version_of(rows) == version):
        raise NotExact(f"{name} is changed in the forward pass; of what has a row for each node only reading is known.")
