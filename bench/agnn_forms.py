"""What do agnn's dense and sparse matrices cost against rows by index, and what do heptrkx's sectors lose?

    python bench/agnn_forms.py --data DIR --event 1012      the sets of heptrkx from a real event, minutes
    python bench/agnn_forms.py                              from a simulated one
    python bench/agnn_forms.py --whole                      also steps of the whole barrel, where they fit
    python bench/agnn_forms.py --quick                      seconds, to see that it runs

Builds the graphs of heptrkx's recipes (`prepare.py` of sparticlesteve/heptrkx-gnn-tracking): barrel hits of particles
above a transverse momentum, noise removed by truth, one hit a particle and layer, neighbouring layers joined, in
sectors of phi and eta. Says how large they are and what their borders cut. Then takes training steps of the attention
network on the sector of each set whose number of edges is nearest to the mean, in forms that compute the same logits:

    index      x[src], x[dst] and index_add
    csr, coo   incidence matrices Ri, Ro [N, E] in a sparse layout: a @ b in place of indexing and adding
    dense      the same matrices with all their zeros
    weighted   dense, and a of every edge multiplied into copies of Ri and Ro in each iteration, as the first version
               of the network did (`models/agnn_original.py`); the others multiply rows by a

Each run is a fresh process with one thread; forms take turns.
"""

from __future__ import annotations

import argparse
import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import measuring
import numpy as np
import numpy.typing as npt
import psutil
import torch
from cases import chosen_names
from measuring import Spread
from torch import Tensor
from torch.nn import functional as F

from domainpar.events import trackml
from domainpar.events.construct import Cuts, build_graph
from domainpar.events.graph import Hits, IntArray
from domainpar.events.simulate import simulate_event
from domainpar.nn.agnn import AttentionNetwork
from domainpar.parallel.world import World
from domainpar.testing import run_ranks
from domainpar.training.record import peak_rss_bytes

BARREL = ((8, 2), (8, 4), (8, 6), (8, 8), (13, 2), (13, 4), (13, 6), (13, 8), (17, 2), (17, 4))
"""(volume, layer) of the surfaces that heptrkx uses, outward; neighbours are joined."""

TARGET_PT, TARGET_HITS = 1.0, 3
"""Particles above this transverse momentum in GeV, with as many selected hits, are those that people want to find."""

GB, MIB = 1e9, 2**20
LARGEST_DIFFERENCE = 1e-5
"""Of the first loss of two forms, relative."""

STEP_BYTES = 90
"""Peak of a float32 step per edge, hidden unit and iteration, roughly, without dense matrices."""


@dataclass(frozen=True)
class Recipe:
    """How heptrkx prepares one set.

    Attributes:
        pt_min: Hits of particles up to this transverse momentum in GeV are removed, by truth.
        phi_slope: Cut on edges in rad/mm.
        z0: Cut on edges in mm.
        num_phi: Sectors in phi.
        num_eta: Sectors in eta.
        eta: Largest |eta| of a hit in a sector.
        true_weight: Weight of true edges in the loss; others have 1.
    """

    pt_min: float
    phi_slope: float
    z0: float
    num_phi: int
    num_eta: int
    eta: float
    true_weight: float

    @property
    def num_sectors(self) -> int:
        return self.num_phi * self.num_eta


RECIPES = {
    "small": Recipe(1.0, 1e-3, 200.0, 4, 1, 5.0, 3.0),
    "med": Recipe(0.5, 6e-4, 150.0, 4, 2, 5.0, 2.5),
    "big": Recipe(0.0, 6e-4, 100.0, 8, 2, 5.0, 5.0),
    "high": Recipe(0.0, 6e-4, 100.0, 8, 1, 2.0, 3.0),
}


