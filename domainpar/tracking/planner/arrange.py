"""The grid of a training whose ranks are there already: `--domain-size auto` and `--grouping auto`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch

from domainpar.common.agreement import on_root
from domainpar.common.words import several
from domainpar.measure.rates import transport_rates
from domainpar.parallel.world import World
from domainpar.tracking.config import TrainConfig
from domainpar.tracking.planner.choice import best, grids
from domainpar.tracking.planner.crowd import of_rates
from domainpar.tracking.planner.steps import divisors
from domainpar.tracking.planner.work import basis_of

SECONDS_OF_MESSAGES, SECONDS_OF_STEPS = 0.5, 0.5


def arranged(config: TrainConfig, store: Path, world: World) -> tuple[TrainConfig, World]:
    """The configuration and the ranks with what was left to us decided; as they are where nothing was. *Collective*.

    Rank 0 takes steps on pieces of an event while the others wait. Bits do not depend on what is chosen.

    Raises:
        Refused: On all ranks alike, if the events or the network will not do.
    """
    if "auto" not in (config.domain_size, config.grouping):
        return config, world
    world.mark("plan", 0)
    rates = transport_rates(world.transport, SECONDS_OF_MESSAGES, world.device)

    def choice() -> tuple[int, str, float]:
        alone = replace(config, grouping="contiguous", domain_size=None, out=None, resume=False)
        basis = basis_of(alone, store, World.alone(world.device), SECONDS_OF_STEPS)
        link = of_rates(rates)
        # It is known that there are so many ranks, not where; and memory is looked at before the first step.
        machine = replace(basis.here, **link, ranks=world.size, memory=float("inf"))
        sizes = divisors(world.size) if config.domain_size == "auto" else [world.domain.size]
        groupings = ["contiguous", "metis"] if config.grouping == "auto" else [config.grouping]
        chosen = best(grids(machine, basis, [world.size], groupings, config.seed, sizes))
        assert chosen is not None
        return chosen.domain_size, chosen.grouping, chosen.seconds

    chosen = on_root(world.transport, choice)
    domain_size, grouping, seconds = int(chosen[0]), cast(Any, chosen[1]), float(chosen[2])
    if world.is_root:
        grid = f"{several(domain_size, 'rank')} to an event" + (f", {grouping} parts" if domain_size > 1 else "")
        print(f"grid     : {grid}: {seconds:.3g} s a step predicted (auto)", flush=True)
    torch.set_num_threads(1)
    return replace(config, domain_size=domain_size, grouping=grouping), world.regrouped(domain_size)
