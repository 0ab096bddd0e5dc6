"""The launcher of these ranks, those that are there, and whether MPI library and mpiexec belong together."""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

from domainpar import timeouts
from domainpar.diagnosis.finding import Finding, failed, passed, skipped, warned
from domainpar.measure.programs import run_limited
from domainpar.parallel.launcher import Launcher
from domainpar.words import several

# What launchers and MPI libraries leave in the environment of what they start; a program started from there must not
# take itself for one of their ranks.
OF_LAUNCHERS = (
    *("PMI_", "PMIX_", "OMPI_COMM_", "OMPI_UNIVERSE", "PRTE_", "MPI_LOCAL", "HYDI_"),
    *("TORCHELASTIC_", "SLURM_"),
)

ASK_FOR_LIBRARY = "from domainpar.parallel.mpi import import_mpi, library_of; print(library_of(import_mpi()))"

FAMILIES = {
    "Open MPI": ("open mpi", "open-mpi", "openrte", "prrte", "prte"),
    "MPICH": ("mpich", "hydra", "intel(r) mpi", "intel mpi", "mvapich", "cray"),
}


def family_of(text: str) -> str | None:
    """`Open MPI` or `MPICH` (with all that is built on it), by the version that a library or an mpiexec prints."""
    lower = text.lower()
    return next((name for name, words in FAMILIES.items() if any(word in lower for word in words)), None)


def check_launcher(launcher: Launcher, size: int) -> Finding:
    """Who started these ranks."""
    if launcher.kind == "none":
        tools = {name: shutil.which(name) for name in ("mpiexec", "torchrun", "srun")}
        there = [name for name, path in tools.items() if path] or ["none"]
        return passed("launcher", f"one process alone; launchers in the PATH: {', '.join(there)}", kind="none", **tools)
    text = f"{launcher.command} ({launcher.kind}) started {several(size, 'rank')}, as {launcher.size_variable} says"
    return passed("launcher", text, kind=launcher.kind, size=size)


def _mpi_library(inside: bool) -> str:
    """Name and version of the MPI library that mpi4py loads.

    Args:
        inside: Load it into this process, which an MPI launcher started; else a process of its own is asked, which
            may crash without harm.

    Raises:
        RuntimeError: If it cannot be loaded.
    """
    if inside:
        from domainpar.parallel.mpi import import_mpi, library_of

        return library_of(import_mpi())
    path = {"PYTHONPATH": os.pathsep.join(place for place in sys.path if place)}
    ended = run_limited([sys.executable, "-c", ASK_FOR_LIBRARY], timeouts.LAUNCHER_ANSWER, [path], OF_LAUNCHERS)
    if ended.code != 0:
        raise RuntimeError(ended.last_lines)
    return ended.output.strip().splitlines()[-1]


def _mpiexecs() -> list[str]:
    """The `mpiexec` beside this Python, then the one in the PATH; each once."""
    beside, in_path = Path(sys.executable).with_name("mpiexec"), shutil.which("mpiexec")
    paths = ([str(beside)] if beside.exists() else []) + ([in_path] if in_path else [])
    return list({os.path.realpath(path): path for path in reversed(paths)}.values())[::-1]


def version_of(mpiexec: str) -> str:
    """The version that an `mpiexec` prints, in one line."""
    try:
        ended = run_limited([mpiexec, "--version"], timeouts.LAUNCHER_ANSWER)
    except OSError as error:
        return f"cannot be started: {error.strerror}"
    hydra = re.search(r"(hydra).*?version:\s*(\S+)", ended.output, re.IGNORECASE | re.DOTALL)
    if hydra:
        return f"MPICH (hydra) {hydra[2]}"
    return next((line.strip() for line in ended.output.splitlines() if line.strip()), "says nothing of itself")


def check_mpi(launcher: Launcher) -> Finding:
    """mpi4py, its library, and the mpiexec that would start ranks: do they belong together?"""
    if find_spec("mpi4py") is None:
        return skipped("MPI", "mpi4py is not installed; torchrun works without", "pip install 'domainpar[mpi]'")
    try:
        library = _mpi_library(inside=launcher.has_pmi)
    except (ImportError, RuntimeError) as error:
        advice = "pip install mpich, or load the MPI module of your site and set MPI4PY_LIBMPI; or start with torchrun"
        return failed("MPI", f"mpi4py finds no MPI library: {error}", advice)
    if launcher.has_pmi:
        return passed("MPI", f"mpi4py uses {library}, as {launcher.command} does", library=library)
    return judge_mpi(library, {path: version_of(path) for path in _mpiexecs()})


def judge_mpi(library: str, versions: Mapping[str, str]) -> Finding:
    """Whether the library belongs to the `mpiexec`s there are.

    Args:
        library: Name and version of the library that mpi4py loads.
        versions: The version of each `mpiexec`, the first choice first.
    """
    mpiexecs = "; ".join(f"{path}: {version}" for path, version in versions.items()) or "no mpiexec"
    text, figures = f"mpi4py uses {library}; {mpiexecs}", {"library": library, "mpiexec": dict(versions)}
    wrong = [path for path, version in versions.items() if family_of(version) != family_of(library)]
    if not versions:
        return warned(
            "MPI", text, "pip install mpich brings an mpiexec; or load the MPI module of your site", **figures
        )
    if not wrong:
        return passed("MPI", text, **figures)
    if len(wrong) == len(versions):
        advice = (
            f"use the mpiexec of {library}, or name the library of {wrong[0]} in MPI4PY_LIBMPI (path of its libmpi.so)"
        )
        return failed("MPI", f"{text}: they belong to different MPI libraries", advice, **figures)
    right = next(path for path in versions if path not in wrong)
    advice = f"start with {right}, not with {wrong[0]}"
    return warned("MPI", f"{text}: {wrong[0]} is of another library", advice, **figures)


def mpiexec_for(of_mpi: Finding) -> str | None:
    """The mpiexec to start ranks with, of a finding of `check_mpi`: the first of mpi4py's library, else the first."""
    versions: Mapping[str, str] = of_mpi.figures.get("mpiexec", {})
    family = family_of(str(of_mpi.figures.get("library", "")))
    fitting = (path for path, version in versions.items() if family_of(version) == family)
    return next(fitting, next(iter(versions), None))


def check_open_mpi(library: str, cores: int, is_superuser: bool | None = None) -> Finding:
    """Flags that Open MPI's mpiexec asks for in containers and on small machines; MPICH asks for none."""
    if family_of(library) != "Open MPI":
        return skipped("Open MPI", "not used here")
    flags = []
    if os.geteuid() == 0 if is_superuser is None else is_superuser:
        flags.append(("you are root", "--allow-run-as-root"))
    flags.append((f"for more ranks than {several(cores, 'core')}", "--oversubscribe"))
    text = "; ".join(f"{why}: mpiexec {flag}" for why, flag in flags)
    return passed("Open MPI", text, flags=[flag for _, flag in flags])
