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
from torch.utils.checkpoint import checkpoint

from domainpar.nn.classifier import Differs, EdgeClassifier, Exactness
from domainpar.nn.heads import EDGE, Head, Readings
from domainpar.nn.interaction import OnStages
from domainpar.nn.published import Iterated
from domainpar.parallel.halo import Halo
from domainpar.parallel.local import LocalGraph
from domainpar.parallel.transport import Transport
from domainpar.parallel.world import World
from domainpar.placed.activation_checkpoint import kept_ghosts
from domainpar.placed.axes import Rows
from domainpar.placed.part import GraphPart
from domainpar.placed.replicas import check_sizes, take_from_root
from domainpar.placed.split import split_graph
from domainpar.placed.tensor import Placed
from domainpar.placed.verify import verify
from domainpar.tracking.networks.shares import GradientShares, buffers_kept, here, numbered

KNOWN = ("x", "edge_index", "edge_attr", "batch")


class OnEvents(EdgeClassifier):
    """A module that scores edges, run on parts of stored events: the result of one rank, to rounding.

    Args:
        module: Takes, by name, what it wants of x [N, node features], edge_index [2, E], edge_attr [E, edge features]
            and batch [N] (all 0), or a PyG `data` with these; returns one logit for each edge, [E] or [E, 1]. If
            it has an attribute `deep_supervision` that is true, it returns those of several readouts in training,
            [E, readouts], the last one last. With another head, it returns [N, columns] for nodes or [columns] for the
            graph; with several, a dictionary of them by name.
        heads: What it is read for.
        products: Type of products of matrices, if not that of the parameters: by torch's autocast.

    Attributes:
        module: The module.
        sums: How often the last forward pass summed over ranks.

    Raises:
        ValueError: If the module wants other arguments, or holds what a run cannot keep or sum.
    """

    def __init__(self, module: nn.Module, heads: Sequence[Head] = (EDGE,), products: torch.dtype | None = None) -> None:
        super().__init__()
        self.heads, self.module, self.products = tuple(heads), module, products
        _check_module(module)
        self._wants = wanted_arguments(module)
        self._parts: WeakKeyDictionary[LocalGraph, tuple[GraphPart, Tensor]] = WeakKeyDictionary()

    @property
    def ways_to_recompute(self) -> Sequence[int | None]:
        return (None, 1) if self._why_all_is_kept() is None else (None,)

    def _why_all_is_kept(self) -> str | None:
        if not isinstance(self.module, Iterated):
            return (
                "is for networks that are built in; in a module of your own, call its layers with "
                "torch.utils.checkpoint.checkpoint(..., use_reentrant=False, context_fn=domainpar.kept_ghosts)."
            )
        if any(getattr(child, "track_running_stats", False) for child in self.module.modules()):
            return "is not for --norm batch, whose running means would be updated twice; take --norm graph or layer."
        return None

    def recompute(self, every: int | None) -> None:
        """As of any network.

        Raises:
            ValueError: If the module has no iterations apart from each other, or one computed twice would be
                counted twice: with what to do instead.
        """
        if every is not None and (why := self._why_all_is_kept()):
            raise ValueError(f"--recompute-every {every} {why}")
        super().recompute(every)
        if isinstance(self.module, Iterated):
            self.module.recompute_every = every
            self.module.through = partial(checkpoint, use_reentrant=False, context_fn=kept_ghosts)

    def forward(self, graph: LocalGraph, halo: Halo, key: int | None = None) -> Tensor:
        """Logits of all local edges, [num_edges], or in training [readouts, num_edges]. *Collective*.

        They are 0 for edges that another rank counts.

        Args:
            key: Of the random numbers of this call, the same on every rank, for training; None to evaluate, where
                those that the module draws all the same are always the same.
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
            self._parts[graph] = GraphPart(numbered(graph.plan, halo.transport), halo.transport, device), owned
        part, owned = self._parts[graph]
        x, edge_attr = part.nodes_from_local(graph.features), part.edges_from_local(graph.edge_features)
        before = part.ranks.num_sums
        results = self._results(part, x, edge_attr, key)
        part.ranks.log.compare()
        self.sums = part.ranks.num_sums - before
        rows = dict(zip(results, here(list(results.values()), self.module, part.ranks)))
        dtype, edges = graph.features.dtype, None
        if (logits := rows.pop(EDGE.name, None)) is not None:
            readouts = logits.t() if logits.dim() == 2 and logits.size(1) > 1 else logits.reshape(-1)
            zeros = graph.features.new_zeros(*readouts.shape[:-1], graph.num_edges)
            edges = zeros.index_copy(-1, owned, readouts.to(dtype))
        shape = {head.name: (-1, head.columns) if head.of == "node" else (head.columns,) for head in self.heads}
        return Readings(edges, {name: of_head.reshape(shape[name]).to(dtype) for name, of_head in rows.items()})

    def _results(self, part: GraphPart, x: Tensor, edge_attr: Tensor, key: int | None) -> dict[str, Tensor]:
        """What the module returns for each head, placed. *Collective*.

        Raises:
            ValueError: If that is not what the heads are for.
            NotExact: If the module has no exact form, or leaves rows of a part where a checkpoint would keep them.
        """
        self.module.train(key is not None)
        # All random numbers are of this key, which is every rank's, also those of a checkpoint of the module's own.
        with torch.random.fork_rng(devices=[]), buffers_kept(self.module):
            torch.manual_seed(0 if key is None else key)
            with torch.autocast(part.device.type, self.products, enabled=self.products is not None):
                results = by_name(self.heads, self.module(**self.arguments(part, x, edge_attr)))
        several = key is not None and bool(getattr(self.module, "deep_supervision", False))
        for head in self.heads:
            _check_result(part, head, several and head == EDGE, results[head.name])
        return results

    @property
    def layers(self) -> nn.Module:
        """The user's module."""
        return self.module

    @property
    def changing(self) -> list[Tensor]:
        """The module's buffers, but for what it keeps of a part."""
        return [buffer for buffer in self.module.buffers() if not isinstance(buffer, Placed)]

    def gradients(self, over_ranks: bool = False) -> GradientShares:
        """The gradients that backward leaves in the parameters."""
        return GradientShares(self)

    def exactness(self, transport: Transport) -> Exactness:
        """To rounding."""
        return Exactness(bitwise=False, problem="this network is not built on stages")

    def take_from_root(self, world: World) -> None:
        """Give every rank the parameters and buffers of rank 0. *Collective*."""
        take_from_root({**dict(self.named_parameters()), **dict(self.named_buffers())}, world)

    def verify(self, edge_index: Tensor, x: Tensor, edge_attr: Tensor) -> str:
        """Run the module on one rank, in training and in evaluation, then compare it whole and split over 3 ranks."""
        alone = split_graph(edge_index, len(x), World.alone())
        other = OnEvents(copy.deepcopy(self.module).cpu().double(), self.heads)  # the piece of an event is on the host
        with torch.no_grad():
            for key in (1, None):
                other._results(alone, alone.nodes(x), alone.edges(edge_attr), key)
        verification = verify(
            self.module,
            (edge_index, len(x)),
            parts=3,
            inputs=lambda part: self.arguments(part, part.nodes(x), part.edges(edge_attr)),
        )
        if not verification.exact:
            raise Differs(f"the network is not the same whole and split:\n{verification}")
        return verification.conclusion

    def arguments(self, part: GraphPart, x: Tensor, edge_attr: Tensor) -> dict[str, Any]:
        """Arguments of the module, by name.

        Args:
            x: Node features, placed.
            edge_attr: Edge features, placed.
        """
        batch = part.nodes_from_local(torch.zeros(part.plan.num_local, dtype=torch.int64, device=part.device))
        tensors = {"x": x, "edge_index": part.edge_index, "edge_attr": edge_attr, "batch": batch}
        if self._wants == ("data",):
            from torch_geometric.data import Data

            return {"data": Data(**{name: tensors[name] for name in KNOWN[:3]})}
        return {name: tensors[name] for name in self._wants}


