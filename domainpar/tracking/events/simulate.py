"""Simulated collision events in the TrackML detector, with exact truth: the data that everything runs on offline.

Charged particles, prompt ones from many vertices along the beam and secondary ones from anywhere in the detector,
follow helices through the field map. Every flat module they cross gives a hit, so overlapping modules give the two or
three hits a surface of real events. Material scatters and stops particles, cells round positions, and noise falls
evenly on modules.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from domainpar.common.compiling import compiled
from domainpar.tracking.events import detector
from domainpar.tracking.events.beam_spot import BeamSpot
from domainpar.tracking.events.detector import MATERIAL
from domainpar.tracking.events.field import Field, forces
from domainpar.tracking.events.graph import Hits, Particles
from domainpar.tracking.events.motion import HIGHLAND, advance, arc_to_radius, twisted
from domainpar.tracking.events.sources import Events, Options, Source
from partitioners.topology import FloatArray, IntArray

USUAL_EVENTS = 10
"""Events that are simulated where no number is given."""

MIN_HITS = 20
"""Smallest `num_hits` that makes an event."""

MIN_WEIGHTED_HITS = 4
"""Particles with fewer hits have truth weight 0."""

HITS_PER_PARTICLE = 9.9
"""Mean over the particles drawn; it turns `num_hits` into a number of particles."""

# What stops particles, fitted so that hits per particle and per surface agree with real events (bench/RESULTS.md).
STOP_IN_BARREL, STOP_IN_DISK = 0.016, 0.021  # per surface crossed, as nuclear interactions do
MODULE_EFFICIENCY = 0.985
SMALLEST_PT = 0.15  # GeV; real events follow nothing below it past its first surface
ENERGY_LOSS = 0.0009  # GeV per surface for a fast particle; slow ones lose beta^-2 times as much
LARGEST_TURN = float(np.pi)  # half a turn: soft tracks do not come back
STEEPEST_BARREL_SLOPE = float(np.sinh(3.0))  # real events have no barrel hits of prompt tracks beyond |eta| = 3

# Electron, pion, kaon, proton. Secondaries are knocked out of material: more protons, which stop early.
MASSES = (0.00051, 0.1396, 0.4937, 0.9383)
PROMPT_SPECIES = (0.0, 0.91, 0.06, 0.03)
SECONDARY_SPECIES = (0.2, 0.35, 0.0, 0.45)

# Propagation stays on one helix for at most this far along r or z: the field changes little meanwhile.
STEP_TRANSVERSE, STEP_Z = 20.0, 50.0
MAX_STEPS, HALVED = 2000, 2**20
MAX_CROSSINGS = 40
MAX_HITS_PER_PARTICLE = 48
DETECTOR_RADIUS, DETECTOR_Z = 1030.0, 2965.0
# In 1/mm, of charge 1 in 1 T at 1 GeV. Positive charges turn clockwise seen from +z.
CURVATURE = -detector.GEV_PER_TESLA_MM


@dataclass(frozen=True, eq=False)
class _Generated:
    """Particles before propagation: one row each, momenta in GeV, lengths in mm."""

    vertex: FloatArray
    phi: FloatArray
    pt: FloatArray
    eta: FloatArray
    charge: FloatArray
    mass: FloatArray

    def take(self, rows: IntArray) -> _Generated:
        return _Generated(**{field.name: getattr(self, field.name)[rows] for field in fields(self)})

    def and_then(self, other: _Generated) -> _Generated:
        names = [field.name for field in fields(self)]
        return _Generated(**{name: np.concatenate([getattr(self, name), getattr(other, name)]) for name in names})


def simulate_event(
    seed: int,
    num_hits: int = 100_000,
    event_id: str | None = None,
    field: Field | None = None,
    beam_spot: BeamSpot | None = None,
) -> Hits:
    """Simulate one collision event.

    The number of particles follows from `num_hits`; the number of hits then fluctuates around it by some per cent.
    Density scales with it: a small event is a thin one, and candidate edges per hit fall in proportion. Equal arguments
    give equal events on one machine.

    Args:
        seed: Seed of this event's own generator, not negative.
        num_hits: Expected number of hits; a full event has about 100,000.
        event_id: Name of the event; `sim` and the seed by default.
        field: The field; that of the TrackML events by default.
        beam_spot: Where collisions lie along the beam; as in the TrackML events by default.

    Returns:
        Hits by (volume, layer, module), numbered from 1, with exact `particle_id` (0: noise), the table of all
        particles that left a hit, and truth weights: equal for all hits of particles with at least 4 hits, 0 for
        others, sum 1.

    Raises:
        ValueError: If `num_hits` is below 20 or the seed is negative.
    """
    if num_hits < MIN_HITS:
        raise ValueError(f"num_hits is {num_hits}; an event needs at least {MIN_HITS} hits.")
    if seed < 0:
        raise ValueError(f"seed is {seed}; seeds are not negative.")
    generator = np.random.default_rng(seed)
    tracks = _draw_tracks(generator, round(num_hits * (1 - detector.NOISE_SHARE) / HITS_PER_PARTICLE), beam_spot)
    track_rows, signal_modules, signal_local = _cross_modules(generator, tracks, field or detector.geometry().field)
    noise_modules, noise_local = _draw_noise(generator, generator.poisson(num_hits * detector.NOISE_SHARE))
    seen, particle_rows, nhits = np.unique(track_rows, return_inverse=True, return_counts=True)
    particle_id = np.concatenate([particle_rows + 1, np.zeros(len(noise_modules), np.int64)])
    modules = np.concatenate([signal_modules, noise_modules])
    position = _read_out(generator, modules, np.concatenate([signal_local, noise_local]))
    # Shuffled within a module: otherwise the order of hits would separate signal from noise.
    order = np.lexsort((generator.random(len(modules)), modules))
    tracks = tracks.take(seen)
    particles = Particles(
        particle_id=np.arange(1, len(seen) + 1, dtype=np.int64),
        **{name: getattr(tracks, name).astype(np.float32) for name in ("pt", "eta", "phi", "vertex")},
        nhits=nhits.astype(np.int32),
        charge=tracks.charge.astype(np.int8),
    )
    position, modules, particle_id = position[order], modules[order], particle_id[order]
    # One equal share for every hit of a particle with enough hits.
    counted = np.concatenate([[0], nhits])[particle_id] >= MIN_WEIGHTED_HITS
    table = detector.geometry().modules[modules]
    return Hits(
        event_id=event_id if event_id is not None else f"sim{seed:09d}",
        hit_id=np.arange(1, len(modules) + 1, dtype=np.int64),
        position=position.astype(np.float32),
        **{name: table[name].copy() for name in ("volume", "layer", "module")},
        particle_id=particle_id,
        weight=(counted / max(1, counted.sum())).astype(np.float32),
        particles=particles,
    )


def _opened(directory: Path, options: Options) -> Events:
    """The events of seeds that follow each other."""
    first, num_hits, conditions = options["seed"], options["num_hits"], options["conditions"]
    count = USUAL_EVENTS if options["num_events"] is None else options["num_events"]
    seeds = {f"{seed:09d}": seed for seed in range(first, first + count)}

    def read(name: str) -> Any:
        return simulate_event(seeds[name], num_hits, name, conditions.field, conditions.beam_spot)

    return Events(tuple(seeds), read, lambda name: [], {"num_hits": num_hits, **conditions.settings})


SOURCE = Source(None, options={"num_hits": 100_000, "seed": 0}, opens=_opened, learns_surfaces=False)


# --- particles -------------------------------------------------------------------------------------------------------


def _draw_tracks(generator: np.random.Generator, count: int, beam_spot: BeamSpot | None) -> _Generated:
    num_prompt = generator.binomial(count, detector.PROMPT_SHARE)
    prompt = _draw_prompt(generator, num_prompt, beam_spot or detector.BEAM_SPOT)
    secondary = _draw_secondary(generator, count - num_prompt)
    if beam_spot is not None:  # the narrow one is in the measured places of secondary vertices
        secondary.vertex[:, 2] += generator.normal(*beam_spot, len(secondary.vertex))
    return prompt.and_then(secondary)


def _draw_prompt(generator: np.random.Generator, count: int, beam_spot: BeamSpot) -> _Generated:
    """Particles from collisions along the beam: shares of the vertices are exponential, as pile-up's nearly are."""
    num_vertices = max(1, round(count / detector.PARTICLES_PER_VERTEX))
    widths = [detector.BEAM_SPOT_XY, detector.BEAM_SPOT_XY, beam_spot.width]
    vertices = generator.normal([0.0, 0.0, beam_spot.z], widths, (num_vertices, 3))
    shares = generator.exponential(size=num_vertices)
    return _Generated(
        vertex=vertices[generator.choice(num_vertices, count, p=shares / shares.sum())],
        phi=generator.uniform(-np.pi, np.pi, count),
        pt=_quantile(detector.PROMPT_PT, generator.random(count)),
        eta=_quantile(detector.PROMPT_ABS_ETA, generator.random(count)) * _signs(generator, count, 0.5),
        charge=_signs(generator, count, detector.PROMPT_POSITIVE_SHARE),
        mass=generator.choice(MASSES, count, p=PROMPT_SPECIES),
    )


