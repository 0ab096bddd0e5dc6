"""A record of the arguments and results of all layers of a module, on one rank and on the whole graph."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from domainpar.nn.adapt.in_blocks import in_a_block
from domainpar.nn.adapt.nested import tensors_in
from domainpar.nn.adapt.rows import NotExact, unwatched
from domainpar.nn.adapt.verification import LayerCall
from domainpar.nn.adapt.watch import Watch, watching

When = Literal["given", "made", "left"]


@dataclass(frozen=True)
class SeenTensor:
    """A tensor as one rank saw it.

    Attributes:
        value: Its values, of the rows that this rank counts: float64, or the integers that they are.
        dtype: Of the tensor itself.
        rows: The kind of its rows; `graph` if it is the same on every rank.
        dim: Where the rows lie; None if it has none that are dealt.
        keys: Of each row.
        copies: Rows that another rank counts and this one computes with; None if it has none that are up to date.
        keys_of_copies: Of each of them.
        problem: Why it cannot be compared; empty if it can.
    """

    value: Tensor = field(default_factory=lambda: torch.zeros(0, device="cpu"))
    dtype: torch.dtype = torch.float64
    rows: str = "graph"
    dim: int | None = None
    keys: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int64, device="cpu"))
    copies: Tensor | None = None
    keys_of_copies: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int64, device="cpu"))
    problem: str = ""

    def returned_as(self, tensor: Tensor) -> SeenTensor:
        """The result of a module as its caller got it: rows that this rank counts, row numbers as values."""
        if self.problem == _SPARSE:
            return self
        return replace(self, value=as_numbers(tensor), dtype=tensor.dtype, problem="", copies=None)


_SPARSE = "a sparse tensor"


def see(tensor: Tensor, watch: Watch | None) -> SeenTensor:
    """A tensor as it is now; without a watch, on the whole graph."""
    if tensor.layout is not torch.strided:
        return SeenTensor(problem=_SPARSE)
    try:
        rows = None if watch is None else watch.rows(tensor)
    except NotExact:
        return SeenTensor(problem="nobody knows what its rows are")
    if watch is None or rows is None:
        return SeenTensor(as_numbers(tensor), tensor.dtype)
    axis, dim, part = rows.axis, rows.dim, watch.part
    values, problem = tensor, ""
    if rows.names is not None:  # local numbers differ between ranks: the ids behind them are compared
        ids_of = {id(part.node_axis): part.local_ids, id(part.edge_axis): part.edge_axis.keys}
        numbered = {id(names.of) for names in rows.names}
        if len(numbered) > 1 or not numbered <= ids_of.keys():
            problem = "numbers of rows that were made inside the model"
        else:
            ids = ids_of[numbered.pop()]
            if tensor.numel() and not -len(ids) <= int(tensor.min()) <= int(tensor.max()) < len(ids):
                # Changed where torch does not tell: the watch refuses them as soon as they are used.
                return SeenTensor(problem="numbers beyond the rows", rows=axis.name)
            values = ids[tensor]
    if axis is part.node_axis:
        keys = part.local_ids[: tensor.size(dim)]
        counted = torch.arange(len(keys), device=keys.device) < part.plan.num_owned
    else:
        keys, counted = axis.keys, axis.counted_rows
    ours, others = counted.nonzero().view(-1), (~counted).nonzero().view(-1)
    seen = SeenTensor(
        as_numbers(values.index_select(dim, ours)), tensor.dtype, axis.name, dim, keys[ours], problem=problem
    )
    if axis is part.node_axis and not rows.fresh:  # ghosts out of date hold nothing that anybody reads
        return seen
    return replace(seen, copies=as_numbers(values.index_select(dim, others)), keys_of_copies=keys[others])


def as_numbers(tensor: Tensor) -> Tensor:
    """A copy of the values: integers as they are, all others float64, of complex ones both parts."""
    tensor = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return tensor.detach().to(torch.float64 if tensor.is_floating_point() else torch.int64, copy=True)


def merged(ranks: Sequence[SeenTensor]) -> SeenTensor:
    """The tensor of the whole graph, its rows in the order of their keys, from the rows that each rank counted."""
    first = ranks[0]
    problem = next((seen.problem for seen in ranks if seen.problem), "")
    if problem or (len(ranks) == 1 and first.dim is None):
        return replace(first, problem=problem)
    if any((seen.rows, seen.dim) != (first.rows, first.dim) for seen in ranks):
        return replace(first, problem="its rows are not the same kind of rows on every rank")
    if first.dim is None:
        return first
    if len({seen.value.movedim(first.dim, 0).shape[1:] for seen in ranks}) > 1:
        return replace(first, value=first.value.new_zeros(0))  # of no shape that the whole graph's could have
    keys, order = torch.cat([seen.keys for seen in ranks]).sort()
    value = torch.cat([seen.value for seen in ranks], first.dim).index_select(first.dim, order)
    return SeenTensor(value, first.dtype, first.rows, first.dim, keys)


class Snapshot(NamedTuple):
    """The tensors that were seen when a layer was called, had made its result, or left its arguments behind."""

    layer: LayerCall
    when: When
    inside: LayerCall | None
    seen: list[SeenTensor]


class Recorder:
    """Writes down the arguments and results of all layers of a module, in the order of events.

    Attributes:
        moments: The record.
        running: The calls that have begun and not ended, inner ones last.
    """

    def __init__(self, module: nn.Module) -> None:
        self.moments: list[Snapshot] = []
        self.running: list[LayerCall] = []
        self._model, self._calls = type(module).__name__, Counter[str]()
        self._hooks = []
        for name, child in module.named_modules():
            self._hooks.append(child.register_forward_pre_hook(partial(self._called, name), with_kwargs=True))
            self._hooks.append(child.register_forward_hook(partial(self._returns, name), with_kwargs=True))

    def stop(self) -> None:
        """Write down no more: what is recomputed in backward was seen before."""
        for hook in self._hooks:
            hook.remove()

    @property
    def place(self) -> LayerCall:
        """The layer that runs, or ran when the module failed."""
        return self.running[-1] if self.running else LayerCall("", self._model)

    def result(self) -> list[SeenTensor]:
        """The result of the module itself, of its last call."""
        return next(last.seen for last in reversed(self.moments) if last.layer.name == "" and last.when == "made")

    def _called(self, name: str, child: nn.Module, args: Any, kwargs: Any) -> None:
        if in_a_block():  # ranks have different numbers of them
            return
        self._calls[name] += 1
        inside = self.running[-1] if self.running else None
        self.running.append(LayerCall(name, type(child).__name__, self._calls[name]))
        self._write("given", inside, (args, kwargs))

    def _returns(self, name: str, _: nn.Module, args: Any, kwargs: Any, result: Any) -> None:
        if in_a_block():
            return
        while self.running[-1].name != name:  # a layer whose error its caller caught
            self.running.pop()
        inside = self.running[-2] if len(self.running) > 1 else None
        self._write("made", inside, result)
        self._write("left", inside, (args, kwargs))
        self.running.pop()

    def _write(self, when: When, inside: LayerCall | None, value: Any) -> None:
        watch = watching()
        # This look at the tensors is no part of the model: it neither passes the watch nor leaves a graph.
        with unwatched(), torch.no_grad():
            seen = [see(tensor, watch) for tensor in tensors_in(value)]
        self.moments.append(Snapshot(self.running[-1], when, inside, seen))