class StagesOnGPU(OnEvents):
    """A network on stages where stages have no kernels: its plain form, with the same parameters, to rounding."""

    def __init__(self, network: OnStages) -> None:
        plain = network.plain
        super().__init__(plain, network.heads, network.products)
        del self.module
        for name, child in network.named_children():
            self.add_module(name, child)
        # No children of it: checkpoints have the names of stages.
        vars(self).update(network=network, module=plain)
        self.recompute(network.recompute_every)

    def exactness(self, transport: Transport) -> Exactness:
        """To rounding."""
        return Exactness(bitwise=False, problem="a GPU computes it in plain torch")

    @property
    def layers(self) -> nn.Module:
        """The stages."""
        layers: nn.Module = vars(self)["network"].layers
        return layers

    @property
    def computed(self) -> nn.Module:
        """The plain form."""
        return self.module

    def read(self, graph: LocalGraph, halo: Halo, key: int | None = None) -> Readings:
        """As of any network on parts."""
        vars(self)["module"] = vars(self)["network"].plain  # with the constants that were loaded, or moved
        return super().read(graph, halo, key)


def on_device(network: EdgeClassifier, device: torch.device, as_on_gpus: bool = False) -> EdgeClassifier:
    """The network on the device that parts are on; `as_on_gpus`: as it is computed there, whatever the device."""
    of_gpu = device.type != "cpu" or as_on_gpus
    return (StagesOnGPU(network) if of_gpu and isinstance(network, OnStages) else network).to(device)


