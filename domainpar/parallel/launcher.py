"""The launcher of this process, from the environment, before MPI or torch.distributed is touched."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Kind = Literal["torchrun", "jsrun", "flux", "mpich", "openmpi", "pmix", "srun", "environment", "none"]

FIRST_SPECIAL_STEP = 0xFFFFFFF0  # Slurm numbers batch scripts and interactive shells from here: not started by srun


@dataclass(frozen=True)
class Launcher:
    """This process, as the environment describes it."""

    kind: Kind
    command: str  # that the user typed, for messages
    rank: int = 0
    size: int | None = 1  # None where the environment does not say; then MPI does
    size_variable: str = ""  # where it was read
    has_pmi: bool = False  # whether MPI processes started this way can find each other


def started_as_root(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether this process should print for the user, as far as the environment says; never raises."""
    try:
        return detect(environ).rank == 0
    except ValueError:
        return True


def detect(environ: Mapping[str, str] = os.environ, typed: bool | None = None) -> Launcher:
    """Find out which launcher started this process.

    It looks in this order, because processes of an earlier one may inherit variables of a later one:
    torchrun, `jsrun`, MPICH or Open MPI's `mpiexec`, PALS and flux among them, `srun`, plain `RANK` and `WORLD_SIZE`.
    (`typed`: whether the command was typed at the terminal of a task of `srun --pty`; None: find out.)

    Raises:
        ValueError: If variables of a launcher are there but incomplete or not numbers.
    """
    plain = ("RANK", "WORLD_SIZE")
    if "TORCHELASTIC_RUN_ID" in environ:
        return _read(environ, "torchrun", "torchrun", *plain)
    # Its MPI derives from Open MPI and, in some versions, sets the variables of that too.
    if "JSM_NAMESPACE_SIZE" in environ:
        return _read(environ, "jsrun", "jsrun", "JSM_NAMESPACE_RANK", "JSM_NAMESPACE_SIZE", has_pmi=True)
    if "OMPI_COMM_WORLD_SIZE" in environ:
        prefix = "OMPI_COMM_WORLD_"
        return _read(environ, "openmpi", "mpiexec", prefix + "RANK", prefix + "SIZE", has_pmi=True)
    by_srun = _is_srun(environ)
    # Also Intel MPI, MVAPICH and Cray. srun with PMI looks the same, but there Slurm's own numbers agree with it.
    if "PMI_SIZE" in environ and not by_srun and "PALS_RANKID" in environ:
        return _read(environ, "mpich", "mpiexec (PALS)", "PMI_RANK", "PMI_SIZE", has_pmi=True)
    # Flux serves MPICH's interface, whose variables it sets; those of its own are there without an MPI as well.
    flux = environ.get("FLUX_TASK_RANK"), environ.get("FLUX_JOB_SIZE")
    # An mpiexec inside a task of flux gives its children numbers of their own.
    if None not in flux and flux == (environ.get("PMI_RANK", flux[0]), environ.get("PMI_SIZE", flux[1])):
        return _read(environ, "flux", "flux run", "FLUX_TASK_RANK", "FLUX_JOB_SIZE", has_pmi=True)
    if "PMI_SIZE" in environ and not by_srun:
        return _read(environ, "mpich", "mpiexec", "PMI_RANK", "PMI_SIZE", has_pmi=True)
    if by_srun:
        size = "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in environ else "SLURM_NTASKS"
        if by_pty(environ) and (_typed(environ) if typed is None else typed):
            return Launcher("none", "no launcher")
        has_pmi = "PMI_RANK" in environ or "PMIX_RANK" in environ
        return _read(environ, "srun", "srun", "SLURM_PROCID", size, has_pmi=has_pmi)
    if "PMIX_RANK" in environ:
        rank = _number(environ, "PMIX_RANK")
        return Launcher("pmix", "the PMIx launcher", rank, None, "PMIX_RANK", has_pmi=True)
    if "RANK" in environ or "WORLD_SIZE" in environ:
        return _read(environ, "environment", "the launcher (RANK, WORLD_SIZE)", *plain)
    return Launcher("none", "no launcher")


