"""The record of a step: one JSON object a line in `metrics.jsonl`, and one line to read."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from domainpar.common.agreement import gather
from domainpar.common.atomic_files import write_whole
from domainpar.common.compiling import clock
from domainpar.measure.forecast import peak_rss_bytes
from domainpar.nn.heads import Readings
from domainpar.parallel.integer_sums import IntegerSums
from domainpar.parallel.world import World
from domainpar.tracking.training.edge_counting import EdgeMetrics
from domainpar.tracking.training.label_loss import LabelMetrics
from domainpar.tracking.training.metrics import AGAINST, EDGE_METRICS, LABEL_METRICS, EdgeCounts
from domainpar.tracking.training.parts import LabelledPart
from domainpar.tracking.training.tasks import Task


class StepTotals:
    """Sums over the parts of a step or an evaluation on this rank, and its seconds.

    They run from the making until `shared`; on a GPU until `read`, by the clock of its stream: the host is ahead of it.

    Attributes:
        loss: Weighted loss of owned edges; `edge_loss` adds to it.
        label_losses: That of each label; `label_loss` adds to it.
        metrics: Scores of owned edges.
        labels: Metrics of each label, by name.
        owned_nodes, ghost_nodes, local_edges: Sizes of all parts.
        seconds_load: Of loading them: of the first time, as parts are kept.
    """

    def __init__(self, world: World, tasks: Sequence[Task] = ()) -> None:
        self.loss, self.metrics = IntegerSums(1, world.device), EdgeMetrics(world.device)
        self.labels = {task.name: LabelMetrics(task) for task in tasks}
        self.label_losses = IntegerSums(len(tasks), world.device if tasks else "cpu")  # nothing on a GPU for nobody
        self.owned_nodes = self.ghost_nodes = self.local_edges = 0
        self.seconds_load = 0.0
        self._world = world
        world.take_counters()  # begins to count anew
        self._began = _Timestamp(world.device)
        self._ended: _Timestamp | None = None

    def add(self, part: LabelledPart, readings: Readings) -> None:
        """Count a part and the network's predictions for it."""
        plan, logits = part.graph.plan, readings.edges
        if logits is not None:
            logits = torch.atleast_2d(logits)[-1]  # scores are those of the last readout
            if logits.is_cuda:
                self.metrics.add_rows(logits.detach(), part.rows_by_class, part.num_not_scored)
            else:  # whose memory keeps no rows
                owned = plan.edge_owned
                self.metrics.add(logits.detach().numpy()[owned], part.classes[owned], part.num_not_scored)
        for name, metrics in self.labels.items():
            if metrics.task.label.of == "node" or part.halo.transport.rank == 0:  # one for those that share a graph
                output = readings.others[name].detach().reshape(-1, metrics.task.head.columns)
                metrics.add(output.double().cpu().numpy(), part.labels[name].cpu().numpy())
        self.owned_nodes += plan.num_owned
        self.ghost_nodes += plan.num_ghosts
        self.local_edges += len(plan.edge_ids)

    def rejected_now(self) -> Tensor:
        """Partials of losses so far that were not finite or too large, on this rank; int64 [] on their device."""
        rejected = self.loss.rejected_now()
        # On a GPU each of these is a launch: none for labels that nobody learns.
        return rejected + self.label_losses.rejected_now() if self.labels else rejected

    def reduce(self) -> None:
        """Add up losses and metrics of labels over all ranks; once, before `read`. *Collective*."""
        self.loss.reduce(self._world.transport)
        if self.labels:
            self.label_losses.reduce(self._world.transport)
        for metrics in self.labels.values():
            metrics.reduce(self._world.transport)

    def read(
        self, rejected: Tensor | None = None, more: Sequence[Tensor] = ()
    ) -> tuple[int, list[float], list[float], EdgeCounts]:
        """The figures of the step that the host asks for, after the losses are reduced. *Collective*.

        A host waits for its GPU here, once: all travels in one piece.

        Args:
            rejected: Partials of gradients that were not finite, over all ranks.
            more: Numbers, of any type.

        Returns:
            Partials that were not finite, of losses too; losses of edges, then of each label; the other numbers; the
            edges counted.
        """
        counts = self.metrics.counts_here(self._world.transport)
        spoilt = self.rejected_now() if rejected is None else self.rejected_now() + rejected.to(counts.device)
        losses = [self.loss.total(), *([self.label_losses.total()] if self.labels else [])]
        figures = torch.cat([*losses, *(each.reshape(-1).to(torch.float64) for each in more)])
        everything = torch.cat([spoilt.view(1), counts, figures.view(torch.int64)])  # by their bits, in one piece
        if everything.is_cuda:
            self._ended = _Timestamp(self._world.device)
        on_host = everything.cpu()
        counts, figures = on_host[1 : 1 + len(counts)].clone(), on_host[1 + len(counts) :].view(torch.float64)
        self._world.transport.all_reduce(counts)
        numbers, num_losses = figures.tolist(), 1 + len(self.labels)
        return int(on_host[0]), numbers[:num_losses], numbers[num_losses:], EdgeCounts(*counts.tolist())

    def shared(self) -> dict[str, Any]:
        """Seconds (but those of compiling), bytes and sizes of all ranks; lists hold one value a rank. *Collective*.

        Seconds of computing have those of loading in them. `halo_bytes` are all rows handed to other ranks. While a
        part is loaded, requests for its ghosts are among them.
        """
        seconds = self._began.until(self._ended or _Timestamp(self._world.device))
        counters = self._world.take_counters()
        ours = {
            "seconds": seconds,
            "seconds_compute": seconds - counters.seconds_exchanging - counters.seconds_waiting,
            "seconds_exchange": counters.seconds_exchanging,
            "seconds_wait": counters.seconds_waiting,
            "seconds_load": self.seconds_load,
            "owned_nodes": self.owned_nodes,
            "ghost_nodes": self.ghost_nodes,
            "local_edges": self.local_edges,
            "halo_bytes": counters.bytes_sent,
            "peak_rss_bytes": peak_rss_bytes(),
        }
        ranks = gather(self._world.transport, ours)
        shared = {name: [rank[name] for rank in ranks] for name in ours}
        return {"ranks": self._world.size, **shared, "seconds": max(shared["seconds"])}