def main(argv: Sequence[str] | None = None) -> None:
    options = parse(argv)
    torch.set_num_threads(1)
    results = measuring.Results("agnn_forms", options)
    source, events = read_events(options)
    results.console.print(f"events: {source}; agnn, hidden {options.hidden}, {options.graph_iters} iterations, float32")
    divided = {name: [divide(hits, RECIPES[name]) for hits in events] for name in options.sets}
    show_sizes(divided, source, results)
    show_losses(divided, source, results)
    show_steps(divided, source, options, results)
    results.end()


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    given = parser.add_argument_group("events")
    given.add_argument("--data", type=Path, help="folder of real TrackML events, CSV, instead of a simulated one")
    given.add_argument("--event", nargs="+", help="which of them, by the end of their names; default: the first")
    given.add_argument("--hits", type=int, default=105_000, help="hits of the simulated event (default 105000)")
    given.add_argument("--seed", type=int, default=0, help="of the simulation and of the network")
    given.add_argument("--sets", nargs="+", choices=RECIPES, default=["small", "med", "big"], help="of heptrkx")
    network = parser.add_argument_group("network")
    network.add_argument("--hidden", type=int, default=64, help="width (default 64)")
    network.add_argument("--graph-iters", type=int, default=8, help="iterations (default 8)")
    parser.add_argument("--forms", nargs="+", choices=FORMS, default=list(FORMS), help="default: all")
    parser.add_argument("--whole", action="store_true", help="steps of the whole barrel too: some 6 GB in a full event")
    parser.add_argument("--dense-gb", type=float, default=4.0, help="dense matrices beyond are not made (default 4)")
    parser.add_argument("--rounds", type=int, default=3, help="fresh processes of each form (default 3)")
    parser.add_argument("--repeats", type=int, default=5, help="steps in each, after two to warm up (default 5)")
    parser.add_argument("--timeout", type=float, default=900.0, help="seconds for one process (default 900)")
    parser.add_argument("--quick", action="store_true", help="small and short: shows that it runs, nothing else")
    measuring.add_flags(parser, "agnn_forms")
    if parser.parse_args(argv).quick:
        parser.set_defaults(hits=4_000, sets=["med"], hidden=8, graph_iters=2, rounds=1, repeats=1)
    options = parser.parse_args(argv)
    if options.event is not None and options.data is None:
        parser.error("--event names real events; say with --data in which folder they are.")
    return options


# --- events and sectors ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Graph:
    """What the network is trained on: an event or a sector of it.

    Attributes:
        features: r and z in m, phi in units of half a sector, measured from its middle, float32 [N, 3].
        edge_index: Rows of `src` and `dst`, int64 [2, E].
        label: 1 where both ends belong to one particle, float32 [E].
    """

    features: npt.NDArray[np.float32]
    edge_index: IntArray
    label: npt.NDArray[np.float32]

    @property
    def num_nodes(self) -> int:
        return len(self.features)

    @property
    def num_edges(self) -> int:
        return len(self.label)

    @property
    def true_share(self) -> float:
        return float(self.label.mean()) if self.num_edges else 0.0


@dataclass(frozen=True, eq=False)
class Divided:
    """One event by one recipe.

    Attributes:
        whole: All its selected hits, without sectors.
        particle_id: Particle of each node of `whole`, int64 [N].
        is_target: Whether it is one that people want to find, bool [N].
        sector: Sector of each node of `whole`, -1 for those in none, int64 [N].
        sectors: Their graphs.
    """

    whole: Graph
    particle_id: IntArray
    is_target: npt.NDArray[np.bool_]
    sector: IntArray
    sectors: list[Graph]


def read_events(options: argparse.Namespace) -> tuple[str, list[Hits]]:
    """What the events are called in results, and their hits; a simulated one where there are no real ones."""
    if options.data is not None:
        try:
            known = trackml.list_events(options.data)
        except ValueError as missing:
            print(f"no real events, a simulated one instead: {missing}")
        else:
            names = chosen_names(known, options.event, 1)
            numbers = "-".join(str(int(name)) for name in names)
            return f"real-{numbers}", [trackml.read_event(options.data, name) for name in names]
    return f"hits{options.hits}-seed{options.seed}", [simulate_event(options.seed, options.hits)]


