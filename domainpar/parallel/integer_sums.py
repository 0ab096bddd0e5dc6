"""Sums of floats that do not depend on the order of their terms: DESIGN section 3, rule 4.

A float partial becomes two int64 limbs, hi = round(v 2^20) and lo = round((v - hi 2^-20) 2^72), and limbs are
added as integers over tiles, iterations, events and ranks. Integer sums are associative, so the result is one
number whatever the grouping. The resolution is 2^-73 absolute; magnitudes up to 2^26 per partial are accepted.
"""

from __future__ import annotations

import torch
from torch import Tensor

from domainpar.parallel.transport import Transport

HI_SCALE = 2.0**20
LO_SCALE = 2.0**72
CARRY_BITS = 52  # a unit of hi is 2^52 units of lo
LARGEST_PARTIAL = 2.0**26  # 2^17 partials of this size still fit the hi limb
CARRY_EVERY = 1024  # a lo limb is at most 2^51, so 2^11 of them fit; carried well before


class IntegerSums:
    """Exact sums of `size` numbers, each a sum of any number of float partials.

    A partial that is not finite, or larger than 2^26 in magnitude, is left out and counted: as an integer it
    would vanish or wrap in silence. The counter is reduced with the sums, so every rank learns of it alike.
    """

    def __init__(self, size: int, device: torch.device | str = "cpu") -> None:
        self._limbs = torch.zeros(2 * size + 1, dtype=torch.int64, device=device)
        self._hi, self._lo, self._rejected = self._limbs[:size], self._limbs[size:-1], self._limbs[-1:]
        self._uncarried = 0

    def __len__(self) -> int:
        return len(self._hi)

    def add(self, partials: Tensor, start: int = 0) -> None:
        """Add one partial to each of the sums from `start` on.

        Args:
            partials: Floats [n]; converted to float64 before they are split.
            start: First of the n sums to add to.
        """
        values = partials.detach().to(torch.float64).flatten()
        accepted = values.abs() < LARGEST_PARTIAL  # False for NaN
        values = torch.where(accepted, values, 0.0)
        hi = torch.round(values * HI_SCALE)
        lo = torch.round((values - hi / HI_SCALE) * LO_SCALE)
        stop = start + len(values)
        self._hi[start:stop] += hi.to(torch.int64)
        self._lo[start:stop] += lo.to(torch.int64)
        self._rejected += len(values) - accepted.sum()
        self._uncarried += 1
        if self._uncarried >= CARRY_EVERY:
            self._carry()

    def reduce(self, transport: Transport) -> None:
        """Add up the sums of all ranks; every rank then holds the same limbs. *Collective*."""
        self._carry()
        transport.all_reduce(self._limbs)
        self._carry()

    def total(self) -> Tensor:
        """The sums as float64 [size], rounded once from the exact integers."""
        self._carry()
        return self._hi.to(torch.float64) / HI_SCALE + self._lo.to(torch.float64) / LO_SCALE

    @property
    def rejected(self) -> int:
        """Partials that were not finite or too large; the sums mean nothing unless this is 0."""
        return int(self._rejected)

    def clear(self) -> None:
        """Start again from zero."""
        self._limbs.zero_()
        self._uncarried = 0

    def _carry(self) -> None:
        """Bring the limbs to their one canonical form, 0 <= lo < 2^52; the value stays the same."""
        carried = self._lo >> CARRY_BITS  # floors, also for negative limbs
        self._hi += carried
        self._lo -= carried << CARRY_BITS
        self._uncarried = 0
