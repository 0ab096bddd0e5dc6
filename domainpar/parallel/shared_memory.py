"""The shared memory of a machine, /dev/shm: MPICH does not check how much is free, and aborted runs leave files there.

Where too little is free its ranks end by SIGBUS or SIGSEGV, inside of `MPI_Init` or at any later time.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from domainpar.common.problems import Problem
from domainpar.common.words import several

SHARED = Path("/dev/shm")
OF_MPICH = "mpich_shm_"
OF_A_RANK = 5.5 * 2**20  # bytes; MPICH 5.0.2 took 5.2 MiB for each of 1 to 12 ranks
MOST_NAMED = 8
MORE = "start the container with --shm-size=1g"
"""The remedy where there is too little of it."""


def free(shared: Path = SHARED) -> int | None:
    """Unused bytes there; None on systems without it."""
    with suppress(OSError):
        return shutil.disk_usage(shared).free
    return None


def leftovers(shared: Path = SHARED, processes: Path = Path("/proc")) -> dict[Path, int]:
    """Files of this user's runs under MPICH that no process has in its memory any more, and their bytes."""
    found: dict[Path, int] = {}
    with suppress(OSError):
        for path in sorted(shared.glob(f"{OF_MPICH}*")):
            with suppress(OSError):  # it has just gone
                status = path.stat()
                if status.st_uid == os.getuid():
                    found[path] = status.st_blocks * 512
    if not found:
        return {}
    held: set[str] = set()
    for maps in processes.glob("[0-9]*/maps"):
        with suppress(OSError):  # of other users
            held.update(re.findall(rf"\S*/({OF_MPICH}\S+)", maps.read_text(errors="replace")))
    return {path: size for path, size in found.items() if path.name not in held}


def how_to_remove(left: Mapping[Path, int]) -> str:
    """The command that removes leftovers."""
    if len(left) > MOST_NAMED:
        return f"rm {next(iter(left)).parent}/{OF_MPICH}* while no MPI run of yours is at work"
    return f"rm {' '.join(map(str, left))}"


def shortage(ranks: int, shared: Path = SHARED) -> Problem | None:
    """Why so many ranks cannot start under MPICH on this machine; None if they can, as far as that is known."""
    room = free(shared)
    if room is None or room >= ranks * OF_A_RANK:
        return None
    hint = f"{MORE}, or the ranks with torchrun, which needs none"
    if left := leftovers(shared):
        hint = f"{several(len(left), 'file')} of runs that have ended lie there: {how_to_remove(left)}; or {hint}"
    what = (
        f"{shared} has {room / 2**20:.1f} MiB free, too little for {several(ranks, 'rank')} under MPICH on this machine"
    )
    return Problem(f"{what}: they take {OF_A_RANK / 2**20:g} MiB each", hint)
