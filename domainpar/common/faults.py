"""Fault injection for tests: an environment variable names the file of a listener and its arguments.

    export DOMAINPAR_FAULT="tests/faults/on_purpose.py rank=2,at=halo_bwd:1,step=3,do=kill"
    mpiexec -n 4 python -m domainpar.train

Tests make one rank fail at one place, to see how the others end. Unset, each place costs one look at a variable.
docs/reference/fault_switch.md lists the places and actions, docs/faults.md the faults. A test carries the number of its
fault: `@fault(29)`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from importlib.util import module_from_spec, spec_from_file_location
from typing import Any, Protocol, TypeVar

from domainpar.common.problems import Problem

T = TypeVar("T")

SWITCH = "DOMAINPAR_FAULT"


class Listener(Protocol):
    """The result of `listener(rank, words)` in that file; None for a rank on which nothing is to happen."""

    def begin(self, phase: str, step: int) -> None:
        """A phase of a step begins."""

    def reach(self, point: str, at_hand: Any) -> Any:
        """This rank passes a place with a value; returns it, or a replacement."""


_listening: Listener | None = None


def arm(rank: int, environ: Mapping[str, str] = os.environ) -> None:
    """Load the listener, if the variable is set, once this process knows its rank.

    Raises:
        Problem: If the file cannot be loaded, or does not understand its words.
    """
    global _listening
    _listening = None
    if text := environ.get(SWITCH):
        file, _, words = text.rpartition(" ")
        spec = spec_from_file_location("domainpar_listener", file) if os.path.isfile(file) else None
        if spec is None or spec.loader is None:
            hint = f"write {SWITCH}='FILE WORDS', with a listener's file (docs/reference/fault_switch.md), or unset it"
            raise Problem(f"{SWITCH} is {text!r}: {file or 'nothing'} is no Python file", hint)
        module = sys.modules[spec.name] = module_from_spec(spec)  # where dataclasses look for their own module
        try:
            spec.loader.exec_module(module)
            listener = module.listener
        except (SyntaxError, ImportError, AttributeError) as error:
            del sys.modules[spec.name]
            hint = "docs/reference/fault_switch.md says what a listener is"
            raise Problem(f"{SWITCH}: {file} cannot be loaded: {error}", hint) from error
        _listening = listener(rank, words)


def at(phase: str, step: int) -> None:
    """Tell which phase of which step begins."""
    if _listening is not None:
        _listening.begin(phase, step)


def reach(point: str, at_hand: T = None) -> T:  # type: ignore[assignment]
    """Pass a place with a tensor or plan; returns it, or a damaged one in a test."""
    if _listening is None:
        return at_hand
    changed: T = _listening.reach(point, at_hand)
    return changed
