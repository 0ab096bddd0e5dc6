"""The origin of a run: versions, code, command and machine, for `run.json`."""

from __future__ import annotations

import os
import platform
import re
import sys
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

import domainpar
from domainpar.parallel.digests import installed

_PACKAGES = ("torch", "numpy", "numba", "pymetis", "mpi4py", "zarr", "safetensors")

# Of launchers, threads and how ranks meet; nothing that could hold a secret.
_ENVIRONMENT = re.compile(
    r"(OMP|MKL)_NUM_THREADS|NUMBA_NUM_THREADS|MASTER_(ADDR|PORT)|RANK|LOCAL_RANK|WORLD_SIZE|TORCHELASTIC_(RUN_ID|RESTART_COUNT)"
    r"|PMI_(RANK|SIZE)|MPI_LOCALN?RANK(ID|S)|OMPI_COMM_WORLD_(RANK|SIZE|LOCAL_RANK)|PMIX_RANK|MPI4PY_(MPIABI|LIBMPI)"
    r"|GLOO_SOCKET_IFNAME|NCCL_(SOCKET_IFNAME|DEBUG|IB_DISABLE)|CUDA_VISIBLE_DEVICES|DOMAINPAR_FAULT"
    r"|SLURM_(JOB_(ID|NAME|PARTITION|NUM_NODES|NODELIST)|STEP_ID|PROCID|NTASKS|LOCALID|NODEID|NNODES|RESTART_COUNT|MPI_TYPE"
    r"|CPUS_PER_TASK|CPU_BIND)"
)


def describe_process() -> dict[str, Any]:
    """Versions, code, command, environment and machine of this process."""
    return {
        "argv": sys.argv,
        "environment": environment_of_ranks(),
        "git": git_sha(Path(domainpar.__file__).parents[1]),
        "host": platform.node(),
        "machine": f"{platform.machine()} {platform.system()}",
        "pid": os.getpid(),
        "started": datetime.now().astimezone().isoformat(timespec="milliseconds"),
        "versions": {"domainpar": domainpar.__version__, "python": platform.python_version()}
        | {name: installed(name) for name in _PACKAGES},
    }


def environment_of_ranks(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The variables of launchers, threads and transports, by name."""
    return {name: environ[name] for name in sorted(environ) if _ENVIRONMENT.fullmatch(name)}


def git_sha(root: Path) -> str | None:
    """The commit that is checked out in a directory; None if it is no git checkout, or cannot be read as one."""
    try:
        git = root / ".git"
        if git.is_file():  # of a further working tree: names the directory that stands for it
            git = root / git.read_text().removeprefix("gitdir:").strip()
        head = (git / "HEAD").read_text().strip()
        if head.startswith("ref:"):
            branch, common = head.removeprefix("ref:").strip(), git / "commondir"
            shared = git / common.read_text().strip() if common.is_file() else git
            if (shared / branch).is_file():
                head = (shared / branch).read_text().strip()
            else:
                packed = (line.split() for line in (shared / "packed-refs").read_text().splitlines())
                head = next((words[0] for words in packed if words[1:] == [branch]), "")
        return head if re.fullmatch("[0-9a-f]{40,64}", head) else None
    except (OSError, UnicodeDecodeError):
        return None
