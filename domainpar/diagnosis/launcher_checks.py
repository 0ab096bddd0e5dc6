"""The launcher of these ranks, the launchers on this machine, and whether MPI library and mpiexec belong together.

Without a launcher the doctor starts two ranks itself, to check that MPI and gloo work here. It tries each mpiexec,
because only that of mpi4py's own library starts ranks that find each other. They run `mpiexec -n 2 python -m
domainpar.diagnosis.launcher_checks FILE mpi SECONDS`.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal

from domainpar.common import timeouts
from domainpar.common.limits import cores_here
from domainpar.common.models import as_json, read_as
from domainpar.common.words import several
from domainpar.diagnosis.finding import Finding, Verdict, failed, gathered, skipped, works
from domainpar.diagnosis.transport_checks import check_halo, check_transport
from domainpar.measure.programs import LET_OPEN_MPI_START, mpiexecs, own_path, run_limited
from domainpar.parallel.launcher import Launcher, alone_in_job
from domainpar.parallel.meeting import unsuited
from domainpar.parallel.mpi import import_mpi, knows_pmix, library_of
from domainpar.parallel.world import World

# Variables that launchers and MPI libraries set for what they start; a program started from there must not take itself
# for one of their ranks.
OF_LAUNCHERS = (
    *("PMI_", "PMIX_", "OMPI_COMM_", "OMPI_UNIVERSE", "PRTE_", "MPI_LOCAL", "HYDI_"),
    *("TORCHELASTIC_", "SLURM_"),
)

ASK_FOR_LIBRARY = "from domainpar.parallel.mpi import import_mpi, library_of; print(library_of(import_mpi()))"

NUM_RANKS = 2  # of a probe
LOOPBACK = "127.0.0.1"


def check_launcher(launcher: Launcher, size: int) -> Finding:
    """The launcher of these ranks."""
    if launcher.kind == "none":
        tools = {name: shutil.which(name) for name in ("mpiexec", "torchrun", "srun")}
        launchers = [name for name, path in tools.items() if path] or ["none"]
        text = f"one process alone; launchers in the PATH: {', '.join(launchers)}"
        return works("launcher", text, alone_in_job(), kind="none", **tools)
    text = f"{launcher.command} ({launcher.kind}) started {several(size, 'rank')}, as {launcher.size_variable} says"
    return works("launcher", text, kind=launcher.kind, size=size)


def check_mpi(launcher: Launcher) -> Finding:
    """mpi4py, its library, and each mpiexec that would start ranks, the first choice first."""
    if find_spec("mpi4py") is None:
        return skipped("MPI", "mpi4py is not installed; torchrun works without", "pip install 'domainpar[mpi]'")
    try:
        if launcher.has_pmi:
            mpi = import_mpi()
            library = library_of(mpi)
            if (refused := unsuited(launcher, library, knows_pmix(mpi))) is not None:
                return works("MPI", f"not here: {refused.what}", refused.hint, library=library)
            return works("MPI", f"mpi4py uses {library}, as {launcher.command} does", library=library)
        # Without an MPI launcher loading the library may crash, so another process loads it.
        ask = [sys.executable, "-c", ASK_FOR_LIBRARY]
        ended = run_limited(ask, timeouts.LAUNCHER_ANSWER, [own_path()], OF_LAUNCHERS)
        if ended.code is None:  # the library may be there or not
            what = f"a Python that asks mpi4py for its library had not ended after {ended.seconds:.0f} s"
            slow = "is the disk of this installation slow, or the processor emulated? start once more, or with torchrun"
            return failed("MPI", f"{what}: {ended.last_lines}", slow)
        if ended.code != 0:
            raise RuntimeError(ended.last_lines)
    except (ImportError, RuntimeError) as error:
        advice = "pip install mpich, or load the MPI module of your site and set MPI4PY_LIBMPI; or start with torchrun"
        return failed("MPI", f"mpi4py finds no MPI library: {error}", advice)
    library, programs = ended.output.strip().splitlines()[-1], mpiexecs()
    none = "" if programs else "pip install mpich brings an mpiexec; or load the MPI module of your site"
    text = f"mpi4py uses {library}; {', '.join(programs) or 'no mpiexec'}"
    if library.startswith("Open MPI"):
        text += "".join(f"; {why}: mpiexec {flag}" for flag, why in open_mpi_flags(os.geteuid() == 0).items())
    return works("MPI", text, none, library=library, mpiexecs=programs)


def open_mpi_flags(is_superuser: bool) -> dict[str, str]:
    """Flags that Open MPI's mpiexec asks for in containers and on small machines, and when; MPICH asks for none."""
    flags = {"--allow-run-as-root": "you are root"} if is_superuser else {}
    return {**flags, "--oversubscribe": f"for more ranks than {several(len(cores_here()), 'core')}"}


