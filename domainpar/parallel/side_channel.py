"""The side channel: the board's marks and a few flags, kept without the help of the ranks that wrote them."""

from __future__ import annotations

import os
import platform
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeVar

from domainpar import timeouts
from domainpar.parallel.board import Entry, Life, Mark
from domainpar.parallel.transport import Transport

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

Answer = TypeVar("Answer")

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
NETWORK = Path("/proc/self/ns/net")


class SideChannel(Protocol):
    """Keeps the board, readable by all at any time without the help of the ranks that wrote on it.

    Attributes:
        between_processes: Whether ranks are processes, of which the first to end may take the others with it.
    """

    between_processes: bool

    def post(self, rank: int, mark: Mark) -> None:
        """Replace the mark of a rank."""

    def read(self) -> list[Entry]:
        """What is known of every rank; empty where the board cannot be reached."""

    def frames_of(self, rank: int) -> str:
        """Where the main thread of a rank is, as lines of a traceback; empty if it does not answer."""

    def claim_failure(self) -> bool:
        """Whether the caller is the first rank to report a failure; the others keep quiet."""

    def meet(self, deadline: float, hopeless: Callable[[Sequence[Life | None]], bool]) -> bool:
        """Wait until every rank wants to leave, *collective*; False if some did not within `deadline` seconds.

        Args:
            deadline: Seconds to wait.
            hopeless: Asked now and then, with what the watchers of all ranks see: whether to give up.
        """

    def leave(self, deadline: float) -> None:
        """Leave for good, after `meet` and once nobody watches any more; *collective*."""


class SharedMarks:
    """Marks of ranks that share one process."""

    between_processes = False

    def __init__(self, num_ranks: int) -> None:
        self._marks: list[Mark | None] = [None] * num_ranks
        self._unclaimed = threading.Lock()

    def post(self, rank: int, mark: Mark) -> None:
        """Replace the mark of a rank."""
        self._marks[rank] = mark

    def read(self) -> list[Entry]:
        """The last mark of every rank."""
        return [Entry(rank, mark=mark) for rank, mark in enumerate(self._marks)]

    def frames_of(self, rank: int) -> str:
        """Nothing: threads have no watcher."""
        return ""

    def claim_failure(self) -> bool:
        """Whether the caller is the first rank to report a failure."""
        return self._unclaimed.acquire(blocking=False)

    def meet(self, deadline: float, hopeless: Callable[[Sequence[Life | None]], bool]) -> bool:
        """Nothing to wait for: what is shared lives as long as it is used."""
        return True

    def leave(self, deadline: float) -> None:
        """Nothing to leave."""


