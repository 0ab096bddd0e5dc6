"""What each rank does that the doctor starts by itself: meet, exchange, measure, and leave what was found in a file.

mpiexec -n 2 python -m domainpar.diagnosis.probe FILE mpi SECONDS
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path

from domainpar import timeouts
from domainpar.diagnosis.selftests import check_halo
from domainpar.diagnosis.transports import check_transport
from domainpar.diagnosis.verdicts import gathered
from domainpar.parallel.launch import World
from domainpar.parallel.meeting import TransportName


def probe(into: Path, transport: TransportName, seconds: float) -> None:
    """Look at a transport on the ranks that were started, and write down what was found. *Collective*."""
    with World.session(transport, timeout=timeouts.PROBE) as world:
        findings = gathered([check_transport(world.transport, seconds), *check_halo(world)], world)
        if world.is_root:
            into.write_text(json.dumps([asdict(finding) for finding in findings]))


if __name__ == "__main__":
    file, name, budget = sys.argv[1:]
    if name not in ("mpi", "gloo"):
        raise SystemExit(f"probes know mpi and gloo, not {name}.")
    probe(Path(file), "mpi" if name == "mpi" else "gloo", float(budget))
