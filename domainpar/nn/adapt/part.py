"""One rank's part of a graph, for any module: its tensors carry a mark that says what their rows are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from domainpar.nn.adapt.across import GroupRank, summed
from domainpar.nn.adapt.input_log import input_log, tensor_given
from domainpar.nn.adapt.rows import Axis, NotExact, RowIndex, Rows, counting, last_noted, mark, note_version, rows_of
from domainpar.nn.adapt.slices import Slices
from domainpar.nn.uncompiled import never_compiled
from domainpar.parallel.halo import AdjointHalo
from domainpar.parallel.transport import Transport
from domainpar.plan import PartitionPlan


class GraphPart(GroupRank):
    """One rank's part of a graph: its owned nodes, its ghost nodes and its local edges. `split_graph` makes one.

    A ghost node, or halo node, is a copy of a node that another rank owns. Making a part is *collective*: the plans of
    all ranks are compared.

    Args:
        plan: Who owns what; part `p` lives on rank `p` of the transport.
        transport: Joins the ranks that share the graph.
        device: Where its tensors live.
        sliced: Whether no rank holds whole tensors of the graph. `nodes`, `edges`, `owned_nodes` and `owned_edges` then
            take this rank's slice: consecutive rows in the order of ranks, any number of them. They are *collective*.

    Attributes:
        plan: Who owns what.
        local_ids: Global id of each owned node and ghost node, int64 [num_local].
        edge_index: Local rows of `src` and `dst` of the local edges, int64 [2, num_edges], marked.
        halo: The exchange of rows between owned nodes and ghost nodes.
        node_axis, edge_axis: What marks say of nodes, and of edges.
        ends: What the numbers in the two rows of `edge_index` refer to.
        inputs: The whole tensors that the parts on this rank were given, to be compared with those of other ranks.
    """

    def __init__(
        self, plan: PartitionPlan, transport: Transport, device: torch.device | str = "cpu", sliced: bool = False
    ) -> None:
        super().__init__(transport)
        self.plan, self.device = plan, torch.device(device)
        self._slices = Slices(transport, self.device) if sliced else None
        self.halo = AdjointHalo(plan, transport, device)
        self.inputs = input_log(transport)
        self.local_ids, self._edge_owned = self._to_device(plan.local_ids), self._to_device(plan.edge_owned)
        incident = plan.edge_policy == "incident" and plan.num_parts > 1
        self.node_axis = Axis(self, "nodes", None, self.local_ids[: plan.num_owned])
        counted = self._edge_owned if incident else None
        self.edge_axis = Axis(self, "edges", counted, self._to_device(plan.edge_ids))
        self._joined: WeakValueDictionary[tuple[int, ...], Axis] = WeakValueDictionary()
        src = RowIndex(self.node_axis, complete=incident or plan.num_parts == 1, only_owned=plan.num_parts == 1)
        dst = RowIndex(self.node_axis, complete=True, only_owned=not incident)
        self.ends = (src, dst)
        _ = self.node_axis.total, self.edge_axis.total  # *collective*: asked now, on all ranks
        self.edge_index = note_version(mark(self._to_device(plan.edge_rows), Rows(self.edge_axis, 1, names=self.ends)))

    @property
    def src(self) -> Tensor:
        """Local rows of the nodes where local edges begin, int64 [num_edges], marked, as a tensor of their own."""
        return self._end(0)

    @property
    def dst(self) -> Tensor:
        """Local rows of the nodes where local edges end, int64 [num_edges], marked, as a tensor of their own."""
        return self._end(1)

    def _end(self, end: int) -> Tensor:
        of_end = mark(self.edge_index[end], Rows(self.edge_axis, 0, names=(self.ends[end],)))
        return note_version(of_end, last_noted(self.edge_index))  # both share one version counter

    def nodes(self, whole: Tensor | npt.ArrayLike, dim: int = 0) -> Tensor:
        """Pick this part's rows of a tensor of all nodes, owned nodes and ghost nodes, and mark them as nodes.

        Args:
            whole: A tensor or numpy array with a row for each node of the whole graph, [N, ...], the same on every
                rank. The next forward pass, or closing the world, compares it between ranks. Its gradient is this
                rank's share; `whole.grad = part.all_reduce(whole.grad)` makes it complete.
            dim: The dimension along which the nodes lie.

        Returns:
            The rows, [num_local, ...], on the device of the part, marked.

        Raises:
            ValueError: If its number of rows is not that of the graph's nodes.
        """
        return self.nodes_from_local(self._taken("part.nodes", whole, dim, self.node_axis, self.local_ids), dim)

    def read_nodes(self, whole: Tensor, dim: int = 0) -> Tensor:
        """`nodes` for a tensor that ranks need not compare because all of them have it, such as a parameter."""
        self._check(whole, dim, self.node_axis.total, "nodes of the whole graph")
        return self.nodes_from_local(whole.index_select(dim, self.local_ids.to(whole.device)), dim)

    def edges(self, whole: Tensor | npt.ArrayLike, dim: int = 0) -> Tensor:
        """Pick this part's rows of a tensor of all edges, [E, ...], and mark them as edges, [num_edges, ...].

        Arguments and errors as for `nodes`.
        """
        return self.edges_from_local(self._taken("part.edges", whole, dim, self.edge_axis, self.edge_axis.keys), dim)

    def owned_nodes(self, whole: Tensor | npt.ArrayLike, dim: int = 0) -> Tensor:
        """Pick the rows that this part owns of a tensor of all nodes, [N, ...]: targets, masks, weights.

        They are the rows of a model's result, [num_owned, ...], in the same order. Arguments and errors as for `nodes`.
        """
        return self._own(self._taken("part.owned_nodes", whole, dim, self.node_axis, self.node_axis.keys))

    def owned_edges(self, whole: Tensor | npt.ArrayLike, dim: int = 0) -> Tensor:
        """Pick the rows that this part owns of a tensor of all edges, [E, ...], in the order of a model's result.

        Arguments and errors as for `nodes`.
        """
        keys = self.edge_axis.keys[self._edge_owned]
        return self._own(self._taken("part.owned_edges", whole, dim, self.edge_axis, keys))

    def nodes_from_local(self, local: Tensor, dim: int = 0) -> Tensor:
        """Mark a tensor with a row for each of `local_ids`, [num_local, ...]: owned nodes, then ghost nodes.

        The rows of ghost nodes are up to date. The owned rows may be written in place, `local[: part.plan.num_owned] +=
        ...`: the next pass then fetches the rows of ghost nodes. `dim` is the dimension along which the nodes lie.

        Raises:
            ValueError: If it has another number of rows.
        """
        self._check(local, dim, self.plan.num_local, "owned nodes and ghosts")
        return _marked(_counting(local.to(self.device)), Rows(self.node_axis, dim % local.dim()))

    def edges_from_local(self, local: Tensor, dim: int = 0) -> Tensor:
        """Mark a tensor with a row for each column of `edge_index`, [num_edges, ...].

        Raises:
            ValueError: If it has another number of rows.
        """
        self._check(local, dim, self.plan.num_edges, "local edges")
        return _marked(_counting(local.to(self.device)), Rows(self.edge_axis, dim % local.dim()))

    def replicate(self, tensor: Tensor | npt.ArrayLike) -> Tensor:
        """Mark a tensor that is the same on every rank, such as a time step or a condition of the whole graph.

        Its gradient is this rank's share; `t.grad = part.all_reduce(t.grad)` makes it complete.
        """
        taken = tensor_given(tensor, "what is the same everywhere")
        self.inputs.remember("part.replicate", taken)
        return note_version(mark(_counting(taken.to(self.device)), None))

    def all_reduce(self, owned: Tensor, *, differentiable: bool = False) -> Tensor:
        """Add up a tensor over all parts: a loss to print, a count, forces to train on. *Collective*.

        Args:
            owned: This rank's share, of the same shape and type on every rank.
            differentiable: Whether the sum has a gradient; backward is then *collective* as well. It adds up the
                gradients that all ranks have of the sum. So each rank's loss has to be its share: a loss over the whole
                sum, computed on every rank, would count once for each rank.

        Returns:
            The sum, the same bits on every rank.
        """
        return summed(owned, self) if differentiable else self.sum_over_ranks(owned.detach())

    def node_mean_share(self, losses: Tensor, weights: Tensor | None = None) -> Tensor:
        """This rank's share of a mean over all nodes of the graph; the shares of all ranks add up to the mean.

        It is a rank's loss as `backward` and `reduce_gradients` need it. *Collective* if there are weights.

        Args:
            losses: A loss for each node that this part owns, [num_owned, ...].
            weights: A weight for each of these nodes, [num_owned], or a mask. The mean is divided by their sum over all
                ranks.

        Returns:
            The share, [].

        Raises:
            ValueError: If `losses` or `weights` does not have a row for each owned node.
            NotExact: If they are rows of another part.
        """
        return self._mean(losses, weights, self.node_axis, self.plan.num_owned)

    def edge_mean_share(self, losses: Tensor, weights: Tensor | None = None) -> Tensor:
        """This rank's share of a mean over all edges of the graph, of a loss for each edge that this part owns.

        Arguments and errors as for `node_mean_share`.
        """
        return self._mean(losses, weights, self.edge_axis, int(self.plan.edge_owned.sum()))

    def _mean(self, losses: Tensor, weights: Tensor | None, axis: Axis, num_owned: int) -> Tensor:
        for tensor in [losses] if weights is None else [losses, weights]:
            self._check(tensor, 0, num_owned, f"owned {axis.name}")
            rows = rows_of(tensor)
            of = rows.axis.part.number if isinstance(rows, Rows) else tensor.__dict__.get(_OWNED_BY, self.number)
            if of != self.number:
                raise NotExact(
                    f"a mean over {axis.name} was given a tensor of shape {tuple(tensor.shape)} with rows of another "
                    "part; take results, targets and weights of one part, and its own mean."
                )
        per_row = losses.shape[1:].numel()
        if weights is None:
            return losses.sum() / (axis.total * per_row)
        beside = weights.view(-1, *(1 for _ in losses.shape[1:]))  # one weight per row, whatever its dimensions
        return (losses * beside).sum() / (self.all_reduce(weights.sum()) * per_row)

    def joined(self, pieces: Sequence[Axis]) -> Axis:
        """The axis of the rows of several axes, one after the other; the same object for the same axes."""
        key = tuple(id(piece) for piece in pieces)
        axis = self._joined.get(key)  # an id may have been used again since: so the pieces are compared as well
        if axis is None or any(mine is not yours for mine, yours in zip(axis.pieces, pieces)):
            axis = self._joined[key] = Axis.joined(tuple(pieces))
        return axis

    def _own(self, owned: Tensor) -> Tensor:
        """Note on a tensor which part its rows belong to, by number: copies and files of it may outlive this part."""
        owned.__dict__[_OWNED_BY] = self.number
        return owned

    def _to_device(self, array: npt.NDArray[np.generic]) -> Tensor:
        tensor = torch.from_numpy(np.ascontiguousarray(array)).to(self.device)
        tensor.untyped_storage().__dict__[_OF_A_PART] = True
        return tensor

    def _taken(self, call: str, whole: Any, dim: int, axis: Axis, ids: Tensor) -> Tensor:
        """Rows of a tensor of the whole graph, which is remembered so that ranks can compare it."""
        if self._slices is not None:
            return self._slices.rows(call, whole, dim, ids, axis.total, f"{axis.name} of the whole graph")
        tensor = tensor_given(whole, f"what {call} takes")
        self._check(tensor, dim, axis.total, f"{axis.name} of the whole graph")
        self.inputs.remember(call, tensor)
        with counting():
            return tensor.index_select(dim, ids.to(tensor.device)).to(self.device)

    def _check(self, tensor: Tensor, dim: int, expected: int, what: str) -> None:
        if not -tensor.dim() <= dim < tensor.dim() or tensor.size(dim) != expected:
            raise ValueError(
                f"a tensor of shape {tuple(tensor.shape)} was given where dimension {dim} is to hold {expected} {what}."
            )


never_compiled(
    *(GraphPart.nodes, GraphPart.edges, GraphPart.owned_nodes, GraphPart.owned_edges, GraphPart.replicate),
    *(GraphPart.nodes_from_local, GraphPart.edges_from_local, GraphPart.all_reduce, GraphPart._mean, GraphPart._end),
)

# Set on the memory of a tensor, as views of it have no `Rows` of their own where nobody watches.
_OF_A_PART = "_domainpar_of_a_part"
_OWNED_BY = "_domainpar_owned_by"  # of targets and weights: the number of the part whose owned rows they are


def _counting(tensor: Tensor) -> Tensor:
    """A view that counts changes in place; a tensor of inference mode cannot count, so it is copied."""
    with counting():
        return tensor.clone() if tensor.is_inference() else tensor.view_as(tensor)


def _marked(tensor: Tensor, rows: Rows) -> Tensor:
    """Mark a tensor, and note on its memory that it holds rows of a part."""
    tensor.untyped_storage().__dict__[_OF_A_PART] = True
    return note_version(mark(tensor, rows))


def holds_rows(tensor: Tensor) -> bool:
    """Whether a tensor holds rows of a part: it is marked, or is a view into memory that is."""
    if isinstance(rows_of(tensor), Rows):
        return True
    if isinstance(tensor, nn.Parameter) or tensor.layout is not torch.strided:
        return False
    return _OF_A_PART in tensor.untyped_storage().__dict__
