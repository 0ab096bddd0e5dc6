"""The optimiser of a run: one of torch's by its name, or the user's own."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from domainpar.common.problems import Problem
from domainpar.nn.optimizers import OPTIMIZERS
from domainpar.tracking.config.train import LearningFlags
from domainpar.tracking.networks.catalogue import taken, use_own_code


def make_optimizer(config: LearningFlags, model: nn.Module) -> Optimizer:
    """An optimiser of all parameters of a model.

    Args:
        config: Its name and numbers.

    Raises:
        ValueError: If the optimiser is the user's own and cannot be made, has no use for `weight_decay`, or keeps what
            no checkpoint holds.
    """
    groups = [{"params": list(model.parameters())}]
    if config.optimizer not in OPTIMIZERS:
        return _own(config, groups)
    options: dict[str, Any] = {"lr": config.lr, "weight_decay": config.weight_decay}
    if config.optimizer == "sgd":
        options["momentum"] = 0.9  # no experiment of ours used another
    options["foreach"] = True  # all parameters at once: the same bits, with a fifth of the calls
    return OPTIMIZERS[config.optimizer](groups, **options)


def _own(config: LearningFlags, groups: list[dict[str, Any]]) -> Optimizer:
    """The optimiser that a user's class makes."""
    name, options = config.optimizer, {"lr": config.lr}
    of_own = partial(use_own_code, "optimizer", name, ("lr", "weight_decay"))
    if of_own(lambda factory: taken(factory, ("weight_decay",))):
        options["weight_decay"] = config.weight_decay
    elif config.has("weight_decay"):
        what = f"{config.spelt('weight_decay')} means nothing with --optimizer {name}, which takes no weight_decay"
        raise Problem(what, "drop it, or take another optimiser")
    optimizer = of_own(lambda factory: factory(groups, **options))
    if not isinstance(optimizer, Optimizer):
        raise ValueError(f"optimizer {name!r} made a {type(optimizer).__name__}, not a torch.optim.Optimizer.")
    if lost := of_own(lambda factory: _lost(partial(factory, **options))):
        what = f"optimizer {name!r} keeps {', '.join(lost)} from step to step, which no checkpoint holds"
        raise Problem(what, "have it keep tensors in its state, by parameter: state[parameter][name]")
    return optimizer


def _lost(make: Callable[[list[dict[str, Any]]], Optimizer]) -> list[str]:
    """What an optimiser keeps from its first step, on a small matrix, that a run which goes on would not have."""
    parameter = nn.Parameter(torch.ones(2, 2))
    parameter.grad = torch.ones(2, 2)
    optimizer = make([{"params": [parameter]}])
    group, state = optimizer.param_groups[0], optimizer.state
    before = dict(group)
    optimizer.step()
    changed = [key for key, value in group.items() if not (value is before.get(key) or value == before.get(key))]
    no_tensors = [key for key, value in state[parameter].items() if not isinstance(value, Tensor)]
    return changed + no_tensors + [str(key) for key in state if key is not parameter]
