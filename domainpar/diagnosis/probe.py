"""Two ranks that the doctor starts by itself, where nobody else has started any: do MPI and gloo really work here?

The ranks run `mpiexec -n 2 python -m domainpar.diagnosis.probe FILE mpi SECONDS`.
"""

from __future__ import annotations

import json
import os
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal

from domainpar import timeouts
from domainpar.diagnosis.finding import Finding, Verdict, failed, gathered, passed, skipped
from domainpar.diagnosis.launcher import OF_LAUNCHERS
from domainpar.diagnosis.selftest import check_halo
from domainpar.diagnosis.transport import check_transport
from domainpar.measure.programs import LET_OPEN_MPI_START, Ended, run_limited
from domainpar.parallel.world import World

NUM_RANKS = 2
LOOPBACK = "127.0.0.1"


def probe_mpi(mpiexec: str | None, seconds: float) -> Finding:
    """Start two ranks by mpiexec.

    Args:
        mpiexec: Its path; None where there is none or no mpi4py.
        seconds: Time to measure in.
    """
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
    check = f"{'MPI' if transport == 'mpi' else transport}, {NUM_RANKS} ranks"
    shared = {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    with TemporaryDirectory(prefix="domainpar-") as folder:
        file = Path(folder, "findings.json")
        command = [*start, sys.executable, "-m", "domainpar.diagnosis.probe", str(file), transport, str(seconds)]
        limit = timeouts.STARTING + 2 * seconds
        try:
            ended = run_limited(command, limit, [shared | dict(own) for own in environments], OF_LAUNCHERS)
        except OSError as error:
            return failed(check, f"{command[0]} cannot be started: {error.strerror}", advice)
        if ended.code is None:
            return failed(check, f"two ranks had not ended after {ended.seconds:.0f} s: {ended.last_lines}", advice)
        if ended.code != 0 or not file.exists():
            return failed(check, f"two ranks ended with exit code {ended.code}: {ended.last_lines}", advice)
        return _in_one_row(check, [Finding.read(values) for values in json.loads(file.read_text())], ended)


def _in_one_row(check: str, findings: Sequence[Finding], ended: Ended) -> Finding:
    """The worst finding of two ranks, or how fast the transport was."""
    worst = max(findings, key=lambda finding: finding.verdict.badness)
    figures = {finding.check: dict(finding.figures) for finding in findings} | {"seconds": ended.seconds}
    if worst.verdict is not Verdict.PASS:
        return Finding(check, worst.verdict, f"{worst.check}: {worst.found}", worst.advice, figures)
    return passed(check, f"started, exchanged and ended in {ended.seconds:.1f} s; {findings[0].found}", **figures)


def run_rank(file: Path, transport: Literal["mpi", "gloo"], seconds: float) -> None:
    """Look at a transport on the ranks that were started, and write the findings to a file. *Collective*."""
    with World.session(transport, timeout=timeouts.PROBE) as world:
        findings = gathered([check_transport(world.transport, seconds), *check_halo(world)], world)
        if world.is_root:
            file.write_text(json.dumps([asdict(finding) for finding in findings]))


if __name__ == "__main__":
    run_rank(Path(sys.argv[1]), "mpi" if sys.argv[2] == "mpi" else "gloo", float(sys.argv[3]))
