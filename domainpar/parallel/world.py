"""The ranks of a run: who this one is, who shares its events, and how all of them end together."""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import torch
from torch import Tensor

from domainpar import faults
from domainpar.compiling import watch_compiling
from domainpar.parallel import launcher
from domainpar.parallel.board import PATIENCE_SECONDS, Life, Mark
from domainpar.parallel.failing import NobodyServes, exit_code, report, write_error
from domainpar.parallel.failing import Refused as Refused  # what every caller of a world may meet
from domainpar.parallel.places import in_words, where
from domainpar.parallel.program import about_this_program, wrong_number
from domainpar.parallel.side_channel import SharedMarks, SideChannel
from domainpar.parallel.threads import Switchboard, ThreadTransport
from domainpar.parallel.transport import RanksFailed, Transport
from domainpar.problems import Problem, Where, expected, told

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

DEFAULT_DEADLINE = 300.0
DEFAULT_JOIN_SECONDS = 300.0
LARGEST_DEFAULT_DOMAIN = 8
SECONDS_TO_REPORT = 1.0  # given to the one rank that prints what is wrong, before others end the job

T = TypeVar("T")
TransportName = Literal["auto", "mpi", "gloo", "nccl"]


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
        host: Name of this machine.
        last_mark: What this rank last said it was about to do.
    """

    transport: Transport
    domain: Transport
    data_group: int
    num_data_groups: int
    device: torch.device
    marks: SideChannel | None = None
    stop_watching: Callable[[], None] = field(default=lambda: None, repr=False)
    host: str = field(default_factory=platform.node)
    last_mark: Mark | None = field(default=None, repr=False)
    _closed: bool = field(default=False, repr=False)
    _guarding: Any = field(default=None, repr=False)

    @classmethod
    def launch(
        cls,
        transport: TransportName = "auto",
        device: str = "cpu",
        domain_size: int | None = None,
        timeout: float = DEFAULT_DEADLINE,
        *,
        join_seconds: float = DEFAULT_JOIN_SECONDS,
        share_gpu: bool = False,
    ) -> World:
        """Join the other processes that a launcher started (mpiexec, torchrun, srun); alone without one; *collective*.

        End with `close`: ranks whose rank 0 is gone end themselves with an error.

        Args:
            transport: `auto` takes NCCL on GPUs, MPI under an MPI launcher, gloo otherwise.
            device: `cpu`, `cuda` (the GPU of this rank), or `auto` for `cuda` where there is one.
            domain_size: Ranks that share one event, a divisor of their number. Default: the largest up to 8.
            timeout: Seconds that a rank may wait for the others before it raises (see `set_deadline`).
            join_seconds: Seconds in which all ranks must have come.
            share_gpu: Let several ranks of a machine use one GPU.

        Raises:
            ValueError: If an argument is wrong, on every rank alike.
            Refused: If launcher and MPI library do not belong together, or the ranks cannot meet.
        """
        from domainpar.parallel.bring_up import bring_up

        return bring_up(transport, device, domain_size, timeout, join_seconds, share_gpu)

    @classmethod
    def from_process_group(
        cls,
        group: ProcessGroup | None = None,
        device: str | torch.device = "cpu",
        domain_size: int | None = None,
        timeout: float = DEFAULT_DEADLINE,
    ) -> World:
        """Use a `torch.distributed` group that the program already has; *collective* over that group.

        Args:
            group: A gloo or NCCL group, None for the default one. It stays the caller's: `close` leaves it alone.
            device: Where this rank computes.
            domain_size: As for `launch`.
            timeout: As for `launch`; a shorter time limit of the group itself comes first.

        Raises:
            ValueError: If there is no such group.
        """
        from domainpar.parallel.bring_up import world_of_group

        return world_of_group(group, torch.device(device), domain_size, timeout)

    @classmethod
    @contextmanager
    def session(
        cls,
        transport: TransportName = "auto",
        device: str = "cpu",
        domain_size: int | None = None,
        timeout: float = DEFAULT_DEADLINE,
        *,
        join_seconds: float = DEFAULT_JOIN_SECONDS,
        share_gpu: bool = False,
        num_ranks: int | None = None,
        same: Mapping[str, str] | None = None,
    ) -> Iterator[World]:
        """`launch`, `agree_on`, `guard` and `close` in one, for programs; *collective*. Arguments as for `launch`.

        What is refused before work is printed once and becomes exit code 2, another expected error exit code 1.

        Args:
            transport: As for `launch`.
            device: As for `launch`.
            domain_size: As for `launch`.
            timeout: As for `launch`.
            join_seconds: As for `launch`.
            share_gpu: As for `launch`.
            num_ranks: How many ranks there must be; None: as many as there are.
            same: What must be the same on every rank, besides versions and code.
        """
        try:
            world = cls.launch(transport, device, domain_size, timeout, join_seconds=join_seconds, share_gpu=share_gpu)
        except (Refused, ValueError) as problem:
            refused = problem if isinstance(problem, Refused) else Refused(**told(problem))
            if launcher.started_as_root() or isinstance(problem, NobodyServes):
                write_error(refused.text)
            else:
                time.sleep(SECONDS_TO_REPORT)  # launchers end all ranks when the first is gone
            raise SystemExit(2) from None
        watch_compiling(talks=world.is_root)
        try:
            with world.guard():
                world.agree(wrong_number(num_ranks, world.size))
                world.agree_on({**about_this_program(), **(same or {})})
                yield world
                world.close()
        except (Exception, KeyboardInterrupt) as error:  # only of a rank that is alone: others have ended by now
            if expected(error) is None and not isinstance(error, KeyboardInterrupt):
                raise
            raise SystemExit(exit_code(error)) from None  # it has been told; a traceback would bury it

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
            transport.board = marks
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

    def mark(self, phase: str, step: int, event: str | None = None) -> None:
        """Leave a mark of what this rank is about to do; when a deadline passes, the last of every rank is shown.

        Args:
            phase: One word: `load`, `forward`, ...
            step: Number of the step, from 0.
            event: The event it is about, if it is about one.
        """
        self.last_mark = Mark(step, phase, event, time.time())
        for transport in (self.transport, self.domain):
            transport.doing = f"step {step}, {phase}"
        faults.at(phase, step)
        if self.marks is not None:
            self.marks.post(self.rank, self.last_mark)

    def set_deadline(self, seconds: float) -> None:
        """From now on this rank waits so long for others: a first step takes longer than those after it."""
        self.transport.deadline = self.domain.deadline = seconds

    def look(self, beat: int) -> Life:
        """What this rank is doing, as its watcher tells the others; called from the watcher's thread."""
        transports = [self.transport] if self.domain is self.transport else [self.transport, self.domain]
        calls = sum(transport.num_calls for transport in transports)
        for transport in transports:
            since = transport.waiting_since
            if since is not None:
                return Life(beat, calls, round(time.monotonic() - since, 2), transport.waiting_in)
        return Life(beat, calls)

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
        payload = json.dumps(told(problem), sort_keys=True) if problem else ""
        ranks_of: dict[str, list[int]] = {}
        for rank, found in enumerate(self.transport.all_gather(payload.encode())):
            if found:
                ranks_of.setdefault(found.decode(), []).append(rank)
        if ranks_of:
            raise self._refusal([(json.loads(text), ranks) for text, ranks in ranks_of.items()])

    def agree_on(
        self, values: Mapping[str, str], hint: str = "start all ranks alike", among: Transport | None = None
    ) -> None:
        """Refuse to go on where ranks differ; *collective*.

        Args:
            values: What must be the same on every rank, by name.
            hint: What to do about it.
            among: Joins the ranks that are compared; None: all. If some refuse, all ranks of the world do.

        Raises:
            Refused: On every rank, naming the ranks that differ from most, the first name and both values.
        """
        transport = among or self.transport
        everyone = [json.loads(text) for text in transport.all_gather(json.dumps(dict(values)).encode())]
        problem = _difference(everyone, transport, hint)
        if transport is not self.transport:
            self.agree(problem)
        elif problem is not None:
            raise Refused(problem.what, problem.hint)

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
                write_error(refused.text)
            self.close()
            raise SystemExit(2) from None
        except BaseException as error:
            if isinstance(error, SystemExit) and not error.code:
                raise
            self.fail(error)
            raise

    def fail(self, error: BaseException) -> None:
        """Say why this rank fails, unless another one has, and end all of them. On processes this does not return."""
        if isinstance(error, RanksFailed):
            time.sleep(SECONDS_TO_REPORT * (self.marks is not None and self.marks.between_processes))
        else:
            self._report_once(error)
        self.abort(exit_code(error))

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
        faults.reach("close")
        if self.marks is not None:
            with self.transport.waiting("close"):
                self._meet(self.marks)
        self.stop_watching()  # not before: until all have come, one may still fail
        if self.marks is not None:
            self.marks.leave(self.transport.deadline)
        if self.domain is not self.transport:
            self.domain.close()
        self.transport.close()

    def _meet(self, marks: SideChannel) -> None:
        """Wait until all ranks close. One that waits in a call that this rank will never make does not."""
        ours = self.look(0).calls
        waiting: list[tuple[int, Life]] = []

        def hopeless(lives: Sequence[Life | None]) -> bool:
            # Only of ranks that share events with this one is it known how many calls they make.
            together = [(rank, lives[rank]) for rank in self.domain.world_ranks]
            waiting[:] = [
                (rank, life)
                for rank, life in together
                if life is not None and life.calls > ours and (life.waiting or 0.0) > PATIENCE_SECONDS
            ]
            return bool(waiting)

        if marks.meet(self.transport.deadline, hopeless):
            return
        if not waiting:
            self.transport.raise_timeout([], doing="close")
        rank, life = waiting[0]
        raise self.transport.missing(
            f"it is in {in_words(*where()) or 'close'} and makes no more calls, but "
            f"{self.transport.name_ranks([rank])} waits for it in {life.place or life.doing}",
            [self.rank],
            known=True,
        )

    def _refusal(self, found: list[tuple[dict[str, Any], list[int]]]) -> Refused:
        """What ranks found wrong, in one: the first is told in full, of others what."""
        first, ranks = found[0]
        if len(found) == len(ranks) == 1 < self.size:
            return Refused(**first, rank=self.transport.world_ranks[ranks[0]], size=self.size)
        what = "\n".join(self._with_ranks(problem["what"], ranks) for problem, ranks in found)
        return Refused(what, first["hint"], event=first["event"], file=first["file"])

    def _with_ranks(self, text: str, ranks: list[int]) -> str:
        return text if len(ranks) == self.size else f"{self.transport.name_ranks(ranks)}: {text}"

    def _report_once(self, error: BaseException) -> None:
        """Print what went wrong, unless another rank has: one failure makes others, which would only hide it."""
        if self.marks is None or self.marks.claim_failure():
            problem = expected(error)
            write_error(report(problem or error, self._here(problem)))
        else:
            time.sleep(SECONDS_TO_REPORT)

    def _here(self, problem: Problem | None = None) -> Where:
        """Where this rank is: as far as the problem does not say, where its last mark was."""
        mark, event, file = self.last_mark, None, None
        if problem is not None:
            event, file = problem.event, problem.file
        step, phase = (None, None) if mark is None else (mark.step, mark.phase)
        event = event or (mark.event if mark is not None else None)
        return Where(event, self.rank, self.size, self.host, file, step, phase)


def _difference(everyone: Sequence[Mapping[str, str]], transport: Transport, hint: str) -> Problem | None:
    """The first name of which ranks have different values, those that differ from most first."""
    for name in dict.fromkeys(name for values in everyone for name in values):
        found = [values.get(name, "missing") for values in everyone]
        usual = max(found, key=found.count)
        odd = [rank for rank, value in enumerate(found) if value != usual]
        if odd:
            rest = [rank for rank in range(len(found)) if rank not in odd]
            others = "the others" if len(rest) > 1 else transport.name_ranks(rest)
            ranks = transport.name_ranks(odd)
            return Problem(f"{name} is {found[odd[0]]} on {ranks}, but {usual} on {others}", hint)
    return None


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
