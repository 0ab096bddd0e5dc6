"""What does `parallelize` cost a model on one rank, and what do its exchanges make of two?

    python bench/parallelized.py --data DIR --event 1012      the largest graph a real event; minutes
    python bench/parallelized.py                              a simulated one
    python bench/parallelized.py --sizes small --networks GCN agnn --repeats 3 --rounds 1 --hidden 16       seconds

One rank takes the same forward and backward pass with a model as it is (bare) and wrapped, on graphs of several sizes.
They take turns: bare, wrapped, bare again, so that a busy moment hits both, and what two equal things differ by is
known. The same on a graph of a dozen nodes, where nothing but Python is left, says what a torch call costs.
Then ranks as processes take steps of the wrapped models, and ranks as threads count what each model exchanges.

The program fails if losses or gradients differ: wrapped from bare, two ranks from one. Models that drop numbers draw
other ones when wrapped; they are compared without.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence

import cases
import flags
import measuring
import torch
from compared import NETWORKS, SIZES, largest
from measuring import Columns, Row, of, ranks_of
from plain_pyg import read_event
from torch_geometric.data import Data
from wrapped import LIMIT, exchanges, one_rank, several_ranks

LARGEST_DIFFERENCE = {"float32": 1e-4, "float64": 1e-11}
"""Of losses, and of gradients against the largest one of the model."""


def main(argv: Sequence[str] | None = None) -> int:
    options = parse(argv)
    torch.set_num_threads(1)
    results = measuring.Results("parallelized", options)
    of_size = {size: argparse.Namespace(**{**vars(options), **SIZES[size], "num_events": 1}) for size in options.sizes}
    sized = {size: cases.chosen_case(flags_of_size) for size, flags_of_size in of_size.items()}
    graphs = {size: read_event(case.store, options.dtype) for size, case in sized.items()}
    for size, graph in graphs.items():
        text = f"{size}: {sized[size].name}, {graph.num_nodes:,} nodes, {graph.num_edges:,} edges"
        results.console.print(f"{text}; hidden {options.hidden}, {options.layers} layers, {options.dtype}")
    first, last = sized[options.sizes[0]], sized[options.sizes[-1]]
    limit = LARGEST_DIFFERENCE[options.dtype]
    rows, summary = one_rank(results, graphs, options)
    show_one_rank(results, rows, summary, graphs)
    differences = {"wrapped and bare": (largest(row["difference"] for row in rows), limit)}
    if options.ranks:
        rows = several_ranks(results, last, options)
        show_ranks(results, rows)
        differences["ranks"] = largest(row["difference"] for row in rows), limit
    rows = exchanges(results, first, options)
    show_exchanges(results, rows)
    apart = largest(row["difference"] for row in rows if row["form"] == "wrapped")
    differences["two ranks and one in float64"] = apart, LARGEST_DIFFERENCE["float64"]
    results.end()
    return agree(results, differences)


def agree(results: measuring.Results, differences: dict[str, tuple[float, float]]) -> int:
    """1 if losses or gradients differ by more than rounding."""
    for between, (difference, limit) in differences.items():
        verdict = "agree" if difference <= limit else "DIFFER"
        results.console.print(f"{between}: losses and gradients {verdict}: {difference:.1e}, limit {limit:.0e}")
    return int(not all(difference <= limit for difference, limit in differences.values()))


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = flags.parser(__doc__, "parallelized", case="large")
    flags.add_rounds(parser, rounds=3, repeats=7)
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES), help="`large` is what the flags ask")
    parser.add_argument("--networks", nargs="+", choices=NETWORKS, default=list(NETWORKS), help="default: all")
    parser.add_argument("--hidden", type=int, default=32, help="width; a wider model costs less, as a share")
    parser.add_argument("--layers", type=int, default=3, help="convolutions of torch_geometric's models")
    parser.add_argument("--graph-iters", type=int, default=4, help="iterations of interaction and agnn")
    parser.add_argument("--dtype", choices=flags.DTYPES, default="float32")
    parser.add_argument("--tiny-repeats", type=int, default=100, help="turns on the graph of a dozen nodes")
    parser.add_argument("--ranks", type=int, nargs="*", default=[1, 2], help="none: no steps on ranks")
    parser.add_argument("--transport", choices=("mpi", "gloo", "threads"), default="mpi", help="of these ranks")
    parser.add_argument("--count-iters", type=int, default=8, help="iterations in the table of exchanges")
    return parser.parse_args(argv)


def show_one_rank(
    results: measuring.Results, rows: Sequence[Row], summary: Sequence[Row], graphs: dict[str, Data]
) -> None:
    """Two tables: each model on each graph, and of each model what a torch call costs and from where that is little."""
    columns: Columns = {
        "model": lambda row: row["network"],
        "edges": lambda row: f"{row['edges']:,}",
        "bare ms": lambda row: f"{1e3 * row['bare'].median:.1f}",
        "wrapped ms": lambda row: f"{1e3 * row['wrapped'].median:.1f}",
        "cost": lambda row: f"{row['cost'].median:+.1%}",
        "from, to": lambda row: f"{row['cost'].low:+.1%} {row['cost'].high:+.1%}",
        "forward": lambda row: f"{row['cost_forward'].median:+.1%}",
        "backward": lambda row: f"{row['cost_backward'].median:+.1%}",
        "CPU": lambda row: f"{row['cost_cpu'].median:+.1%}",
        "resolved": lambda row: f"{row['resolved']:.1%}",
        "bits": lambda row: "the same" if row["same_bits"] else f"{row['difference']:.0e}",
    }
    note = (
        "Forward and backward, of the same weights in turns. Cost: wrapped over the mean of the bare steps before and "
        "after it, less 1; median over turns, smallest and largest. CPU: the same in seconds of the processor. "
        "Resolved: what two bare steps of one turn differ by, median. Bits: of loss and gradients, or by how much they "
        "differ; of models with dropout, without it."
    )
    results.show("One rank, wrapped against bare", columns, rows, note)

    def cost_at(size: str) -> Callable[[Row], str]:
        return lambda row: f"{row['costs'][size].median:+.1%}" if size in row["costs"] else ""

    columns = {
        "model": lambda row: row["network"],
        "calls": lambda row: f"{row['calls']}",
        "us a call": lambda row: f"{row['call_us']:.1f}",
        "+ mode": lambda row: f"{row['mode_us']:.1f}",
        "+ wrapped": lambda row: f"{row['watch_us']:.1f}",
        "fixed ms": lambda row: f"{1e3 * row['fixed']:.2f}",
        **{f"{graphs[size].num_edges:,}": cost_at(size) for size in graphs},
        f"{LIMIT:.0%} at edges": lambda row: "" if row["below"] is None else f"{row['below']:,.0f}",
    }
    note = (
        "Calls: torch calls of a forward pass. Us a call: on a graph of a dozen nodes, bare; what a mode that does "
        "nothing adds; what wrapping adds, with all that happens once a pass. Fixed: what wrapping adds to forward and "
        f"backward there. {LIMIT:.0%} at: the edges on which this is {LIMIT:.0%} of the bare step, by the time an edge "
        "takes on the largest graph; what grows with the graph, as dropout does, is not in it."
    )
    results.show("What it costs by size", columns, summary, note)


def show_ranks(results: measuring.Results, rows: Sequence[Row]) -> None:
    """The table of steps on ranks."""
    columns: Columns = {
        "model": lambda row: row["network"],
        "ranks": ranks_of,
        "step ms": of("total", "{:.1f}", 1e3),
        "from, to": lambda row: f"{1e3 * row['total'].low:.1f} {1e3 * row['total'].high:.1f}",
        "speed-up": lambda row: f"{row['speed_up'].median:.2f}",
        **{name: of(name, "{:.1f}", 1e3) for name in ("forward", "backward", "sum")},
        "exchanges": lambda row: f"{row['exchanges']}",
        "sums": lambda row: f"{row['sums']}",
        "ghosts / owned": lambda row: f"{row['ghosts_share']:.2%}",
        "differ": lambda row: f"{row['difference']:.0e}",
    }
    note = (
        "Wrapped models; ms of the slowest rank, median. Sum: of gradients. Speed-up: over the first number of ranks, "
        "median over rounds. Exchanges, sums: of a forward pass. Differ: loss or gradients from the first line. * more "
        "ranks than cores."
    )
    results.show("Steps on ranks", columns, rows, note)


def show_exchanges(results: measuring.Results, rows: Sequence[Row]) -> None:
    """The table of what two ranks send each other."""
    columns: Columns = {
        "model": lambda row: row["network"],
        "form": lambda row: row["form"],
        "of": lambda row: row["steps"],
        "exchanges": lambda row: f"{row['exchanges']}",
        "sums": lambda row: f"{row['sums']}",
        "sent forward": lambda row: f"{row['sent_forward']}",
        "backward": lambda row: f"{row['sent_backward']}",
        "differ": lambda row: "" if row["difference"] is None else f"{row['difference']:.0e}",
    }
    note = (
        "Two ranks. Exchanges: how often ghosts are filled in a forward pass; sums: how often something is summed or "
        "compared over ranks. Sent: exchanges that the transport was asked for, forward and backward. Stages: the "
        "built-in network, for comparison. Differ: loss or gradients from one rank, in float64."
    )
    results.show("What a step exchanges", columns, rows, note)


if __name__ == "__main__":
    measuring.run(__file__)
