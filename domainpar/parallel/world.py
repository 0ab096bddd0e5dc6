"""The ranks of a run: who this one is, who shares its events, and how all of them end together."""

from __future__ import annotations

import os
import platform
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import torch
from torch import Tensor

from domainpar.parallel import launcher, side_channel
from domainpar.parallel.side_channel import SharedMarks, SideChannel
from domainpar.parallel.threads import Switchboard, ThreadTransport
from domainpar.parallel.transport import RanksFailed, Transport

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

DEFAULT_DEADLINE = 300.0
LARGEST_DEFAULT_DOMAIN = 8
SECONDS_TO_REPORT = 1.0  # given to the one rank that prints what is wrong, before others end the job

T = TypeVar("T")
TransportName = Literal["auto", "mpi", "gloo", "nccl"]


class Refused(Exception):
    """The work was refused before it began, by all ranks alike; the text is for the user, the exit code is 2."""


@dataclass(frozen=True)
class ExchangeCounters:
    """What one rank spent on talking since it was last asked.

    Attributes:
        seconds_exchanging: Packing, copying and posting.
        seconds_waiting: Waiting for other ranks.
        bytes_sent: Bytes of rows handed to other ranks.
    """

    seconds_exchanging: float
    seconds_waiting: float
    bytes_sent: int


