"""A drawn acorn event, and the ways acorn has to write it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")

PREFIXED = {
    "x": "hit_x", "z": "hit_z", "r": "hit_r", "phi": "hit_phi", "region": "hit_region",
    "volume_id": "hit_volume_id", "layer_id": "hit_layer_id", "module_id": "hit_module_id",
    "particle_id": "track_particle_id", "pt": "track_particle_pt", "radius": "track_particle_radius",
    "primary": "track_particle_primary", "nhits": "track_particle_nhits", "pdgId": "track_particle_pdgId",
    "eta_particle": "track_particle_eta", "truth_map": "track_to_edge_map", "y": "edge_y", "dr": "edge_dr",
}  # fmt: skip

# Hits 0 1 2 belong to particle 70 (2 GeV), 3 4 to particle 80 (0.4 GeV), hit 5 is noise. Hits 1 and 4 face each other
# across phi = pi.
R = [32.0, 72.0, 116.0, 32.0, 72.0, 500.0]
PHI = [3.0, 3.1, 3.12, -3.0, -3.1, 0.5]
Z = [1.0, 2.0, 3.0, -4.0, -9.0, 100.0]
EDGES = [[0, 1, 3, 0, 1, 5], [1, 2, 4, 4, 4, 2]]
LABEL = [True, True, True, False, False, False]
TRUE_EDGES = [[0, 1, 3], [1, 2, 4]]


def columns(**changes):
    """Entries of the file, by short names; a change to None leaves one out."""
    entries = {
        "hit_id": torch.arange(6),
        "x": torch.tensor([r * np.cos(phi) for r, phi in zip(R, PHI)]),
        "r": torch.tensor(R),
        "phi": torch.tensor(PHI),
        "z": torch.tensor(Z),
        "volume_id": torch.tensor([8, 8, 8, 8, 8, 13]),
        "layer_id": torch.tensor([2, 4, 6, 2, 4, 6]),
        "module_id": torch.tensor([11, 12, 13, 14, 15, 16]),
        "edge_index": torch.tensor(EDGES),
        "y": torch.tensor(LABEL),
        "track_edges": torch.tensor(TRUE_EDGES),
        "truth_map": torch.tensor([0, 1, 2]),
        "particle_id": torch.tensor([70, 70, 80]),
        "pt": torch.tensor([2000.0, 2000.0, 400.0]),
        "radius": torch.tensor([0.5, 0.5, 30.0]),
        "primary": torch.tensor([True, True, False]),
        "nhits": torch.tensor([3, 3, 7]),
        "pdgId": torch.tensor([13, 13, 11]),
        "eta_particle": torch.tensor([0.1, 0.1, -2.0]),
        "event_id": "000000007",
        "config": [{"stage": "graph_construction", "sizes": [np.float64(1.5), np.int64(3)]}],
    }
    entries |= changes
    return {name: value for name, value in entries.items() if value is not None}


def save(directory: Path, name: str = "event000000007.pyg", *, prefixed: bool = False, data: bool = True, **changes):
    """Write the event as acorn does and return its path."""
    entries = columns(**changes)
    if prefixed:
        entries = {PREFIXED.get(name, name): value for name, value in entries.items()}
    directory.mkdir(parents=True, exist_ok=True)
    if data:
        entries = pytest.importorskip("torch_geometric.data").Data(**entries)
    torch.save(entries, directory / name)
    return directory / name
