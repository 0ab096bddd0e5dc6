"""The halo exchange: owners send rows of nodes to the ghost copies, which send sums back.

It has two operations, adjoint to each other: `fill_ghosts` (owner -> ghost, a copy; `start_fill` lets a rank compute
meanwhile) and `sum_to_owners` (ghost -> owner, a sum). Rows travel without padding, to neighbours only. Two classes
build on them the two backward passes of `docs/same_bits.md`, rule 3: `AdjointHalo` for any model, `CompleteHalo` for
models with the same bits on any number of ranks. In a `HostHalo` another program carries the rows.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from domainpar.common import faults
from domainpar.common.agreement import agree
from domainpar.parallel.tables import empty_table
from domainpar.parallel.transport import Pending, Transport
from domainpar.plan import Ask, IntArray, PartitionPlan

HostExchange = tuple[Callable[[Tensor], None], Callable[[Tensor], None]]
"""The host's `forward` and `reverse`; each changes a table [owned | ghosts] in place. Both are *collective*."""

CARRIED = (torch.float64, torch.float32)
MARKS = 1000  # small numbers: sums of them are exact in float32


class HaloRows:
    """Rows of owned nodes, and the ghost rows that are on their way to this rank.

    Attributes:
        halo: The halo that carries them.
        owned: The owned rows as autograd knows them, [num_owned, width].
        local: Owned rows, then ghost rows, [num_local, width]; ghost rows are not valid before `finish`.
    """

    def __init__(self, halo: CompleteHalo, owned: Tensor, local: Tensor, pending: Pending | None = None) -> None:
        self.halo, self.owned, self.local = halo, owned, local
        self._pending = pending

    def with_owned(self, owned: Tensor) -> HaloRows:
        """The same rows, with another tensor as `owned`, [num_owned, width]."""
        return HaloRows(self.halo, owned, self.local, self._pending)

    def progress(self) -> None:
        """Let messages move while this rank computes. Does not wait."""
        if self._pending is not None:
            self._pending.progress()

    def finish(self) -> Tensor:
        """Wait for the ghost rows and return them, [num_ghosts, width]. It may be called again."""
        if self._pending is not None:
            self._pending.finish()
            self._pending = None
        return self.local[self.halo.plan.num_owned :]


class Halo:
    """The two exchanges of one part's plan over one transport, without autograd.

    Making a halo is *collective*: each pair of parts compares how many rows, and which nodes, it will exchange. If two
    disagree, all ranks raise the same error. Every exchange is *collective* too.

    Args:
        plan: This part's plan; part `p` lives on rank `p` of the transport.
        transport: Joins the ranks that share the graph.
        device: Where the rows live.
    """

    def __init__(self, plan: PartitionPlan, transport: Transport, device: torch.device | str = "cpu") -> None:
        if (plan.part, plan.num_parts) != (transport.rank, transport.size):
            raise ValueError(
                f"plan of part {plan.part} of {plan.num_parts} given to rank {transport.rank} of {transport.size}; "
                "part p lives on rank p: build the plan for this rank, with as many parts as ranks share the event."
            )
        self.plan = plan = faults.reach("plan", plan)
        self.transport = transport
        self._send_rows = torch.from_numpy(plan.send_rows).to(device)
        self._send_counts = plan.send_counts.tolist()
        self._recv_counts = plan.recv_counts.tolist()
        _check_plans_agree(plan, transport)

    def start_fill(self, owned: Tensor, ghosts: Tensor | None = None) -> Pending:
        """Start `fill_ghosts`; `finish` of the result returns the rows. `ghosts` as there."""
        self._check(owned, "owned", self.plan.num_owned)
        packed = owned.index_select(0, self._send_rows)  # a copy: `owned` may change before `finish`
        if ghosts is None:
            ghosts = owned.new_empty(self.plan.num_ghosts, *owned.shape[1:])
        return self.transport.start(packed, self._send_counts, ghosts, self._recv_counts)

    def _check(self, rows: Tensor, kind: str, expected: int) -> None:
        if len(rows) != expected:
            raise ValueError(
                f"{kind} rows on rank {self.plan.part}: expected {expected}, got {len(rows)}; pass {kind} rows only: "
                "a local table holds the owned rows, then those of ghosts."
            )

    def fill_ghosts(self, owned: Tensor, ghosts: Tensor | None = None) -> Tensor:
        """Copy the row of each owned node, [num_owned, ...], to its ghost copies on other ranks. *Collective*.

        Returns:
            Rows of this part's ghost nodes, [num_ghosts, ...]: `ghosts`, a contiguous buffer, or else a new tensor.
        """
        return self.start_fill(owned, ghosts).finish()

    def sum_to_owners(self, ghosts: Tensor) -> Tensor:
        """Add up the ghost rows of all ranks, [num_ghosts, ...], at their owners. *Collective*.

        Returns:
            For each owned node the sum over its ghost copies, in the order of their ranks, [num_owned, ...]; 0 without
            any: the adjoint of `fill_ghosts`.
        """
        return self._at_owners(ghosts.new_zeros(self.plan.num_owned, *ghosts.shape[1:]), ghosts, "sum")

    def combine(self, owned: Tensor, ghosts: Tensor, how: str) -> Tensor:
        """Combine owned rows, [num_owned, ...], with their ghost rows on other ranks. *Collective*.

        Args:
            owned: Rows of this part's nodes; a new tensor is returned.
            ghosts: Rows of its ghost nodes, [num_ghosts, ...].
            how: `sum`, or `prod`, `amax`, `amin` as for `index_reduce`.
        """
        if how == "sum":
            return owned + self.sum_to_owners(ghosts)
        return self._at_owners(owned.clone(memory_format=torch.contiguous_format), ghosts, how)

    def _at_owners(self, combined: Tensor, ghosts: Tensor, how: str) -> Tensor:
        """Bring ghost rows to their owners, and combine them there with rows that are changed, [num_owned, ...]."""
        self._check(ghosts, "ghost", self.plan.num_ghosts)
        received = ghosts.new_empty(len(self._send_rows), *ghosts.shape[1:])
        self.transport.start(ghosts.contiguous(), self._recv_counts, received, self._send_counts).finish()
        # Rows are grouped by sender, and combined in the order of ranks. One rank sends a row once, so atomic additions
        # of a GPU never meet.
        for rows, of_rank in zip(self._send_rows.split(self._send_counts), received.split(self._send_counts)):
            if len(rows) and how == "sum":
                combined.index_add_(0, rows, of_rank)
            elif len(rows):
                combined.index_reduce_(0, rows, of_rank, how)
        return combined


