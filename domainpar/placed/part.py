"""One rank's part of a graph: tensors of the whole graph, of which each rank holds its rows."""

from __future__ import annotations

import copy
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

import domainpar.placed.rules  # noqa: F401  # fills the table of calls
from domainpar.common.agreement import agree, difference, gather, on_all
from domainpar.parallel.halo import AdjointHalo, ask_owners
from domainpar.parallel.transport import OfThisProcess, Transport
from domainpar.placed.axes import Axis, Names
from domainpar.placed.input_log import tensor_given
from domainpar.placed.moves import from_local, place_rows, to_local, whole, whole_on
from domainpar.placed.ranks import ranks_of
from domainpar.placed.sets import EDGES, Kind, Sets, name_of
from domainpar.placed.tensor import Placed, is_rows, settle
from domainpar.plan import PartitionPlan, plan_slices

_CUT = "give every rank consecutive rows of the same tensor, in the order of ranks; a slice may be empty"
_GONE = {
    "owned_nodes": "part.nodes(y), or y itself: results have a row for each node of the whole graph",
    "owned_edges": "part.edges(y), or y itself: results have a row for each edge of the whole graph",
    "node_mean_share": "losses.mean(), or any loss of torch: F.mse_loss(out, y)",
    "edge_mean_share": "losses.mean(), or any loss of torch",
    "all_reduce": "the figure itself: loss.item(), x.sum() are of the whole graph on every rank",
    "replicate": "the tensor itself: what every rank holds needs no mark",
    "gather": "part.whole(out)",
    "read_nodes": "part.nodes(x)",
    "src": "part.edge_index[0]",
    "dst": "part.edge_index[1]",
}
_ASKED = ("is_node_attr", "is_edge_attr")  # of a store of torch_geometric


