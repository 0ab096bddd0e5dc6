"""Track building written down plainly, from the definitions, on one whole event: what ours is held against."""

import math
from collections import defaultdict

import numpy as np

from domainpar.tracking.events.detector import GEV_PER_TESLA_MM
from domainpar.tracking.events.graph import surface_numbers
from domainpar.tracking.events.motion import HIGHLAND
from domainpar.tracking.reco.hit_table import TrackHits
from domainpar.tracking.reco.kalman import ENERGY_LOSS, PION


def sigmoid_exceeds(logit, score):
    return logit > (math.log(score / (1 - score)) if score > 0 else -math.inf)


def segments_of(edge_index, logits, distance, score):
    """{(inner, outer): (logit, position)} in the user's rows; each pair of hits once, pointing outward."""
    found = {}
    for position, (src, dst, logit) in enumerate(zip(*edge_index.tolist(), logits.tolist(), strict=True)):
        if src == dst or not sigmoid_exceeds(logit, score):
            continue
        inner, outer = (src, dst) if distance is None else sorted((src, dst), key=lambda hit: (distance[hit], hit))
        pair = frozenset((src, dst))
        if pair not in found or logit > found[pair][1]:
            found[pair] = ((inner, outer), logit, position)
    return {ends: (logit, position) for ends, logit, position in found.values()}


def components_of(hits, pairs):
    neighbours = defaultdict(set)
    for a, b in pairs:
        neighbours[a].add(b)
        neighbours[b].add(a)
    left, components = set(hits), []
    while left:
        waiting, component = [left.pop()], set()
        while waiting:
            hit = waiting.pop()
            component.add(hit)
            waiting += [other for other in neighbours[hit] if other not in component]
        left -= component
        components.append(component)
    return components


def connected(num_hits, edge_index, logits, score=0.5, min_hits=3):
    segments = segments_of(edge_index, logits, None, score)
    return [component for component in components_of(range(num_hits), segments) if len(component) >= min_hits]


def numbered(num_hits, tracks):
    """Track of each hit, numbered by first hits."""
    number = [-1] * num_hits
    for name, track in enumerate(sorted(tracks, key=min)):
        for hit in track:
            number[hit] = name
    return number


# --- growing ---------------------------------------------------------------------------------------------------------


