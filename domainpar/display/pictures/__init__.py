"""Static pictures of a run, for a talk, a README or a terminal: PNG files, made by matplotlib without a screen.

What lies where:

    drawing.py     a run -> all its pictures, written; the one to call
    style.py       how pictures look: palette, frames, legends beside the data, the same bytes every time
    training.py    loss and metrics along the steps
    edges.py       ROC curve, scores, efficiency and purity at every cut
    tracks.py      efficiency, fakes, duplicates; halo mode against naive mode near the borders of sectors
    parts.py       an event split over its parts: owned hits, ghosts, cut edges
    particles.py   the particles one wants of an event: found and missed
    views.py       an event seen across and along the beam
    ranks.py       time and memory of each rank
    wording.py     conditions on particles as a physicist writes them, runs in two words
"""