def select_hits(hits: Hits, pt_min: float) -> Hits:
    """Those on barrel layers of particles above `pt_min`, the one with the smallest r of each particle and layer.

    Raises:
        ValueError: If the event lacks positions, truth or particles.
    """
    if hits.position is None or hits.particle_id is None or hits.particles is None:
        raise ValueError(f"event {hits.event_id}: these recipes select by truth; hits, truth and particles are needed.")
    passing = hits.particles.particle_id[hits.particles.pt > pt_min]  # not those whose momentum is unknown, NaN
    layer = np.full(len(hits), -1)
    for number, surface in enumerate(BARREL):
        layer[(hits.volume == surface[0]) & (hits.layer == surface[1])] = number
    rows = np.flatnonzero((layer >= 0) & np.isin(hits.particle_id, passing))
    r = np.hypot(*hits.position[rows, :2].T.astype(np.float64))
    rows = rows[np.lexsort((r, layer[rows], hits.particle_id[rows]))]
    keys = np.stack([hits.particle_id[rows], layer[rows]])
    rows = rows[np.append(True, (keys[:, 1:] != keys[:, :-1]).any(axis=0))] if len(rows) else rows
    columns = ("hit_id", "position", "volume", "layer", "module", "particle_id")
    return replace(hits, **{name: getattr(hits, name)[rows] for name in columns}, weight=None)


def divide(hits: Hits, recipe: Recipe) -> Divided:
    """Select hits, join them, and cut the graph into sectors: an edge with ends in two of them is in none."""
    hits = select_hits(hits, recipe.pt_min)
    cuts = Cuts(phi_slope=recipe.phi_slope, z0=recipe.z0, layer_pairs=tuple(pairwise(BARREL)))
    src, dst = edge_index = build_graph(hits, cuts).edge_index
    assert hits.position is not None
    assert hits.particle_id is not None
    x, y, z = hits.position.T.astype(np.float64)
    r, phi = np.hypot(x, y), np.arctan2(y, x)
    label = (hits.particle_id[src] == hits.particle_id[dst]).astype(np.float32)
    whole = Graph(_features(r, phi, z, np.pi), edge_index, label)
    at_phi = _between(phi, np.linspace(-np.pi, np.pi, recipe.num_phi + 1))
    at_eta = _between(np.arcsinh(z / r), np.linspace(-recipe.eta, recipe.eta, recipe.num_eta + 1))
    sector = np.where((at_phi >= 0) & (at_eta >= 0), at_phi * recipe.num_eta + at_eta, -1)
    half = np.pi / recipe.num_phi
    features = _features(r, phi + np.pi - (2 * at_phi + 1) * half, z, half)
    graphs = [_part(replace(whole, features=features), sector == number) for number in range(recipe.num_sectors)]
    return Divided(whole, hits.particle_id, _is_target(hits), sector, graphs)


def _features(r: Any, phi: Any, z: Any, half_turn: float) -> npt.NDArray[np.float32]:
    return np.stack([r / 1000, phi / half_turn, z / 1000], axis=1).astype(np.float32)


def _between(values: npt.NDArray[Any], borders: npt.NDArray[Any]) -> IntArray:
    """The interval of each value, -1 outside of all and on a border."""
    number = np.searchsorted(borders, values) - 1
    inside = (number >= 0) & (number < len(borders) - 1) & ~np.isin(values, borders)
    return np.where(inside, number, -1)


def _part(graph: Graph, chosen: npt.NDArray[np.bool_]) -> Graph:
    """The chosen nodes and the edges among them."""
    kept = chosen[graph.edge_index].all(axis=0)
    row = np.cumsum(chosen) - 1
    return Graph(graph.features[chosen], row[graph.edge_index[:, kept]], graph.label[kept])


def _is_target(hits: Hits) -> npt.NDArray[np.bool_]:
    assert hits.particles is not None
    fast = hits.particles.particle_id[hits.particles.pt > TARGET_PT]
    _, at, counts = np.unique(hits.particle_id, return_inverse=True, return_counts=True)
    return np.isin(hits.particle_id, fast) & (counts[at] >= TARGET_HITS)


# --- forms -----------------------------------------------------------------------------------------------------------


class ByIndex:
    """Rows at the ends of edges by indexing, and sums over the edges of a node by `index_add`."""

    def __init__(self, edge_index: Tensor, num_nodes: int, dtype: torch.dtype) -> None:
        self._src, self._dst = edge_index

    def at_src(self, x: Tensor) -> Tensor:
        """[N, width] -> [E, width]."""
        return x[self._src]

    def at_dst(self, x: Tensor) -> Tensor:
        return x[self._dst]

    def sums_at_dst(self, a: Tensor, rows: Tensor, x: Tensor) -> Tensor:
        """Sum of a x rows over the edges that end in each node of x, a [E, 1]: [E, width] -> [N, width]."""
        return x.new_zeros(len(x), rows.shape[1]).index_add(0, self._dst, a * rows)

    def sums_at_src(self, a: Tensor, rows: Tensor, x: Tensor) -> Tensor:
        return x.new_zeros(len(x), rows.shape[1]).index_add(0, self._src, a * rows)


