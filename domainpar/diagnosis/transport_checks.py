"""Checks of transports between ranks and of the halo on them: whether rows arrive, and how fast."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from domainpar.common.agreement import Refused, gather
from domainpar.diagnosis.finding import Finding, failed, skipped, works
from domainpar.diagnosis.machine_checks import nccl_version
from domainpar.measure.rates import MEBIBYTE, SIZES, transport_rates
from domainpar.measure.ring import parts_of_ring, ring_edges
from domainpar.nn.interaction import InteractionNetwork
from domainpar.nn.selftest import rows_are_independent
from domainpar.parallel import side_channel
from domainpar.parallel.gpus import VisibleGpus, dealt
from domainpar.parallel.halo import Halo, ask_owners
from domainpar.parallel.launcher import Launcher
from domainpar.parallel.mpi import MpiTransport
from domainpar.parallel.process_group import form_group
from domainpar.parallel.proof import proved
from domainpar.parallel.transport import Transport
from domainpar.parallel.world import World
from domainpar.plan import IntArray, build_plan, select_edges

NODES_OF_LAYER = 60  # of the graph of the halo
COLUMNS = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)
ADVICE = "put this table into an issue; another --transport may work meanwhile"

CLUSTER_TRANSPORTS = ("mpi", "gloo", "nccl")
SLOW_SECONDS = 1e-3  # for 8 bytes to a neighbour


def check_transports(
    world: World, launcher: Launcher, seen: Sequence[VisibleGpus], seconds: float
) -> Iterator[Finding]:
    """The transport of this world, then others between the same ranks. *Collective*."""
    if world.size == 1:
        return
    yield check_transport(world.transport, seconds, world.device)
    own_gpus = dealt(seen)
    for name in CLUSTER_TRANSPORTS:
        if name == world.transport.name:
            continue
        if why := missing(name, world, launcher, own_gpus):
            yield skipped(f"transport {name}", why)
            continue
        device = torch.device("cuda", own_gpus[world.rank] or 0) if name == "nccl" else torch.device("cpu")
        second = form(name, world, device)
        if isinstance(second, Finding):
            yield second
            continue
        world.rank_status.transports.append(second)  # so that this rank's watcher sees a deadline pass
        yield check_transport(second, seconds, device)
        world.rank_status.transports.remove(second)
        world.transport.barrier()  # no rank ends it while others still use it
        second.close()


def check_transport(transport: Transport, seconds: float, device: torch.device | str = "cpu") -> Finding:
    """Test a sum and messages from a device, and measure for some seconds. *Collective*."""
    check, device = f"transport {transport.name}", torch.device(device)
    if transport.size == 1:
        return skipped(
            check, "one rank alone has no other to exchange with", "start several: mpiexec -n 2 ..., torchrun ..."
        )
    try:
        figures = transport_rates(proved(transport, device), seconds, device)
    except Refused as refused:
        return failed(check, refused.what, refused.hint)
    rates = (
        f"{size // MEBIBYTE} MiB at {figures[f'bytes_per_second_{size // MEBIBYTE}_MiB'] / 1e9:.2f}" for size in SIZES
    )
    text = (
        f"{transport.size} ranks: 8 bytes to a neighbour in {1e6 * figures['latency_seconds']:.0f} us, "
        f"sum over all in {1e6 * figures['all_reduce_seconds']:.0f} us; rows of {', '.join(rates)} GB/s"
    )
    slow = "slow: do ranks share cores, or a slow interface (GLOO_SOCKET_IFNAME, FI_PROVIDER, UCX_NET_DEVICES)?"
    return works(check, text, slow if figures["latency_seconds"] > SLOW_SECONDS else "", **figures)


# --- another transport between the same ranks ------------------------------------------------------------------------


def missing(name: str, world: World, launcher: Launcher, own_gpus: Sequence[int | None]) -> str | None:
    """Why another transport is not possible beside this world, the same on every rank; None if it is. *Collective*."""
    own, reason = world.transport.name, None
    if world.size == 1 or own == "threads":
        reason = "these ranks are not processes that a launcher started"
    elif name == "mpi":
        mpi = sys.modules.get("mpi4py.MPI")
        if mpi is None or not mpi.Is_initialized() or mpi.COMM_WORLD.Get_size() != world.size:
            reason = f"{launcher.command} has started no MPI processes here"
    elif name == "nccl" and (nccl_version() is None or None in own_gpus):
        reason = "it needs torch with NCCL and a GPU for each rank"
    elif own != "mpi":
        advice = "--device cuda --transport nccl" if name == "nccl" else f"--transport {name}"
        reason = f"torch.distributed is in use by {own} already; start once more with {advice}"
    # One rank may lack what the others have: then none of them may begin to form a group.
    return next((reason for reason in gather(world.transport, reason) if reason), None)


def form(name: str, world: World, device: torch.device) -> Transport | Finding:
    """Another transport between the same ranks, or the row that says why that failed. *Collective*.

    `missing` must have returned None for it; `device`: where its rows lie.
    """
    second: Transport | None = None
    why, deadline = "", world.transport.deadline
    try:
        if name == "mpi":
            second = proved(MpiTransport(sys.modules["mpi4py.MPI"].COMM_WORLD.Dup(), deadline))
        elif (shared := side_channel.share_store(world.transport)) is None:
            why = "not all ranks can open a connection to the host of rank 0"
        else:
            if name == "nccl":
                torch.cuda.set_device(device)
            store, towards = side_channel.prefixed("beside", shared.store), (shared.hosts[0], 1)
            second = form_group(device, name == "nccl", store, world.transport, towards, deadline)
            second.board = shared  # which must live as long
    except (RuntimeError, Refused) as error:
        why = str(error).split("\n", 1)[0]
    reasons = [f"rank {rank}: {text}" for rank, text in enumerate(gather(world.transport, why)) if text]
    if second is not None and not reasons:
        return second
    text = f"the ranks could not form a group: {'; '.join(reasons)}"
    return failed(f"transport {name}", text, side_channel.OTHER_INTERFACE)


# --- the halo on top of it, and the kernels of a network --------------------------------------------------------------


def check_halo(world: World) -> list[Finding]:
    """Both verbs of the halo on a graph of which every rank owns a part. *Collective*."""
    nodes, rank = max(NODES_OF_LAYER, world.size), world.rank
    owner = parts_of_ring(nodes, world.size)
    edges = select_edges(ring_edges(nodes), owner, rank, "incident")
    plan = build_plan(edges, owner, rank, world.size, "incident", ask_owners(world.transport))
    halo = Halo(plan, world.transport)
    return [check_ghosts(halo), check_sums(halo)]


def check_ghosts(halo: Halo) -> Finding:
    """Global ids through the exchange itself, into memory full of NaN. *Collective*."""
    plan = halo.plan
    ghosts = torch.full((plan.num_ghosts, len(COLUMNS)), torch.nan, dtype=torch.float64)
    halo.fill_ghosts(_column(plan.owned_ids) * COLUMNS, ghosts)
    wrong_rows = (ghosts != _column(plan.ghost_ids) * COLUMNS).any(1)
    unfilled, wrong = int(ghosts.isnan().any(1).sum()), int(wrong_rows.sum())
    text = f"{plan.num_ghosts:,} ghosts of {plan.num_owned:,} nodes here"
    if not wrong:
        return works("halo: ghosts", f"{text}: all hold the row of their own node", ghosts=plan.num_ghosts)
    row = int(wrong_rows.nonzero()[0])
    text += f": {wrong} are wrong, {unfilled} of them never filled; the first should hold node "
    text += f"{int(plan.ghost_ids[row])} and holds {ghosts[row].tolist()}"
    return failed("halo: ghosts", text, ADVICE, wrong=wrong, unfilled=unfilled)


def _column(ids: IntArray) -> Tensor:
    return torch.as_tensor(ids, dtype=torch.float64).unsqueeze(1)


def check_sums(halo: Halo) -> Finding:
    """Sums of ghosts' rows come back to owners as the adjoint of the copy, in whole numbers. *Collective*."""
    plan = halo.plan
    owned = _column(plan.owned_ids) % 97 - COLUMNS
    ghosts = _column(plan.ghost_ids) * (plan.part + 2) % 89 + COLUMNS
    filled, sums = halo.fill_ghosts(owned), halo.sum_to_owners(ghosts)
    # Whole numbers far below 2^53, so that float64 adds them without rounding.
    spoilt = int((~filled.isfinite()).sum() + (~sums.isfinite()).sum())
    filling, summing = (int(product.nan_to_num().sum()) for product in (filled * ghosts, owned * sums))
    totals = torch.tensor([filling, summing, spoilt], dtype=torch.int64)
    halo.transport.all_reduce(totals)
    filling, summing, spoilt = totals.tolist()
    text = f"<fill x, y> = {filling}, <x, sum y> = {summing}" + (f", {spoilt} numbers not finite" if spoilt else "")
    if filling == summing and not spoilt:
        return works("halo: sums", f"{text}: adjoint, exactly", product=filling)
    return failed("halo: sums", f"{text}: the way back is not the adjoint of the way there", ADVICE)


def check_rows(world: World) -> Finding:
    """Whether a row's bits depend on the rows beside it, as compiled on this machine. *Collective*."""
    problem = rows_are_independent(InteractionNetwork(node_features=3, edge_features=4), world.transport)
    if problem is None:
        return works("rows", "a row's bits do not depend on the rows beside it, and all ranks compute the same")
    return failed("rows", problem, "results are right to rounding but not to the bit here: " + ADVICE)
