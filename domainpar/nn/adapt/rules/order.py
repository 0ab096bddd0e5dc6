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

from domainpar.nn.adapt.across import largest, summed, with_gradient_of
from domainpar.nn.adapt.calls import Call
from domainpar.nn.adapt.rows import NotExact, mark
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
    """

    def __init__(self, watch: Watch, tensor: Tensor, descending: bool = False) -> None:
        rows = watch.known(tensor)
        axis, self._part, self._dim = rows.axis, watch.part, rows.dim
        self.total = axis.total
        counted = watch.counted(tensor).movedim(rows.dim, -1)
        self._shape = counted.shape[:-1]
        places = axis.places if axis.counted is None else axis.places[axis.counted]
        self._by_place = places.argsort()
        self._places = places[self._by_place]
        self._values = counted.reshape(self._shape.numel(), -1)[:, self._by_place]
        keys = _keys(self._values.detach())
        # A stable sort leaves equal numbers in the order of their places.
        self._keys, order = (~keys if descending else keys).sort(stable=True)
        self._places_of_keys = self._places[order]

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
        first, last = torch.zeros_like(keys), torch.full_like(keys, max(self.total - 1, 0))
        places = self._bisected(ranks - below, first, last, lambda bound: self._of_equals_not_behind(bound, begin, end))
        return Ranked(self._shaped(self._taken(places)), self._shaped(places))

    def _taken(self, places: Tensor) -> Tensor:
        """The numbers at places of each column, from the rank that counts them."""
        if len(self._places):
            nearest = torch.searchsorted(self._places, places).clamp(max=len(self._places) - 1)
            here = self._places[nearest] == places
            picked = self._values.gather(1, nearest)
            picked = torch.where(here, picked, torch.zeros_like(picked))
        else:  # zeros that autograd knows as made of these rows: every rank takes part in the sum's backward
            picked = self._values.sum(1, keepdim=True).to(self._values.dtype).expand(places.shape)
        return summed(picked, self._part).to(self._values.dtype)

    def _shaped(self, table: Tensor) -> Tensor:
        return mark(table.reshape(*self._shape, -1).movedim(-1, self._dim).contiguous(), None)

    def _bisected(self, ranks: Tensor, low: Tensor, high: Tensor, counts: Callable[[Tensor], Tensor]) -> Tensor:
        """The least bound, from `low` to `high`, that more than `ranks` numbers of all ranks do not exceed."""
        while bool((low < high).any()):  # alike on every rank
            middle = (low >> 1) + (high >> 1) + (low & high & 1)  # (low + high) // 2 may not fit
            enough = self._sum(counts(middle)) > ranks
            low, high = torch.where(enough, low, middle + 1), torch.where(enough, middle, high)
        return low

    def _not_above(self, bound: Tensor) -> Tensor:
        return torch.searchsorted(self._keys, bound, right=True)

    def _of_equals_not_behind(self, bound: Tensor, begin: Tensor, end: Tensor) -> Tensor:
        """How many of the equal numbers from `begin` to `end` have places up to a bound."""
        low, high, most = begin, end, len(self._places) - 1
        for _ in range((most + 1).bit_length() if most >= 0 else 0):
            middle = (low + high) // 2
            inside = (low < high) & (self._places_of_keys.gather(1, middle.clamp(max=most)) <= bound)
            low, high = torch.where(inside, middle + 1, low), torch.where(inside | (low >= high), high, middle)
        return low - begin

    def _ends(self, keys: Tensor) -> tuple[Tensor, Tensor]:
        """The least and the largest key of each column, [columns, 1] each."""
        none = torch.iinfo(torch.int64).min + 1
        if keys.size(1):
            mine = torch.stack([-keys[:, 0].clamp(min=none), keys[:, -1]])
        else:
            mine = keys.new_full((2, len(keys)), none)
        ends = largest(mine, self._part)
        return -ends[0, :, None], ends[1, :, None]

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


def _ranks(order: Order, *ranks: int) -> Tensor:
    return torch.tensor(ranks).expand(order._shape.numel(), -1)


def top(watch: Watch, call: Call) -> Any:
    """`topk(x, k, dim, largest, sorted)` over rows."""
    k, descending = int(call.get("by")), call.get("largest", True)
    order = _order(watch, call, call.get("input"), descending)
    if not 0 <= k <= order.total:
        raise ValueError(f"torch.topk of {k} among {order.total} rows.")
    return order.at(_ranks(order, *range(k)))


def kth(watch: Watch, call: Call) -> Any:
    """`kthvalue(x, k, dim, keepdim)` over rows."""
    order, k = _order(watch, call, call.get("input")), int(call.get("by"))
    if not 1 <= k <= order.total:
        raise ValueError(f"torch.kthvalue: {k} of {order.total} rows.")
    return _reduced(call, order.at(_ranks(order, k - 1)), order)


def _reduced(call: Call, found: Ranked, order: Order) -> Ranked:
    if call.get("keepdim", False):
        return found
    return Ranked(*(mark(one.squeeze(order._dim), None) for one in found))


def median(watch: Watch, call: Call) -> Any:
    """The lower median of each column; of all numbers those that are equal share the gradient, as in torch."""
    tensor = call.get("input")
    over_all = call.get("dim") is None
    if over_all:
        tensor = _flat(watch, call, tensor)
    order = _order(watch, call, tensor)
    middle = _ranks(order, (order.total - 1) // 2)
    if tensor.is_floating_point():
        middle = torch.where(order.with_nan()[:, None], order.total - 1, middle)
    found = order.at(middle)
    if not over_all:
        return _reduced(call, found, order)
    value, mine = found.values.detach(), watch.counted(tensor)
    if not tensor.is_floating_point():
        return mark(value.squeeze(0), None)
    chosen = (mine.detach() == value) | (mine.detach().isnan() & value.isnan())
    ties = summed(chosen.to(value.dtype).sum(0, keepdim=True), watch.part)
    carrier = summed(torch.where(chosen, mine, 0.0).sum(0, keepdim=True), watch.part) / ties
    return mark(with_gradient_of(value, carrier).squeeze(0), None)


def quantile(watch: Watch, call: Call) -> Any:
    """`quantile(x, q, dim, keepdim, interpolation=)` over rows."""
    tensor, how = call.get("input"), call.get("interpolation", "linear")
    dims = tensor.dim()
    over_all = call.get("dim") is None
    if over_all:
        tensor = _flat(watch, call, tensor)
    q = torch.as_tensor(call.get("q"), dtype=tensor.dtype).detach()
    if not bool(((q >= 0) & (q <= 1)).all()):
        raise ValueError(f"torch.quantile of {q.tolist()}; they are shares from 0 to 1.")
    order = _order(watch, call, tensor)
    # In the type of the numbers, and so as torch rounds them.
    place = (q.view(-1) * (order.total - 1)).expand(order._shape.numel(), -1)
    place = torch.where(order.with_nan()[:, None], order.total - 1, place)
    if how in ("lower", "higher", "nearest"):
        round_it = {"lower": torch.floor, "higher": torch.ceil, "nearest": torch.round}[how]
        found = order.at(round_it(place).long()).values
    elif how in ("linear", "midpoint"):
        low, high = place.floor(), place.ceil()
        weight = order._shaped(torch.full_like(place, 0.5) if how == "midpoint" else place - low)
        found = torch.lerp(order.at(low.long()).values, order.at(high.long()).values, weight)
    else:
        raise ValueError(f"torch.quantile has no interpolation {how!r}.")
    dim = order._dim
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