def by_name(heads: Sequence[Head], result: Any) -> dict[str, Any]:
    """The results of a module by the names of its heads; what a module with one returns is that one's.

    Raises:
        ValueError: If it does not return a dictionary with the names of its heads, where it has several.
    """
    if len(heads) == 1 and not isinstance(result, Mapping):
        return {heads[0].name: result}
    names = [head.name for head in heads]
    if not isinstance(result, Mapping) or sorted(map(str, result)) != sorted(names):
        kind = "Tensor" if isinstance(result, Tensor) else type(result).__name__
        returned = f"one with {', '.join(map(str, result))}" if isinstance(result, Mapping) else kind
        raise ValueError(f"the model returned {returned}; return a dictionary of tensors named {', '.join(names)}.")
    return dict(result)


def _check_module(module: nn.Module) -> None:
    """Refuse a module that holds what a run cannot keep or sum.

    Raises:
        ValueError: With what it is and what to do.
    """
    check_sizes(module)
    if any(type(child).get_extra_state is not nn.Module.get_extra_state for child in module.modules()):
        raise ValueError("the model keeps extra state (get_extra_state), which a run's checkpoints would lose.")
    for name, parameter in module.named_parameters():
        if parameter.is_complex():
            raise ValueError(f"{name} is complex; keep real and imaginary part apart.")
        if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
            raise ValueError(
                f"there is a hook on the gradient of {name}: it would see one rank's share of it; clip with --clip."
            )


def _check_result(part: GraphPart, head: Head, readouts: bool, result: Any) -> None:
    columns = "" if head.columns == 1 else f", {head.columns}"
    wanted = {
        "edge": "one logit for each edge, [E], in the order of edge_index",
        "node": f"numbers of each node, [N{columns}], in the order of x",
        "graph": f"numbers of the whole graph, [{head.columns}]",
    }[head.of]
    if not isinstance(result, Tensor):
        raise ValueError(f"the model returned a {type(result).__name__}; return {wanted}, as a tensor.")
    rows = result.place if isinstance(result, Placed) and isinstance(result.place, Rows) else None
    if head.of == "graph":
        fits = rows is None and result.numel() == head.columns
    else:
        several = readouts and result.dim() == 2 and result.size(1) > 1
        shapes = ((), (1,)) if head.columns == 1 else ((head.columns,),)
        axis = part.edge_axis if head.of == "edge" else part.node_axis
        fits = rows is axis.rows(0) and (several or result.shape[1:] in shapes)
    if not fits:
        of = f" of head {head.name}" if head != EDGE else ""
        raise ValueError(
            f"the model returned{of} a tensor of shape {tuple(result.shape)}, with rows of "
            f"{'nothing' if rows is None else rows.axis.name}; return {wanted}."
        )


def wanted_arguments(module: nn.Module) -> tuple[str, ...]:
    """Which of the known arguments a module takes.

    Raises:
        ValueError: If it needs others.
    """
    parameters = inspect.signature(module.forward).parameters
    if list(parameters) == ["data"]:
        return ("data",)
    named = [
        parameter
        for parameter in parameters.values()
        if parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    ]
    needed = [parameter for parameter in named if parameter.default is parameter.empty]
    if strange := [
        parameter.name
        for parameter in needed
        if parameter.name not in KNOWN or parameter.kind is parameter.POSITIONAL_ONLY
    ]:
        raise ValueError(
            f"the model's forward needs {', '.join(strange)}; here it can have {', '.join(KNOWN)} by name, or all in "
            "one argument 'data'. Use domainpar.parallelize in a program of your own for other arguments."
        )
    return tuple(name for name in KNOWN if name in parameters)
