"""How the ranks of a world find each other: from a launcher, or from a group that a program already has."""

from __future__ import annotations

import faulthandler
import os
import platform
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, get_args

import torch

from domainpar import faults
from domainpar.parallel import hosts, side_channel
from domainpar.parallel import launcher as launchers
from domainpar.parallel.failing import NobodyServes, Refused
from domainpar.parallel.launcher import Launcher
from domainpar.parallel.side_channel import StoreMarks
from domainpar.parallel.transport import Transport
from domainpar.parallel.watcher import Watcher
from domainpar.parallel.world import TransportName, World, checked_domain_size
from domainpar.problems import Problem

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store
    from torch.distributed import ProcessGroup

    Connect = Callable[[], Store]


def bring_up(
    transport: TransportName,
    device: str,
    domain_size: int | None,
    deadline: float,
    join_seconds: float,
    share_gpu: bool,
) -> World:
    """Build the world of `World.launch`, which see; *collective*."""
    if transport not in get_args(TransportName):
        raise ValueError(f"unknown --transport {transport!r}; known are {', '.join(get_args(TransportName))}.")
    launcher = launchers.detect()
    faults.arm(launcher.rank)
    faults.reach("init")
    here = choose_device(device, transport, launcher, share_gpu)
    if launcher.size is not None:
        checked_domain_size(domain_size, launcher.size)
    world = _join(transport, launcher, here, domain_size, deadline, join_seconds)
    faults.reach("joined")
    return world


def _join(
    transport: TransportName,
    launcher: Launcher,
    device: torch.device,
    domain_size: int | None,
    deadline: float,
    join_seconds: float,
) -> World:
    if launcher.kind == "none":
        return World.alone(device)
    comm = join_mpi(transport, launcher)
    name = choose_transport(transport, device, has_mpi=comm is not None)
    meeting = Meeting(name, device, domain_size, deadline)
    if comm is None:
        return _without_mpi(meeting, launcher, join_seconds)
    return _with_mpi(meeting, comm)


@dataclass(frozen=True)
class Meeting:
    """What ranks that can reach each other make of it.

    Attributes:
        transport: `mpi`, `gloo` or `nccl`.
        device: Where this rank computes.
        domain_size: Ranks that share one event; None: chosen by their number.
        deadline: Seconds that a rank may wait for the others.
    """

    transport: str
    device: torch.device
    domain_size: int | None
    deadline: float

    def world(self, transport: Transport, marks: StoreMarks | None, connect: Connect | None) -> World:
        """The world over a transport, watched where there is a store. *Collective*."""
        world = World.over(transport, self.device, self.domain_size, marks)
        if marks is not None and connect is not None:
            watcher = Watcher(connect(), world.rank, world.size, marks.serves, world.look)
            watcher.start()
            world.stop_watching = watcher.stop
        _report_what_nobody_catches(world)
        return world


def _report_what_nobody_catches(world: World) -> None:
    """End all ranks when this one ends by an error outside of `guard`, and say where a crash in C++ happened."""
    usual = sys.excepthook

    def hook(kind: Any, error: BaseException, trace: Any) -> None:
        if not issubclass(kind, Exception):
            usual(kind, error, trace)
            return
        world.fail(error)

    sys.excepthook = hook
    if not faulthandler.is_enabled() and sys.__stderr__ is not None:
        faulthandler.enable(sys.__stderr__)


def world_of_group(group: ProcessGroup | None, device: torch.device, domain_size: int | None, deadline: float) -> World:
    """Build the world of `World.from_process_group`, which see; *collective*."""
    import torch.distributed as dist

    if group is None and not dist.is_initialized():
        raise ValueError(
            "this program has no torch.distributed group; write `with World.session() as world:` or World.launch(), "
            "which join what a launcher started, World.alone() for one rank, or call init_process_group before."
        )
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


