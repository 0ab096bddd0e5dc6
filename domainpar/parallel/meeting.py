"""How the ranks of a run find each other: by MPI, or at an address where rank 0 serves a store."""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch

from domainpar.common import faults, timeouts
from domainpar.common.agreement import Ranks, Refused, gather
from domainpar.common.problems import Problem
from domainpar.parallel import gpus, shared_memory, side_channel
from domainpar.parallel import launcher as launchers
from domainpar.parallel.board import SideChannel
from domainpar.parallel.launcher import Launcher
from domainpar.parallel.proof import proved
from domainpar.parallel.rank_status import write_error
from domainpar.parallel.start_limit import limited
from domainpar.parallel.threads import Switchboard, ThreadTransport
from domainpar.parallel.transport import Transport

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

TransportName = Literal["auto", "mpi", "gloo", "nccl"]

LARGEST_DEFAULT_DOMAIN = 8  # ranks that share one event, by default


class PrintedHere(Refused):
    """A refusal that this rank prints itself, because rank 0 cannot be reached or may not know of it."""


class PrintedElsewhere(Refused):
    """A refusal that another rank of this host prints."""


def tells(refused: ValueError) -> bool:
    """Whether this rank is the one to print that the ranks cannot meet."""
    if isinstance(refused, PrintedElsewhere):
        return False
    return isinstance(refused, PrintedHere) or launchers.started_as_root()


Meeting = tuple[Transport, torch.device, SideChannel | None]  # of all ranks; of this one; where there is one


def meet(
    transport: TransportName, device: str, domain_size: int | None, timeout: float, join_seconds: float, share_gpu: bool
) -> Meeting:
    """Join the other processes that a launcher started; alone without one. *Collective*.

    Arguments and errors are those of `World.launch`.
    """
    if transport not in get_args(TransportName):
        raise ValueError(f"unknown --transport {transport!r}; known are {', '.join(get_args(TransportName))}.")
    launcher = launchers.detect()
    faults.arm(launcher.rank)  # first: a test may inject a fault before the ranks meet
    faults.reach("init")
    if launcher.size is not None:  # before any rank waits for others
        checked_domain_size(domain_size, launcher.size)
    if launcher.kind == "none":
        own = gpus.choose_device(device, share_gpu)
        return ThreadTransport(Switchboard(1), 0), own.device, SideChannel.for_threads(1)
    if launcher.kind == "srun" and launcher.rank == 0 and (launcher.size or 1) > 1 and launchers.by_pty():
        # In a shell of srun --pty that looks like a rank, no other rank would come, without any message.
        others = f"waits for the other {(launcher.size or 1) - 1} tasks of srun --pty"
        write_error(f"note: rank 0 {others}; in a shell of its own: srun --pty -n 1, or unset SLURM_STEP_ID\n")
    comm = join_mpi(transport, launcher, join_seconds)
    marks: SideChannel | None
    ranks: Ranks
    if comm is None:
        towards = launchers.address(launcher)
        marks, ranks = _meet_at(*towards, launcher, join_seconds)
        own = gpus.choose_device(device, share_gpu, ranks)
        name = choose_transport(transport, own, has_mpi=False)
    else:
        from domainpar.parallel.mpi import MpiTransport

        # A communicator of our own: no message of the program meets ours.
        by_mpi = proved(MpiTransport(comm.Dup(), timeout))
        checked_domain_size(domain_size, by_mpi.size)
        own = gpus.choose_device(device, share_gpu, by_mpi)
        name = choose_transport(transport, own, has_mpi=True)
        marks = side_channel.share_store(by_mpi)
        if name == "mpi":
            return by_mpi, own.device, marks
        if marks is None:
            raise Refused(
                "not all ranks can open a connection to the host of rank 0; gloo and NCCL need one",
                "check names and firewalls between the hosts, or take --transport mpi",
            )
        ranks, towards = by_mpi, (marks.hosts[0], 1)
    return _group_transport(name, own.device, timeout, marks, ranks, towards), own.device, marks


def checked_domain_size(domain_size: int | None, size: int) -> int:
    """The ranks that share one event, in a world of `size` ranks.

    Raises:
        ValueError: If `domain_size` does not divide the number of ranks.
    """
    if domain_size is None:
        return max(ranks for ranks in range(1, LARGEST_DEFAULT_DOMAIN + 1) if size % ranks == 0)
    if domain_size < 1 or size % domain_size:
        raise ValueError(
            f"--domain-size {domain_size} does not divide the {size} ranks; every domain group needs as many ranks as "
            f"the others. Choose a divisor of {size}, or another number of ranks."
        )
    return domain_size


def choose_transport(transport: TransportName, own: gpus.DeviceChoice, has_mpi: bool) -> str:
    """The transport that `auto` means here, or the given one.

    Raises:
        ValueError: If NCCL is requested without a GPU, or by ranks that share one.
    """
    if transport == "nccl" and own.device.type != "cuda":
        raise ValueError("--transport nccl works between GPUs; add --device cuda, or use mpi or gloo.")
    if transport == "nccl" and own.shared:
        raise Problem("NCCL takes one rank on a GPU, but ranks share one", "use --transport mpi or gloo")
    if transport != "auto":
        return transport
    if own.device.type == "cuda" and not own.shared:
        return "nccl"
    return "mpi" if has_mpi else "gloo"


