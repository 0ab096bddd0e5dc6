"""What makes the training of these networks unstable on many devices, and what cures it?

    python bench/stability.py                                        all groups, three seeds: half an hour on two cores
    python bench/stability.py --groups optimiser --seeds 0             some of them
    python bench/stability.py --quick                                seconds, to see that it runs

Training on more devices by giving each of them events of its own means more events in a step. A group of variants asks
one question of that: how many events a step, which optimiser, which sum of their losses, how wide a network, norms,
weights of classes, weight decay. Each variant is `train` with other flags, on simulated events whose sizes differ by a
factor of six (candidate edges by more than twenty), with as many passes over them. `means` divides the loss of each
event by the weight of that event, and takes the mean over events, as programs do that average over devices; all others
divide the sum of all by the weight of all, as `train` does.

AUC: of the edges of the validation events, after the last epoch. Climb: all rises of the validation loss from one epoch
to the next, over its first value: 0 for a loss that only falls. Worst: the largest validation loss after the third
epoch over the smallest before it. Spikes: steps that `train` notes as such, of 1,000. Waiting: of 8 ranks with events
of their own, the share of their time that they wait for the one with most edges, if time goes with edges.
"""

from __future__ import annotations

import argparse
import io
import json
import multiprocessing
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import redirect_stdout
from dataclasses import replace
from itertools import pairwise, product
from pathlib import Path
from statistics import mean
from typing import Any

import cases
import flags
import measuring
import numpy as np
from measuring import Columns, Row

from domainpar.parallel.world import World
from domainpar.tracking.config import TrainConfig
from domainpar.tracking.display.chart import (
    BLUE,
    GREEN,
    ORANGE,
    PURPLE,
    SKY,
    VERMILION,
    Axis,
    Chart,
    Panel,
    Series,
    log_axis,
)
from domainpar.tracking.events.construct import Cuts
from domainpar.tracking.events.preparation import prepare
from domainpar.tracking.events.sources import open_source
from domainpar.tracking.events.store import EventStore
from domainpar.tracking.training import run
from domainpar.tracking.training.inputs import steps_of
from domainpar.tracking.training.loop import Trainer
from domainpar.tracking.training.sampler import deal, samples_of

COLOURS = (BLUE, ORANGE, GREEN, VERMILION, PURPLE, SKY)
BASE: dict[str, Any] = {"hidden": 32, "lr_schedule": "constant", "warmup": 0, "threads": 1, "log_every": 10_000}
SOME = {"events_per_step": 8, "lr": 8.5e-3}
MANY = {"events_per_step": 16, "lr": 1.2e-2}
FAST = MANY | {"lr": 4.8e-2}
GROUPS: dict[str, dict[str, dict[str, Any]]] = {
    "events of a step": {  # the rate as the root of their number, in proportion, or as it was
        "1": {},
        "8": SOME,
        "16": MANY,
        "16, rate x 16": FAST,
        "16, rate x 1": MANY | {"lr": 3e-3},
        "64": MANY | {"events_per_step": 64, "lr": 2.4e-2},
    },
    "rate x 16": {
        "alone": FAST,
        "and warm-up": FAST | {"warmup_epochs": 5},
        "and clip": FAST | {"clip": 0.1},
        "and both": FAST | {"warmup_epochs": 5, "clip": 0.1},
        "and weight decay 1": FAST | {"weight_decay": 1.0},
    },
    "optimiser": {
        "adamw": MANY,
        "sgd": MANY | {"optimizer": "sgd", "lr": 0.05},
        "lars": MANY | {"optimizer": "lars", "lr": 2.0},
        "lamb": MANY | {"optimizer": "lamb", "lr": 0.03},
    },
    "sum of losses": {
        "sum / sum": SOME,
        "means of means": SOME | {"means": True},
        "sum / sum, true edges x 10": SOME | {"true_weight": 10.0},
        "means of means, true edges x 10": SOME | {"true_weight": 10.0, "means": True},
    },
    # A rate that is right for 32, or one that falls as the width grows.
    "width and norm": {
        f"{hidden}, {norm}{', rate x 32 / width' * falls}": SOME
        | {"hidden": hidden, "norm": norm, "lr": SOME["lr"] * (32 / hidden if falls else 1)}
        for norm in ("layer", "none")
        for hidden, falls in ((32, False), (128, False), (128, True))
    },
    "sampling": {  # which events meet in a step: as many hits each, or as many events
        "shuffle": SOME,
        "buckets": SOME | {"sampling": "buckets"},
        "budget": {"lr": SOME["lr"], "sampling": "budget", "node_budget": 12_000},
    },
    "norm": {norm: SOME | {"norm": norm} for norm in ("layer", "batch", "graph", "none")},
    "wide": {  # minutes to an hour each
        f"{hidden}, rate x 32 / width": SOME | {"hidden": hidden, "lr": SOME["lr"] * 32 / hidden}
        for hidden in (256, 512)
    },
    "weight decay": {f"{decay:g}": SOME | {"weight_decay": decay} for decay in (0.0, 0.01, 0.1, 1.0)},
}
ALL = list(dict.fromkeys(name for variants in GROUPS.values() for name in variants))


