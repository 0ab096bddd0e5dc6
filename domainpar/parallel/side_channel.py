"""Where every rank leaves a mark of what it is doing, so that survivors can say who is missing and where it was."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Protocol, TypeVar

from domainpar.parallel.transport import Transport

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

Answer = TypeVar("Answer")

POLL_SECONDS = 0.25
MEETING_SECONDS = 0.005
LINGER_SECONDS = 1.0  # some polls long: whoever serves the store goes last
ORPHAN_SECONDS = 3.0
CONNECT_SECONDS = 60.0


class SideChannel(Protocol):
    """Keeps one short text a rank, readable by all at any time without the help of the ranks that wrote them."""

    def post(self, rank: int, text: str) -> None:
        """Replace the mark of a rank."""

    def read(self) -> list[str | None]:
        """The last mark of every rank; None for a rank without one."""

    def claim_failure(self) -> bool:
        """Whether the caller is the first rank to report a failure; the others keep quiet."""

    def leave(self, deadline: float) -> bool:
        """Wait until every rank wants to leave, *collective*; False if some did not within `deadline` seconds."""


class SharedMarks:
    """Marks of ranks that share one process."""

    def __init__(self, num_ranks: int) -> None:
        self._marks: list[str | None] = [None] * num_ranks
        self._unclaimed = threading.Lock()

    def post(self, rank: int, text: str) -> None:
        """Replace the mark of a rank."""
        self._marks[rank] = text

    def read(self) -> list[str | None]:
        """The last mark of every rank; None for a rank without one."""
        return list(self._marks)

    def claim_failure(self) -> bool:
        """Whether the caller is the first rank to report a failure."""
        return self._unclaimed.acquire(blocking=False)

    def leave(self, deadline: float) -> bool:
        """Nothing to wait for: what is shared lives as long as it is used."""
        return True


class StoreMarks:
    """Marks of ranks that are processes, kept by a `torch.distributed` store.

    Nothing here raises when the store is lost: that must not end a run, nor hide why it ended.

    Args:
        store: This rank's connection, used by one thread.
        num_ranks: Ranks that leave marks.
        serves: Whether the store lives in this process.
    """

    def __init__(self, store: Store, num_ranks: int, serves: bool) -> None:
        self.store = store
        self.num_ranks = num_ranks
        self.serves = serves
        self._lost = False  # not tried again: torch prints a page of C++ frames at every attempt

    def post(self, rank: int, text: str) -> None:
        """Replace the mark of a rank."""
        self._unless_lost(lambda: self.store.set(f"mark/{rank}", text), None)

    def read(self) -> list[str | None]:
        """The last mark of every rank; None for a rank without one, or when the store cannot be reached."""
        return [self._unless_lost(partial(self._read, rank), None) for rank in range(self.num_ranks)]

    def claim_failure(self) -> bool:
        """Whether the caller is the first rank to report a failure, as far as the store can be reached."""
        return self._unless_lost(lambda: self.store.add("failures", 1) == 1, True)

    def announce_failure(self) -> None:
        """Let the `FailureWatch` of all other ranks end their processes."""
        self._unless_lost(lambda: self.store.set("failed", "yes"), None)
        if self.serves:
            time.sleep(LINGER_SECONDS)

    def leave(self, deadline: float) -> bool:
        """Wait until every rank wants to leave; *collective*.

        gloo needs this: a rank that closes its connections while others still read their last message can cost them
        that message. The rank that serves the store waits until all others have left it.
        """
        give_up_at = time.monotonic() + deadline
        met = self._unless_lost(partial(self._meet, "leaving", give_up_at), True)
        self._unless_lost(lambda: self.store.add("left", 1), 0)
        if met and self.serves:
            self._unless_lost(partial(self._all_in, "left", give_up_at), True)
        self._lost = True
        return met

    def _meet(self, counter: str, give_up_at: float) -> bool:
        self.store.add(counter, 1)
        return self._all_in(counter, give_up_at)

    def _all_in(self, counter: str, give_up_at: float) -> bool:
        while self.store.add(counter, 0) < self.num_ranks:
            if time.monotonic() > give_up_at:
                return False
            time.sleep(MEETING_SECONDS)
        return True

    def _read(self, rank: int) -> str | None:
        key = f"mark/{rank}"
        return self.store.get(key).decode() if self.store.check([key]) else None

    def _unless_lost(self, ask: Callable[[], Answer], otherwise: Answer) -> Answer:
        if self._lost:
            return otherwise
        try:
            return ask()
        except RuntimeError:
            self._lost = True
            return otherwise


class FailureWatch(threading.Thread):
    """Ends this process soon after another rank has announced a failure, whatever this one is doing.

    MPI can end all processes of a job; a process group cannot, and a rank that waits for one that is gone may not know.

    Args:
        store: A connection of its own.
        serves: Whether the store lives in this process, which then ends last.
    """

    def __init__(self, store: Store, serves: bool) -> None:
        super().__init__(name="failure watch", daemon=True)
        self._store = store
        self._serves = serves
        self._stopped = threading.Event()

    def run(self) -> None:
        """Look again and again, until stopped."""
        while not self._stopped.wait(POLL_SECONDS):
            try:
                failed = self._store.check(["failed"])
            except RuntimeError:
                self._end_without_store()
                return
            if failed:
                time.sleep(LINGER_SECONDS if self._serves else 0.0)
                os._exit(1)

    def _end_without_store(self) -> None:
        """Whoever served the store ended without `close`: give this rank the time to end by itself, then end it."""
        if not self._stopped.wait(ORPHAN_SECONDS):
            os.write(2, b"error: the process that serves the side channel (rank 0) is gone; ending this rank.\n")
            os._exit(1)

    def stop(self) -> None:
        """Stop looking, before the store goes away."""
        self._stopped.set()
        self.join()


def connect(host: str, port: int, serves: bool = False, timeout: float = CONNECT_SECONDS) -> Store:
    """Connect to the store at an address, or serve it there.

    Raises:
        RuntimeError: If nobody serves there in time, or the port is taken.
    """
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    limit = timedelta(seconds=timeout)
    store: Store = TCPStore(host, port, is_master=serves, wait_for_workers=False, timeout=limit)
    return store


def prefixed(prefix: str, store: Store) -> Store:
    """The same store, its keys apart from those of others."""
    from torch.distributed import PrefixStore  # type: ignore[attr-defined]

    apart: Store = PrefixStore(prefix, store)
    return apart


def share_store(transport: Transport) -> tuple[StoreMarks, Callable[[], Store]] | None:
    """Serve a store on rank 0, at a free port, and connect all ranks to it; *collective*.

    Returns:
        This rank's marks and a way to connect once more; None on all ranks if one of them cannot reach rank 0.
    """
    serves = transport.rank == 0
    hosts = [host.decode() for host in transport.all_gather(socket.gethostname().encode())]
    host = "127.0.0.1" if len(set(hosts)) == 1 else hosts[0]
    store, port = _serve(host) if serves else (None, 0)
    port = int(transport.broadcast(str(port).encode()))
    if not serves and port:
        store = _try_to_connect(host, port)
    if not all(transport.all_gather(b"" if store is None else b"connected")) or store is None:
        return None
    return StoreMarks(store, transport.size, serves), lambda: connect(host, port)


def describe(marks: list[str | None]) -> str:
    """The last mark of every rank in words, one line a rank."""
    lines = [f"  rank {rank}: {'no mark yet' if mark is None else _with_age(mark)}" for rank, mark in enumerate(marks)]
    return "\n".join(["Last seen:", *lines])


def mark_text(phase: str, step: int) -> str:
    """What a rank posts: when, which step, which phase."""
    return f"{time.time():.3f} step {step}, {phase}"


def _with_age(mark: str) -> str:
    posted, _, what = mark.partition(" ")
    return f"{what}, {max(0.0, time.time() - float(posted)):.1f} s ago"


def _serve(host: str) -> tuple[Store | None, int]:
    """A new store and its port; port 0 where that is impossible."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    try:
        store = TCPStore(host, 0, is_master=True, wait_for_workers=False)
    except RuntimeError:
        return None, 0
    return store, store.port


def _try_to_connect(host: str, port: int) -> Store | None:
    try:
        return connect(host, port)
    except RuntimeError:
        return None