# --- ranks that are started here -------------------------------------------------------------------------------------


def probe_mpi(found: Sequence[str], seconds: float) -> Finding:
    """Start two ranks by each mpiexec there is; measure for so many seconds. The row is that of the first that can."""
    rows: dict[str, Finding] = {}
    for mpiexec in found:
        advice = f"does {mpiexec} belong to mpi4py? if not, name its library in MPI4PY_LIBMPI (path of its libmpi.so)"
        rows[mpiexec] = _probe("mpi", [mpiexec, "-n", str(NUM_RANKS)], seconds, [LET_OPEN_MPI_START], advice)
    wrong = [mpiexec for mpiexec in found if rows[mpiexec].verdict is Verdict.FAIL]
    right = next((mpiexec for mpiexec in found if mpiexec not in wrong), None)
    if not found:
        advice = "pip install 'domainpar[mpi]'; torchrun works without"
        return skipped("MPI, 2 ranks", "no mpiexec or no mpi4py", advice)
    if right is None or not wrong:
        return rows[found[0]]
    row, other = rows[right], f"{wrong[0]}: {rows[wrong[0]].found}"
    advice = "; ".join([f"start with {right}, not with {wrong[0]}", *filter(None, [row.advice])])
    return replace(row, verdict=Verdict.WARN, found=f"{right}: {row.found}; {other}", advice=advice)


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
    variables = [{"OMP_NUM_THREADS": "1", **own_path(), **of_copy} for of_copy in environments]
    with TemporaryDirectory(prefix="domainpar-") as folder:
        file = Path(folder, "findings.json")
        command = [*start, sys.executable, "-m", __name__, str(file), transport, str(seconds)]
        try:
            ended = run_limited(command, timeouts.STARTING + 2 * seconds, variables, OF_LAUNCHERS)
        except OSError as error:
            return failed(check, f"{command[0]} cannot be started: {error.strerror}", advice)
        if ended.code is None:
            return failed(check, f"two ranks had not ended after {ended.seconds:.0f} s: {ended.last_lines}", advice)
        if ended.code != 0 or not file.exists():
            return failed(check, f"two ranks ended with exit code {ended.code}: {ended.last_lines}", advice)
        findings = read_as(list[Finding], json.loads(file.read_text()))
    worst = max(findings, key=lambda finding: finding.verdict.badness)
    figures = {finding.check: dict(finding.figures) for finding in findings} | {"seconds": ended.seconds}
    if worst.verdict is not Verdict.PASS:
        return Finding(check, worst.verdict, f"{worst.check}: {worst.found}", worst.advice, figures)
    return works(check, f"started, exchanged and ended in {ended.seconds:.1f} s; {findings[0].found}", **figures)


def run_rank(file: Path, transport: Literal["mpi", "gloo"], seconds: float) -> None:
    """Check a transport on the ranks that were started, and write the findings to a file. *Collective*."""
    with World.session(transport, timeout=timeouts.PROBE) as world:
        findings = gathered([check_transport(world.transport, seconds), *check_halo(world)], world)
        if world.is_root:
            file.write_text(json.dumps(findings, default=as_json))


if __name__ == "__main__":
    run_rank(Path(sys.argv[1]), "mpi" if sys.argv[2] == "mpi" else "gloo", float(sys.argv[3]))
