"""What do agnn's dense and sparse matrices cost against rows by index, and what do heptrkx's sectors lose?

    python bench/agnn_forms.py --data DIR --event 1012      the sets of heptrkx from a real event, minutes
    python bench/agnn_forms.py                              from a simulated one
    python bench/agnn_forms.py --whole                      also steps of the whole barrel, where they fit
    python bench/agnn_forms.py --data DIR --event 1001 1003 1009 1010 --epochs 1      epochs, not steps; deck: 4 events
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

Each run is a fresh process with one thread; forms take turns. `--epochs` trains on all sectors of a set but the last
eighth (`med`) or sixteenth, a step a sector, and evaluates the others: 7 and 1 graphs of one `med` event, 60 and 4 of
four `big` ones, as Farrell and Ju timed in 2019. Their seconds were taken elsewhere, for epochs that are not told: what
compares is the ratio of forms.
"""

from __future__ import annotations

import argparse
import statistics
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import flags
import measuring
import numpy as np
import psutil
import torch
from attention_forms import FORMS, logits_of
from cases import chosen_names
from heptrkx_sectors import RECIPES, TARGET_HITS, TARGET_PT, Divided, Graph, divide, losses_of
from measuring import Columns, Row, Spread, of
from torch import Tensor
from torch.nn import functional as F

from domainpar.nn.published import AttentionNetwork
from domainpar.parallel.world import World
from domainpar.testing import run_ranks
from domainpar.tracking.events import trackml
from domainpar.tracking.events.graph import Hits
from domainpar.tracking.events.simulate import simulate_event
from domainpar.tracking.training.record import peak_rss_bytes

GB = 1e9
MIB = 2**20
LARGEST_DIFFERENCE = 1e-5
"""Of the first loss of two forms, relative."""

STEP_BYTES = 90
"""Peak of a float32 step per edge, hidden unit and iteration, roughly, without dense matrices."""


def main(argv: Sequence[str] | None = None) -> None:
    options = parse(argv)
    torch.set_num_threads(1)
    results = measuring.Results("agnn_forms", options)
    source, events = read_events(options)
    results.console.print(f"events: {source}; agnn, hidden {options.hidden}, {options.graph_iters} iterations, float32")
    divided = {name: [divide(hits, RECIPES[name]) for hits in events] for name in options.sets}
    show_sizes(divided, source, results)
    show_losses(divided, source, results)
    if options.epochs:
        show_epochs(divided, source, options, results)
    else:
        show_steps(divided, source, options, results)
    results.end()


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = flags.parser(__doc__, "agnn_forms")
    group = parser.add_argument_group("events")
    group.add_argument("--data", type=Path, help="folder of real TrackML events, CSV, instead of a simulated one")
    group.add_argument("--event", nargs="+", help="which of them, by the end of their names; default: the first")
    group.add_argument("--hits", type=int, default=105_000, help="hits of the simulated event (default 105000)")
    group.add_argument("--seed", type=int, default=0, help="of the simulation and of the network")
    group.add_argument("--sets", nargs="+", choices=RECIPES, default=["small", "med", "big"], help="of heptrkx")
    network = parser.add_argument_group("network")
    network.add_argument("--hidden", type=int, default=64, help="width (default 64)")
    network.add_argument("--graph-iters", type=int, default=8, help="iterations (default 8)")
    parser.add_argument("--forms", nargs="+", choices=FORMS, default=list(FORMS), help="default: all")
    parser.add_argument("--whole", action="store_true", help="steps of the whole barrel too: some 6 GB in a full event")
    parser.add_argument("--dense-gb", type=float, default=4.0, help="dense matrices beyond are not made (default 4)")
    parser.add_argument("--epochs", type=int, default=0, help="epochs over sets of graphs instead of steps (default 0)")
    flags.add_rounds(parser, rounds=3, repeats=5, timeout=900.0)
    parser.add_argument("--quick", action="store_true", help="small and short: shows that it runs, nothing else")
    if parser.parse_args(argv).quick:
        parser.set_defaults(hits=4_000, sets=["med"], hidden=8, graph_iters=2, rounds=1, repeats=1)
    options = parser.parse_args(argv)
    if options.event is not None and options.data is None:
        parser.error("--event names real events; say with --data in which folder they are.")
    return options


