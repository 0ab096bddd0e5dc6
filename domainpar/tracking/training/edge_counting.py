"""Edges counted by their scores, over tiles, events and ranks, all in integers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from domainpar.parallel.transport import Transport
from domainpar.parallel.world import World
from domainpar.tracking.events.graph import IntArray
from domainpar.tracking.events.store import StoredEvent
from domainpar.tracking.training.edge_classes import FAKE, OTHER, TARGET, edge_classes
from domainpar.tracking.training.metrics import EdgeCounts


@dataclass
class EdgeMetrics:
    """Collects scores of owned edges, then counts them over all ranks."""

    # where the ranks compute, the same kind on all of them: on GPUs logits stay there
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    _by_class: list[tuple[Tensor, Tensor, Tensor]] = field(default_factory=list)
    _not_scored: int = 0

    def add(self, logits: npt.NDArray[Any], classes: IntArray, not_scored: int = 0) -> None:
        """Take the logits and classes of the owned edges of one part, [n] each, and how many edges got no score."""
        rows = {kind: torch.from_numpy(np.flatnonzero(classes == kind)) for kind in (TARGET, OTHER, FAKE)}
        self.add_rows(torch.from_numpy(logits), rows, not_scored)

    def add_rows(self, logits: Tensor, rows: Mapping[int, Tensor], not_scored: int = 0) -> None:
        """The same of the logits of local edges, which stay where they are; `rows`: the owned edges of each class."""
        targets, others, rest = (logits.index_select(0, rows[kind]) for kind in (TARGET, OTHER, FAKE))
        self._by_class.append((targets, others, rest))
        self._not_scored += not_scored

    def count(self, transport: Transport) -> EdgeCounts:
        """Counts over everything that was added on any rank. *Collective*.

        The AUC is exact and needs no gathered event: the targets' logits, a few per cent of all, go to every rank,
        which ranks its own other edges against them; the pairs are counted in integers.
        """
        counts = self.counts_here(transport).cpu()
        transport.all_reduce(counts)
        return EdgeCounts(*counts.tolist())

    def counts_here(self, transport: Transport) -> Tensor:
        """The fields of `EdgeCounts` over what was added on this rank, int64 on its device. *Collective*.

        A host does not wait for its GPU.
        """
        none = torch.zeros(0, dtype=torch.float64, device=self.device)
        nothing = none, none, none
        # Of float32 too: float64 holds each exactly, and all ranks compare one type.
        targets, others, rest = (torch.cat(parts) for parts in zip(nothing, *self._by_class))
        # Both are sorted, or each search is a cache miss.
        all_targets, below = _in_order(_gather_logits(targets, transport)), _in_order(torch.cat([others, rest]))
        # Others below a target count twice, on both sides; those that tie with it once.
        ordered = (
            torch.searchsorted(below, all_targets).sum() + torch.searchsorted(below, all_targets, right=True).sum()
        )
        everything = torch.cat([targets, below])
        # Filled in by the GPU: a copy of these numbers would make the host wait.
        edges, wanted, missing = (
            none.new_full((), count, dtype=torch.int64) for count in (len(everything), len(targets), self._not_scored)
        )
        # A logit above 0 is a score above 0.5, without the rounding of a sigmoid.
        found, passing, other = ((logits > 0).sum() for logits in (targets, everything, others))
        in_unit = ((everything >= 0) & (everything <= 1)).sum()
        return torch.stack([edges, wanted, found, passing, other, ordered, missing, in_unit])


def _in_order(values: Tensor) -> Tensor:
    """Sorted; on CPU by numpy, which has vectors for it."""
    return torch.from_numpy(np.sort(values.numpy())) if values.device.type == "cpu" else values.sort().values


def _gather_logits(logits: Tensor, transport: Transport) -> Tensor:
    """Logits of all ranks, in any order. *Collective*."""
    if logits.device.type == "cpu":
        gathered = b"".join(transport.all_gather(logits.numpy().tobytes()))
        return torch.from_numpy(np.frombuffer(gathered, np.float64).copy())
    counts = [int.from_bytes(count, "little") for count in transport.all_gather(len(logits).to_bytes(8, "little"))]
    mine = [0 if peer == transport.rank else len(logits) for peer in range(transport.size)]
    theirs = [0 if peer == transport.rank else count for peer, count in enumerate(counts)]
    received = logits.new_empty(sum(theirs), 1)
    sent_before = transport.bytes_sent
    transport.start(logits.repeat(transport.size - 1)[:, None], mine, received, theirs).finish()
    transport.bytes_sent = sent_before  # which counts rows of events
    return torch.cat([logits, received[:, 0]])


def count_event(
    event: StoredEvent, logits: npt.NDArray[np.floating], conditions: Mapping[str, Any] | None
) -> EdgeCounts | None:
    """Compare the logits of a whole event with its truth; on one rank.

    Args:
        logits: Logits of all edges in stored order, [E]; -inf for one that got none.
        conditions: Conditions of a target particle; None: every particle is one.

    Returns:
        The counts; None if the event has no truth, or lacks a quantity that the conditions are about.
    """
    if not event.has_labels:
        return None
    every_edge = np.arange(event.num_edges)
    label, particles, particle_of_edge = event.read_edges("label", every_edge), event.particles(), None
    if conditions and event.has_particle_ids:
        particle_of_edge = event.read_nodes("particle_id", event.read_edges("dst", every_edge))
    try:
        classes = edge_classes(label, particle_of_edge, particles, conditions)
    except ValueError:  # an event of another source; its scores are kept
        return None
    metrics = EdgeMetrics()
    metrics.add(logits, classes)
    return metrics.count(World.alone().transport)
