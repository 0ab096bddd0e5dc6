"""Which machine this is, and how it reaches another one."""

from __future__ import annotations

import os
import platform
import socket
from contextlib import closing, suppress
from pathlib import Path

import psutil

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
NETWORK = Path("/proc/self/ns/net")


def network_here() -> str:
    """A name for what this process calls the loopback: equal on two ranks if they reach each other through it.

    Host names are not enough: containers and cloned machines often share one.
    """
    boot, network = "", ""
    with suppress(OSError):
        boot, network = BOOT_ID.read_text().strip(), os.readlink(NETWORK)
    return f"{platform.node()} {boot} {network}"


def interface_towards(host: str, port: int) -> str | None:
    """The network interface from which packets to a host leave; None where that cannot be told. Sends nothing."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with closing(socket.socket(family, kind)) as towards:
            towards.connect(address)
            own = towards.getsockname()[0]
    except OSError:
        return None
    for name, addresses in psutil.net_if_addrs().items():
        if any(found.address.split("%")[0] == own for found in addresses):
            return name
    return None
