"""Floating-point operations of a step, by formula: 2 m n k for each matrix product, and 0 for everything else."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils.flop_counter import flop_registry

from domainpar.nn.mlp import MLP
from domainpar.nn.uncompiled import UncompiledMode
from domainpar.parallel.local import LocalGraph


@dataclass
class Flops:
    """Operations that were counted.

    Attributes:
        of_stages: Of MLPs of stages, as if no number were padded.
        of_torch: Of products that torch was asked for.
    """

    of_stages: int = 0
    of_torch: int = 0

    @property
    def total(self) -> int:
        """All of them."""
        return self.of_stages + self.of_torch


@contextmanager
def counted() -> Iterator[Flops]:
    """Around some steps of this rank: what they compute is counted."""
    flops = Flops()
    with _Products(flops):
        yield flops


class _Products(UncompiledMode):
    """Counts operations of torch that have a formula. Torch's own counter puts hooks into modules, and this none."""

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
    """Those that count in this thread; torch takes their modes along into the threads of a GPU's backward."""
    return [mode.flops for mode in _get_current_dispatch_mode_stack() if isinstance(mode, _Products)]


def count_rows(mlp: MLP, rows: int, times: int) -> None:
    """Count an MLP on some rows, so many times."""
    for flops in _counting():
        flops.of_stages += times * 2 * rows * _numbers(mlp, mlp.in_features)


def count_edges(mlp: MLP, takes_nodes: bool, width: int, graph: LocalGraph, times: int) -> None:
    """Count an MLP on the local edges, so many times: products of node states are made once for each node.

    Args:
        mlp: The MLP.
        takes_nodes: Whether it takes the states at both ends.
        width: Columns of the edge states that it takes.
        graph: The part.
        times: How often.
    """
    for flops in _counting():
        of_nodes = (mlp.in_features - width) * mlp.layers[0].linear.out_features * graph.plan.num_local
        flops.of_stages += times * 2 * (graph.num_edges * _numbers(mlp, width) + takes_nodes * of_nodes)


def _numbers(mlp: MLP, width: int) -> int:
    """Weights of an MLP of whose first layer only so many columns are taken."""
    first, *rest = mlp.layers
    others = sum(layer.linear.in_features * layer.linear.out_features for layer in rest)
    return width * first.linear.out_features + others
