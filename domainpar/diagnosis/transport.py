"""The transport between the ranks of a world and others that can be had between them: do rows arrive, how fast?"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from domainpar.diagnosis.finding import Finding, failed, of_all_ranks, passed, skipped, warned
from domainpar.diagnosis.machine import nccl_version
from domainpar.measure.rates import MEBIBYTE, SIZES, Ring, largest_of_ranks, transport_rates
from domainpar.parallel import process_group, side_channel
from domainpar.parallel.launcher import Launcher
from domainpar.parallel.transport import Transport
from domainpar.parallel.world import World

CLUSTER_TRANSPORTS = ("mpi", "gloo", "nccl")
SLOW_SECONDS = 1e-3


def check_transports(world: World, launcher: Launcher, local_ranks: int, seconds: float) -> Iterator[Finding]:
    """The transport of this world, then others between the same ranks. *Collective*."""
    yield check_transport(world.transport, seconds, world.device)
    for name in CLUSTER_TRANSPORTS:
        if name == world.transport.name:
            continue
        if why := missing(name, world, launcher, local_ranks):
            yield skipped(f"transport {name}", why)
            continue
        second = form(name, world, launcher)
        if isinstance(second, Finding):
            yield second
            continue
        yield check_transport(second.transport, seconds, second.device)
        world.transport.barrier()  # nobody ends it while others still use it
        second.transport.close()


def check_transport(transport: Transport, seconds: float, device: torch.device | str = "cpu") -> Finding:
    """Send rows round, look at what arrives, and measure. *Collective*.

    Args:
        transport: Joins the ranks.
        seconds: Time to take, about.
        device: Where rows lie.
    """
    check, device = f"transport {transport.name}", torch.device(device)
    if transport.size == 1:
        return skipped(check, "one rank alone has nobody to talk to", "start several: mpiexec -n 2 ..., torchrun ...")
    rings = [Ring.of(transport, num_rows, device) for num_rows in (1, MEBIBYTE // 8)]
    for ring in rings:
        ring.exchange()
    wrong = sum(ring.num_wrong() for ring in rings)
    if not largest_of_ranks(transport, wrong):
        return _speed(check, transport, transport_rates(transport, seconds, device))
    if not wrong:
        return failed(check, "what arrived here is right, but not on another rank", "see the rank that is named")
    return failed(
        check,
        f"{wrong:,} of {sum(len(ring.send) for ring in rings):,} rows from "
        f"{transport.name_ranks([rings[0].origin])} arrived changed",
        "use another --transport; look at the network and at the MPI library, and put this into an issue",
        wrong_rows=wrong,
    )


def _speed(check: str, transport: Transport, figures: dict[str, float]) -> Finding:
    rates = ", ".join(
        f"{size // MEBIBYTE} MiB at {figures[f'bytes_per_second_{size // MEBIBYTE}_MiB'] / 1e9:.2f}" for size in SIZES
    )
    text = (
        f"{transport.size} ranks: 8 bytes to a neighbour in {1e6 * figures['latency_seconds']:.0f} us, "
        f"sum over all in {1e6 * figures['all_reduce_seconds']:.0f} us; rows of {rates} GB/s"
    )
    if figures["latency_seconds"] <= SLOW_SECONDS:
        return passed(check, text, **figures)
    advice = "slow: do ranks share cores, or a slow interface (GLOO_SOCKET_IFNAME, FI_PROVIDER, UCX_NET_DEVICES)?"
    return warned(check, text, advice, **figures)


# --- another transport between the same ranks ------------------------------------------------------------------------


@dataclass(frozen=True)
class Second:
    """Another transport between the ranks of a world.

    Attributes:
        transport: Joins all of them.
        device: Where its rows lie.
        keep: The store by which the ranks met, which must live as long.
    """

    transport: Transport
    device: torch.device
    keep: Any = None


def missing(name: str, world: World, launcher: Launcher, local_ranks: int) -> str | None:
    """Why another transport cannot be had beside this world, the same on every rank; None if it can. *Collective*."""
    reasons: list[str | None] = of_all_ranks(_missing_here(name, world, launcher, local_ranks), world)
    return next((reason for reason in reasons if reason), None)


def _missing_here(name: str, world: World, launcher: Launcher, local_ranks: int) -> str | None:
    own = world.transport.name
    if world.size == 1 or own == "threads":
        return "these ranks are not processes that a launcher started"
    if name == "mpi":
        mpi = sys.modules.get("mpi4py.MPI")
        if mpi is not None and mpi.Is_initialized() and mpi.COMM_WORLD.Get_size() == world.size:
            return None
        return f"{launcher.command} has started no MPI processes here"
    if name == "nccl" and (nccl_version() is None or torch.cuda.device_count() < local_ranks):
        return "it needs torch with NCCL and a GPU for each rank of a machine"
    if own != "mpi":
        advice = "--device cuda --transport nccl" if name == "nccl" else f"--transport {name}"
        return f"torch.distributed is in use by {own} already; start once more with {advice}"
    return None


def form(name: str, world: World, launcher: Launcher) -> Second | Finding:
    """Another transport between the same ranks, or the row that says why that failed. *Collective*.

    `missing` must have returned None for it.
    """
    second, why = None, ""
    try:
        second = _by_mpi(world) if name == "mpi" else _by_torch(name, world, launcher)
    except RuntimeError as error:
        why = str(error).split("\n", 1)[0]
    reasons = [f"rank {rank}: {text}" for rank, text in enumerate(of_all_ranks(why, world)) if text]
    if second is not None and not reasons:
        return second
    return failed(
        f"transport {name}",
        f"the ranks could not form a group: {'; '.join(reasons)}",
        "set GLOO_SOCKET_IFNAME (NCCL_SOCKET_IFNAME) to the interface that reaches the other hosts",
    )


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