def choose_device(device: str, transport: TransportName, launcher: Launcher, share_gpu: bool = False) -> torch.device:
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
        raise Problem(
            f"--device cuda but torch sees no GPU for local rank {launcher.local_rank}",
            "use --device cpu, or check CUDA_VISIBLE_DEVICES; a torch built for CPU sees none",
        )
    if launcher.local_rank >= num_gpus and (transport in ("auto", "nccl") or not share_gpu):
        raise Problem(
            f"local rank {launcher.local_rank} has no GPU of its own: torch sees {num_gpus}",
            f"start {num_gpus} ranks on this machine, or share GPUs with --share-gpu and --transport mpi or gloo",
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
            raise Refused(f"{launcher.command} does not start MPI processes", _how_to_start_mpi(launcher))
        return None
    if transport in ("gloo", "nccl") and "MASTER_ADDR" in os.environ:
        return None
    comm, problem = _mpi_world(launcher)
    if problem is None or (launcher.kind == "srun" and transport != "mpi"):
        return comm
    raise problem


def _mpi_world(launcher: Launcher) -> tuple[Any | None, Refused | None]:
    """COMM_WORLD, or what is wrong with it."""
    from domainpar.parallel.mpi import import_mpi, library_of, start_mpi

    started = f"{launcher.command} started {launcher.size or 'several'} processes ({_seen_in(launcher)})"
    advice = (
        "they belong to different MPI libraries: use the mpiexec of that library, or name the library of this mpiexec "
        "in MPI4PY_LIBMPI (the path of its libmpi.so), or start with torchrun"
    )
    try:
        mpi = import_mpi()
    except (ImportError, RuntimeError) as error:
        what = "mpi4py does not work here" if isinstance(error, ImportError) else "no MPI library found"
        first_line = str(error).split("\n", 1)[0]
        return None, Refused(
            f"{started} but {what}: {first_line}",
            "pip install 'domainpar[mpi]' brings one; on a cluster load its MPI module, with 'domainpar[site-mpi]'; "
            "or start with torchrun",
        )
    library = library_of(mpi)
    # MPICH ends the process when it is started by Open MPI's mpiexec; Open MPI only sees one rank the other way round.
    if launcher.kind == "openmpi" and any(name in library for name in ("MPICH", "Intel", "MVAPICH")):
        return None, Refused(f"{started}, it is Open MPI's, but mpi4py uses {library}", advice)
    comm = start_mpi(mpi)
    if launcher.size is not None and comm.Get_size() != launcher.size:
        return None, Refused(f"{started} but mpi4py ({library}) sees {comm.Get_size()}", advice)
    return comm, None


def _with_mpi(meeting: Meeting, comm: Any) -> World:
    from domainpar.parallel.mpi import MpiTransport

    by_mpi = MpiTransport(comm.Dup(), meeting.deadline)
    checked_domain_size(meeting.domain_size, by_mpi.size)
    shared = side_channel.share_store(by_mpi)
    if meeting.transport == "mpi":
        return meeting.world(by_mpi, *(shared or (None, None)))
    if shared is None:
        raise Refused(
            "not all ranks can open a connection to the host of rank 0; gloo and NCCL need one",
            "check names and firewalls between the hosts, or take --transport mpi",
        )
    marks, connect = shared
    return _of_store(meeting, marks, connect, by_mpi.rank, by_mpi.size, (marks.hosts[0], 1))


def _without_mpi(meeting: Meeting, launcher: Launcher, join_seconds: float) -> World:
    assert launcher.size is not None, "only PMIx leaves the size to MPI"
    host, port = launchers.address(launcher)
    # torchrun serves a store itself, and uses the same one again when it restarts the ranks.
    serves = launcher.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    prefix = f"domainpar/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"

    def connect(serves: bool = False) -> Store:
        return side_channel.prefixed(prefix, side_channel.connect(host, port, serves, join_seconds))

    try:
        store = connect(serves)
    except RuntimeError as error:
        raise _cannot_meet(launcher, host, port, serves, join_seconds, error) from None
    names = _wait_for_all(store, launcher.rank, launcher.size, join_seconds)
    marks = StoreMarks(store, launcher.size, serves, names)
    return _of_store(meeting, marks, connect, launcher.rank, launcher.size, (host, port))


def _cannot_meet(
    launcher: Launcher, host: str, port: int, serves: bool, join_seconds: float, error: RuntimeError
) -> Refused:
    """Why rank 0 cannot serve the others, or this rank cannot reach it."""
    if serves and any(sign in str(error) for sign in ("EADDRINUSE", "address already in use")):
        return Refused(f"port {port} of {host} is taken", "set MASTER_PORT to a free port, or start with mpiexec")
    if "resolve" in str(error) or "getaddrinfo" in str(error) or "Name or service" in str(error):
        what = f"rank {launcher.rank} cannot resolve {host}, where rank 0 serves"
        return NobodyServes(what, "set MASTER_ADDR to an address that every host knows")
    return NobodyServes(
        f"rank {launcher.rank} of {launcher.size} could not meet rank 0 at {host}:{port} within {join_seconds:g} s: "
        + _first_line(error),
        "check that rank 0 was started, and MASTER_ADDR, MASTER_PORT and firewalls; --join-timeout waits longer",
    )


def _wait_for_all(store: Store, rank: int, size: int, seconds: float) -> list[str]:
    """Wait until every rank has come, *collective*; returns the host of each.

    Raises:
        Refused: If some did not come in time, naming them.
    """
    give_up_at = time.monotonic() + seconds
    absent = list(range(size))
    try:
        store.set(f"host/{rank}", platform.node())
        while absent and time.monotonic() < give_up_at:
            absent = [other for other in absent if not store.check([f"host/{other}"])]
            time.sleep(side_channel.MEETING_SECONDS if absent else 0.0)
        if not absent:
            return [store.get(f"host/{other}").decode() for other in range(size)]
    except RuntimeError as error:
        raise Refused(f"rank 0 left while the ranks met: {_first_line(error)}", "look at its output") from None
    here = [other for other in range(size) if other not in absent]
    raise Refused(
        f"rank{'' if len(absent) == 1 else 's'} {', '.join(map(str, absent))} did not join within {seconds:g} s; "
        f"joined: {', '.join(map(str, here))}",
        "look at the output of those that did not; --join-timeout waits longer",
    )


def _of_store(
    meeting: Meeting, marks: StoreMarks, connect: Connect, rank: int, size: int, towards: tuple[str, int]
) -> World:
    """Form a gloo or NCCL group of processes that share a store."""
    import torch.distributed as dist

    from domainpar.parallel.process_group import form_group

    if dist.is_initialized():
        raise Refused("torch.distributed is in use by this program already", "use World.from_process_group")
    choose_interface(marks.store, rank, size, towards)
    try:
        form_group(meeting.transport, side_channel.prefixed("group", marks.store), rank, size, meeting.deadline)
    except RuntimeError as error:
        interface = os.environ.get("GLOO_SOCKET_IFNAME", "chosen by gloo")
        raise Refused(
            f"rank {rank} on {platform.node()} could not form a {meeting.transport} group of {size} ranks (interface "
            f"{interface}): {_first_line(error)}",
            "set GLOO_SOCKET_IFNAME (NCCL_SOCKET_IFNAME) to the interface that reaches the other hosts; `ip address` "
            "lists them",
        ) from None
    transport = _group_transport(None, meeting.device, meeting.deadline, on_abort=marks.announce_failure, owned=True)
    world = meeting.world(transport, marks, connect)
    transport.barrier()  # a rank that fails from here on is noticed by all
    return world


def choose_interface(store: Store, rank: int, size: int, towards: tuple[str, int]) -> None:
    """Have gloo talk over the interface that leads to rank 0, or over the loopback where all ranks can. *Collective*.

    gloo itself looks up this machine's name, which may not resolve, or to an address that others cannot reach.
    """
    store.set(f"network/{rank}", hosts.network_here())
    alone = side_channel.share_network([store.get(f"network/{other}") for other in range(size)])
    loopback = "lo" if sys.platform == "linux" else None
    interface = loopback if alone else hosts.interface_towards(*towards)
    if interface is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)


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
