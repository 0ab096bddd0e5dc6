"""How good the scores are, in integers: counts are added over tiles, events and ranks, and divided once.

Everything is counted against the candidate edges *in the graph*. True segments that no candidate edge joins do not
appear here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from domainpar.events.graph import IntArray
from domainpar.parallel.transport import Transport
from domainpar.training.targets import OTHER, TARGET


@dataclass(frozen=True)
class EdgeCounts:
    """Edges of the graph, counted at a score cut of 0.5.

    Attributes:
        edges: All edges.
        targets: True segments of target particles.
        found: Targets that pass.
        passing: Edges that pass.
        passing_other: True segments of other particles that pass: neither good nor bad.
        ordered: Twice the (target, other edge) pairs in the right order, plus the pairs that tie.
        not_scored: Edges that join two sectors of naive mode: no sector holds them, and they are not among `edges`.
        in_unit: Edges whose logit lies between 0 and 1, where logits of a sigmoid's results do.
    """

    edges: int
    targets: int
    found: int
    passing: int
    passing_other: int
    ordered: int
    not_scored: int = 0
    in_unit: int = 0

    @property
    def efficiency(self) -> float:
        """Share of the targets in the graph that pass; NaN without targets."""
        return _ratio(self.found, self.targets)

    @property
    def purity(self) -> float:
        """Share of targets among the passing edges, true segments of other particles left out; NaN if none pass."""
        return _ratio(self.found, self.passing - self.passing_other)

    @property
    def auc(self) -> float:
        """Area under the ROC curve of targets against all other edges, exact; NaN if there is only one kind."""
        return _ratio(self.ordered, 2 * self.targets * (self.edges - self.targets))

    def ratios(self) -> dict[str, float | None]:
        """Efficiency, purity and AUC by their names in records; None where there is nothing to divide by."""
        ratios = {"edge_efficiency": self.efficiency, "edge_purity": self.purity, "edge_auc": self.auc}
        return {name: None if math.isnan(value) else value for name, value in ratios.items()}


@dataclass
class EdgeMetrics:
    """Collects scores of owned edges, then counts them over all ranks."""

    _logits: list[npt.NDArray[np.floating]] = field(default_factory=list)
    _classes: list[IntArray] = field(default_factory=list)
    _not_scored: int = 0

    def add(self, logits: npt.NDArray[np.floating], classes: IntArray, not_scored: int = 0) -> None:
        """Take the logits and classes of the owned edges of one part, [n] each, and how many edges got no score."""
        self._logits.append(logits)
        self._classes.append(classes)
        self._not_scored += not_scored

    def count(self, transport: Transport) -> EdgeCounts:
        """Counts over everything that was added on any rank. *Collective*.

        The AUC is exact and needs no gathered event: the targets' logits, a few per cent of all, go to every rank,
        which ranks its own other edges against them; the pairs are counted in integers.
        """
        logits = np.concatenate([np.zeros(0, np.float64), *(part.astype(np.float64) for part in self._logits)])
        classes = np.concatenate([np.zeros(0, np.int8), *self._classes])
        passing = logits > 0
        ours = [
            len(classes),
            np.sum(classes == TARGET),
            np.sum(passing & (classes == TARGET)),
            np.sum(passing),
            np.sum(passing & (classes == OTHER)),
            _ordered_pairs(logits[classes == TARGET], logits[classes != TARGET], transport),
            self._not_scored,
            np.sum((logits >= 0) & (logits <= 1)),
        ]
        counts = torch.tensor([int(count) for count in ours], dtype=torch.int64)
        transport.all_reduce(counts)
        return EdgeCounts(*counts.tolist())


def _ordered_pairs(targets: npt.NDArray[np.float64], others: npt.NDArray[np.float64], transport: Transport) -> int:
    gathered = transport.all_gather(targets.tobytes())
    all_targets = np.frombuffer(b"".join(gathered), dtype=np.float64)
    others = np.sort(others)
    below = np.searchsorted(others, all_targets, side="left")
    return int(below.sum() + np.searchsorted(others, all_targets, side="right").sum())


def _ratio(part: int, whole: int) -> float:
    return part / whole if whole else math.nan