class ByMatrix:
    """The same by products with incidence matrices [N, E]: column e of Ri has its 1 at the `dst` of e, of Ro at `src`.

    Sparse transposes are kept beside them, so that no product has to sort.
    """

    def __init__(self, edge_index: Tensor, num_nodes: int, dtype: torch.dtype, layout: torch.layout) -> None:
        src, dst = edge_index
        self._ro, self._ri = (_incidence(ends, num_nodes, dtype, layout) for ends in (src, dst))
        if layout == torch.strided:
            self._ro_t, self._ri_t = self._ro.T, self._ri.T
        else:
            self._ro_t, self._ri_t = (_incidence(ends, num_nodes, dtype, layout, turned=True) for ends in (src, dst))

    def at_src(self, x: Tensor) -> Tensor:
        return self._ro_t @ x

    def at_dst(self, x: Tensor) -> Tensor:
        return self._ri_t @ x

    def sums_at_dst(self, a: Tensor, rows: Tensor, x: Tensor) -> Tensor:
        return self._ri @ (a * rows)

    def sums_at_src(self, a: Tensor, rows: Tensor, x: Tensor) -> Tensor:
        return self._ro @ (a * rows)


class ByWeightedMatrix(ByMatrix):
    """Dense, with a multiplied into the matrices: [N, E] twice an iteration, all kept for backward."""

    def sums_at_dst(self, a: Tensor, rows: Tensor, x: Tensor) -> Tensor:
        return (self._ri * a.T) @ rows

    def sums_at_src(self, a: Tensor, rows: Tensor, x: Tensor) -> Tensor:
        return (self._ro * a.T) @ rows


def _incidence(ends: Tensor, num_nodes: int, dtype: torch.dtype, layout: torch.layout, turned: bool = False) -> Tensor:
    places = [ends, torch.arange(len(ends))]
    shape = [num_nodes, len(ends)]
    if turned:
        places, shape = places[::-1], shape[::-1]
    ones = torch.ones(len(ends), dtype=dtype)
    matrix = torch.sparse_coo_tensor(torch.stack(places), ones, shape, check_invariants=True).coalesce()
    return matrix.to_dense() if layout == torch.strided else matrix.to_sparse(layout=layout)


Ends = ByIndex | ByMatrix


class Form(NamedTuple):
    """One way to compute the network.

    Attributes:
        make: (edge_index, num_nodes, dtype) -> the form of one graph.
        matrices: How many dense [N, E] tables a step of so many iterations holds.
    """

    make: Callable[[Tensor, int, torch.dtype], Ends]
    matrices: Callable[[int], int]

    def dense_bytes(self, graph: Graph, graph_iters: int, item_bytes: int = 4) -> int:
        return self.matrices(graph_iters) * graph.num_nodes * graph.num_edges * item_bytes


def _in_layout(kind: type[ByMatrix], layout: torch.layout) -> Callable[[Tensor, int, torch.dtype], Ends]:
    return lambda edge_index, num_nodes, dtype: kind(edge_index, num_nodes, dtype, layout)


FORMS = {
    "index": Form(ByIndex, lambda iters: 0),
    "csr": Form(_in_layout(ByMatrix, torch.sparse_csr), lambda iters: 0),
    "coo": Form(_in_layout(ByMatrix, torch.sparse_coo), lambda iters: 0),
    "dense": Form(_in_layout(ByMatrix, torch.strided), lambda iters: 2),
    "weighted": Form(_in_layout(ByWeightedMatrix, torch.strided), lambda iters: 2 + 2 * iters),
}


