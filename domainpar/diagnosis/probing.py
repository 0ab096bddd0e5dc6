"""Two ranks that the doctor starts by itself, where nobody else has started any: do MPI and gloo really work here?"""

from __future__ import annotations

import json
import os
import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from domainpar import timeouts
from domainpar.diagnosis.launchers import OF_LAUNCHERS
from domainpar.diagnosis.starting import Ended, run_limited
from domainpar.diagnosis.verdicts import Finding, Verdict, failed, passed, skipped

NUM_RANKS = 2
LOOPBACK = "127.0.0.1"

# In containers and on small machines Open MPI refuses to start without these; MPICH does not look at them.
LET_OPEN_MPI_START = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
}


def probe_mpi(mpiexec: str | None, seconds: float) -> Finding:
    """Start two ranks by mpiexec.

    Args:
        mpiexec: Which; None where there is none or no mpi4py.
        seconds: Time to measure in.
    """
    if mpiexec is None:
        return skipped(
            "MPI, 2 ranks", "no mpiexec or no mpi4py", "pip install 'domainpar[mpi]'; torchrun works without"
        )
    command = [mpiexec, "-n", str(NUM_RANKS), *_rank("mpi", seconds)]
    return _probed("MPI, 2 ranks", command, seconds, [LET_OPEN_MPI_START], "does " + mpiexec + " belong to mpi4py?")


def probe_gloo(seconds: float) -> Finding:
    """Start two ranks as torchrun does, without it: it takes seconds to start."""
    port = str(_free_port())
    meeting = {"MASTER_ADDR": LOOPBACK, "MASTER_PORT": port, "WORLD_SIZE": str(NUM_RANKS)}
    ranks = [meeting | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(NUM_RANKS)]
    advice = "can processes of this machine open connections to each other? look at firewalls and GLOO_SOCKET_IFNAME"
    return _probed("gloo, 2 ranks", _rank("gloo", seconds), seconds, ranks, advice)


def _rank(transport: str, seconds: float) -> list[str]:
    return [sys.executable, "-m", "domainpar.diagnosis.probe", "{file}", transport, str(seconds)]


def _probed(
    check: str, command: Sequence[str], seconds: float, environments: Sequence[Mapping[str, str]], advice: str
) -> Finding:
    shared = {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    with TemporaryDirectory(prefix="domainpar-") as folder:
        file = Path(folder, "found.json")
        words = [word.replace("{file}", str(file)) for word in command]
        try:
            ended = run_limited(
                words, timeouts.STARTING + 2 * seconds, [shared | dict(own) for own in environments], OF_LAUNCHERS
            )
        except OSError as error:
            return failed(check, f"{words[0]} cannot be started: {error.strerror}", advice)
        if ended.code != 0 or not file.exists():
            return failed(check, _how_it_ended(ended), advice)
        return _summed_up(check, [Finding.read(values) for values in json.loads(file.read_text())], ended)


def _how_it_ended(ended: Ended) -> str:
    if ended.code is None:
        return f"two ranks had not ended after {ended.seconds:.0f} s: {ended.last_lines}"
    return f"two ranks ended with exit code {ended.code}: {ended.last_lines}"


def _summed_up(check: str, findings: Sequence[Finding], ended: Ended) -> Finding:
    """One row of what two ranks found: the worst of it, or how fast the transport was."""
    worst = max(findings, key=lambda finding: finding.verdict.badness)
    figures = {finding.check: dict(finding.figures) for finding in findings} | {"seconds": ended.seconds}
    if worst.verdict is not Verdict.PASS:
        return Finding(check, worst.verdict, f"{worst.check}: {worst.found}", worst.advice, figures)
    return passed(check, f"started, exchanged and ended in {ended.seconds:.1f} s; {findings[0].found}", **figures)


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind((LOOPBACK, 0))
        port: int = listener.getsockname()[1]
        return port
