"""Pieces of tracks joined: hits alone, no scores, no truth; on one rank, after all tracks are gathered.

A track is in pieces where a hit is missing, or no candidate edge joins two of its layers; and where a particle leaves
several double hits in a row, the second ones make a track of their own, side by side with the first.

What lies where:

    options.py        what pieces may differ by
    pieces.py         tracks with their helices
    pairs.py          pairs that continue each other
    common_helix.py   one helix through both
    joining.py        the best pairs joined, until none is left
"""

from domainpar.reco.stitching.joining import stitch
from domainpar.reco.stitching.options import StitchOptions

__all__ = ["StitchOptions", "stitch"]