def _draw_secondary(generator: np.random.Generator, count: int) -> _Generated:
    """Particles from decays and material: a vertex on the line of a prompt parent, a direction that half forgot it."""
    radius = _quantile(detector.SECONDARY_RADIUS, generator.random(count))
    # A parent leaves the detector at small angles: it can have got to this radius at most with this slope.
    steepest = np.arcsinh(DETECTOR_Z / radius)
    parent_eta = np.minimum(_quantile(detector.PROMPT_ABS_ETA, generator.random(count)), 4.0)
    parent_eta = np.where(parent_eta < steepest, parent_eta, steepest * generator.random(count))
    parent_eta *= _signs(generator, count, 0.5)
    parent_phi = generator.uniform(-np.pi, np.pi, count)
    # Decays near the beam keep their parent's direction; soft products of material further out do not. Fitted.
    keeps = generator.random(count) < 0.1 + 0.3 * np.exp(-radius / 150) + 0.5 * np.exp(-radius / 12)
    turned = np.where(keeps, generator.laplace(0.0, 0.35, count), generator.uniform(-np.pi, np.pi, count))
    sign = np.where(keeps, np.sign(parent_eta), _signs(generator, count, 0.5))
    return _Generated(
        vertex=radius[:, None] * np.stack([np.cos(parent_phi), np.sin(parent_phi), np.sinh(parent_eta)], axis=1),
        phi=parent_phi + turned,
        pt=_quantile(detector.SECONDARY_PT, generator.random(count)),
        eta=_quantile(detector.SECONDARY_ABS_ETA, generator.random(count)) * sign,
        charge=_signs(generator, count, detector.SECONDARY_POSITIVE_SHARE),
        mass=generator.choice(MASSES, count, p=SECONDARY_SPECIES),
    )


