"""Optimisers by name: torch's own, and LARS and LAMB, whose steps in each layer are a share of the layer's size.

All make the same arithmetic of the same bits on every rank: gradients are summed before.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn, optim
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


@uncompiled
class LayerwiseOptimizer(Optimizer):
    """Steps that are scaled, tensor by tensor, to the size of the tensor: large batches take large rates.

    Vectors, such as biases and the scales of norms, are neither scaled nor decayed.
    """

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Change every parameter that has a gradient."""
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.change(parameter, parameter.grad, self.state[parameter], group)
        return loss

    def change(self, parameter: Tensor, gradient: Tensor, state: dict[str, Any], group: Mapping[str, Any]) -> None:
        """Change one parameter."""
        raise NotImplementedError


def _share(parameter: Tensor, of_step: Tensor) -> Tensor:
    """The size of a tensor over that of its step; 1 where one of them is 0."""
    size = torch.linalg.vector_norm(parameter)
    return torch.where((size > 0) & (of_step > 0), size / of_step, 1.0)


class Lars(LayerwiseOptimizer):
    """Layer-wise adaptive rates with momentum, of You, Gitman and Ginsburg, arXiv:1708.03888, algorithm 1.

    Args:
        params: Parameters, or groups of them.
        lr: Learning rate.
        momentum: Share of the step before that is added.
        weight_decay: Share of a matrix that is added to its gradient.
        trust: The size of a step, at a rate of 1, over that of the tensor.
    """

    def __init__(self, params: Any, lr: float, momentum: float, weight_decay: float, trust: float = 0.001) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "trust": trust})

    def change(self, parameter: Tensor, gradient: Tensor, state: dict[str, Any], group: Mapping[str, Any]) -> None:
        rate: float | Tensor = group["lr"]
        if parameter.dim() > 1:
            decay = group["weight_decay"]
            of_step = torch.linalg.vector_norm(gradient) + decay * torch.linalg.vector_norm(parameter)
            gradient = gradient + decay * parameter
            rate = rate * group["trust"] * _share(parameter, of_step)
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(parameter)
        velocity = state["momentum_buffer"]
        velocity.mul_(group["momentum"]).add_(gradient * rate)
        parameter.sub_(velocity)


class Lamb(LayerwiseOptimizer):
    """Adam's direction, decayed weights added, with the size of the tensor; of You et al., arXiv:1904.00962.

    Args:
        params: Parameters, or groups of them.
        lr: The size of a step over that of the tensor.
        betas: Decay of the means of gradients and of their squares.
        weight_decay: Share of a matrix that is added to its direction.
        eps: Added to the root of the mean square.
    """

    def __init__(self, params: Any, lr: float, betas: tuple[float, float], weight_decay: float, eps: float = 1e-6):
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay, "eps": eps})

    def change(self, parameter: Tensor, gradient: Tensor, state: dict[str, Any], group: Mapping[str, Any]) -> None:
        if not state:
            state |= {"step": torch.zeros(()), "exp_avg": torch.zeros_like(parameter)}
            state["exp_avg_sq"] = torch.zeros_like(parameter)
        state["step"] += 1
        step, (first, second) = int(state["step"]), group["betas"]
        state["exp_avg"].lerp_(gradient, 1 - first)
        state["exp_avg_sq"].mul_(second).addcmul_(gradient, gradient, value=1 - second)
        size = (state["exp_avg_sq"] / (1 - second**step)).sqrt().add_(group["eps"])
        direction = state["exp_avg"] / (1 - first**step) / size
        rate: float | Tensor = group["lr"]
        if parameter.dim() > 1:
            direction += group["weight_decay"] * parameter
            rate = rate * _share(parameter, torch.linalg.vector_norm(direction))
        parameter.sub_(direction * rate)


OPTIMIZERS: dict[str, type[Optimizer]] = {"adamw": AdamW, "adam": Adam, "sgd": SGD, "lars": Lars, "lamb": Lamb}
"""By the names on the command line."""


def optimizer_name(optimizer: Optimizer) -> str:
    """The name of an optimiser: what two of them keep from step to step may have one name and mean two things."""
    own = type(optimizer)
    return next((name for name, kind in OPTIMIZERS.items() if own in (kind, kind.__base__)), own.__name__)


def make_optimizer(
    name: str,
    model: nn.Module,
    layers: nn.Module,
    *,
    lr: float,
    weight_decay: float,
    momentum: float = 0.9,
    betas: tuple[float, float] = (0.9, 0.999),
    lr_factors: Mapping[str, float] | None = None,
) -> Optimizer:
    """An optimiser of all parameters of a model.

    Args:
        name: One of `OPTIMIZERS`.
        model: The model.
        layers: The module in which its parameters have the names that their author gave them.
        lr: Learning rate.
        weight_decay: Of `adamw`: the share of a weight that a step at a rate of 1 takes away; of all others, the share
            that is added to the gradient, or to the direction.
        momentum: Of `sgd` and `lars`.
        betas: Of `adamw`, `adam` and `lamb`.
        lr_factors: Factors of the rate, by patterns of parameters' names; of several that fit, the last one counts.

    Returns:
        The optimiser; its groups have a `factor` each.

    Raises:
        ValueError: If a pattern fits no parameter.
    """
    patterns = lr_factors or {}
    names = {id(parameter): of_it for of_it, parameter in layers.named_parameters()}
    for pattern in patterns:
        if not any(re.search(pattern, of_it) for of_it in names.values()):
            raise ValueError(f"no parameter has {pattern!r} in its name; the names are {', '.join(names.values())}.")
    groups: dict[float, list[nn.Parameter]] = {}
    for parameter in model.parameters():
        fitting = [factor for pattern, factor in patterns.items() if re.search(pattern, names[id(parameter)])]
        groups.setdefault([1.0, *fitting][-1], []).append(parameter)
    grouped = [{"params": parameters, "factor": factor} for factor, parameters in groups.items()]
    options: dict[str, Any] = {"lr": lr, "weight_decay": weight_decay}
    options |= {"momentum": momentum} if name in ("sgd", "lars") else {"betas": betas}
    if name in ("adamw", "adam", "sgd"):
        options["foreach"] = True  # all parameters at once: the same bits, with a fifth of the calls
    return OPTIMIZERS[name](grouped, **options)