def off_helix(hits, rows):
    """chi2 per degree of freedom of hits on one track in 2 T, by its definition: that of the flight with the least.

    A flight bends, and loses energy in the surfaces that it passes. Hits are off it by their errors, and by what it
    scatters in the surfaces before, which turns all that follows. No filter: one
    covariance matrix of all hits, and one flight that is moved until chi2 falls no more. Infinite where that leads
    nowhere.
    """
    rows = sorted(rows, key=lambda row: hits.distance[row])
    table, places = hits.table[rows], hits.places[hits.table["surface"][rows]]
    passed = np.append((np.diff(table["surface"]) != 0) | np.isnan(places["coordinate"][:-1]), True)
    first, middle, last = (np.array([hit["x"], hit["y"], hit["z"]]) for hit in table[[0, len(rows) // 2, -1]])
    ab, ac = middle - first, last - first
    ways = np.hypot(*ab[:2]), np.hypot(*(last - middle)[:2])
    curvature = 2 * (ab[0] * ac[1] - ac[0] * ab[1]) / (ways[0] * ways[1] * np.hypot(*ac[:2])) + 1e-9
    psi = math.atan2(ab[1], ab[0]) - curvature * ways[0] / 2

    def off_and_covariance(flight):
        """How far hits are off along both axes of their modules, [2 n], and the covariance of that."""
        aside, psi, curvature, z, slope = flight
        x, y, arc, square = first[0] - aside * math.sin(psi), first[1] + aside * math.cos(psi), 0.0, 1 + slope * slope
        off, axes, met, scattered = [], [], [], []
        for hit, place, passes in zip(table, places, passed):
            for _ in range(8):
                step = (hit["x"] - x) * math.cos(psi) + (hit["y"] - y) * math.sin(psi)
                turned = psi + curvature * step
                x += (math.sin(turned) - math.sin(psi)) / curvature
                y -= (math.cos(turned) - math.cos(psi)) / curvature
                z, arc, psi = z + slope * step, arc + step, turned
            left, ahead = (
                np.array([-math.sin(psi), math.cos(psi), 0.0]),
                np.array([math.cos(psi), math.sin(psi), slope]),
            )
            # A flight that is off is met where it crosses the module.
            moves = [way - ahead * (way @ hit["w"]) / (ahead @ hit["w"]) for way in (left, np.array([0.0, 0.0, 1.0]))]
            axes.append([[move @ hit[axis] for move in moves] for axis in "uv"])
            off.append(np.array(axes[-1]) @ [(hit["y"] - y) * left[1] + (hit["x"] - x) * left[0], hit["z"] - z])
            met.append((x, y, arc, psi))
            material = place["material"]
            if place["by_angle"]:
                material *= math.sqrt(square) / (1.0 if place["is_barrel"] else max(abs(slope), 0.3))
            pt = min(max(GEV_PER_TESLA_MM * 2.0 / abs(curvature), 0.1), 100.0)
            scattered.append(passes * material * (HIGHLAND / pt) ** 2)
            momentum = pt * math.sqrt(square)
            curvature *= 1 + passes * ENERGY_LOSS * material * (1 + (PION / momentum) ** 2) ** 1.5 / momentum
        # An angle turns all that follows about its place: across, and along, where z is another then.
        dx, dy, further = (np.tril(np.subtract.outer(of, of)) for of in np.transpose(met)[:3])
        cosine, sine = np.cos(np.transpose(met)[3])[:, None], np.sin(np.transpose(met)[3])[:, None]
        kinks = np.zeros((len(off), 2, len(off), 2))
        kinks[:, 0, :, 0], kinks[:, 1, :, 0] = dy * sine + dx * cosine, slope * (dy * cosine - dx * sine)
        kinks[:, 1, :, 1] = further * math.sqrt(square)
        moved = np.einsum("jab,jbik,i->jaik", axes, kinks, np.sqrt(scattered)).reshape(2 * len(off), -1)
        errors = np.stack([table["var_u"], table["var_v"]], axis=1).ravel()
        return np.concatenate(off), moved @ moved.T + np.diag(errors)

    flight, chi2 = np.array([0.0, psi, curvature, first[2], ac[2] / sum(ways)]), math.inf
    for _ in range(30):
        before, (off, covariance) = chi2, off_and_covariance(flight)
        if not (np.isfinite(off).all() and np.isfinite(covariance).all()):
            return math.inf
        chi2 = float(off @ np.linalg.solve(covariance, off))
        if abs(before - chi2) < 1e-4 * chi2:
            break
        steps = [1e-3, 1e-6, 1e-9, 1e-3, 1e-6]
        slopes = [(off_and_covariance(flight + move)[0] - off) / max(move) for move in np.diag(steps)]
        weighted = np.linalg.solve(covariance, np.transpose(slopes)).T
        flight = flight - np.linalg.lstsq(weighted @ np.transpose(slopes), weighted @ off, rcond=1e-18)[0]
    return chi2 / (2 * len(rows) - 5)


def grown(hits, edge_index, logits, most_off, score=0.1, min_hits=3):
    """Two tracks become one along a segment, the best first, if their hits could be those of one particle."""
    position = hits.position.astype(float)
    distance = (position**2).sum(axis=1).tolist()
    surface, module = surface_numbers(hits.volume, hits.layer).tolist(), hits.module.tolist()
    known = TrackHits(hits.position, np.array(surface), np.zeros(len(surface), int))
    segments = segments_of(edge_index, logits, distance, score)
    track_of = {hit: {hit} for hit in range(len(surface))}

    for (inner, outer), _ in sorted(segments.items(), key=lambda item: (-item[1][0], item[1][1])):
        ours, theirs = track_of[inner], track_of[outer]
        if ours is theirs:
            continue
        alike = [(i, j) for i in ours for j in theirs if surface[i] == surface[j]]
        if any(0 != module[i] == module[j] or np.linalg.norm(position[i] - position[j]) > 25 for i, j in alike):
            continue
        if len(ours | theirs) > 3 and not off_helix(known, ours | theirs) <= most_off:
            continue
        joined = ours | theirs
        track_of |= dict.fromkeys(joined, joined)
    return [set(track) for track in {frozenset(track) for track in track_of.values()} if len(track) >= min_hits]
