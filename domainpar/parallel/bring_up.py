"""How the ranks of a world find each other: from a launcher, or from a group that a program already has."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any, get_args

import torch

from domainpar.parallel import launcher as launchers
from domainpar.parallel import side_channel
from domainpar.parallel.launcher import Launcher
from domainpar.parallel.side_channel import FailureWatch, StoreMarks
from domainpar.parallel.transport import Transport
from domainpar.parallel.world import Refused, TransportName, World, checked_domain_size

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store
    from torch.distributed import ProcessGroup

    Connect = Callable[[], Store]


def bring_up(transport: TransportName, device: str, domain_size: int | None, deadline: float) -> World:
    """Build the world of `World.launch`, which see; *collective*."""
    if transport not in get_args(TransportName):
        raise ValueError(f"unknown --transport {transport!r}; known are {', '.join(get_args(TransportName))}.")
    launcher = launchers.detect()
    here = choose_device(device, transport, launcher)
    if launcher.size is not None:
        checked_domain_size(domain_size, launcher.size)
    if launcher.kind == "none":
        return World.alone(here)
    comm = join_mpi(transport, launcher)
    name = choose_transport(transport, here, has_mpi=comm is not None)
    if comm is None:
        return _without_mpi(name, launcher, here, domain_size, deadline)
    return _with_mpi(name, comm, here, domain_size, deadline)


def world_of_group(group: ProcessGroup | None, device: torch.device, domain_size: int | None, deadline: float) -> World:
    """Build the world of `World.from_process_group`, which see; *collective*."""
    transport = _group_transport(group, device, deadline)
    checked_domain_size(domain_size, transport.size)
    shared = side_channel.share_store(transport)
    return World.over(transport, device, domain_size, shared[0] if shared else None)


def choose_transport(transport: TransportName, device: torch.device, has_mpi: bool) -> str:
    """What `auto` means here.

    Raises:
        ValueError: If NCCL is asked for without a GPU.
    """
    if transport == "nccl" and device.type != "cuda":
        raise ValueError("--transport nccl works between GPUs; add --device cuda, or use mpi or gloo.")
    if transport != "auto":
        return transport
    if device.type == "cuda":
        return "nccl"
    return "mpi" if has_mpi else "gloo"


def choose_device(device: str, transport: TransportName, launcher: Launcher) -> torch.device:
    """The device of this rank, made the current one if it is a GPU.

    Raises:
        ValueError: If there is no GPU for it.
    """
    num_gpus = torch.cuda.device_count() if device != "cpu" else 0
    if device == "auto":
        device = "cuda" if num_gpus else "cpu"
    if device != "cuda":
        return torch.device(device)
    if num_gpus == 0:
        raise ValueError("--device cuda but torch sees no GPU here; use --device cpu, or check CUDA_VISIBLE_DEVICES.")
    if launcher.local_rank >= num_gpus and transport in ("auto", "nccl"):
        raise ValueError(
            f"local rank {launcher.local_rank} has no GPU of its own among {num_gpus}, which NCCL needs; start "
            f"{num_gpus} ranks on this machine, or share GPUs with --transport mpi or gloo."
        )
    chosen = torch.device("cuda", launcher.local_rank % num_gpus)
    torch.cuda.set_device(chosen)
    return chosen


def join_mpi(transport: TransportName, launcher: Launcher) -> Any | None:
    """mpi4py's COMM_WORLD under an MPI launcher; None where MPI is not wanted or, under srun, does not work.

    Raises:
        Refused: If MPI is wanted and does not work here.
    """
    if not launcher.has_pmi:
        if transport == "mpi":
            raise Refused(f"{launcher.command} does not start MPI processes; {_how_to_start_mpi(launcher)}.")
        return None
    if transport in ("gloo", "nccl") and "MASTER_ADDR" in os.environ:
        return None
    comm, problem = _mpi_world(launcher)
    if problem is None or (launcher.kind == "srun" and transport != "mpi"):
        return comm
    raise Refused(problem)


def _mpi_world(launcher: Launcher) -> tuple[Any | None, str | None]:
    """COMM_WORLD, or what is wrong with it."""
    from domainpar.parallel.mpi import import_mpi, library_of, start_mpi

    started = f"{launcher.command} started {launcher.size or 'several'} processes ({_seen_in(launcher)})"
    advice = (
        "they belong to different MPI libraries. Use the mpiexec of that library, or name the library of this mpiexec "
        "in MPI4PY_LIBMPI (the path of its libmpi.so), or start with torchrun."
    )
    try:
        mpi = import_mpi()
    except (ImportError, RuntimeError) as error:
        return None, (
            f"{started} but mpi4py does not work here: {error}. Install it (pip install 'domainpar[mpi]', or "
            "'domainpar[site-mpi]' for the MPI of your cluster), or start with torchrun."
        )
    library = library_of(mpi)
    # MPICH ends the process when it is started by Open MPI's mpiexec; Open MPI only sees one rank the other way round.
    if launcher.kind == "openmpi" and any(name in library for name in ("MPICH", "Intel", "MVAPICH")):
        return None, f"{started}, it is Open MPI's, but mpi4py uses {library}: {advice}"
    comm = start_mpi(mpi)
    if launcher.size is not None and comm.Get_size() != launcher.size:
        return None, f"{started} but mpi4py ({library}) sees {comm.Get_size()}: {advice}"
    return comm, None


def _with_mpi(name: str, comm: Any, device: torch.device, domain_size: int | None, deadline: float) -> World:
    from domainpar.parallel.mpi import MpiTransport

    by_mpi = MpiTransport(comm.Dup(), deadline)
    checked_domain_size(domain_size, by_mpi.size)
    shared = side_channel.share_store(by_mpi)
    if name == "mpi":
        return World.over(by_mpi, device, domain_size, shared[0] if shared else None)
    if shared is None:
        raise Refused("not all ranks can open a connection to the host of rank 0; gloo and NCCL need one.")
    return _of_store(name, *shared, by_mpi.rank, by_mpi.size, device, domain_size, deadline)


def _without_mpi(
    name: str, launcher: Launcher, device: torch.device, domain_size: int | None, deadline: float
) -> World:
    assert launcher.size is not None, "only PMIx leaves the size to MPI"
    host, port = launchers.address(launcher)
    # torchrun serves a store itself, and uses the same one again when it restarts the ranks.
    serves = launcher.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    prefix = f"domainpar/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"

    def connect(serves: bool = False) -> Store:
        return side_channel.prefixed(prefix, side_channel.connect(host, port, serves))

    try:
        store = connect(serves)
    except RuntimeError as error:
        meeting = f"rank {launcher.rank} could not meet the others at {host}:{port}"
        raise Refused(f"{meeting}: {_first_line(error)}") from None
    marks = StoreMarks(store, launcher.size, serves)
    return _of_store(name, marks, connect, launcher.rank, launcher.size, device, domain_size, deadline)


def _of_store(
    name: str,
    marks: StoreMarks,
    connect: Connect,
    rank: int,
    size: int,
    device: torch.device,
    domain_size: int | None,
    deadline: float,
) -> World:
    """Form a gloo or NCCL group of processes that share a store."""
    import torch.distributed as dist

    from domainpar.parallel.process_group import GRACE_SECONDS

    if dist.is_initialized():
        raise Refused("torch.distributed is in use by this program already; use World.from_process_group.")
    timeout = timedelta(seconds=deadline + GRACE_SECONDS)
    try:
        dist.init_process_group(
            name, store=side_channel.prefixed("group", marks.store), rank=rank, world_size=size, timeout=timeout
        )
    except RuntimeError as error:
        raise Refused(f"rank {rank} could not form a {name} group of {size} ranks: {_first_line(error)}") from None
    watch = FailureWatch(connect(), marks.serves)
    watch.start()
    transport = _group_transport(None, device, deadline, on_abort=marks.announce_failure, owned=True)
    transport.barrier()  # a rank that fails from here on is noticed by all
    world = World.over(transport, device, domain_size, marks)
    world.stop_watching = watch.stop
    return world


def _group_transport(
    group: ProcessGroup | None,
    device: torch.device,
    deadline: float,
    on_abort: Callable[[], None] | None = None,
    owned: bool = False,
) -> Transport:
    import torch.distributed as dist

    from domainpar.parallel.process_group import GlooTransport, NcclTransport

    backend = dist.get_backend(group)
    if backend == "nccl":
        if device.type != "cuda":
            raise ValueError(f"an NCCL group works between GPUs but the device is {device}; pass device='cuda:<n>'.")
        return NcclTransport(group, device, deadline, on_abort=on_abort, owned=owned)
    if backend == "gloo":
        return GlooTransport(group, "cpu", deadline, on_abort=on_abort, owned=owned)
    raise ValueError(f"the process group uses {backend!r}; only gloo and nccl groups are supported.")


def _how_to_start_mpi(launcher: Launcher) -> str:
    if launcher.kind == "srun":
        return "use srun --mpi=pmi2 or --mpi=pmix (whichever your MPI speaks), or --transport gloo"
    return "use mpiexec, or --transport gloo"


def _seen_in(launcher: Launcher) -> str:
    return launcher.size_variable if launcher.size is None else f"{launcher.size_variable}={launcher.size}"


def _first_line(error: BaseException) -> str:
    return str(error).split("\n", 1)[0]