class CompleteHalo(Halo):
    """The halo exchange of networks on stages: each of both copies of a cut edge gets its complete gradient.

    In the backward pass ghost nodes return nothing. Instead owners send them the gradient of the sums at their nodes,
    so no float is ever added across ranks. For this a part needs every edge of its nodes: a plan with `incident` edges.
    """

    def __init__(self, plan: PartitionPlan, transport: Transport, device: torch.device | str = "cpu") -> None:
        if plan.edge_policy != "incident":
            raise ValueError(
                f"a CompleteHalo needs a plan with edge_policy='incident', got {plan.edge_policy!r}: a part needs "
                "all edges of its nodes. Build such a plan, or use AdjointHalo."
            )
        super().__init__(plan, transport, device)

    def spread(self, owned: Tensor) -> HaloRows:
        """Start to copy owned rows, [num_owned, width], to their ghost copies. *Collective*.

        Autograd does not see the copy. In the backward pass a stage spreads the gradient of its sums, so that ghost
        nodes have their whole gradient and nothing from another rank is added.
        """
        rows = self._with_room(owned)
        rows._pending = self.start_fill(owned.detach(), rows.local[self.plan.num_owned :])
        return rows

    def join(self, owned: Tensor, ghosts: Tensor) -> HaloRows:
        """Owned rows beside ghost rows that were received earlier. Nothing is exchanged."""
        rows = self._with_room(owned)
        rows.local[self.plan.num_owned :] = ghosts
        return rows

    def _with_room(self, owned: Tensor) -> HaloRows:
        """Owned rows in a table with room for ghosts."""
        num_owned, states = self.plan.num_owned, owned.detach()
        self._check(owned, "owned", num_owned)
        local = states.contiguous()  # without ghosts no tail to receive into, so no copy
        if self.plan.num_ghosts:
            local = empty_table(self.plan.num_local, states.shape[1], states)
            local[:num_owned] = states
        # Without autograd the rows of the table will do: the others can go.
        return HaloRows(self, owned if owned.requires_grad else local[:num_owned], local)


class AdjointHalo(Halo):
    """The halo exchange of any differentiable model: ghost nodes return partial gradients, which their owner sums."""

    def extend(self, owned: Tensor) -> Tensor:
        """Owned rows [num_owned, ...] -> owned and ghost rows [num_local, ...]. *Collective*, backward too."""
        table: Tensor = _Adjoint.apply(owned, self, False)  # type: ignore[no-untyped-call]
        return table


