"""Track building written down plainly, from the definitions, on one whole event: what ours is held against."""

import itertools
import math
from collections import defaultdict

import numpy as np

from domainpar.tracking.events.detector import GEV_PER_TESLA_MM
from domainpar.tracking.reco.helix import fit_helices


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


def is_chain(component, segments):
    inside = [ends for ends in segments if ends[0] in component]
    return all(
        sum(hit == end for end, _ in inside) <= 1 and sum(hit == end for _, end in inside) <= 1 for hit in component
    )


def connected(num_hits, edge_index, logits, distance, score=0.5, min_hits=3):
    segments = segments_of(edge_index, logits, distance, score)
    return [component for component in components_of(range(num_hits), segments) if len(component) >= min_hits]


def roads_from(start, followed):
    """Every path from a hit, in the order in which branches are listed."""
    onward = followed(start)
    if not onward:
        return [[start]]
    return list(itertools.chain.from_iterable([[start, *path] for path in roads_from(hit, followed)] for hit in onward))


def paths(hits_in_order, segments, low, high, min_hits):
    """All paths written down, as the definition says."""
    outward = defaultdict(list)
    for (inner, outer), (logit, _) in sorted(segments.items(), key=lambda item: item[1][1]):
        outward[inner].append((outer, logit))
    used, tracks = set(), []

    def followed(hit):
        free = [(other, logit) for other, logit in outward[hit] if other not in used]
        if not free:
            return []
        best = max(free, key=lambda pair: pair[1])
        if not sigmoid_exceeds(best[1], low):
            return []
        others = [other for other, logit in free if other != best[0] and sigmoid_exceeds(logit, high)]
        return [best[0], *others]

    for start in hits_in_order:
        if start in used:
            continue
        longest = []
        for path in roads_from(start, followed):
            if len(path) >= len(longest):  # the last among equals
                longest = path
        used |= set(longest)
        if len(longest) >= min_hits:
            tracks.append(set(longest))
    return tracks


def walked(num_hits, edge_index, logits, distance, score=0.01, low=0.1, high=0.6, min_hits=3):
    segments = segments_of(edge_index, logits, distance, score)
    tracks, rest = [], set()
    for component in components_of(range(num_hits), segments):
        if not is_chain(component, segments):
            rest |= component
        elif len(component) >= min_hits:
            tracks.append(component)
    inside = {ends: values for ends, values in segments.items() if ends[0] in rest}
    return tracks + paths(sorted(rest, key=lambda hit: (distance[hit], hit)), inside, low, high, min_hits)


def without_junctions(num_hits, edge_index, logits, distance, chain_cut=0.01, score=0.5, min_hits=3):
    loose = segments_of(edge_index, logits, distance, chain_cut)
    tracks, taken = [], set()
    for component in components_of(range(num_hits), loose):
        if is_chain(component, loose) and len(component) >= min_hits:
            tracks.append(component)
            taken |= component
    tight = segments_of(edge_index, logits, distance, score)

    def best(hit, end):
        at = [ends for ends in tight if ends[end] == hit]
        return min(at, key=lambda ends: (-tight[ends][0], tight[ends][1]))

    kept = [ends for ends in tight if best(ends[0], 0) == ends == best(ends[1], 1)]
    rest = set(range(num_hits)) - taken
    inside = [ends for ends in kept if ends[0] in rest]
    return tracks + [component for component in components_of(rest, inside) if len(component) >= min_hits]


def with_doubles(tracks, edge_index, logits, distance, surface, floor, score=0.5):
    """Free hits given to tracks: by support, then by the best segment; ties are left out of the comparison."""
    segments = segments_of(edge_index, logits, distance, floor)
    track_of = {hit: number for number, track in enumerate(tracks) for hit in track}
    offers = defaultdict(list)
    for ends, (logit, _) in segments.items():
        for side in (0, 1):
            near, free = ends[side], ends[1 - side]
            if near not in track_of or free in track_of or not sigmoid_exceeds(logit, score):
                continue
            partners = [other[1 - side] for other in segments if other[side] == near]
            if any(track_of.get(hit) == track_of[near] and surface[hit] == surface[free] for hit in partners):
                offers[free].append((track_of[near], logit))
    grown = [set(track) for track in tracks]
    for free, made in offers.items():
        support = {track: sum(other == track for other, _ in made) for track, _ in made}
        best = {track: max(logit for other, logit in made if other == track) for track, _ in made}
        chosen = max(support, key=lambda track: (support[track], best[track], -min(tracks[track])))
        grown[chosen].add(free)
    return grown


def numbered(num_hits, tracks):
    """Track of each hit, numbered by first hits."""
    number = [-1] * num_hits
    for name, track in enumerate(sorted(tracks, key=min)):
        for hit in track:
            number[hit] = name
    return number


# --- growing ---------------------------------------------------------------------------------------------------------


def off_helix(points):
    """Mean square distance from the common helix, in units of the errors allowed; by the centre of its circle."""
    points = np.array(sorted(points, key=lambda point: sum(x * x for x in point)))
    fit = fit_helices(points, np.zeros(len(points), int), 1, 2.0)
    if not fit.fitted[0]:
        return math.inf
    radius = fit.pt[0] / (GEV_PER_TESLA_MM * 2.0)
    turn = -int(fit.charge[0])  # 1: to the left
    left = np.array([-math.sin(fit.phi[0]), math.cos(fit.phi[0])])
    nearest = left * fit.d0[0]
    centre = nearest + turn * radius * left
    spokes = points[:, :2] - centre
    away = np.linalg.norm(spokes, axis=1) - radius
    start = nearest - centre
    angle = turn * np.arctan2(start[0] * spokes[:, 1] - start[1] * spokes[:, 0], spokes @ start)
    off = (points[:, 2] - fit.z0[0] - math.sinh(fit.eta[0]) * radius * angle) / math.cosh(fit.eta[0])
    bend = 0.008 / max(fit.pt[0], 1e-3) * np.linalg.norm(points[-1, :2] - points[0, :2])
    return float(np.mean((away / (0.4 + bend)) ** 2 + (off / (1 + bend)) ** 2))


def grown(hits, edge_index, logits, most_off, score=0.1, min_hits=3):
    """Two tracks become one along a segment, the best first, if their hits could be those of one particle."""
    position = hits.position.astype(float)
    distance = (position**2).sum(axis=1).tolist()
    surface, module = list(zip(hits.volume.tolist(), hits.layer.tolist())), hits.module.tolist()
    segments = segments_of(edge_index, logits, distance, score)
    track_of = {hit: {hit} for hit in range(len(surface))}
    for (inner, outer), _ in sorted(segments.items(), key=lambda item: (-item[1][0], item[1][1])):
        ours, theirs = track_of[inner], track_of[outer]
        if ours is theirs:
            continue
        alike = [(i, j) for i in ours for j in theirs if surface[i] == surface[j]]
        if any(0 != module[i] == module[j] or np.linalg.norm(position[i] - position[j]) > 25 for i, j in alike):
            continue
        if len(ours | theirs) > 3 and not off_helix([position[hit].tolist() for hit in ours | theirs]) <= most_off:
            continue
        joined = ours | theirs
        track_of |= dict.fromkeys(joined, joined)
    return [set(track) for track in {frozenset(track) for track in track_of.values()} if len(track) >= min_hits]
