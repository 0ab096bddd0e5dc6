"""Track building written down plainly, from the definitions, on one whole event: what ours is held against."""

import itertools
import math
from collections import defaultdict


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
    """Every road from a hit, in the order in which branches are listed."""
    onward = followed(start)
    if not onward:
        return [[start]]
    return list(itertools.chain.from_iterable([[start, *road] for road in roads_from(hit, followed)] for hit in onward))


def roads(hits_in_order, segments, low, high, min_hits):
    """All roads written down, as the definition says."""
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
        for road in roads_from(start, followed):
            if len(road) >= len(longest):  # the last among equals
                longest = road
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
    return tracks + roads(sorted(rest, key=lambda hit: (distance[hit], hit)), inside, low, high, min_hits)


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
