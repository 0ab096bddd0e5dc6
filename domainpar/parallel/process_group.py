"""Ranks as processes of a `torch.distributed` group: gloo on CPUs, NCCL on GPUs."""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, ClassVar, Self

import torch
import torch.distributed as dist
from torch import Tensor

from domainpar.common import timeouts
from domainpar.common.agreement import Ranks
from domainpar.parallel.proof import proved
from domainpar.parallel.side_channel import choose_interface
from domainpar.parallel.transport import Message, Posted, Reduction, Transport

_COMBINE = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}
NUM_CALLS, NUM_ROW_BYTES = 2**17, 2**13  # together a tag, below 2^30; more exchanges are never in flight


def form_group(
    device: torch.device,
    by_nccl: bool,
    store: Any,
    ranks: Ranks,
    towards: tuple[str, int],
    deadline: float,
    on_abort: Callable[[], None] | None = None,
) -> Transport:
    """Form the default group of processes that share a `torch.distributed` store, and prove it; *collective*.

    NCCL carries tables and sums between GPUs, gloo numbers of the host. The library's own time limit ends later than
    the deadline of our waits.

    Args:
        device: Where this rank computes.
        by_nccl: Whether NCCL carries what lies there.
        store, ranks, towards: The store where they meet; the ranks; host and port of rank 0.
        deadline, on_abort: As for `GlooTransport`.

    Raises:
        Refused: On all ranks alike, if the group cannot be right.
        RuntimeError: If they cannot reach each other.
    """
    choose_interface(ranks, towards)
    how: dict[str, Any] = {"backend": "gloo"}
    if by_nccl:
        # Given the device, NCCL connects the ranks here, and reports here why it cannot.
        how = {"backend": "cpu:gloo,cuda:nccl", "device_id": device}
    timeout = timedelta(seconds=deadline + timeouts.GRACE)
    dist.init_process_group(store=store, rank=ranks.rank, world_size=ranks.size, timeout=timeout, **how)
    return proved(wrap_group(None, device, deadline, on_abort, owned=True), device)


