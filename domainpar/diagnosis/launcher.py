"""The launcher of these ranks, those that are there, and whether the MPI library and mpiexec belong together.

Where nobody else has started ranks the doctor starts two by itself, to see that MPI and gloo work here. They run
`mpiexec -n 2 python -m domainpar.diagnosis.launcher FILE mpi SECONDS`.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal

from domainpar.common import timeouts
from domainpar.common.words import several
from domainpar.diagnosis.finding import Finding, Verdict, failed, gathered, skipped, works
from domainpar.diagnosis.transport import check_halo, check_transport
from domainpar.measure.programs import LET_OPEN_MPI_START, run_limited
from domainpar.parallel.launcher import Launcher
from domainpar.parallel.meeting import unsuited
from domainpar.parallel.mpi import import_mpi, knows_pmix, library_of
from domainpar.parallel.world import World

# What launchers and MPI libraries leave in the environment of what they start; a program started from there must not
# take itself for one of their ranks.
OF_LAUNCHERS = (
    *("PMI_", "PMIX_", "OMPI_COMM_", "OMPI_UNIVERSE", "PRTE_", "MPI_LOCAL", "HYDI_"),
    *("TORCHELASTIC_", "SLURM_"),
)

NO_ANSWER = "gave no version"  # an mpiexec, in time

ASK_FOR_LIBRARY = "from domainpar.parallel.mpi import import_mpi, library_of; print(library_of(import_mpi()))"

FAMILIES = {
    "Open MPI": ("open mpi", "open-mpi", "openrte", "prrte", "prte"),
    "MPICH": ("mpich", "hydra", "intel(r) mpi", "intel mpi", "mvapich", "cray"),
}

NUM_RANKS = 2  # of a probe
LOOPBACK = "127.0.0.1"


def family_of(text: str) -> str | None:
    """`Open MPI` or `MPICH` (with all that is built on it), by the version that a library or an mpiexec prints."""
    lower = text.lower()
    return next((name for name, words in FAMILIES.items() if any(word in lower for word in words)), None)


def check_launcher(launcher: Launcher, size: int) -> Finding:
    """Who started these ranks."""
    if launcher.kind == "none":
        tools = {name: shutil.which(name) for name in ("mpiexec", "torchrun", "srun")}
        there = [name for name, path in tools.items() if path] or ["none"]
        return works("launcher", f"one process alone; launchers in the PATH: {', '.join(there)}", kind="none", **tools)
    text = f"{launcher.command} ({launcher.kind}) started {several(size, 'rank')}, as {launcher.size_variable} says"
    return works("launcher", text, kind=launcher.kind, size=size)


def check_mpi(launcher: Launcher) -> Finding:
    """mpi4py, its library, and the mpiexec that would start ranks: do they belong together?"""
    if find_spec("mpi4py") is None:
        return skipped("MPI", "mpi4py is not installed; torchrun works without", "pip install 'domainpar[mpi]'")
    try:
        if launcher.has_pmi:
            mpi = import_mpi()
            library = library_of(mpi)
            if (refused := unsuited(launcher, library, knows_pmix(mpi))) is not None:
                return works("MPI", f"not here: {refused.what}", refused.hint, library=library)
            return works("MPI", f"mpi4py uses {library}, as {launcher.command} does", library=library)
        # Without an MPI launcher loading the library may crash: a process of its own is asked.
        ended = run_limited([sys.executable, "-c", ASK_FOR_LIBRARY], timeouts.LAUNCHER_ANSWER, [_path()], OF_LAUNCHERS)
        if ended.code is None:  # nothing is known of the library: it may be there
            found = f"a Python that asks mpi4py for its library had not ended after {ended.seconds:.0f} s"
            slow = "is the disk of this installation slow, or the processor emulated? start once more, or with torchrun"
            return failed("MPI", f"{found}: {ended.last_lines}", slow)
        if ended.code != 0:
            raise RuntimeError(ended.last_lines)
    except (ImportError, RuntimeError) as error:
        advice = "pip install mpich, or load the MPI module of your site and set MPI4PY_LIBMPI; or start with torchrun"
        return failed("MPI", f"mpi4py finds no MPI library: {error}", advice)
    # The `mpiexec` beside this Python, then the one in the PATH; each once, under its first name.
    beside, in_path = Path(sys.executable).with_name("mpiexec"), shutil.which("mpiexec")
    paths = ([str(beside)] if beside.exists() else []) + ([in_path] if in_path else [])
    mpiexecs = list({os.path.realpath(path): path for path in reversed(paths)}.values())[::-1]
    return judge_mpi(ended.output.strip().splitlines()[-1], {path: version_of(path) for path in mpiexecs})


def _path() -> dict[str, str]:
    """For a Python that is started from here: this very domainpar, installed or not."""
    return {"PYTHONPATH": os.pathsep.join(place for place in sys.path if place)}


def version_of(mpiexec: str) -> str:
    """The version that an `mpiexec` prints, in one line."""
    try:
        ended = run_limited([mpiexec, "--version"], timeouts.LAUNCHER_ANSWER)
    except OSError as error:
        return f"cannot be started: {error.strerror}"
    if ended.code is None:
        return f"{NO_ANSWER} within {ended.seconds:.0f} s"
    # Hydra prints pages about its build and never names MPICH.
    if hydra := re.search(r"(hydra).*?version:\s*(\S+)", ended.output, re.IGNORECASE | re.DOTALL):
        return f"MPICH (hydra) {hydra[2]}"
    return next((line.strip() for line in ended.output.splitlines() if line.strip()), "says nothing of itself")


def judge_mpi(library: str, versions: Mapping[str, str]) -> Finding:
    """Whether mpi4py's library belongs to the `mpiexec`s there are, the first choice first, by the words of each."""
    mpiexecs = "; ".join(f"{path}: {version}" for path, version in versions.items()) or "no mpiexec"
    text, advice = f"mpi4py uses {library}; {mpiexecs}", ""
    answers = {path: version for path, version in versions.items() if not version.startswith(NO_ANSWER)}
    wrong = [path for path, version in answers.items() if family_of(version) != family_of(library)]
    if not versions:
        advice = "pip install mpich brings an mpiexec; or load the MPI module of your site"
    elif len(wrong) == len(versions):
        what = f"{text}: they belong to different MPI libraries"
        advice = f"use the mpiexec of {library}, or name the library of {wrong[0]} in MPI4PY_LIBMPI"
        return failed("MPI", what, f"{advice} (path of its libmpi.so)", library=library, mpiexec=dict(versions))
    elif wrong:
        right = next(path for path in versions if path not in wrong)
        text, advice = f"{text}: {wrong[0]} is of another library", f"start with {right}, not with {wrong[0]}"
    return works("MPI", text, advice, library=library, mpiexec=dict(versions))


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
    flags = {"--oversubscribe": f"for more ranks than {several(cores, 'core')}"}
    if os.geteuid() == 0 if is_superuser is None else is_superuser:
        flags = {"--allow-run-as-root": "you are root", **flags}
    text = "; ".join(f"{why}: mpiexec {flag}" for flag, why in flags.items())
    return works("Open MPI", text, flags=list(flags))


