"""Events of the built-in simulation as ColliderML's parquet files: moved onto the layers of the OpenDataDetector."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from domainpar.tracking.events.colliderml import BARREL_RADII, CODE_OF_VOLUME, DISK_Z
from domainpar.tracking.events.detector import SURFACES
from domainpar.tracking.events.simulate import simulate_event

SAMPLE = "ttbar_pu200"
OWN_VOLUMES = (16, 17, 18, 23, 24, 25, 28, 29, 30)
"""Of the OpenDataDetector, by the code of the subdetector."""


def moved(hits):
    """Positions of hits, shifted as far as the layer they lie on, float32 [N, 3]."""
    position = hits.position.copy()
    for surface in SURFACES:
        rows = (hits.volume == surface.volume) & (hits.layer == surface.layer)
        code, place = CODE_OF_VOLUME[surface.volume], surface.layer // 2 - 1
        if surface.is_barrel:
            position[rows, :2] *= np.float32(BARREL_RADII[code][place] / surface.coordinate)
        else:
            position[rows, 2] += np.float32(DISK_Z[code][place] - surface.coordinate)
    return position


def tables_of(hits):
    """The row of one event in both tables, as lists by column."""
    position, particles = moved(hits), hits.particles
    direction = np.random.default_rng(0).uniform(-np.pi, np.pi, len(particles.pt))
    of_hits = {
        **{axis: position[:, i] for i, axis in enumerate("xyz")},
        "time": np.zeros(len(hits), np.float32),
        "particle_id": hits.particle_id.astype(np.uint64),
        "detector": np.array([CODE_OF_VOLUME[volume] for volume in hits.volume.tolist()], np.uint8),
        "volume_id": np.array([OWN_VOLUMES[CODE_OF_VOLUME[volume]] for volume in hits.volume.tolist()], np.uint8),
        "layer_id": hits.layer.astype(np.uint16),
        "surface_id": hits.module.astype(np.uint32),
    }
    of_particles = {
        "particle_id": particles.particle_id.astype(np.uint64),
        "pdg_id": np.full(len(particles.pt), 211),
        "px": (particles.pt * np.cos(direction)).astype(np.float32),
        "py": (particles.pt * np.sin(direction)).astype(np.float32),
        "pz": (particles.pt * np.sinh(particles.eta)).astype(np.float32),
        **{f"v{axis}": particles.vertex[:, i] for i, axis in enumerate("xyz")},
        "charge": particles.charge.astype(np.float32),
        "num_tracker_hits": particles.nhits.astype(np.int32),
        "primary": particles.particle_id % 2 == 1,
    }
    return of_hits, of_particles


def write_table(path, event_ids, rows, **options):
    """A parquet file with a row for each event."""
    path.parent.mkdir(parents=True, exist_ok=True)
    columns = {name: pa.array([row[name] for row in rows]) for name in rows[0]}
    pq.write_table(pa.table({"event_id": pa.array(event_ids, pa.uint32()), **columns}), path, **options)


def write_sample(directory, num_events=3, num_hits=600, sample=SAMPLE, first=0, change=None):
    """Shards of two events as the dataset has them; `change` gets the rows of each event, as lists by column.

    Returns:
        The simulated hits, by the number of their event.
    """
    hits = {first + i: simulate_event(i, num_hits=num_hits) for i in range(num_events)}
    rows = {number: tables_of(event) for number, event in hits.items()}
    for number, both in rows.items():
        if change is not None:
            change(number, *both)
    numbers, shards = sorted(hits), -(-num_events // 2)
    for shard in range(shards):
        mine = numbers[2 * shard : 2 * shard + 2]
        for i, kind in enumerate(("tracker_hits", "particles")):
            name = f"{sample}_{kind}"
            path = Path(directory) / name / "data" / name / f"train-{shard:05d}-of-{shards:05d}.parquet"
            write_table(path, mine, [rows[number][i] for number in mine])
    return hits
