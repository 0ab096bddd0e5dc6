"""Networks as users write them, good and bad, and their factories: `--model own_models:evolving`."""

from __future__ import annotations

import itertools
import threading
import time

import torch
from torch import Tensor, nn


def filled(module: nn.Module) -> nn.Module:
    """The module with weights by a formula, so that no random generator is asked for them."""
    with torch.no_grad():
        for number, (name, one) in enumerate(module.named_parameters()):
            waves = torch.sin(torch.arange(one.numel()).view(one.shape) * 1.7 + number)
            if one.dim() > 1:
                one.copy_(waves / one.size(1) ** 0.5)
            elif name.endswith("bias"):
                one.copy_(waves / 10)
    return module


def normed(inputs: int, outputs: int, dropout: float) -> nn.Sequential:
    # Without a bias, of which the norm would leave rounding alone, for AdamW to make steps of.
    return nn.Sequential(
        nn.Linear(inputs, outputs, bias=False), nn.BatchNorm1d(outputs), nn.Tanh(), nn.Dropout(dropout)
    )


class Evolving(nn.Module):
    """States of nodes and edges in turns, with norms over the whole graph and numbers that are dropped."""

    def __init__(self, node_features: int, edge_features: int, hidden: int, graph_iters: int, dropout: float) -> None:
        super().__init__()
        self.of_nodes = normed(node_features, hidden, dropout)
        self.of_edges = normed(edge_features, hidden, dropout)
        self.edge_steps = nn.ModuleList(normed(3 * hidden, hidden, dropout) for _ in range(graph_iters))
        self.node_steps = nn.ModuleList(normed(3 * hidden, hidden, dropout) for _ in range(graph_iters))
        self.head = nn.Linear(3 * hidden, 1)

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor) -> Tensor:
        src, dst = edge_index
        nodes, edges = self.of_nodes(x), self.of_edges(edge_attr)
        for edge_step, node_step in zip(self.edge_steps, self.node_steps):
            edges = edges + edge_step(torch.cat([nodes[src], nodes[dst], edges], dim=-1))
            at_dst, at_src = (torch.zeros_like(nodes).index_add(0, end, edges) for end in (dst, src))
            nodes = nodes + node_step(torch.cat([nodes, at_dst, at_src], dim=-1))
        return self.head(torch.cat([nodes[src], nodes[dst], edges], dim=-1)).squeeze(-1)


def evolving(node_features, edge_features, hidden, graph_iters, dropout):
    return filled(Evolving(node_features, edge_features, hidden, graph_iters, dropout))


class Small(nn.Module):
    """One sum; `changed` is what a bad network does besides."""

    def __init__(self, node_features: int = 3, edge_features: int = 6, width: int = 4) -> None:
        super().__init__()
        self.lin = nn.Linear(node_features, width)
        self.head = nn.Linear(2 * width, 1)

    def changed(self, x: Tensor) -> Tensor:
        return x

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        src, dst = edge_index
        x = self.changed(torch.tanh(self.lin(x)))
        x = x + torch.zeros_like(x).index_add(0, dst, x[src])
        return self.head(torch.cat([x[src], x[dst]], dim=-1))


def small():
    return filled(Small())


class Squashed(Small):
    """Ends in a sigmoid, where a logit is expected."""

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return torch.sigmoid(super().forward(x, edge_index))


class WithBatch(Small):
    def forward(self, x, edge_index, edge_attr, batch, anything=None):
        assert edge_attr.size(1) == 6
        assert batch.dtype == torch.int64
        return super().forward(x + x.new_zeros(1, x.size(1)).index_add(0, batch, x) / 100, edge_index)


class OfData(Small):
    def forward(self, data):
        return super().forward(data.x, data.edge_index)


class WithSpare(Small):
    """A layer that nobody uses, and one that is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.spare, self.frozen = nn.Linear(3, 3), nn.Linear(4, 4)
        self.frozen.requires_grad_(False)

    def changed(self, x):
        return self.frozen(x)


def with_spare():
    return filled(WithSpare())


def frozen():
    return filled(Small()).requires_grad_(False)


# What a factory is called with

CALLS: list[dict[str, object]] = []


def takes_all(**options):
    CALLS.append(options)
    return small()


def takes_some(seed, hidden=5, *, other=7):
    CALLS.append({"seed": seed, "hidden": hidden, "other": other})
    return small()


NUMBERS = itertools.count()
ONE_AT_A_TIME = threading.Lock()


def never_the_same():
    """Weights that no seed decides: other ones on each rank, were it not for the ranks' agreement."""
    made = small()
    with ONE_AT_A_TIME, torch.no_grad():
        made.head.bias.fill_(float(next(NUMBERS)))
    return made


def draws_slowly():
    """Draws weights, with time between them for another thread to draw as well."""
    made = Small()
    time.sleep(0.01)
    made.head.reset_parameters()
    return made


# Factories that fail


def breaks():
    raise KeyError("no such layer")


def wants_more(node_features, depth):
    return small()


def makes_no_module():
    return "a network"


not_a_function = 3


class OtherArguments(Small):
    def forward(self, x, adjacency):
        return super().forward(x, adjacency)


class OfNodes(Small):
    def forward(self, x, edge_index):
        return self.lin(x)[:, 0]


class TwoColumns(Small):
    def forward(self, x, edge_index):
        logits = super().forward(x, edge_index)
        return torch.cat([logits, logits], dim=-1)


class APair(Small):
    def forward(self, x, edge_index):
        return super().forward(x, edge_index), None


class WrongWidth(Small):
    def __init__(self) -> None:
        super().__init__(node_features=5)


class Lazy(Small):
    """A layer whose size is known when it is first used."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.LazyLinear(4)


class OfComplexNumbers(Small):
    def __init__(self) -> None:
        super().__init__()
        self.turn = nn.Parameter(torch.ones(4, dtype=torch.complex64))


class ByPlace(Small):
    def forward(self, x, /, edge_index):
        return super().forward(x, edge_index)


# Networks that are not exact


class Hooked(Small):
    """Silent: what a hook sees of a gradient is one rank's share."""

    def __init__(self) -> None:
        super().__init__()
        self.lin.weight.register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3))


class RunningTotal(Small):
    """Refused: it has no exact form."""

    def changed(self, x):
        return x.cumsum(0)


class Counts(nn.Module):
    """Silent: torch does not see Python's numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = itertools.count()

    def forward(self, x):
        return x + next(SHARED_CALLS)


SHARED_CALLS = itertools.count()


class Silent(Small):
    def __init__(self) -> None:
        super().__init__()
        self.counts = Counts()

    def changed(self, x):
        return self.counts(x)


class Masked(Small):
    """A norm, and a constant buffer of infinities."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("constant", torch.full((2,), -torch.inf))

    def changed(self, x):
        return self.norm(x)


def masked():
    return filled(Masked())


class WithNan(Masked):
    """A constant buffer that is no number."""

    def __init__(self) -> None:
        super().__init__()
        self.constant.fill_(torch.nan)


def with_nan():
    return filled(WithNan())


class WithMore(Small):
    """Something in its state that is no tensor."""

    def get_extra_state(self):
        return {"version": 1}

    def set_extra_state(self, state):
        assert state == {"version": 1}


def with_more():
    return filled(WithMore())


class Steep(Small):
    """Finite, with a gradient that is not."""

    def changed(self, x):
        return x + (0 * x).abs().sqrt()


def steep():
    return filled(Steep())


class DropsAlways(Small):
    """Drops in evaluation too, as `torch.nn.functional.dropout` does if it is not told."""

    def changed(self, x):
        return torch.nn.functional.dropout(x, 0.2)
