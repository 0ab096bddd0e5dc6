"""The machine and the Python that this rank runs on: checks that each rank makes by itself."""

from __future__ import annotations

import os
import platform
import re
import shutil
import tempfile
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch

import domainpar
from domainpar.diagnosis.finding import Finding, failed, passed, skipped, warned
from domainpar.training.memory import free_in_cgroup
from domainpar.words import several

ENOUGH_MEMORY = 2**30
ENOUGH_DISK = 10**9
OPTIONAL = ("mpi4py", "torch-geometric", "plotly", "matplotlib")
OF_SLURM = (
    *("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_NTASKS", "SLURM_STEP_NUM_TASKS", "SLURM_NNODES", "SLURM_CPUS_PER_TASK"),
    *("SLURM_MEM_PER_NODE", "SLURM_MEM_PER_CPU", "SLURM_GPUS_ON_NODE", "SLURM_JOB_PARTITION", "SLURM_MPI_TYPE"),
)


def cores_here() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def cpu_model(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """Model of the processor."""
    if cpuinfo.exists():
        model = re.search(r"^(?:model name|Model)\s*:\s*(.+)$", cpuinfo.read_text(errors="replace"), re.MULTILINE)
        if model:
            return model[1]
    return platform.processor() or platform.machine()


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


def check_versions() -> Finding:
    """The installed packages against those that are declared: there, and new enough?"""
    needed = needed_versions()
    versions = {name: version for name in (*needed, *OPTIONAL) if (version := installed(name))}
    wrong = [f"missing: {name}" for name in needed if name not in versions]
    wrong += [
        f"{name} {versions[name]} < {least}"
        for name, least in needed.items()
        if name in versions and _numbers(versions[name]) < _numbers(least)
    ]
    if wrong:
        return failed("versions", "; ".join(wrong), "pip install domainpar in an environment of its own", **versions)
    words = ", ".join(f"{name} {version}" for name, version in versions.items())
    text = f"domainpar {domainpar.__version__}, Python {platform.python_version()}, {words}"
    return passed("versions", text, **versions)


def needed_versions() -> dict[str, str]:
    """The least version of each package that domainpar declares, extras left out.

    A checkout that was never installed declares nothing.
    """
    try:
        declared = metadata.requires("domainpar") or []
    except metadata.PackageNotFoundError:
        return {}
    plain = [re.match(r"([\w.-]+)(?:\[[^]]*\])?>=([\d.]+)$", line.strip()) for line in declared if ";" not in line]
    return {match[1]: match[2] for match in plain if match}


def installed(package: str) -> str | None:
    """Version of a package; None if it is not there."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version.split("+")[0])[:3])


def check_processor(local_ranks: int) -> Finding:
    """Cores of this rank against the threads it will start."""
    cores, threads = cores_here(), torch.get_num_threads()
    asked = os.environ.get("OMP_NUM_THREADS")
    text = (
        f"{cpu_model()}; {several(cores, 'core')} for {several(local_ranks, 'rank')} here; "
        f"OMP_NUM_THREADS {asked or 'unset'}, torch would take {several(threads, 'thread')}"
    )
    figures = {"cores": cores, "local_ranks": local_ranks, "omp_num_threads": asked, "torch_threads": threads}
    if local_ranks > cores:
        return warned("cores", text, "more ranks than cores: start fewer, unless this is only a trial", **figures)
    if asked and asked.isdigit() and int(asked) * local_ranks > cores > 1:
        share = max(1, cores // local_ranks)
        return warned("cores", text, f"OMP_NUM_THREADS={share} gives each rank its share", **figures)
    return passed("cores", text, **figures)


def check_memory(local_ranks: int, free: int | None = None) -> Finding:
    """Memory for each rank of this machine; `free`: bytes nobody uses, also within a container's limit, looked up."""
    total = psutil.virtual_memory().total
    if free is None:
        free = int(min(psutil.virtual_memory().available, free_in_cgroup()))
    share = free // max(1, local_ranks)
    text = f"{share / 2**30:.1f} GiB free for each rank; the machine has {total / 2**30:.1f} GiB"
    figures = {"free_bytes_of_a_rank": share, "total_bytes": total}
    if share < ENOUGH_MEMORY:
        return warned("memory", text, "a full event needs some GiB: fewer ranks here, or another machine", **figures)
    return passed("memory", text, **figures)


def check_allocator(words: str) -> Finding:
    """The C library's way with freed memory, in the words of `set_up_allocator`."""
    text = f"{' '.join(platform.libc_ver()) or platform.system()}; {words}"
    if words.startswith("left as it is"):
        return warned("allocator", text, "plain PyG models are slower so; models built on stages are not")
    return passed("allocator", text)


def check_disk(directory: Path | None = None) -> Finding:
    """Whether something can be written here and for a while, and how much room there is."""
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
    if min(free.values()) < ENOUGH_DISK:
        return warned("disk", text, "a store of full events takes some GB: make room, or write elsewhere", **free)
    return passed("disk", text, **free)


def check_numba_cache() -> Finding:
    """Whether compiled kernels can be kept: else every rank compiles them at every start."""
    asked = os.environ.get("NUMBA_CACHE_DIR")
    if asked:
        place, home = Path(asked), None
    else:
        place, home = Path(domainpar.__file__).parent / "nn" / "__pycache__", Path.home() / ".cache"
    if _can_write(place):
        return passed("kernel cache", f"compiled kernels are kept in {'NUMBA_CACHE_DIR' if asked else 'the package'}")
    if home is not None and _can_write(home):  # where numba goes if it may not write beside the code
        return passed("kernel cache", "the package cannot be written to; compiled kernels are kept in ~/.cache")
    return warned(
        "kernel cache",
        f"{place} cannot be written to: kernels are compiled anew at every start",
        "NUMBA_CACHE_DIR=DIR, a directory of yours on a local disk",
    )


def _can_write(directory: Path) -> bool:
    """Whether a file can be made there: tried, since rights do not tell all. Makes the directory, as numba does."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            return True
    except OSError:
        return False


def check_slurm(started: bool, environ: Mapping[str, str] = os.environ) -> Finding:
    """The variables of the Slurm job; `started`: whether a launcher has started this process."""
    text = {name: environ[name] for name in OF_SLURM if name in environ}
    if not text:
        return skipped("slurm", "no Slurm variables: not inside a job")
    words = ", ".join(f"{name.removeprefix('SLURM_').lower()}={value}" for name, value in text.items())
    if not started:
        return warned("slurm", words, "inside a job but not started by srun: srun -n N python -m domainpar...", **text)
    return passed("slurm", words, **text)


def check_gpus(local_ranks: int) -> Finding:
    """GPUs of this machine against the ranks on it, and the build of torch."""
    build = f"torch {torch.__version__}, " + (f"CUDA {torch.version.cuda}" if torch.version.cuda else "no CUDA")
    if not torch.cuda.is_available():
        if Path("/proc/driver/nvidia").exists():
            return warned(
                "GPUs",
                f"{build}; there is an NVIDIA driver, but torch sees no GPU",
                "install torch built for CUDA, or look at CUDA_VISIBLE_DEVICES",
                build=build,
            )
        return skipped("GPUs", f"{build}; none here")
    gpus = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    names = ", ".join(f"{gpu.name} {gpu.total_memory / 2**30:.0f} GiB" for gpu in gpus)
    text = f"{build}; {several(len(gpus), 'GPU')} for {several(local_ranks, 'rank')} here: {names}"
    figures = {"build": build, "gpus": names, "count": len(gpus), "local_ranks": local_ranks, "nccl": nccl_version()}
    if len(gpus) < local_ranks:
        return warned("GPUs", text, f"NCCL needs a GPU for each rank: at most {len(gpus)} ranks here", **figures)
    return passed("GPUs", f"{text}; NCCL {figures['nccl'] or 'not in this build'}", **figures)


def nccl_version() -> str | None:
    """The NCCL that torch was built with; None without."""
    if not torch.cuda.is_available() or not hasattr(torch._C, "_nccl_version"):
        return None
    from torch.cuda import nccl

    version = nccl.version()
    return ".".join(str(number) for number in version) if isinstance(version, tuple) else str(version)


def check_numbers() -> Finding:
    """Whether this machine computes with floating-point numbers as it must: subnormals are not flushed to zero."""
    tiny = np.float32(1e-40)
    kept = bool(tiny * np.float32(1.0) != 0) and bool(torch.tensor(1e-40) * 1.0 != 0)
    if kept:
        return passed("numbers", "subnormal numbers are kept")
    return warned(
        "numbers",
        "subnormal numbers are flushed to zero: some library was built with -ffast-math",
        "bits may differ from machines without it; find the library that was loaded first",
    )
