"""A rank's part of a sample for training: its graph and halo, and the class and weight of each edge."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import KW_ONLY, dataclass, field
from functools import cached_property
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from domainpar.common import faults
from domainpar.common.agreement import gather
from domainpar.common.problems import EventPlace
from domainpar.parallel.local import LocalGraph
from domainpar.parallel.world import World
from domainpar.tracking.events.graph import IntArray
from domainpar.tracking.events.labels import is_known
from domainpar.tracking.events.store import EventStore, StoredEvent
from domainpar.tracking.part_loading import (
    BadEvent,
    Part,
    group_tiles,
    joined_part,
    open_together,
    parts_of,
    read_part,
    sector_of_tiles,
    together,
)
from domainpar.tracking.training.edge_classes import FAKE, OTHER, TARGET, EdgeRules, edge_classes
from domainpar.tracking.training.sampler import Sample
from domainpar.tracking.training.tasks import Tasks


class Counted(NamedTuple):
    """What a part counts."""

    kinds: IntArray  # edges by kind of weight, int64 [num_kinds]
    # known labels of each task: of owned nodes, and of the graph on the first rank that shares it
    known: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class LabelledPart(Part):
    """One rank's part of a sample, with the classes and weights of its edges."""

    classes: IntArray  # class of each local edge, int8 [num_edges]
    counted: Counted  # edges and labels that this part counts
    weights: Tensor  # weight of each local edge in the loss, [num_edges]
    name: str  # name of the sample
    # labels that are trained on, by name, in the units of the network: of nodes float64 [num_owned], of the graph [1]
    labels: Mapping[str, Tensor]
    # edges that end in this sector of naive mode and start in another one: no sector holds them; counted on the first
    # rank that shares the sample, 0 on others
    num_not_scored: int = 0

    @cached_property
    def rows_by_class(self) -> dict[int, Tensor]:
        """Rows of the owned edges of each class, where the graph lies."""
        owned = self.graph.plan.edge_owned
        rows = {kind: np.flatnonzero(owned & (self.classes == kind)) for kind in (TARGET, OTHER, FAKE)}
        return {kind: torch.from_numpy(which).to(self.weights.device) for kind, which in rows.items()}


Draft = tuple[LocalGraph, dict[str, Any]]
"""What a rank reads of a sample by itself: its graph, which does not know yet what others need of it, and what a
`LabelledPart` holds beside it."""


class Skip(NamedTuple):
    """A sample that is left out, since its event cannot be used, by its name; its event, and the reason."""

    sample: str
    event: str
    why: str


class StepCounts(NamedTuple):
    """Over one step and all ranks."""

    kinds: IntArray  # edges of each kind of weight, int64 [num_kinds]
    known: tuple[int, ...]  # labels of each task that are known
    # loaded, skipped: samples loaded, and left out
    loaded: int
    skipped: int


