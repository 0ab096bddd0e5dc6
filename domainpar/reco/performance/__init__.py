"""How good tracks are: matched to the true particles, counted in integers, summed over events and divided once.

What lies where:

    truth.py          what is true of an event, in the user's order
    overlaps.py       which tracks and particles share hits
    cuts.py           which particles one wants to find, which tracks count, how much of them must agree
    styles.py         the three styles of the acorn framework: ATLAS, one way, two way
    majority.py       perfect, double majority and LHC of gnn_tracking, and the score of the TrackML challenge
    binned.py         the same counts against pT, eta, phi and the distance to the nearest border of a sector
    borders.py        that distance
    counts.py         TrackCounts: the sums, and JSON both ways
    counting.py       tracks and truth of an event -> TrackCounts
    ceiling.py        how many true segments the candidate edges hold at all
    rates.py          what is divided, and its interval
    table.py          printed
"""
