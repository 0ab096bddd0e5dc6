"""LARS and LAMB in plain torch, whose steps in each layer are a share of the layer's size: large batches take large
rates. Copy one, change it, and train with it:

    python -m domainpar.train --optimizer examples.optimizers:Lamb --lr 0.03 --events-per-step 16

`train` calls an optimiser with groups of parameters, `lr`, and, if it takes it, `weight_decay`. Vectors, such as biases
and the scales of norms, are neither scaled nor decayed here.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer


class Lars(Optimizer):
    """Layer-wise adaptive rates with momentum, of You, Gitman and Ginsburg, arXiv:1708.03888, algorithm 1.

    Args:
        params: Parameters, or groups of them.
        lr: Learning rate.
        momentum: Share of the step before that is added.
        weight_decay: Share of a matrix that is added to its gradient.
        trust: The size of a step, at a rate of 1, over that of the tensor.
    """

    def __init__(
        self, params: Any, lr: float, momentum: float = 0.9, weight_decay: float = 0.01, trust: float = 0.001
    ) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "trust": trust})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Change every parameter that has a gradient."""
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group, parameter, gradient in with_gradients(self):
            state, rate = self.state[parameter], group["lr"]
            if parameter.dim() > 1:
                decay = group["weight_decay"]
                of_step = torch.linalg.vector_norm(gradient) + decay * torch.linalg.vector_norm(parameter)
                gradient = gradient + decay * parameter
                rate = rate * group["trust"] * share(parameter, of_step)
            if "momentum_buffer" not in state:
                state["momentum_buffer"] = torch.zeros_like(parameter)
            velocity = state["momentum_buffer"]
            velocity.mul_(group["momentum"]).add_(gradient * rate)
            parameter.sub_(velocity)
        return loss


class Lamb(Optimizer):
    """Adam's direction, decayed weights added, with the size of the tensor; of You et al., arXiv:1904.00962.

    Args:
        params: Parameters, or groups of them.
        lr: The size of a step over that of the tensor.
        betas: Decay of the means of gradients and of their squares.
        weight_decay: Share of a matrix that is added to its direction.
        eps: Added to the root of the mean square.
    """

    def __init__(
        self,
        params: Any,
        lr: float,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0.01,
        eps: float = 1e-6,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay, "eps": eps})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Change every parameter that has a gradient."""
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group, parameter, gradient in with_gradients(self):
            state = self.state[parameter]
            if not state:
                state |= {"step": torch.zeros(()), "exp_avg": torch.zeros_like(parameter)}
                state["exp_avg_sq"] = torch.zeros_like(parameter)
            state["step"] += 1
            step, (first, second) = int(state["step"]), group["betas"]
            state["exp_avg"].lerp_(gradient, 1 - first)
            state["exp_avg_sq"].mul_(second).addcmul_(gradient, gradient, value=1 - second)
            size = (state["exp_avg_sq"] / (1 - second**step)).sqrt().add_(group["eps"])
            direction = state["exp_avg"] / (1 - first**step) / size
            rate = group["lr"]
            if parameter.dim() > 1:
                direction += group["weight_decay"] * parameter
                rate = rate * share(parameter, torch.linalg.vector_norm(direction))
            parameter.sub_(direction * rate)
        return loss


def with_gradients(optimizer: Optimizer) -> list[tuple[dict[str, Any], Tensor, Tensor]]:
    """The parameters of an optimiser that have a gradient, each with its group and its gradient."""
    return [
        (group, parameter, parameter.grad)
        for group in optimizer.param_groups
        for parameter in group["params"]
        if parameter.grad is not None
    ]


def share(parameter: Tensor, of_step: Tensor) -> Tensor:
    """The size of a tensor over that of its step; 1 where one of them is 0."""
    size = torch.linalg.vector_norm(parameter)
    return torch.where((size > 0) & (of_step > 0), size / of_step, 1.0)