def logits_of(network: AttentionNetwork, x: Tensor, ends: Ends) -> Tensor:
    """Logits of all edges, [E], of node features [N, F]: `AttentionNetwork.forward` in another form."""
    edge_network, node_network = network.edge_network, network.node_network
    x = network.input_network(x)
    for _ in range(network.graph_iters):
        x_src, x_dst = ends.at_src(x), ends.at_dst(x)
        a = torch.sigmoid(edge_network(torch.cat([x_src, x_dst], dim=1)))
        sums = [ends.sums_at_dst(a, x_src, x), ends.sums_at_src(a, x_dst, x)]
        x = node_network(torch.cat([*sums, x], dim=1)) + x
    logits: Tensor = edge_network(torch.cat([ends.at_src(x), ends.at_dst(x)], dim=1))
    return logits.squeeze(1)


# --- steps -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Job:
    """What one process is asked for."""

    graph: Graph
    form: str
    true_weight: float
    hidden: int
    graph_iters: int
    seed: int
    repeats: int
    warmup: int = 2


class Trainer:
    """heptrkx's loss and optimiser."""

    def __init__(self, job: Job) -> None:
        graph = job.graph
        self._x, self._label = torch.from_numpy(graph.features), torch.from_numpy(graph.label)
        self._weight = torch.where(self._label > 0, job.true_weight, 1.0)
        self._network = AttentionNetwork(3, hidden=job.hidden, graph_iters=job.graph_iters, seed=job.seed)
        self._optimizer = torch.optim.Adam(self._network.parameters(), lr=1e-3, weight_decay=1e-5)
        began = time.perf_counter()
        self._ends = FORMS[job.form].make(torch.from_numpy(graph.edge_index), graph.num_nodes, torch.float32)
        self.seconds_to_make = time.perf_counter() - began

    def step(self) -> dict[str, float]:
        times = [time.perf_counter()]
        self._optimizer.zero_grad()
        logits = logits_of(self._network, self._x, self._ends)
        loss = F.binary_cross_entropy_with_logits(logits, self._label, weight=self._weight)
        times.append(time.perf_counter())
        loss.backward()
        times.append(time.perf_counter())
        self._optimizer.step()
        times.append(time.perf_counter())
        forward, backward, _ = np.diff(times).tolist()
        return {"loss": loss.item(), "seconds": times[-1] - times[0], "forward": forward, "backward": backward}


def training_steps(world: World, job: Job) -> dict[str, Any]:
    """Times and peak memory of some steps in this process."""
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", message="Sparse CSR tensor support is in beta")
    pair = Graph(job.graph.features[:2], np.array([[0], [1]]), np.ones(1, np.float32))
    Trainer(replace(job, graph=pair)).step()  # all code is loaded before memory is looked at
    bare = peak_rss_bytes()
    trainer = Trainer(job)
    steps = [trainer.step() for _ in range(job.warmup + job.repeats)]
    return {
        "first_loss": steps[0]["loss"],
        "making": trainer.seconds_to_make,
        **{name: [step[name] for step in steps[job.warmup :]] for name in ("seconds", "forward", "backward")},
        "above_bare": peak_rss_bytes() - bare,
    }


def graphs_to_step(divided: dict[str, list[Divided]], whole: bool) -> Iterator[tuple[str, str, Graph]]:
    """(set, which graph, graph): the sector with the number of edges nearest to the mean, and the whole event."""
    for name, events in divided.items():
        sectors = [sector for event in events for sector in event.sectors if sector.num_edges]
        if not sectors:
            raise SystemExit(f"set {name}: no sector has an edge; take events with more hits.")
        mean = statistics.mean(sector.num_edges for sector in sectors)
        yield name, "sector", min(sectors, key=lambda sector: abs(sector.num_edges - mean))
        if whole:
            yield name, "whole", events[0].whole


def problem_of(form: str, graph: Graph, options: argparse.Namespace) -> str | None:
    """Why a form is not run on a graph; None if it is."""
    needed = FORMS[form].dense_bytes(graph, options.graph_iters)
    if needed > options.dense_gb * GB:
        return f"does not fit: {needed / GB:.3g} GB"
    needed += STEP_BYTES * graph.num_edges * options.hidden * options.graph_iters
    free = psutil.virtual_memory().available
    return f"not run: needs some {needed / GB:.0f} GB, {free / GB:.0f} are free" if needed > free else None