def read_events(options: argparse.Namespace) -> tuple[str, list[Hits]]:
    """Name of the events in results, and their hits; a simulated one where there are no real ones."""
    if options.data is not None:
        try:
            names = trackml.list_events(options.data)
        except ValueError as missing:
            print(f"no real events, a simulated one instead: {missing}")
        else:
            names = chosen_names(names, options.event, 1)
            numbers = "-".join(str(int(name)) for name in names)
            return f"real-{numbers}", [trackml.read_event(options.data, name) for name in names]
    return f"hits{options.hits}-seed{options.seed}", [simulate_event(options.seed, options.hits)]


def show_sizes(divided: dict[str, list[Divided]], source: str, results: measuring.Results) -> None:
    """Sizes of graphs, in sectors and whole."""
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
    columns: Columns = {
        "set": lambda row: row["set"],
        "sectors": lambda row: str(row["sectors"]),
        "nodes": lambda row: "{mean:,.0f} [{low:,.0f}, {high:,.0f}]".format(**row["sector_nodes"]),
        "edges": lambda row: "{mean:,.0f} [{low:,.0f}, {high:,.0f}]".format(**row["sector_edges"]),
        "true": lambda row: "{mean:.1%} [{low:.1%}, {high:.1%}]".format(**row["sector_true"]),
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


def show_losses(divided: dict[str, list[Divided]], source: str, results: measuring.Results) -> None:
    """Edges and particles lost where sectors are cut apart."""
    rows: list[Row] = []
    for name, events in divided.items():
        each = [losses_of(event) for event in events]
        row = {"measured": "loss", "set": name, "source": source, **{key: sum(e[key] for e in each) for key in each[0]}}
        rows.append(row)
        results.add(**row)

    def share(row: Row, name: str) -> str:
        whole = row[f"{name}_of"]
        return f"{row[name]:,} of {whole:,}" + (f" ({row[name] / whole:.1%})" if whole else "")

    columns: Columns = {
        "set": lambda row: row["set"],
        "hits in no sector": partial(share, name="nodes"),
        "candidate edges cut": partial(share, name="edges"),
        "true segments cut": partial(share, name="true"),
        "segments of targets cut": partial(share, name="target"),
        "targets broken": partial(share, name="broken"),
    }
    note = (
        f"Cut: the ends lie in different sectors, or in none. Targets: particles with pT > {TARGET_PT:g} GeV and at "
        f"least {TARGET_HITS} selected hits; broken: at least one segment is cut. Out of those in the uncut graph."
    )
    results.show(f"What sectors lose, {source}", columns, rows, note)


def show_steps(
    divided: dict[str, list[Divided]], source: str, options: argparse.Namespace, results: measuring.Results
) -> None:
    """Seconds and memory of training steps, form by form, and how much longer they take than by index."""
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
                for name in ("seconds", "forward", "backward"):
                    row[name] = Spread.of([seconds for run in runs[form] for seconds in run[name]])
                row["making"] = Spread.of([run["making"] for run in runs[form]])
                row |= {"above_bare": max(run["above_bare"] for run in runs[form]), "problem": None}
                if "index" in runs:
                    medians = ([statistics.median(run["seconds"]) for run in runs[name]] for name in (form, "index"))
                    row["than_index"] = Spread.of([mine / theirs for mine, theirs in zip(*medians)])
            rows.append(row)
            results.add(**row)

    columns: Columns = {
        "set": lambda row: f"{row['set']} {row['graph']}",
        "form": lambda row: row["form"],
        "nodes": lambda row: f"{row['nodes']:,}",
        "edges": lambda row: f"{row['edges']:,}",
        "step s": lambda row: row["problem"] or row["seconds"].text("{:.4f}"),
        "x index": lambda row: row["than_index"].text("{:.2f}") if "than_index" in row else "",
        "forward ms": of("forward", "{:,.1f}", 1e3),
        "backward ms": of("backward", "{:,.1f}", 1e3),
        "making ms": of("making", "{:,.1f}", 1e3),
        "peak MiB": lambda row: f"{row['above_bare'] / MIB:,.0f}" if "above_bare" in row else "",
        "kB / edge": lambda row: f"{row['above_bare'] / row['edges'] / 1000:.1f}" if "above_bare" in row else "",
    }
    note = (
        f"Rounds: {options.rounds}, {options.repeats} steps each; median [smallest, largest]. x index: how many times "
        "longer, by round. Making: matrices from edge_index, once a graph. Peak: above the process before it. First "
        f"losses of forms agree to {max(differences, default=0.0):.0e}."
    )
    results.show(f"A training step, {source}", columns, rows, note)


OF_DECK = {("med", "dense"): 24.04, ("med", "index"): 9.63, ("med", "coo"): 10.64, ("big", "index"): 81.9,
           ("big", "coo"): 102.7}  # fmt: skip
"""Training times of Farrell and Ju 2019, slide 9.1: dense, scatter and sparse products, on 7/1 and 60/4 graphs."""


def show_epochs(
    divided: dict[str, list[Divided]], source: str, options: argparse.Namespace, results: measuring.Results
) -> None:
    """Seconds of an epoch over a set of sectors, beside those that were published."""
    rows: list[Row] = []
    how = {name: getattr(options, name) for name in ("hidden", "graph_iters", "seed")}
    for name, events in divided.items():
        graphs = [sector for event in events for sector in event.sectors]
        held_out = len(graphs) // (8 if name == "med" else 16) or 1
        for form in options.forms:
            row: Row = {"measured": "epoch", "set": name, "source": source, "form": form}
            row |= {"graphs": f"{len(graphs) - held_out}/{held_out}", "deck": OF_DECK.get((name, form))}
            row["problem"] = max((problem_of(form, graph, options) or "" for graph in graphs), key=len) or None
            if row["problem"] is None:
                job = Job(tuple(graphs), form, RECIPES[name].true_weight, repeats=options.epochs, **how)
                (found,) = run_ranks(training_epochs, 1, job, held_out, transport="gloo", timeout=options.timeout)
                row |= {"seconds": Spread.of(found["seconds"]), "loss": found["loss"]}
            rows.append(row)
            results.add(**row)

    def than_index(row: Row, name: str) -> str:
        by_index = [other for other in rows if other["set"] == row["set"] and other["form"] == "index"]
        if not by_index or not row.get(name) or not by_index[0].get(name):
            return ""
        mine, theirs = (each[name].median if name == "seconds" else each[name] for each in (row, by_index[0]))
        return f"{mine / theirs:.2f}"

    columns: Columns = {
        "set": lambda row: f"{row['set']} {row['graphs']}",
        "form": lambda row: row["form"],
        "epoch s": lambda row: row["problem"] or row["seconds"].text("{:.2f}"),
        "x index": partial(than_index, name="seconds"),
        "deck s": lambda row: "" if row["deck"] is None else f"{row['deck']:.4g}",
        "deck x scatter": partial(than_index, name="deck"),
        "validation loss": lambda row: f"{row['loss']:.5f}" if "loss" in row else "",
    }
    note = "Graphs: to train on / to evaluate. One warm-up epoch; then the median [shortest, longest]."
    results.show(f"Epochs over sets of sectors, {source}", columns, rows, note)


# --- steps, each run in a process of its own ------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Job:
    """The steps that one process is asked for, on the first graph or on each of several."""

    graphs: tuple[Graph, ...]
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
        self._true_weight = job.true_weight
        self._network = AttentionNetwork(3, hidden=job.hidden, graph_iters=job.graph_iters, seed=job.seed)
        self._optimizer = torch.optim.Adam(self._network.parameters(), lr=1e-3, weight_decay=1e-5)
        began = time.perf_counter()
        make = FORMS[job.form].make
        self._ends = [make(torch.from_numpy(each.edge_index), each.num_nodes, torch.float32) for each in job.graphs]
        self.seconds_to_make = time.perf_counter() - began
        self._data = [(torch.from_numpy(each.features), torch.from_numpy(each.label)) for each in job.graphs]

    def step(self, number: int = 0) -> dict[str, float]:
        """One training step on a graph, as `measuring.timed_step`."""
        return measuring.timed_step(self._optimizer, partial(self.loss, number))

    def loss(self, number: int) -> Tensor:
        """The loss of a graph."""
        features, label = self._data[number]
        logits = logits_of(self._network, features, self._ends[number])
        weight = torch.where(label > 0, self._true_weight, 1.0)
        return F.binary_cross_entropy_with_logits(logits, label, weight=weight)


def training_steps(world: World, job: Job) -> Row:
    """Times and peak memory of some steps in this process."""
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", message="Sparse CSR tensor support is in beta")
    pair = Graph(job.graphs[0].features[:2], np.array([[0], [1]]), np.ones(1, np.float32))
    Trainer(replace(job, graphs=(pair,))).step()  # all code is loaded before memory is looked at
    bare = peak_rss_bytes()
    trainer = Trainer(job)
    steps = [trainer.step() for _ in range(job.warmup + job.repeats)]
    return {
        "first_loss": steps[0]["loss"],
        "making": trainer.seconds_to_make,
        **{name: [step[name] for step in steps[job.warmup :]] for name in ("seconds", "forward", "backward")},
        "above_bare": peak_rss_bytes() - bare,
    }


def training_epochs(world: World, job: Job, held_out: int) -> Row:
    """Seconds of each epoch after the first, and the last validation loss."""
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", message="Sparse CSR tensor support is in beta")
    trainer, seconds, loss = Trainer(job), [], 0.0
    for _ in range(1 + job.repeats):
        began = time.perf_counter()
        for number in range(len(job.graphs) - held_out):
            trainer.step(number)
        with torch.no_grad():
            of_graphs = [float(trainer.loss(number)) for number in range(len(job.graphs))[-held_out:]]
        seconds.append(time.perf_counter() - began)
        loss = statistics.mean(of_graphs)
    return {"seconds": seconds[1:], "loss": loss}


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


def steps_in_turns(graph: Graph, true_weight: float, options: argparse.Namespace) -> dict[str, list[Row]]:
    """Figures of each round of each form that fits."""
    how = {name: getattr(options, name) for name in ("hidden", "graph_iters", "seed", "repeats")}
    runs: dict[str, list[Row]] = {form: [] for form in options.forms if problem_of(form, graph, options) is None}
    for _ in range(options.rounds):
        for form, of_form in runs.items():
            job = Job((graph,), form, true_weight, **how)
            of_form += run_ranks(training_steps, 1, job, transport="gloo", timeout=options.timeout)
    return runs


def refuse_if_losses_differ(runs: dict[str, list[Row]]) -> float:
    """The largest relative difference of the first loss.

    Raises:
        SystemExit: If forms do not compute the same network.
    """
    if not runs:
        return 0.0
    losses = np.array([of_form[0]["first_loss"] for of_form in runs.values()])
    difference = float((losses.max() - losses.min()) / losses.min())  # numpy's: NaN if any is
    if not difference <= LARGEST_DIFFERENCE:
        raise SystemExit(f"first losses differ by {difference:.1e} between forms: {dict(zip(runs, losses.tolist()))}")
    return difference


if __name__ == "__main__":
    measuring.run(__file__)
