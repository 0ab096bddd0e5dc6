"""The machine and the Python of each rank, and whether those of all ranks fit together."""

from __future__ import annotations

import math
import os
import platform
import re
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch

import domainpar
from domainpar.common import limits
from domainpar.common.agreement import difference, gather
from domainpar.common.compiling import ELSEWHERE, place_of_kernels, why_not_kept
from domainpar.common.words import between, several
from domainpar.diagnosis.finding import Finding, failed, skipped, works
from domainpar.parallel import shared_memory
from domainpar.parallel.digests import about_this_program, installed
from domainpar.parallel.gpus import VisibleGpus, cards, free_memory
from domainpar.parallel.world import World

ENOUGH_MEMORY = 2**30
ENOUGH_DISK = 10**9
LARGEST_CLOCK_SPREAD = 2.0  # seconds
OPTIONAL = ("mpi4py", "torch-geometric", "jinja2", "matplotlib")


def cpu_model(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """Model of the processor; for ARM the kinds of core by number, because Linux gives no names."""
    text = cpuinfo.read_text(errors="replace") if cpuinfo.exists() else ""
    cores = re.findall(r"^CPU implementer\s*:\s*(\S+)(?:\n.+)*?\nCPU part\s*:\s*(\S+)", text, re.M)
    if cores:
        return " and ".join(f"ARM (implementer {by}, part {part})" for by, part in dict.fromkeys(cores))
    model = re.search(r"^(?:model name|Model)\s*:\s*(.+)$", text, re.MULTILINE)
    return model[1] if model else platform.processor() or platform.machine()


def describe() -> dict[str, Any]:
    """The machine in plain values, for the JSON."""
    return {
        "host": platform.node(),
        "cpu": cpu_model(),
        "cores": psutil.cpu_count(logical=False),
        "hardware_threads": os.cpu_count(),
        "memory_bytes": psutil.virtual_memory().total,
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "libc": " ".join(platform.libc_ver()),
        "python": platform.python_version(),
    }


# --- checks that each rank makes by itself ---------------------------------------------------------------------------


def check_versions() -> Finding:
    """The installed packages against those that are declared: there, and new enough?"""
    wrong, versions = [], package_versions()
    for name, least in needed_versions().items():
        # The first three numbers, without a build such as `+cpu`.
        present, wanted = (
            [int(part) for part in re.findall(r"\d+", version.split("+")[0])[:3]]
            for version in (versions.get(name, ""), least)
        )
        if present < wanted:
            wrong.append(f"{name} {versions[name]} < {least}" if present else f"missing: {name}")
    if wrong:
        return failed("versions", "; ".join(wrong), "pip install domainpar in an environment of its own", **versions)
    words = ", ".join(f"{name} {version}" for name, version in versions.items())
    text = f"domainpar {domainpar.__version__}, Python {platform.python_version()}, {words}"
    return works("versions", text, **versions)


def needed_versions() -> dict[str, str]:
    """The least version of each package that domainpar declares, extras left out.

    A checkout that was never installed declares nothing.
    """
    try:
        declared = metadata.requires("domainpar") or []
    except metadata.PackageNotFoundError:
        return {}
    # What follows a semicolon is a condition, such as an extra.
    plain = [re.match(r"([\w.-]+)(?:\[[^]]*\])?>=([\d.]+)$", line.strip()) for line in declared if ";" not in line]
    return {match[1]: match[2] for match in plain if match}


def package_versions() -> dict[str, str]:
    """The versions of all packages, needed or optional, that are there."""
    return {name: version for name in (*needed_versions(), *OPTIONAL) if (version := installed(name))}


def check_processor(local_ranks: int) -> Finding:
    """Cores of this rank against the threads it will start."""
    cores, threads = len(limits.cores_here()), torch.get_num_threads()
    omp_threads = os.environ.get("OMP_NUM_THREADS")
    quota = "" if limits.quota() == math.inf else f" (a quota of {limits.quota():g})"
    text = (
        f"{cpu_model()}; {several(cores, 'core')}{quota} for {several(local_ranks, 'rank')} here; "
        f"OMP_NUM_THREADS {omp_threads or 'unset'}, torch would take {several(threads, 'thread')}"
    )
    advice = ""
    if local_ranks > cores:
        advice = "more ranks than cores: start fewer, unless this is only a trial"
    elif omp_threads and omp_threads.isdigit() and int(omp_threads) * local_ranks > cores > 1:
        advice = f"OMP_NUM_THREADS={max(1, cores // local_ranks)} gives each rank its share"
    figures = {"cores": cores, "local_ranks": local_ranks, "omp_num_threads": omp_threads, "torch_threads": threads}
    return works("cores", text, advice, **figures)


def check_memory(local_ranks: int, free: int | None = None) -> Finding:
    """Memory for each rank of this machine; `free`: unused bytes, also within a container's limit."""
    total = psutil.virtual_memory().total
    share = (free_memory(torch.device("cpu"))[1] if free is None else free) // max(1, local_ranks)
    text = f"{share / 2**30:.1f} GiB free for each rank; the machine has {total / 2**30:.1f} GiB"
    if (limit := limits.memory().limit) < total:
        text += f", of which {limit / 2**30:.1f} GiB are allowed here (a memory group)"
    little = "a full event needs some GiB: fewer ranks here, or another machine" if share < ENOUGH_MEMORY else ""
    return works("memory", text, little, free_bytes_of_a_rank=share, total_bytes=total)


def check_shared_memory(local_ranks: int, shared: Path = shared_memory.SHARED) -> Finding:
    """Room in /dev/shm for ranks under MPICH, and what runs that were aborted have left there."""
    free = shared_memory.free(shared)
    if free is None:
        return skipped("shared memory", f"no {shared} here")
    left, room = shared_memory.leftovers(shared), int(free // shared_memory.OF_A_RANK)
    text = f"{free / 2**20:,.0f} MiB free in {shared}, room for {several(room, 'rank')} under MPICH"
    advice = [shared_memory.how_to_remove(left)] if left else []
    if left:
        text += f"; {several(len(left), 'file')} of runs that have ended take {sum(left.values()) / 2**20:.1f} MiB"
    if room < max(local_ranks, len(limits.cores_here())):
        advice.append(f"{shared_memory.MORE}: a rank takes {shared_memory.OF_A_RANK / 2**20:g} MiB")
    return works("shared memory", text, "; ".join(advice), free_bytes=free, leftovers=len(left))


def check_disk(directory: Path | None = None) -> Finding:
    """Whether files can be written here and in the temporary folder, and how much room there is."""
    places = {"here": directory or Path.cwd(), "temporary files": Path(tempfile.gettempdir())}
    free: dict[str, int] = {}
    for name, place in places.items():
        try:
            with tempfile.TemporaryFile(dir=place) as file:
                file.write(b"domainpar")
            free[name] = shutil.disk_usage(place).free
        except OSError as error:
            return failed("disk", f"cannot write to {place}: {error.strerror}", "go to a directory that is yours")
    text = ", ".join(f"{name}: {size / 1e9:.1f} GB free" for name, size in free.items())
    little = "a store of full events takes some GB: make room, or write elsewhere"
    return works("disk", text, little if min(free.values()) < ENOUGH_DISK else "", **free)


def check_numba_cache() -> Finding:
    """Whether compiled kernels can be kept: else every rank compiles them at every start."""
    place = place_of_kernels()
    why = why_not_kept(place)
    if place is not None and not why:
        return works("kernel cache", f"compiled kernels are kept in {place.parent}")
    return works("kernel cache", f"{why}: kernels are compiled anew at every start", ELSEWHERE)


def check_gpus(local_ranks: int, seen: Sequence[VisibleGpus]) -> Finding:
    """GPUs of this machine against the ranks on it, and the build of torch."""
    build = f"torch {torch.__version__}, " + (f"CUDA {torch.version.cuda}" if torch.version.cuda else "no CUDA")
    gpus, why = cards()
    if not gpus:
        if not Path("/proc/driver/nvidia").exists():
            return skipped("GPUs", f"{build}; none here")
        text = f"{build}; there is an NVIDIA driver, but torch sees no GPU" + (f" ({why})" if why else "")
        return works("GPUs", text, "install torch built for CUDA, or look at CUDA_VISIBLE_DEVICES", build=build)
    names = ", ".join(f"{gpu.name} {gpu.total_memory / 2**30:.0f} GiB" for gpu in gpus)
    # Some launchers show each rank one of the machine's, another one to each.
    count = len({uuid for rank in seen if rank.host == platform.node() for uuid in rank.uuids})
    text = f"{build}; {several(count, 'GPU')} for {several(local_ranks, 'rank')} here: {names}"
    text += f" ({several(len(gpus), 'GPU')} seen by this rank)" if len(gpus) != count else ""
    text += f" (no more: {why})" if why else ""
    figures = {"build": build, "gpus": names, "count": count, "local_ranks": local_ranks, "nccl": nccl_version()}
    if count < local_ranks:
        return works("GPUs", text, f"NCCL needs a GPU for each rank: at most {several(count, 'rank')} here", **figures)
    return works("GPUs", f"{text}; NCCL {figures['nccl'] or 'not in this build'}", **figures)


def nccl_version() -> str | None:
    """The NCCL that torch was built with; None without."""
    if not torch.cuda.is_available() or not hasattr(torch._C, "_nccl_version"):
        return None
    from torch.cuda import nccl  # reads the library when it is imported

    version = nccl.version()
    return ".".join(str(number) for number in version) if isinstance(version, tuple) else str(version)


def check_numbers() -> Finding:
    """Whether this machine computes with floating-point numbers as it must: subnormals are not flushed to zero."""
    # The processor's flag is set for each thread by whichever library was loaded first; numpy and torch may differ.
    if bool(np.float32(1e-40) * np.float32(1.0) != 0) and bool(torch.tensor(1e-40) * 1.0 != 0):
        return works("numbers", "subnormal numbers are kept")
    text = "subnormal numbers are flushed to zero: some library was built with -ffast-math"
    return works("numbers", text, "bits may differ from machines without it; find the library that was loaded first")


# --- checks of the places of all ranks -------------------------------------------------------------------------------


@dataclass(frozen=True)
class RankPlace:
    """The place of one rank."""

    rank: int
    host: str
    cpu: str  # model of the processor
    cores: int  # that the rank may use
    gpus: int  # that it sees
    clock: float  # seconds since 1970, read when all ranks had met


def places_of(world: World) -> list[RankPlace]:
    """The place of every rank, the same list on every rank. *Collective*."""
    gpus = torch.cuda.device_count()
    # All read their clocks at one moment, after everything that takes a time of its own.
    world.transport.barrier()
    own = RankPlace(world.rank, platform.node(), cpu_model(), len(limits.cores_here()), gpus, time.time())
    return gather(world.transport, own, RankPlace)


def local_ranks(places: Sequence[RankPlace], rank: int) -> int:
    """Ranks on the machine of one of them."""
    return sum(place.host == places[rank].host for place in places)


def check_ranks(places: Sequence[RankPlace], transport: str) -> Finding:
    """Ranks and hosts, in one line: whether processors are alike, and clocks agree."""
    hosts = Counter(place.host for place in places)
    text = f"{several(len(places), 'rank')} on {several(len(hosts), 'host')} met by {transport}"
    if len(places) > 1:
        text += f"; {between(list(hosts.values()), 'rank')} a host"
    cpus = sorted({place.cpu for place in places})
    advice: list[str] = []
    if len(cpus) > 1:
        text += f"; processors differ: {', '.join(cpus)}"
        advice.append("'rows' says if bits do")
    spread = max(place.clock for place in places) - min(place.clock for place in places)
    if len(hosts) > 1:
        text += f"; clocks differ by at most {spread:.2f} s"
        if spread > LARGEST_CLOCK_SPREAD:
            advice.append("set the clocks (NTP): times in logs do not compare")
    return works("ranks", text, "; ".join(advice), ranks=len(places), hosts=dict(hosts), cpus=cpus, spread=spread)


def check_same_versions(world: World) -> Finding:
    """Whether all ranks run the same software: else their results differ without an error. *Collective*."""
    if world.size == 1:
        return skipped("same software", "one rank alone")
    advice = "start all ranks from one environment, on a file system that all hosts see"
    if problem := difference(world.transport, package_versions() | about_this_program(), advice):
        return failed("same software", problem.what, problem.hint)
    return works("same software", f"the same versions on {several(world.size, 'rank')}")
