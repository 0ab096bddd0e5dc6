"""What do independent sectors cost in tracks, and a border of k hops in work, against the exact halo?

    python bench/modes.py                                   some minutes on one core
    python bench/modes.py --quick                           seconds, to see that it runs
    python bench/modes.py --sectors 16 --repeats 3          three seeds of the weights and the order of events

Trains one network per mode on the same events for the same number of steps, and scores the same whole events:

    halo          whole events. Computed on one rank here: any number of ranks gives the same bits
    naive         S phi sectors on their own: edges between them are dropped, so they are never found
    replicate k   S phi sectors, each with a border of all hits that k edges reach. The border is computed with the
                  sector, but only the sector's own edges count, in the loss and in the scores

A step takes the same events in every mode, all S sectors of them where there are sectors; `--mix-sectors` shuffles
sectors of different events instead, as people do it. A border is exact when it has as many hops as scores depend on:
`graph-iters` for the edge-first network, one more for the node-first one, because the head then sees the last nodes.
With fewer it is an approximation, and naive mode is one always.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import cases
import flags
import measuring
import numpy as np
import torch
from measuring import Row
from rich.progress import track

from domainpar.parallel.halo import CompleteHalo
from domainpar.parallel.local import TileRanges, localise
from domainpar.parallel.world import World
from domainpar.plan import LocalEdges, build_plan
from domainpar.tracking.events.store import EventRecord, EventStore, StoredEvent
from domainpar.tracking.part_loading import Part, Sector, sector_of_tiles
from domainpar.tracking.training.loop import Schedule, Trainer
from domainpar.tracking.training.metrics import EdgeMetrics
from domainpar.tracking.training.parts import LabelledPart, PartLoader
from domainpar.tracking.training.sampler import Sample, samples_of, steps_of_epoch
from domainpar.tracking.training.targets import edge_classes
from partitioners.topology import BoolArray, FloatArray, IntArray

UNSCORED = -math.inf  # below every cut, and last in the ranking that the AUC is made of
REGIONS = ("all", "near", "cut")


def main(argv: Sequence[str] | None = None) -> None:
    options = parse(argv)
    torch.set_num_threads(1)
    results = measuring.Results("modes", options)
    store = EventStore(cases.chosen_case(options, options.val_split).store)
    train, val = store.events("train"), store.events("val") or store.events("train")
    truths = [Truth.of(store, record, options.sectors, options.border) for record in val]
    edges = sum(truth.record.num_edges for truth in truths)
    shares = {region: sum(int(truth.regions[region].sum()) for truth in truths) / edges for region in REGIONS}
    steps = options.epochs * -(-len(train) // options.events_per_step)
    results.console.print(
        f"{len(train)} events to train on, {len(val)} to score, {edges // len(truths):,} edges each; {options.sectors} "
        f"sectors: {shares['near']:.1%} of edges within {options.border} rad of a border, {shares['cut']:.1%} cut. "
        f"{flags.in_words(options)}, {steps} steps in every mode."
    )
    for seed in range(options.repeats):
        exact_scores: list[FloatArray] | None = None
        exact_model: torch.nn.Module | None = None
        for mode in modes(options):
            bench = Bench(mode, store, options, seed)
            seconds = bench.train(train)
            scores = [bench.scores(truth.record) for truth in truths]
            if exact_scores is None or exact_model is None:
                exact_scores, exact_model = scores, bench.trainer.model
            # What the mode alone changes: the weights are those that whole events were trained to.
            bench.trainer.model.load_state_dict(exact_model.state_dict())
            same_weights = [bench.scores(truth.record) for truth in truths]
            work = bench.work(truths)
            difference = compare(same_weights, exact_scores)
            results.add(mode=mode.name, seed=seed, seconds=seconds, **work, **difference, **quality(truths, scores))
    show(results, options)
    results.end()


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = flags.parser(__doc__, "modes", case="medium", events=10, partitioner="phi")
    parser.set_defaults(hits=15_000)
    parser.add_argument("--sectors", type=int, default=8, help="phi sectors (default 8)")
    parser.add_argument("--hops", type=int, nargs="*", help="borders of `replicate`; default: 1, 2 and the exact one")
    parser.add_argument("--border", type=float, default=0.05, help="`near`: mid phi this close to a border, in rad")
    parser.add_argument("--mix-sectors", action="store_true", help="a step takes sectors of different events")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--events-per-step", type=int, default=1)
    parser.add_argument("--val-split", type=float, default=0.2)
    parser.add_argument("--repeats", type=int, default=1, help="trainings of each mode, with other seeds")
    flags.add_network(parser, hidden=32)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--clip", type=float, default=1.0)
    parser.add_argument("--quick", action="store_true", help="small and short: shows that it runs, nothing else")
    if parser.parse_args(argv).quick:
        parser.set_defaults(hits=5_000, num_events=4, epochs=4, hidden=16, sectors=4)
    options = parser.parse_args(argv)
    if options.tiles is None:  # about 4,600 edges a tile, and as many tiles in every sector
        hits = options.hits if options.data is None else 100_000
        options.tiles = options.sectors * max(1, round(1.1e-4 * hits**2 / 4600 / options.sectors))
    return options


def exact_hops(options: argparse.Namespace) -> int:
    return options.graph_iters + (options.model == "interaction-node-first")


# --- modes -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Mode:
    """One way to compute an event: whole (`num_sectors` None), or in sectors with a border of some hops."""

    name: str
    num_sectors: int | None = None
    hops: int = 0


def modes(options: argparse.Namespace) -> list[Mode]:
    """`halo` first: the others are compared with it."""
    hops = options.hops if options.hops is not None else sorted({1, 2, exact_hops(options)})
    borders = [Mode(f"replicate {count}", options.sectors, count) for count in hops]
    return [Mode("halo"), Mode("naive", options.sectors), *borders]


class ReplicateLoader(PartLoader):
    """Sectors with a border, one process each: the `replicate` mode. Keeps every part."""

    def __init__(self, store: EventStore, world: World, hops: int) -> None:
        super().__init__(store, world)
        self._hops, self._all = hops, {}

    def load(self, sample: Sample) -> LabelledPart:
        if sample not in self._all:
            assert sample.sector is not None
            with self._store.open(sample.record) as event:
                part = sector_with_border(event, sample.sector, self._hops, self._world)
            assert part.graph.label is not None
            owned = part.graph.plan.edge_owned
            classes = edge_classes(part.graph.label.numpy(), None, None, None)
            kinds = self.edge_weights.kinds(classes, None, None)
            counts = self.edge_weights.count(kinds[owned])
            weights = torch.from_numpy(self.edge_weights.weights(kinds) * owned).to(torch.float32)
            self._all[sample] = LabelledPart(part.graph, part.halo, classes, counts, weights, sample.name)
        return self._all[sample]


def sector_with_border(event: StoredEvent, sector: Sector, hops: int, world: World) -> Part:
    """A sector and all nodes within some hops of it as one part of its own.

    Its plan owns every node, so that everything is computed here; `edge_owned` says which edges are the sector's, and
    so counted: those that end in it.
    """
    sector_of_node = node_sectors(event, sector.of)
    src, dst = ends_of(event)
    inside = grown(sector_of_node == sector.number, src, dst, hops)
    edge_ids = np.flatnonzero(inside[src] & inside[dst])
    edges = LocalEdges(edge_ids, src[edge_ids], dst[edge_ids])
    plan = build_plan(edges, np.where(inside, 0, -1), 0, 1, "incident", lambda wanted: wanted)
    plan = replace(plan, edge_owned=sector_of_node[edges.dst] == sector.number)
    kept_before = np.concatenate([[0], np.cumsum(inside)])
    # Tiles stay what they are, less the nodes outside.
    tiles = TileRanges(kept_before[event.node_ptr], event.edge_ptr, np.zeros(event.num_tiles, np.int32))
    graph = localise(
        plan,
        tiles,
        event.read_nodes("features", plan.local_ids),
        event.read_edges("features", plan.edge_ids),
        event.read_edges("label", plan.edge_ids),
        event_id=event.event_id,
    )
    return Part(graph, CompleteHalo(plan, world.domain))


def grown(inside: BoolArray, src: IntArray, dst: IntArray, hops: int) -> BoolArray:
    """The nodes inside, and those that a path of at most `hops` edges, in any direction, joins to them."""
    for _ in range(hops):
        wider = inside.copy()
        wider[src[inside[dst]]] = True
        wider[dst[inside[src]]] = True
        inside = wider
    return inside


def node_sectors(event: StoredEvent, num_sectors: int) -> IntArray:
    return np.repeat(sector_of_tiles(event, num_sectors), np.diff(event.node_ptr))


def ends_of(event: StoredEvent) -> tuple[IntArray, IntArray]:
    edge_ids = np.arange(event.num_edges)
    return event.read_edges("src", edge_ids), event.read_edges("dst", edge_ids)


class Bench:
    """One mode: its network, trained and asked for scores."""

    def __init__(self, mode: Mode, store: EventStore, options: argparse.Namespace, seed: int) -> None:
        self.mode, self.options, self.seed = mode, options, seed
        world = World.alone()
        self.loader = ReplicateLoader(store, world, mode.hops) if mode.hops else PartLoader(store, world)
        model = flags.training_of(options, seed=seed).network(store)
        optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr)
        per_epoch = -(-len(store.events("train")) // options.events_per_step)
        steps = options.epochs * per_epoch
        schedule = Schedule(options.lr, "cosine", max(1, steps // 20), steps, per_epoch)
        self.trainer = Trainer(model, optimizer, self.loader, world, schedule, options.clip)

    def train(self, records: Sequence[EventRecord]) -> float:
        """Train on some events; returns the seconds it took, loading included."""
        sectors, per_step = self.mode.num_sectors, self.options.events_per_step
        began = time.perf_counter()
        step = 0
        watched = f"seed {self.seed} {self.mode.name:12}"
        for epoch in track(range(self.options.epochs), watched, transient=True, disable=not sys.stderr.isatty()):
            if self.options.mix_sectors and sectors:
                steps = steps_of_epoch(samples_of(records, sectors), per_step * sectors, self.seed, epoch)
            else:
                whole = steps_of_epoch(samples_of(records, None), per_step, self.seed, epoch)
                steps = [samples_of([sample.record for sample in events], sectors) for events in whole]
            for samples in steps:
                self.trainer.step(samples, step)
                step += 1
        return time.perf_counter() - began

    def scores(self, record: EventRecord) -> FloatArray:
        """Logit of every edge of an event, [E]; `UNSCORED` where the mode has none."""
        logits = np.full(record.num_edges, UNSCORED)
        for sample in samples_of([record], self.mode.num_sectors):
            part = self.loader.load(sample)
            with torch.no_grad():
                local = self.trainer.model(part.graph, part.halo).numpy()
            owned = part.graph.plan.edge_owned
            logits[part.graph.plan.edge_ids[owned]] = local[owned]
        return logits

    def work(self, truths: Sequence[Truth]) -> dict[str, float]:
        """Edges computed and node rows held when each sector has a rank of its own, per edge and node of an event."""
        edges = nodes = 0
        for truth in truths:
            if self.mode.num_sectors is None:
                edges += truth.record.num_edges + int(truth.regions["cut"].sum())
                nodes += truth.record.num_nodes + truth.ghosts
                continue
            for sample in samples_of([truth.record], self.mode.num_sectors):
                plan = self.loader.load(sample).graph.plan
                edges += plan.num_edges
                nodes += plan.num_local
        records = [truth.record for truth in truths]
        edges_once, nodes_once = sum(r.num_edges for r in records), sum(r.num_nodes for r in records)
        return {"edge_work": edges / edges_once, "node_rows": nodes / nodes_once}


# --- what is found ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Truth:
    """The truth that scores of one event are compared with.

    Attributes:
        record: The event.
        classes: Class of each edge, [E].
        regions: Which edges each region holds, bool [E]: all, near a border, cut by one.
        ghosts: Copies of nodes that whole-event training holds with one rank a sector.
    """

    record: EventRecord
    classes: IntArray
    regions: dict[str, BoolArray]
    ghosts: int

    @classmethod
    def of(cls, store: EventStore, record: EventRecord, num_sectors: int, border: float) -> Truth:
        with store.open(record) as event:
            sector, (src, dst) = node_sectors(event, num_sectors), ends_of(event)
            x, y, _ = event.read_nodes("position", np.arange(event.num_nodes)).T.astype(np.float64)
            label = event.read_edges("label", np.arange(event.num_edges))
        phi = np.arctan2(y, x)
        # Halfway along the edge: the mean of both ends is wrong where it crosses +-pi.
        mid_phi = phi[src] + wrapped(phi[dst] - phi[src]) / 2
        borders = borders_of(phi, sector, num_sectors)
        distance = np.abs(wrapped(mid_phi[:, None] - borders)).min(axis=1, initial=np.inf)
        cut = sector[src] != sector[dst]
        regions = {"all": np.ones(len(src), bool), "near": distance < border, "cut": cut}
        # Pairs (node, other sector at one of its edges) as one number: each is a copy of a node.
        seen_by = np.concatenate([src[cut] * num_sectors + sector[dst[cut]], dst[cut] * num_sectors + sector[src[cut]]])
        return cls(record, edge_classes(label, None, None, None), regions, len(np.unique(seen_by)))


def borders_of(phi: FloatArray, sector: IntArray, num_sectors: int) -> FloatArray:
    """Phi halfway between the last node of each sector and the first of the next, [S]; none for one sector."""
    if num_sectors == 1:
        return np.zeros(0)
    lows = np.array([phi[sector == number].min() for number in range(num_sectors)])
    highs = np.array([phi[sector == number].max() for number in range(num_sectors)])
    nexts = np.append(lows[1:], lows[0] + 2 * np.pi)
    if (highs > nexts).any():
        raise SystemExit("sectors overlap in phi, so they have no borders there; use tiles of --partitioner phi.")
    return (highs + nexts) / 2


def wrapped(angle: FloatArray) -> FloatArray:
    """The same angle in [-pi, pi)."""
    return (angle + np.pi) % (2 * np.pi) - np.pi


def quality(truths: Sequence[Truth], scores: Sequence[FloatArray]) -> dict[str, Any]:
    """Efficiency, purity and AUC of each region; an edge without a score is one that was not found."""
    row: dict[str, Any] = {"unscored": int(sum(np.isneginf(logits).sum() for logits in scores))}
    for region in REGIONS:
        metrics = EdgeMetrics()
        for truth, logits in zip(truths, scores):
            inside = truth.regions[region]
            metrics.add(logits[inside], truth.classes[inside])
        counts = metrics.count(World.alone().transport)
        row |= {f"efficiency_{region}": counts.efficiency, f"purity_{region}": counts.purity}
        row |= {f"auc_{region}": counts.auc, f"edges_{region}": counts.edges, f"true_{region}": counts.targets}
    return row


def compare(scores: Sequence[FloatArray], exact: Sequence[FloatArray]) -> dict[str, float]:
    """Differences of scores from those of whole events with the same weights."""
    ours, theirs = np.concatenate(scores), np.concatenate(exact)
    scored = np.isfinite(ours)
    furthest = float(np.abs(ours[scored] - theirs[scored]).max(initial=0.0))
    return {"largest_difference": furthest, "flips": float(np.mean((ours > 0) != (theirs > 0)))}


# --- what is shown ---------------------------------------------------------------------------------------------------


def show(results: measuring.Results, options: argparse.Namespace) -> None:
    exact = {"halo", *(f"replicate {hops}" for hops in range(exact_hops(options), 100))}

    def mean(name: str, form: str = "{:.2%}") -> Callable[[Sequence[Row]], str]:
        return measuring.mean(name, form, deviation=True)

    columns: measuring.Columns = {
        "mode": lambda rows: rows[0]["mode"],
        "": lambda rows: "exact" if rows[0]["mode"] in exact else "approximate",
        "efficiency": mean("efficiency_all"),
        "near": mean("efficiency_near"),
        "cut": mean("efficiency_cut"),
        "purity": mean("purity_all"),
        "near ": mean("purity_near"),
        "AUC": mean("auc_all", "{:.4f}"),
        "near  ": mean("auc_near", "{:.4f}"),
        "edge work": mean("edge_work", "{:.3f}"),
        "node rows": mean("node_rows", "{:.3f}"),
        "flips": mean("flips", "{:.3%}"),
        "max |d logit|": mean("largest_difference", "{:.1e}"),
        "s": mean("seconds", "{:.0f}"),
    }
    note = (
        "Edges at a score of 0.5, against the candidate edges. Edge work and node rows: with a rank for each sector, "
        "per edge and node. Flips, d logit: against whole events, with the weights trained on whole events."
    )
    title = f"{options.sectors} sectors; trainings of each mode: {options.repeats}"
    results.show(title, columns, measuring.alike(results.rows, "mode"), note)


if __name__ == "__main__":
    measuring.run(__file__)
