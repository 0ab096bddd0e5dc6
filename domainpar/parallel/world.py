"""The ranks of a run as a grid: who this one is, who shares its events, and the ways to come by a world."""

from __future__ import annotations

import faulthandler
import platform
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor

from domainpar.common import faults, timeouts
from domainpar.common.agreement import Refused, agree, agree_on, gather
from domainpar.common.compiling import watch_compiling
from domainpar.common.limits import cores_here
from domainpar.common.problems import Problem, as_problem, problem_record
from domainpar.common.words import several
from domainpar.parallel.board import SideChannel
from domainpar.parallel.digests import about_this_program
from domainpar.parallel.launcher import alone_in_job, detect
from domainpar.parallel.meeting import TransportName, checked_domain_size, meet, tells
from domainpar.parallel.presence import Presence, exit_code, fail, guard, write_error
from domainpar.parallel.proof import proved
from domainpar.parallel.side_channel import share_store
from domainpar.parallel.threads import Switchboard, ThreadTransport
from domainpar.parallel.transport import OfThisProcess, Transport
from domainpar.parallel.watcher import Watcher

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


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
class World(OfThisProcess):
    """All ranks of a run, as a grid of data groups and domain groups, with the ways to come by one.

    The ranks of a domain group share one event; data groups take different events. As a context
    manager, a world ends all its ranks if one of them fails in the block, and is closed at its end; with one rank the
    error goes on to the caller as it is.

    Attributes:
        transport: Joins all ranks.
        domain: Joins the ranks that share this one's event; the same object as `transport` when that is all of them.
        groups: Ranks of each domain group: those of one machine together, in the order of ranks.
        device: Where this rank computes.
        presence: This rank as the others see it.
    """

    transport: Transport
    domain: Transport
    groups: tuple[tuple[int, ...], ...]
    device: torch.device
    presence: Presence = field(repr=False)

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
        domain_size = checked_domain_size(domain_size, transport.size)
        if marks is not None:
            transport.board = marks
        groups = _groups_of(transport, domain_size)
        domain = transport if len(groups) == 1 else transport.split(groups)
        return cls(transport, domain, groups, torch.device(device), Presence(transport, domain, marks))

    def regrouped(self, domain_size: int) -> Self:
        """The same ranks in domain groups of another size, in place of this world; *collective*.

        Raises:
            ValueError: If `domain_size` does not divide the number of ranks.
        """
        groups = _groups_of(self.transport, checked_domain_size(domain_size, self.size))
        domain = self.transport if len(groups) == 1 else self.transport.split(groups)
        self.presence.shares_with(domain)
        return replace(self, domain=domain, groups=groups)

    @classmethod
    def launch(
        cls,
        transport: TransportName = "auto",
        device: str = "cpu",
        domain_size: int | None = None,
        timeout: float = timeouts.FIRST_STEP,
        *,
        join_seconds: float = timeouts.JOIN,
        share_gpu: bool = False,
    ) -> Self:
        """Join the other processes that a launcher started (mpiexec, torchrun, srun); alone without one; *collective*.

        End with `close`: ranks whose rank 0 is gone end themselves with an error.

        Args:
            transport: `auto` takes NCCL on GPUs, MPI under an MPI launcher, gloo otherwise.
            device: `cpu`, `cuda` (a GPU of this rank), or `auto` for `cuda` if there is one for each rank.
            domain_size: Ranks that share one event, a divisor of their number. Default: the largest up to 8.
            timeout: Seconds that a rank may wait for the others before it raises (see `set_deadline`).
            join_seconds: Seconds in which all ranks must have come.
            share_gpu: Let several ranks of a machine use one GPU.

        Raises:
            ValueError: If an argument is wrong, on every rank alike.
            Refused: If launcher and MPI library do not belong together, the ranks cannot meet, or what they send each
                other arrives changed.
        """
        joined, own_device, marks = meet(transport, device, domain_size, timeout, join_seconds, share_gpu)
        ranks = cls.over(joined, own_device, domain_size, marks)
        if marks is not None and marks.connect is not None:
            presence = ranks.presence
            eyes = presence.look, presence.end_if_late
            watcher = Watcher(marks.connect(), ranks.rank, ranks.size, marks.serves, *eyes)
            watcher.start()
            ranks.presence.stop_watching = watcher.stop
        if joined.name != "threads":  # else this rank is alone
            ranks._report_what_nobody_catches()
            joined.barrier()  # a rank that fails from here on is noticed by all
        faults.reach("joined")
        return ranks

    @classmethod
    def from_process_group(
        cls,
        group: ProcessGroup | None = None,
        device: str | torch.device = "cpu",
        domain_size: int | None = None,
        timeout: float = timeouts.FIRST_STEP,
    ) -> Self:
        """Use a `torch.distributed` group that the program already has; *collective* over that group.

        Args:
            group: A gloo or NCCL group, None for the default one. It stays the caller's: `close` leaves it alone.
            device: Where this rank computes. A GPU becomes the current one of the program; `cuda` is the one that is.
            domain_size: As for `launch`.
            timeout: As for `launch`; a shorter time limit of the group itself comes first. What GPUs wait for over NCCL
                is bounded by the group's limit alone: nothing here watches a program's own processes.

        Raises:
            ValueError: If there is no such group.
            Refused: On every rank, if the group spoils what it carries.
        """
        from domainpar.parallel.process_group import of_group  # torch.distributed is for those who use it

        device = torch.device(device)
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        transport = of_group(group, device, timeout)
        checked_domain_size(domain_size, transport.size)
        proved(transport, device)
        return cls.over(transport, device, domain_size, share_store(transport))

    @classmethod
    @contextmanager
    def session(
        cls,
        transport: TransportName = "auto",
        device: str = "cpu",
        domain_size: int | None = None,
        timeout: float = timeouts.FIRST_STEP,
        *,
        join_seconds: float = timeouts.JOIN,
        share_gpu: bool = False,
        num_ranks: int | None = None,
        same: Mapping[str, str] | None = None,
    ) -> Iterator[Self]:
        """`launch`, `agree_on`, and the block of a world in one, for programs; *collective*.

        What is refused before work is printed once and becomes exit code 2, another expected error exit code 1.

        Args:
            transport: As this and the next five for `launch`.
            device: Where each rank computes.
            domain_size: Ranks that share one event.
            timeout: Seconds that a rank waits for others.
            join_seconds: Seconds that ranks wait for each other at first.
            share_gpu: Whether ranks may share a GPU.
            num_ranks: How many ranks there must be; None: as many as there are.
            same: What must be the same on every rank, besides versions and code.
        """
        try:
            ranks = cls.launch(transport, device, domain_size, timeout, join_seconds=join_seconds, share_gpu=share_gpu)
        except ValueError as problem:
            refused = problem if isinstance(problem, Refused) else Refused(**problem_record(problem))
            if tells(refused):
                write_error(refused.text)
            else:
                time.sleep(timeouts.REPORT)  # launchers end all ranks when the first is gone
            raise SystemExit(2) from None
        if detect().kind == "none" and (seen := alone_in_job()):
            write_error(f"WARNING: {seen}\n")
        watch_compiling(talks=ranks.is_root)
        try:
            with guard(ranks.presence):
                wrong_number = None
                if num_ranks is not None and num_ranks != ranks.size:
                    advice = f"mpiexec -n {num_ranks} python -m ..., or omit --ranks to take as many as are started"
                    wrong_number = Problem(f"config wants {several(num_ranks, 'rank')}, {ranks.size} started", advice)
                agree(ranks.transport, wrong_number)
                agree_on(ranks.transport, {**about_this_program(), **(same or {})})
                yield ranks
                ranks.close()
        except (Exception, KeyboardInterrupt) as error:  # only of a rank that is alone: others have ended by now
            if as_problem(error) is None and not isinstance(error, KeyboardInterrupt):
                raise
            raise SystemExit(exit_code(error)) from None  # it is printed already; a traceback would bury it

    @property
    def rank(self) -> int:
        """This rank, in [0, size)."""
        return self.transport.rank

    @property
    def size(self) -> int:
        """All ranks of the run."""
        return self.transport.size

    @property
    def data_group(self) -> int:
        """Which group of events this rank works on, in [0, num_data_groups)."""
        return self.group_of(self.rank)

    @property
    def num_data_groups(self) -> int:
        """Domain groups in the world."""
        return len(self.groups)

    def group_of(self, rank: int) -> int:
        """Number of the domain group of a rank."""
        return next(number for number, ranks in enumerate(self.groups) if rank in ranks)

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
        transports = self.presence.transports
        for transport in transports:
            transport.settle()
        counters = ExchangeCounters(
            seconds_exchanging=sum(transport.seconds_exchanging for transport in transports),
            seconds_waiting=sum(transport.seconds_waiting for transport in transports),
            bytes_sent=sum(transport.bytes_sent for transport in transports),
        )
        for transport in transports:
            transport.seconds_exchanging = transport.seconds_waiting = 0.0
            transport.bytes_sent = 0
        return counters

    def close(self) -> None:
        """Meet once more, then give back what the transports hold; *collective*. A second call does nothing."""
        self.presence.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: TracebackType | None) -> None:
        if self.size == 1:
            self.close()  # there is nobody to end: an error is the caller's, who may catch it
            return
        with guard(self.presence):  # also around `close`: another rank may never come
            if error is not None:
                raise error
            self.close()

    def _report_what_nobody_catches(self) -> None:
        """End all ranks when this one ends by an error outside of `guard`, and say where a crash in C++ happened."""
        usual = sys.excepthook

        def hook(kind: Any, error: BaseException, trace: Any) -> None:
            if issubclass(kind, Exception):  # not Ctrl-C, nor an exit that was asked for
                fail(self.presence, error)
            else:
                usual(kind, error, trace)

        sys.excepthook = hook
        # Some notebooks and services have no standard error that is a file.
        if not faulthandler.is_enabled() and sys.__stderr__ is not None:
            faulthandler.enable(sys.__stderr__)


def _groups_of(transport: Transport, domain_size: int) -> tuple[tuple[int, ...], ...]:
    """Ranks of each domain group, ascending; on one machine if possible. *Collective*.

    They talk more than others. Launchers that deal ranks to machines in turn would else have every group talk between
    machines.
    """
    order = list(range(transport.size))
    if 1 < domain_size < transport.size:
        hosts = _hosts(transport)
        order.sort(key=lambda rank: hosts.index(hosts[rank]))
    groups = [order[first : first + domain_size] for first in range(0, transport.size, domain_size)]
    return tuple(tuple(sorted(group)) for group in groups)


def _hosts(transport: Transport) -> list[str]:
    """The machine of each rank. *Collective*."""
    return gather(transport, platform.node())
