"""Torch's optimisers by name, without its compiler.

All ranks compute the same steps, because gradients are summed before.
"""

from __future__ import annotations

from torch import optim
from torch.optim import Optimizer

from domainpar.nn.uncompiled import uncompiled


@uncompiled
class AdamW(optim.AdamW):
    """That of torch."""


@uncompiled
class Adam(optim.Adam):
    """That of torch."""


@uncompiled
class SGD(optim.SGD):
    """That of torch."""


OPTIMIZERS: dict[str, type[Optimizer]] = {"adamw": AdamW, "adam": Adam, "sgd": SGD}
"""By the names on the command line."""


def optimizer_name(optimizer: Optimizer) -> str:
    """The name of an optimiser, because the states of two optimisers may share names with other meanings.

    One of `OPTIMIZERS`, or `package.module:Class` of any other.
    """
    own = type(optimizer)
    ours = [name for name, kind in OPTIMIZERS.items() if own in (kind, kind.__base__)]
    return ours[0] if ours else f"{own.__module__}:{own.__qualname__}"
