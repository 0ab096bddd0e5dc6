"""Which variant of the network learns most in the same time?

    python bench/learning.py                                         all variants of the table in this file
    python bench/learning.py default deep=graph-iters=6,lr=2e-3      these alone: of the table, or NAME=FLAG=VALUE,...
    python bench/learning.py --budget 60 --seeds 0 1 2 3 4           a minute of training each, five seeds
    python bench/learning.py --steps 320                             equal steps instead of equal time
    python bench/learning.py --store stores/mine --ranks 2           other events, more ranks
    python bench/learning.py default fast=lr=1e-2 --hits 3000 --num-events 4 --hidden 16 --steps 4     a minute

A variant is a set of flags of `domainpar.train`; a switch stands alone (`shared-weights`) or with `=true`. Each trains
on the built-in events, those of `make train` without arguments, once for each seed, one run after the other and seed
by seed, so that a spell of the machine hits all variants. Every run is `train` of `domainpar.tracking.training` in
processes of its own, which keep the memory that they free, as the command does.

Equal time: each variant first trains two epochs. Its first epoch, which loads the events, and its later steps say how
many epochs fit into `--budget` seconds of training steps: validation, checkpoints and compiling are not in it. All
seeds of a variant take as many epochs, and its schedule ends with the last. Leave the machine alone meanwhile: the
table says what training took, and a run that is more than 5 % off is named.

The figures are those that training logs after its last step, of the validation events: at a score of 0.5, against the
candidate edges.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cases
import flags
import measuring
from measuring import Columns, Row

from domainpar.parallel.world import World
from domainpar.prepare import prepare_store
from domainpar.testing import find_mpiexec, run_ranks
from domainpar.tracking.command_line import parse as parse_flags
from domainpar.tracking.config import ConfigError, PrepareConfig, TrainConfig
from domainpar.tracking.events.store import EventStore
from domainpar.tracking.events.store.schema import SCHEMA_VERSION
from domainpar.tracking.training.inputs import open_lessons
from domainpar.tracking.training.run import train

VARIANTS = {
    "default": "",
    "as it was": "no-residual,aggregate=sum,no-standardise",
    "standardised": "no-residual,aggregate=sum",
    "residual": "aggregate=sum",
    "mean": "aggregate=mean",
    "silu": "activation=silu",
    "features as they are": "no-standardise",
    "all readouts": "readouts=all",
    "rate 6e-3": "lr=6e-3",
    "2 iterations": "graph-iters=2",
    "4 iterations": "graph-iters=4",
    "6 iterations": "graph-iters=6",
    "constant rate": "lr-schedule=constant",
    "cosine": "lr-schedule=cosine",
    "node first": "model=interaction-node-first",
}
"""Variants by name: flags of `domainpar.train` that are not its defaults."""

OURS = ("epochs", "max-steps", "seed", "out", "store", "resume", "threads")
"""Flags of `domainpar.train` that this program sets."""

TIMING_EPOCHS = 2
NEAR_BUDGET = 0.05


@dataclass(frozen=True)
class Variant:
    """A set of flags of `domainpar.train`, and what it is called."""

    name: str
    flags: tuple[str, ...] = ()

    @classmethod
    def of(cls, text: str, common: Sequence[str] = ()) -> Variant:
        """Read `NAME` of the table, or `NAME=FLAG=VALUE,...`; `common` are flags of all variants, in words.

        Raises:
            ValueError: If there is no such variant or flag, or this program sets it.
        """
        name, given, settings = text.partition("=")
        if not given and name not in VARIANTS:
            raise ValueError(f"variant {name!r} is not in the table ({', '.join(VARIANTS)}); write NAME=FLAG=VALUE,...")
        pairs = [setting.partition("=") for setting in (settings if given else VARIANTS[name]).split(",") if setting]
        words = tuple(
            f"--{flag.replace('_', '-')}" + ("" if value in ("", "true") else f"={value}") for flag, _, value in pairs
        )
        if ours := [word for word in words if word.split("=")[0].removeprefix("--") in OURS]:
            raise ValueError(f"variant {name}: {' '.join(ours)} is not for a variant to set: this program does")
        try:
            parse_flags(TrainConfig, "", [*common, *words])
        except ConfigError as error:
            raise ValueError(f"variant {name}: {error.what}; {error.hint}") from error
        return cls(name, (*common, *words))


def main(argv: Sequence[str] | None = None) -> int:
    options = parse(argv)
    results = measuring.Results("learning", options)
    store = store_of(options)
    train_events, val_events = (len(EventStore(store).events(split)) for split in ("train", "val"))
    if not val_events:
        raise SystemExit(f"{store} has no validation events; prepare it with a larger --val-split.")
    aim = f"{options.steps} steps" if options.steps else f"{options.budget:g} s of training"
    results.console.print(f"{store}: {train_events} events to train on, {val_events} to validate with; {aim} each")
    bench = Bench(store, options.ranks, options.threads, options.timeout)
    epochs = {variant: epochs_of(bench, variant, options, results) for variant in variants_of(options)}
    for seed in options.seeds:
        for variant in epochs:
            row = {"variant": variant.name, "set": " ".join(variant.flags), "seed": seed}
            row |= outcome(bench, variant, seed, epochs[variant])
            results.add(measured="learning", **row)
            results.console.print(f"  {variant.name}, seed {seed}: {in_words(row, options)}")
    show(results, aim)
    results.end()
    return int(any(row["problem"] is not None for row in results.rows))


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = flags.parser(__doc__, "learning")
    parser.add_argument("variants", nargs="*", default=list(VARIANTS), help="of the table, or NAME=FLAG=VALUE,...")
    aim = parser.add_mutually_exclusive_group()
    aim.add_argument("--budget", type=float, default=120.0, help="seconds of training of each run (default 120)")
    aim.add_argument("--steps", type=int, help="steps of each run, rounded up to whole epochs, instead of --budget")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="of the runs of a variant")
    parser.add_argument("--hidden", type=int, help="width in all variants that set no other")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--threads", type=int, help="of a rank; default: as train takes them, an equal share of cores")
    parser.add_argument("--timeout", type=float, default=3600.0, help="seconds for one run")
    group = parser.add_argument_group("events")
    group.add_argument("--store", type=Path, help="prepared events, instead of the built-in ones")
    group.add_argument("--hits", type=int, default=PrepareConfig.hits, help="of a built-in event")
    group.add_argument("--num-events", type=int, default=10, help="built-in events")
    group.add_argument("--cache", type=Path, default=cases.CACHE, help="where built-in events are kept")
    options = parser.parse_args(argv)
    try:
        variants_of(options)
    except ValueError as error:
        parser.error(str(error))
    return options


def variants_of(options: argparse.Namespace) -> list[Variant]:
    common = [] if options.hidden is None else [f"--hidden={options.hidden}"]
    return [Variant.of(text, common) for text in options.variants]


def store_of(options: argparse.Namespace) -> Path:
    """The store that was named, or the built-in events, prepared as `train` without arguments prepares them."""
    if options.store is not None:
        return Path(options.store)
    directory = options.cache / f"built-in-{options.hits}-{options.num_events}-v{SCHEMA_VERSION}"
    config = PrepareConfig(hits=options.hits, events=options.num_events, store=str(directory))
    return prepare_store(config, World.alone())


# --- runs ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Bench:
    """Trains variants on the events of a store, each in processes of its own."""

    store: Path
    ranks: int
    threads: int | None
    timeout: float

    def steps_per_epoch(self, variant: Variant) -> int:
        config = parse_flags(TrainConfig, "", list(variant.flags))
        return open_lessons(config, self.store, World.alone()).steps_per_epoch

    def records(self, variant: Variant, seed: int, epochs: int) -> list[Row]:
        """The records of a run: its training steps, and a validation after each epoch.

        Raises:
            RuntimeError, TimeoutError: If it failed.
        """
        threads = [] if self.threads is None else [f"--threads={self.threads}"]
        transport: Any = "mpi" if find_mpiexec() else "gloo"
        with tempfile.TemporaryDirectory() as folder, measuring.allocator("keep"):
            ours = [f"--seed={seed}", f"--epochs={epochs}", f"--out={Path(folder, 'run')}", *threads]
            words, how = [*variant.flags, *ours], {"transport": transport, "timeout": self.timeout}
            of_root: list[Row] = run_ranks(training, self.ranks, words, self.store, **how)[0]
        return of_root


def training(world: World, words: list[str], store: Path) -> list[Row]:
    """Train as flags say; returns the records of the run on rank 0. *Collective*."""
    run = train(parse_flags(TrainConfig, "", words), store, world)
    if not world.is_root:
        return []
    return [json.loads(line) for line in (run.directory / "metrics.jsonl").read_text().splitlines()]


def epochs_of(bench: Bench, variant: Variant, options: argparse.Namespace, results: measuring.Results) -> int:
    """How long a variant is to be trained: the steps that were asked for, or what fits into the budget."""
    per_epoch = bench.steps_per_epoch(variant)
    said = f"  {variant.name} ({' '.join(variant.flags) or 'no flags'}): "
    if options.steps is not None:
        epochs = -(-options.steps // per_epoch)
    else:
        records = bench.records(variant, options.seeds[0], TIMING_EPOCHS)
        seconds = [record["seconds"] for record in records if record["split"] == "train"]
        epochs = epochs_within(options.budget, sum(seconds[:per_epoch]), seconds[per_epoch:], per_epoch)
        said += f"{1e3 * statistics.fmean(seconds[per_epoch:]):.0f} ms a step, "
    results.console.print(f"{said}{epochs} epochs of {per_epoch} steps")
    return epochs


def epochs_within(budget: float, first: float, later: Sequence[float], per_epoch: int) -> int:
    """The number of epochs whose seconds come nearest to a budget, at least 1.

    Args:
        budget: Seconds of training steps.
        first: Seconds of the first epoch, which also loads its events.
        later: Seconds of some later steps.
        per_epoch: Steps of an epoch.
    """
    return 1 + max(0, round((budget - first) / (per_epoch * statistics.fmean(later))))


def outcome(bench: Bench, variant: Variant, seed: int, epochs: int) -> Row:
    """Steps, seconds and the last validation of a run; or its `problem`, such as a loss that is not finite."""
    began = time.perf_counter()
    try:
        records = bench.records(variant, seed, epochs)
    except (RuntimeError, TimeoutError) as error:
        return {"problem": said_last(str(error))}
    steps = [record for record in records if record["split"] == "train"]
    last = next(record for record in reversed(records) if record["split"] == "val")
    seconds = [step["seconds"] for step in steps]
    return {
        "problem": None,
        "steps": len(steps),
        "seconds": sum(seconds),
        "step": statistics.median(seconds),
        "all_seconds": time.perf_counter() - began,
        "train_loss": steps[-1]["loss"],
        # A figure that there is nothing to divide for is left out of means.
        **{name: last[name] for name in FIGURES if last[name] is not None},
    }


FIGURES = ("edge_auc_pooled", "edge_efficiency", "edge_purity", "loss")


def said_last(text: str) -> str:
    """The last line of a failure that names its error."""
    lines = [line for line in text.strip().splitlines() if line.strip()]
    named = [line for line in lines if "Error: " in line or "Failed: " in line]
    return (named or lines)[-1].strip()


# --- what is shown ---------------------------------------------------------------------------------------------------


def in_words(row: Row, options: argparse.Namespace) -> str:
    """A run in a line."""
    if row["problem"] is not None:
        return f"FAILED: {row['problem']}"
    off = row["seconds"] / options.budget - 1
    late = options.steps is None and abs(off) > NEAR_BUDGET
    figures = " ".join(f"{name}={row[name]:.4f}" for name in FIGURES if name in row)
    budget = f", {off:+.0%} OFF ITS BUDGET" if late else ""
    return f"{row['steps']} steps in {row['seconds']:.1f} s{budget}, {figures}"


def show(results: measuring.Results, aim: str) -> None:
    def extremes(rows: Sequence[Row]) -> str:
        areas = [row["edge_auc_pooled"] for row in rows if "edge_auc_pooled" in row]
        return f"{min(areas):.4f} {max(areas):.4f}" if areas else "-"

    columns: Columns = {
        "variant": lambda rows: rows[0]["variant"],
        "runs": lambda rows: f"{sum(row['problem'] is None for row in rows)} of {len(rows)}",
        "steps": measuring.mean("steps", "{:.0f}"),
        "step s": measuring.mean("step", "{:.3f}"),
        "training s": measuring.mean("seconds", "{:.0f}", deviation=True),
        "AUC": measuring.mean("edge_auc_pooled", "{:.4f}", deviation=True),
        "from, to": extremes,
        "efficiency": measuring.mean("edge_efficiency", "{:.3f}", deviation=True),
        "purity": measuring.mean("edge_purity", "{:.3f}", deviation=True),
        "loss": measuring.mean("loss", "{:.4f}"),
    }
    sets = {row["variant"]: row["set"] or "no flags" for row in results.rows}
    note = (
        "Of the validation events after the last step: area under the ROC curve; efficiency and purity at a score of "
        "0.5; loss. Means over seeds ± standard deviation. runs: those that ended well, the others are in no mean. "
        "training s: of the steps alone. " + "; ".join(f"{name}: {words}" for name, words in sets.items())
    )
    results.show(f"Variants of the network, {aim}", columns, measuring.alike(results.rows, "variant"), note)


if __name__ == "__main__":
    measuring.run(__file__)
