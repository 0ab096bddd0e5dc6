"""Tensors of which every rank holds a slice: each part gets the rows that it needs from the ranks that hold them."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from domainpar.common.agreement import agree, difference, gather, on_all
from domainpar.parallel.halo import AdjointHalo, ask_owners
from domainpar.parallel.transport import Transport
from domainpar.placed.input_log import tensor_given
from domainpar.plan import IntArray, plan_slices

HINT = "give every rank consecutive rows of the same tensor, in the order of ranks; a slice may be empty"


class _Fetch(NamedTuple):
    """How a part's rows come to it: the exchange, and their places among the slice and what came."""

    lengths: list[int]
    halo: AdjointHalo
    places: Tensor


class Slices:
    """Takes this rank's slices and gives the rows that its part needs of all.

    Args:
        transport: Joins the ranks that share the graph.
        device: Where the rows go.
        owned: Whether the slice of each rank has to be the rows that it needs.
    """

    def __init__(self, transport: Transport, device: torch.device, owned: bool = False) -> None:
        self._transport, self._device, self.owned = transport, device, owned
        self._fetches: dict[str, _Fetch] = {}  # by call: the slices of one step are most often those of the next

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
        gradient = mine.requires_grad and torch.is_grad_enabled()  # its backward is an exchange of all
        alike = {f"a slice of {call}": row, f"a gradient of {call}": "asked for" if gradient else "not"}
        agree(transport, difference(transport, alike, HINT))
        if self.owned:
            text = (
                f"{call}: {length} rows were given where this rank has {len(ids)} {what}; give those, in their order."
            )
            agree(transport, None if length == len(ids) else text)
            return mine.to(self._device).clone(memory_format=torch.contiguous_format)
        lengths = gather(transport, length)
        if sum(lengths) != total:
            text = f"{call}: slices of {lengths} rows were given where all have {total} {what} together; {HINT}."
            agree(transport, text)
        fetch = self._fetch(call, lengths, ids)
        table = fetch.halo.extend(mine.to(self._device).movedim(dim, 0))
        return table.index_select(0, fetch.places).movedim(0, dim).contiguous()

    def _fetch(self, call: str, lengths: list[int], ids: Tensor) -> _Fetch:
        """The exchange for a call; made anew where the slices are cut otherwise. *Collective*."""
        known = self._fetches.get(call)
        if known is not None and known.lengths == lengths:
            return known
        wanted, bounds = ids.cpu().numpy(), np.concatenate([[0], np.cumsum(lengths)])
        plan = plan_slices(wanted, bounds, self._transport.rank, ask_owners(self._transport))
        fetch = _Fetch(
            lengths,
            AdjointHalo(plan, self._transport, self._device),
            torch.from_numpy(_places(plan.owned_ids, plan.ghost_ids, wanted)).to(self._device),
        )
        self._fetches[call] = fetch
        return fetch


def _places(owned_ids: IntArray, ghost_ids: IntArray, wanted: IntArray) -> IntArray:
    """Where each wanted row lies in a table of a slice and the rows that came."""
    first = owned_ids[0] if len(owned_ids) else 0
    here = (wanted >= first) & (wanted < first + len(owned_ids))
    return np.where(here, wanted - first, len(owned_ids) + np.searchsorted(ghost_ids, wanted))
