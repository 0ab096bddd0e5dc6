"""Showers in a calorimeter as PyG graphs, with labels of cells and of the whole event, for `domainpar.prepare`.

    python examples/showers.py --out showers
    python -m domainpar.prepare --source pyg --input showers --store stores/showers
    python -m domainpar.train --store stores/showers --task node-class --label origin --aux energy:0.3
    python -m domainpar.train --store stores/showers --task graph-regression --label total

An event has a few electrons or photons, whose showers are narrow and begin early, and a few hadrons, whose showers are
wide and deep. A cell that reads more than the noise is a node. It has edges from and to its six nearest cells.
"""

import argparse
from pathlib import Path

import numpy as np
import torch

LAYERS, SIDE, CELL = 10, 40, 20.0  # layers in depth, cells along an edge, mm
NOISE, READ = 0.02, 0.05  # GeV: std of the noise of a cell, and the threshold of readout
FEW_PARTICLES = (1, 3)  # particles of each kind, from and to
DEPTH = {"electromagnetic": (2.0, 1.2), "hadronic": (5.0, 2.2)}  # layer of the maximum, std
WIDTH = {"electromagnetic": 0.7, "hadronic": 1.9}  # cells


def shower(kind: str, energy: float, generator: np.random.Generator) -> np.ndarray:
    """Energy that one particle leaves in each cell, GeV, [layers, side, side]: its profile, in random grains."""
    x, y = generator.uniform(4, SIDE - 4, 2)
    slope = generator.normal(0, 0.4, 2)
    middle, spread = DEPTH[kind]
    layer, cells = np.arange(LAYERS), np.arange(SIDE)
    along = np.exp(-0.5 * ((layer - middle - 0.5 * np.log(energy / 10)) / spread) ** 2)
    across = [
        np.exp(-0.5 * ((cells - start - step * layer[:, None]) / WIDTH[kind]) ** 2)
        for start, step in ((x, slope[0]), (y, slope[1]))
    ]
    profile = along[:, None, None] * across[0][:, :, None] * across[1][:, None, :]
    grains = generator.poisson(40 * energy * profile / profile.sum())
    return energy * grains / max(grains.sum(), 1)


def event(seed: int) -> dict[str, torch.Tensor]:
    """One event as a graph: cells above the threshold, edges between neighbours, and labels."""
    generator = np.random.default_rng(seed)
    deposits = {kind: np.zeros((LAYERS, SIDE, SIDE)) for kind in DEPTH}
    for kind, cells in deposits.items():
        for _ in range(generator.integers(FEW_PARTICLES[0], FEW_PARTICLES[1] + 1)):
            cells += shower(kind, generator.uniform(5, 40), generator)
    true = sum(deposits.values())
    read = true + generator.normal(0, NOISE, true.shape)
    layer, x, y = np.nonzero(read > READ)
    of_cells = true[layer, x, y]
    hadronic = deposits["hadronic"][layer, x, y] > 0.5 * of_cells
    place = np.stack([x * CELL, y * CELL, layer * 3 * CELL], axis=1)
    distance = torch.cdist(torch.from_numpy(place), torch.from_numpy(place)).fill_diagonal_(torch.inf)
    near = distance.topk(min(6, len(place) - 1), largest=False).indices
    edges = torch.stack([near.flatten(), torch.arange(len(place)).repeat_interleave(near.shape[1])])
    edges = torch.cat([edges, edges.flip(0)], dim=1).unique(dim=1)
    reads, position = torch.from_numpy(read[layer, x, y]).float(), torch.from_numpy(place).float()
    return {
        "x": torch.cat([reads[:, None].log(), position / 100], dim=1),
        "pos": position,
        "edge_index": edges,
        "edge_attr": (position[edges[1]] - position[edges[0]]) / CELL,
        "node_y_origin": torch.from_numpy(np.where(of_cells < NOISE, 0, np.where(hadronic, 2, 1))),  # noise, e, h
        "node_y_energy": torch.from_numpy(of_cells).float(),
        "graph_y_total": torch.tensor(true.sum()).float(),
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("showers"))
    parser.add_argument("--events", type=int, default=40)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    for seed in range(options.events):
        torch.save(event(seed), options.out / f"event{seed:03d}.pt")
    print(f"{options.events} events in {options.out}, the first of {len(event(0)['x'])} cells")
