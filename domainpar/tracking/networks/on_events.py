"""Any edge classifier with the call of the built-in networks: `model(graph, halo, key)` gives logits of local edges."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor, nn

from domainpar.nn.adapt.gradient_sums import GradientSums, take_from_root
from domainpar.nn.adapt.modules import check_module, check_state, common_tensors, keep_rows_out_of_state
from domainpar.nn.adapt.parallelize import GraphParallel
from domainpar.nn.adapt.part import GraphPart
from domainpar.nn.adapt.rows import Rows, rows_of
from domainpar.nn.adapt.split import split_graph
from domainpar.nn.adapt.verify import verify
from domainpar.nn.classifier import Differs, EdgeClassifier, Exactness
from domainpar.nn.heads import EDGE, Head, Readings
from domainpar.parallel.halo import Halo
from domainpar.parallel.local import LocalGraph
from domainpar.parallel.transport import Transport
from domainpar.parallel.world import World

KNOWN = ("x", "edge_index", "edge_attr", "batch")


class OnEvents(EdgeClassifier):
    """A module that scores edges, run on parts of stored events: the result of one rank, to rounding.

    Args:
        module: Takes, by name, what it wants of x [N, node features], edge_index [2, E], edge_attr [E, edge features]
            and batch [N] (all 0), or a PyG `data` with these; returns one logit for each edge, [E] or [E, 1]. If
            it has an attribute `deep_supervision` that is true, it returns those of several readouts in training,
            [E, readouts], the last one last. With another head, it returns [N, columns] for nodes or [columns] for the
            graph; with several, a dictionary of them by name.
        recompute_every: As for `parallelize`.
        heads: What it is read for.

    Attributes:
        module: The module.
        exchanges: How often the last forward pass filled ghosts.
        sums: How often it summed over ranks.

    Raises:
        ValueError: If the module wants other arguments, or cannot be right on a split graph.
    """

    def __init__(self, module: nn.Module, recompute_every: int | None = None, heads: Sequence[Head] = (EDGE,)) -> None:
        super().__init__()
        self.heads = tuple(heads)
        check_module(module)
        if any(type(child).get_extra_state is not nn.Module.get_extra_state for child in module.modules()):
            raise ValueError("the model keeps extra state (get_extra_state), which a run's checkpoints would lose.")
        self.module = module
        keep_rows_out_of_state(module)
        self.recompute(recompute_every)
        self.exchanges = self.sums = 0
        self._wants = wanted_arguments(module)
        self._parts: WeakKeyDictionary[LocalGraph, tuple[GraphPart, Tensor]] = WeakKeyDictionary()

    def recompute(self, every: int | None) -> None:
        """As of any network on parts."""
        super().recompute(every)
        # In a tuple, where torch looks for no module: names of parameters stay those of the user's module.
        self._parallel = (GraphParallel(self.module, recompute_every=self.recompute_every),)

    def forward(self, graph: LocalGraph, halo: Halo, key: int | None = None) -> Tensor:
        """Logits of all local edges, [num_edges], or in training [readouts, num_edges]. *Collective*.

        They are 0 for edges that another rank counts.

        Args:
            graph: The part.
            halo: Joins the parts.
            key: Of the random numbers of this call, the same on every rank, for training; None to evaluate.
        """
        edges = self.read(graph, halo, key).edges
        if edges is None:
            raise ValueError("this network has no head of edges; ask it with read.")
        return edges

    def read(self, graph: LocalGraph, halo: Halo, key: int | None = None) -> Readings:
        """As of any network on parts."""
        if graph not in self._parts:
            device = graph.features.device
            owned = torch.from_numpy(np.flatnonzero(graph.plan.edge_owned)).to(device)
            self._parts[graph] = GraphPart(graph.plan, halo.transport, device), owned
        part, owned = self._parts[graph]
        part.num_exchanges = part.num_sums = 0
        self.module.train(key is not None)
        x, edge_attr = part.nodes_from_local(graph.features), part.edges_from_local(graph.edge_features)
        arguments = self.arguments(part, x, edge_attr)
        check = partial(check_results, part, self.heads, self._readouts(key))
        result = self._parallel[0].run(part, (), arguments, key, check)
        self.exchanges, self.sums = part.num_exchanges, part.num_sums
        results, edges = by_name(self.heads, result), None
        if (logits := results.pop(EDGE.name, None)) is not None:
            readouts = logits.t() if logits.dim() == 2 and logits.size(1) > 1 else logits.reshape(-1)
            zeros = graph.features.new_zeros(*readouts.shape[:-1], graph.num_edges)
            edges = zeros.index_copy(-1, owned, readouts.to(zeros.dtype))
        shape = {head.name: (-1, head.columns) if head.of == "node" else (head.columns,) for head in self.heads}
        dtype = graph.features.dtype
        return Readings(edges, {name: rows.reshape(shape[name]).to(dtype) for name, rows in results.items()})

    @property
    def ways_to_recompute(self) -> Sequence[int | None]:
        """With one iteration kept of two or more, what one of them makes is more than what they begin with."""
        return (None, 2, 1)

    @property
    def layers(self) -> nn.Module:
        """The user's module."""
        return self.module

    @property
    def changing(self) -> list[Tensor]:
        """The module's buffers."""
        return list(self.module.buffers())

    def gradients(self, over_ranks: bool = False) -> GradientSums:
        """The gradients that backward leaves in the parameters."""
        return GradientSums(self)

    def exactness(self, transport: Transport) -> Exactness:
        """To rounding."""
        return Exactness(bitwise=False, problem="this network is not built on stages")

    def take_from_root(self, world: World) -> None:
        """Give every rank all tensors that the module holds on rank 0. *Collective*."""
        take_from_root(common_tensors(self), world)

    def verify(self, edge_index: Tensor, x: Tensor, edge_attr: Tensor) -> str:
        """Run the module on one rank, in training and in evaluation, then compare it whole and split over 3 ranks."""

        def inputs(part: GraphPart) -> dict[str, Any]:
            return self.arguments(part, part.nodes(x), part.edges(edge_attr))

        alone = split_graph(edge_index, len(x), World.alone(), edge_policy="incident")
        module = copy.deepcopy(self.module).cpu().double()  # the piece of an event is on the host
        for key in (1, None):
            module.train(key is not None)
            with torch.no_grad():
                check = partial(check_results, alone, self.heads, self._readouts(key))
                GraphParallel(module).run(alone, (), inputs(alone), key, check)
        check_state(module)  # now, and not when the first checkpoint is written
        verification = verify(
            self.module,
            (edge_index, len(x)),
            parts=3,
            inputs=inputs,
            edge_policy="incident",
            recompute_every=self.recompute_every,
        )
        if not verification.exact:
            raise Differs(f"the network is not the same whole and split:\n{verification}")
        return verification.conclusion

    def _readouts(self, key: int | None) -> bool:
        """Whether the module may return several readouts: in training, if it says so; not two classes of each edge."""
        return key is not None and bool(getattr(self.module, "deep_supervision", False))

    def arguments(self, part: GraphPart, x: Tensor, edge_attr: Tensor) -> dict[str, Any]:
        """Arguments of the module, by name.

        Args:
            part: The part.
            x: Node features, marked.
            edge_attr: Edge features, marked.
        """
        batch = part.nodes_from_local(torch.zeros(part.plan.num_local, dtype=torch.int64, device=part.device))
        tensors = {"x": x, "edge_index": part.edge_index, "edge_attr": edge_attr, "batch": batch}
        if self._wants == ("data",):
            from torch_geometric.data import Data

            return {"data": Data(**{name: tensors[name] for name in KNOWN[:3]})}
        return {name: tensors[name] for name in self._wants}


