"""Training steps with every option, on ranks in many arrangements; importable by spawned ranks."""

from __future__ import annotations

import hashlib
import itertools
import random
from functools import cache
from pathlib import Path

from proving import check_halves
from random_events import random_event
from random_store import write_graph

from domainpar.nn.program import set_threads
from domainpar.parallel.world import World
from domainpar.tracking.config import TrainConfig
from domainpar.tracking.events.store import write_manifest
from domainpar.tracking.training.inputs import open_training_data
from domainpar.tracking.training.run import make_trainer
from partitioners import Topology, get_partitioner

SMALL = {"hidden": 16, "graph_iters": 3, "events_per_step": 2, "lr": 1e-2, "warmup": 0}
NUM_STEPS, NUM_EVENTS, NUM_TILES = 2, 2, 12

OPTIONS = {
    "tiles": ["metis", "phi-eta"],
    "model": ["interaction", "interaction-node-first"],
    "kind": [{"dtype": "float32"}, {"precision": "bf16"}, {"dtype": "float64"}],
    "aggregate": ["sum", "mean", "root"],
    "activation": ["relu", "silu", "tanh"],
    "residual": [True, False],
    "standardise": [True, False],
    "dropout": [0.0, 0.2],
    "shared_weights": [True, False],
    "recompute_every": [None, 2],
}

NUM_RANKS = 8
ARRANGEMENTS = [[(8, 8)], [(8, 2)], [(3, 3), (4, 4), (1, 1)], [(2, 2), (4, 2), (2, 1)], [(4, 1), (3, 3), (1, 1)]]
"""Eight ranks as groups that train apart from each other, and how many of each group share an event."""

GROUPINGS, THREADS = ["contiguous", "metis", "random"], [1, 2]


@cache
def rows_with_all_pairs():
    """Some settings of all options, among which each two values of two options meet."""
    missing = {
        pair
        for (one, ones), (other, others) in itertools.combinations(OPTIONS.items(), 2)
        for pair in itertools.product(((one, i) for i in range(len(ones))), ((other, i) for i in range(len(others))))
    }
    draw, rows = random.Random(0), []
    while missing:
        drawn = [{name: draw.randrange(len(values)) for name, values in OPTIONS.items()} for _ in range(100)]
        best = max(drawn, key=lambda row: sum(pair in missing for pair in itertools.combinations(row.items(), 2)))
        missing -= set(itertools.combinations(best.items(), 2))
        rows.append({name: OPTIONS[name][i] for name, i in best.items()})
    return rows


def write_stores(directory):
    """One store for each kind of tiles, of the same events."""
    for tiles in OPTIONS["tiles"]:
        records, graphs = [], []
        for seed in range(NUM_EVENTS):
            graph = random_event(seed, 60 + 9 * seed, 80)
            topology = Topology(graph.edge_index, graph.num_nodes, graph.hits.position)
            assignment = get_partitioner(tiles)(topology, NUM_TILES)
            records.append(write_graph(directory / tiles, graph, assignment, NUM_TILES, "train"))
            graphs.append((graph.edge_index, assignment))
        check_halves(*zip(*graphs))
        write_manifest(directory / tiles, records, {})
    return directory


def parameters_after_steps(world, stores, row, grouping="contiguous", threads=1):
    """One hash of all parameters after a few steps with some options."""
    flags = {name: value for name, value in row.items() if name not in ("tiles", "kind")}
    config = TrainConfig(**SMALL, **flags, **row["kind"], grouping=grouping)
    set_threads(threads)
    training_data = open_training_data(config, Path(stores) / row["tiles"], world)
    trainer = make_trainer(config, training_data, world, config)
    for step in range(NUM_STEPS):
        trainer.step(training_data.train, step)
    bits = b"".join(value.numpy().tobytes() for value in trainer.model.state_dict().values())
    return hashlib.sha256(bits).hexdigest()


TOGETHER = ARRANGEMENTS[:2]
"""Those in which all ranks train as one."""


def trials(first, arrangements=ARRANGEMENTS, times=1):
    """Numbers of rows, each with a way: what no bit may depend on. Another `first`, another way for each row.

    Args:
        first: Which rows come first, and how many threads they begin with.
        arrangements: Those that ways are made of.
        times: How often each way is taken.
    """
    count, ways = len(rows_with_all_pairs()), list(itertools.product(arrangements, GROUPINGS)) * times
    return [
        ((5 * first + number) % count, (groups, grouping, THREADS[(first + number) % 2]))
        for number, (groups, grouping) in enumerate(ways)
    ]


def many_hashes(world, stores, of_trials):
    """Of each trial the hash on this rank."""
    found, rows = [], rows_with_all_pairs()
    for row, (groups, grouping, threads) in of_trials:
        stops = list(itertools.accumulate(size for size, _ in groups))
        members = [range(stop - size, stop) for (size, _), stop in zip(groups, stops, strict=True)]
        domain_size = next(shared for (_, shared), stop in zip(groups, stops, strict=True) if world.rank < stop)
        transport = world.transport if len(groups) == 1 else world.transport.split(members)
        own = World.over(transport, domain_size=domain_size)
        found.append(parameters_after_steps(own, stores, rows[row], grouping, threads))
    return found