@dataclass(eq=False)
class PartLoader:
    """Loads parts of samples and keeps the last ones, by content, for the next epoch."""

    store: EventStore  # the events
    world: World  # the ranks; those of a domain group load the same sample together
    _: KW_ONLY
    grouping: str = "contiguous"  # how tiles are grouped into parts
    tasks: Tasks = field(default_factory=Tasks)  # what the network is trained on
    edge_weights: EdgeRules = field(default_factory=EdgeRules.by_class)  # weights of edges
    target: Mapping[str, Any] | None = None  # conditions of a target particle; None: every particle is one
    dtype: torch.dtype = torch.float32  # type of features and weights
    seed: int = 0  # seed of the grouping
    keep_edges: int = 10_000_000  # keep parts until they hold more local edges than this
    # the fate of a sample whose event cannot be used. `fail`: loading it raises. `skip`: it is left out, this time and
    # for as long as this loader lives.
    on_bad_event: Literal["fail", "skip"] = "fail"
    # samples that any rank left out, by name; as of the last `total`
    skipped: dict[str, Skip] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        self._kept: OrderedDict[Sample, LabelledPart] = OrderedDict()
        self._bad: dict[Sample, Skip] = {}
        self._new: list[Skip] = []  # since the last `total`
        self._coming: dict[Sample, Future[Draft]] = {}
        self._reader: ThreadPoolExecutor | None = None

    def prefetch(self, samples: Sequence[Sample]) -> None:
        """Begin to read the first of some samples that is not here, in the background; the same on ranks that share it.

        Nobody talks in the background: what ranks ask of each other waits for `load`. Parts that METIS makes are not
        read ahead where ranks share them, since one rank makes them for all.
        """
        missing = [sample for sample in samples if sample not in self._kept and sample not in self._bad]
        made_by_one = self.grouping == "metis" and self.world.domain.size > 1
        if made_by_one or not missing or missing[0] in self._coming:
            return

        def draft(sample: Sample) -> Draft:
            with self.store.open(sample.record) as event:
                part_of_tile = parts_of(event, self.world.domain.size, self.grouping, sample.sector, self.seed)
                return self._draft(event, part_of_tile, sample)

        self._reader = self._reader or ThreadPoolExecutor(1, "the next event")
        self._coming = {missing[0]: self._reader.submit(draft, missing[0])}

    def load(self, sample: Sample) -> LabelledPart | None:
        """One rank's part of a sample, None if it is left out. *Collective* over the domain group.

        Raises:
            BadEvent: If the event cannot be used and is not to be left out, on the ranks that cannot; RanksFailed on
                those that share it with them.
            Problem: If it holds no truth.
        """
        if sample in self._bad:
            return None
        # Ranks of a domain group have the same samples in the same order, but not as many edges each. The events'
        # sizes decide which parts are kept, so that all of them load, or none does.
        if sample not in self._kept:
            try:
                graph, labelled = self._drafted(sample)
            except BadEvent as bad:
                if self.on_bad_event == "fail":
                    raise bad.for_this_rank() from bad.__cause__
                self._bad[sample] = Skip(sample.name, sample.record.event, bad.what)
                self._new.append(self._bad[sample])
                return None
            if graph.label is None and self.tasks.edge_weight:
                place = EventPlace(sample.record.event, self.store.path / sample.record.path)
                raise place.problem("it has no truth", "it can be inferred on, not trained on")
            part = joined_part(graph, self.world.domain, self.world.device)  # which knows what others need of it
            self._kept[sample] = LabelledPart(part.graph, part.halo, **labelled)
        self._kept.move_to_end(sample)  # the first is the one not used for longest
        room = self.keep_edges * self.world.domain.size
        while len(self._kept) > 1 and sum(kept.cost for kept in self._kept) > room:
            self._kept.popitem(last=False)
        return self._kept[sample]

    def kept(self, samples: Sequence[Sample]) -> tuple[int, int]:
        """Nodes and local edges, roughly, of the parts that this rank keeps once it has loaded all these samples."""
        nodes, edges = (sum(counts) for counts in ([it.num_nodes for it in samples], [it.cost for it in samples]))
        kept = min(edges // self.world.domain.size, self.keep_edges)
        return nodes * kept // max(edges, 1), kept

    def total(self, counted: Sequence[Counted], num_samples: int) -> StepCounts:
        """Add up edges, labels and samples over all ranks, and note the samples left out. *Collective* over all ranks.

        Args:
            counted: What each part that this rank loaded counts.
            num_samples: Samples that it was to load.
        """
        speaks = self.world.domain.rank == 0  # one for those that share a sample
        ours = [len(counted), num_samples - len(counted), len(self._new)] if speaks else [0, 0, 0]
        no_edges, num_labels = self.edge_weights.count(np.zeros(0, np.int16)), len(self.tasks.labels)
        of_kinds = np.sum([no_edges, *[part.kinds for part in counted]], axis=0)
        of_labels = np.sum([[0] * num_labels, *[part.known for part in counted]], axis=0)
        totals = torch.from_numpy(np.concatenate([of_kinds, of_labels, np.array(ours, np.int64)]).astype(np.int64))
        self.world.transport.all_reduce(totals)
        kinds, known = totals[: len(no_edges)].numpy(), totals[len(no_edges) : -3].tolist()
        loaded, skipped, new = totals[-3:].tolist()
        if new:  # an ordinary step does not gather
            skips_of_ranks = gather(self.world.transport, self._new if speaks else [])
            self.skipped |= {sample: Skip(sample, *rest) for skips in skips_of_ranks for sample, *rest in skips}
            self._new.clear()
        return StepCounts(kinds, tuple(known), loaded, skipped)

    def _drafted(self, sample: Sample) -> Draft:
        """This rank's share of a sample, read now or before. *Collective* over the domain group."""
        domain, record = self.world.domain, sample.record
        if (coming := self._coming.pop(sample, None)) is not None:

            def take() -> Draft:
                faults.reach("load")
                return coming.result()

            return together(domain, EventPlace(record.event, self.store.path / record.path), take)
        with open_together(self.store, record, domain) as event:
            part_of_tile = group_tiles(event, domain, self.grouping, sample.sector, self.seed)
            return together(domain, event.place, lambda: self._draft(event, part_of_tile, sample))

    def _draft(self, event: StoredEvent, part_of_tile: IntArray, sample: Sample) -> Draft:
        domain, device = self.world.domain, self.world.device
        graph = read_part(event, part_of_tile, domain.rank, domain.size, device=device, dtype=self.dtype)
        plan, rules = graph.plan, self.edge_weights
        truth = np.full(plan.num_edges, -1) if graph.label is None else graph.label.cpu().numpy()
        particle_of_edge, particles = None, event.particles()
        if (self.target or rules.on_particles) and event.has_particle_ids:
            particle_of_edge = event.read_nodes("particle_id", plan.local_ids)[plan.edge_rows[1]]
        classes = edge_classes(truth, particle_of_edge, particles, self.target)
        kinds = rules.kinds(classes, particle_of_edge, particles)
        labels = {task.name: task.labels(event, plan.owned_ids) for task in self.tasks.labels}
        known = tuple(
            int(is_known(task.label, labels[task.name]).sum()) * (task.label.of == "node" or domain.rank == 0)
            for task in self.tasks.labels
        )
        num_not_scored = 0
        if (sector := sample.sector) is not None and domain.rank == 0:
            # Edges that end in a sector and start in another: over all sectors of an event, each cut edge once.
            tiles, sector_of_tile = event.tile_graph(), sector_of_tiles(event, sector.of)
            starts, ends = (sector_of_tile[tile] == sector.number for tile in (tiles.src_tile, tiles.dst_tile))
            num_not_scored = int(tiles.joining[ends & ~starts].sum())
        return graph, {
            "classes": classes,
            "counted": Counted(rules.count(kinds[plan.edge_owned]), known),
            "weights": torch.from_numpy(rules.weights(kinds)).to(device, self.dtype),
            "name": sample.name,
            "labels": {name: torch.from_numpy(values).to(device) for name, values in labels.items()},
            "num_not_scored": num_not_scored,
        }
