"""What is written beside a picture: conditions on particles as a physicist writes them, and runs in two words."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from domainpar.display import efficiency
from domainpar.display.pictures.style import plain
from domainpar.display.reading import RunFiles

SYMBOLS = {"pt": "$p_T$", "eta": "η", "nhits": "hits", "charge": "charge", "radius": "vertex radius", "vz": "vertex z"}
UNITS = {"pt": " GeV", "radius": " mm", "vz": " mm"}


def kind_of(run: RunFiles) -> str:
    """How a run was scored, in the few words that a legend has room for."""
    if run.scores is not None and run.scores.approximate:
        return "naive (approximate)"
    return "trained naive (approximate)" if run.approximate else "halo (exact)"


def how(run: RunFiles) -> str:
    """How a run was scored, in full."""
    return plain(efficiency.how_scored(run))


def how_trained(run: RunFiles) -> str:
    """How a run was trained, which need not be how it was scored."""
    return plain(efficiency.how_trained(run))


def target_text(conditions: Mapping[str, Any]) -> str:
    """Which particles are wanted: `$p_T$ ≥ 1 GeV, hits ≥ 5`; `all` without a condition.

    Args:
        conditions: Those of `events.targets`.
    """
    return ", ".join(_condition(*one) for one in sorted(conditions.items(), reverse=True)) or "all"


def _condition(name: str, condition: Any) -> str:
    symbol, unit = SYMBOLS.get(name, plain(name)), UNITS.get(name, "")
    match condition:
        case [int() | float() as low, int() | float() as high]:
            return _interval(symbol, low, high, unit)
        case list() | tuple():
            return f"{symbol} {plain(' '.join(map(str, condition)))}{unit}"
    return f"{symbol} = {plain(str(condition))}{unit}"


def _interval(symbol: str, low: float, high: float, unit: str) -> str:
    if math.isinf(high):
        return f"{symbol} ≥ {low:g}{unit}"
    if math.isinf(low):
        return f"{symbol} ≤ {high:g}{unit}"
    return f"{low:g} ≤ {symbol} ≤ {high:g}{unit}"
