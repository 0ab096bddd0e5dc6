"""Floating-point operations of a step, by formula: 2 m n k for each matrix product, and 0 for everything else.

Beside them the layers that its stages could keep.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils.flop_counter import flop_registry

from domainpar.nn.mlp import MLP
from domainpar.nn.uncompiled import UncompiledMode


@dataclass
class Flops:
    """Operations that were counted.

    Attributes:
        of_stages: Of MLPs of stages, as if no number were padded.
        of_torch: Of products by torch.
        layers: Of each call of stages its rows, and the bytes of the layers of a row.
    """

    of_stages: int = 0
    of_torch: int = 0
    layers: list[tuple[int, int]] = field(default_factory=list)

    @property
    def total(self) -> int:
        """The sum of both."""
        return self.of_stages + self.of_torch


@contextmanager
def counted() -> Iterator[Flops]:
    """A context that counts the operations of some steps of this rank."""
    flops = Flops()
    with _Products(flops):
        yield flops


class _Products(UncompiledMode):
    """Counts operations of torch that have a formula, without the hooks that torch's own counter puts into modules."""

    def __init__(self, flops: Flops) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.flops = flops

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not self.are_plain(types):
            return NotImplemented
        result = function(*args, **(kwargs or {}))
        formula = flop_registry.get(function.overloadpacket)
        if formula is not None:
            self.flops.of_torch += formula(*args, **(kwargs or {}), out_val=result)
        return result


def _counting() -> list[Flops]:
    """The counters of this thread; torch also applies their modes in the threads of a GPU's backward."""
    return [mode.flops for mode in _get_current_dispatch_mode_stack() if isinstance(mode, _Products)]


def count_layers(rows: int, of_row: int) -> None:
    """Note the layers that a call of stages could keep, so many bytes a row."""
    for flops in _counting():
        flops.layers.append((rows, of_row))


def count_flops(mlp: MLP, rows: int, times: int, columns: int | None = None, num_nodes: int = 0) -> None:
    """Count an MLP on some rows, so many times.

    Args:
        mlp: The MLP.
        rows: How many.
        times: How often.
        columns: Those of a row; the others that the MLP takes are states of nodes. Default: all.
        num_nodes: Nodes; products of their states are made once for each.
    """
    columns = mlp.in_features if columns is None else columns
    for flops in _counting():
        first, *others = (layer.linear for layer in mlp.layers)
        of_row = columns * first.out_features + sum(it.in_features * it.out_features for it in others)
        of_node = (mlp.in_features - columns) * first.out_features
        flops.of_stages += times * 2 * (rows * of_row + num_nodes * of_node)
