"""Tiny events as two lines of letters, and the definitions of all counts written down plainly, to compare with."""

from __future__ import annotations

from fractions import Fraction

import numpy as np

from domainpar.tracking.events.graph import Particles
from domainpar.tracking.reco.performance.lost import REASONS
from domainpar.tracking.reco.performance.matching import TrackCuts
from domainpar.tracking.reco.performance.truth import EventTruth

NAN = float("nan")
EVERY = {"target": {}}


def drawn(particles: str, tracks: str, **changed) -> tuple[np.ndarray, EventTruth]:
    """Track ids and truth of an event: a letter a hit for its particle, a digit for its track, a dot for none.

    Every hit of a particle lies on a surface of its own. Letters have the ids 1, 2, 3, ..., all 2 GeV at eta 0.5.
    """
    particle_id = np.array([0 if letter == "." else ord(letter) - ord("a") + 1 for letter in particles], np.int64)
    track_id = np.array([-1 if digit == "." else int(digit) for digit in tracks], np.int64)
    ids, nhits = np.unique(particle_id[particle_id > 0], return_counts=True)
    fields = {
        "particle_id": particle_id,
        "surface": np.array([particles[:i].count(letter) for i, letter in enumerate(particles)], np.int64),
        "particles": table(ids, nhits),
        **changed,
    }
    return track_id, EventTruth(**fields)


def table(ids, nhits, pt=2.0, eta=0.5) -> Particles:
    ids = np.asarray(ids, np.int64)
    return Particles(
        particle_id=ids,
        pt=np.broadcast_to(np.float32(pt), len(ids)).copy(),
        eta=np.broadcast_to(np.float32(eta), len(ids)).copy(),
        vertex=np.zeros((len(ids), 3), np.float32),
        nhits=np.asarray(nhits, np.int32),
        charge=np.ones(len(ids), np.int8),
    )


def random_case(seed: int) -> tuple[np.ndarray, EventTruth, TrackCuts]:
    """Random tracks of a random event without geometry, and random cuts; some particles are in no table."""
    rng = np.random.default_rng(seed)
    num_hits = int(rng.choice([0, 1, 5, 30, 80]))
    ids = np.array([0, 7, -3, 2**60, 2**60 + 1, 11, 12])
    particle_id = rng.choice(ids, num_hits)
    track_id = rng.integers(-1, rng.integers(1, 8), num_hits)
    if rng.random() < 0.5:  # mostly right, with errors
        track_id = np.where(rng.random(num_hits) < 0.7, np.searchsorted(np.sort(ids), particle_id), track_id)
    listed = rng.permutation(np.append(ids[1:-1], 99))
    truth = EventTruth(
        particle_id=particle_id,
        surface=rng.integers(0, 4, num_hits),
        weight=rng.random(num_hits).astype(np.float32) if rng.random() < 0.5 else None,
        particles=Particles(
            particle_id=listed,
            pt=rng.choice([0.5, 1.0, 3.0, NAN], len(listed)).astype(np.float32),
            eta=rng.choice([0.5, -3.9, 4.0, -5.0, NAN], len(listed)).astype(np.float32),
            vertex=np.zeros((len(listed), 3), np.float32),
            nhits=rng.integers(1, 9, len(listed)).astype(np.int32),
            charge=np.ones(len(listed), np.int8),
        ),
    )
    cuts = TrackCuts(
        min_hits=int(rng.integers(1, 6)),
        fraction=float(rng.choice([0.5, 0.6, 0.75, 1.0])),
        target={} if rng.random() < 0.5 else {"nhits": [3, 6]},
    )
    return track_id, truth, cuts


# --- the definitions, one after the other ----------------------------------------------------------------------------


