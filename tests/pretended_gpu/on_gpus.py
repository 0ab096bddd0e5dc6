"""Commands of the package on pretended GPUs, alone or on several ranks over the mocked NCCL."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import card
from jobs import free_port
from mocked_nccl import problems_of

from domainpar.testing import find_mpiexec, patient

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]


@dataclass(frozen=True)
class Outcome:
    """What a job printed, its exit code, and the folder with the logs of its ranks."""

    code: int
    text: str
    log: Path
    ranks: int

    def problems(self) -> list[str]:
        """Problems of the mocked NCCL; the ranks must have ended in order."""
        return problems_of(self.log, self.ranks)

    def counts(self, rank: int = 0) -> dict[str, dict[str, int]]:
        """Launches, waits of the host and bytes of a rank."""
        of_rank = [path for path in self.log.glob("counts.*.json") if path.name.split(".")[1] == str(rank)]
        return json.loads((of_rank or list(self.log.glob("counts.*.json")))[0].read_text())


def run(
    log: Path,
    *words: str | Path,
    ranks: int = 1,
    gpus: int | None = None,
    launcher: str = "mpiexec",
    timeout: float = 120.0,
    program: Sequence[str] | None = None,
    kernels: bool = False,
    **more: str,
) -> Outcome:
    """Run `python -m domainpar.<words>` on pretended GPUs and wait for its end.

    Args:
        log: A folder for the logs of all ranks.
        *words: The command and its words.
        ranks: Ranks to start.
        gpus: GPUs that each process sees; as many as ranks by default.
        launcher: `mpiexec`, `torchrun`, or `each`: processes started by hand, each with the variables of torchrun.
        timeout: Seconds after which the test fails.
        program: Another program than the package's commands, without the Python.
        kernels: Whether stages are computed by own kernels, see `card.environment`.
        **more: Environment variables; `{rank}` in them is the number of a rank started by hand.
    """
    log.mkdir(parents=True, exist_ok=True)
    what = ["-m", f"domainpar.{words[0]}", *map(str, words[1:])] if program is None else [*program, *map(str, words)]
    environment = os.environ | card.environment(ranks if gpus is None else gpus, nccl=True, log=log, kernels=kernels)
    environment |= {"OMP_NUM_THREADS": "1", **more}
    environment.pop("DOMAINPAR_FAULT", None) if "DOMAINPAR_FAULT" not in more else None
    if ranks == 1:
        commands = [[sys.executable, *what]]
    elif launcher == "mpiexec":
        commands = [[str(find_mpiexec()), "-n", str(ranks), sys.executable, *what]]
    elif launcher == "torchrun":
        module = ["-m", "--", *what[1:]] if what[0] == "-m" else what
        commands = [[*TORCHRUN, str(ranks), *module]]
    else:
        commands = [[sys.executable, *what]] * ranks
    processes = []
    port = str(free_port())
    for rank, command in enumerate(commands):
        own = {name: value.replace("{rank}", str(rank)) for name, value in environment.items()}
        if len(commands) > 1:
            own |= {"RANK": str(rank), "WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        output = (log / f"output.{rank}").open("w")
        processes.append(subprocess.Popen(command, env=own, stdout=output, stderr=subprocess.STDOUT))
    try:
        codes = [process.wait(patient(timeout)) for process in processes]
    finally:
        for process in processes:
            process.kill()
    text = "".join((log / f"output.{rank}").read_text() for rank in range(len(processes)))
    return Outcome(max(codes, key=abs), text, log, ranks)
