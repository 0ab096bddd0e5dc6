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
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import measuring
import torch
from attention_forms import FORMS
from attention_steps import GB, figures_of, graphs_to_step, problem_of, refuse_if_losses_differ, steps_in_turns
from cases import chosen_names
from heptrkx_sectors import RECIPES, TARGET_HITS, TARGET_PT, Divided, divide, losses_of
from measuring import Spread

from domainpar.events import trackml
from domainpar.events.graph import Hits
from domainpar.events.simulate import simulate_event

MIB = 2**20

Row = dict[str, Any]


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


def show_losses(divided: dict[str, list[Divided]], source: str, results: measuring.Results) -> None:
    """What is lost where sectors are cut apart."""
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
