"""What epochs cost, in words; knows no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def in_words(costs: Mapping[str, Any]) -> str:
    """The costs of an epoch: `12.3 s, 1.2 kJ (RAPL), 31.2 GFLOP/s per rank in float32`."""
    parts = [f"{costs['seconds']:.3g} s"]
    if costs["joules"] is not None:
        parts.append(f"{_joules_in_words(costs['joules'])} ({costs['joules_by']})")
    speeds: Sequence[float] = costs.get("flops_per_second", ())
    if any(speeds):
        parts.append(f"{sum(speeds) / len(speeds) / 1e9:.3g} GFLOP/s per rank in {costs['precision']}")
    return ", ".join(parts)


def _joules_in_words(joules: float) -> str:
    for size, unit in ((3.6e6, "kWh"), (1e3, "kJ")):
        if joules >= size:
            return f"{joules / size:.3g} {unit}"
    return f"{joules:.3g} J"


def mean_epoch(epochs: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """The mean costs of some epochs, which all tell alike; None of none."""
    if not epochs:
        return None

    def mean(name: str) -> float | None:
        known = [epoch[name] for epoch in epochs if epoch[name] is not None]
        return sum(known) / len(known) if len(known) == len(epochs) else None

    # Operations of all epochs over their seconds, of as many ranks as all had.
    speeds, seconds = [epoch["flops_per_second"] for epoch in epochs], [epoch["seconds"] for epoch in epochs]
    of_ranks = [
        sum(speed * of_epoch for speed, of_epoch in zip(of_rank, seconds)) / (sum(seconds) or 1.0)
        for of_rank in zip(*speeds)
    ]
    return {
        **epochs[-1],
        **{name: mean(name) for name in ("seconds", "joules")},
        "flops_per_second": of_ranks,
    }
