"""Worlds of users: from a launcher, from a process group that a program already has, and as a whole session."""

from __future__ import annotations

import faulthandler
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Self

import torch

from domainpar import faults, timeouts
from domainpar.agreement import Refused, agree, agree_on
from domainpar.compiling import watch_compiling
from domainpar.parallel import launcher, world
from domainpar.parallel.digests import about_this_program
from domainpar.parallel.failure import exit_code, fail, guard, write_error
from domainpar.parallel.meeting import (
    Launch,
    NobodyServes,
    TransportName,
    meet,
    of_group,
)
from domainpar.parallel.side_channel import share_store
from domainpar.parallel.watcher import Watcher
from domainpar.problems import Problem, expected, told
from domainpar.words import several

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class World(world.World):
    """All ranks of a run, as a grid of data groups and domain groups, with the ways to come by one."""

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
            transport, device, domain_size, timeout, join_seconds, share_gpu: As for `Launch`.

        Raises:
            ValueError: If an argument is wrong, on every rank alike.
            Refused: If launcher and MPI library do not belong together, or the ranks cannot meet.
        """
        return cls._launched(Launch(transport, device, domain_size, timeout, join_seconds, share_gpu))

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
            device: Where this rank computes.
            domain_size: As for `launch`.
            timeout: As for `launch`; a shorter time limit of the group itself comes first.

        Raises:
            ValueError: If there is no such group.
        """
        transport = of_group(group, torch.device(device), timeout)
        world.checked_domain_size(domain_size, transport.size)
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
        """`launch`, `agree_on`, `guard` and `close` in one, for programs; *collective*.

        What is refused before work is printed once and becomes exit code 2, another expected error exit code 1.

        Args:
            transport, device, domain_size, timeout, join_seconds, share_gpu: As for `Launch`.
            num_ranks: How many ranks there must be; None: as many as there are.
            same: What must be the same on every rank, besides versions and code.
        """
        try:
            ranks = cls._launched(Launch(transport, device, domain_size, timeout, join_seconds, share_gpu))
        except ValueError as problem:
            refused = problem if isinstance(problem, Refused) else Refused(**told(problem))
            if launcher.started_as_root() or isinstance(problem, NobodyServes):
                write_error(refused.text)
            else:
                time.sleep(timeouts.REPORT)  # launchers end all ranks when the first is gone
            raise SystemExit(2) from None
        watch_compiling(talks=ranks.is_root)
        try:
            with guard(ranks.presence):
                agree(ranks.transport, _wrong_number(num_ranks, ranks.size))
                agree_on(ranks.transport, {**about_this_program(), **(same or {})})
                yield ranks
                ranks.close()
        except (Exception, KeyboardInterrupt) as error:  # only of a rank that is alone: others have ended by now
            if expected(error) is None and not isinstance(error, KeyboardInterrupt):
                raise
            raise SystemExit(exit_code(error)) from None  # it is printed already; a traceback would bury it

    @classmethod
    def _launched(cls, launch: Launch) -> Self:
        """Meet, and be watched where there is a store. *Collective*."""
        met = meet(launch)
        ranks = cls.over(met.transport, met.device, launch.domain_size, met.marks)
        if met.marks is not None and met.marks.connect is not None:
            watcher = Watcher(met.marks.connect(), ranks.rank, ranks.size, met.marks.serves, ranks.presence.look)
            watcher.start()
            ranks.presence.stop_watching = watcher.stop
        if met.transport.name != "threads":
            ranks._report_what_nobody_catches()
            ranks.transport.barrier()  # a rank that fails from here on is noticed by all
        faults.reach("joined")
        return ranks

    def _report_what_nobody_catches(self) -> None:
        """End all ranks when this one ends by an error outside of `guard`, and say where a crash in C++ happened."""
        usual = sys.excepthook

        def hook(kind: Any, error: BaseException, trace: Any) -> None:
            if issubclass(kind, Exception):
                fail(self.presence, error)
            else:
                usual(kind, error, trace)

        sys.excepthook = hook
        if not faulthandler.is_enabled() and sys.__stderr__ is not None:
            faulthandler.enable(sys.__stderr__)


def _wrong_number(wanted: int | None, started: int) -> Problem | None:
    if wanted in (None, started):
        return None
    return Problem(
        f"config wants {several(wanted, 'rank')}, {started} started",
        f"mpiexec -n {wanted} python -m ..., or omit --ranks to take as many as are started",
    )