def join_mpi(transport: TransportName, launcher: Launcher, join_seconds: float = timeouts.JOIN) -> Any | None:
    """mpi4py's COMM_WORLD under an MPI launcher; None where MPI is not wanted or, under srun, does not work.

    If not all have come after `join_seconds`, this process ends with exit code 2; one of its host says who has not.

    Raises:
        Refused: If MPI is wanted and does not work here.
    """
    if not launcher.has_pmi:
        if transport == "mpi":
            by_srun = "use srun --mpi=pmi2 or --mpi=pmix (whichever your MPI speaks), or --transport gloo"
            hint = by_srun if launcher.kind == "srun" else "use mpiexec, or --transport gloo"
            raise Refused(f"{launcher.command} does not start MPI processes", hint)
        return None
    # The user or Slurm gives an address to meet at without MPI: a library that may end the process is not loaded.
    named = {"MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys()
    if transport in ("gloo", "nccl") and (named or launcher.kind == "srun"):
        return None
    try:
        return _mpi_world(launcher, join_seconds, insists=transport == "mpi")
    except Refused as refused:
        if launcher.kind == "srun" and transport != "mpi":
            if launcher.rank == 0:
                write_error(f"note: without MPI: {refused.what}\n      {refused.hint}\n")
            return None
        raise


def _mpi_world(launcher: Launcher, join_seconds: float, insists: bool) -> Any:
    """COMM_WORLD; refused if the library does not work, or is not the launcher's. `insists`: the user requested MPI."""
    from domainpar.parallel.mpi import import_mpi, knows_pmix, library_of, start_mpi

    seen = launcher.size_variable if launcher.size is None else f"{launcher.size_variable}={launcher.size}"
    started = f"{launcher.command} started {launcher.size or 'several'} processes ({seen})"
    advice = (
        "they belong to different MPI libraries: use the mpiexec of that library, or name the library of this mpiexec "
        "in MPI4PY_LIBMPI (the path of its libmpi.so), or start with torchrun"
    )
    try:
        mpi = import_mpi()
    except (ImportError, RuntimeError) as error:
        what = "mpi4py does not work here" if isinstance(error, ImportError) else "no MPI library found"
        raise Refused(
            f"{started} but {what}: {_first_line(error)}",
            "pip install 'domainpar[mpi]' brings one; on a cluster load its MPI module, with 'domainpar[site-mpi]'; "
            "or start with torchrun",
        ) from None
    library = library_of(mpi)
    # MPICH ends the process when it is started by Open MPI's mpiexec; Open MPI only sees one rank the other way round.
    if launcher.kind == "openmpi" and any(name in library for name in ("MPICH", "Intel", "MVAPICH")):
        raise Refused(f"{started}, it is Open MPI's, but mpi4py uses {library}", advice)
    if not mpi.Is_initialized():  # by the program itself
        if (refused := unsuited(launcher, library, knows_pmix(mpi), insists)) is not None:
            raise refused
        if "PMI_SIZE" in os.environ and "PMIX_NAMESPACE" in os.environ:  # of something around the launcher
            os.environ.setdefault("MPIR_CVAR_PMI_VERSION", "1")  # else MPICH cannot decide, and aborts
        _check_shared_memory(library)
        with limited(launcher, join_seconds):
            start_mpi(mpi)
    comm = mpi.COMM_WORLD
    if launcher.size is not None and comm.Get_size() != launcher.size:
        raise Refused(f"{started} but mpi4py ({library}) sees {comm.Get_size()}", advice)
    return comm


def unsuited(
    launcher: Launcher, library: str, with_pmix: bool, insists: bool = False, environ: Mapping[str, str] = os.environ
) -> Refused | None:
    """Why an MPI library cannot start under the launcher of these ranks: checked, because it may end the process.

    Args:
        launcher: That of these ranks.
        library: Name and version of the library; `with_pmix`: whether it is linked with PMIx (for MPICH).
        insists: Whether the user requested MPI: then a doubtful library is tried.
        environ: The variables of this process.
    """
    by_pmi, by_pmix = "PMI_RANK" in environ, "PMIX_RANK" in environ
    hint = "for MPI take that of your site ('domainpar[site-mpi]'), or mpiexec inside the job; else --transport gloo"
    of_mpich = re.match(r"(?:MPICH|MVAPICH)\D*(\d+)", library)
    if of_mpich and by_pmix and not by_pmi and not with_pmix:
        return Refused(f"{launcher.command} starts ranks by PMIx, which mpi4py's {library} does not know", hint)
    if launcher.kind != "srun" or insists:
        return None
    if of_mpich and by_pmi and library.startswith("MPICH") and int(of_mpich[1]) >= 5:
        # Its messages carry what was in the memory around them. Slurm's pmi2 stumbles over some, at random.
        return Refused(f"by srun --mpi=pmi2 mpi4py's {library} starts at random only", hint)
    if library.startswith("Open MPI") and by_pmi and not by_pmix:
        what = f"srun starts ranks by PMI, for which mpi4py's {library} is seldom built"
        return Refused(what, "use srun --mpi=pmix, or --transport mpi if it is; else --transport gloo")
    return None


def _check_shared_memory(library: str, environ: Mapping[str, str] = os.environ) -> None:
    """Refuse more ranks of MPICH on this machine than its shared memory has room for: they would end by a signal.

    All ranks of a machine look before any starts MPI, which takes nothing until all have come, so they see the same.
    One rank of the machine prints, because rank 0 may be on another one.
    """
    ranks = environ.get("MPI_LOCALNRANKS", "")  # of hydra, MPICH's own launcher
    if library.startswith("MPICH") and ranks.isdigit() and (problem := shared_memory.shortage(int(ranks))):
        first_here = environ.get("MPI_LOCALRANKID") == "0"
        raise (PrintedHere if first_here else PrintedElsewhere)(problem.what, problem.hint)


def _meet_at(host: str, port: int, launcher: Launcher, join_seconds: float) -> tuple[SideChannel, Ranks]:
    """The side channel of ranks that meet at an address, where rank 0 or torchrun serves a store; *collective*."""
    assert launcher.size is not None, "only PMIx leaves the size to MPI"
    # torchrun serves a store itself, and uses the same one again when it restarts the ranks.
    serves = launcher.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    # Keys left by the ranks before a restart must not be mixed with the new ones.
    prefix = f"domainpar/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"

    def connect(serves: bool = False) -> Store:
        return side_channel.prefixed(prefix, side_channel.connect(host, port, serves, join_seconds))

    try:
        store = connect(serves)
    except RuntimeError as error:
        reason, rank = str(error), f"rank {launcher.rank}"
        if serves and any(sign in reason for sign in ("EADDRINUSE", "address already in use")):
            hint = "set MASTER_PORT to a free port, or start with mpiexec"
            raise Refused(f"port {port} of {host} is taken", hint) from None
        if any(sign in reason for sign in ("resolve", "getaddrinfo", "Name or service")):
            hint = "set MASTER_ADDR to an address that every host knows"
            raise PrintedHere(f"{rank} cannot resolve {host}, where rank 0 serves", hint) from None
        what = f"{rank} of {launcher.size} could not meet rank 0 at {host}:{port} within {join_seconds:g} s"
        hint = "check that rank 0 was started, and MASTER_ADDR, MASTER_PORT and firewalls; --join-timeout waits longer"
        raise PrintedHere(f"{what}: {_first_line(error)}", hint) from None
    ranks = side_channel.StoreRanks(store, launcher.rank, launcher.size, join_seconds, serves)
    return SideChannel(store, launcher.size, serves, gather(ranks, platform.node()), connect), ranks


def _group_transport(
    name: str, device: torch.device, deadline: float, marks: SideChannel, ranks: Ranks, towards: tuple[str, int]
) -> Transport:
    """Form a gloo or NCCL group of processes that share a store. *Collective*."""
    import torch.distributed as dist

    from domainpar.parallel.process_group import form_group

    if dist.is_initialized():
        raise Refused("torch.distributed is in use by this program already", "use World.from_process_group")
    store = side_channel.prefixed("group", marks.store)
    try:
        return form_group(device, name == "nccl", store, ranks, towards, deadline, marks.announce_failure)
    except (RuntimeError, Refused) as error:
        if dist.is_initialized():  # in part; left as it is, its threads would end this process by a signal at its exit
            dist.destroy_process_group()
        if isinstance(error, Refused):
            raise
        # Rank 0 may find out minutes later, and may not be the one that is wrong: one rank of each host says so.
        kind = PrintedHere if _first_here(marks.store) else PrintedElsewhere
        # NCCL says what is wrong in its last line, gloo in its first.
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        interface = os.environ.get("GLOO_SOCKET_IFNAME", "chosen by gloo")
        reason, how = (_first_line(error), f" (interface {interface})") if name == "gloo" else ((lines or [""])[-1], "")
        hint = next((hint for words, hint in _HINTS.items() if words in str(error)), side_channel.OTHER_INTERFACE)
        what = (
            f"rank {ranks.rank} on {platform.node()} could not form a {name} group of {ranks.size} ranks{how}: {reason}"
        )
        raise kind(what, hint) from None


_HINTS = {
    "Duplicate GPU": "NCCL takes one rank on a GPU; start as many ranks as GPUs, or --share-gpu --transport gloo",
    "driver": "the driver is older than the CUDA of this torch; `nvidia-smi` and python -m domainpar.doctor tell both",
    "invalid usage": "NCCL_DEBUG=WARN in the environment says more",
}
"""What to do about words of NCCL."""


def _first_here(store: Store) -> bool:
    """Whether this rank is, as far as it can see, the first of its host to report that there is no group."""
    with suppress(RuntimeError):  # rank 0 has left
        return store.add(f"no group/{platform.node()}", 1) == 1
    return True


def _first_line(error: BaseException) -> str:
    return str(error).split("\n", 1)[0]
