"""Ranks as MPI processes: mpi4py on numpy views of the buffers."""

from __future__ import annotations

import ctypes
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from domainpar.common import timeouts
from domainpar.common.limits import cores_here
from domainpar.parallel.transport import Message, Posted, Reduction, Transport

NO_COPY = "MPIR_CVAR_CH4_CMA_ENABLE=0"
"""MPICH's setting: large messages on a machine go through shared memory, not straight from the sender's memory."""

NUM_TAGS = 32_000  # MPI guarantees tags up to 32767; more exchanges than this are never in flight


def import_mpi() -> Any:
    """The `mpi4py.MPI` module, MPI not yet started unless the program has done so.

    Loading it may fail without a launcher, so it is done late, and only under one.

    Raises:
        ImportError: If mpi4py is missing.
        RuntimeError: If mpi4py finds no MPI library.
    """
    import mpi4py

    if "mpi4py.MPI" not in sys.modules:
        mpi4py.rc.initialize = False
        mpi4py.rc.finalize = True
    from mpi4py import MPI

    return MPI


def library_of(mpi: Any) -> str:
    """Name and version of the MPI library that mpi4py has loaded; can be called before MPI starts."""
    first_line = str(mpi.Get_library_version()).splitlines()[0].strip("\0")
    return " ".join(first_line.split(",")[0].split())


def knows_pmix(mpi: Any) -> bool:
    """Whether the MPI library is linked with PMIx, without which a derivative of MPICH cannot be started by it."""
    return any(hasattr(ctypes.CDLL(name), "PMIx_Init") for name in (mpi.__file__, None))


def start_mpi(mpi: Any) -> None:
    """Start MPI. A wrong library may end the process here."""
    # MPICH does not check whether the call was refused: its sums are then wrong, without an error. Not switched off
    # where it works: 16 MiB each way between two ranks took 1.8 ms with it and 6.4 ms without, 64 KiB 13 and 23 us.
    if not _reads_memory():
        os.environ.setdefault(*NO_COPY.split("="))
    mpi.Init_thread()


def _reads_memory() -> bool:
    """Whether the system lets processes read each other's memory by `process_vm_readv`, as far as one alone can tell.

    Sandboxes, containers and emulators may refuse the call (seccomp). This process asks for its own memory, to which
    it has every right.
    """
    call = getattr(ctypes.CDLL(None), "process_vm_readv", None) if sys.platform == "linux" else None
    if call is None:
        return False
    theirs, ours = ctypes.create_string_buffer(b"domainpar"), ctypes.create_string_buffer(len(b"domainpar") + 1)
    io_vec = ctypes.c_size_t * 2  # `struct iovec`: base, length
    blocks = [io_vec(ctypes.addressof(buffer), len(buffer)) for buffer in (ours, theirs)]
    call.restype = ctypes.c_ssize_t
    call.argtypes = [ctypes.c_int, *[ctypes.POINTER(ctypes.c_size_t), ctypes.c_ulong] * 2, ctypes.c_ulong]
    return bool(call(os.getpid(), blocks[0], 1, blocks[1], 1, 0) == len(ours) and ours.raw == theirs.raw)


