"""Faults on purpose: one environment switch that makes one rank fail at one place, to see what becomes of the others.

    DOMAINPAR_FAULT="rank=2,at=halo_bwd:1,step=3,do=kill" mpiexec -n 4 python -m domainpar.train

Unset, every place costs one look at a variable. `points` lists the places and what can be done there; `cases` the
faults that are defended against, each with its test; `python -m domainpar.faults` writes both as docs/faults.md.
"""

from domainpar.faults.switch import SWITCH, arm, at, reach

__all__ = ["SWITCH", "arm", "at", "reach"]