class StoreMarks:
    """Marks of ranks that are processes, kept by a `torch.distributed` store.

    Nothing here raises when the store is lost: that must not end a run, nor hide why it ended.

    Args:
        store: This rank's connection, used by one thread.
        num_ranks: Ranks that leave marks.
        serves: Whether the store lives in this process.
        hosts: Host of each rank.
        connect: Opens another connection to the store, for another thread.
    """

    between_processes = True

    def __init__(
        self, store: Store, num_ranks: int, serves: bool, hosts: Sequence[str], connect: Callable[[], Store]
    ) -> None:
        self.store, self.num_ranks, self.serves, self.hosts = store, num_ranks, serves, list(hosts)
        self.connect = connect
        self._lost = False  # not tried again: torch prints a page of C++ frames at every attempt

    def post(self, rank: int, mark: Mark) -> None:
        """Replace the mark of a rank."""
        self._unless_lost(lambda: self.store.set(f"mark/{rank}", mark.text()), None)

    def read(self) -> list[Entry]:
        """What is known of every rank; empty where the store cannot be reached. Takes a second or two."""
        return self._in_time(self._read_all, [])

    def frames_of(self, rank: int) -> str:
        """Where the main thread of a rank is, as lines of a traceback; empty if it does not answer."""
        return self._in_time(partial(self._ask_for_frames, rank), "")

    def _read_all(self) -> list[Entry]:
        before = [self._life(rank) for rank in range(self.num_ranks)]
        if any(before):  # else nobody watches
            time.sleep(timeouts.SIGNS_OF_LIFE)
        entries = []
        for rank, life_before in enumerate(before):
            mark, life = self._get(f"mark/{rank}"), self._life(rank)
            entry = Entry(rank, self.hosts[rank], None if mark is None else Mark.parse(mark), life)
            alive = None if life is None else life_before is None or life.beat != life_before.beat
            entries.append(replace(entry, alive=alive))
        return entries

    def _life(self, rank: int) -> Life | None:
        text = self._get(f"life/{rank}")
        return None if text is None else Life.parse(text)

    def _ask_for_frames(self, rank: int) -> str:
        self.store.set(f"wanted/{rank}", "yes")
        give_up_at = time.monotonic() + timeouts.FRAMES
        while time.monotonic() < give_up_at:
            if self.store.check([f"frames/{rank}"]):
                return self.store.get(f"frames/{rank}").decode()
            time.sleep(timeouts.ANSWER_POLL)
        return ""

    def claim_failure(self) -> bool:
        """Whether the caller is the first rank to report a failure, as far as the store can be reached."""
        return self._in_time(lambda: self.store.add("failures", 1) == 1, True)

    def announce_failure(self) -> None:
        """Let the `FailureWatch` of all other ranks end their processes."""
        self._in_time(lambda: self.store.set("failed", "yes"), None)
        if self.serves:
            time.sleep(timeouts.LINGER)

    def meet(self, deadline: float, hopeless: Callable[[Sequence[Life | None]], bool]) -> bool:
        """Wait until every rank wants to leave; *collective*. False if some did not within `deadline` seconds.

        gloo needs this: a rank that closes its connections while others still read their last message can cost them
        that message.
        """
        return self._unless_lost(partial(self._meet, "leaving", time.monotonic() + deadline, hopeless), True)

    def leave(self, deadline: float) -> None:
        """Leave the store for good; *collective*. The rank that serves it waits until all others have left it."""
        self._unless_lost(lambda: self.store.add("left", 1), 0)
        if self.serves:
            self._unless_lost(partial(self._all_in, "left", time.monotonic() + deadline), True)
        self._lost = True

    def _meet(self, counter: str, give_up_at: float, hopeless: Callable[[Sequence[Life | None]], bool]) -> bool:
        self.store.add(counter, 1)
        return self._all_in(counter, give_up_at, hopeless)

    def _all_in(
        self, counter: str, give_up_at: float, hopeless: Callable[[Sequence[Life | None]], bool] = lambda lives: False
    ) -> bool:
        next_look = time.monotonic() + timeouts.LOOK
        while self.store.add(counter, 0) < self.num_ranks:
            if time.monotonic() > give_up_at:
                return False
            if time.monotonic() > next_look:
                next_look = time.monotonic() + timeouts.LOOK
                if hopeless([self._life(rank) for rank in range(self.num_ranks)]):
                    return False
            time.sleep(timeouts.MEETING_POLL)
        return True

    def _get(self, key: str) -> str | None:
        return self.store.get(key).decode() if self.store.check([key]) else None

    def _in_time(self, ask: Callable[[], Answer], otherwise: Answer) -> Answer:
        """Ask the store from a thread of its own: one that lies on a stopped machine never answers."""
        answers: list[Answer] = []
        asking = threading.Thread(target=lambda: answers.append(self._unless_lost(ask, otherwise)), daemon=True)
        asking.start()
        asking.join(timeouts.BOARD)
        self._lost = self._lost or not answers
        return answers[0] if answers else otherwise

    def _unless_lost(self, ask: Callable[[], Answer], otherwise: Answer) -> Answer:
        if self._lost:
            return otherwise
        try:
            return ask()
        except RuntimeError:
            self._lost = True
            return otherwise


def connect(host: str, port: int, serves: bool = False, timeout: float = timeouts.CONNECT) -> Store:
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


def share_store(transport: Transport) -> StoreMarks | None:
    """Serve a store on rank 0, at a free port, and connect all ranks to it; *collective*.

    Returns:
        This rank's marks; None on all ranks if one of them cannot reach rank 0.
    """
    serves = transport.rank == 0
    hosts = [host.decode() for host in transport.all_gather(socket.gethostname().encode())]
    host = "127.0.0.1" if share_network(transport.all_gather(network_here().encode())) else hosts[0]
    store, port = _serve(host) if serves else (None, 0)
    port = int(transport.broadcast(str(port).encode()))
    if not serves and port:
        store = _try_to_connect(host, port)
    if not all(transport.all_gather(b"" if store is None else b"connected")) or store is None:
        return None
    return StoreMarks(store, transport.size, serves, hosts, partial(connect, host, port))


def network_here() -> str:
    """A name for what this process calls the loopback: equal on two ranks if they reach each other through it.

    Host names are not enough: containers and cloned machines often share one.
    """
    boot, network = "", ""
    with suppress(OSError):
        boot, network = BOOT_ID.read_text().strip(), os.readlink(NETWORK)
    return f"{platform.node()} {boot} {network}"


def share_network(networks: Sequence[bytes | str]) -> bool:
    """Whether ranks with these networks (`network_here`) reach each other through the loopback."""
    return len(set(networks)) == 1


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