def address(launcher: Launcher, environ: Mapping[str, str] = os.environ) -> tuple[str, int]:
    """Host and port where rank 0 serves the others, when MPI cannot tell them; ValueError if nothing says so."""
    if "MASTER_ADDR" in environ and "MASTER_PORT" in environ:
        return environ["MASTER_ADDR"], _number(environ, "MASTER_PORT")
    if launcher.kind == "srun":
        nodes = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST")
        if not nodes or "SLURM_JOB_ID" not in environ:
            raise ValueError("srun without SLURM_STEP_NODELIST and SLURM_JOB_ID; set MASTER_ADDR and MASTER_PORT.")
        # Different steps of one job, and different jobs on one node, should not meet on one port.
        port = 15_000 + (_number(environ, "SLURM_JOB_ID") + 1009 * _number(environ, "SLURM_STEP_ID")) % 10_000
        return first_host(nodes), port
    raise ValueError(
        f"{launcher.command} started {launcher.size} processes but nothing says where they meet; set MASTER_ADDR (the "
        "host of rank 0) and MASTER_PORT (a free port there), or start with torchrun or mpiexec."
    )


def alone_in_job(environ: Mapping[str, str] = os.environ) -> str:
    """A warning for a process without a launcher in a Slurm job of several tasks; empty in any other case."""
    nodes, on_each = environ.get("SLURM_NNODES", "1"), environ.get("SLURM_NTASKS_PER_NODE", "1")
    tasks = int(environ.get("SLURM_NTASKS") or int(nodes) * int(on_each))
    if "SLURM_JOB_ID" not in environ or tasks == 1:
        return ""
    started, how = ("srun --pty", "srun --overlap") if by_pty(environ) else ("a script or shell, not srun", "srun")
    return f"alone in a Slurm job of {tasks} tasks, started by {started}: {how} -n {tasks} python -m domainpar..."


def _is_srun(environ: Mapping[str, str]) -> bool:
    """Whether srun itself started this process: inside salloc and sbatch its variables are merely inherited."""
    if "SLURM_PROCID" not in environ or "SLURM_STEP_ID" not in environ:
        return False
    if _number(environ, "SLURM_STEP_ID") >= FIRST_SPECIAL_STEP:
        return False
    # An mpiexec inside an srun step gives its children numbers of its own.
    own_numbers = "MPI_LOCALRANKID" in environ or environ.get("PMI_RANK") != environ["SLURM_PROCID"]
    return "PMI_RANK" not in environ or not own_numbers


def by_pty(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether srun gave a terminal to its first task, of which this process may be one, or a child."""
    return "SLURM_PTY_PORT" in environ or "SLURM_PTY_WIN_COL" in environ


def _typed(environ: Mapping[str, str]) -> bool:
    """Whether this was typed at the terminal that `srun --pty` gave to its first task; else that task is a rank.

    Tasks of an inner srun inherit the variables of the terminal but not the terminal. The task's own processes are one
    process group; only an interactive shell, or a Python, puts what it starts into another one. Where this process has
    no terminal, as in a notebook, that of the task decides.

    Raises:
        ValueError: If the task's number is missing.
    """
    if "SLURM_TASK_PID" not in environ:
        raise ValueError(
            "SLURM_PTY_PORT tells of a shell of srun --pty, and nothing whether this is typed there or a task of srun "
            "(SLURM_TASK_PID); unset SLURM_STEP_ID to be alone, or start ranks with srun --overlap -n."
        )
    task, own = _number(environ, "SLURM_TASK_PID"), False
    with suppress(OSError):
        os.close(os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY))
        own = True
    if not own and not _has_terminal(task):
        return False
    try:
        return hasattr(sys, "ps1") or os.getpgid(task) != os.getpgrp()
    except ProcessLookupError:  # in a container that numbers processes by itself
        return True


def _has_terminal(process: int) -> bool:
    """Whether another process belongs to a terminal, as far as can be seen."""
    with suppress(OSError):
        # The name of the program, in brackets, may hold anything.
        return int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[4]) != 0
    return False


def _read(
    environ: Mapping[str, str], kind: Kind, command: str, rank_name: str, size_name: str, has_pmi: bool = False
) -> Launcher:
    rank, size = _number(environ, rank_name), _number(environ, size_name)
    if not 0 <= rank < size:
        raise ValueError(f"{rank_name}={rank} does not fit {size_name}={size}; ranks count from 0 to {size - 1}.")
    return Launcher(kind, command, rank, size, size_name, has_pmi)


def _number(environ: Mapping[str, str], name: str) -> int:
    text = environ.get(name)
    if text is None:
        raise ValueError(f"the environment has other variables of this launcher but not {name}; set it, or unset them.")
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"{name}={text!r} in the environment is not a whole number.") from None


def first_host(node_list: str) -> str:
    """The first host of a Slurm node list: `gpu[08-11,14],login1` -> `gpu08`."""
    first = re.match(r"([^,\[]+)(?:\[([0-9]+)[^\]]*\])?([^,\[]*)", node_list)
    if first is None:
        raise ValueError(f"no host in the Slurm node list {node_list!r}; set MASTER_ADDR and MASTER_PORT.")
    return first[1] + (first[2] or "") + first[3]
