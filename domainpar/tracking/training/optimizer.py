"""The optimiser of a run: one of torch's by its name, or the user's own."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from domainpar.common.problems import Problem
from domainpar.nn.optimizers import OPTIMIZERS
from domainpar.tracking.config.train import LearningFlags
from domainpar.tracking.networks.catalogue import of_own_code, taken


def make_optimizer(config: LearningFlags, model: nn.Module, layers: nn.Module) -> Optimizer:
    """An optimiser of all parameters of a model.

    Args:
        config: Its name and numbers.
        layers: The module in which its parameters have the names that their author gave them.

    Returns:
        The optimiser; its groups have a `factor` of the rate each.

    Raises:
        ValueError: If a pattern of `lr_factors` fits no parameter, or the optimiser is the user's own and cannot be
            made, has no use for `weight_decay`, or keeps what no checkpoint holds.
    """
    groups = _groups(model, layers, {} if config.lr_factors is None else config.lr_factors.value)
    if config.optimizer not in OPTIMIZERS:
        return _own(config, groups)
    options: dict[str, Any] = {"lr": config.lr, "weight_decay": config.weight_decay}
    options |= {"momentum": config.momentum} if config.optimizer == "sgd" else {"betas": config.betas.value}
    options["foreach"] = True  # all parameters at once: the same bits, with a fifth of the calls
    return OPTIMIZERS[config.optimizer](groups, **options)


def _groups(model: nn.Module, layers: nn.Module, patterns: Mapping[str, float]) -> list[dict[str, Any]]:
    """Groups of parameters by their factors of the rate: of several patterns that fit, the last one counts."""
    names = {id(parameter): of_it for of_it, parameter in layers.named_parameters()}
    for pattern in patterns:
        if not any(re.search(pattern, of_it) for of_it in names.values()):
            raise ValueError(f"no parameter has {pattern!r} in its name; the names are {', '.join(names.values())}.")
    groups: dict[float, list[nn.Parameter]] = {}
    for parameter in model.parameters():
        fitting = [factor for pattern, factor in patterns.items() if re.search(pattern, names[id(parameter)])]
        groups.setdefault([1.0, *fitting][-1], []).append(parameter)
    return [{"params": parameters, "factor": factor} for factor, parameters in groups.items()]


def _own(config: LearningFlags, groups: list[dict[str, Any]]) -> Optimizer:
    """The optimiser that a user's class makes."""
    name, options = config.optimizer, {"lr": config.lr}
    of_own = partial(of_own_code, "optimizer", name, ("lr", "weight_decay"))
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
