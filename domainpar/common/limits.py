"""Cores and memory that a batch system or container leaves to this process, by Linux's control groups of both kinds."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

CGROUPS = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")
NO_LIMIT = 2**60  # bytes; version 1 writes a number above it where there is none


class Memory(NamedTuple):
    """Bytes that a memory group allows, and the unused ones of these; both infinite without a limit."""

    limit: float
    free: float


def cores_here() -> list[int]:
    """Numbers of the cores that this process may use: all of the machine on systems without core binding.

    With a quota of processor time, only as many cores as it amounts to, at least one.
    """
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))
    return cores[: max(1, int(min(quota(), len(cores))))]


def quota(cgroups: Path | None = None, membership: Path | None = None) -> float:
    """Cores that a group allows the time of, to this process and its neighbours; infinite without a quota.

    `cgroups` is where Linux shows its control groups, `membership` the file in which it names this process's own.
    """
    least = math.inf
    for place in _groups("cpu", cgroups, membership):
        with suppress(OSError, ValueError):
            time, period = (place / "cpu.max").read_text().split()
            if time != "max":
                least = min(least, int(time) / int(period))
        with suppress(OSError, ValueError):
            time, period = ((place / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
            if int(time) > 0:
                least = min(least, int(time) / int(period))
    return least


def memory(cgroups: Path | None = None, membership: Path | None = None) -> Memory:
    """The memory that is left to this process and its neighbours; arguments as for `quota`."""
    least = free = math.inf
    of_version_2 = "memory.max", "memory.current", "inactive_file"
    of_version_1 = "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"
    for place in _groups("memory", cgroups, membership):
        for name, of_use, of_files in (of_version_2, of_version_1):
            with suppress(OSError, ValueError, KeyError):
                limit, used = int((place / name).read_text()), int((place / of_use).read_text())
                statistics = dict(line.split() for line in (place / "memory.stat").read_text().splitlines())
                if limit < NO_LIMIT:
                    # Files in memory count as used, but give way.
                    least, free = min(least, limit), min(free, limit - used + int(statistics[of_files]))
    return Memory(least, max(0, free))


def _groups(controller: str, cgroups: Path | None, membership: Path | None) -> Iterator[Path]:
    """Folders of the groups that this process is in, each followed by those around it: their limits are limits, too."""
    root = cgroups or CGROUPS
    try:
        lines = (membership or MEMBERSHIP).read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, own = line.split(":", 2)
        if controllers == "":  # version 2, alone or beside version 1
            mounts = [root, root / "unified"]
        elif controller in controllers.split(","):
            mounts = [root / controllers, root / controller]
        else:
            continue
        # A container may see the name that its machine has for its group, and the group itself at the top.
        names = [name for name in own.split("/") if name not in ("", "..")]
        for mount in mounts:
            yield from (mount.joinpath(*names[:depth]) for depth in range(len(names), -1, -1))
