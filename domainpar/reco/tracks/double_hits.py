"""Double hits: where two modules of a surface overlap a particle leaves a hit on each, and a road takes only one."""

from __future__ import annotations

import numpy as np
import torch

from domainpar.parallel.deliver import deliver
from domainpar.parallel.halo import Halo
from domainpar.plan import IntArray
from domainpar.reco.tracks.moving import NO_TRACK
from domainpar.reco.tracks.options import logit
from domainpar.reco.tracks.segments import Floats, LocalHits, Segments


def with_double_hits(tracks: IntArray, segments: Segments, hits: LocalHits, halo: Halo, score: float) -> IntArray:
    """Give hits that no track has to tracks that have another hit of their surface. *Collective*.

    A free hit belongs to a track if a segment above `score` joins it to a hit of the track that another segment joins,
    on the same side, to one of the track's hits on the free hit's own surface. Of several tracks the one with the most
    such segments has it, then the one with the best, then the one with the smallest name.

    Args:
        tracks: Track of each owned hit, int64 [num_owned].
        segments: This part's segments.
        hits: Its hits.
        halo: The halo of this part's plan.
        score: What the segment to the hit must exceed.

    Returns:
        Track of each owned hit, int64 [num_owned].
    """
    plan = halo.plan
    everywhere = np.concatenate([tracks, halo.fill_ghosts(torch.from_numpy(tracks.reshape(-1, 1))).numpy()[:, 0]])
    outward = _offers(segments.inner, segments.outer, segments.logit, everywhere, hits, plan.num_owned, score)
    inward = _offers(segments.outer, segments.inner, segments.logit, everywhere, hits, plan.num_owned, score)
    offers = np.concatenate([outward, inward])
    to = plan.local_owners[offers[:, 0]]
    offers[:, 0] = hits.ids[offers[:, 0]]
    return _accept(tracks, deliver(offers, to, halo.transport).rows, plan.owned_ids)


def _offers(
    near: IntArray, far: IntArray, logits: Floats, tracks: IntArray, hits: LocalHits, num_owned: int, score: float
) -> IntArray:
    """What owned hits on tracks offer to free ones: row of the free hit, track, bits of the logit, int64 [n, 3]."""
    of_ours = (near < num_owned) & (tracks[near] != NO_TRACK)
    inside = np.flatnonzero(of_ours & (tracks[near] == tracks[far]))
    offered = np.flatnonzero(of_ours & (tracks[far] == NO_TRACK) & (logits > logit(score)))
    looked_at = np.concatenate([inside, offered])
    surfaces, surface = np.unique(hits.surface[far[looked_at]], return_inverse=True)
    near_and_surface = near[looked_at] * len(surfaces) + surface
    offered = offered[np.isin(near_and_surface[len(inside) :], near_and_surface[: len(inside)])]
    return np.stack([far[offered], tracks[near[offered]], logits[offered].view(np.int64)], axis=1)


def _accept(tracks: IntArray, offers: IntArray, owned_ids: IntArray) -> IntArray:
    """Take for each free hit the best of the offers made to it: (id, track, bits of the logit), int64 [n, 3]."""
    hit, track, logits = (np.ascontiguousarray(column) for column in offers.T)
    order = np.lexsort((-logits.view(np.float64), track, hit))
    hit, track, best = hit[order], track[order], logits.view(np.float64)[order]
    starts = np.ones(len(hit), np.bool_)
    starts[1:] = (hit[1:] != hit[:-1]) | (track[1:] != track[:-1])
    first = np.flatnonzero(starts)
    support = np.diff(np.append(first, len(hit)))
    hit, track, best = hit[first], track[first], best[first]
    ranked = np.lexsort((track, -best, -support, hit))
    chosen = ranked[np.diff(hit[ranked], prepend=-1) != 0]
    accepted = tracks.copy()
    accepted[np.searchsorted(owned_ids, hit[chosen])] = track[chosen]
    return accepted
