"""A GPU for each rank. Ranks identify GPUs by UUID, because each process may number the visible ones differently.

Some launchers show every rank all GPUs of a machine. Others show each rank one, which it calls number 0. So the ranks
exchange which GPUs they see, and all compute the same assignment.
"""

from __future__ import annotations

import os
import platform
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import psutil
import torch
import torch.utils.deterministic

from domainpar.common import limits
from domainpar.common.agreement import Gathering, Ranks, difference, gather, name_ranks
from domainpar.common.problems import Problem
from domainpar.common.words import several
from domainpar.parallel.rank_status import write_error

SHARING, HOST_OF_NCCL = "NCCL_MULTI_RANK_GPU_ENABLE", "NCCL_HOSTID"
"""Environment variables with which NCCL takes several ranks on one GPU, for tests: 1, or another host for each."""

ALONE = Gathering()


class VisibleGpus(NamedTuple):
    """The GPUs that one rank sees, in its own order."""

    host: str
    uuids: list[str]  # identifier of each
    may_share: bool = False  # whether its environment lets NCCL use one for several ranks
    nccl_host: str = ""  # NCCL_HOSTID; empty where NCCL identifies the machine itself
    why: str = ""  # why torch does not see more, in its own words

    @classmethod
    def here(cls) -> VisibleGpus:
        """Those of this process."""
        (found, why), environ = cards(), os.environ
        uuids, may_share = [str(card.uuid) for card in found], environ.get(SHARING) == "1"
        return cls(platform.node(), uuids, may_share, environ.get(HOST_OF_NCCL, ""), why)


class DeviceChoice(NamedTuple):
    """The device of this rank, and whether ranks share one, which NCCL refuses."""

    device: torch.device
    shared: bool = False


def cards() -> tuple[list[Any], str]:
    """The properties of the GPUs that this process can use, and why torch does not see more, in its own words."""
    found: list[Any] = []
    try:
        # torch counts also what CUDA cannot use: cards under an older driver, all of one that is cut into several.
        for index in range(torch.cuda.device_count()):
            found.append(torch.cuda.get_device_properties(index))
    except (RuntimeError, AssertionError) as error:
        return found, str(error).split("\n", 1)[0]
    return found, ""


def uuid_of(device: torch.device) -> str:
    """The identifier of a GPU: ranks may number GPUs differently."""
    return str(torch.cuda.get_device_properties(device).uuid)


def seen_by(ranks: Ranks) -> list[VisibleGpus]:
    """The GPUs that each rank sees. *Collective*."""
    return [VisibleGpus(*one) for one in gather(ranks, VisibleGpus.here())]


def dealt(seen: Sequence[VisibleGpus]) -> list[int | None]:
    """Number of the GPU of each rank, in the rank's own order; None for a rank to which none is left."""
    taken: set[str] = set()
    own: list[int | None] = [None] * len(seen)
    # Ranks that see few GPUs choose first: others may have further ones.
    for rank in sorted(range(len(seen)), key=lambda rank: (len(seen[rank].uuids), rank)):
        free = [i for i, uuid in enumerate(seen[rank].uuids) if uuid not in taken]
        if free:
            own[rank] = free[0]
            taken.add(seen[rank].uuids[free[0]])
    return own


def choose_device(device: str, may_share: bool, ranks: Ranks = ALONE) -> DeviceChoice:
    """The device of this rank, made the current one if it is a GPU. *Collective*, but for `cpu`.

    Args:
        device: `cpu`; `cuda`; or `auto`, for a GPU each if there are as many, else `cpu`: with a note where there are
            some.
        may_share: Whether several ranks may use one GPU.
        ranks: All that compute.

    Raises:
        Problem: On all ranks alike, if some rank has no GPU.
    """
    if device not in ("cuda", "auto"):
        return DeviceChoice(torch.device(device))
    seen = seen_by(ranks)
    own = dealt(seen)
    without = [other for other, index in enumerate(own) if index is None]
    problem = _problem([other for other in without if not (may_share and seen[other].uuids)], seen)
    if problem is not None and device == "cuda":
        raise Problem(f"--device cuda but {problem.what}", problem.hint)
    if problem is not None:
        if ranks.rank == 0 and any(one.uuids or one.why for one in seen):
            write_error(f"note: computing on CPUs: {problem.what}\n      {problem.hint}\n")
        return DeviceChoice(torch.device("cpu"))
    users = Counter(seen[other].uuids[index] for other, index in enumerate(own) if index is not None)
    for other in without:
        fewest = min(seen[other].uuids, key=lambda uuid: users[uuid])
        own[other] = seen[other].uuids.index(fewest)
        users[fewest] += 1
    as_nccl_sees = Counter((one.nccl_host, one.uuids[index or 0]) for one, index in zip(seen, own, strict=True))
    mine = own[ranks.rank]
    assert mine is not None, "else it was refused"
    chosen = torch.device("cuda", mine)
    torch.cuda.set_device(chosen)
    return DeviceChoice(chosen, shared=max(as_nccl_sees.values()) > 1 and not all(one.may_share for one in seen))


def _problem(without: Sequence[int], seen: Sequence[VisibleGpus]) -> Problem | None:
    """The problem of ranks without a GPU, if there are any."""
    if not without:
        return None
    blind = [rank for rank in without if not seen[rank].uuids]
    if blind:
        why = seen[blind[0]].why
        return Problem(
            f"torch sees no GPU for {name_ranks(blind)} (host {seen[blind[0]].host})" + (f": {why}" if why else ""),
            "use --device cpu, or check CUDA_VISIBLE_DEVICES; a torch built for CPU sees none",
        )
    host = seen[without[0]].host
    uuids = {uuid for one in seen if one.host == host for uuid in one.uuids}
    ranks = sum(one.host == host for one in seen)
    return Problem(
        f"{name_ranks(without)} would have no GPU alone: host {host} shows {several(len(uuids), 'GPU')} to "
        f"{several(ranks, 'rank')}" + (f" ({seen[without[0]].why})" if seen[without[0]].why else ""),
        f"start {several(len(uuids), 'rank')} there, or share GPUs with --share-gpu, over mpi or gloo",
    )


def repeat_bits(device: torch.device) -> None:
    """Have torch's kernels on a GPU give the same bits twice, as far as they can: networks of users add by atomics."""
    if device.type == "cuda":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when cuBLAS is first used
        torch.use_deterministic_algorithms(True, warn_only=True)
        # Products in three digits would be other than those of a CPU, or of a part of another size, by 1e-3.
        cudnn: Any = torch.backends.cudnn
        cudnn.conv.fp32_precision = cudnn.rnn.fp32_precision = "ieee"
        torch.set_float32_matmul_precision("highest")
        # Else each new tensor is filled, for nothing.
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def mixed_kinds(ranks: Ranks, device: torch.device) -> Problem | None:
    """The problem of ranks on different kinds of GPUs, whose arithmetic differs in last bits. *Collective*."""
    kind = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    hint = (
        "the optimiser may differ in last bits: take GPUs of one kind, or --check-replicas-every 0 to go on without "
        "comparing ranks"
    )
    return difference(ranks, {"the device that computes": kind}, hint)


def free_memory(device: torch.device) -> tuple[str, int]:
    """The memory that a rank on some device computes in, and how many bytes nobody uses there."""
    if device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
        return f"GPU {index} of {platform.node()}", torch.cuda.mem_get_info(device)[0]
    return platform.node(), int(min(psutil.virtual_memory().available, limits.memory().free))
