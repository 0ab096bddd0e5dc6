"""Pulls of tracks from files alone, by pandas and numpy: what `infer --format acts` wrote, and what ACTS made.

    python tests/pulls_of_csv.py TRACKS EVENTS [TESLA] [LEAST PT]

Widths (half of the central 68.3 %) of d0, z0, phi, theta and q/p, by |eta|, of tracks of at least seven measurements,
all of one particle from the beam. Helices in an even field; nothing of this package is used.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pandas as pd

NAMES = ("d0", "z0", "phi", "theta", "qop")
IDS = [f"particle_id_{part}" for part in ("pv", "sv", "part", "gen", "subpart")]


def at_beam(particles, tesla):
    """Parameters of each particle where its circle is closest to the beam line, [P, 5], by plane geometry."""
    x, y, z, px, py, pz, q = particles[["vx", "vy", "vz", "px", "py", "pz", "q"]].to_numpy(float).T
    pt, p = np.hypot(px, py), np.sqrt(px**2 + py**2 + pz**2)
    radius = pt / (0.299792458e-3 * tesla * q)  # signed: a positive charge turns right
    centre_x, centre_y = x + radius * py / pt, y - radius * px / pt
    # The direction there is across the line from the beam to the centre, as the particle turns.
    phi = np.arctan2(centre_x * np.sign(radius), -centre_y * np.sign(radius))
    d0 = np.abs(radius) - np.hypot(centre_x, centre_y)
    turned = (np.arctan2(py, px) - phi + np.pi) % (2 * np.pi) - np.pi
    z0 = z + radius * turned * pz / pt
    return np.stack([d0 * np.sign(radius), z0, phi, np.arctan2(pt, pz), q / p], axis=1)


def pulls(tracks, events, tesla=2.0, least_pt=2.0):
    """|eta| and the five pulls of each track that counts, [T, 6]."""
    rows = []
    for path in sorted(Path(tracks).glob("event*-trackparams.csv")):
        name, folder = path.name.split("-")[0], Path(events)
        parameters = pd.read_csv(path)
        measured = pd.read_csv(path.with_name(f"{name}-tracks.csv"))["Measurements_ID"]
        links = pd.read_csv(folder / f"{name}-measurement-simhit-map.csv").drop_duplicates("measurement_id")
        hits = pd.read_csv(folder / f"{name}-hits.csv", usecols=IDS)
        particles = pd.read_csv(folder / f"{name}-particles_simulated.csv").query("q != 0").reset_index(drop=True)
        number = {key: i for i, key in enumerate(particles[IDS].itertuples(index=False, name=None))}
        of_hit = np.array([number.get(key, -1) for key in hits.itertuples(index=False, name=None)])
        of_measurement = dict(zip(links["measurement_id"], of_hit[links["hit_id"]]))
        truth = at_beam(particles, tesla)
        prompt = np.hypot(particles["vx"], particles["vy"]) < 0.2
        counts = prompt & (np.hypot(particles["px"], particles["py"]) >= 0.999 * least_pt)
        for fitted, listed in zip(parameters.itertuples(index=False), measured):
            ids = [int(one) for one in listed.strip("[],").split(",")]
            whose = {of_measurement.get(one, -1) for one in ids}
            (particle,) = whose if len(whose) == 1 else (-1,)
            if len(ids) < 7 or particle < 0 or not counts[particle] or np.isnan(fitted.d0):
                continue
            off = np.array([getattr(fitted, of) for of in NAMES]) - truth[particle]
            off[2] = (off[2] + np.pi) % (2 * np.pi) - np.pi
            sigma = np.sqrt([getattr(fitted, f"var_{of}") for of in NAMES])
            rows.append([abs(np.arcsinh(1 / np.tan(truth[particle][3]))), *(off / sigma)])
    return np.array(rows).reshape(-1, 6)


def widths(values):
    """Half of the interval that holds 68.3 % of each column."""
    low, high = np.quantile(values, [0.1587, 0.8413], axis=0)
    return (high - low) / 2


if __name__ == "__main__":
    table = pulls(sys.argv[1], sys.argv[2], *map(float, sys.argv[3:]))
    for low, high in ((0.0, 1.0), (1.0, 1.5), (1.5, 2.0), (2.0, 2.5), (0.0, 2.5)):
        some = table[(table[:, 0] >= low) & (table[:, 0] < high), 1:]
        if len(some) >= 20:
            print(f"|eta| {low:.1f} to {high:.1f}: {len(some):6,} tracks", *map("{:.2f}".format, widths(some)))
