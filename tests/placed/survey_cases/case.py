"""A case of the survey, how it is made, and the calls that many layers share."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from survey_samples import Sample, sample
from torch import Tensor, nn

Module = Any  # what a case makes: torch.nn.Module says nothing of how it is called
Call = Callable[[Module, Sample], Tensor]
Verdict = Literal["exact", "global", "refused", "wrong"]
DEGREES = (7, 3, 8, 9, 10, 9, 6, 4, 2, 1, 1)  # nodes with 0, 1, 2 ... incoming edges, as PNA wants to know them


@dataclass(frozen=True, eq=False)
class Case:
    """One way to build a module and to call it.

    Attributes:
        name: The class.
        make: Builds it in torch's default dtype, in the mode to survey it in, with the same weights each time: none of
            them zero, so that no term hides. Take it to the sample's dtype with `.double()`.
        call: Calls it with fields of a sample. Returns one tensor.
        variant: How it differs from other cases of this class.
        graph: Makes the graph this case is defined on.
        random: Whether the result is drawn from torch's global generator.
        single: Whether some of the work is done in float32 whatever the dtype.
        cancels: How many times the tolerance a difference may be, where a gradient that is 0 is only rounding.
    """

    name: str
    make: Callable[[], nn.Module]
    call: Call
    variant: str = ""
    graph: Callable[[], Sample] = sample
    random: bool = False
    single: bool = False
    cancels: float = 1.0

    def __str__(self) -> str:
        return f"{self.name} ({self.variant})" if self.variant else self.name


@dataclass(frozen=True)
class Outcome:
    """The outcome of one case.

    Attributes:
        case: The case.
        verdict: `exact`; `global`: exact, with sums over all nodes or edges; `refused`; or `wrong`.
        error: Largest difference of outputs, gradients and buffers, relative to the largest value of each kind.
        reason: Why it was refused.
        place: The layer and the line where it was refused.
        exchanges: How often ghosts were filled in one forward pass.
    """

    case: Case
    verdict: Verdict
    error: float = 0.0
    reason: str = ""
    place: str = ""
    exchanges: int = 0


def plain(m: Module, s: Sample) -> Any:
    """Node features and edges."""
    return m(s.x, s.edge_index)


def weighted(m: Module, s: Sample) -> Any:
    """Node features, edges, and a weight of each edge."""
    return m(s.x, s.edge_index, s.edge_weight)


def attributed(m: Module, s: Sample) -> Any:
    """Node features, edges, and edge features."""
    return m(s.x, s.edge_index, s.edge_attr)


def with_edge_attr(m: Module, s: Sample) -> Any:
    """Node features, edges, and edge features by name."""
    return m(s.x, s.edge_index, edge_attr=s.edge_attr)


def typed(m: Module, s: Sample) -> Any:
    """Node features, edges, and types of edges."""
    return m(s.x, s.edge_index, s.edge_type)


def nodes_only(m: Module, s: Sample) -> Any:
    """Node features alone."""
    return m(s.x)


def edges_only(m: Module, s: Sample) -> Any:
    """Edge features alone."""
    return m(s.edge_attr)


def batched(m: Module, s: Sample) -> Any:
    """Node features of three graphs."""
    return m(s.x, s.batch)


def one_event(m: Module, s: Sample) -> Any:
    """Node features, with the batch vector of one graph."""
    return m(s.x, s.event)


def case(
    name: str, variant: str, make: Callable[[], Module], call: Callable[[Module, Sample], Any] = plain, **options: Any
) -> Case:
    """A case of a class: `make` builds it, always with the same weights; `options` are further attributes."""
    return Case(name, functools.partial(_same_weights, make), call, variant, **options)


def _same_weights(make: Callable[[], Module]) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)  # torch.manual_seed writes down its whole stack for each device it lacks
        module: nn.Module = make()
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.add_(0.05 * torch.randn_like(parameter))
    return module


def by_name(cases: Iterable[Case]) -> dict[str, list[Case]]:
    """Cases by class, in the order they come in."""
    named: dict[str, list[Case]] = {}
    for one in cases:
        named.setdefault(one.name, []).append(one)
    return named


def degrees() -> Tensor:
    """How many nodes have 0, 1, 2 ... incoming edges."""
    return torch.tensor(DEGREES)
