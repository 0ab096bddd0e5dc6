"""Opens the side channel: the store that rank 0 serves to all ranks, and the network interface to reach it."""

from __future__ import annotations

import os
import platform
import socket
import sys
import time
from contextlib import closing, suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from domainpar.common import timeouts
from domainpar.common.agreement import Ranks, Refused, gather, name_ranks
from domainpar.parallel.board import SideChannel
from domainpar.parallel.transport import Transport

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
NETWORK = Path("/proc/self/ns/net")
OTHER_INTERFACE = (
    "set GLOO_SOCKET_IFNAME (NCCL_SOCKET_IFNAME) to the interface that reaches the other hosts; `ip address` lists them"
)


def connect(host: str, port: int, serves: bool = False, timeout: float = timeouts.CONNECT) -> Store:
    """Connect to the store at an address, or serve it there; RuntimeError if none is served in time, or it is taken."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    # No wait for workers here: `meeting` counts them, and names the missing ones.
    limit = timedelta(seconds=timeout)
    return TCPStore(host, port, is_master=serves, wait_for_workers=False, timeout=limit)


def prefixed(prefix: str, store: Store) -> Store:
    """The same store, its keys apart from those of others."""
    from torch.distributed import PrefixStore  # type: ignore[attr-defined]

    return PrefixStore(prefix, store)


def share_store(transport: Transport) -> SideChannel | None:
    """Serve a store on rank 0, at a free port, and connect all ranks; *collective*. None on all if one cannot."""
    serves = transport.rank == 0
    hosts = [host.decode() for host in transport.all_gather(socket.gethostname().encode())]
    # On one machine over the loopback: names of hosts may not resolve, or lead round through a firewall.
    alone = len(set(transport.all_gather(network_here().encode()))) == 1
    host = "127.0.0.1" if alone else hosts[0]
    store: Any = None
    if serves:
        with suppress(RuntimeError):
            store = connect(host, 0, serves=True)  # at any free port, which the transport passes to the others
    port = int(transport.broadcast(str(store.port if store else 0).encode()))
    if not serves and port:
        with suppress(RuntimeError):
            store = connect(host, port)
    # All ranks or none: in a meeting, all would wait for one that has no channel.
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


class StoreRanks:
    """Ranks that have met at a store, and can gather by it before there is a transport.

    Args:
        store: This rank's connection.
        rank, size: This rank, and how many there are.
        seconds: Time for all of them to come to each gathering.
        serves: Whether the store lives in this process.
    """

    def __init__(self, store: Store, rank: int, size: int, seconds: float, serves: bool) -> None:
        self.store, self.rank, self.size, self.seconds, self.serves = store, rank, size, seconds, serves
        self.world_ranks = range(size)
        self._count = 0

    def all_gather(self, payload: bytes) -> list[bytes]:
        """Give every rank the payload of each; *collective*. Refused naming those that did not come in time."""
        self._count += 1
        key = f"gathering {self._count}"
        try:
            self.store.set(f"{key}/{self.rank}", payload.decode())
            absent = self._absent(key)
            payloads = [self.store.get(f"{key}/{other}") for other in range(self.size)] if not absent else []
            self.store.set(f"{key} read/{self.rank}", "")
            if self.serves and not absent:  # what the others read here may make all of them leave
                self._absent(f"{key} read")
        except RuntimeError as error:
            first_line = str(error).split("\n", 1)[0]
            raise Refused(f"rank 0 left while the ranks met: {first_line}", "look at its output") from None
        if absent:
            here = ", ".join(str(other) for other in range(self.size) if other not in absent)
            raise Refused(
                f"{name_ranks(absent)} did not join within {self.seconds:g} s; joined: {here}",
                "look at the output of those that did not; --join-timeout waits longer",
            )
        return payloads

    def _absent(self, key: str) -> list[int]:
        """Ranks that have written nothing in time. Polled, because a wait for a key does not show whose is missing."""
        give_up_at = time.monotonic() + self.seconds
        absent = list(range(self.size))
        while absent and time.monotonic() < give_up_at:
            absent = [other for other in absent if not self.store.check([f"{key}/{other}"])]
            time.sleep(timeouts.MEETING_POLL if absent else 0.0)
        return absent


def choose_interface(ranks: Ranks, towards: tuple[str, int]) -> None:
    """Let gloo use the interface that leads to rank 0, or the loopback where all ranks can. *Collective*.

    gloo itself looks up this machine's name, which may not resolve, or resolve to an address that others cannot reach.

    Raises:
        Refused: On all ranks alike, if the one that the user chose (GLOO_SOCKET_IFNAME) cannot be right on some host:
            gloo reports it late, and not on every host.
    """
    alone = len(set(gather(ranks, network_here()))) == 1
    loopback = "lo" if sys.platform == "linux" else None
    interface = loopback if alone else _interface_towards(*towards)
    if interface is not None:
        # Unless the user has chosen one.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    wrong = gather(ranks, _wrong_interface(os.environ.get("GLOO_SOCKET_IFNAME", ""), alone))
    if any(wrong):
        who = [other for other, why in enumerate(wrong) if why]
        what = f"{name_ranks(who)} could not form a gloo group: {wrong[who[0]]}"
        raise Refused(what, f"{OTHER_INTERFACE}; or unset it")


def _wrong_interface(chosen: str, alone: bool) -> str:
    """Why gloo cannot use the interfaces that were chosen here, as far as can be seen at once; else empty."""
    known, host = psutil.net_if_addrs(), platform.node()
    names = [name for name in chosen.split(",") if name]
    if absent := [name for name in names if name not in known]:
        return f"host {host} has no interface {', '.join(absent)}; it has {', '.join(sorted(known))}"
    inner = {name for name, state in psutil.net_if_stats().items() if "loopback" in state.flags}
    if not alone and (loops := [name for name in names if name in inner]):
        return f"interface {', '.join(loops)} of host {host} leads to no other host"
    return ""


def _interface_towards(host: str, port: int) -> str | None:
    """The network interface from which packets to a host leave; None where that cannot be known. Sends nothing."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with closing(socket.socket(family, kind)) as towards:
            towards.connect(address)  # of a datagram socket: the system chooses the way, and sends nothing
            own = towards.getsockname()[0]
    except OSError:
        return None
    for name, addresses in psutil.net_if_addrs().items():
        if any(address.address.split("%")[0] == own for address in addresses):
            return name
    return None
