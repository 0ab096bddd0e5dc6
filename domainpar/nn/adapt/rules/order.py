"""Numbers by their rank among those of the whole graph: the largest, medians, quantiles, and the places of their rows.

No rank sees all numbers. A number is found by halving the range in which it must lie, as often as it has bits: each
time all ranks count how many of theirs are below. Of equal numbers the one whose row comes first in the whole graph is
the first, on any number of ranks; torch leaves that open.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from domainpar.nn.adapt.across import largest, shared_by, summed
from domainpar.nn.adapt.calls import Call
from domainpar.nn.adapt.rows import NotExact, mark, nothing_like, places_of
from domainpar.nn.adapt.watch import Watch


class Ranked(NamedTuple):
    """Numbers and the places of their rows in the whole graph, the same on every rank, as torch names them."""

    values: Tensor
    indices: Tensor


class Order:
    """The numbers of each column over the rows of the whole graph, from the smallest, or largest, on.

    Making one costs a sort of this rank's rows; asking is *collective*.

    Args:
        watch: The watch.
        tensor: Rows, and anything beside them.
        descending: Whether the largest comes first; NaN is larger than all numbers.

    Attributes:
        total: Rows of the whole graph.
        dim: The dimension that they lie along.
    """

    def __init__(self, watch: Watch, tensor: Tensor, descending: bool = False) -> None:
        rows = watch.known(tensor)
        self._axis, self._part, self.dim = rows.axis, watch.part, rows.dim
        self.total = rows.axis.total
        counted = watch.counted(tensor).movedim(rows.dim, -1)
        self._shape = counted.shape[:-1]
        # The numbers of rows, which are in the order of their places: these need not be known for all rows.
        self._numbers, order = rows.axis.counted_keys.sort()
        self._values = counted.reshape(self._shape.numel(), len(order))[:, order]
        keys = _keys(self._values.detach())
        # A stable sort leaves equal ones in the order of their rows.
        self._keys, order = (~keys if descending else keys).sort(stable=True)
        self._numbers_of_keys = self._numbers[order]

    def ranks(self, *ranks: int) -> Tensor:
        """The same ranks of each column, int64 [columns, K]."""
        return torch.tensor(ranks, dtype=torch.int64, device=self._keys.device).expand(self._shape.numel(), -1)

    def with_nan(self) -> Tensor:
        """Whether a column holds a NaN, bool [columns]. *Collective*."""
        return summed(self._values.detach().isnan().sum(1), self._part) > 0

    def at(self, ranks: Tensor) -> Ranked:
        """Numbers of some ranks, counted from 0, of each column, int64 [columns, K]; K in place of the rows.

        *Collective*, forward and backward.
        """
        keys = self._bisected(ranks, *self._ends(self._keys), self._not_above)
        begin, end = (torch.searchsorted(self._keys, keys, right=right) for right in (False, True))
        below = self._sum(begin)
        numbers = self._bisected(
            ranks - below, *self._ends(self._numbers[None]), lambda bound: self._of_equals_not_behind(bound, begin, end)
        )
        places = places_of(self._axis, numbers, self._part)
        return Ranked(self.shaped(self._taken(numbers)), self.shaped(places))

    def _taken(self, numbers: Tensor) -> Tensor:
        """The values of rows, by their numbers, in each column; from the rank that counts them."""
        if len(self._numbers):
            nearest = torch.searchsorted(self._numbers, numbers).clamp(max=len(self._numbers) - 1)
            here = self._numbers[nearest] == numbers
            picked = self._values.gather(1, nearest)
            picked = torch.where(here, picked, nothing_like(picked))
        else:  # made of these rows, as autograd knows: every rank takes part in the sum's backward
            picked = (-self._values.sum(1, keepdim=True)).to(self._values.dtype).expand(numbers.shape)
        return summed(picked, self._part).to(self._values.dtype)

    def shaped(self, table: Tensor) -> Tensor:
        """A table of columns, [columns, K], with K where the rows were."""
        return mark(table.reshape(*self._shape, table.size(1)).movedim(-1, self.dim).contiguous(), None)

    def _bisected(self, ranks: Tensor, low: Tensor, high: Tensor, counts: Callable[[Tensor], Tensor]) -> Tensor:
        """The least bound, from `low` to `high`, that more than `ranks` numbers of all ranks do not exceed."""
        low, high = low.expand_as(ranks).contiguous(), high.expand_as(ranks)
        while bool((low < high).any()):  # alike on every rank
            middle = (low >> 1) + (high >> 1) + (low & high & 1)  # (low + high) // 2 may not fit
            enough = self._sum(counts(middle)) > ranks
            low, high = torch.where(enough, low, middle + 1), torch.where(enough, middle, high)
        return low

    def _not_above(self, bound: Tensor) -> Tensor:
        return torch.searchsorted(self._keys, bound, right=True)

    def _of_equals_not_behind(self, bound: Tensor, begin: Tensor, end: Tensor) -> Tensor:
        """How many of the equal ones from `begin` to `end` are of rows with numbers up to a bound."""
        low, high, most = begin, end, len(self._numbers) - 1
        for _ in range((most + 1).bit_length() if most >= 0 else 0):
            middle = (low + high) // 2
            inside = (low < high) & (self._numbers_of_keys.gather(1, middle.clamp(max=most)) <= bound)
            low, high = torch.where(inside, middle + 1, low), torch.where(inside | (low >= high), high, middle)
        return low - begin

    def _ends(self, keys: Tensor) -> tuple[Tensor, Tensor]:
        """The least and the largest key of each column, [columns, 1] each."""
        if keys.size(1):
            mine = torch.stack([~keys[:, 0], keys[:, -1]])  # the least integer has no negative
        else:
            mine = keys.new_full((2, len(keys)), torch.iinfo(torch.int64).min)
        ends = largest(mine, self._part)
        return ~ends[0, :, None], ends[1, :, None]

    def _sum(self, counts: Tensor) -> Tensor:
        return self._part.sum_over_ranks(counts)


def _keys(values: Tensor) -> Tensor:
    """Whole numbers in the order of these, int64: of floats their bits, of which those of negative ones are turned."""
    if not values.is_floating_point():
        return values.long()
    values = values.float() if values.element_size() < 4 else values
    values = torch.where(values.isnan(), torch.full_like(values, torch.nan), values) + 0.0  # one NaN, one zero
    bits = values.view(torch.int64 if values.element_size() == 8 else torch.int32)
    return (bits ^ (bits >> (8 * bits.element_size() - 1) & torch.iinfo(bits.dtype).max)).long()


# --- calls -----------------------------------------------------------------------------------------------------------


def _order(watch: Watch, call: Call, tensor: Tensor, descending: bool = False) -> Order:
    watch.combines_rows()
    if tensor.is_complex():
        raise NotExact(f"torch.{call.name} of complex numbers.")
    order = Order(watch, tensor, descending)
    if not order.total:
        raise ValueError(f"torch.{call.name} of no rows.")
    return order


def top(watch: Watch, call: Call) -> Any:
    """`topk(x, k, dim, largest, sorted)` over rows."""
    k, descending = int(call.get("by")), call.get("largest", True)
    order = _order(watch, call, call.get("input"), descending)
    if not 0 <= k <= order.total:
        raise ValueError(f"torch.topk of {k} among {order.total} rows.")
    return order.at(order.ranks(*range(k)))


def kth(watch: Watch, call: Call) -> Any:
    """`kthvalue(x, k, dim, keepdim)` over rows."""
    order, k = _order(watch, call, call.get("input")), int(call.get("by"))
    if not 1 <= k <= order.total:
        raise ValueError(f"torch.kthvalue: {k} of {order.total} rows.")
    return _reduced(call, order.at(order.ranks(k - 1)), order)


def _reduced(call: Call, found: Ranked, order: Order) -> Ranked:
    if call.get("keepdim", False):
        return found
    return Ranked(*(mark(one.squeeze(order.dim), None) for one in found))


def median(watch: Watch, call: Call) -> Any:
    """The lower median of each column; of all numbers those that are equal share the gradient, as in torch."""
    tensor = call.get("input")
    over_all = call.get("dim") is None
    if over_all:
        tensor = _flat(watch, call, tensor)
    order = _order(watch, call, tensor)
    middle = order.ranks((order.total - 1) // 2)
    if tensor.is_floating_point():
        middle = torch.where(order.with_nan()[:, None], order.total - 1, middle)
    found = order.at(middle)
    if not over_all:
        return _reduced(call, found, order)
    value, mine = found.values.detach(), watch.counted(tensor)
    if not tensor.is_floating_point():
        return mark(value.squeeze(0), None)
    chosen = (mine.detach() == value) | (mine.detach().isnan() & value.isnan())
    return mark(shared_by(value, mine, chosen, (0,), watch.part).squeeze(0), None)


def quantile(watch: Watch, call: Call) -> Any:
    """`quantile(x, q, dim, keepdim, interpolation=)` over rows."""
    tensor, how = call.get("input"), call.get("interpolation", "linear")
    dims = tensor.dim()
    over_all = call.get("dim") is None
    if over_all:
        tensor = _flat(watch, call, tensor)
    q = call.get("q")
    if isinstance(q, Tensor) and watch.rows(q) is not None:
        raise NotExact("torch.quantile of shares that differ from row to row.")
    q = torch.as_tensor(q, dtype=tensor.dtype, device=tensor.device)
    if not bool(((q >= 0) & (q <= 1)).all()):
        raise ValueError(f"torch.quantile of {q.tolist()}; they are shares from 0 to 1.")
    order = _order(watch, call, tensor)
    # In the type of the numbers, and so as torch rounds them.
    place = (q.reshape(-1) * (order.total - 1)).expand(order.ranks().size(0), -1)
    place = torch.where(order.with_nan()[:, None], order.total - 1, place)
    rounds: dict[str, list[Callable[[Tensor], Tensor]]] = {
        "lower": [torch.floor], "higher": [torch.ceil], "nearest": [torch.round],
        "linear": [torch.floor, torch.ceil], "midpoint": [torch.floor, torch.ceil],
    }  # fmt: skip
    if how not in rounds:
        raise ValueError(f"torch.quantile has no interpolation {how!r}.")
    ranks = [round_it(place.detach()) for round_it in rounds[how]]
    found, *above = order.at(torch.cat(ranks, 1).long()).values.chunk(len(ranks), order.dim)
    if above:
        weight = torch.full_like(place, 0.5) if how == "midpoint" else place - ranks[0]
        found = torch.lerp(found, above[0], order.shaped(weight))
    dim = order.dim
    if q.dim() == 0:
        found = found.squeeze(dim)
        found = found.unsqueeze(dim) if call.get("keepdim", False) else found
    else:  # the quantiles come first
        kept = found.movedim(dim, 0)
        found = kept.unsqueeze(dim + 1) if call.get("keepdim", False) else kept
    if over_all and call.get("keepdim", False):
        found = found.reshape([*q.shape, *[1] * dims])
    return mark(found, None)


def _flat(watch: Watch, call: Call, tensor: Tensor) -> Tensor:
    """All numbers, in the order of the whole graph."""
    with watch.in_other_words():
        flat: Tensor = tensor.reshape(-1)
    return flat


OVER_ROWS: dict[str, Callable[[Watch, Call], Any]] = {
    "topk": top,
    "kthvalue": kth,
    "median": median,
    "quantile": quantile,
}
"""Rules of calls that run along the rows."""
