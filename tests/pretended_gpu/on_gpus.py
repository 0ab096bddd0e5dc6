"""Commands of the package on pretended GPUs, alone or on several ranks over the mocked NCCL."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
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


class Warm:
    """The process that forks ranks which run a function of `program.py`, see `warm.py`; started when first asked."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None

    def codes(
        self, name: str, environments: Sequence[Mapping[str, str]], outputs: Sequence[Path], seconds: float
    ) -> list[int]:
        """Exit codes of the ranks of a job."""
        if self._process is None:
            command = [sys.executable, str(Path(__file__).with_name("warm.py"))]
            environment = os.environ | card.environment(len(environments), nccl=True)
            environment |= {"OMP_NUM_THREADS": "1"}
            pipe = subprocess.PIPE
            self._process = subprocess.Popen(command, env=environment, stdin=pipe, stdout=pipe, text=True)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        names = list(map(str, outputs))
        job = {"name": name, "environments": environments, "outputs": names, "seconds": seconds}
        print(json.dumps(job), file=self._process.stdin, flush=True)
        codes: list[int] = json.loads(self._process.stdout.readline())
        return codes

    def end(self) -> None:
        """Let it go, if it is there."""
        if self._process is not None:
            self._process.communicate()
            self._process = None


WARM = Warm()


def run(
    log: Path,
    *words: str | Path,
    ranks: int = 1,
    gpus: int | None = None,
    launcher: str = "mpiexec",
    timeout: float = 120.0,
    program: Sequence[str] | None = None,
    **more: str,
) -> Outcome:
    """Run `python -m domainpar.<words>` on pretended GPUs and wait for its end.

    Args:
        log: A folder for the logs of all ranks.
        *words: The command and its words.
        ranks: Ranks to start.
        gpus: GPUs that each process sees; as many as ranks by default.
        launcher: `mpiexec`, `torchrun`, or `each`: processes started by hand, each with the variables of torchrun, and
            forked from a warm one where they run a program.
        timeout: Seconds after which the test fails.
        program: Another program than the package's commands, without the Python.
        **more: Environment variables; `{rank}` in them is the number of a rank started by hand.
    """
    log.mkdir(parents=True, exist_ok=True)
    what = ["-m", f"domainpar.{words[0]}", *map(str, words[1:])] if program is None else [*program, *map(str, words)]
    environment = os.environ | card.environment(ranks if gpus is None else gpus, nccl=True, log=log)
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
    port = str(free_port())
    environments = []
    for rank in range(len(commands)):
        own = {name: value.replace("{rank}", str(rank)) for name, value in environment.items()}
        if len(commands) > 1:
            own |= {"RANK": str(rank), "WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        environments.append(own)
    outputs = [log / f"output.{rank}" for rank in range(len(commands))]
    if program is not None and len(commands) > 1:
        codes = WARM.codes(str(words[0]), environments, outputs, patient(timeout))
    else:
        codes = _codes(commands, environments, outputs, patient(timeout))
    text = "".join(output.read_text() for output in outputs)
    return Outcome(max(codes, key=abs), text, log, ranks)


def _codes(
    commands: Sequence[Sequence[str]],
    environments: Sequence[Mapping[str, str]],
    outputs: Sequence[Path],
    seconds: float,
) -> list[int]:
    """Exit codes of programs that run beside each other."""
    processes = []
    for command, environment, output in zip(commands, environments, outputs):
        with output.open("w") as file:
            processes.append(subprocess.Popen(command, env=environment, stdout=file, stderr=subprocess.STDOUT))
    try:
        return [process.wait(seconds) for process in processes]
    finally:
        for process in processes:
            process.kill()