class MpiTransport(Transport):
    """A rank that is an MPI process, with a communicator for this transport alone (`COMM_WORLD.Dup()`).

    MPI itself waits for ever, so every wait here polls with a deadline. Where ranks share cores, polling must not take
    the time of those that compute: a waiting rank naps. (`own_cores`: whether each rank of this machine has a core to
    itself; None: find out, *collective*.)
    """

    name: ClassVar[str] = "mpi"
    remedy: ClassVar[str] = (
        f"--transport gloo does without MPI; with MPICH, {NO_COPY} in the environment lets large messages pass through "
        "shared memory"
    )

    def __init__(
        self,
        comm: Any,
        deadline: float,
        world_ranks: Sequence[int] | None = None,
        own_cores: bool | None = None,
    ) -> None:
        super().__init__(comm.Get_rank(), comm.Get_size(), deadline, world_ranks)
        self._mpi = import_mpi()
        self.library = library_of(self._mpi)
        self._comm = comm
        self._status = self._mpi.Status()
        if own_cores is None:
            on_this_machine = comm.Split_type(self._mpi.COMM_TYPE_SHARED)
            own_cores = int(on_this_machine.Get_size()) <= len(cores_here())
            on_this_machine.Free()
        self._own_cores = own_cores
        self._unfinished: list[_MpiWait] = []  # MPI may write into their buffers, also if nobody waits any more

    def abort(self, code: int) -> None:
        """End the processes of the whole job. Does not return."""
        time.sleep(timeouts.FORWARDING)
        self._mpi.COMM_WORLD.Abort(code)
        os._exit(code)  # MPICH may return before it has killed us

    def close(self) -> None:
        """Meet, then free the communicator; *collective*."""
        self.barrier()
        self._comm.Free()

    def _post(self, outgoing: list[Message], incoming: list[Message], call: int) -> Posted:
        tag = call % NUM_TAGS
        byte = self._mpi.BYTE
        receives = [_Request(self._comm.Irecv([m.as_bytes().numpy(), byte], m.peer, tag), m, True) for m in incoming]
        sends = [_Request(self._comm.Isend([m.as_bytes().numpy(), byte], m.peer, tag), m) for m in outgoing]
        return _MpiWait(self, receives + sends).posted()

    def _post_reduction(self, values: Tensor, op: Reduction, call: int) -> Posted:
        combine = {"sum": self._mpi.SUM, "max": self._mpi.MAX, "min": self._mpi.MIN}[op]
        handle = self._comm.Iallreduce(self._mpi.IN_PLACE, [values.numpy(), self._mpi.INT64_T], combine)
        return _MpiWait(self, [_Request(handle, keep=values)]).posted()

    def _split(self, number: int, members: list[int], world_ranks: list[int], call: int) -> Transport:
        # Split itself waits without a deadline, so all ranks meet before.
        self._post_reduction(torch.zeros(1, dtype=torch.int64, device="cpu"), "sum", call).finish()
        comm = self._comm.Split(number, members.index(self.rank))
        return MpiTransport(comm, self.deadline, world_ranks, self._own_cores)

    def _is_complete(self, request: _Request) -> bool:
        """Test the request, which moves all messages on. Not after it was complete: MPI has freed it then."""
        status = self._status
        try:
            complete = bool(request.handle.Test(status))
        except self._mpi.Exception as error:
            raise RuntimeError(f"{self._describe(request)} failed: {error}") from error
        if complete and request.receives and request.message is not None:
            num_bytes = status.Get_count(self._mpi.BYTE)
            if num_bytes != request.message.num_bytes:
                raise RuntimeError(
                    f"{self._describe(request)} brought {num_bytes}; the plans of the two ranks do not belong together."
                )
        return complete

    def _describe(self, request: _Request) -> str:
        here = self.name_ranks([self.rank])
        if request.message is None:
            return f"a collective operation on {here}"
        there = self.name_ranks([request.message.peer])
        sender, receiver = (there, here) if request.receives else (here, there)
        return f"a message of {request.message.num_bytes} bytes from {sender} to {receiver}"


@dataclass
class _Request:
    """A posted operation, with the message it carries (None: it is a collective one)."""

    handle: Any
    message: Message | None = None
    receives: bool = False
    keep: Tensor | None = None  # mpi4py forgets buffers of some collective operations while MPI uses them


@dataclass(eq=False)
class _MpiWait:
    transport: MpiTransport
    requests: list[_Request]  # those not yet known to be complete
    failure: RuntimeError | None = None

    def posted(self) -> Posted:
        self.transport._unfinished.append(self)
        return Posted(self.finish, self.progress)

    def progress(self) -> None:
        try:
            # Testing one that is not complete moves all of them; the others need no test.
            while self.failure is None and self.requests and self.transport._is_complete(self.requests[0]):
                del self.requests[0]
        except RuntimeError as failure:
            self.failure = failure

    def finish(self) -> None:
        if self.failure is not None:
            raise self.failure
        transport, left = self.transport, self.requests
        spin, began = timeouts.SPIN if transport._own_cores else 0.0, time.perf_counter()
        while left := [request for request in left if not transport._is_complete(request)]:
            waited = time.perf_counter() - began
            if waited > transport.deadline:
                for request in left:
                    if request.receives:  # rows that come late must not be written into a buffer that is used again
                        request.handle.Cancel()
                silent = [request.message.peer for request in left if request.message and request.receives]
                owing = [request.message.peer for request in left if request.message and not request.receives]
                transport.raise_timeout(silent, owing)
            if waited >= spin:
                # A tenth of the time waited so far: short waits stay short, long ones cost no core.
                time.sleep(min(0.1 * waited, timeouts.LONGEST_NAP))
        transport._unfinished.remove(self)
