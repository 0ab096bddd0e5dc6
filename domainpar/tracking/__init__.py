"""The application on the core: events of a tracking detector, networks trained on them, scores, tracks, reports.

The names below are loaded when they are first used, as those of `domainpar` are.
"""

# ruff: noqa: I001

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # the same names as below, for type checkers
    from domainpar.tracking.events.graph import EventGraph as EventGraph, Hits as Hits, Particles as Particles
    from domainpar.tracking.events.simulate import simulate_event as simulate_event
    from domainpar.tracking.events.store import EventStore as EventStore, write_event as write_event
    from domainpar.tracking.reco.event_scores import Scores as Scores
    from domainpar.tracking.scoring.score_files import read_scores as read_scores

_MODULES = {
    "domainpar.tracking.events.graph": "EventGraph Hits Particles",
    "domainpar.tracking.events.simulate": "simulate_event",
    "domainpar.tracking.events.store": "EventStore write_event",
    "domainpar.tracking.reco.event_scores": "Scores",
    "domainpar.tracking.scoring.score_files": "read_scores",
}
_HOMES = {name: module for module, names in _MODULES.items() for name in names.split()}
__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'domainpar.tracking' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return list(__all__)