class _Timestamp:
    """A moment of a rank's work: of the host, or of the current stream of its GPU."""

    def __init__(self, device: torch.device) -> None:
        self._host = clock()
        self._event: Any = None
        if device.type == "cuda":
            self._event = torch.cuda.Event(enable_timing=True)
            self._event.record(torch.cuda.current_stream(device))

    def until(self, later: _Timestamp) -> float:
        """Seconds to a later one, those of compiling left out; a stream must have reached it."""
        if self._event is None:
            return later._host - self._host
        seconds: float = self._event.elapsed_time(later._event) / 1e3
        return seconds


@dataclass
class MetricsFile:
    """`metrics.jsonl`, to which a record is added whole or not at all."""

    path: Path  # the file
    lost: int = 0  # records that could not be written

    def add(self, record: dict[str, Any]) -> OSError | None:
        """Add one record; returns why that was impossible, such as a full disk. The file then ends as it did before."""
        # NaN is no JSON: a figure that is missing is None.
        line = (json.dumps(record, allow_nan=False) + "\n").encode()
        try:
            with self.path.open("ab", buffering=0) as file:  # one write a line, and its size is known
                end = file.tell()
                written = file.write(line)
                if written != len(line):  # the disk took a piece of it
                    file.truncate(end)
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            self.lost += 1
            return error
        return None


def keep_records(path: Path, last_step: int) -> int:
    """Drop from `metrics.jsonl`, if it is there, the steps that a run does again when it resumes from `last_step`.

    A line that was not finished goes as well. Returns the number of finished lines that could not be read.
    """
    if not path.exists():
        return 0
    lines, kept, damaged = path.read_bytes().splitlines(keepends=True), [], 0
    for line in lines:
        if line.endswith(b"\n"):  # else its writer was killed
            try:
                kept += [line] if int(json.loads(line)["step"]) <= last_step else []
            except (ValueError, KeyError, TypeError):
                damaged += 1
    if kept != lines:
        write_whole(path, b"".join(kept))
    return damaged


def readable(record: dict[str, Any]) -> str:
    """One grep-able `key=value` line, which says so where a result is approximate."""
    formats = {"split": "", "epoch": "", "step": "", "loss": ".5g"}
    formats |= {metric.name: metric.line for metric in EDGE_METRICS if metric.line}
    values = [(name, record.get(name), how) for name, how in formats.items()]
    for label, metrics in record.get("labels", {}).items():
        of_label = (metric for metric in LABEL_METRICS if metric.line)
        values += [(f"{label}_{metric.name}", metrics.get(metric.name), metric.line) for metric in of_label]
    values.append(("seconds", record.get("seconds"), ".3g"))
    shown = [f"{name}={value:{how}}" for name, value, how in values if value is not None]
    return " ".join(shown + ["approximate=yes"] * (record.get("counted_against") == AGAINST[True]))
