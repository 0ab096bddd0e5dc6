"""The work of a training on a ring of nodes, round numbers all of it, and a machine."""

from types import SimpleNamespace

import numpy as np

from domainpar.tracking.cost.cuts import STORED, Tiling
from domainpar.tracking.cost.machine import Machine
from domainpar.tracking.cost.model import StepWork, Way
from domainpar.tracking.cost.pieces import Line, PartMemory, PerRow
from domainpar.tracking.training.sampler import Sample
from partitioners import TileGraph

MACHINE = Machine("some", ranks=8, memory=1e9, latency=1e-3, rate=1e6, busy=1.5)
NODES, TILES = 64, 16


def sample(edges, nodes=NODES, tiles=TILES, name="event"):
    return Sample(SimpleNamespace(event=name, num_edges=edges, num_nodes=nodes, num_tiles=tiles))


def ring():
    """A ring of nodes in tiles of four, an edge from each node to the next."""
    edge_index = np.stack([np.arange(NODES), (np.arange(NODES) + 1) % NODES])
    tile = np.arange(NODES) // (NODES // TILES)
    return Tiling(STORED, edge_index, TileGraph.from_assignment(edge_index, tile, TILES), tile)


MEMORY = PartMemory(0, PerRow(edge=1e6)), PartMemory(0, PerRow(edge=3e5))


def ways(*lines, memory=MEMORY):
    """By how much is computed again: nothing, and all."""
    return dict(zip((None, 1), map(Way, lines, memory)))


def work(**known):
    return StepWork(**{
        "here": MACHINE, "ways": ways(Line(0.01, 0.001), Line(0.01, 0.0015)),
        "exchanges": 4, "bytes_of_ghost": 100.0, "bytes_of_parameters": 1000, "bare": 10_000_000, "event": "event",
        "tiling": ring(), "largest": NODES, "steps": [[sample(NODES)]], "steps_per_epoch": 1, **known,
    })  # fmt: skip
