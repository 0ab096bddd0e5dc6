"""Predict in a minute how many seconds and how much memory a training step takes on the cores of this machine.

The command trains on a piece of one event, first on one core and then on all cores at once. It computes the rest from
the sizes of the events, from the edges that parts cut, and from the speed of messages. It writes only the files that
you name.

Examples:
  python -m domainpar.estimate --store stores/full
  python -m domainpar.estimate --store stores/full --events-per-step 16 --png ranks.png
"""

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from domainpar.common.words import VOICE, several
from domainpar.tracking.command_line import run_command
from domainpar.tracking.config import ConfigError, EstimateConfig, PrepareConfig, TrainConfig

if TYPE_CHECKING:
    from domainpar.parallel.world import World
    from domainpar.tracking.cost.machine import Machine
    from domainpar.tracking.cost.model import Grid, StepWork

RANKS_TO_TRY = 8


def main(argv: Sequence[str] | None = None) -> int:
    """Estimate as the command line says; returns the exit code."""
    return run_command(EstimateConfig, _work, __doc__, argv)


def _work(config: EstimateConfig) -> int:
    from domainpar.parallel.allocator import set_up_allocator

    set_up_allocator("keep")  # as train does

    import torch

    from domainpar.common.compiling import watch_compiling
    from domainpar.common.problems import as_problem
    from domainpar.parallel.launcher import detect
    from domainpar.parallel.world import World
    from domainpar.tracking.cost import tables
    from domainpar.tracking.cost.model import best

    if (detect().size or 1) > 1:
        raise ConfigError("estimate starts ranks of its own, and a launcher has started it", "type it without mpiexec")
    torch.set_num_threads(1)
    watch_compiling(talks=True)
    try:
        found, machine, steps = estimated(config, World.alone())
    except ValueError as error:  # nothing was done yet
        if (problem := as_problem(error)) is None:
            raise
        raise ConfigError(problem.what, problem.hint, event=problem.event, file=problem.file) from error
    print(*tables.lines(found, machine, steps), sep="\n")
    _write(config, found, machine)
    return 0 if best(found) else 1


def estimated(config: EstimateConfig, world: "World") -> tuple[list["Grid"], "Machine", int]:
    """Every grid, the best first; this machine; and the steps of an epoch.

    Raises:
        ValueError: If store or network will not do.
    """
    from domainpar.prepare import prepare_store
    from domainpar.tracking.cost.model import grids

    store = Path(config.store) if config.store else prepare_store(PrepareConfig(), world)
    work = work_here(training_asked(config), store, world)
    machine = work.here
    print(*_introduction(config, work), sep="\n", flush=True)
    numbers = machine.numbers_of_ranks(config.most_ranks)
    with VOICE.doing("grids of ranks compared"):
        found = grids(machine, work, numbers, config.groupings.value, config.seed)
    return found, machine, work.steps_per_epoch


def work_here(config: TrainConfig, store: Path, world: "World") -> "StepWork":
    """What predictions are made from, with what ranks on all cores of this machine feel of each other."""
    from domainpar.tracking.training.work import work_of

    with VOICE.doing("steps on pieces of an event, alone"):
        work = work_of(config, store, world)
    with VOICE.doing("steps and messages of ranks on all cores at once"):
        return replace(work, here=replace(work.here, **_of_all_cores(config, store)))


def training_asked(config: EstimateConfig) -> TrainConfig:
    """The training whose flags were given."""
    shared = {field.name for field in fields(TrainConfig)} & {field.name for field in fields(EstimateConfig)}
    return TrainConfig(**{name: getattr(config, name) for name in shared - {"store"}})


def _of_all_cores(config: TrainConfig, store: Path) -> dict[str, Any]:
    """Latency and rate of messages, and how much longer a step takes, with a rank on each core (some of many)."""
    from domainpar.common.limits import cores_here
    from domainpar.testing import find_mpiexec, run_ranks
    from domainpar.tracking.training.work import contention

    if (ranks := min(len(cores_here()), RANKS_TO_TRY)) == 1:
        return {}
    transport: Any = "mpi" if find_mpiexec() else "gloo"
    found: dict[str, Any] = run_ranks(contention, ranks, config, store, transport=transport, timeout=600.0)[0]
    return found


def _introduction(config: EstimateConfig, work: "StepWork") -> list[str]:
    """The events, the network and the machine, in words."""
    machine = work.here
    return [
        f"events : {several(work.steps_per_epoch, 'step')} an epoch; predicted from event {work.event} with "
        f"{work.edges:,} edges",
        f"network: {config.model}, hidden {config.hidden}, {several(config.graph_iters, 'iteration')}",
        f"machine: {machine.name}, {several(machine.ranks, 'core')}, {1e6 * machine.latency:.3g} us a message and "
        f"{machine.rate / 1e9:.3g} GB/s (measured)",
    ]


def _write(config: EstimateConfig, found: Sequence["Grid"], machine: "Machine") -> None:
    """The files that were asked for."""
    from domainpar.common.atomic_files import write_whole

    if config.json is not None:
        content = {"machine": asdict(machine), "grids": [asdict(grid) for grid in found]}
        write_whole(Path(config.json), (json.dumps(content, indent=1) + "\n").encode())
    if config.png is not None:
        from domainpar.tracking.display.grids import chart
        from domainpar.tracking.display.paint_matplotlib import in_style, paint, png

        with in_style():
            write_whole(Path(config.png), png(paint(chart(found, machine))))
        print(f"picture in {config.png}")


if __name__ == "__main__":
    sys.exit(main())