@dataclass(eq=False)
class World:
    """All ranks of a run, as a grid of data groups and domain groups.

    The ranks of a domain group are consecutive and share one event; data groups take different events.

    Attributes:
        transport: Joins all ranks.
        domain: Joins the ranks that share this one's event; the same object as `transport` when that is all of them.
        data_group: Which group of events this rank works on, in [0, num_data_groups).
        num_data_groups: Domain groups in the world.
        device: Where this rank computes.
        marks: The side channel; None where there is none.
    """

    transport: Transport
    domain: Transport
    data_group: int
    num_data_groups: int
    device: torch.device
    marks: SideChannel | None = None
    stop_watching: Callable[[], None] = field(default=lambda: None, repr=False)
    _closed: bool = field(default=False, repr=False)
    _guarding: Any = field(default=None, repr=False)

    @classmethod
    def launch(
        cls,
        transport: TransportName = "auto",
        device: str = "cpu",
        domain_size: int | None = None,
        deadline: float = DEFAULT_DEADLINE,
    ) -> World:
        """Join the other processes that a launcher started (mpiexec, torchrun, srun); alone without one; *collective*.

        End with `close`: ranks whose rank 0 is gone end themselves with an error.

        Args:
            transport: `auto` takes NCCL on GPUs, MPI under an MPI launcher, gloo otherwise.
            device: `cpu`, `cuda` (the GPU of this rank), or `auto` for `cuda` where there is one.
            domain_size: Ranks that share one event, a divisor of their number. Default: the largest up to 8.
            deadline: Seconds that a rank may wait for the others before it raises.

        Raises:
            ValueError: If an argument is wrong, on every rank alike.
            Refused: If launcher and MPI library do not belong together, or the ranks cannot meet.
        """
        from domainpar.parallel.bring_up import bring_up

        return bring_up(transport, device, domain_size, deadline)

    @classmethod
    def from_process_group(
        cls,
        group: ProcessGroup | None = None,
        device: str | torch.device = "cpu",
        domain_size: int | None = None,
        deadline: float = DEFAULT_DEADLINE,
    ) -> World:
        """Use a `torch.distributed` group that the program already has; *collective* over that group.

        Args:
            group: A gloo or NCCL group, None for the default one. It stays the caller's: `close` leaves it alone.
            device: Where this rank computes.
            domain_size: As for `launch`.
            deadline: As for `launch`; a shorter time limit of the group itself comes first.
        """
        from domainpar.parallel.bring_up import world_of_group

        return world_of_group(group, torch.device(device), domain_size, deadline)

    @classmethod
    @contextmanager
    def session(
        cls,
        transport: TransportName = "auto",
        device: str = "cpu",
        domain_size: int | None = None,
        deadline: float = DEFAULT_DEADLINE,
    ) -> Iterator[World]:
        """`launch`, `guard` and `close` in one, for programs; *collective*. Arguments as for `launch`.

        What is refused before work is printed once and becomes exit code 2.
        """
        try:
            world = cls.launch(transport, device, domain_size, deadline)
        except (Refused, ValueError) as refused:
            if launcher.started_as_root():
                _write_error(f"error: {refused}\n")
            else:
                time.sleep(SECONDS_TO_REPORT)  # launchers end all ranks when the first is gone
            raise SystemExit(2) from None
        with world.guard():
            yield world
            world.close()

    @classmethod
    def alone(cls, device: str | torch.device = "cpu") -> World:
        """A world of one rank, on the same code path as any other."""
        return cls.over(ThreadTransport(Switchboard(1), 0, DEFAULT_DEADLINE), device, marks=SharedMarks(1))

    @classmethod
    def over(
        cls,
        transport: Transport,
        device: str | torch.device = "cpu",
        domain_size: int | None = None,
        marks: SideChannel | None = None,
    ) -> World:
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
        num_groups = size // domain_size
        if marks is not None:
            transport.last_marks = lambda: side_channel.describe(marks.read())
        groups = [range(first, first + domain_size) for first in range(0, size, domain_size)]
        domain = transport if num_groups == 1 else transport.split(groups)
        return cls(transport, domain, transport.rank // domain_size, num_groups, torch.device(device), marks)

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
        """Whether this is rank 0, the one that talks to the user."""
        return self.rank == 0

    def cores_for_each(self) -> int:
        """Cores that this rank may use without taking one from another rank of its machine, at least 1. *Collective*.

        A launcher that binds ranks to cores has given each its own; else the ranks of a machine share what there is.
        """
        cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
        mine = f"{platform.node()} {','.join(map(str, cores))}".encode()
        return max(1, len(cores) // self.transport.all_gather(mine).count(mine))

    def mark(self, phase: str, step: int) -> None:
        """Leave a mark of what this rank is about to do; when a deadline passes, the last of every rank is shown."""
        if self.marks is not None:
            self.marks.post(self.rank, side_channel.mark_text(phase, step))

    def step_boundary(self, values: Tensor) -> Tensor:
        """Add up a few int64 values of all ranks (stop flag, non-finite, counts) in one reduction; *collective*.

        Returns:
            The sums, the same on every rank; `values` stay as they are.
        """
        total = values.clone()
        self.transport.all_reduce(total)
        return total

    def agree(self, problem: BaseException | str | None) -> None:
        """Refuse on all ranks what any one rank must refuse; *collective*.

        Args:
            problem: What this rank found wrong, or None.

        Raises:
            Refused: On every rank, with the same text naming the ranks, if any rank has a problem.
        """
        found = [text.decode() for text in self.transport.all_gather(_in_words(problem).encode())]
        ranks_of: dict[str, list[int]] = {}
        for rank, text in enumerate(found):
            if text:
                ranks_of.setdefault(text, []).append(rank)
        if ranks_of:
            raise Refused("\n".join(self._with_ranks(text, ranks) for text, ranks in ranks_of.items()))

    def on_all(self, make: Callable[[], T]) -> T:
        """Make something on every rank; if one cannot, all refuse; *collective*.

        Raises:
            Refused: On every rank, if making it raised a ValueError or OSError on any.
        """
        made: list[T] = []
        problem: Exception | None = None
        try:
            made.append(make())
        except (ValueError, OSError) as error:
            problem = error
        self.agree(problem)
        return made[0]

    def on_root(self, make: Callable[[], str]) -> str:
        """Have rank 0 make a text, and give it to every rank; *collective*.

        Raises:
            Refused: On every rank, if making it raised a ValueError or OSError on rank 0.
        """
        text, problem = "", None
        if self.is_root:
            try:
                text = make()
            except (ValueError, OSError) as error:
                problem = error
        self.agree(problem)
        return self.transport.broadcast(text.encode()).decode()

    def take_counters(self) -> ExchangeCounters:
        """Sum the counters of this rank's transports and set them back to zero."""
        transports = {id(transport): transport for transport in (self.transport, self.domain)}.values()
        counters = ExchangeCounters(
            sum(transport.seconds_exchanging for transport in transports),
            sum(transport.seconds_waiting for transport in transports),
            sum(transport.bytes_sent for transport in transports),
        )
        for transport in transports:
            transport.seconds_exchanging = transport.seconds_waiting = 0.0
            transport.bytes_sent = 0
        return counters

    @contextmanager
    def guard(self) -> Iterator[None]:
        """Around the work of a program: an error on one rank ends all of them, at once and with one message.

        What all ranks refused together (`agree`) is printed by rank 0 and becomes exit code 2. Any other error is
        printed with its rank and aborts the whole job with exit code 1.
        """
        try:
            yield
        except Refused as refused:
            if self.is_root:
                _write_error(f"error: {refused}\n")
            self.close()
            raise SystemExit(2) from None
        except BaseException as error:
            if isinstance(error, SystemExit) and not error.code:
                raise
            if not isinstance(error, RanksFailed):
                self._report_once(error)
            self.abort(_exit_code(error))
            raise

    def __enter__(self) -> World:
        self._guarding = self.guard()
        self._guarding.__enter__()
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: TracebackType | None) -> None:
        """`guard` around a `with` block, and `close` at its end; *collective*."""
        self._guarding.__exit__(kind, error, trace)
        if error is None:
            self.close()

    def abort(self, code: int) -> None:
        """End all ranks, also those that wait for this one. On processes this does not return."""
        self.transport.abort(code)

    def close(self) -> None:
        """Meet once more, then give back what the transports hold; *collective*."""
        if self._closed:
            return
        self._closed = True
        self.stop_watching()
        if self.marks is not None and not self.marks.leave(self.transport.deadline):
            self.transport.raise_timeout([], doing="close")
        if self.domain is not self.transport:
            self.domain.close()
        self.transport.close()

    def _with_ranks(self, text: str, ranks: list[int]) -> str:
        return text if len(ranks) == self.size else f"{self.transport.name_ranks(ranks)}: {text}"

    def _report_once(self, error: BaseException) -> None:
        """Print what went wrong, unless another rank has: one failure makes others, which would only hide it."""
        if self.marks is None or self.marks.claim_failure():
            _write_error(self._report(error))
        else:
            time.sleep(SECONDS_TO_REPORT)

    def _report(self, error: BaseException) -> str:
        where = f"rank {self.rank} of {self.size}"
        if isinstance(error, KeyboardInterrupt):
            return f"\n{where}: interrupted; ending all ranks.\n"
        trace = "".join(traceback.format_exception(type(error), error, _without_own_frames(error)))
        return f"\n--- {where} failed ---\n{trace}--- {where}: ending all ranks ---\n"


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


def _without_own_frames(error: BaseException) -> TracebackType | None:
    """The traceback from the caller's own code on."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    return trace


def _exit_code(error: BaseException) -> int:
    if isinstance(error, KeyboardInterrupt):
        return 130
    if isinstance(error, SystemExit) and isinstance(error.code, int):
        return error.code
    return 1


def _in_words(problem: BaseException | str | None) -> str:
    if problem is None or isinstance(problem, str):
        return problem or ""
    return str(problem) or type(problem).__name__


def _write_error(text: str) -> None:
    """Write to standard error in one piece: lines of other ranks cannot come between, and no buffer can be lost."""
    sys.stdout.flush()
    os.write(2, text.encode(errors="replace"))
