"""The halo exchange of a program that owns its domains and moves rows between them itself: the host."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from domainpar.common.agreement import agree
from domainpar.parallel.halo import AdjointHalo
from domainpar.parallel.transport import Transport
from domainpar.plan import IntArray, PartitionPlan

HostExchange = tuple[Callable[[Tensor], None], Callable[[Tensor], None]]
"""`forward` and `reverse` of the host, each of a table [owned | ghosts] that it changes; both *collective*."""

CARRIED = (torch.float64, torch.float32)
MARKS = 1000  # small numbers: sums of them are exact in float32


class HostHalo(AdjointHalo):
    """Rows and shares of floats by the two functions of a host; all else by the transport, as in any halo.

    Integers and masks of ghosts, and their extremes and products, have no form in the two functions.

    Making one is *collective*: both functions are tried, and what they bring is compared with the plan.

    Args:
        plan, transport, device: As for any halo.
        ghosts: Number of the node of each ghost row of the host, int64 [any number]. A node may have several: images in
            a periodic box. It may also be owned here.
        ids: What the host calls the nodes of its local rows, for messages, [num_owned + len(ghosts)].
        exchange: The two functions.

    Raises:
        Refused: On all ranks alike, if a function brings other rows than those of the plan.
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
        """As of any halo, by `forward` of the host. *Collective*."""
        if owned.dtype not in CARRIED:
            return super().fill_ghosts(owned, ghosts)
        self._check(owned, "owned", self.plan.num_owned)
        table = self._moved(self._forward, owned, slice(self.plan.num_owned))
        received = table.index_select(0, self._ghost_rows).view(-1, *owned.shape[1:])
        return received if ghosts is None else ghosts.copy_(received)

    def sum_to_owners(self, ghosts: Tensor) -> Tensor:
        """As of any halo, by `reverse` of the host, so in the order in which it adds. *Collective*."""
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
        """Refuse functions that bring other rows than the transport does. *Collective*."""
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
