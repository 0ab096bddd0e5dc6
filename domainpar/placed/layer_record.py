"""What layers of a module were given and made, call by call, compared with a run on the whole graph."""

from __future__ import annotations

import copy
import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from domainpar.parallel.digests import digest
from domainpar.placed.input_log import InputLog, in_words
from domainpar.placed.moves import rows_in
from domainpar.placed.ranks import kept_now
from domainpar.placed.tensor import Placed, is_rows, settle

FLOOR = 1e-3  # of the largest value so far: smaller results of cancellation are compared relative to this
COARSE = "in less than float64"


class Check(NamedTuple):
    """One call of a layer on the whole and on the split graph, compared; or the gradient or buffer that differs most.

    Attributes:
        name: The layer's name in the model, as in `named_modules`; empty for the model itself. Or of the tensor.
        kind: The layer's class; or `gradient`, `buffer`.
        number: Which of its calls, from 1; 0 of a gradient or buffer.
        difference: The largest difference of its results, relative to the largest value; `inf` where ranks differ, in
            numbers, shapes, calls or random numbers; None if they were not compared.
        note: Why they were not compared, or what differs and where.
        rows: The kind of rows that its result has: nodes, edges; `graph` without rows.
    """

    name: str
    kind: str
    number: int = 1
    difference: float | None = None
    note: str = ""
    rows: str = ""

    def __str__(self) -> str:
        which = f", call {self.number}" if self.number > 1 else ""
        return f"{self.name or 'the model'} ({self.kind}{which})"

    def agrees(self, tolerance: float) -> bool:
        """Whether it differs by no more than rounding; a difference that is no number is more."""
        return self.difference is None or self.difference <= tolerance

    @property
    def size(self) -> str:
        """The difference in words."""
        return "-" if self.difference is None else f"{self.difference:.1e}"


