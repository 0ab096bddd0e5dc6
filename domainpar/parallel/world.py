"""The ranks of a run as a grid: this rank, the ranks that share its graph, and the constructors of a world."""

from __future__ import annotations

import faulthandler
import os
import platform
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import torch
from torch import Tensor

from domainpar.common import faults, timeouts
from domainpar.common.agreement import Refused, agree, agree_on, gather
from domainpar.common.compiling import watch_compiling
from domainpar.common.limits import cores_here
from domainpar.common.problems import Problem, as_problem, problem_record
from domainpar.common.words import PROGRESS_LOG, several
from domainpar.parallel.board import SideChannel
from domainpar.parallel.digests import about_this_program
from domainpar.parallel.launcher import alone_in_job, detect
from domainpar.parallel.meeting import TransportName, checked_domain_size, meet, tells
from domainpar.parallel.proof import proved
from domainpar.parallel.rank_status import RankStatus, Watcher, exit_code, fail, guard, write_error
from domainpar.parallel.side_channel import share_store
from domainpar.parallel.threads import Switchboard, ThreadTransport
from domainpar.parallel.transport import OfThisProcess, Transport

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class ExchangeCounters(NamedTuple):
    """Cost of the communication of a rank since the counters were last read; each as in `Transport`."""

    seconds_exchanging: float
    seconds_waiting: float
    bytes_sent: int