class GraphPart(OfThisProcess):
    """One rank's part of a graph: its owned nodes, its ghost nodes and its edges. `split_graph` makes one.

    A ghost node, or halo node, is a copy of a node that another rank owns. Making a part is *collective*: the plans of
    all ranks are compared.

    Args:
        plan: Who owns what; part `p` lives on rank `p` of the transport.
        transport: Joins the ranks that share the graph.
        device: Where its tensors live.
        sliced: Whether no rank holds whole tensors of the graph. `nodes` and `edges` then take this rank's slice:
            consecutive rows in the order of ranks, any number of them, or its own rows (`owned`). They are
            *collective*.
        halo: The exchange, if it is not that of the plan over the transport; of a graph with one kind of nodes.
        sets: The kinds of nodes and edges, if the graph has several; the plan is that of all in one numbering.

    Attributes:
        plan: Who owns what.
        edge_index: `src` and `dst` of each edge of the whole graph, int64 [2, E]; this rank holds its own edges. Of a
            graph with several kinds a dictionary of them, by the kind of edges (kind of src, relation, kind of dst).
        axes: The rows of each kind of nodes and of edges.
        ranks: The ranks that share the graph.
    """

    edge_index: Any

    def __init__(
        self,
        plan: PartitionPlan,
        transport: Transport,
        device: torch.device | str = "cpu",
        sliced: bool | Literal["owned"] = False,
        halo: AdjointHalo | None = None,
        sets: Sets | None = None,
    ) -> None:
        torch._C._set_view_replay_enabled(True)  # so that gradients of written views follow their calls, not strides
        self.plan, self.transport, self.device = plan, transport, torch.device(device)
        self.ranks = ranks = ranks_of(transport)
        self._slices = Slices(transport, self.device, sliced == "owned") if sliced else None
        rows, edge_ids = plan.edge_rows, plan.edge_ids
        if not plan.edge_owned.all():  # each edge is counted by one rank
            mine = np.flatnonzero(plan.edge_owned)
            rows, edge_ids = rows.take(mine, axis=1), edge_ids.take(mine)
        if sets is None:
            totals = torch.tensor([plan.num_owned, len(edge_ids)], device="cpu")
            transport.all_reduce(totals)
            sets = Sets.single_kind(*totals.tolist())
        self.sets, self.axes = sets, dict[Kind, Axis]()
        family: list[Axis] = []
        for kind, (first, last) in sets.ends.items():
            within = plan if len(sets.ends) == 1 else plan.within(first, last)
            owned, exchange = self._to_device(within.owned_ids), halo or AdjointHalo(within, transport, device)
            self.axes[kind] = Axis(name_of(kind), owned, last - first, ranks, exchange, family)
        ids = rows if plan.num_parts == 1 else plan.local_ids.take(rows)
        indices = {}
        for kind, (first, last) in sets.edges.items():
            begin, end = np.searchsorted(edge_ids, [first, last])
            if kind not in self.axes:  # else other edges join them, and they are owned like the ends of these
                here = edge_ids[begin:end]
                own = self._to_device(here - first if first else here)
                self.axes[kind] = Axis(name_of(kind), own, last - first, ranks, None, family)
            ends = (Names(self.axes[kind[0]], "held"), Names(self.axes[kind[2]], "owned"))
            starts, numbers = np.array(sets.starts(kind)), ids[:, begin:end]
            local = self._to_device(numbers - starts if starts.any() else numbers)
            indices[kind] = Placed(local, self.axes[kind].rows(1), ends)
        family += self.axes.values()
        self.edge_index = indices[EDGES] if sets.is_one else indices

    def __getattr__(self, name: str) -> Any:
        if name in _GONE:
            raise AttributeError(f"a part has no {name} any more; write {_GONE[name]}.")
        raise AttributeError(f"'GraphPart' object has no attribute {name!r}")

    @property
    def local_ids(self) -> Tensor:
        """Global id of each owned node and ghost node, int64 [num_local]."""
        self._one("part.local_ids")
        return self._to_device(self.plan.local_ids)

    @property
    def halo(self) -> AdjointHalo:
        """The exchange of rows between owned nodes and ghost nodes, if there is one kind of them."""
        return self.node_axis.halo  # type: ignore[return-value]

    @property
    def node_axis(self) -> Axis:
        """The rows of nodes, if there is one kind of them."""
        return self._axis("part.node_axis", None, self.sets.nodes)

    @property
    def edge_axis(self) -> Axis:
        """The rows of edges, if there is one kind of them."""
        return self._axis("part.edge_axis", None, list(self.sets.edges))

    def nodes(self, whole: Tensor | npt.ArrayLike, kind: Kind = None, dim: int = 0) -> Tensor:
        """A tensor with a row for each node, of which each rank holds its own.

        Args:
            whole: A tensor or numpy array with a row for each node of the whole graph, [N, ...], the same on every
                rank, which is compared. If it wants a gradient, it gets the whole one, on every rank.
            kind: Which nodes, if the graph has several kinds. An integer in its place is `dim`.
            dim: The dimension along which the nodes lie.

        Returns:
            The tensor, [N, ...], on the device of the part.

        Raises:
            ValueError: If its number of rows is not that of the graph's nodes, or there is no such kind.
        """
        return self._placed("part.nodes", whole, kind, dim, self.sets.nodes)

    def edges(self, whole: Tensor | npt.ArrayLike, kind: Kind = None, dim: int = 0) -> Tensor:
        """A tensor with a row for each edge, [E, ...]. Arguments and errors as for `nodes`."""
        return self._placed("part.edges", whole, kind, dim, list(self.sets.edges))

    def place(self, data: Any) -> Any:
        """A copy of a data object of torch_geometric with placed rows of nodes and edges and a placed `edge_index`.

        torch_geometric decides which fields have a row for each node or edge; all others stay as they are.

        Args:
            data: `Data`, or `HeteroData` if the graph has several kinds, the same on every rank.

        Raises:
            ValueError: If its edges are not as many as those of the part.
        """
        placed = copy.copy(data)
        for store in placed.stores:
            kind = getattr(store, "_key", None)
            edge_index = self.edge_index if kind is None or self.sets.is_one else self.edge_index.get(kind)
            # For all fields before any is changed: torch_geometric counts rows of the fields that are there.
            of_nodes, of_edges = ([key for key in store if getattr(store, ask, lambda _: False)(key)] for ask in _ASKED)
            for key, value in list(store.items()):
                if key == "edge_index":
                    if edge_index is None or value.shape != edge_index.shape:
                        raise ValueError(
                            f"part.place: an edge_index {list(value.shape)} where the part has {edge_index}."
                        )
                    store[key] = edge_index
                elif isinstance(value, (Tensor, np.ndarray)) and (key in of_nodes or key in of_edges):
                    give = self.nodes if key in of_nodes else self.edges
                    store[key] = give(value, kind, placed.__cat_dim__(key, value, store))
        return placed

    def nodes_from_local(self, local: Tensor, dim: int = 0) -> Tensor:
        """A tensor from rows of owned nodes and, behind them, of ghost nodes, [num_local, ...], up to date.

        Raises:
            ValueError: If it has another number of rows; or of a `part_of_domain`, whose ghosts may be images.
        """
        self._one("part.nodes_from_local")
        if self._slices is not None and self._slices.owned:
            raise ValueError(
                "rows of a host's ghosts may be those of images: part.nodes(x) takes the owned rows alone."
            )
        count = self.plan.num_owned
        self._check(local, dim, self.plan.num_local, "owned nodes and ghosts")
        local, dim = local.detach().to(self.device), dim % local.dim()
        placed = Placed(local.narrow(dim, 0, count), self.node_axis.rows(dim))
        ghosts = local.narrow(dim, count, self.plan.num_ghosts).movedim(dim, 0)
        placed.cell.ghosts[self.halo] = placed.memory.generation, ghosts
        return placed

    def edges_from_local(self, local: Tensor, dim: int = 0) -> Tensor:
        """A tensor from a row for each edge of this rank's plan, [num_edges, ...].

        Raises:
            ValueError: If it has another number of rows.
        """
        self._one("part.edges_from_local")
        self._check(local, dim, self.plan.num_edges, "edges of this rank")
        mine = self._to_device(np.flatnonzero(self.plan.edge_owned))
        local = local.detach().to(self.device).index_select(dim, mine)
        return Placed(local, self.edge_axis.rows(dim % local.dim()))

    def to_local(self, tensor: Tensor) -> Tensor:
        """The rows of a tensor that this rank owns, a plain tensor, in the order of `nodes_from_local`.

        *Collective* in the backward pass, and if the tensor waits for shares of other ranks.

        Args:
            tensor: A tensor with rows of any axis; of others this is the whole tensor.
        """
        if not is_rows(tensor):
            return whole(tensor)
        place: Any = settle(tensor).place  # type: ignore[arg-type]
        return to_local(tensor, place.axis, place.dim).clone()

    def whole(self, tensor: Tensor, rank: int | None = None) -> Tensor | None:
        """The rows of all ranks in the order of the whole graph, a plain tensor. *Collective*, backward too.

        Args:
            tensor: A tensor with rows of any axis; others are returned as they are.
            rank: The one rank that gets it, without a gradient; None for all.

        Returns:
            The tensor; None on ranks that do not get it.
        """
        return whole(tensor) if rank is None else whole_on(tensor.detach(), rank)

    def _axis(self, call: str, kind: Kind, kinds: list[Kind]) -> Axis:
        """The rows of a kind; of the only one where none is given."""
        if kind is None and len(kinds) == 1:
            (kind,) = kinds
        if kind not in kinds:
            known = ", ".join(map(repr, kinds))
            raise ValueError(f"{call} needs a kind, one of {known}, but it is {kind!r}.")
        return self.axes[kind]

    def _one(self, call: str) -> None:
        if not self.sets.is_one:
            raise ValueError(f"{call} is for a graph of one kind of nodes and edges.")

    def _placed(self, call: str, given: Any, kind: Kind, dim: int, kinds: list[Kind]) -> Tensor:
        kind, dim = (None, kind) if isinstance(kind, int) else (kind, dim)
        axis = self._axis(call, kind, kinds)
        if self._slices is not None:
            rows = self._slices.rows(call, given, dim, axis.ids, axis.total, f"{axis.name} of the whole graph")
            return from_local(rows, axis, dim)
        tensor = tensor_given(given, f"what {call} takes")
        if isinstance(tensor, Placed):
            raise ValueError(f"{call} takes a whole tensor, and this one is placed already: use it as it is.")
        self._check(tensor, dim, axis.total, f"{axis.name} of the whole graph")
        self.ranks.log.give(call, tensor)
        return place_rows(tensor.to(self.device), axis, dim)

    def _to_device(self, array: npt.NDArray[np.generic]) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self.device)

    def _check(self, tensor: Tensor, dim: int, expected: int, what: str) -> None:
        if not -tensor.dim() <= dim < tensor.dim() or tensor.size(dim) != expected:
            raise ValueError(
                f"a tensor of shape {tuple(tensor.shape)} was given where dimension {dim} is to hold {expected} {what}."
            )


