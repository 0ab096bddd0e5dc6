"""Sums of floats that do not depend on the order of their terms: `docs/same_bits.md`, rule 4.

A float, called a partial, becomes two int64 limbs: hi = round(v 2^20) and lo = round((v - hi 2^-20) 2^72). Limbs are
added as integers over tiles, iterations, events and ranks. Integer sums are associative, so the result does not depend
on the grouping. The absolute resolution is 2^-73; a partial may have a magnitude of up to 2^26.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from domainpar.common.compiling import compiled
from domainpar.parallel.transport import Pending, Transport
from domainpar.plan import IntArray

HI_SCALE = 2.0**20
LO_SCALE = 2.0**72
CARRY_BITS = 52  # a unit of hi is 2^52 units of lo
LARGEST_PARTIAL = 2.0**26  # 2^17 partials of this size still fit the hi limb
NOT_FINITE = 10_000  # larger than any exponent of a double
LOWEST = -1022  # below it numbers lose bits anyway
CARRY_EVERY = 1024  # a lo limb is at most 2^51, so 2^11 of them fit; carried well before


class IntegerSums:
    """Exact sums of `size` numbers, each of them a sum of any number of float partials.

    A partial that is not finite, or larger than 2^26 in magnitude, is left out and counted, because as an integer it
    would be lost or overflow without an error. The counter is reduced with the sums, so all ranks know of it.

    Several threads of a rank may call `add`, in any order. A lock serialises the calls: two updates of a limb at the
    same time would lose a partial.
    """

    def __init__(self, size: int, device: torch.device | str = "cpu") -> None:
        self._limbs = torch.zeros(2 * size + 1, dtype=torch.int64, device=device)  # hi, lo, rejected
        self._uncarried = 0
        self._lock = threading.Lock()
        self._pending: Pending | None = None  # the sum over ranks that is under way

    def __len__(self) -> int:
        return len(self._limbs) // 2

    def __getstate__(self) -> dict[str, Any]:
        # Models are copied with the sums attached to them; a lock cannot be, and belongs to one object.
        return {name: value for name, value in vars(self).items() if name != "_lock"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _lock=threading.Lock())

    def add(self, partials: Tensor, start: int = 0) -> None:
        """Add one partial to each of the sums from `start` on. Any thread may call it.

        Args:
            partials: Floats [n], any shape; converted to float64 before they are split.
            start: First of the n sums to add to.

        Raises:
            ValueError: If there are not n sums from `start` on.
            RuntimeError: Between `start_reduce` and its `finish`.
        """
        self.add_rows(partials.reshape(1, -1), start)

    def add_rows(self, partials: Tensor, start: int = 0) -> None:
        """Add any number of partials to each of the sums from `start` on, as `add` would one row after the other.

        Args:
            partials: Floats [m, n], of which column i belongs to sum `start + i`.
            start: First of the n sums to add to.

        Raises:
            ValueError: If there are not n sums from `start` on.
            RuntimeError: Between `start_reduce` and its `finish`.
        """
        count, width = partials.shape
        if start < 0 or start + width > len(self):
            raise ValueError(
                f"{width} partials from sum {start} on do not fit {len(self)} sums; every partial needs a "
                "sum of its own, counted from 0."
            )
        add = _add_arrays if self._limbs.device.type == "cpu" else _add_tensors
        with self._alone():
            add(partials.detach(), self._limbs, start)
            self._uncarried += count
            if self._uncarried >= CARRY_EVERY:
                self._carry()

    def add_limbs(self, limbs: IntArray, rejected: int, start: int = 0) -> None:
        """On a CPU: add sums that are integers already, in the carried form 0 <= lo < 2^52. Any thread may call it.

        Args:
            limbs: High and low limbs of sums of partials, int64 [2, n].
            rejected: Partials that these leave out.
            start: First of the n sums to add to.
        """
        size, count = len(self), limbs.shape[1]
        with self._alone():
            sums = self._limbs.numpy()
            for first, part in zip((start, size + start), limbs):
                sums[first : first + count] += part
            sums[-1] += rejected
            self._uncarried += 2  # a low limb of these may be twice that of a partial
            if self._uncarried >= CARRY_EVERY:
                self._carry()

    def start_reduce(self, transport: Transport) -> Pending:
        """Start adding up the sums of all ranks; after `finish` every rank holds the same limbs. *Collective*.

        Until `finish` these sums cannot be used; other sums can be added to and reduced meanwhile. All ranks start
        their reductions in the same order.
        """
        with self._alone():
            self._carry()
            self._pending = transport.start_all_reduce(self._limbs)
        return self

    def progress(self) -> None:
        """Let the sum over ranks move on, if one is under way."""
        if self._pending is not None:
            self._pending.progress()

    def finish(self) -> Tensor:
        """Wait for the sum over ranks, if one is under way; returns the limbs."""
        if self._pending is not None:
            self._pending.finish()
            with self._lock:
                self._pending, self._uncarried = None, 1
                self._carry()  # limbs of all ranks added up leave less room for more partials
        return self._limbs

    def reduce(self, transport: Transport) -> None:
        """Add up the sums of all ranks; every rank then holds the same limbs. *Collective*."""
        self.start_reduce(transport).finish()

    def total(self) -> Tensor:
        """The sums as float64 [size], rounded once from the exact integers."""
        with self._alone():
            self._carry()
            hi, lo = self._limbs[:-1].to(torch.float64).view(2, -1)
            # Factors are powers of two, so that the sum alone is rounded.
            return torch.add(hi, lo, alpha=HI_SCALE / LO_SCALE) / HI_SCALE

    @property
    def rejected(self) -> int:
        """Partials that were not finite or too large; the sums mean nothing unless this is 0."""
        return int(self.rejected_now())

    def rejected_now(self) -> Tensor:
        """The same count, as a tensor on its device, int64 []."""
        with self._alone():
            return self._limbs[-1].clone()

    def clear(self) -> None:
        """Start again from zero."""
        with self._alone():
            self._limbs.zero_()
            self._uncarried = 0

    def _carry(self) -> None:
        """Bring the limbs to their one canonical form, 0 <= lo < 2^52; the value stays the same."""
        if self._uncarried == 0:
            return
        hi, lo = self._limbs[: len(self)], self._limbs[len(self) : -1]
        if hi.device.type == "cpu":
            _carry_arrays(hi.numpy(), lo.numpy())
        else:
            _carry_over(hi, lo)
        self._uncarried = 0

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """A context in which this thread alone has the limbs; refused while the transport works on them."""
        with self._lock:
            if self._pending is not None:
                raise RuntimeError(
                    "these sums are being added up over ranks and would differ between them; call finish on what "
                    "start_reduce returned first, or use other IntegerSums meanwhile."
                )
            yield


def sum_exactly(tensors: Sequence[Tensor], transport: Transport) -> list[Tensor] | None:
    """Sums over ranks of tensors that have the same shapes on all, in float64, the same bits on all. *Collective*.

    Each tensor is scaled by a power of two of its own, which loses no bit, so that small ones are summed as well as
    large ones: to 2^-73 of the largest number in it.

    Returns:
        The sums; None on every rank if a number of any rank is not finite.
    """
    return start_sum_exactly(tensors, transport)()


def start_sum_exactly(tensors: Sequence[Tensor], transport: Transport) -> Callable[[], list[Tensor] | None]:
    """Start `sum_exactly`; what it returns waits for the sums. All ranks start their sums in the same order."""
    device = tensors[0].device if tensors else torch.device("cpu")
    real = [torch.view_as_real(it.resolve_conj()) if it.is_complex() else it for it in tensors]
    exponents = _exponents(real, device)
    transport.all_reduce(exponents, "max")
    exponents = exponents.cpu()
    if bool((exponents >= NOT_FINITE).any()):
        return lambda: None
    sizes = [tensor.numel() for tensor in real]
    sums = IntegerSums(sum(sizes), device)
    # A power of two for each number: the calls of a GPU are as many for a thousand tensors as for one.
    powers = exponents.repeat_interleave(torch.tensor(sizes, dtype=torch.int64, device="cpu")).to(device)
    # With an empty tensor of the result's type, because `cat` takes no empty list.
    flat = torch.cat([torch.zeros(0, device=device, dtype=torch.float64), *(it.flatten() for it in real)])
    sums.add(torch.ldexp(flat, -powers))
    under_way = sums.start_reduce(transport)

    def finish() -> list[Tensor]:
        under_way.finish()
        totals = torch.ldexp(sums.total(), powers).split(sizes)
        whole = [total.view(tensor.shape) for tensor, total in zip(real, totals)]
        return [torch.view_as_complex(total) if it.is_complex() else total for it, total in zip(tensors, whole)]

    return finish


def _exponents(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    """For each tensor the power of two next above all magnitudes, `NOT_FINITE` if one is not finite; int64 [n]."""
    # The largest of numbers with a NaN is NaN. Nothing here makes the host wait for a GPU.
    some = [each for each in tensors if each.numel()]
    of_each = iter(torch._foreach_norm(some, float("inf")) if some else ())
    zero = torch.zeros((), dtype=torch.float64, device=device)
    largest = torch.stack([*(next(of_each) if each.numel() else zero for each in tensors), zero])
    finite, powers = largest.isfinite(), torch.frexp(torch.nan_to_num(largest)).exponent.long().clamp_min(LOWEST)
    powers = torch.where(largest == 0, LOWEST, powers)
    return torch.where(finite, powers, NOT_FINITE)[: len(tensors)]


def _carry_over(hi: Any, lo: Any) -> None:
    """Move all of `lo` but its lowest 52 bits into `hi`, in place."""
    hi += lo >> CARRY_BITS  # floors, also for negative limbs
    lo &= 2**CARRY_BITS - 1


@compiled
def _carry_arrays(hi: Any, lo: Any) -> None:
    """The same on CPU, in one pass."""
    for i in range(len(hi)):
        carried = lo[i] >> CARRY_BITS
        hi[i] += carried
        lo[i] -= carried << CARRY_BITS


# Both forms carry what they add to after every CARRY_EVERY rows of a call: until then `lo` holds those and fewer than
# CARRY_EVERY partials from before, which fit.


def _add_tensors(partials: Tensor, limbs: Tensor, start: int) -> None:
    """Split partials [m, n] and add them to the limbs [hi | lo | rejected], on any device."""
    size, width = len(limbs) // 2, partials.shape[1]
    his, los = limbs[start : start + width], limbs[size + start : size + start + width]
    for rows in partials.split(CARRY_EVERY):
        values = rows.to(torch.float64)
        accepted = values.abs() < LARGEST_PARTIAL  # False for NaN
        values = torch.where(accepted, values, 0.0)
        hi = torch.round(values * HI_SCALE)  # halves to even
        lo = torch.round((values - hi / HI_SCALE) * LO_SCALE)
        his += hi.to(torch.int64).sum(0)
        los += lo.to(torch.int64).sum(0)
        limbs[-1] += accepted.numel() - accepted.sum()
        if len(rows) == CARRY_EVERY:
            _carry_over(his, los)


def _add_arrays(partials: Tensor, limbs: Tensor, start: int) -> None:
    """The same to the last bit on CPU, in one pass and some ten times faster."""
    if partials.dtype not in (torch.float32, torch.float64):
        partials = partials.to(torch.float64)
    _add_in_one_pass(partials.contiguous().numpy(), limbs.numpy(), start, CARRY_EVERY)


@compiled
def _add_in_one_pass(rows: Any, limbs: Any, start: int, carry_every: int) -> None:
    size, width = len(limbs) // 2, rows.shape[1]
    his, los = limbs[start : start + width], limbs[size + start : size + start + width]
    rejected = 0
    for row in range(len(rows)):
        for i in range(width):
            value = np.float64(rows[row, i])
            if not abs(value) < LARGEST_PARTIAL:  # so for NaN
                rejected += 1
                value = np.float64(0.0)
            hi = np.rint(value * HI_SCALE)  # halves to even
            his[i] += np.int64(hi)
            los[i] += np.int64(np.rint((value - hi / HI_SCALE) * LO_SCALE))
        if (row + 1) % carry_every == 0:
            _carry_arrays(his, los)
    limbs[2 * size] += rejected
