"""Parameters that a step of the optimiser has spoilt, found before anything is saved."""

from __future__ import annotations

import torch
from torch import nn

from domainpar.training.watching.failing import StepFailed
from domainpar.training.watching.layers import is_finite

HINT = (
    "go on from the last checkpoint with a smaller --lr or with --clip; if only one rank says this, look at its memory"
)


def check_parameters(model: nn.Module, rate: float) -> None:
    """Refuse to go on with parameters that are not finite.

    One norm over all of them. Without talk: ranks hold the same parameters, and the next collective call of a step
    ends the others where one rank alone has spoilt ones.

    Args:
        model: Its parameters are looked at.
        rate: The learning rate of the step, for the message.

    Raises:
        StepFailed: With the first of them.
    """
    # The norm overflows for some finite parameters, so it is only a reason to look closer.
    if bool(torch.nn.utils.get_total_norm([one.detach() for one in model.parameters()]).isfinite()):
        return
    spoilt = [name.removeprefix("module.") for name, one in model.named_parameters() if not is_finite(one)]
    if spoilt:
        more = f" and {len(spoilt) - 1} more" if len(spoilt) > 1 else ""
        what = f"parameter {spoilt[0]}{more} is not finite after a step with learning rate {rate:g}; nothing was saved"
        raise StepFailed(what, HINT)
