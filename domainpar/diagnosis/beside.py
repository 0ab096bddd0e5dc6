"""Other transports between the ranks of a world, to compare with the one it has."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import torch

from domainpar.diagnosis.machine import nccl_version
from domainpar.diagnosis.verdicts import Finding, failed, skipped
from domainpar.parallel import process_group, side_channel
from domainpar.parallel.launcher import Launcher
from domainpar.parallel.transport import Transport
from domainpar.parallel.world import World

CLUSTER_TRANSPORTS = ("mpi", "gloo", "nccl")


def missing(name: str, world: World, launcher: Launcher, local_ranks: int) -> str | None:
    """Why another transport cannot be had beside this world, in words, the same on every rank. *Collective*."""
    why = _missing_here(name, world, launcher, local_ranks) or ""
    found = [text.decode() for text in world.transport.all_gather(why.encode())]
    return next((text for text in found if text), None)


def _missing_here(name: str, world: World, launcher: Launcher, local_ranks: int) -> str | None:
    own = world.transport.name
    if world.size == 1 or own == "threads":
        return "these ranks are not processes that a launcher started"
    if name == "mpi":
        return None if _mpi_of(world) else f"{launcher.command} has started no MPI processes here"
    if name == "nccl" and (nccl_version() is None or torch.cuda.device_count() < local_ranks):
        return "it needs torch with NCCL and a GPU for each rank of a machine"
    if own != "mpi":
        advice = "--device cuda --transport nccl" if name == "nccl" else f"--transport {name}"
        return f"torch.distributed is in use by {own} already; start once more with {advice}"
    return None


def _mpi_of(world: World) -> Any | None:
    """The MPI module if it has been started for exactly these ranks."""
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is None or not mpi.Is_initialized() or mpi.COMM_WORLD.Get_size() != world.size:
        return None
    return mpi


@dataclass(frozen=True)
class Second:
    """Another transport between the ranks of a world.

    Attributes:
        transport: Joins all of them.
        device: Where its rows lie.
        keep: What must live as long: the store by which the ranks met.
    """

    transport: Transport
    device: torch.device
    keep: Any = None

    def close(self, world: World) -> None:
        """Meet by other means, then end it; *collective*."""
        world.transport.barrier()
        self.transport.close()


def form(name: str, world: World, launcher: Launcher) -> Second | str:
    """Another transport between the same ranks, or why that failed; `missing` has said None. *Collective*."""
    formed, why = None, ""
    try:
        formed = _by_mpi(world) if name == "mpi" else _by_torch(name, world, launcher)
    except RuntimeError as error:
        why = str(error).split("\n", 1)[0]
    texts = [text.decode() for text in world.transport.all_gather(why.encode())]
    found = [f"rank {rank}: {text}" for rank, text in enumerate(texts) if text]
    return "; ".join(found) if found or formed is None else formed


def _by_mpi(world: World) -> Second:
    from domainpar.parallel.mpi import MpiTransport

    comm = sys.modules["mpi4py.MPI"].COMM_WORLD.Dup()
    return Second(MpiTransport(comm, world.transport.deadline), torch.device("cpu"))


def _by_torch(name: str, world: World, launcher: Launcher) -> Second:
    """A process group of torch, met by a store on rank 0.

    Raises:
        RuntimeError: If the ranks cannot meet.
    """
    shared = side_channel.share_store(world.transport)
    if shared is None:
        raise RuntimeError("not all ranks can open a connection to the host of rank 0")
    store, deadline = side_channel.prefixed("beside", shared.store), world.transport.deadline
    side_channel.choose_interface(store, world.rank, world.size, (shared.hosts[0], 1))
    device = torch.device("cuda", launcher.local_rank) if name == "nccl" else torch.device("cpu")
    process_group.form_group(name, store, world.rank, world.size, deadline)
    if name == "nccl":
        torch.cuda.set_device(device)
        return Second(process_group.NcclTransport(None, device, deadline, owned=True), device, shared)
    return Second(process_group.GlooTransport(None, device, deadline, owned=True), device, shared)


def not_measured(name: str, why: str) -> Finding:
    """The row of a transport that cannot be had."""
    return skipped(f"transport {name}", why)


def not_formed(name: str, why: str) -> Finding:
    """The row of a transport that should work and does not."""
    advice = "set GLOO_SOCKET_IFNAME (NCCL_SOCKET_IFNAME) to the interface that reaches the other hosts"
    return failed(f"transport {name}", f"the ranks could not form a group: {why}", advice)