class Slices:
    """Takes this rank's slices and returns the rows that its part needs from all slices.

    Args:
        transport: Joins the ranks that share the graph.
        device: Where the rows go.
        owned: Whether the slice of each rank has to be the rows that it needs.
    """

    def __init__(self, transport: Transport, device: torch.device, owned: bool = False) -> None:
        self._transport, self._device, self.owned = transport, device, owned
        # Of each call the lengths of slices, the exchange for them, and where rows lie among the slice and what came:
        # the slices of one step are most often those of the next.
        self._fetches: dict[str, tuple[list[int], AdjointHalo, Tensor]] = {}

    def rows(self, call: str, given: Tensor | npt.ArrayLike, dim: int, ids: Tensor, total: int, what: str) -> Tensor:
        """Some rows of the tensor that the slices of all ranks make up. *Collective*, forward and backward.

        Args:
            call: Whose rows they are; the ids are the same in each call of a name.
            given: This rank's slice.
            dim: The dimension along which it was cut.
            ids: Global ids of the rows, int64.
            total: Rows of all slices together.
            what: The rows in words.

        Raises:
            Refused: On all ranks alike, if the slices do not make up one tensor of so many rows.
        """

        def checked() -> tuple[Tensor, int, str]:
            mine = tensor_given(given, f"what {call} takes")
            if not -mine.dim() <= dim < mine.dim():
                raise ValueError(f"{call}: a tensor of {tuple(mine.shape)} has no dimension {dim} to hold {what}.")
            rest = [size for at, size in enumerate(mine.shape) if at != dim % mine.dim()]
            words = f"of {rest} {str(mine.dtype).removeprefix('torch.')}, cut along dimension {dim}"
            return mine, mine.size(dim), words

        transport = self._transport
        mine, length, row = on_all(transport, checked)
        gradient = mine.requires_grad and torch.is_grad_enabled()  # its backward is an exchange between all ranks
        alike = {f"a slice of {call}": row, f"a gradient of {call}": "asked for" if gradient else "not"}
        agree(transport, difference(transport, alike, _CUT))
        if self.owned:
            text = (
                f"{call}: {length} rows were given where this rank has {len(ids)} {what}; give those, in their order."
            )
            agree(transport, None if length == len(ids) else text)
            return mine.to(self._device).clone(memory_format=torch.contiguous_format)
        lengths = gather(transport, length)
        if sum(lengths) != total:
            text = f"{call}: slices of {lengths} rows were given where all have {total} {what} together; {_CUT}."
            agree(transport, text)
        known = self._fetches.get(call)
        if known is None or known[0] != lengths:
            wanted, bounds = ids.cpu().numpy(), np.concatenate([[0], np.cumsum(lengths)])
            plan = plan_slices(wanted, bounds, transport.rank, ask_owners(transport))
            first, last = bounds[transport.rank : transport.rank + 2]
            here = (wanted >= first) & (wanted < last)
            places = np.where(here, wanted - first, length + np.searchsorted(plan.ghost_ids, wanted))
            halo = AdjointHalo(plan, transport, self._device)
            known = self._fetches[call] = lengths, halo, torch.from_numpy(places).to(self._device)
        _, halo, where = known
        return halo.extend(mine.to(self._device).movedim(dim, 0)).index_select(0, where).movedim(0, dim).contiguous()
