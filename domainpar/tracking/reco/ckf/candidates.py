"""Following seeds: outward with a few ways to go on kept at once, then back inward with the state of the whole way.

A combinatorial Kalman filter: at each surface the best hits near the prediction open a way each, going on without a hit
another, and the ways of highest quality are kept.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from domainpar.common.compiling import compiled
from domainpar.tracking.reco.ckf.crossing import hits_near, next_surface, set_out
from domainpar.tracking.reco.kalman import HIT_WORTH, approach, bend_at, pass_material, residual, start, take

MAX_TRACK_HITS = 96
"""More than four hits on each surface that a track can meet."""

# Taken from the quality of a track for a surface crossed without a hit.
HOLE_COST = 6.0
# Taken from that of a candidate whose seed lay on an earlier one: of two that differ little, either may be right.
AGAIN_COST = 12.0
# A hit at most this chi^2 ahead is never passed by.
OBVIOUS = 4.0
# Overlapping modules lie this far apart along a track at most, in mm.
OVERLAP = 30.0
# Modules of a surface that a track crosses at most: in the innermost ring of a disk four overlap.
MAX_OVERLAPPING = 4
# Hits near a state that are looked at.
MAX_NEAR = 12


@compiled
def _on_module(hits: Any, rows: Any, other: int) -> bool:
    """Whether a hit is on the module of one of these."""
    on_it = False
    for row in rows:
        on_it = on_it or hits[row].module == hits[other].module
    return on_it


@compiled
def _take_surface(state: Any, rows: Any, row: int, target: int, near: Any, side: int, scene: Any) -> None:
    """Take a hit, then those of overlapping modules among the hits `near` that agree with the corrected state."""
    hits, place = scene.hits, scene.places[target]
    take(state, hits[row], scene.field)
    first = state.num_hits - 1
    rows[first] = row
    state.surfaces += 1
    state.holes += state.pending
    state.pending = 0
    while state.num_hits - first < MAX_OVERLAPPING:
        best, best_chi2 = -1, scene.gate
        # What the track scatters in the module before counts where it flies along the surface.
        of_direction, of_slope, k = state.cov[1, 1], state.cov[4, 4], state.k
        pass_material(state, place, side)
        bend = bend_at(scene.field, state)
        for other in near:
            if _on_module(hits, rows[first : state.num_hits], other):
                continue
            agreement = residual(state, hits[other], bend)
            if agreement[0] < best_chi2 and abs(agreement[1]) < OVERLAP:
                best, best_chi2 = other, agreement[0]
        if best < 0:
            state.cov[1, 1], state.cov[4, 4], state.k = of_direction, of_slope, k
            return
        take(state, hits[best], scene.field)
        rows[state.num_hits - 1] = best


@compiled
def _keep(states: Any, rows: Any, count: int) -> int:
    """Put the last state among the `count` kept ones, best first; the worst falls off a full list."""
    width = len(states) - 1
    quality = states[width].quality
    if count == width and quality <= states[width - 1].quality:
        return count
    place = min(count, width - 1)
    while place > 0 and states[place - 1].quality < quality:
        states[place], rows[place] = states[place - 1], rows[place - 1]
        place -= 1
    states[place], rows[place] = states[width], rows[width]
    return min(count + 1, width)


@compiled
def _follow(best: Any, best_rows: Any, side: int, max_holes: int, scene: Any, states: Any, rows: Any) -> None:
    """Follow the track `best[0]`, whose hits are `best_rows`; the best way found replaces it, if any is better.

    `states` [2, ways + 1] and `rows` [2, ways + 1, MAX_TRACK_HITS] are room for the ways of two surfaces in turn; the
    last of each is where a new way is built.
    """
    width = states.shape[1] - 1
    near, chi2s = np.empty(MAX_NEAR, np.int64), np.empty(MAX_NEAR)
    states[0, 0], rows[0, 0] = best[0], best_rows
    # Two halves of `states` in turn: the ways to this surface, and those born from them.
    alive, now = 1, 0
    while alive:
        then, born = 1 - now, 0
        child, child_rows = states[then, width], rows[then, width]
        for i in range(alive):
            last = scene.hits[rows[now, i, states[now, i].num_hits - 1]].surface
            pass_material(states[now, i], scene.places[last], side)
            target, inside = next_surface(states[now, i], scene, side)
            if target < 0:
                continue
            count = hits_near(states[now, i], target, scene, near, chi2s)
            for branch in range(-1, min(count, width)):
                states[then, width], child_rows[:] = states[now, i], rows[now, i]
                if branch >= 0:
                    _take_surface(child, child_rows, near[branch], target, near[:count], side, scene)
                    if child.quality > best[0].quality:
                        best[0], best_rows[:] = states[then, width], child_rows
                else:
                    if inside:
                        child.pending += 1
                        child.quality -= HOLE_COST
                    if (count and chi2s[0] < OBVIOUS) or child.pending + child.holes > max_holes:
                        continue
                born = _keep(states[then], rows[then], born)
        alive, now = born, then


@compiled
def _add_overlaps(state: Any, copy: Any, rows: Any, row: int, near: Any, chi2s: Any, scene: Any) -> None:
    """Add the hits of modules that overlap one hit of the three that a state was started from, without filtering."""
    hits, surface = scene.hits, scene.hits[row].surface
    copy[0] = state
    approach(copy[0], hits[row].x, hits[row].y, 1.0, scene.field)
    pass_material(copy[0], scene.places[surface], scene.outward)
    bend = bend_at(scene.field, copy[0])
    first, overlapping = state.num_hits, 1
    for i in range(hits_near(copy[0], surface, scene, near, chi2s)):
        other = hits[near[i]]
        if other.module == hits[row].module or _on_module(hits, rows[first : state.num_hits], near[i]):
            continue
        if abs(residual(copy[0], other, bend)[1]) < OVERLAP:
            rows[state.num_hits] = near[i]
            state.num_hits += 1
            state.quality += HIT_WORTH - chi2s[i]
            overlapping += 1
            if overlapping == MAX_OVERLAPPING:
                return


@compiled
def _turn_back(state: Any, copy: Any, rows: Any, scene: Any) -> None:
    """Filter a track of at least three surfaces again from its outermost hits inward, with all overlapping modules.

    The state ends at the innermost hit, flying inward and ready to go on; `rows` in another order.
    """
    surfaces, firsts = np.empty(MAX_TRACK_HITS, np.int64), np.empty(MAX_TRACK_HITS, np.int64)
    number = 0
    for row in rows[: state.num_hits]:
        if number == 0 or scene.hits[row].surface != surfaces[number - 1]:
            surfaces[number], firsts[number] = scene.hits[row].surface, row
            number += 1
    holes = state.holes
    rows[:3] = firsts[number - 3 : number][::-1]
    a, b, c = scene.hits[rows[0]], scene.hits[rows[1]], scene.hits[rows[2]]
    start(state, a, b, c, scene.places, scene.inward, scene.field)
    state.holes = holes
    near, chi2s = np.empty(MAX_NEAR, np.int64), np.empty(MAX_NEAR)
    for i in range(3):
        _add_overlaps(state, copy, rows, rows[i], near, chi2s, scene)
    for i in range(number - 4, -1, -1):
        pass_material(state, scene.places[surfaces[i + 1]], scene.inward)
        approach(state, scene.hits[firsts[i]].x, scene.hits[firsts[i]].y, 1.0, scene.field)
        count = hits_near(state, surfaces[i], scene, near, chi2s)
        _take_surface(state, rows, firsts[i], surfaces[i], near[:count], scene.inward, scene)
    set_out(state, scene.hits[firsts[0]], scene, scene.inward)


@compiled
def _follow_seed(seed: Any, min_surfaces: int, max_holes: int, scene: Any, best: Any, best_rows: Any, states: Any,
                 rows: Any) -> bool:  # fmt: skip
    """Make the best track of a seed in `best[0]` and `best_rows`; false if it has too few surfaces."""
    a, b, c = scene.hits[seed[0]], scene.hits[seed[1]], scene.hits[seed[2]]
    start(best[0], a, b, c, scene.places, scene.outward, scene.field)
    if 3 * HIT_WORTH - best[0].quality > scene.gate:
        return False
    set_out(best[0], c, scene, scene.outward)
    best_rows[:3] = seed
    _follow(best, best_rows, scene.outward, max_holes, scene, states, rows)
    if best[0].surfaces < min_surfaces:
        return False
    _turn_back(best[0], states[0], best_rows, scene)
    _follow(best, best_rows, scene.inward, max_holes, scene, states, rows)
    return True


@compiled
def follow_seeds(
    seeds: Any, scene: Any, min_hits: int, min_surfaces: int, max_holes: int, states: Any, each: bool
) -> Any:
    """Follow every seed.

    Args:
        seeds: Three rows of the hit table each, outward, int64 [S, 3].
        scene: Hits, surfaces and field.
        min_hits: Fewest hits of a candidate track.
        min_surfaces: Fewest surfaces that the flight outward may meet, three at least.
        max_holes: Most surfaces it may cross without a hit.
        states: Room for the ways kept at once, `STATE_DTYPE` [2, ways + 1].
        each: Follow also a seed whose three hits lie together on the latest candidate of each; what it leads to has to
            be better by `AGAIN_COST`.

    Returns:
        Candidate tracks: where the hits of each begin [C + 1], rows of their hits, their qualities [C].
    """
    rows = np.empty((2, states.shape[1], MAX_TRACK_HITS), np.int64)
    best, best_rows = states[0, :1].copy(), np.zeros(MAX_TRACK_HITS, np.int64)
    starts, qualities = np.zeros(len(seeds) + 1, np.int64), np.empty(len(seeds))
    collected = np.empty(1024, np.int64)
    latest = np.full(len(scene.hits), -1, np.int64)
    count = 0
    for seed in seeds:
        on = latest[seed[0]]
        again = on >= 0 and on == latest[seed[1]] and on == latest[seed[2]]
        if again and not each:
            continue
        if not _follow_seed(seed, min_surfaces, max_holes, scene, best, best_rows, states, rows):
            continue
        if best[0].num_hits < min_hits:
            continue
        starts[count + 1] = starts[count] + best[0].num_hits
        if starts[count + 1] > len(collected):
            # One doubling is enough: there is room for more than MAX_TRACK_HITS.
            collected = np.concatenate((collected, np.empty_like(collected)))
        collected[starts[count] : starts[count + 1]] = best_rows[: best[0].num_hits]
        latest[best_rows[: best[0].num_hits]] = count
        qualities[count] = best[0].quality - (AGAIN_COST if again else 0.0)
        count += 1
    return starts[: count + 1].copy(), collected[: starts[count]].copy(), qualities[:count].copy()