# --- ranks that are started here -------------------------------------------------------------------------------------


def probe_mpi(mpiexec: str | None, seconds: float) -> Finding:
    """Start two ranks by an mpiexec, None where there is none or no mpi4py; measure for so many seconds."""
    if mpiexec is None:
        advice = "pip install 'domainpar[mpi]'; torchrun works without"
        return skipped("MPI, 2 ranks", "no mpiexec or no mpi4py", advice)
    advice = f"does {mpiexec} belong to mpi4py?"
    return _probe("mpi", [mpiexec, "-n", str(NUM_RANKS)], seconds, [LET_OPEN_MPI_START], advice)


def probe_gloo(seconds: float) -> Finding:
    """Start two ranks as torchrun does, without it: it takes seconds to start."""
    with socket.socket() as listener:
        listener.bind((LOOPBACK, 0))
        port = str(listener.getsockname()[1])
    meeting = {"MASTER_ADDR": LOOPBACK, "MASTER_PORT": port, "WORLD_SIZE": str(NUM_RANKS)}
    ranks = [meeting | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(NUM_RANKS)]
    advice = "can processes of this machine open connections to each other? look at firewalls and GLOO_SOCKET_IFNAME"
    return _probe("gloo", [], seconds, ranks, advice)


def _probe(
    transport: str, start: Sequence[str], seconds: float, environments: Sequence[Mapping[str, str]], advice: str
) -> Finding:
    """One row of two ranks: their worst finding, or how fast the transport was."""
    check = f"{'MPI' if transport == 'mpi' else transport}, {NUM_RANKS} ranks"
    variables = [{"OMP_NUM_THREADS": "1", **_path(), **of_copy} for of_copy in environments]
    with TemporaryDirectory(prefix="domainpar-") as folder:
        file = Path(folder, "findings.json")
        command = [*start, sys.executable, "-m", "domainpar.diagnosis.launcher", str(file), transport, str(seconds)]
        try:
            ended = run_limited(command, timeouts.STARTING + 2 * seconds, variables, OF_LAUNCHERS)
        except OSError as error:
            return failed(check, f"{command[0]} cannot be started: {error.strerror}", advice)
        if ended.code is None:
            return failed(check, f"two ranks had not ended after {ended.seconds:.0f} s: {ended.last_lines}", advice)
        if ended.code != 0 or not file.exists():
            return failed(check, f"two ranks ended with exit code {ended.code}: {ended.last_lines}", advice)
        findings = [Finding.read(values) for values in json.loads(file.read_text())]
    worst = max(findings, key=lambda finding: finding.verdict.badness)
    figures = {finding.check: dict(finding.figures) for finding in findings} | {"seconds": ended.seconds}
    if worst.verdict is not Verdict.PASS:
        return Finding(check, worst.verdict, f"{worst.check}: {worst.found}", worst.advice, figures)
    return works(check, f"started, exchanged and ended in {ended.seconds:.1f} s; {findings[0].found}", **figures)


def run_rank(file: Path, transport: Literal["mpi", "gloo"], seconds: float) -> None:
    """Look at a transport on the ranks that were started, and write the findings to a file. *Collective*."""
    with World.session(transport, timeout=timeouts.PROBE) as world:
        findings = gathered([check_transport(world.transport, seconds), *check_halo(world)], world)
        if world.is_root:
            file.write_text(json.dumps([asdict(finding) for finding in findings]))


if __name__ == "__main__":
    run_rank(Path(sys.argv[1]), "mpi" if sys.argv[2] == "mpi" else "gloo", float(sys.argv[3]))
