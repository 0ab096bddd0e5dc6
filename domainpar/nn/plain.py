"""Pieces of networks written in plain torch: perceptrons layer by layer, and aggregates of edges at their nodes.

Networks made of these know nothing of ranks or tiles. Another room runs them on a part of an event by watching each
call, which is why they keep to few of them: rows of nodes by index, `torch.cat` of columns, functions of single numbers
or single rows, torch's layers, and the aggregates below. The number of nodes is only ever `x.size(0)`, the rows of a
new table.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Literal, get_args

import torch
from torch import Tensor, nn

Aggregation = Literal["sum", "mean", "max", "std"]
Norms = Callable[[int], list[nn.Module]]

SMALLEST_VARIANCE = 1e-5


def no_norms(width: int) -> list[nn.Module]:
    """Nothing between a linear layer and its activation."""
    return []


def perceptron(
    in_features: int,
    widths: Sequence[int],
    generator: torch.Generator,
    *,
    hidden_activation: str = "ReLU",
    output_activation: str | None = None,
    norms: Norms = no_norms,
    output_norms: Norms = no_norms,
    bias: bool = True,
) -> nn.Sequential:
    """Linear layers, each but the last followed by norms and an activation.

    Args:
        in_features: Inputs.
        widths: Outputs of each layer.
        generator: Source of the initial weights.
        hidden_activation: Name of the activation in `torch.nn`.
        output_activation: That after the last layer; None: the last layer is linear, without norms.
        norms: Makes what stands between a layer of a width and its activation.
        output_norms: The same for the last layer.
        bias: Whether layers have one.

    Raises:
        ValueError: If torch has no such activation.
    """
    modules: list[nn.Module] = []
    for wide, width in zip((in_features, *widths[:-2]), widths[:-1]):
        modules += [linear(wide, width, generator, bias), *norms(width), _activation(hidden_activation)]
    modules.append(linear((in_features, *widths)[-2], widths[-1], generator, bias))
    if output_activation is not None:
        modules += [*output_norms(widths[-1]), _activation(output_activation)]
    return nn.Sequential(*modules)


def linear(in_features: int, out_features: int, generator: torch.Generator, bias: bool = True) -> nn.Linear:
    """torch's Linear with its default weights, uniform in +-1/sqrt(in_features), drawn from a generator.

    Not from torch's own one: ranks may be threads, whose draws from it would mix.
    """
    made = nn.Linear(in_features, out_features, bias, device="meta").to_empty(device="cpu")
    bound = 1 / math.sqrt(in_features)
    for parameter in made.parameters():
        nn.init.uniform_(parameter, -bound, bound, generator=generator)
    return made


def _activation(name: str) -> nn.Module:
    if name not in nn.modules.activation.__all__:
        raise ValueError(f"unknown activation {name!r}; take a class of torch.nn by name, such as ReLU, SiLU or Tanh.")
    made: nn.Module = getattr(nn, name)()
    return made


def check_sizes(**sizes: int) -> None:
    """Refuse a size below 1.

    Raises:
        ValueError: With the name of the size.
    """
    for name, size in sizes.items():
        if size < 1:
            raise ValueError(f"{name} is {size}; it must be at least 1.")


def sum_at(x: Tensor, index: Tensor, values: Tensor) -> Tensor:
    """Sums of edge rows at nodes, [N, width]; 0 at a node without edges.

    Args:
        x: Any table of the nodes, [N, ...].
        index: Node of each edge, int64 [E].
        values: Edge rows, [E, width].
    """
    return x.new_zeros(x.size(0), values.size(-1)).index_add(0, index, values)


def max_at(x: Tensor, index: Tensor, values: Tensor) -> Tensor:
    """Maxima of edge rows at nodes, as `sum_at`. Edges that are equally large share the gradient evenly."""
    at_nodes = x.new_zeros(x.size(0), values.size(-1))
    return at_nodes.scatter_reduce(0, index.unsqueeze(-1).expand_as(values), values, "amax", include_self=False)


def check_aggregations(kinds: Sequence[Aggregation]) -> None:
    """Refuse what `aggregate_at` does not know.

    Raises:
        ValueError: If a kind is unknown, or there is none.
    """
    known = get_args(Aggregation)
    if not kinds or not set(kinds) <= set(known):
        raise ValueError(f"aggregations {kinds!r} are not a list of one or more of {', '.join(known)}.")


def aggregate_at(x: Tensor, index: Tensor, values: Tensor, kinds: Sequence[Aggregation]) -> Tensor:
    """Aggregates of edge rows at nodes beside each other, [N, len(kinds) width]; 0 at a node without edges.

    They follow torch_geometric (`nn/aggr/basic.py`): std = sqrt(mean(v^2) - mean(v)^2), and 0, also in backward, where
    the variance is 1e-5 or less.

    Args:
        x: Any table of the nodes, [N, ...].
        index: Node of each edge, int64 [E].
        values: Edge rows, [E, width].
        kinds: Which aggregates, in this order.
    """
    made: dict[str, Tensor] = {}
    if "max" in kinds:
        made["max"] = max_at(x, index, values)
    if set(kinds) & {"sum", "mean", "std"}:
        made["sum"] = sum_at(x, index, values)
    if set(kinds) & {"mean", "std"}:
        degree = sum_at(x, index, torch.ones_like(index, dtype=values.dtype).unsqueeze(-1)).clamp(min=1)
        made["mean"] = made["sum"] / degree
    if "std" in kinds:
        variance = sum_at(x, index, values * values) / degree - made["mean"] * made["mean"]
        std = variance.clamp(min=SMALLEST_VARIANCE).sqrt()
        made["std"] = std.masked_fill(std <= math.sqrt(SMALLEST_VARIANCE), 0.0)
    return torch.cat([made[kind] for kind in kinds], dim=-1)
