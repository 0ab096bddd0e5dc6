"""Training and inference on one graph that is split over many ranks, with the result of one rank.

Networks on stages give that result to the last bit, any other module up to rounding. The names below are loaded when
they are first used: importing the package starts nothing and does not load torch.
"""

# ruff: noqa: I001

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # the same names as below, for type checkers
    from domainpar.nn.adapt.parallelize import GraphParallel as GraphParallel, parallelize as parallelize
    from domainpar.nn.adapt.part import GraphPart as GraphPart
    from domainpar.nn.adapt.rows import NotExact as NotExact
    from domainpar.nn.adapt.split import split_graph as split_graph, split_slices as split_slices
    from domainpar.nn.adapt.in_blocks import in_blocks as in_blocks
    from domainpar.nn.adapt.verify import Verification as Verification, verify as verify
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
    "domainpar.nn.adapt.parallelize": "GraphParallel parallelize",
    "domainpar.nn.adapt.part": "GraphPart",
    "domainpar.nn.adapt.rows": "NotExact",
    "domainpar.nn.adapt.split": "split_graph split_slices",
    "domainpar.nn.adapt.in_blocks": "in_blocks",
    "domainpar.nn.adapt.verify": "Verification verify",
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
    if name not in _HOMES:
        raise AttributeError(f"module 'domainpar' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
