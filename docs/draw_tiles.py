"""Draw the tiles, parts and halo nodes of a simulated event.

python docs/draw_tiles.py docs/tiles.png (needs matplotlib: pip install '.[report]')
"""

import sys
import tempfile
from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt
import numpy as np

from domainpar.parallel.local import TileRanges
from domainpar.plan import build_plans
from domainpar.tracking.events.construct import Cuts, build_graph
from domainpar.tracking.events.simulate import simulate_event
from domainpar.tracking.events.store import StoredEvent, write_event
from partitioners import Topology, get_partitioner
from partitioners.grouping import group

NUM_TILES, NUM_PARTS = 64, 4
COLOURS = ["#4269d0", "#efb118", "#3ca951", "#a463f2"]
HALO, CUT = "#d62728", "#d62728"


def stored_event(folder: Path) -> StoredEvent:
    """One simulated event, cut into tiles."""
    graph = build_graph(simulate_event(seed=7, num_hits=12_000), Cuts())
    topology = Topology(graph.edge_index, graph.num_nodes, graph.hits.position)
    tiles = get_partitioner("phi-eta")(topology, NUM_TILES)
    path = folder / "event.zarr.zip"
    write_event(path, graph, tiles, NUM_TILES)
    return StoredEvent(path)


def draw(event: StoredEvent, path: str) -> None:
    """Three pictures in the transverse plane: tiles, parts, and the halo nodes of one part."""
    nodes, edges = np.arange(event.num_nodes), np.arange(event.num_edges)
    x, y, _ = event.read_nodes("position", nodes).T
    ends = np.stack([event.read_edges("src", edges), event.read_edges("dst", edges)])
    part_of_tile = group(event.tile_graph(), NUM_PARTS)
    owner = TileRanges(event.node_ptr, event.edge_ptr, part_of_tile).node_owner()
    tile = np.repeat(np.arange(NUM_TILES), np.diff(event.node_ptr))
    plan = build_plans(ends, owner, NUM_PARTS, "incident")[0]
    figure, axes = plt.subplots(1, 3, figsize=(13, 4.6), layout="constrained")
    shades = np.random.default_rng(1).permutation(NUM_TILES) / NUM_TILES
    axes[0].scatter(x, y, s=2, c=shades[tile], cmap="tab20", linewidths=0)
    axes[0].set_title(f"{NUM_TILES} tiles, the same for any number of ranks")
    axes[1].scatter(x, y, s=2, c=[COLOURS[p] for p in owner], linewidths=0)
    axes[1].set_title(f"{NUM_PARTS} parts: groups of tiles, one part per rank")
    cut = owner[ends[0]] != owner[ends[1]]
    cut_here = cut & ((owner[ends] == 0).any(axis=0))
    axes[2].scatter(x, y, s=1, c="#dddddd", linewidths=0)
    axes[2].scatter(x[owner == 0], y[owner == 0], s=3, c=COLOURS[0], linewidths=0, label="owned by part 0")
    axes[2].plot(x[ends[:, cut_here]], y[ends[:, cut_here]], c=CUT, lw=0.3, alpha=0.6)
    ghosts = plan.ghost_ids
    axes[2].scatter(x[ghosts], y[ghosts], s=9, c=HALO, linewidths=0, label="its halo nodes, and cut edges")
    axes[2].set_title(f"part 0: {plan.num_owned:,} owned hits, {plan.num_ghosts:,} halo nodes")
    axes[2].legend(loc="lower right", fontsize=8, markerscale=2, framealpha=0.9)
    for axis in axes:
        axis.set_aspect("equal")
        axis.axis("off")
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder, stored_event(Path(folder)) as event:
        draw(event, sys.argv[1] if len(sys.argv) > 1 else "tiles.png")
