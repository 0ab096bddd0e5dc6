"""The side channel: the board's marks and a few flags, kept without the help of the ranks that wrote them."""

from __future__ import annotations

import os
import platform
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeVar

import psutil

from domainpar import timeouts
from domainpar.parallel.board import Entry, Life, Mark
from domainpar.parallel.transport import Transport

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

Answer = TypeVar("Answer")

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
NETWORK = Path("/proc/self/ns/net")


class SideChannel:
    """The board of all ranks, kept by a `torch.distributed` store: readable without the help of those that wrote on it.

    Nothing here raises when the store is lost: that must not end a run, nor hide why it ended.

    Args:
        store: This rank's connection, used by one thread; ranks that are threads of one process share it.
        num_ranks: Ranks that leave marks.
        serves: Whether the store lives in this process.
        hosts: Host of each rank.
        connect: Opens another connection to the store, for another thread; None where ranks share one process.
    """

    def __init__(
        self,
        store: Store,
        num_ranks: int,
        serves: bool = True,
        hosts: Sequence[str] = (),
        connect: Callable[[], Store] | None = None,
    ) -> None:
        self.store, self.num_ranks, self.serves, self.connect = store, num_ranks, serves, connect
        self.hosts = list(hosts) or [""] * num_ranks
        self._lost = False  # not tried again: torch prints a page of C++ frames at every attempt

    @classmethod
    def of_threads(cls, num_ranks: int) -> Self:
        """The channel that ranks of one process share."""
        from torch.distributed import HashStore  # type: ignore[attr-defined]

        return cls(HashStore(), num_ranks)

    @property
    def between_processes(self) -> bool:
        """Whether ranks are processes, of which the first to end may take the others with it."""
        return self.connect is not None

    def post(self, rank: int, mark: Mark) -> None:
        """Replace the mark of a rank."""
        self._unless_lost(lambda: self.store.set(f"mark/{rank}", mark.text()), None)

    def read(self) -> list[Entry]:
        """State of every rank; empty where the store cannot be reached. Takes a second or two."""
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
            alive = None if life is None else life_before is None or life.beat != life_before.beat
            entries.append(Entry(rank, self.hosts[rank], Mark.parse(mark) if mark else None, life, alive))
        return entries

    def _life(self, rank: int) -> Life | None:
        text = self._get(f"life/{rank}")
        return Life.parse(text) if text else None

    def _ask_for_frames(self, rank: int) -> str:
        self.store.set(f"wanted/{rank}", "yes")
        give_up_at = time.monotonic() + timeouts.FRAMES
        while time.monotonic() < give_up_at:
            if self.store.check([f"frames/{rank}"]):
                return self.store.get(f"frames/{rank}").decode()
            time.sleep(timeouts.ANSWER_POLL)
        return ""

    def claim_failure(self) -> bool:
        """Whether the caller is the first rank to report a failure, as far as is known; the others keep quiet."""
        return self._in_time(lambda: self.store.add("failures", 1) == 1, True)

    def announce_failure(self) -> None:
        """Let the `FailureWatch` of all other ranks end their processes."""
        self._in_time(lambda: self.store.set("failed", "yes"), None)
        if self.serves:
            time.sleep(timeouts.LINGER)

    def meet(self, deadline: float, hopeless: Callable[[Sequence[Life | None]], bool]) -> bool:
        """Wait until every rank wants to leave; *collective*. Threads need not: their store lives as long as they.

        gloo needs this: a rank that closes its connections while others still read their last message can cost them
        that message.

        Args:
            deadline: Seconds to wait.
            hopeless: Asked now and then, with what the watchers of all ranks see: whether to give up.

        Returns:
            False if some did not want to within `deadline` seconds.
        """
        if not self.between_processes:
            return True
        return self._unless_lost(partial(self._meet, "leaving", time.monotonic() + deadline, hopeless), True)

    def leave(self, deadline: float) -> None:
        """Leave for good, after `meet` and once nobody watches any more; *collective*.

        The rank that serves the store waits until all others have left it.
        """
        if not self.between_processes:
            return
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


def share_store(transport: Transport) -> SideChannel | None:
    """Serve a store on rank 0, at a free port, and connect all ranks to it; *collective*.

    Returns:
        This rank's channel; None on all ranks if one of them cannot reach rank 0.
    """
    serves = transport.rank == 0
    hosts = [host.decode() for host in transport.all_gather(socket.gethostname().encode())]
    alone = len(set(transport.all_gather(network_here().encode()))) == 1
    host = "127.0.0.1" if alone else hosts[0]
    store: Any = None
    if serves:
        with suppress(RuntimeError):
            store = connect(host, 0, serves=True)
    port = int(transport.broadcast(str(store.port if store else 0).encode()))
    if not serves and port:
        with suppress(RuntimeError):
            store = connect(host, port)
    if not all(transport.all_gather(b"" if store is None else b"connected")) or store is None:
        return None
    return SideChannel(store, transport.size, serves, hosts, partial(connect, host, port))


def network_here() -> str:
    """A name for what this process calls the loopback: equal on two ranks if they reach each other through it.

    Host names are not enough: containers and cloned machines often share one.
    """
    boot, network = "", ""
    with suppress(OSError):
        boot, network = BOOT_ID.read_text().strip(), os.readlink(NETWORK)
    return f"{platform.node()} {boot} {network}"


def choose_interface(store: Store, rank: int, size: int, towards: tuple[str, int]) -> None:
    """Have gloo talk over the interface that leads to rank 0, or over the loopback where all ranks can. *Collective*.

    gloo itself looks up this machine's name, which may not resolve, or to an address that others cannot reach.
    """
    store.set(f"network/{rank}", network_here())
    alone = len({store.get(f"network/{other}") for other in range(size)}) == 1
    loopback = "lo" if sys.platform == "linux" else None
    interface = loopback if alone else _interface_towards(*towards)
    if interface is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)


def _interface_towards(host: str, port: int) -> str | None:
    """The network interface from which packets to a host leave; None where that cannot be known. Sends nothing."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with closing(socket.socket(family, kind)) as towards:
            towards.connect(address)
            own = towards.getsockname()[0]
    except OSError:
        return None
    for name, addresses in psutil.net_if_addrs().items():
        if any(address.address.split("%")[0] == own for address in addresses):
            return name
    return None