def _quantile(table: FloatArray, level: FloatArray) -> FloatArray:
    return np.interp(level, detector.QUANTILE_LEVELS, table)


def _signs(generator: np.random.Generator, count: int, positive_share: float) -> FloatArray:
    return np.where(generator.random(count) < positive_share, 1.0, -1.0)


# --- propagation -----------------------------------------------------------------------------------------------------


def _cross_modules(
    generator: np.random.Generator, tracks: _Generated, field: Field
) -> tuple[IntArray, IntArray, FloatArray]:
    """Follow all tracks: the track, the module and the local (u, v, du/dw, dv/dw) of each hit."""
    shape = (len(tracks.pt), MAX_CROSSINGS)
    geometry = detector.geometry()
    return _propagate(  # type: ignore[no-any-return]
        np.concatenate([tracks.vertex, tracks.phi[:, None]], axis=1),
        np.stack([tracks.pt, np.sinh(tracks.eta), tracks.charge, tracks.mass], axis=1),
        generator.standard_normal((*shape, 2)),
        generator.random(shape),
        generator.random((len(tracks.pt), MAX_HITS_PER_PARTICLE)),
        geometry.surfaces,
        geometry.groups,
        geometry.modules,
        field,
    )


@compiled
def _meet_module(state: Any, slope: float, k: float, guess: float, module: Any) -> Any:
    """Meeting point of the helix and a module near arc length `guess`: (inside, s, u, v, du/dw, dv/dw)."""
    s = guess
    x = y = z = psi = along = 0.0
    for _ in range(3):
        x, y, z, psi = advance(*state, slope, k, s)
        along = np.cos(psi) * module.normal[0] + np.sin(psi) * module.normal[1] + slope * module.normal[2]
        if abs(along) < 0.02:
            return False, s, 0.0, 0.0, 0.0, 0.0
        centre = module.centre
        away = (x - centre[0]) * module.normal[0] + (y - centre[1]) * module.normal[1]
        s -= (away + (z - centre[2]) * module.normal[2]) / along
    x, y, z, psi = advance(*state, slope, k, s)
    dx, dy, dz = x - module.centre[0], y - module.centre[1], z - module.centre[2]
    u = dx * module.u_axis[0] + dy * module.u_axis[1]
    v = dx * module.v_axis[0] + dy * module.v_axis[1] + dz * module.v_axis[2]
    half_u = module.half_inner + (module.half_outer - module.half_inner) * 0.5 * (v / module.half_v + 1)
    du = (np.cos(psi) * module.u_axis[0] + np.sin(psi) * module.u_axis[1]) / along
    dv = (np.cos(psi) * module.v_axis[0] + np.sin(psi) * module.v_axis[1] + slope * module.v_axis[2]) / along
    return abs(u) < half_u and abs(v) < module.half_v, s, u, v, du, dv