class GlooTransport(Transport):
    """A rank of a gloo group.

    gloo accepts a message that is too short without an error, and ends the process at one that is too long. So the
    plans of two ranks are compared before their first exchange.

    Args:
        group: The process group, None for the default one.
        device: Where its own buffers live, which carry numbers of the host.
        deadline: Seconds to wait for others.
        world_ranks: What the ranks of `group` are called in messages.
        on_abort: Called before `abort` ends this process, to inform the others.
        owned: Whether `close` should end the default group, which this is.
    """

    name: ClassVar[str] = "gloo"
    remedy: ClassVar[str] = (
        "--transport mpi, started by mpiexec, does without gloo; is the network between the hosts sound?"
    )

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        device: torch.device | str = "cpu",
        deadline: float = timeouts.FIRST_STEP,
        world_ranks: Sequence[int] | None = None,
        on_abort: Callable[[], None] | None = None,
        owned: bool = False,
    ) -> None:
        super().__init__(dist.get_rank(group), dist.get_world_size(group), deadline, world_ranks)
        self.library = f"torch {torch.__version__}"
        self._group = group
        self._device = torch.device(device)
        self._owned = owned
        self.on_abort = on_abort

    def abort(self, code: int) -> None:
        """Inform the others, then end this process. Does not return."""
        if self.on_abort is not None:
            self.on_abort()
        os._exit(code)

    def close(self) -> None:
        """End the process group, if it was made for this transport; groups split from it end with it.

        All ranks must have met by other means: one that closes its connections while another still reads its last
        message can cost it that message.
        """
        if self._owned:
            dist.destroy_process_group()

    def _post_reduction(self, values: Tensor, op: Reduction, call: int) -> Posted:
        work = dist.all_reduce(values, _COMBINE[op], self._group, async_op=True)

        def finish() -> None:  # a sum does not show which ranks are missing
            if not self._is_over(work, time.monotonic() + self.deadline):
                self.raise_timeout()

        return Posted(finish)

    def _split(self, number: int, members: list[int], world_ranks: list[int], call: int) -> Transport:
        return type(self)(*self._new_group(members), world_ranks, self.on_abort)

    def _new_group(self, members: list[int]) -> tuple[Any, torch.device, float]:
        """The first arguments of a transport over some ranks of this one: their group, *collective* over them."""
        ranks = [member if self._group is None else dist.get_global_rank(self._group, member) for member in members]
        timeout = timedelta(seconds=self.deadline + timeouts.GRACE)
        backends = dist.get_backend_config(self._group)
        everyone: Any = dist.group.WORLD
        device_of_all = everyone.bound_device_id
        if self.size < everyone.size():
            # Else torch would split the communicator of all processes, and wait for those outside this group.
            everyone.bound_device_id = None
        try:
            group = dist.new_group(ranks, timeout, backends, use_local_synchronization=True)
        finally:
            everyone.bound_device_id = device_of_all
        return group, self._device, self.deadline

    def _lost(self, error: RuntimeError, peer: int | None = None) -> RuntimeError:
        where = f"in {self.waiting_in}" if peer is None else f"to {self.name_ranks([peer])}"
        first_line = str(error).split("\n", 1)[0]
        seen = f"{self.name_ranks([self.rank])} lost the connection {where} ({self.name}): {first_line}"
        return self.missing(seen, [] if peer is None else [peer])

    def _post(self, outgoing: list[Message], incoming: list[Message], call: int) -> Posted:
        # gloo would accept rows of another type or width without an error, so a tag holds the bytes of a row, too.
        messages = outgoing or incoming
        row_bytes = messages[0].num_bytes // len(messages[0].rows) if messages else 0
        tag = call % NUM_CALLS * NUM_ROW_BYTES + row_bytes % NUM_ROW_BYTES
        how: dict[str, Any] = {"group": self._group, "tag": tag}
        receives = [(m.peer, dist.irecv(m.as_bytes(), group_src=m.peer, **how)) for m in incoming]
        sends = [(m.peer, dist.isend(m.as_bytes(), group_dst=m.peer, **how)) for m in outgoing]
        return Posted(partial(self._finish, receives, sends))

    def _finish(self, receives: list[tuple[int, Any]], sends: list[tuple[int, Any]]) -> None:
        give_up_at = time.monotonic() + self.deadline
        if silent := [peer for peer, work in receives if not self._is_over(work, give_up_at, peer)]:
            self.raise_timeout(silent)
        for peer, work in sends:
            if not self._is_over(work, give_up_at, peer):
                self.raise_timeout([], [peer])

    def _is_over(self, work: Any, give_up_at: float, peer: int | None = None) -> bool:
        # After a first timeout gloo closes all connections, but still delivers what had arrived before.
        remaining = max(give_up_at - time.monotonic(), 0.001)
        try:
            work.wait(timedelta(seconds=remaining))
        except RuntimeError as error:
            if any(words in str(error).lower() for words in ("timed out", "timeout")):
                return False
            raise self._lost(error, peer) from error
        return True


