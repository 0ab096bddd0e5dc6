"""A profile of some steps: operations and phases of each rank, floating-point operations, and memory over time."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import torch
from torch.profiler import ProfilerActivity, profile, record_function

from domainpar.common.agreement import gather
from domainpar.common.atomic_files import PARTIAL, write_whole
from domainpar.nn.flops import counted
from domainpar.parallel.allocator import bytes_in_use
from domainpar.parallel.tables import bytes_of_tables
from domainpar.parallel.world import World
from domainpar.runs.own_files import PROFILE

MOST_OPERATIONS = 30
SECONDS_BETWEEN_SAMPLES = 0.005
MOST_SAMPLES = 1000
_OURS = {
    "_OnEdges": "edge stages, forward", "_OnEdgesBackward": "edge stages, backward",
    "_OnNodes": "node stages, forward", "_OnNodesBackward": "node stages, backward",
}  # fmt: skip


class Profile:
    """Profiles steps of a run: none of the first, in which kernels are compiled; the second counts operations.

    Then so many are timed, and each rank writes a trace, which `chrome://tracing` and ui.perfetto.dev show; rank 0 the
    summary of all of them.

    Args:
        steps: Steps to time.
    """

    def __init__(self, world: World, directory: Path, steps: int) -> None:
        self._world, self._folder, self._steps = world, directory / PROFILE.parent, steps
        self._done = 0  # steps of this run, or of its part since it was resumed
        self._flops = self._edges_counted = self._edges = 0
        self._seconds, self._inside = 0.0, False  # of the steps that are timed; whether one is under way
        self._phases: list[tuple[float, str]] = []
        self._memory: list[tuple[float, int]] = []
        self._span: Any = None
        self._activities = [ProfilerActivity.CPU, *[ProfilerActivity.CUDA] * (world.device.type == "cuda")]
        self._over = threading.Event()

    @contextmanager
    def step(self) -> Iterator[None]:
        """Around each step: what lies between steps, such as a validation, is left out."""
        number, self._done = self._done, self._done + 1
        if number == 1:
            with counted() as flops:
                yield
            self._flops = flops.total
            return
        if not 2 <= number < 2 + self._steps:
            yield
            return
        if number == 2:
            self._began = time.perf_counter()
            self._profile = profile(activities=self._activities)
            self._profile.start()
            self._sampler = threading.Thread(target=self._sample, name="memory of a profile", daemon=True)
            self._sampler.start()
        self._profile.toggle_collection_dynamic(True, self._activities)
        began, self._inside = time.perf_counter(), True
        yield
        self._end_phase()
        self._inside = False
        self._seconds += time.perf_counter() - began
        self._profile.toggle_collection_dynamic(False, self._activities)

    def add(self, record: Mapping[str, Any]) -> None:
        """Take the record of a step. *Collective* in the last one that is timed."""
        edges = record["local_edges"][self._world.rank]
        if self._done == 2:
            self._edges_counted = edges
        elif 2 < self._done <= 2 + self._steps:
            self._edges += edges
        if self._done == 2 + self._steps:
            self._write()

    def begins(self, phase: str) -> None:
        """A phase of a step begins, and the last one ends."""
        if self._inside:
            self._end_phase()
            self._phases.append((time.perf_counter() - self._began, phase))
            self._span = record_function(f"phase: {phase}")
            self._span.__enter__()

    def _end_phase(self) -> None:
        if self._span is not None:
            self._span.__exit__(None, None, None)
            self._span = None

    def _sample(self) -> None:
        """Note the bytes that this process uses: of its GPU, or of the host, where else those it holds."""
        while not self._over.wait(SECONDS_BETWEEN_SAMPLES):
            if self._inside:
                if self._world.device.type == "cuda":
                    held = torch.cuda.memory_allocated(self._world.device)
                elif (used := bytes_in_use()) is not None:
                    held = used + bytes_of_tables()
                else:
                    held = int(psutil.Process().memory_info().rss)
                self._memory.append((time.perf_counter() - self._began, held))

    def _write(self) -> None:
        """The trace of this rank, and the summary of all. *Collective*."""
        self._over.set()
        self._sampler.join()
        self._profile.stop()
        every = -(-len(self._memory) // MOST_SAMPLES) or 1
        # Of samples that are left out the largest is kept: a peak is what one looks for.
        memory = [max(self._memory[at : at + every], key=lambda it: it[1]) for at in range(0, len(self._memory), every)]
        self._folder.mkdir(parents=True, exist_ok=True)
        name = f"rank_{self._world.rank}.json"
        partial = self._folder / f"{PARTIAL}{name}"
        self._profile.export_chrome_trace(str(partial))
        partial.replace(self._folder / name)
        operations = sorted(_operations(self._profile, self._steps), key=lambda it: -it["seconds"])
        ours = {
            "seconds": self._seconds / self._steps,
            # The timed steps may have had other events: operations go with edges.
            "flops": self._flops * self._edges / self._steps / max(self._edges_counted, 1),
            "operations": operations[:MOST_OPERATIONS],
            "other_seconds": sum(it["seconds"] for it in operations[MOST_OPERATIONS:]),
            "memory": memory,
            "phases": self._phases,
        }
        ranks = gather(self._world.transport, ours)
        if self._world.is_root:
            content = {"steps": self._steps, "device": str(self._world.device.type), "ranks": ranks}
            write_whole(self._folder / PROFILE.name, (json.dumps(content, indent=1) + "\n").encode())


def _operations(profiled: Any, steps: int) -> Iterator[dict[str, Any]]:
    """Name, calls and own seconds of each operation, in a step on average."""
    averages = profiled.key_averages()
    # The time of a GPU's kernels is in their own rows, and once more in those of the host's calls that launched them.
    kernels = [of for of in averages if of.device_type.name != "CPU" and not of.is_user_annotation]
    for of in kernels or averages:
        seconds = (of.self_device_time_total if kernels else of.self_cpu_time_total) / 1e6 / steps
        if seconds > 0 and not of.key.startswith("phase: "):
            yield {"name": _OURS.get(of.key, of.key), "calls": of.count / steps, "seconds": seconds}