@compiled
def _hit_modules(state: Any, slope: float, k: float, s: float, travelled: float, group: Any, modules: Any, crossed: Any,
                 local: Any, count: int) -> int:  # fmt: skip
    """Append the modules of one barrel or ring that the track meets near arc length s; returns the new count."""
    x, y, z, _psi = advance(*state, slope, k, s)
    nearest = int(np.floor((np.arctan2(y, x) + np.pi) / (2 * np.pi) * group.num_phi))
    row = int(np.floor(z / group.row_pitch + 0.5 * group.num_rows)) if group.is_barrel else 0
    for r in range(max(row - 1, 0), min(row + 2, group.num_rows)):
        for j in range(nearest - group.phi_reach, nearest + group.phi_reach + 1):
            index = group.first_module + r * group.num_phi + j % group.num_phi
            inside, where, u, v, du, dv = _meet_module(state, slope, k, s, modules[index])
            # Not behind the vertex, and not on another turn of the helix.
            if inside and travelled + where > 0 and abs(where - s) < 60.0 and count < len(crossed):
                crossed[count] = index
                local[count] = u, v, du, dv
                count += 1
    return count


@compiled
def _crossing(state: Any, end: Any, slope: float, k: float, h: float, surface: Any, barrel_open: bool) -> float:
    """Arc length at which a step from `state` to `end` crosses a surface, or -1."""
    arc: float = -1.0
    if surface.is_barrel:
        before, after = state[0] ** 2 + state[1] ** 2, end[0] ** 2 + end[1] ** 2
        if barrel_open and (before < surface.coordinate**2) != (after < surface.coordinate**2):
            side = 1 if before < after else -1
            arc = arc_to_radius(state[0], state[1], state[3], k, surface.coordinate, side)
            # In these parts of a step it was once found by halving; so events have the bits that they always had.
            arc = (np.floor(arc / h * HALVED) + 0.5) / HALVED * h
    elif (state[2] < surface.coordinate) != (end[2] < surface.coordinate):
        arc = (surface.coordinate - state[2]) / slope
    return arc


@compiled
def _pass_material(psi: float, slope: float, pt: float, mass: float, kick: Any) -> Any:
    """Direction, slope and pt after one surface: scattered in the two directions across the track, and slower."""
    per_sine = np.sqrt(1 + slope * slope)
    momentum = pt * per_sine
    angle = HIGHLAND * np.sqrt(MATERIAL) / momentum
    # Momentum falls by energy loss / beta.
    inverse_beta = np.sqrt(1 + (mass / momentum) ** 2)
    lost = ENERGY_LOSS * inverse_beta**3 / momentum
    return psi + angle * per_sine * kick[0], slope + angle * per_sine**2 * kick[1], pt * (1 - lost)


@compiled
def _follow(start: Any, momentum: Any, kicks: Any, fates: Any, surfaces: Any, groups: Any, modules: Any, field: Any,
            crossed: Any, local: Any) -> int:  # fmt: skip
    """Follow one track to its end, writing the modules it meets; returns how many."""
    pt, slope, charge, mass = momentum
    state = (start[0], start[1], start[2], start[3])
    count = crossings = 0
    travelled = turned = 0.0
    barrel_open = abs(slope) < STEEPEST_BARREL_SLOPE
    for _ in range(MAX_STEPS):
        bend, twist, _ = forces(field, state[0], state[1], state[2], state[3], slope)
        k = CURVATURE * charge * bend / pt
        h = min(STEP_TRANSVERSE, STEP_Z / max(abs(slope), 1e-6))
        end = advance(*state, slope, k, h)
        psi, new_slope = end[3], slope
        for i in range(len(surfaces)):
            s = _crossing(state, end, slope, k, h, surfaces[i], barrel_open)
            if s < 0:
                continue
            before = count
            for g in range(surfaces[i].first_group, surfaces[i].first_group + surfaces[i].num_groups):
                count = _hit_modules(state, slope, k, s, travelled, groups[g], modules, crossed, local, count)
            if count == before:
                continue
            stop = STOP_IN_BARREL if surfaces[i].is_barrel else STOP_IN_DISK
            if fates[crossings] < stop or crossings + 1 == len(fates) or count == len(crossed):
                return count
            psi, new_slope, pt = _pass_material(psi, new_slope, pt, mass, kicks[crossings])
            if pt < SMALLEST_PT:
                return count
            crossings += 1
        if twist != 0.0:
            turn = CURVATURE * charge * twist * h / pt
            new_slope, less = twisted(new_slope, turn)
            pt *= less
        state, slope = (end[0], end[1], end[2], psi), new_slope
        travelled += h
        turned += abs(k * h)
        if end[0] ** 2 + end[1] ** 2 > DETECTOR_RADIUS**2 or abs(end[2]) > DETECTOR_Z or turned > LARGEST_TURN:
            break
    return count


