"""Track building written down plainly, from the definitions, on one whole event: what ours is held against."""

import math
from collections import defaultdict

import numpy as np

from domainpar.tracking.events.field import Field
from domainpar.tracking.events.graph import surface_numbers
from domainpar.tracking.reco.hit_table import TrackHits
from domainpar.tracking.reco.kalman import chi2_of, room


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


def off_helix(points, surface):
    """chi2 per degree of freedom, by the filter, of hits in whatever order."""
    outward = sorted(range(len(points)), key=lambda row: sum(x * x for x in points[row]))
    hits = TrackHits(np.array(points), np.array(surface), np.zeros(len(points), int))
    return chi2_of(room()[0], np.array(outward), hits.table, hits.places, Field.of(2.0), math.inf)


def grown(hits, edge_index, logits, most_off, score=0.1, min_hits=3):
    """Two tracks become one along a segment, the best first, if their hits could be those of one particle."""
    position = hits.position.astype(float)
    distance = (position**2).sum(axis=1).tolist()
    surface, module = surface_numbers(hits.volume, hits.layer).tolist(), hits.module.tolist()
    segments = segments_of(edge_index, logits, distance, score)
    track_of = {hit: {hit} for hit in range(len(surface))}

    def fits(track):
        return off_helix([position[hit].tolist() for hit in track], [surface[hit] for hit in track])

    for (inner, outer), _ in sorted(segments.items(), key=lambda item: (-item[1][0], item[1][1])):
        ours, theirs = track_of[inner], track_of[outer]
        if ours is theirs:
            continue
        alike = [(i, j) for i in ours for j in theirs if surface[i] == surface[j]]
        if any(0 != module[i] == module[j] or np.linalg.norm(position[i] - position[j]) > 25 for i, j in alike):
            continue
        if len(ours | theirs) > 3 and not fits(ours | theirs) <= most_off:
            continue
        joined = ours | theirs
        track_of |= dict.fromkeys(joined, joined)
    return [set(track) for track in {frozenset(track) for track in track_of.values()} if len(track) >= min_hits]
