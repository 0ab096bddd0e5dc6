"""Training and inference on one graph that is split over many ranks, with the result of one rank.

Networks on stages give that result to the last bit, any other module up to rounding, or on CPU to the last bit on
request to. The names below are loaded when they are first used: importing the package starts nothing and does not load
torch.
"""

# ruff: noqa: I001

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # the same names as below, for type checkers
    from domainpar.measure.forecast import Forecast as Forecast
    from domainpar.measure.pieces import forecast as forecast
    from domainpar.placed.own_operators import rule as rule
    from domainpar.placed.parallelize import parallelize as parallelize
    from domainpar.placed.part import GraphPart as GraphPart
    from domainpar.placed.ranks import NotExact as NotExact
    from domainpar.placed.activation_checkpoint import in_blocks as in_blocks, kept_ghosts as kept_ghosts
    from domainpar.placed.split import part_of_domain as part_of_domain
    from domainpar.placed.split import split_graph as split_graph, split_slices as split_slices
    from domainpar.placed.tensor import Placed as Placed
    from domainpar.placed.verify import Verification as Verification, verify as verify
    from domainpar.nn.interaction import InteractionNetwork as InteractionNetwork
    from domainpar.nn.stages import EdgeStage as EdgeStage, NodeStage as NodeStage
    from domainpar.parallel.halo import AdjointHalo as AdjointHalo, CompleteHalo as CompleteHalo
    from domainpar.parallel.local import LocalGraph as LocalGraph, localise as localise
    from domainpar.parallel.world import World as World
    from domainpar.plan import PartitionPlan as PartitionPlan, build_plan as build_plan, build_plans as build_plans
    from domainpar.tracking import EventGraph as EventGraph, EventStore as EventStore, Hits as Hits
    from domainpar.tracking import Particles as Particles, Scores as Scores, read_scores as read_scores
    from domainpar.tracking import simulate_event as simulate_event, write_event as write_event

__version__ = "0.1.0"

_MODULES = {
    "domainpar.measure.forecast": "Forecast",
    "domainpar.measure.pieces": "forecast",
    "domainpar.placed.own_operators": "rule",
    "domainpar.placed.parallelize": "parallelize",
    "domainpar.placed.part": "GraphPart",
    "domainpar.placed.ranks": "NotExact",
    "domainpar.placed.activation_checkpoint": "in_blocks kept_ghosts",
    "domainpar.placed.split": "part_of_domain split_graph split_slices",
    "domainpar.placed.tensor": "Placed",
    "domainpar.placed.verify": "Verification verify",
    "domainpar.nn.interaction": "InteractionNetwork",
    "domainpar.nn.stages": "EdgeStage NodeStage",
    "domainpar.parallel.halo": "AdjointHalo CompleteHalo",
    "domainpar.parallel.local": "LocalGraph localise",
    "domainpar.parallel.world": "World",
    "domainpar.plan": "PartitionPlan build_plan build_plans",
    "domainpar.tracking": "EventGraph EventStore Hits Particles Scores read_scores simulate_event write_event",
}
_HOMES = {name: module for module, names in _MODULES.items() for name in names.split()}
__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name == "GraphParallel":
        raise AttributeError("there is no GraphParallel any more: parallelize(module, world) returns the module itself")
    if name not in _HOMES:
        raise AttributeError(f"module 'domainpar' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