def steps_in_turns(graph: Graph, true_weight: float, options: argparse.Namespace) -> dict[str, list[dict[str, Any]]]:
    """What each round says of each form that fits."""
    names = ("hidden", "graph_iters", "seed", "repeats")
    how = {name: getattr(options, name) for name in names}
    runs: dict[str, list[dict[str, Any]]] = {
        form: [] for form in options.forms if problem_of(form, graph, options) is None
    }
    for _ in range(options.rounds):
        for form, found in runs.items():
            job = Job(graph, form, true_weight, **how)
            found += run_ranks(training_steps, 1, job, transport="gloo", timeout=options.timeout)
    return runs


def figures_of(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    together = {name: Spread.of([t for run in runs for t in run[name]]) for name in ("seconds", "forward", "backward")}
    making = Spread.of([run["making"] for run in runs])
    return {**together, "making": making, "above_bare": max(run["above_bare"] for run in runs)}


def refuse_if_losses_differ(runs: dict[str, list[dict[str, Any]]]) -> float:
    """The largest relative difference of the first loss.

    Raises:
        SystemExit: If forms do not compute the same network.
    """
    if not runs:
        return 0.0
    losses = np.array([found[0]["first_loss"] for found in runs.values()])
    difference = float((losses.max() - losses.min()) / losses.min())  # numpy's: NaN if any is
    if not difference <= LARGEST_DIFFERENCE:
        raise SystemExit(f"first losses differ by {difference:.1e} between forms: {dict(zip(runs, losses.tolist()))}")
    return difference


# --- tables ----------------------------------------------------------------------------------------------------------

Row = dict[str, Any]


def show_sizes(divided: dict[str, list[Divided]], source: str, results: measuring.Results) -> None:
    rows: list[Row] = []
    for name, events in divided.items():
        sectors = [sector for event in events for sector in event.sectors]
        row = {"measured": "size", "set": name, "source": source, "sectors": len(sectors), "events": len(events)}
        for what, graphs in (("sector", sectors), ("whole", [event.whole for event in events])):
            row[f"{what}_nodes"] = mean_and_range([graph.num_nodes for graph in graphs])
            row[f"{what}_edges"] = mean_and_range([graph.num_edges for graph in graphs])
            row[f"{what}_true"] = mean_and_range([graph.true_share for graph in graphs])
            row[f"{what}_dense_bytes"] = max(FORMS["dense"].dense_bytes(graph, 0) for graph in graphs)
        rows.append(row)
        results.add(**row)
    columns: dict[str, Callable[[Row], str]] = {
        "set": lambda row: row["set"],
        "sectors": lambda row: str(row["sectors"]),
        "nodes": lambda row: as_text(row["sector_nodes"], "{:,.0f}"),
        "edges": lambda row: as_text(row["sector_edges"], "{:,.0f}"),
        "true": lambda row: as_text(row["sector_true"], "{:.1%}"),
        "dense GB": lambda row: f"{row['sector_dense_bytes'] / GB:.3g}",
        "uncut nodes": lambda row: f"{row['whole_nodes']['mean']:,.0f}",
        "uncut edges": lambda row: f"{row['whole_edges']['mean']:,.0f}",
        "uncut true": lambda row: f"{row['whole_true']['mean']:.1%}",
        "uncut dense GB": lambda row: f"{row['whole_dense_bytes'] / GB:.3g}",
    }
    note = (
        "Of sectors: mean [smallest, largest]; true: share of candidate edges. Uncut: the same hits and cuts without "
        "sectors, mean over events. Dense GB: Ri and Ro in float32, of the largest graph."
    )
    results.show(f"heptrkx's sets, {source}", columns, rows, note)


def mean_and_range(values: Sequence[float]) -> dict[str, float]:
    return {"mean": statistics.mean(values), "low": min(values), "high": max(values)}


def as_text(values: dict[str, float], form: str) -> str:
    return f"{form.format(values['mean'])} [{form.format(values['low'])}, {form.format(values['high'])}]"


def losses_of(event: Divided) -> dict[str, int]:
    """What borders cut of one event, and out of how many."""
    (src, dst), true = event.whole.edge_index, event.whole.label > 0
    cut = (event.sector[src] != event.sector[dst]) | (event.sector[src] < 0)
    target = true & event.is_target[src]
    found = {"edges": np.ones_like(true), "true": true, "target": target}
    losses = {name: int(np.sum(cut & chosen)) for name, chosen in found.items()}
    losses |= {f"{name}_of": int(np.sum(chosen)) for name, chosen in found.items()}
    losses["broken"] = len(np.unique(event.particle_id[src[cut & target]]))
    losses["broken_of"] = len(np.unique(event.particle_id[src[target]]))
    losses["nodes"], losses["nodes_of"] = int(np.sum(event.sector < 0)), event.whole.num_nodes
    return losses


def show_losses(divided: dict[str, list[Divided]], source: str, results: measuring.Results) -> None:
    rows: list[Row] = []
    for name, events in divided.items():
        each = [losses_of(event) for event in events]
        row = {"measured": "loss", "set": name, "source": source, **{key: sum(e[key] for e in each) for key in each[0]}}
        rows.append(row)
        results.add(**row)

    def share(name: str) -> Callable[[Row], str]:
        def text(row: Row) -> str:
            of = row[f"{name}_of"]
            return f"{row[name]:,} of {of:,}" + (f" ({row[name] / of:.1%})" if of else "")

        return text

    columns: dict[str, Callable[[Row], str]] = {
        "set": lambda row: row["set"],
        "hits in no sector": share("nodes"),
        "candidate edges cut": share("edges"),
        "true segments cut": share("true"),
        "segments of targets cut": share("target"),
        "targets broken": share("broken"),
    }
    note = (
        f"Cut: the ends lie in different sectors, or in none. Targets: particles with pT > {TARGET_PT:g} GeV and at "
        f"least {TARGET_HITS} selected hits; broken: at least one segment is cut. Out of those in the uncut graph."
    )
    results.show(f"What sectors lose, {source}", columns, rows, note)


def show_steps(
    divided: dict[str, list[Divided]], source: str, options: argparse.Namespace, results: measuring.Results
) -> None:
    rows: list[Row] = []
    differences = []
    for name, which, graph in graphs_to_step(divided, options.whole):
        runs = steps_in_turns(graph, RECIPES[name].true_weight, options)
        differences.append(refuse_if_losses_differ(runs))
        about = {"measured": "step", "set": name, "source": source, "graph": which}
        about |= {"nodes": graph.num_nodes, "edges": graph.num_edges}
        for form in options.forms:
            row: Row = {**about, "form": form, "problem": problem_of(form, graph, options)}
            if form in runs:
                row |= {**figures_of(runs[form]), "problem": None}
                if "index" in runs:
                    base = [statistics.median(run["seconds"]) for run in runs["index"]]
                    mine = [statistics.median(run["seconds"]) for run in runs[form]]
                    row["than_index"] = Spread.of([m / b for m, b in zip(mine, base)])
            rows.append(row)
            results.add(**row)

    def ms(name: str) -> Callable[[Row], str]:
        return lambda row: f"{1000 * row[name].median:,.1f}" if name in row else ""

    columns: dict[str, Callable[[Row], str]] = {
        "set": lambda row: f"{row['set']} {row['graph']}",
        "form": lambda row: row["form"],
        "nodes": lambda row: f"{row['nodes']:,}",
        "edges": lambda row: f"{row['edges']:,}",
        "step s": lambda row: row["problem"] or row["seconds"].text("{:.4f}"),
        "x index": lambda row: row["than_index"].text("{:.2f}") if "than_index" in row else "",
        "forward ms": ms("forward"),
        "backward ms": ms("backward"),
        "making ms": ms("making"),
        "peak MiB": lambda row: f"{row['above_bare'] / MIB:,.0f}" if "above_bare" in row else "",
        "kB / edge": lambda row: f"{row['above_bare'] / row['edges'] / 1000:.1f}" if "above_bare" in row else "",
    }
    note = (
        f"Rounds: {options.rounds}, {options.repeats} steps each; median [smallest, largest]. x index: how many times "
        "longer, by round. Making: matrices from edge_index, once a graph. Peak: above the process before it. First "
        f"losses of forms agree to {max(differences, default=0.0):.0e}."
    )
    results.show(f"A training step, {source}", columns, rows, note)


if __name__ == "__main__":
    main()
