"""A network as a plain module of torch, with the weights it has, for programs that know nothing of ranks or tiles."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from domainpar.nn.classifier import EdgeClassifier
from domainpar.nn.heads import EDGE
from domainpar.nn.interaction import OnStages
from domainpar.nn.interaction_module import InteractionModule
from domainpar.nn.published import PublishedNetwork
from domainpar.tracking.networks.on_events import OnEvents, wanted_arguments


class EdgeLogits(nn.Module):
    """The logits of edges of a module, in evaluation.

    Args:
        module: Called with `x`, `edge_index` and, if it takes them, `edge_attr`.
    """

    def __init__(self, module: nn.Module, takes_edge_features: bool) -> None:
        super().__init__()
        self.module, self.takes_edge_features = module, takes_edge_features
        self.eval()

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor | None = None) -> Tensor:
        """Raw logits, [E, 1].

        Args:
            x: Node features, [N, node features].
            edge_index: `src` and `dst` of each edge, int64 [2, E].
            edge_attr: Edge features, [E, edge features]; None if it takes none.
        """
        result = self.module(x, edge_index) if edge_attr is None else self.module(x, edge_index, edge_attr)
        logits: Tensor = result[EDGE.name] if isinstance(result, dict) else result
        return logits.reshape(-1, 1)


def in_float64(module: EdgeLogits, tables: Mapping[str, Tensor]) -> Tensor:
    """Logits as if all was computed in float64, [E, 1], also where the module names float32 itself.

    Args:
        module: The module, in float32; it is left as it is.
        tables: Its arguments, by name.
    """
    usual = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with torch.no_grad(), _InFloat64():  # type: ignore[no-untyped-call]
            logits: Tensor = module(**tables)
    finally:
        torch.set_default_dtype(usual)
    return logits


class _InFloat64(TorchDispatchMode):
    """Every call of torch gets float64 for float32."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def wider(value: Any) -> Any:
            if isinstance(value, Tensor) and value.dtype == torch.float32:
                return value.double()
            return torch.float64 if value is torch.float32 else value

        return func(*tree_map(wider, args), **tree_map(wider, kwargs or {}))


def sums_in_order(program: torch.export.ExportedProgram) -> torch.export.ExportedProgram:
    """The same program with sums at rows of an index as `scatter_add`, of columns rather than of rows.

    ONNX has two forms of such sums. ONNX runtime shares a `ScatterND` out to its threads, which then add to one number
    at the same time, and some of what they add is lost. A `ScatterElements` is the work of one thread, in order; of
    columns, [width, N], it takes it half the time that it takes of rows.
    """
    ordered: torch.export.ExportedProgram = program.run_decompositions({torch.ops.aten.index_add.default: _index_add})
    return ordered


def _index_add(x: Tensor, dim: int, index: Tensor, source: Tensor, *, alpha: float = 1) -> Tensor:
    columns, added = x.movedim(dim, -1), (source if alpha == 1 else alpha * source).movedim(dim, -1)
    return columns.scatter_add(-1, index.long().expand(added.shape), added.contiguous()).movedim(-1, dim)


def plain_form(network: EdgeClassifier) -> EdgeLogits:
    """The same function of an event in plain torch: to rounding, since sums have other orders.

    Args:
        network: A network that scores edges; the module shares its weights.

    Raises:
        ValueError: If it scores no edges, works in two precisions, or takes more than an event's tables.
    """
    if EDGE not in network.heads:
        raise ValueError("this network scores no edges.")
    if network.products is not None:
        raise ValueError("this network makes products in bfloat16, which its plain form would not; train in float32.")
    assert isinstance(network, OnStages | OnEvents)
    module = network.plain if isinstance(network, OnStages) else network.module
    if isinstance(module, PublishedNetwork | InteractionModule):
        return EdgeLogits(module, module.takes_edge_features)
    wanted = wanted_arguments(module)
    if wanted not in (("x", "edge_index"), ("x", "edge_index", "edge_attr")):
        raise ValueError(
            f"its forward takes {', '.join(wanted)}; only x, edge_index and edge_attr, in this order, can be."
        )
    return EdgeLogits(module, "edge_attr" in wanted)
