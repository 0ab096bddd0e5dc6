"""The command line that benchmarks share: events, ranks, the network, results."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Any

import cases
import measuring

from domainpar.tracking.config import TrainConfig
from domainpar.tracking.networks.catalogue import ORDERS

USUAL = TrainConfig(graph_iters=4, lr=1e-3, lr_schedule="constant", warmup=0, standardise=False, threads=1)
"""The training of benchmarks where no flag says otherwise."""


def parser(doc: str | None, bench: str, case: str | None = None, **of_cases: Any) -> argparse.ArgumentParser:
    """A parser with the flags of results, and of events if a default case is named; `of_cases` as for `cases`."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    if case is not None:
        cases.add_flags(parser, case, **of_cases)
    group, lines = parser.add_argument_group("results"), measuring.RESULTS / f"{bench}.jsonl"
    group.add_argument("--results", type=Path, default=lines, help="JSON lines are added to it")
    group.add_argument("--width", type=int, help="of the tables in characters; default: the terminal's")
    return parser


def add_network(
    parser: argparse.ArgumentParser, hidden: int = 64, graph_iters: int = 4, models: tuple[str, ...] = tuple(ORDERS)
) -> None:
    """Add the flags of the network that is trained."""
    parser.add_argument("--model", choices=models, default="interaction")
    parser.add_argument("--hidden", type=int, default=hidden, help=f"width (default {hidden})")
    parser.add_argument("--graph-iters", type=int, default=graph_iters, help=f"iterations (default {graph_iters})")
    parser.add_argument("--dtype", choices=("float32", "float64"), default="float32")


def in_words(options: argparse.Namespace) -> str:
    """The network that the flags ask for, in a line."""
    return f"{options.model}, hidden {options.hidden}, {options.graph_iters} iterations, {options.dtype}"


def add_rounds(parser: argparse.ArgumentParser, rounds: int, repeats: int, timeout: float = 3600.0) -> None:
    """Add the flags of repetitions."""
    parser.add_argument("--rounds", type=int, default=rounds, help="turns of each, in fresh processes")
    parser.add_argument("--repeats", type=int, default=repeats, help="steps measured in each, after warming up")
    parser.add_argument("--timeout", type=float, default=timeout, help="seconds for one turn")


def training_of(options: argparse.Namespace, **changes: Any) -> TrainConfig:
    """The training that the flags ask for."""
    names = ("model", "hidden", "graph_iters", "seed", "grouping", "dtype")
    asked = {name: getattr(options, name) for name in names if hasattr(options, name)}
    return replace(USUAL, **{**asked, **changes})
