"""What the ranks of `scaling.py` do: training steps together, or one rank at a time. Processes import it by name."""

from __future__ import annotations

import os
import select
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import on_ranks
from torch import Tensor
from wire import Traffic

from domainpar.events.store import EventStore
from domainpar.parallel.transport import Pending, Transport
from domainpar.parallel.world import World
from domainpar.training.loop import Trainer
from domainpar.training.record import peak_rss_bytes
from domainpar.training.sampler import Sample, samples_of

Record = dict[str, Any]


def together(world: World, settings: on_ranks.StepSettings, small: Path) -> Record:
    """Training steps as users run them: what they took and held on this rank. *Collective*.

    Args:
        world: The ranks.
        settings: What to train.
        small: Store of a small event, as in `held_before`.
    """
    before = held_before(settings, small)
    trainer, samples = _trainer(world, settings)
    steps = []
    for step in range(settings.warmup + settings.repeats):
        world.transport.barrier()
        steps.append(_one_step(trainer, samples, step))
    return {**_record(trainer, samples[0], steps[settings.warmup :]), **before}


def in_turn(world: World, settings: on_ranks.StepSettings, small: Path, folder: Path) -> Record:
    """The same steps, one rank at a time while all others sleep. *Collective*.

    The part is loaded and planned together with the others; then they are mute, so that a step holds this rank's own
    work and nothing else. What it would have put on the wire is counted.

    Args:
        world: The ranks.
        settings: What to train.
        small: Store of a small event, as in `held_before`.
        folder: Empty, the same for all ranks: where they leave word whose turn it is.
    """
    before = held_before(settings, small)
    transport = MutedTransport(world.transport)
    trainer, samples = _trainer(World.over(transport, domain_size=world.size), settings)  # type: ignore[arg-type]
    trainer.loader.load(samples[0])
    open_turns(folder, world)
    transport.muted = True
    steps = []
    for turn in turns(folder, world, settings.warmup + settings.repeats):
        transport.traffic = Traffic()
        steps.append(_one_step(trainer, samples, turn))
    return {**_record(trainer, samples[0], steps[settings.warmup :]), **before, "traffic": transport.traffic}


def held_before(settings: on_ranks.StepSettings, small: Path) -> dict[str, int]:
    """Most bytes this process held before its part of the event, in two ways.

    `bare_rss`: Python, torch and MPI. `loaded_rss`: after one step of the same network on a small event by itself, when
    libraries and kernels that are loaded late are there too, the same on any number of ranks.
    """
    bare = peak_rss_bytes()
    trainer, samples = _trainer(World.alone(), replace(settings, store=small))
    trainer.step(samples, 0)
    return {"bare_rss": bare, "loaded_rss": peak_rss_bytes()}


def _trainer(world: World, settings: on_ranks.StepSettings) -> tuple[Trainer, list[Sample]]:
    samples = samples_of(EventStore(settings.store).events()[:1], None)
    return on_ranks.make_trainer(settings, world), samples


def _one_step(trainer: Trainer, samples: Sequence[Sample], step: int) -> dict[str, float]:
    cpu = time.process_time()
    record = trainer.step(samples, step)
    rank = trainer.world.rank
    own = {name: record[f"seconds_{name}"][rank] for name in ("compute", "exchange", "wait")}
    return {"seconds": record["seconds"], **own, "cpu": time.process_time() - cpu}


def _record(trainer: Trainer, sample: Sample, steps: Sequence[dict[str, float]]) -> Record:
    plan = trainer.loader.load(sample).graph.plan
    return {
        **{name: [step[name] for step in steps] for name in steps[0]},
        "owned_nodes": plan.num_owned,
        "ghosts": plan.num_ghosts,
        "owned_edges": int(plan.edge_owned.sum()),
        "local_edges": plan.num_edges,
        "peak_rss": peak_rss_bytes(),
    }


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
        with self._exchanging():
            receive.detach().zero_()
            neighbours = sum(bool(sent or received) for sent, received in zip(send_counts, receive_counts))
            self.traffic.exchanges.append((neighbours, max(send.nbytes, receive.nbytes)))
            self.bytes_sent += send.nbytes
        return _Arrived()

    def start_all_reduce(self, values: Tensor) -> Pending:
        if not self.muted:
            return self._transport.start_all_reduce(values)
        self.all_reduce(values)
        return _Arrived()

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

    @contextmanager
    def _exchanging(self) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self.seconds_exchanging += time.perf_counter() - began


@dataclass
class _Arrived:
    """An exchange that is over before it began."""

    def progress(self) -> None: ...

    def finish(self) -> None: ...


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
        for turn in range(count + 1):
            if not select.select([box], [], [], world.transport.deadline)[0]:
                raise TimeoutError(f"rank {world.rank} waited {world.transport.deadline:g} s for turn {turn}")
            os.read(box, 1)
            if turn < count:
                yield turn
            if turn < count or world.rank < world.size - 1:
                _pass_on(following)
    finally:
        os.close(box)


def _pass_on(following: Path) -> None:
    box = os.open(following, os.O_WRONLY)
    os.write(box, b".")
    os.close(box)


def _box(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank}"
