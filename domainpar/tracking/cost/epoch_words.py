"""What epochs cost, in words; knows no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def in_words(costs: Mapping[str, Any]) -> str:
    """The costs of an epoch: `12.3 s, 31.2 GFLOP/s per rank in float32`."""
    speeds: Sequence[float] = costs.get("flops_per_second", ())
    rate = f", {sum(speeds) / len(speeds) / 1e9:.3g} GFLOP/s per rank in {costs['precision']}" if any(speeds) else ""
    return f"{costs['seconds']:.3g} s{rate}"


def mean_epoch(epochs: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """The mean costs of some epochs; None of none."""
    if not epochs:
        return None
    # Operations of all epochs over their seconds, of as many ranks as all had.
    speeds, seconds = [epoch["flops_per_second"] for epoch in epochs], [epoch["seconds"] for epoch in epochs]
    of_ranks = [
        sum(speed * of_epoch for speed, of_epoch in zip(of_rank, seconds)) / (sum(seconds) or 1.0)
        for of_rank in zip(*speeds)
    ]
    return {**epochs[-1], "seconds": sum(seconds) / len(seconds), "flops_per_second": of_ranks}
