"""Faults on purpose: an environment variable makes one rank fail at one place, to test how the others end.

    DOMAINPAR_FAULT="rank=2,at=halo_bwd:1,step=3,do=kill" mpiexec -n 4 python -m domainpar.train

Unset, every place costs one look at a variable. `points` lists places and actions; docs/faults.md has them too, and
the faults that are defended against. A test carries the number of its fault there: `@fault(29)`.
"""

from domainpar.faults.switch import SWITCH, arm, at, reach

__all__ = ["SWITCH", "arm", "at", "reach"]
