"""The ranks of `scaling.py`: training steps together, or one rank at a time while the others are mute."""

from __future__ import annotations

import os
import select
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from exchange import Traffic
from on_ranks import Job, sizes, training_steps
from torch import Tensor

from domainpar.parallel.transport import Pending, Transport
from domainpar.parallel.world import World
from domainpar.tracking.training.record import peak_rss_bytes

Record = dict[str, Any]


def together(world: World, job: Job, small: Path) -> Record:
    """Training steps as users run them: what they took and held on this rank. *Collective*.

    Args:
        world: The ranks.
        job: The steps.
        small: Store of a small event, as in `held_before`.
    """
    before = held_before(job, small)
    return {**training_steps(world, job), **before}


def in_turn(world: World, job: Job, small: Path, folder: Path) -> Record:
    """The same steps, one rank at a time while all others sleep. *Collective*.

    The part is loaded and planned together with the others; then they are mute, so that a step holds this rank's own
    work and nothing else. What it would have put on the wire is counted.

    Args:
        world: The ranks.
        job: The steps.
        small: Store of a small event, as in `held_before`.
        folder: Empty, the same for all ranks: where they leave word whose turn it is.
    """
    before = held_before(job, small)
    transport = MutedTransport(world.transport)
    trainer, samples = job.trainer(World.over(transport, domain_size=world.size))  # type: ignore[arg-type]
    trainer.loader.load(samples[0])
    open_turns(folder, world)
    transport.muted = True
    steps = []
    for turn in turns(folder, world, job.warmup + job.repeats):
        transport.traffic = Traffic()
        cpu = time.process_time()
        record = trainer.step(samples, turn)
        of_rank = {name: record[f"seconds_{name}"][world.rank] for name in ("compute", "exchange", "wait")}
        steps.append({"seconds": record["seconds"], **of_rank, "cpu": time.process_time() - cpu})
    figures = {name: [step[name] for step in steps[job.warmup :]] for name in steps[0]}
    return {**figures, **sizes(trainer, samples), "peak_rss": peak_rss_bytes(), **before, "traffic": transport.traffic}


def held_before(job: Job, small: Path) -> dict[str, int]:
    """Most bytes this process held before its part of the event, in two ways.

    `bare_rss`: Python, torch and MPI. `loaded_rss`: after one step of the same network on a small event by itself, when
    libraries and kernels that are loaded late are there too, the same on any number of ranks.
    """
    bare = peak_rss_bytes()
    trainer, samples = replace(job, store=small).trainer(World.alone())
    trainer.step(samples, 0)
    return {"bare_rss": bare, "loaded_rss": peak_rss_bytes()}


# --- nobody answers --------------------------------------------------------------------------------------------------


class MutedTransport:
    """Another transport until it is muted; from then on the other ranks neither hear nor say anything.

    Rows arrive as zeros at once, sums are this rank's own values, and every rank is taken to gather what this one does:
    all shapes stay as they are. Time spent here counts as exchanging, not as the rank's own work.

    Attributes:
        muted: Whether others are mute.
        traffic: What would have gone over the wire since it was last set.
    """

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self.muted = False
        self.traffic = Traffic()
        self.seconds_exchanging = self.seconds_waiting = 0.0
        self.bytes_sent = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def start(
        self, send: Tensor, send_counts: Sequence[int], receive: Tensor, receive_counts: Sequence[int]
    ) -> Pending:
        if not self.muted:
            return self._transport.start(send, send_counts, receive, receive_counts)
        began = time.perf_counter()
        receive.detach().zero_()
        neighbours = sum(bool(sent or received) for sent, received in zip(send_counts, receive_counts))
        self.traffic.exchanges.append((neighbours, max(send.nbytes, receive.nbytes)))
        self.bytes_sent += send.nbytes
        self.seconds_exchanging += time.perf_counter() - began
        return _Arrived(receive)

    def start_all_reduce(self, values: Tensor) -> Pending:
        if not self.muted:
            return self._transport.start_all_reduce(values)
        self.all_reduce(values)
        return _Arrived(values)

    def all_reduce(self, values: Tensor, *op: Any, **ops: Any) -> None:
        if not self.muted:
            self._transport.all_reduce(values, *op, **ops)
        else:
            self.traffic.reduced.append(values.nbytes)

    def all_gather(self, payload: bytes) -> list[bytes]:
        if not self.muted:
            return self._transport.all_gather(payload)
        self.traffic.gathered.append(len(payload))
        return [payload] * self._transport.size


@dataclass
class _Arrived:
    """An exchange that is over before it began."""

    rows: Tensor

    def progress(self) -> None: ...

    def finish(self) -> Tensor:
        return self.rows


# --- one at a time ---------------------------------------------------------------------------------------------------


def open_turns(folder: Path, world: World) -> None:
    """Make this rank's box, a named pipe; rank 0 finds the word in its own. *Collective*: nobody writes before."""
    os.mkfifo(_box(folder, world.rank))
    world.transport.barrier()


def turns(folder: Path, world: World, count: int) -> Iterator[int]:
    """Yield 0 to `count` - 1 whenever it is this rank's turn: all have their first turn, then all their second.

    Ranks that wait sleep in the kernel and take no time from the one at work. Ends only when all have had their turns.

    Raises:
        TimeoutError: If a turn does not come within the transport's deadline.
    """
    following = _box(folder, (world.rank + 1) % world.size)
    # Opened for writing as well, else opening would wait for a writer, and reading would end with the first one.
    box = os.open(_box(folder, world.rank), os.O_RDWR)
    try:
        if world.rank == 0:
            os.write(box, b".")
        # Once more than there is work: the last word is that all are done, and the last rank has none to tell.
        for turn in range(count + 1):
            if not select.select([box], [], [], world.transport.deadline)[0]:
                raise TimeoutError(f"rank {world.rank} waited {world.transport.deadline:g} s for turn {turn}")
            os.read(box, 1)
            if turn < count:
                yield turn
            if turn < count or world.rank < world.size - 1:
                with following.open("wb", buffering=0) as other:
                    other.write(b".")
    finally:
        os.close(box)


def _box(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank}"
