"""A small event as ACTS writes it in CSV: tables of text, which a test may change before they are files."""

import gzip
from pathlib import Path

import numpy as np

FIVE = [f"particle_id_{part}" for part in ("pv", "sv", "part", "gen", "subpart")]
BARCODES = [(1, 0, 1, 0, 0), (1, 0, 2, 0, 0), (7, 0, 1, 0, 3)]
"""Of the three particles with hits; the table lists one more, before the last."""

RADII = {2: 32.0, 4: 72.0, 6: 116.0, 8: 172.0}
"""Layers of volume 8, and where they lie."""


def geometry_id(volume, layer, surface, extra=0):
    return (volume << 56) | (layer << 36) | (surface << 8) | extra


def one_number(barcode):
    """The id in one number, as releases before 44 packed it: 12, 12, 16, 8 and 16 bits."""
    pv, sv, part, gen, subpart = barcode
    return (pv << 52) | (sv << 40) | (part << 24) | (gen << 16) | subpart


def rows_of(barcode, five):
    return list(barcode) if five else [one_number(barcode)]


def tables(five=True, volume=8, measured=True, surface=lambda one: one << 8, scale=1.0):
    """The tables of an event as lists of rows, the first names columns.

    Three particles cross four layers; the first measurement of the second particle is one with that of the third; the
    last measurement is noise. Measurements are listed layer by layer, true hits from the outside in.
    """
    measurements, links, hits = [], [], []
    names = FIVE if five else ["particle_id"]
    for layer, radius in RADII.items():
        for k in range(3):
            phi = 0.3 + 0.002 * k * (layer == 2) + 0.5 * k * (layer > 2)
            where = scale * np.array([radius * np.cos(phi), radius * np.sin(phi), 0.2 * radius + k])
            # The third has lost a little of its momentum at each hit.
            momentum = [k + 1.0 - 0.01 * len(hits), 0.0, 0.2]
            geometry = (volume << 56) | (layer << 36) | surface(1 + (layer == 2) * 300 + k * (layer > 2))
            hits.append([*rows_of(BARCODES[k], five), geometry, *(where + 0.01), *momentum, len(hits)])
            if layer == 2 and k == 2:
                links.append([1, len(hits) - 1])
                continue
            links.append([len(measurements), len(hits) - 1])
            position = [f"{value:.6f}" for value in where] if measured else []
            measurements.append([len(measurements), geometry, "\x06", 0.5, *position])
    geometry = (volume << 56) | (8 << 36) | surface(77)
    noise = [f"{scale * value:.6f}" for value in (-172.0, 1.0, 30.0)] if measured else []
    measurements.append([len(measurements), geometry, "\x02", 0.5, *noise])
    last = len(hits) - 1
    hits, links = hits[::-1], [[measurement, last - hit] for measurement, hit in links]
    listed = [*BARCODES[:2], (1, 0, 1, 1, 0), BARCODES[2]]
    of_particles = [[*rows_of(one, five), 211 * (-1) ** i, 0.0, 0.0, float(i), i + 1.0, 0.0, 0.2, (-1) ** i]
                    for i, one in enumerate(listed)]  # fmt: skip
    axes = [f"global_{axis}" for axis in "xyz"] if measured else []
    return {
        "measurements": [["measurement_id", "geometry_id", "local_key", "local0", *axes], *measurements],
        "measurement-simhit-map": [["measurement_id", "hit_id"], *links],
        "hits": [[*names, "geometry_id", "tx", "ty", "tz", "tpx", "tpy", "tpz", "index"], *hits],
        "particles_simulated": [
            [*names, "particle_type", "vx", "vy", "vz", "px", "py", "pz", "q"], *of_particles,
        ],
    }  # fmt: skip


def text_of(table):
    return "".join(",".join(map(str, row)) + "\n" for row in table)


def write_event(directory, event="000000003", suffix=".csv", of=None, **options):
    """Write an event; `of` are its tables, those of `tables(**options)` by default."""
    for part, table in (of or tables(**options)).items():
        content = text_of(table).encode()
        path = Path(directory) / f"event{event}-{part}{suffix}"
        path.write_bytes(gzip.compress(content) if suffix.endswith(".gz") else content)


def files_of(hits):
    """The tables of an event of the built-in simulation, whose detector is ACTS's generic one."""
    five = [(1, 0, int(one), 0, 0) for one in hits.particles.particle_id]
    row_of = {int(one): row for row, one in enumerate(hits.particles.particle_id)}
    of_hits = [geometry_id(*map(int, one)) for one in zip(hits.volume, hits.layer, hits.module)]
    true = np.flatnonzero(hits.particle_id != 0)
    where = [[repr(float(value)) for value in one] for one in hits.position]
    pt, eta, phi = hits.particles.pt, hits.particles.eta, np.zeros(len(hits.particles.pt))
    momentum = np.stack([pt * np.cos(phi), pt * np.sin(phi), pt * np.sinh(eta)], axis=1)
    return {
        "measurements": [
            ["measurement_id", "geometry_id", "local_key", "global_x", "global_y", "global_z"],
            *([row, of_hits[row], "\x06", *where[row]] for row in range(len(hits))),
        ],
        "measurement-simhit-map": [["measurement_id", "hit_id"], *([row, i] for i, row in enumerate(true))],
        "hits": [
            [*FIVE, "geometry_id", "tx", "ty", "tz"],
            *([*five[row_of[int(hits.particle_id[row])]], of_hits[row], *where[row]] for row in true),
        ],
        "particles_simulated": [
            [*FIVE, "vx", "vy", "vz", "px", "py", "pz", "q"],
            *([*one, *hits.particles.vertex[i], *momentum[i], hits.particles.charge[i]] for i, one in enumerate(five)),
        ],
    }  # fmt: skip
