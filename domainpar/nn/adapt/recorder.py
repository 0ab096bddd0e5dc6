"""Every tensor that the layers of a module were given and made: as a rank saw it, and as the whole graph has it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from domainpar.nn.adapt.nested import tensors_in
from domainpar.nn.adapt.rows import NotExact, Rows, unwatched
from domainpar.nn.adapt.watch import Watch, watching

COARSE = (torch.float32, torch.float16, torch.bfloat16, torch.complex64)
When = Literal["given", "made", "left"]


@dataclass(frozen=True)
class Seen:
    """A tensor as one rank saw it.

    Attributes:
        value: Its values, of the rows that this rank counts: float64, or the integers that they are.
        dtype: Of the tensor itself.
        rows: The kind of its rows; `graph` if it is the same on every rank.
        dim: Where the rows lie; None if it has none that are dealt.
        keys: Of each row.
        copies: Rows that another rank counts and this one computes with.
        keys_of_copies: Of each of them.
        problem: Why it cannot be compared; empty if it can.
    """

    value: Tensor
    dtype: torch.dtype = torch.float64
    rows: str = "graph"
    dim: int | None = None
    keys: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int64))
    copies: Tensor | None = None
    keys_of_copies: Tensor | None = None
    problem: str = ""

    @property
    def coarse(self) -> bool:
        """Whether it is of less than float64."""
        return self.dtype in COARSE

    def returned_as(self, tensor: Tensor) -> Seen:
        """The result of a module as its caller got it: rows that this rank counts, row numbers as values."""
        if self.problem == _SPARSE:
            return self
        return replace(self, value=as_numbers(tensor), dtype=tensor.dtype, problem="", copies=None)


_SPARSE = "a sparse tensor"


def see(tensor: Tensor, watch: Watch | None) -> Seen:
    """A tensor as it is now; without a watch, on the whole graph."""
    if tensor.layout is not torch.strided:
        return Seen(torch.zeros(0), problem=_SPARSE)
    try:
        rows = None if watch is None else watch.rows(tensor)
    except NotExact:
        return Seen(torch.zeros(0), problem="nobody knows what its rows are")
    if watch is None or rows is None:
        return Seen(as_numbers(tensor), tensor.dtype)
    if rows.names is None:
        return _see_rows(tensor, rows, watch)
    nodes, edges = watch.part.node_axis, watch.part.edge_axis
    numbered = {id(names.of) for names in rows.names}
    for axis, ids in ((nodes, watch.part.local_ids), (edges, edges.keys)):
        if numbered == {id(axis)}:
            if tensor.numel() and not -len(ids) <= int(tensor.min()) <= int(tensor.max()) < len(ids):
                # Changed where torch does not tell: the watch refuses them as soon as they are used.
                return Seen(torch.zeros(0), problem="numbers beyond the rows", rows=rows.axis.name)
            return _see_rows(ids[tensor], rows, watch)
    return replace(_see_rows(tensor, rows, watch), problem="numbers of rows that were made inside the model")


def _see_rows(tensor: Tensor, rows: Rows, watch: Watch) -> Seen:
    axis, plan, dim = rows.axis, watch.part.plan, rows.dim

    def seen(values: Tensor, keys: Tensor) -> Seen:
        return Seen(as_numbers(values), tensor.dtype, axis.name, dim, keys)

    if axis is watch.part.node_axis:
        owned = seen(tensor.narrow(dim, 0, plan.num_owned), axis.keys)
        if not rows.fresh or tensor.size(dim) != plan.num_local:
            return owned
        ghosts = as_numbers(tensor.narrow(dim, plan.num_owned, plan.num_ghosts))
        return replace(owned, copies=ghosts, keys_of_copies=watch.part.local_ids[plan.num_owned :])
    if axis.counted is None:
        return seen(tensor, axis.keys)
    ours, others = axis.counted.nonzero().view(-1), (~axis.counted).nonzero().view(-1)
    copies = as_numbers(tensor.index_select(dim, others))
    return replace(
        seen(tensor.index_select(dim, ours), axis.keys[ours]), copies=copies, keys_of_copies=axis.keys[others]
    )


def as_numbers(tensor: Tensor) -> Tensor:
    """A copy of the values: integers as they are, all others float64, of complex ones both parts."""
    tensor = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return tensor.detach().to(torch.float64 if tensor.is_floating_point() else torch.int64, copy=True)


def merged(ranks: Sequence[Seen]) -> Seen:
    """The tensor of the whole graph, its rows in the order of their keys, from the rows that each rank counted."""
    first = ranks[0]
    problem = next((seen.problem for seen in ranks if seen.problem), "")
    if problem or (len(ranks) == 1 and first.dim is None):
        return replace(first, problem=problem)
    if any((seen.rows, seen.dim) != (first.rows, first.dim) for seen in ranks):
        return replace(first, problem="its rows are not the same kind of rows on every rank")
    if first.dim is None:
        return first
    keys, order = torch.cat([seen.keys for seen in ranks]).sort()
    if len({_without(seen.value.shape, first.dim) for seen in ranks}) > 1:
        return replace(first, value=first.value.new_zeros(0))
    value = torch.cat([seen.value for seen in ranks], first.dim).index_select(first.dim, order)
    return Seen(value, first.dtype, first.rows, first.dim, keys)


def _without(shape: torch.Size, dim: int) -> tuple[int, ...]:
    return tuple(shape[:dim]) + tuple(shape[dim + 1 :])


class Layer(NamedTuple):
    """One call of a layer."""

    name: str
    number: int


class Moment(NamedTuple):
    """The tensors that were seen when a layer was called, had made its result, or left its arguments behind."""

    layer: Layer
    when: When
    inside: Layer | None
    seen: list[Seen]


class Recorder:
    """Writes down the arguments and results of all layers of a module, in the order of events.

    Attributes:
        kinds: The class of each layer, by its name.
        moments: The record.
        running: The calls that have begun and not ended, inner ones last.
    """

    def __init__(self, module: nn.Module) -> None:
        self.kinds = {name: type(child).__name__ for name, child in module.named_modules()}
        self.moments: list[Moment] = []
        self.running: list[Layer] = []
        self._calls: Counter[str] = Counter()
        self._hooks = []
        for name, child in module.named_modules():
            self._hooks.append(child.register_forward_pre_hook(partial(self._called, name), with_kwargs=True))
            self._hooks.append(child.register_forward_hook(partial(self._returns, name), with_kwargs=True))

    def stop(self) -> None:
        """Write down no more: what is recomputed in backward was seen before."""
        for hook in self._hooks:
            hook.remove()

    def result(self) -> list[Seen]:
        """The result of the module itself, of its last call."""
        whole = [moment for moment in self.moments if moment.layer.name == "" and moment.when == "made"]
        return whole[-1].seen

    def _called(self, name: str, _: nn.Module, args: Any, kwargs: Any) -> None:
        self._calls[name] += 1
        inside = self.running[-1] if self.running else None
        self.running.append(Layer(name, self._calls[name]))
        self._write("given", inside, (args, kwargs))

    def _returns(self, name: str, _: nn.Module, args: Any, kwargs: Any, result: Any) -> None:
        while self.running[-1].name != name:  # one whose error its caller caught
            self.running.pop()
        inside = self.running[-2] if len(self.running) > 1 else None
        self._write("made", inside, result)
        self._write("left", inside, (args, kwargs))
        self.running.pop()

    def _write(self, when: When, inside: Layer | None, value: Any) -> None:
        watch = watching()
        with unwatched(), torch.no_grad():
            seen = [see(tensor, watch) for tensor in tensors_in(value)]
        self.moments.append(Moment(self.running[-1], when, inside, seen))