class LayerRecord:
    """Notes the arguments and results of all layers of a module, call by call.

    Args:
        module: The module, whose layers get hooks.
        whole: The record of the whole graph, to compare with; None: this is it.

    Attributes:
        log: Records what must be the same on every rank.
        held: What each call was `given` and has `made` on the whole graph, and the largest value so far; also gradients
            and buffers, as calls of number 0.
        checks: How far that differs on a split graph.
        draws, exchanges, sums, error: Whether the forward pass drew random numbers of torch; how often it fetched rows
            and summed over ranks; the error of the rank.
        running: The calls that have begun and not ended, inner ones last; the model before it is called, first.
    """

    log: InputLog
    error: BaseException | None = None
    draws, exchanges, sums = False, 0, 0

    def __init__(self, module: nn.Module, whole: LayerRecord | None = None) -> None:
        self.held: dict[tuple[Check, str], tuple[list[Tensor], float]] = {}
        self.checks: dict[tuple[Check, str], Check] = {}
        self.running = [Check("", type(module).__name__, 0)]
        self.module, self._whole, self._size = module, whole, 0.0
        self._calls, self._ended = Counter[str](), False
        for name, child in module.named_modules():
            if name and not isinstance(child, torch.jit.ScriptModule):  # which takes no hooks
                child.register_forward_pre_hook(partial(self._called, name), with_kwargs=True)
                child.register_forward_hook(partial(self._returns, name), with_kwargs=True)

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module; its result. What is computed again in backward is not noted again."""
        self._called("", self.module, args, kwargs)
        self._returns("", self.module, args, kwargs, result := self.module(*args, **kwargs))
        self._ended = True
        return result

    def leave(self, kind: str, tensors: Mapping[str, Tensor]) -> None:
        """Note the gradients or buffers that a run leaves; differences are relative to the largest of them."""
        self._size = max((_largest(_held(tensor)) for tensor in tensors.values()), default=0.0)
        for name, tensor in tensors.items():
            self._note(Check(name, kind, 0), "made", tensor)

    def _called(self, name: str, child: nn.Module, args: Any, kwargs: Any) -> None:
        if not self._repeats():
            self._calls[name] += 1
            self.running.append(Check(name, type(child).__name__, self._calls[name]))
            self._note(self.running[-1], "given", (args, kwargs))

    def _returns(self, name: str, _: nn.Module, args: Any, kwargs: Any, result: Any) -> None:
        if not self._repeats():
            while self.running[-1].name != name:  # a layer that failed, with an error that its caller caught
                self.running.pop()
            self._note(self.running.pop(), "made", result)

    def _repeats(self) -> bool:
        """Whether backward computes something again, or a block of edges is computed, of which ranks have others."""
        kept = kept_now()
        return self._ended or (kept is not None and not kept.with_ghosts)

    def _note(self, call: Check, when: str, value: Any) -> None:
        """Note what a call was given or has made. *Collective* where a tensor waits for shares of other ranks."""
        leaves = [leaf for leaf in flat(value) if isinstance(leaf, (Tensor, bool, int, float))]
        tensors = [leaf if isinstance(leaf, Tensor) else torch.tensor(float(leaf), device="cpu") for leaf in leaves]
        held = [_held(tensor) for tensor in tensors]
        if self._whole is None:
            self._size = max([self._size, *map(_largest, held)])
            self.held[call, when] = [here.clone() for here in held], self._size
            return
        alike = [str(one.place) if is_rows(one) else in_words(here) for one, here in zip(tensors, held)]  # type: ignore[attr-defined]
        random = digest({"": torch.get_rng_state()})
        self.log.call(f"{call}, {when} {'; '.join(alike)}; torch's random generator {random:08x}")
        self.checks[call, when] = _compared(call, tensors, *self._whole.held.get((call, when), (None, 0.0)))


def _held(tensor: Tensor) -> Tensor:
    """What this rank holds of a tensor. *Collective* where it waits for shares of other ranks."""
    local = (settle(tensor)._local if isinstance(tensor, Placed) else tensor).detach().resolve_conj()
    return local if local.layout is torch.strided else local.to_dense()


def _compared(call: Check, tensors: Sequence[Tensor], whole: Sequence[Tensor] | None, size: float) -> Check:
    """A call with the largest difference of what this rank holds from the whole graph."""
    if whole is None:
        return call._replace(difference=math.inf, note="called where the graph is split only")
    if len(tensors) != len(whole):
        return call._replace(difference=math.inf, note="another number of tensors")
    if not tensors:
        return call._replace(note="not compared: no tensors")
    rows = _listed(*(tensor.place.axis.name if is_rows(tensor) else "graph" for tensor in tensors))  # type: ignore[attr-defined]
    gaps, notes = zip(*(_difference(*pair, FLOOR * size) for pair in zip(tensors, whole)))
    return call._replace(difference=max(gaps), note=_listed(*notes), rows=rows)


def _difference(ours: Tensor, theirs: Tensor, floor: float) -> tuple[float, str]:
    """The largest difference of what this rank holds from the whole tensor, and a note.

    It is relative to the largest value of the whole tensor, or to `floor` if that is larger.
    """
    if (ours.shape, ours.dtype) != (theirs.shape, theirs.dtype):
        return math.inf, f"{tuple(ours.shape)} {ours.dtype} in place of {tuple(theirs.shape)} {theirs.dtype}"
    here, place = _held(ours), ours.place if is_rows(ours) else None  # type: ignore[attr-defined]
    there = rows_in(theirs, place.axis, place.dim) if place else theirs
    if here.shape != there.shape:  # the user's code has put other rows there
        return math.inf, f"{tuple(here.shape)} in place of this rank's rows, {tuple(there.shape)}"
    same = (here == there) | (here.isnan() & there.isnan())  # the difference of two infinities is NaN
    gaps = (_wide(here) - _wide(there)).abs().double().nan_to_num(nan=math.inf, posinf=math.inf)
    gap = float(gaps.masked_fill(same, 0.0).max()) if gaps.numel() else 0.0
    note = COARSE if theirs.is_floating_point() and theirs.dtype is not torch.float64 else ""
    return gap / (max(_largest(theirs), floor) or 1.0), note


def _wide(tensor: Tensor) -> Tensor:
    """The same numbers in a type in which they can be subtracted."""
    return tensor if tensor.is_complex() else tensor.to(torch.float64 if tensor.is_floating_point() else torch.int64)


def _largest(tensor: Tensor) -> float:
    """The largest finite size."""
    sizes = _wide(tensor[tensor.isfinite()]).abs()
    return float(sizes.max()) if sizes.numel() else 0.0


def compare_records(
    whole: LayerRecord, ranks: Sequence[LayerRecord], failed: bool, tolerance: float
) -> tuple[list[Check], Check | None]:
    """All calls of all layers, inner ones first, then the worst gradient and buffer; and where the first difference is.

    That is the first call that was given what it is given on the whole graph, and has made something else.

    Args:
        whole: Of the whole graph.
        ranks: Of all ranks, which were compared with that.
        failed: Whether they did not come to their end.
        tolerance: The largest difference that counts as rounding.
    """

    def worst(call: Check, when: str) -> Check:
        of_ranks = [record.checks[call, when] for record in ranks if (call, when) in record.checks]
        if len(of_ranks) < len(ranks):
            return call._replace(difference=None if failed else math.inf, note="not compared: not reached")
        return max(of_ranks, key=lambda check: check.difference or 0.0)

    calls = [call for call, when in whole.held if when == "made"]
    layers = {call: worst(call, "made") for call in calls if call.number}
    strange = (check for record in ranks for key, check in record.checks.items() if key not in whole.held)
    rows = [*layers.values(), *dict.fromkeys(strange)]
    if all(row.agrees(tolerance) for row in rows):  # else these differ as well, and say nothing more
        for kind in ("gradient", "buffer"):
            left = [worst(call, "made") for call in calls if call.kind == kind and not call.number]
            rows += sorted((check for check in left if check.rows), key=lambda check: check.difference or 0.0)[-1:]
    arguments = worst(*next(iter(whole.held)))._replace(note="in the arguments themselves")
    given_right = [check for call, check in layers.items() if worst(call, "given").agrees(tolerance)]
    suspects = [arguments, *given_right, *rows]
    return rows, next((check for check in suspects if not check.agrees(tolerance)), None)


def _listed(*texts: str) -> str:
    return ", ".join(dict.fromkeys(text for text in texts if text))


def flat(value: Any) -> list[Any]:
    """What lies in lists, tuples, mappings, dataclasses and PyG `Data`, to any depth, always in the same order."""
    nest = value if isinstance(value, (list, tuple, Mapping)) else _fields(value)
    if nest is None:
        return [value]
    return [leaf for item in (nest.values() if isinstance(nest, Mapping) else nest) for leaf in flat(item)]


def rebuilt(value: Any, change: Callable[[Any], Any]) -> Any:
    """The same nest with everything changed that is no nest itself; the nest that was given stays as it is."""
    if isinstance(value, (list, tuple)):
        items = [rebuilt(item, change) for item in value]
        # A namedtuple takes its fields one by one; torch's own return types, which have no `_fields`, take a list.
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if isinstance(value, dict):
        return {name: rebuilt(item, change) for name, item in value.items()}
    if (fields := _fields(value)) is None:
        return change(value)
    other = copy.copy(value)
    put = object.__setattr__ if dataclasses.is_dataclass(value) else setattr  # a dataclass may be frozen
    for name, item in fields.items():
        put(other, name, rebuilt(item, change))
    return other


def _fields(value: Any) -> dict[str, Any] | None:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    # By what a PyG `Data` has: PyG itself need not be installed.
    return value.to_dict() if hasattr(value, "to_dict") and hasattr(value, "edge_index") else None