class MeansOfMeans(Trainer):
    """Divides the loss of each event by the weight of that event, and takes their mean."""

    def _forward_and_back(self, part: Any, step: int, shares: Any, tally: Any) -> Any:
        own = self.loader.edge_weights.total(part.kind_counts) or 1.0
        return super()._forward_and_back(part, step, shares._replace(edges=own * self.events), tally)

    def step(self, samples: Any, step: int) -> dict[str, Any]:
        self.events = len(samples)
        return super().step(samples, step)


def trained(store: Path, variant: dict[str, Any], seed: int, epochs: int) -> list[Row]:
    """The records of one training, in a process of its own."""
    asked = dict(variant)
    run.Trainer = MeansOfMeans if asked.pop("means", False) else Trainer  # type: ignore[misc]
    with tempfile.TemporaryDirectory() as folder, redirect_stdout(io.StringIO()):
        out = Path(folder) / "run"
        config = TrainConfig(**{**BASE, **asked, "seed": seed, "epochs": epochs, "out": str(out)})
        try:
            run.train(config, store, World.alone())
        except Exception as error:  # a loss that is not finite ends a run: that is a result
            if "not finite" not in str(error):
                raise
        return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def events(options: argparse.Namespace) -> Path:
    """Simulated events of many sizes."""
    sizes = np.geomspace(options.hits / 2.5, options.hits * 2.5, options.num_events)
    of_name: dict[str, int] = {}
    source = open_source("simulate", num_events=options.num_events, cuts=Cuts(phi_slope=1.2e-3), seed=options.seed)
    for at, name in enumerate(source.names):
        of_name[name] = int(sizes[(at * 29) % len(sizes)])  # large and small ones in turn

    def read(name: str) -> Any:
        return open_source(
            "simulate",
            num_events=options.num_events,
            cuts=Cuts(phi_slope=1.2e-3),
            num_hits=of_name[name],
            seed=options.seed,
        ).read(name)

    source = replace(source, read=read, hits=None, settings={**source.settings, "num_hits": sorted(of_name.values())})
    directory = cases.CACHE / f"stability-{options.hits}-{options.num_events}-{options.seed}"
    prepare(source, directory, val_split=options.val_split, test_split=0.0, num_tiles=8)
    return directory


def figures(records: Sequence[Row]) -> Row:
    """Those of one training."""
    train = [record for record in records if record["split"] == "train"]
    val = [record for record in records if record["split"] == "val"]
    losses = [record["loss"] if record["loss"] is not None else np.nan for record in val]
    rises = [max(0.0, after - before) for before, after in pairwise(losses)]
    worst = max((losses[at] / min(losses[:at]) for at in range(3, len(losses))), default=np.nan)
    return {
        "auc": val[-1]["edge_auc_pooled"] if val and val[-1]["edge_auc_pooled"] is not None else 0.5,
        "climb": sum(rises) / losses[0] if losses else np.nan,
        "worst": worst,
        "spikes": 1000 * sum("spike" in record for record in train) / max(len(train), 1),
        "losses": losses,
        "steps": len(train),
    }


def main(argv: Sequence[str] | None = None) -> int:
    options = parse(argv)
    if options.drawn_from is not None:
        options.png.write_bytes(picture(options, kept(options.drawn_from)))
        return 0
    results = measuring.Results("stability", options)
    store = events(options)
    found: dict[tuple[str, str], list[Row]] = {}
    context = multiprocessing.get_context("forkserver")
    with ProcessPoolExecutor(options.workers, mp_context=context, max_tasks_per_child=1) as pool:
        pending: dict[str, Future[list[Row]]] = {}  # one variant may answer two questions
        for group, name, seed in product(options.groups, ALL, options.seeds):
            if name in GROUPS[group]:
                variant = GROUPS[group][name] | ({"hidden": 16} if options.quick else {})
                key = json.dumps([variant, seed], sort_keys=True)
                pending[key] = pending.get(key) or pool.submit(trained, store, variant, seed, options.epochs)
                found.setdefault((group, name), []).append({"key": key, "seed": seed})
        for (group, name), rows in found.items():
            for row in rows:
                row |= figures(pending[row["key"]].result())
                row["waiting"] = waiting(store, GROUPS[group][name], row["seed"], options.epochs)
                results.add(measured="stability", group=group, variant=name, **row)
                results.console.print(f"  {group}: {name}, seed {row['seed']}: AUC {row['auc']:.4f}")
    for group in options.groups:
        rows = [row_of(name, found[group, name]) for name in GROUPS[group]]
        show(results, group, rows, options)
    if options.png is not None:
        options.png.write_bytes(picture(options, found))
    results.end()
    return 0


