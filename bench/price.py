"""What do the bitwise rules cost, and which of them does the hash need?

    python bench/price.py --case large                    price on a simulated event of TrackML size
    python bench/price.py --data DIR --event 1012         on a real one
    python bench/price.py --case small --hidden 16 --repeats 3     seconds, to see that it runs

One rank takes the same training step with all rules, without each, and without all that can be switched off. The
variants take turns, step by step, so that a busy moment hits all alike. Then, on a smaller event, each variant trains
on 1, 2, 3, 4 ranks (threads) with tiles in ranges and dealt out at random, and the parameters' hashes are compared.
That a hash holds without a rule shows no need for it here; it does not show that there is none.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence

import cases
import flags
import measuring
import on_ranks
import torch
from bitwise import parameters_after
from measuring import Columns, Row, Spread
from on_ranks import Job
from without_rules import RULES, without

from domainpar.parallel.world import World
from domainpar.testing import run_ranks
from domainpar.tracking.events.store import EventStore
from domainpar.tracking.networks.catalogue import DTYPES
from domainpar.tracking.training.parts import PartLoader

GROUPINGS = ("contiguous", "random")


def main(argv: Sequence[str] | None = None) -> None:
    options = parse(argv)
    torch.set_num_threads(1)
    results = measuring.Results("price", options)
    hashes = hashes_of(options)
    case = cases.chosen_case(options)
    results.console.print(f"{case}; {flags.in_words(options)}, 1 rank")
    timed = seconds_of_steps(Job(case.store, flags.training_of(options)), options.repeats)
    with_all = timed["all rules"]
    for variant, seconds in timed.items():
        phases = {phase: Spread.of([step[phase] for step in seconds]) for phase in seconds[0]}
        ratio = Spread.of([full["total"] / step["total"] for full, step in zip(with_all, seconds)])
        row = {"variant": variant, **phases, "price": ratio, "hashes": hashes[variant], "case": case.name}
        bits_change = not set(hashes[variant]) & set(hashes["all rules"])
        results.add(edges=case.record.num_edges, bits_change=bits_change, **row)
    show(results, options)
    results.end()


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = flags.parser(__doc__, "price", case="large")
    flags.add_network(parser)
    parser.add_argument("--repeats", type=int, default=7, help="steps of each variant, after one to warm up")
    parser.add_argument("--hash-hits", type=int, default=6_000, help="hits of the event that hashes are made on")
    parser.add_argument("--hash-steps", type=int, default=5, help="training steps before hashes are compared")
    parser.add_argument("--hash-ranks", type=int, nargs="+", default=[1, 2, 3, 4])
    return parser.parse_args(argv)


def variants() -> dict[str, tuple[str, ...]]:
    """The rules that each variant goes without."""
    return {"all rules": (), **{f"without {rule}": (rule,) for rule in RULES}, "without all these": tuple(RULES)}


# --- the price -------------------------------------------------------------------------------------------------------


def seconds_of_steps(job: Job, repeats: int) -> dict[str, list[dict[str, float]]]:
    """Seconds of a step and of its phases, of every variant in turns: networks of their own on parts that all share."""
    world = World.alone()
    loader = PartLoader(EventStore(job.store), world, dtype=DTYPES[job.training.dtype])
    trainers = {}
    for name, rules in variants().items():
        with without(rules):
            trainers[name] = job.trainer(world, loader)
    clock = on_ranks.PhaseClock(world)
    seconds: dict[str, list[dict[str, float]]] = {name: [] for name in trainers}
    for turn in range(repeats + 1):
        for name, (trainer, samples) in trainers.items():
            with without(variants()[name]):
                record = clock.step(lambda trainer=trainer, samples=samples: trainer.step(samples, 0))
            if turn:  # the first one warms up
                phases = {phase: record["phases"][phase] for phase in on_ranks.PHASES}
                seconds[name].append({"total": record["seconds"], **phases})
    return seconds


# --- the hash --------------------------------------------------------------------------------------------------------


def hashes_of(options: argparse.Namespace) -> dict[str, list[str]]:
    """Of each variant, the different hashes that ranks and groupings lead to; one if none matters."""
    smaller = {"data": None, "hits": options.hash_hits, "tiles": 24, "num_events": 1}
    store = cases.chosen_case(argparse.Namespace(**{**vars(options), **smaller})).store
    hashes: dict[str, list[str]] = {}
    for name, rules in variants().items():
        of_variant: set[str] = set()
        for ranks in options.hash_ranks:
            for grouping in GROUPINGS:
                training = flags.training_of(options, grouping=grouping)
                with without(rules):
                    of_variant |= set(run_ranks(parameters_after, ranks, store, training, options.hash_steps, 1, True))
        hashes[name] = sorted(of_variant)
    return hashes


def show(results: measuring.Results, options: argparse.Namespace) -> None:
    runs = len(options.hash_ranks) * len(GROUPINGS)

    def hashes(row: Row) -> str:
        return "one" if len(row["hashes"]) == 1 else f"{len(row['hashes'])} of {runs}"

    columns: Columns = {
        "variant": lambda row: row["variant"],
        "step s": lambda row: row["total"].text(),
        **{name: lambda row, name=name: f"{row[name].median:.3f}" for name in ("forward", "backward", "reduce")},
        "price": lambda row: f"{row['price'].median - 1:+.1%}",
        "between": lambda row: f"{row['price'].low - 1:+.1%} {row['price'].high - 1:+.1%}",
        "hashes": hashes,
        "bits": lambda row: "others" if row["bits_change"] else "the same",
    }
    note = (
        "Price: what all rules take longer than this variant, median over turns of the ratio within a turn. Hashes: "
        f"how many different ones {runs} runs end with, {options.hash_ranks} ranks, tiles in ranges and at random. "
        "Bits: whether any of them is the one with all rules; a variant with the same bits has replaced nothing."
    )
    results.show("The price of the bitwise rules, one rank", columns, results.rows, note)
    spread = statistics.median([row["total"].high / row["total"].low for row in results.rows]) - 1
    results.console.print(f"Steps of one variant differ by {spread:.0%}; one turn does not resolve a smaller price.")


if __name__ == "__main__":
    measuring.run(__file__)
