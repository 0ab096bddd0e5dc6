"""One collision event split over many ranks: training and inference with the answer of one rank, to the last bit.

The names below are loaded when they are first used: importing the package starts nothing and loads no torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from domainpar.events.graph import EventGraph, Hits, Particles
    from domainpar.events.simulate import simulate_event
    from domainpar.events.store import EventStore, write_event
    from domainpar.nn.adapt.parallelize import Parallel, parallelize
    from domainpar.nn.adapt.part import GraphPart, split_graph
    from domainpar.nn.adapt.rows import NotExact
    from domainpar.nn.adapt.verify import Verification, verify
    from domainpar.nn.interaction import InteractionNetwork
    from domainpar.nn.stages import EdgeStage, NodeStage
    from domainpar.parallel.halo import AdjointHalo, CompleteHalo
    from domainpar.parallel.launch import World
    from domainpar.parallel.local import LocalGraph, localise
    from domainpar.plan import PartitionPlan, build_plan, build_plans
    from domainpar.reco.reading import Scores, read_scores

__version__ = "0.1.0"

_HOMES = {
    "AdjointHalo": "domainpar.parallel.halo",
    "CompleteHalo": "domainpar.parallel.halo",
    "EdgeStage": "domainpar.nn.stages",
    "EventGraph": "domainpar.events.graph",
    "EventStore": "domainpar.events.store",
    "GraphPart": "domainpar.nn.adapt.part",
    "Hits": "domainpar.events.graph",
    "InteractionNetwork": "domainpar.nn.interaction",
    "LocalGraph": "domainpar.parallel.local",
    "NodeStage": "domainpar.nn.stages",
    "NotExact": "domainpar.nn.adapt.rows",
    "Parallel": "domainpar.nn.adapt.parallelize",
    "Particles": "domainpar.events.graph",
    "PartitionPlan": "domainpar.plan",
    "Scores": "domainpar.reco.reading",
    "Verification": "domainpar.nn.adapt.verify",
    "World": "domainpar.parallel.launch",
    "build_plan": "domainpar.plan",
    "build_plans": "domainpar.plan",
    "localise": "domainpar.parallel.local",
    "parallelize": "domainpar.nn.adapt.parallelize",
    "read_scores": "domainpar.reco.reading",
    "simulate_event": "domainpar.events.simulate",
    "split_graph": "domainpar.nn.adapt.part",
    "verify": "domainpar.nn.adapt.verify",
    "write_event": "domainpar.events.store",
}

__all__ = [
    "AdjointHalo",
    "CompleteHalo",
    "EdgeStage",
    "EventGraph",
    "EventStore",
    "GraphPart",
    "Hits",
    "InteractionNetwork",
    "LocalGraph",
    "NodeStage",
    "NotExact",
    "Parallel",
    "Particles",
    "PartitionPlan",
    "Scores",
    "Verification",
    "World",
    "build_plan",
    "build_plans",
    "localise",
    "parallelize",
    "read_scores",
    "simulate_event",
    "split_graph",
    "verify",
    "write_event",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'domainpar' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
