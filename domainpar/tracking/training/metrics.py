"""How good the scores are, in integers: counts are added over tiles, events and ranks, and divided once.

Everything is counted against the candidate edges *in the graph*. True segments that no candidate edge joins do not
appear here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, field
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

AGAINST = {False: "candidate edges", True: "candidate edges inside sectors (approximate: naive mode)"}
"""The edges that are counted: of whole events, or of independent sectors."""


@dataclass(frozen=True)
class EdgeCounts:
    """Edges of the graph, counted at a score cut of 0.5."""

    edges: int  # all edges
    targets: int  # true segments of target particles
    found: int  # targets that pass
    passing: int  # edges that pass
    passing_other: int  # true segments of other particles that pass: neither good nor bad
    ordered: int  # twice the (target, other edge) pairs in the right order, plus the pairs that tie
    # edges that join two sectors of naive mode: no sector holds them, and they are not among `edges`
    not_scored: int = 0
    in_unit: int = 0  # edges whose logit lies between 0 and 1, where logits of a sigmoid's results do

    @property
    def efficiency(self) -> float:
        """Share of the targets in the graph that pass; NaN without targets."""
        return self.found / self.targets if self.targets else math.nan

    @property
    def purity(self) -> float:
        """Share of targets among the passing edges, true segments of other particles left out; NaN if none pass."""
        counted = self.passing - self.passing_other
        return self.found / counted if counted else math.nan

    @property
    def auc(self) -> float:
        """Area under the ROC curve of targets against all other edges, exact; NaN if there is only one kind."""
        pairs = self.targets * (self.edges - self.targets)
        return self.ordered / (2 * pairs) if pairs else math.nan

    def ratios(self) -> dict[str, float | None]:
        """Efficiency, purity and AUC by their names in records; None where there is nothing to divide by."""
        ratios = {"edge_efficiency": self.efficiency, "edge_purity": self.purity, "edge_auc_pooled": self.auc}
        return {name: None if math.isnan(value) else value for name, value in ratios.items()}


@dataclass
class EdgeMetrics:
    """Collects scores of owned edges, then counts them over all ranks.

    Attributes:
        device: Where the ranks compute, the same kind on all of them: on GPUs logits stay there.
    """

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
        """The fields of `EdgeCounts` over what was added on this rank, int64 [8] on its device. *Collective*.

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


def metrics_of(counts: EdgeCounts, in_sectors: bool = False) -> dict[str, Any]:
    """Edge metrics, against the candidate edges in the graph; None where there is nothing to divide by.

    Args:
        in_sectors: Whether the graphs were independent sectors, which lack the edges between them.
    """
    return {
        **counts.ratios(),
        "counted_against": AGAINST[in_sectors],
        "edges": counts.edges,
        "edges_not_scored": counts.not_scored,
        "target_edges": counts.targets,
    }


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


def metrics_over(counts: Sequence[EdgeCounts]) -> dict[str, Any]:
    """Metrics over whole events, None where there is nothing to divide by.

    Efficiency and purity are those of all edges together; the AUC is the mean over events, so that no event's scores
    need to be kept.
    """
    total = EdgeCounts(*np.sum([astuple(of_event) for of_event in counts], axis=0, dtype=object).tolist())
    areas = [of_event.auc for of_event in counts if not math.isnan(of_event.auc)]
    ratios = total.ratios()
    del ratios["edge_auc_pooled"]  # pairs of two events are not counted
    ratios["edge_auc_mean"] = float(np.mean(areas)) if areas else None
    return {"events": len(counts), **ratios, "edges": total.edges, "target_edges": total.targets}
