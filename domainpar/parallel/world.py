"""The ranks of a run as a grid: who this one is, and who shares its events."""

from __future__ import annotations

import platform
from contextlib import ExitStack
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor

from domainpar.parallel.failure import guard
from domainpar.parallel.launcher import cores_here
from domainpar.parallel.presence import Presence
from domainpar.parallel.side_channel import SideChannel
from domainpar.parallel.threads import Switchboard, ThreadTransport
from domainpar.parallel.transport import Transport

LARGEST_DEFAULT_DOMAIN = 8


@dataclass(frozen=True)
class ExchangeCounters:
    """Cost of talking of a rank since it was last asked.

    Attributes:
        seconds_exchanging: Packing, copying and posting.
        seconds_waiting: Waiting for other ranks.
        bytes_sent: Bytes of rows handed to other ranks.
    """

    seconds_exchanging: float
    seconds_waiting: float
    bytes_sent: int


@dataclass(frozen=True, eq=False)
class World:
    """All ranks of a run, as a grid of data groups and domain groups.

    The ranks of a domain group are consecutive and share one event; data groups take different events. As a context
    manager, a world ends all its ranks if one of them fails in the block, and is closed at its end.

    Attributes:
        transport: Joins all ranks.
        domain: Joins the ranks that share this one's event; the same object as `transport` when that is all of them.
        data_group: Which group of events this rank works on, in [0, num_data_groups).
        num_data_groups: Domain groups in the world.
        device: Where this rank computes.
        presence: This rank as the others see it.
    """

    transport: Transport
    domain: Transport
    data_group: int
    num_data_groups: int
    device: torch.device
    presence: Presence = field(repr=False)
    _block: ExitStack = field(default_factory=ExitStack, repr=False)

    @classmethod
    def alone(cls, device: str | torch.device = "cpu") -> Self:
        """A world of one rank, on the same code path as any other."""
        return cls.over(ThreadTransport(Switchboard(1), 0), device, marks=SideChannel.of_threads(1))

    @classmethod
    def over(
        cls,
        transport: Transport,
        device: str | torch.device = "cpu",
        domain_size: int | None = None,
        marks: SideChannel | None = None,
    ) -> Self:
        """Arrange the ranks of a transport as a grid; *collective*.

        Args:
            transport: Joins all ranks.
            device: Where this rank computes.
            domain_size: Ranks that share one event, a divisor of their number. Default: the largest up to 8.
            marks: The side channel, if there is one.

        Raises:
            ValueError: If `domain_size` does not divide the number of ranks.
        """
        size = transport.size
        domain_size = checked_domain_size(domain_size, size)
        if marks is not None:
            transport.board = marks
        groups = [range(first, first + domain_size) for first in range(0, size, domain_size)]
        domain = transport if len(groups) == 1 else transport.split(groups)
        presence = Presence(transport, domain, marks)
        return cls(transport, domain, transport.rank // domain_size, len(groups), torch.device(device), presence)

    @property
    def rank(self) -> int:
        """This rank, in [0, size)."""
        return self.transport.rank

    @property
    def size(self) -> int:
        """All ranks of the run."""
        return self.transport.size

    @property
    def is_root(self) -> bool:
        """Whether this is rank 0, which talks to the user."""
        return self.rank == 0

    @property
    def host(self) -> str:
        """Name of this machine."""
        return self.presence.host

    def cores_for_each(self) -> int:
        """Cores that this rank may use without taking one from another rank of its machine, at least 1. *Collective*.

        A launcher that binds ranks to cores has given each its own; else the ranks of a machine share what there is.
        """
        cores = cores_here()
        mine = f"{platform.node()} {','.join(map(str, cores))}".encode()
        return max(1, len(cores) // self.transport.all_gather(mine).count(mine))

    def mark(self, phase: str, step: int, event: str | None = None) -> None:
        """Say what this rank is about to do, as `Presence.mark`."""
        self.presence.mark(phase, step, event)

    def set_deadline(self, seconds: float) -> None:
        """Set how long this rank waits for others: a first step takes longer than those after it."""
        self.transport.deadline = self.domain.deadline = seconds

    def step_boundary(self, values: Tensor) -> Tensor:
        """Add up a few int64 values of all ranks (stop flag, non-finite, counts) in one reduction; *collective*.

        Returns:
            The sums, the same on every rank; `values` stay as they are.
        """
        total = values.clone()
        self.transport.all_reduce(total)
        return total

    def take_counters(self) -> ExchangeCounters:
        """Sum the counters of this rank's transports and set them back to zero."""
        counters = ExchangeCounters(
            *(
                sum(getattr(transport, name) for transport in self.presence.transports)
                for name in ("seconds_exchanging", "seconds_waiting", "bytes_sent")
            )
        )
        for transport in self.presence.transports:
            transport.seconds_exchanging = transport.seconds_waiting = 0.0
            transport.bytes_sent = 0
        return counters

    def close(self) -> None:
        """Meet once more, then give back what the transports hold; *collective*. A second call does nothing."""
        self.presence.close()

    def __enter__(self) -> Self:
        self._block.enter_context(guard(self.presence))
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: TracebackType | None) -> None:
        self._block.__exit__(kind, error, trace)
        if error is None:
            self.close()


def checked_domain_size(domain_size: int | None, size: int) -> int:
    """The ranks that share one event, in a world of `size` ranks.

    Raises:
        ValueError: If `domain_size` does not divide the number of ranks.
    """
    if domain_size is None:
        return max(ranks for ranks in range(1, LARGEST_DEFAULT_DOMAIN + 1) if size % ranks == 0)
    if domain_size < 1 or size % domain_size:
        raise ValueError(
            f"--domain-size {domain_size} does not divide the {size} ranks; every domain group needs as many ranks as "
            f"the others. Choose a divisor of {size}, or another number of ranks."
        )
    return domain_size