def by_name(heads: Sequence[Head], result: Any) -> dict[str, Any]:
    """The results of a module by the names of its heads; what a module with one returns is that one's.

    Raises:
        ValueError: If it does not return a dictionary with the names of its heads, where it has several.
    """
    if len(heads) == 1 and not isinstance(result, Mapping):
        return {heads[0].name: result}
    names = [head.name for head in heads]
    if not isinstance(result, Mapping) or sorted(map(str, result)) != sorted(names):
        returned = f"one with {', '.join(map(str, result))}" if isinstance(result, Mapping) else type(result).__name__
        raise ValueError(f"the model returned {returned}; return a dictionary of tensors named {', '.join(names)}.")
    return dict(result)


def check_results(part: GraphPart, heads: Sequence[Head], readouts: bool, result: Any) -> None:
    """Refuse results that are not those of the heads: a number for each edge, say, or where there may be, of readouts.

    Raises:
        ValueError: With what it is instead.
    """
    named = by_name(heads, result)
    for head in heads:
        _check_result(part, head, readouts and head == EDGE, named[head.name])


def _check_result(part: GraphPart, head: Head, readouts: bool, result: Any) -> None:
    columns = "" if head.columns == 1 else f", {head.columns}"
    wanted = {
        "edge": "one logit for each edge, [E], in the order of edge_index",
        "node": f"numbers of each node, [N{columns}], in the order of x",
        "graph": f"numbers of the whole graph, [{head.columns}]",
    }[head.of]
    if not isinstance(result, Tensor):
        raise ValueError(f"the model returned a {type(result).__name__}; return {wanted}, as a tensor.")
    rows = rows_of(result)
    if head.of == "graph":
        fits = rows is None and result.numel() == head.columns
    else:
        axis = part.edge_axis if head.of == "edge" else part.node_axis
        several = readouts and result.dim() == 2 and result.size(1) > 1
        shapes = ((), (1,)) if head.columns == 1 else ((head.columns,),)
        fits = isinstance(rows, Rows) and rows.axis is axis and rows.dim == 0
        fits = fits and (several or result.shape[1:] in shapes)
    if not fits:
        of = f" of head {head.name}" if head != EDGE else ""
        axis_name = rows.axis.name if isinstance(rows, Rows) else "nothing"
        raise ValueError(
            f"the model returned{of} a tensor of {result.dim()} dimensions with rows of {axis_name}, "
            f"{tuple(result.shape[1:])} numbers each; return {wanted}."
        )


def wanted_arguments(module: nn.Module) -> tuple[str, ...]:
    """Which of the known arguments a module takes.

    Raises:
        ValueError: If it needs others.
    """
    parameters = inspect.signature(module.forward).parameters
    if list(parameters) == ["data"]:
        return ("data",)
    named = [it for it in parameters.values() if it.kind not in (it.VAR_POSITIONAL, it.VAR_KEYWORD)]
    needed = [it for it in named if it.default is it.empty]
    if strange := [it.name for it in needed if it.name not in KNOWN or it.kind is it.POSITIONAL_ONLY]:
        raise ValueError(
            f"the model's forward needs {', '.join(strange)}; here it can have {', '.join(KNOWN)} by name, or all in "
            "one argument 'data'. Use domainpar.parallelize in a program of your own for other arguments."
        )
    return tuple(name for name in KNOWN if name in parameters)