def waiting(store: Path, variant: dict[str, Any], seed: int, epochs: int, ranks: int = 8) -> float:
    """The share of the time of some ranks, each with events of its own, that they wait for the one with most edges."""
    asked = {name: value for name, value in variant.items() if name != "means"}
    config, samples = (
        TrainConfig(**{**BASE, **asked, "seed": seed}),
        samples_of(EventStore(store).events("train"), None),
    )
    busy = there = 0
    for epoch in range(epochs):
        for step in steps_of(config, samples, epoch):
            costs = [sum(sample.cost for sample in dealt) for dealt in deal(step, ranks)]
            busy, there = busy + sum(costs), there + ranks * max(costs)
    return 1 - busy / there


def kept(path: Path) -> dict[tuple[str, str], list[Row]]:
    """Figures of trainings by group and variant, from a file of results; the last of each seed."""
    found: dict[tuple[str, str], dict[int, Row]] = {}
    for line in path.read_text().splitlines():
        row = json.loads(line)
        if row.get("measured") == "stability":
            found.setdefault((row["group"], row["variant"]), {})[row["seed"]] = row
    return {which: list(seeds.values()) for which, seeds in found.items()}


def row_of(name: str, seeds: Sequence[Row]) -> Row:
    """A row of a table: means over seeds, and how far apart they are."""
    row: Row = {"variant": name, "steps": max(seed["steps"] for seed in seeds)}
    for figure in ("auc", "climb", "worst", "spikes", "waiting"):
        values = [seed[figure] for seed in seeds]
        row |= {figure: mean(values), f"{figure} from": min(values), f"{figure} to": max(values)}
    return row


def show(results: measuring.Results, group: str, rows: Sequence[Row], options: argparse.Namespace) -> None:
    def of(name: str, form: str) -> Any:
        return lambda row: f"{row[name]:{form}} [{row[f'{name} from']:{form}}, {row[f'{name} to']:{form}}]"

    columns: Columns = {
        group: lambda row: row["variant"],
        "steps": lambda row: str(row["steps"]),
        "AUC": of("auc", ".4f"),
        "climb": of("climb", ".2f"),
        "worst": of("worst", ".2f"),
        "spikes of 1,000": of("spikes", ".1f"),
        "waiting": lambda row: f"{row['waiting']:.1%}",
    }
    note = f"Means of {len(options.seeds)} seeds [smallest, largest], {options.epochs} epochs."
    results.show(f"Stability: {group}", columns, rows, note)


def picture(options: argparse.Namespace, found: dict[tuple[str, str], list[Row]]) -> bytes:
    """The validation losses of all groups, a line for each seed, as PNG."""
    from domainpar.tracking.display.paint_matplotlib import paint, png

    return png(paint(Chart("stability", "Validation loss after each epoch, each seed", tuple(panels(options, found)))))


def panels(options: argparse.Namespace, found: dict[tuple[str, str], list[Row]]) -> Iterator[Panel]:
    for group in options.groups:
        series = []
        for name, colour in zip(GROUPS[group], COLOURS):
            # Seeds behind each other, with a gap, so that a variant has one entry in the legend.
            x, y = (
                np.concatenate([np.append(values(seed["losses"]), np.nan) for seed in found[group, name]])
                for values in (lambda losses: np.arange(1, len(losses) + 1.0), np.array)
            )
            series.append(Series(name, "line", colour, x, y, width=1.0))
        y_axis = log_axis(f"validation loss, {group}", np.concatenate([one.y for one in series]))
        yield Panel(group, tuple(series), Axis("epoch", low=0.0), y_axis)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = flags.parser(__doc__, "stability")
    parser.add_argument("--groups", nargs="+", choices=GROUPS, default=[group for group in GROUPS if group != "wide"])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--hits", type=int, default=1_200, help="of an event of middling size")
    parser.add_argument("--num-events", type=int, default=72)
    parser.add_argument("--val-split", type=float, default=1 / 9)
    parser.add_argument("--seed", type=int, default=0, help="of the simulation")
    parser.add_argument("--workers", type=int, default=2, help="trainings at a time, one thread each")
    parser.add_argument("--png", type=Path, help="the curves as a picture")
    parser.add_argument("--drawn-from", type=Path, help="results of earlier runs, of which only the picture is made")
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args(argv)
    if options.quick:
        options.seeds, options.epochs, options.num_events, options.hits = [0], 2, 9, 1000
        options.groups = options.groups[:2]
    return options


if __name__ == "__main__":
    measuring.run(__file__)