class _Adjoint(torch.autograd.Function):
    """Owner -> ghost, a copy, or with `back` ghost -> owner, a sum: adjoint to each other, to any order.

    All ranks make the exchanges of a backward pass in one order. Of the nodes that are ready, autograd runs the one
    that was made last, and whatever uses a tensor was made after it. So it goes back through all calls in reverse
    order.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, halo: Halo, back: bool) -> Tensor:
        ctx.halo, ctx.back, num_owned = halo, back, halo.plan.num_owned
        if back:
            return rows[:num_owned] + halo.sum_to_owners(rows[num_owned:])
        # One table [owned | ghosts], received into its tail: to join two tables would copy all rows once more.
        table = rows.new_empty(halo.plan.num_local, *rows.shape[1:])
        table[:num_owned] = rows
        halo.fill_ghosts(rows, table[num_owned:])
        return table

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return _Adjoint.apply(grads[0], ctx.halo, not ctx.back), None, None  # type: ignore[no-untyped-call]


class HostHalo(AdjointHalo):
    """The halo of a program that owns its domains and moves rows between them itself: the host.

    Rows and shares of floats travel by its two functions; all else travels by the transport: the two functions cannot
    carry integers, masks, extremes and products.

    Making one is *collective*: both functions are called once, and their results are compared with the plan.

    Args:
        plan, transport, device: As for any halo.
        ghosts: Number of the node of each ghost row of the host, int64 [any number]. A node may have several: images in
            a periodic box. It may also be owned here.
        ids: What the host calls the nodes of its local rows, for messages, [num_owned + len(ghosts)].
        exchange: The two functions.

    Raises:
        Refused: On all ranks alike, if a function delivers other rows than those of the plan.
    """

    def __init__(
        self,
        plan: PartitionPlan,
        transport: Transport,
        device: torch.device | str,
        ghosts: IntArray,
        ids: IntArray,
        exchange: HostExchange,
    ) -> None:
        super().__init__(plan, transport, device)
        self._forward, self._reverse = exchange
        self._num_rows = plan.num_owned + len(ghosts)
        # Of several images the first one carries the rows; shares of the others are zero.
        nodes, first = np.unique(ghosts, return_index=True)
        rows = plan.num_owned + first[np.searchsorted(nodes, plan.ghost_ids)]
        self._ghost_rows = torch.from_numpy(rows).to(device)
        for dtype in CARRIED:
            self._try_functions(dtype, ids, rows)

    def fill_ghosts(self, owned: Tensor, ghosts: Tensor | None = None) -> Tensor:
        """As `Halo.start_fill`, by the host's `forward`. *Collective*."""
        if owned.dtype not in CARRIED:
            return super().fill_ghosts(owned, ghosts)
        self._check(owned, "owned", self.plan.num_owned)
        table = self._moved(self._forward, owned, slice(self.plan.num_owned))
        received = table.index_select(0, self._ghost_rows).view(-1, *owned.shape[1:])
        return received if ghosts is None else ghosts.copy_(received)

    def sum_to_owners(self, ghosts: Tensor) -> Tensor:
        """As `Halo.sum_to_owners`, by the host's `reverse`, in its order of additions. *Collective*."""
        if ghosts.dtype not in CARRIED:
            return super().sum_to_owners(ghosts)
        self._check(ghosts, "ghost", self.plan.num_ghosts)
        table = self._moved(self._reverse, ghosts, self._ghost_rows)
        return table[: self.plan.num_owned].view(-1, *ghosts.shape[1:])

    def _moved(self, move: Callable[[Tensor], None], rows: Tensor, places: slice | Tensor) -> Tensor:
        """A table of zeros with some rows, [num_rows, width], after a function of the host."""
        width = math.prod(rows.shape[1:])
        table = rows.new_zeros(self._num_rows, width)
        table[places] = rows.reshape(len(rows), width)
        with self.transport.waiting("the exchange of the host"), self.transport.elsewhere():
            move(table)
        return table

    def _try_functions(self, dtype: torch.dtype, ids: IntArray, rows: IntArray) -> None:
        """Refuse functions that deliver other rows than the transport. *Collective*."""
        plan, device = self.plan, self._ghost_rows.device

        def marks(numbers: IntArray) -> Tensor:
            return torch.from_numpy(np.stack([1 + numbers % MARKS, 1 + numbers // MARKS], 1)).to(device, dtype)

        owned, shares = marks(plan.owned_ids), marks(np.arange(plan.num_ghosts) % MARKS)
        tried = (
            ("forward", self.fill_ghosts(owned), super().fill_ghosts(owned), rows),
            ("reverse", self.sum_to_owners(shares), super().sum_to_owners(shares), np.arange(plan.num_owned)),
        )
        for name, found, wanted, places in tried:
            wrong = (found != wanted).any(1).nonzero().view(-1).tolist()
            problem = None
            if wrong:
                row = int(places[wrong[0]])
                problem = (
                    f"the host's {name} brings other rows than its ids say: of {str(dtype).removeprefix('torch.')}, "
                    f"{len(wrong)} of {len(places)} rows are wrong, first local row {row}, node {ids[row]}."
                )
            agree(self.transport, problem)


def ask_owners(transport: Transport) -> Ask:
    """The `Ask` of `build_plan` over a transport: it asks the owners for the nodes that this part needs."""

    def ask(wanted: list[IntArray]) -> list[IntArray]:
        if len(wanted) != transport.size:
            raise ValueError(
                f"{len(wanted)} parts asked over {transport.size} ranks; group the tiles into {transport.size}."
            )
        return [table[:, 0] for table in exchange_tables([ids.reshape(-1, 1) for ids in wanted], transport)]

    return ask


def exchange_tables(tables: Sequence[IntArray], transport: Transport) -> list[IntArray]:
    """Send each rank its table of integers, int64 [any number, columns]; returns the tables that this rank gets.

    A *collective* all-to-all in the order of ranks, with sizes that differ; all tables have the same columns.
    """
    counts = np.array([len(table) for table in tables], dtype=np.int64)
    here, owed = transport.rank, np.zeros(transport.size, np.int64)
    for rank, of_rank in enumerate(_sparse_of_all(counts[:, None], transport)):
        owed[rank] = of_rank[of_rank[:, 0] == here, 1].sum()
    of_others = [table for rank, table in enumerate(tables) if rank != here]
    columns = tables[here].shape[1]
    send = torch.from_numpy(np.concatenate([np.zeros((0, columns), np.int64), *of_others]))
    send_counts, receive_counts = counts.copy(), owed.copy()
    send_counts[here] = receive_counts[here] = 0  # a rank sends nothing to itself
    received = torch.empty(int(receive_counts.sum()), columns, dtype=torch.int64, device="cpu")
    transport.start(send, send_counts.tolist(), received, receive_counts.tolist()).finish()
    given = np.split(received.numpy(), np.cumsum(receive_counts)[:-1])
    given[here] = tables[here]
    return given


def _sparse_of_all(table: IntArray, transport: Transport) -> list[IntArray]:
    """What every rank has for its peers, as rows (peer, columns), without the peers for which it has nothing.

    `table` has a row for each peer, int64 [size, columns]; its first column is 0 where there is nothing. So the bytes
    grow with the number of neighbours, and nothing has a number for each pair of ranks. *Collective*.
    """
    peers = np.flatnonzero(table[:, 0])
    mine = np.column_stack([peers, table[peers]]).astype(np.int64)
    width = mine.shape[1]
    return [np.frombuffer(rows, dtype=np.int64).reshape(-1, width) for rows in transport.all_gather(mine.tobytes())]


def _check_plans_agree(plan: PartitionPlan, transport: Transport) -> None:
    """Compare (count, crc32 of the ids) of every pair of ranks before anything is exchanged. *Collective*.

    gloo and MPI accept without an error a message that is shorter than expected, and rows in another order.
    """
    sent = _fingerprints(plan.owned_ids[plan.send_rows], plan.send_counts)
    received = _fingerprints(plan.ghost_ids, plan.recv_counts)
    declared, expected = (
        {(rank, peer): (count, crc) for rank, rows in enumerate(of_ranks) for peer, count, crc in rows.tolist()}
        for of_ranks in (_sparse_of_all(sent, transport), _sparse_of_all(received, transport))
    )
    # Every rank looks at every pair, so that all raise the same error.
    for sender, receiver in sorted({*declared, *((peer, rank) for rank, peer in expected)}):
        there, here = declared.get((sender, receiver), (0, 0)), expected.get((receiver, sender), (0, 0))
        if there != here:
            raise RuntimeError(
                f"plans disagree: {transport.name_ranks([sender])} would send {there[0]} rows (crc32 "
                f"{there[1]:08x}) to {transport.name_ranks([receiver])}, which expects {here[0]} (crc32 "
                f"{here[1]:08x}); the two hold plans of different events or assignments."
            )


def _fingerprints(ids: IntArray, counts: Sequence[int] | IntArray) -> IntArray:
    """(count, crc32 of the ids) per peer, int64 [num_parts, 2]."""
    blocks = np.split(np.ascontiguousarray(ids, dtype=np.int64), np.cumsum(counts)[:-1])
    return np.array([[len(block), zlib.crc32(block.tobytes())] for block in blocks], dtype=np.int64)