@compiled
def _propagate(starts: Any, momenta: Any, kicks: Any, fates: Any, luck: Any, surfaces: Any, groups: Any, modules: Any,
               field: Any) -> Any:  # fmt: skip
    """Follow all tracks; returns track, module and local coordinates of each hit, track by track."""
    capacity = len(starts) * MAX_HITS_PER_PARTICLE
    tracks, hit_modules = np.empty(capacity, np.int64), np.empty(capacity, np.int64)
    hit_local = np.empty((capacity, 4))
    crossed, local = np.empty(MAX_HITS_PER_PARTICLE, np.int64), np.empty((MAX_HITS_PER_PARTICLE, 4))
    total = 0
    for i in range(len(starts)):
        count = _follow(starts[i], momenta[i], kicks[i], fates[i], surfaces, groups, modules, field, crossed, local)
        for j in range(count):
            if luck[i, j] < MODULE_EFFICIENCY:
                tracks[total], hit_modules[total] = i, crossed[j]
                hit_local[total] = local[j]
                total += 1
    return tracks[:total].copy(), hit_modules[:total].copy(), hit_local[:total].copy()


# --- read-out --------------------------------------------------------------------------------------------------------


def _draw_noise(generator: np.random.Generator, count: int) -> tuple[IntArray, FloatArray]:
    """Noise: even over modules, whatever their size, and even within each, as measured. No direction."""
    geometry = detector.geometry()
    index = generator.integers(0, len(geometry.modules), count)
    modules = geometry.modules[index]
    fraction = generator.uniform(-1.0, 1.0, (count, 2))
    width = modules["half_inner"] + (modules["half_outer"] - modules["half_inner"]) * 0.5 * (fraction[:, 1] + 1)
    zero = np.zeros(count)
    return index, np.stack([fraction[:, 0] * width, fraction[:, 1] * modules["half_v"], zero, zero], axis=1)


def _read_out(generator: np.random.Generator, index: IntArray, local: FloatArray) -> FloatArray:
    """Global positions as the cells see them, float64 [N, 3]."""
    modules = detector.geometry().modules[index]
    span = local[:, 2:] * modules["thickness"][:, None]
    pitch = np.stack([modules["pitch_u"], modules["pitch_v"]], axis=1)
    # Cells are counted from an edge of the module.
    edge = np.stack([modules["half_outer"], modules["half_v"]], axis=1)
    mean = _cell_average(local[:, :2] + edge, span, pitch)
    several = np.floor((local[:, :2] + edge - span / 2) / pitch) != np.floor((local[:, :2] + edge + span / 2) / pitch)
    mean += several * generator.uniform(-1.0, 1.0, mean.shape) * detector.CHARGE_SHARING * pitch
    u, v = (mean - edge).T
    return np.asarray(modules["centre"] + u[:, None] * modules["u_axis"] + v[:, None] * modules["v_axis"])


def _cell_average(place: FloatArray, span: FloatArray, pitch: FloatArray) -> FloatArray:
    """Mean cell centre along the part of the sensor that the track passed, by path length in each cell.

    A short passage gives the centre of one cell, so a long strip measures its middle; a long one averages
    over many cells and is precise.
    """
    length = np.maximum(np.abs(span) / pitch, 1e-3)
    low = place / pitch - 0.5 * length
    return np.asarray((_centre_integral(low + length) - _centre_integral(low)) / length * pitch)


def _centre_integral(place: FloatArray) -> FloatArray:
    """Integral from 0 of (cell number + 1/2), for cells of width 1."""
    cell = np.floor(place)
    return np.asarray(0.5 * cell * cell + (cell + 0.5) * (place - cell))