@dataclass(frozen=True, eq=False)
class World(OfThisProcess):
    """All ranks of a run, as a grid of data groups and domain groups.

    `session`, `from_process_group`, `from_mpi` and `alone` make one. The ranks of a domain group share one graph or
    event; the groups take different ones (`data_group` numbers them). A world is a context manager: at the end of the
    block it is closed, and if one rank raises an error in the block, all ranks end. With a single rank the error goes
    on to the caller.

    Attributes:
        transport: Communication of all ranks.
        domain: Communication of the ranks that share this rank's graph; the same object as `transport` if all do.
        groups: Ranks of each domain group, those of one machine together, in the order of ranks.
        device: The device on which this rank computes.
        rank_status: The state of this rank that others can see.
    """

    transport: Transport
    domain: Transport
    groups: tuple[tuple[int, ...], ...]
    device: torch.device
    rank_status: RankStatus = field(repr=False)

    @classmethod
    def alone(cls, device: str | torch.device = "cpu") -> Self:
        """A world of one rank. It runs the same code as any other world."""
        return cls.over(ThreadTransport(Switchboard(1), 0), device, marks=SideChannel.for_threads(1))

    @classmethod
    def over(
        cls,
        transport: Transport,
        device: str | torch.device = "cpu",
        domain_size: int | None = None,
        marks: SideChannel | None = None,
    ) -> Self:
        """Arrange the ranks of a transport as a grid. *Collective*.

        Args:
            transport: Communication of all ranks.
            device: The device on which this rank computes.
            domain_size: Number of ranks that share one graph, a divisor of their number. Default: the largest up to 8.
            marks: The side channel, if there is one.

        Raises:
            ValueError: If `domain_size` does not divide the number of ranks.
        """
        transport.board = marks or transport.board
        groups, domain = _grid(transport, domain_size)
        return cls(transport, domain, groups, torch.device(device), RankStatus(transport, domain, marks))

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
        """Join the processes that a launcher started (mpiexec, torchrun, srun). *Collective*.

        Without a launcher it is a world of one rank. Call `close` at the end: a rank that sees rank 0 gone ends with an
        error. `session` does both.

        Args:
            transport: `auto`, `mpi`, `gloo` or `nccl`. `auto` takes NCCL on GPUs, MPI under an MPI launcher, else gloo.
            device: `cpu`, `cuda` (a GPU for this rank), or `auto`: `cuda` if there is a GPU for each rank, else `cpu`.
            domain_size: Number of ranks that share one graph, a divisor of their number. Default: the largest up to 8.
            timeout: Seconds that a rank may wait for the others before it raises an error (see `set_deadline`).
            join_seconds: Seconds within which all ranks have to join.
            share_gpu: Whether several ranks of a machine may use one GPU.

        Raises:
            ValueError: If an argument is wrong, on every rank alike.
            Refused: If launcher and MPI library do not belong together, the ranks cannot meet, or messages between them
                arrive changed.
        """
        joined, own_device, marks = meet(transport, device, domain_size, timeout, join_seconds, share_gpu)
        ranks = cls.over(joined, own_device, domain_size, marks)
        if marks is not None and marks.connect is not None:
            watcher = Watcher(marks.connect(), ranks.rank_status, marks.serves)
            watcher.start()
            ranks.rank_status.stop_watching = watcher.stop
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
        """Use a `torch.distributed` group that the program already has. *Collective* over that group.

        Args:
            group: A gloo or NCCL group; None: the default group. It stays the caller's, and `close` does not destroy
                it.
            device: The device on which this rank computes. A GPU becomes the program's current one; `cuda` means the
                one that is current.
            domain_size, timeout: As for `launch`. If the time limit of the group itself is shorter, that ends the wait.
                Waits of GPUs for NCCL end by the group's limit alone.

        Raises:
            ValueError: If there is no such group.
            Refused: On every rank, if messages of the group arrive changed.
        """
        from domainpar.parallel.process_group import wrap_group  # torch.distributed is for those who use it

        device = torch.device(device)
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        transport = wrap_group(group, device, timeout)
        checked_domain_size(domain_size, transport.size)
        proved(transport, device)
        return cls.over(transport, device, domain_size, share_store(transport))

    @classmethod
    def from_mpi(
        cls,
        comm: Any,
        device: str | torch.device = "cpu",
        domain_size: int | None = None,
        timeout: float = timeouts.FIRST_STEP,
    ) -> Self:
        """Use a communicator of mpi4py that the program already has. *Collective* over it.

        Args:
            comm: The communicator. It stays the caller's: messages travel over a copy, which `close` frees.
            device, domain_size, timeout: As for `launch`; `cuda` means the current GPU.

        Raises:
            ValueError: If it is none.
            Refused: On every rank, if messages of it arrive changed.
        """
        from domainpar.parallel.mpi import MpiTransport  # mpi4py is for those who use it

        if not hasattr(comm, "Dup"):
            raise ValueError(f"from_mpi takes a communicator of mpi4py, not a {type(comm).__name__}.")
        transport = proved(MpiTransport(comm.Dup(), timeout))
        checked_domain_size(domain_size, transport.size)
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
        """A context manager for programs: `launch`, a comparison of versions and code, and `close`. *Collective*.

        An error on one rank ends all ranks. What is refused before the work is printed once, with exit code 2; any
        other expected error has exit code 1.

        Args:
            transport, device, domain_size, timeout, join_seconds, share_gpu: As for `launch`.
            num_ranks: How many ranks there have to be; None: any number.
            same: Further values, by name, that have to be the same on every rank.
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
            PROGRESS_LOG.say(f"WARNING: {seen}", sys.stderr)
        watch_compiling(talks=ranks.is_root)
        try:
            with guard(ranks.rank_status):
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
        """Number of all ranks of the run."""
        return self.transport.size

    @property
    def data_group(self) -> int:
        """Number of the domain group of this rank, in [0, num_data_groups): which graph or events it works on."""
        return self.group_of(self.rank)

    @property
    def num_data_groups(self) -> int:
        """Number of domain groups in the world."""
        return len(self.groups)

    def group_of(self, rank: int) -> int:
        """Number of the domain group of a rank."""
        return next(number for number, ranks in enumerate(self.groups) if rank in ranks)

    @property
    def is_root(self) -> bool:
        """Whether this is rank 0, the one that prints."""
        return self.rank == 0

    @property
    def host(self) -> str:
        """Name of this machine."""
        return self.rank_status.host

    def cores_for_each(self) -> int:
        """Number of cores that this rank may use without taking one from another rank, at least 1. *Collective*.

        If the launcher bound ranks to cores these are its own; else the ranks of a machine share all cores. A rank that
        is alone takes `OMP_NUM_THREADS` of them at most; torchrun sets it to 1 for its ranks by default.
        """
        cores = cores_here()
        mine = f"{platform.node()} {','.join(map(str, cores))}".encode()
        threads = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
        most = int(threads) if self.size == 1 and threads.isdecimal() and int(threads) else len(cores)
        return max(1, min(most, len(cores) // self.transport.all_gather(mine).count(mine)))

    def mark(self, phase: str, step: int, event: str | None = None) -> None:
        """Note what this rank is about to do, for the status dump of all ranks; arguments as for `RankStatus.mark`."""
        self.rank_status.mark(phase, step, event)

    def set_deadline(self, seconds: float) -> None:
        """Set how many seconds this rank waits for others before it raises; first steps take longer."""
        self.transport.deadline = self.domain.deadline = seconds

    def step_boundary(self, values: Tensor) -> Tensor:
        """The sums of a few int64 values (stop flag, non-finite gradients, counts) over all ranks. *Collective*."""
        total = values.clone()
        self.transport.all_reduce(total)
        return total

    def take_counters(self) -> ExchangeCounters:
        """The sums of the counters of this rank's transports, which are reset."""
        counters = []
        for transport in self.rank_status.transports:
            counters.append([getattr(transport, name) for name in ExchangeCounters._fields])
            transport.seconds_exchanging = transport.seconds_waiting = 0.0
            transport.bytes_sent = 0
        return ExchangeCounters(*map(sum, zip(*counters)))

    def close(self) -> None:
        """Wait for all ranks, then release what the transports hold. *Collective*. A second call does nothing."""
        self.rank_status.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: TracebackType | None) -> None:
        if self.size == 1:
            self.close()  # no other rank to end: the caller may catch the error
            return
        with guard(self.rank_status):  # also around `close`: another rank may never come
            if error is not None:
                raise error
            self.close()

    def _report_what_nobody_catches(self) -> None:
        """End all ranks if this one ends by an error outside of `guard`; print where a crash in C++ happened."""
        usual = sys.excepthook

        def hook(kind: Any, error: BaseException, trace: Any) -> None:
            if issubclass(kind, Exception):  # not Ctrl-C, nor a requested exit
                fail(self.rank_status, error)
            else:
                usual(kind, error, trace)

        sys.excepthook = hook
        # Some notebooks and services have no standard error that is a file.
        if not faulthandler.is_enabled() and sys.__stderr__ is not None:
            faulthandler.enable(sys.__stderr__)


def _grid(transport: Transport, domain_size: int | None) -> tuple[tuple[tuple[int, ...], ...], Transport]:
    """Ranks of each domain group, ascending, on one machine where possible, and that of this rank. *Collective*.

    The ranks of a group communicate most. Some launchers give consecutive ranks to different machines: without sorting
    by host every group would then communicate between machines.
    """
    domain_size = checked_domain_size(domain_size, transport.size)
    order = list(range(transport.size))
    if 1 < domain_size < transport.size:
        hosts = gather(transport, platform.node())
        order.sort(key=lambda rank: hosts.index(hosts[rank]))
    firsts = range(0, transport.size, domain_size)
    groups = tuple(tuple(sorted(order[first : first + domain_size])) for first in firsts)
    return groups, transport if len(groups) == 1 else transport.split(groups)