class NcclTransport(GlooTransport):
    """A rank of a group that joins GPUs by NCCL, one each, and their hosts by gloo.

    NCCL carries what lies on a GPU: `finish` makes the current CUDA stream wait, not the host, so compute may be queued
    behind it. A later wait for the stream waits for other ranks without a deadline, so this rank's watcher calls `late`
    repeatedly. gloo carries what lies on the host; in a user's group of NCCL alone it travels over the GPU.
    """

    name: ClassVar[str] = "nccl"
    remedy: ClassVar[str] = (
        "--transport gloo or mpi does without NCCL; NCCL_P2P_DISABLE=1 in the environment keeps it from copying "
        "straight between GPUs, which some settings of a machine (ACS, IOMMU) spoil"
    )
    takes_cuda: ClassVar[bool] = True

    def __init__(self, gpu: torch.device, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._gpu = gpu
        self._under_way: deque[_UnderWay] = deque()
        self._lock = threading.Lock()

    def connect(self) -> Self:
        """Connect the GPUs of the group, *collective*: messages between some of them cannot be its first call."""
        dist.all_reduce(torch.zeros(1, dtype=torch.int64, device=self._gpu), group=self._group)
        return self

    def _split(self, number: int, members: list[int], world_ranks: list[int], call: int) -> Transport:
        child = type(self)(self._gpu, *self._new_group(members), world_ranks, self.on_abort)
        return child.connect()

    def _wire_device(self, rows: Tensor) -> torch.device:
        return rows.device if rows.is_cuda else self._device

    def _post(self, outgoing: list[Message], incoming: list[Message], call: int) -> Posted:
        if not all(message.rows.is_cuda for message in outgoing + incoming):
            return super()._post(outgoing, incoming, call)
        # One batch: NCCL calls posted one by one would wait for each other. Bytes, as NCCL does not know every type.
        receives = [dist.P2POp(dist.irecv, m.as_bytes(), group=self._group, group_peer=m.peer) for m in incoming]
        sends = [dist.P2POp(dist.isend, m.as_bytes(), group=self._group, group_peer=m.peer) for m in outgoing]
        works = dist.batch_isend_irecv(receives + sends) if receives or sends else []
        return self._by_stream(works, "an exchange")

    def _post_reduction(self, values: Tensor, op: Reduction, call: int) -> Posted:
        if not values.is_cuda:
            return super()._post_reduction(values, op, call)
        work = dist.all_reduce(values, _COMBINE[op], self._group, async_op=True)
        return self._by_stream([work], "all_reduce")

    def _by_stream(self, works: list[Any], doing: str) -> Posted:
        with self._lock:
            posted = torch.cuda.Event()
            posted.record(torch.cuda.current_stream(self._gpu))
            self._under_way.append(_UnderWay(posted, doing, works))
            self._drop_done()

        def finish() -> None:
            try:
                for work in works:
                    work.wait()
            except RuntimeError as error:
                raise self._lost(error) from error

        return Posted(finish)

    def _drop_done(self) -> None:
        while self._under_way and all(_is_done(work) for work in self._under_way[0].works):
            self._under_way.popleft()

    def waits(self) -> tuple[float, str] | None:
        return super().waits() or self._oldest()

    def _oldest(self) -> tuple[float, str] | None:
        """Since when the stream waits, and for what; None if it does not."""
        # The watcher's thread calls this; without a device CUDA would make it a context on GPU 0, half a GiB.
        try:
            with torch.cuda.device(self._gpu), self._lock:
                self._drop_done()
                oldest = self._under_way[0] if self._under_way else None
                if oldest is None or not oldest.posted.query():
                    return None
        except RuntimeError:  # a broken GPU, which the rank's own thread will meet
            return None
        oldest.since = oldest.since or time.monotonic()
        return oldest.since, oldest.doing

    def late(self) -> str | None:
        group: Any = self._group or dist.group.WORLD
        # First: once a connection is lost, torch reports every call as over, while the GPU waits on.
        if group is not None and (error := group._get_backend(self._gpu).get_error().name) != "SUCCESS":
            return f"{self.name_ranks([self.rank])} lost the connection to another rank ({self.name}: {error})"
        oldest = self._oldest()
        if oldest is None or time.monotonic() - oldest[0] < self.deadline:
            return None
        return f"{self.name_ranks([self.rank])} has waited {self.deadline:g} s for {oldest[1]} ({self.name})"


def _is_done(work: Any) -> bool:
    """Whether a call is over; False if a broken GPU does not answer, which the rank's own thread will meet."""
    try:
        return bool(work.is_completed())
    except RuntimeError:
        return False


@dataclass
class _UnderWay:
    """Calls that a stream waits for."""

    posted: torch.cuda.Event  # when the stream has come to them; the host queues work long before
    doing: str
    works: list[Any]
    since: float | None = None  # when it was first seen to have come to them, on the monotonic clock


def wrap_group(
    group: dist.ProcessGroup | None,
    device: torch.device,
    deadline: float,
    on_abort: Callable[[], None] | None = None,
    owned: bool = False,
) -> Transport:
    """The transport over a process group; None for the default one.

    Raises:
        ValueError: If there is no such group, or it is neither gloo nor NCCL between GPUs.
    """
    if group is None and not dist.is_initialized():
        raise ValueError(
            "this program has no torch.distributed group; write `with World.session() as world:` or World.launch(), "
            "which join what a launcher started, World.alone() for one rank, or call init_process_group before."
        )
    # A group may have a backend for each kind of device: `cpu:gloo,cuda:nccl`.
    backends = dict(pair.split(":", 1) for pair in str(dist.get_backend_config(group)).split(","))
    if device.type == "cuda" and backends.get("cuda") == "nccl":
        torch.cuda.set_device(device)  # torch's messages take the current one, whatever their tensors lie on
        own_buffers = "cpu" if backends.get("cpu") == "gloo" else device
        return NcclTransport(device, group, own_buffers, deadline, on_abort=on_abort, owned=owned).connect()
    if backends.get("cpu") == "gloo":
        return GlooTransport(group, "cpu", deadline, on_abort=on_abort, owned=owned)
    if backends.get("cuda") == "nccl":
        raise ValueError(f"an NCCL group works between GPUs but the device is {device}; pass device='cuda:<n>'.")
    raise ValueError(f"the process group uses {backends}; only gloo and nccl groups are supported.")