def plain_styles(track_id, truth, cuts, shared=()) -> dict[str, dict[str, int]]:
    on_track, of_particle = hits_of(track_id, -1, shared), hits_of(truth.particle_id, 0)
    matchable = [t for t, hits in on_track.items() if len(hits) >= cuts.min_hits]
    targets = [p for p in of_particle if is_target(p, truth, cuts)]
    noise = set(np.flatnonzero(truth.particle_id == 0).tolist())

    def pure(t, p):
        return enough(len(on_track[t] & of_particle[p]), len(on_track[t]), cuts)

    def complete(t, p):
        return enough(len(on_track[t] & of_particle[p]), len(of_particle[p]), cuts)

    def both(t, p):
        return pure(t, p) and complete(t, p)

    def why(p):
        if len(of_particle[p]) < cuts.min_hits:
            return "hits"
        return "matching" if any(complete(t, p) for t in on_track) else "finder"

    counts = {}
    for style, matches, reconstructs in (
        ("atlas", pure, pure),
        ("one_way", pure, complete),
        ("two_way", both, both),
    ):
        pairs = [(t, p) for t in matchable for p in of_particle if reconstructs(t, p)]
        alone = [t for t in matchable if not any(matches(t, p) for p in of_particle)]
        unlabelled = [t for t in alone if enough(len(on_track[t] & noise), len(on_track[t]), cuts)]
        lost = [why(p) for p in targets if not any(q == p for _, q in pairs)]
        counts[style] = {
            "targets": len(targets),
            "reconstructed": len({p for _, p in pairs if p in targets}),
            "target_pairs": len([p for _, p in pairs if p in targets]),
            "matchable": len(matchable),
            "matched": len(matchable) - len(alone),
            "particles": len({p for _, p in pairs}),
            "pairs": len(pairs),
            "in_range": len(matchable),  # without positions no pT speaks against a track
            "fakes": len(alone) - len(unlabelled),
            "unlabelled": len(unlabelled),
            "lost": {reason: lost.count(reason) for reason in REASONS},
        }
    return counts


def plain_majority(track_id, truth, cuts, shared=()) -> dict[str, int]:
    on_track, of_particle = hits_of(track_id, -1, shared), hits_of(truth.particle_id, 0)
    known = {int(p): i for i, p in enumerate(truth.particles.particle_id)}
    wanted = {
        p
        for p, hits in of_particle.items()
        if p in known
        and len({int(truth.surface[h]) for h in hits}) >= 3
        and abs(truth.particles.eta[known[p]]) < 4
        and truth.particles.pt[known[p]] >= cuts.majority_pt
    }
    counts = {"clusters": 0, "particles": len(wanted), "perfect": 0, "double_majority": 0, "lhc": 0}
    for hits in on_track.values():
        ids = [int(truth.particle_id[h]) for h in hits]
        # Of equals noise, then the smallest id.
        majority = min(set(ids), key=lambda p: (-ids.count(p), p != 0, p))
        if len(hits) < 3 or majority not in wanted:
            continue
        shared, all_hits = ids.count(majority), len(of_particle[majority])
        counts["clusters"] += 1
        counts["perfect"] += shared == all_hits and Fraction(shared, len(hits)) > Fraction(99, 100)
        counts["double_majority"] += Fraction(shared, len(hits)) > 0.5 and Fraction(shared, all_hits) > 0.5
        counts["lhc"] += Fraction(shared, len(hits)) > Fraction(3, 4)
    return counts


def plain_score(track_id, truth) -> float | None:
    weight = (truth.particle_id != 0).astype(float) if truth.weight is None else truth.weight.astype(float)
    of_particle = hits_of(truth.particle_id, 0)
    if weight.sum() == 0:
        return None
    good = 0.0
    for hits in hits_of(track_id, -1).values():
        for others in of_particle.values():
            if 2 * len(hits & others) > len(hits) and 2 * len(hits & others) > len(others):
                good += sum(weight[h] for h in hits & others)
    return good / weight.sum()


def hits_of(ids, none, shared=()) -> dict[int, set[int]]:
    hits = {int(i): set(np.flatnonzero(ids == i).tolist()) for i in set(ids.tolist()) - {none}}
    for hit, track in shared:
        hits.setdefault(int(track), set()).add(int(hit))
    return hits


def enough(shared, whole, cuts) -> bool:
    share, wanted = Fraction(shared, whole), Fraction(str(cuts.fraction))
    return share > wanted if cuts.fraction == 0.5 else share >= wanted


def is_target(particle, truth, cuts) -> bool:
    if not cuts.target:
        return True
    low, high = cuts.target["nhits"]
    return particle in truth.particles.particle_id and low <= len(hits_of(truth.particle_id, 0)[particle]) <= high
