"""The quality of tracks: matched to the true particles, counted in integers, summed over events and divided once.

truth.py          the truth of an event in the user's order, with distances to borders of sectors
matching.py       which tracks count, and how they are matched to particles
binned.py         counts against pT, eta, phi and the distance to the nearest border of a sector
counts.py         TrackCounts: tracks and truth of an event -> counts; their sums, and JSON both ways
ceiling.py        how many true segments the candidate edges hold at all
rates.py          rates with their intervals, and the printed table
"""
