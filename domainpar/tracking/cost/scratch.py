"""The folder for tables that do not fit into memory: whether it will do, and what its disk gives and takes."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import NamedTuple

import psutil
import torch

from domainpar.common.agreement import gather
from domainpar.common.problems import Problem
from domainpar.common.words import byte_size
from domainpar.measure.forecast import Forecast
from domainpar.parallel.world import World

IN_MEMORY = ("tmpfs", "ramfs")  # file systems whose files take the memory that is short


class Traffic(NamedTuple):
    """Bytes that came from a disk and went to one."""

    read: int
    written: int

    def since(self, before: Traffic) -> Traffic:
        """What came and went between two times."""
        return Traffic(self.read - before.read, self.written - before.written)


def traffic(world: World) -> Traffic | None:
    """Bytes that all processes of the ranks have read from disks and written to them; None where they are not counted.
    *Collective*."""
    process = psutil.Process()
    counted = process.io_counters() if hasattr(process, "io_counters") else None
    number = None if counted is None else (counted.read_bytes, counted.write_bytes)
    of_ranks = gather(world.transport, [os.uname().nodename, process.pid, number])
    of_processes = {(host, pid): number for host, pid, number in of_ranks}.values()  # ranks may be threads of one
    if None in of_processes:
        return None
    return Traffic(*map(sum, zip(*of_processes)))


def refusal(folder: Path, device: torch.device, on_stages: bool) -> Problem | None:
    """Why the tables of a network, on stages or not, cannot lie in files of a folder; None if they can."""
    if device.type != "cpu":
        return Problem("--scratch is for tables in the memory of a host, but this run computes on a GPU", "drop it")
    if not on_stages:
        return Problem(
            "--scratch serves the networks whose steps are stages, and this one has tables of torch",
            "drop it, and use --recompute-every 1, or more ranks",
        )
    if not hasattr(os, "posix_fallocate"):
        return Problem("--scratch needs Linux: this system cannot promise room for a file", "drop it")
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        what = "cannot be written" if folder.is_dir() else "is no folder"
        return Problem(f"--scratch {folder} {what}", "name a folder on a disk of this machine")
    kind = _file_system(folder)
    if kind in IN_MEMORY:
        return Problem(
            f"--scratch {folder} is a {kind}: its files lie in the memory that is short", "name a folder on a disk"
        )
    return None


def shortage(folder: Path, forecast: Forecast) -> Problem | None:
    """Why the tables of this machine's ranks do not fit into a folder; None if they do."""
    host = os.uname().nodename
    wanted = sum(share.in_files for share in forecast.shares if share.where == host)
    free = shutil.disk_usage(folder).free
    if wanted <= free:
        return None
    return Problem(
        f"--scratch {folder} has {byte_size(free)} free, and the ranks on {host} will want {byte_size(wanted)}",
        "make room there, name another folder, or use --recompute-every auto",
    )


def _file_system(folder: Path) -> str:
    """The kind of file system that a folder is in, as the system calls it; empty if that is unknown."""
    resolved = folder.resolve()
    around = [
        partition for partition in psutil.disk_partitions(all=True) if resolved.is_relative_to(partition.mountpoint)
    ]
    return max(around, key=lambda partition: len(partition.mountpoint)).fstype if around else ""
