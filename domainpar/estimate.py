"""Predict in a minute how many seconds and how much memory a training step takes on the cores of this machine.

The command starts 1, 2, 4, ... ranks, which train on two pieces of one event. It scales what these take to the events
of the store and to the edges that parts cut. It writes only the file that you name.

Examples:
  python -m domainpar.estimate --store stores/full
  python -m domainpar.estimate --store stores/full --events-per-step 16 --json ranks.json
"""

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from domainpar.common.words import PROGRESS_LOG, byte_size, several
from domainpar.tracking.command_line import run_command
from domainpar.tracking.config import ConfigError, EstimateConfig, PrepareConfig, TrainingFlags

if TYPE_CHECKING:
    from domainpar.tracking.training.work import Estimate


def main(argv: Sequence[str] | None = None) -> int:
    """Estimate as the command line says; returns the exit code."""
    return run_command(EstimateConfig, _work, __doc__, argv)


def _work(config: EstimateConfig) -> int:
    from domainpar.parallel.allocator import set_up_allocator

    set_up_allocator("keep")  # as train does

    import torch

    from domainpar.common.atomic_files import write_whole
    from domainpar.common.compiling import watch_compiling
    from domainpar.common.problems import as_problem
    from domainpar.common.text_table import text_table
    from domainpar.parallel.launcher import detect

    if (detect().size or 1) > 1:
        raise ConfigError("estimate starts ranks of its own, and a launcher has started it", "type it without mpiexec")
    torch.set_num_threads(1)
    watch_compiling(talks=True)
    try:
        estimates = estimated(config)
    except ValueError as error:  # nothing was done yet
        if (problem := as_problem(error)) is None:
            raise
        raise ConfigError(problem.what, problem.hint, event=problem.event, file=problem.file) from error
    rows = [_row(estimate, estimates[0].seconds) for estimate in estimates]
    print(*text_table(list(rows[0]), [list(row.values()) for row in rows], words=0), sep="\n")
    if config.json is not None:
        write_whole(Path(config.json), (json.dumps([*map(asdict, estimates)], indent=1) + "\n").encode())
    best = min((row for row in estimates if row.fits), key=lambda row: row.seconds, default=None)
    if best is None:
        print("none of them fits: share each event among more machines, or take a smaller network")
        return 1
    shared = f", --domain-size {best.domain_size}" if best.ranks > 1 else ""
    print(f"fastest: mpiexec -n {best.ranks}{shared}")
    return 0


def estimated(config: EstimateConfig) -> list["Estimate"]:
    """What training takes on each number of ranks: where they share each event, and where each has events of its own.

    Raises:
        ValueError: If store or network will not do.
    """
    from domainpar.common.limits import cores_here
    from domainpar.measure.forecast import Line
    from domainpar.parallel.world import World
    from domainpar.prepare import prepare_store
    from domainpar.tracking.training.work import Work

    store = Path(config.store) if config.store else prepare_store(PrepareConfig(), World.alone())
    shared = {field.name for field in fields(TrainingFlags)} & {field.name for field in fields(EstimateConfig)}
    training = TrainingFlags(**{name: getattr(config, name) for name in shared - {"store"}})
    with PROGRESS_LOG.doing("memory of a step, on pieces of an event"):
        work = Work.of(training, store)
    print(
        f"events : {several(work.data.steps_per_epoch, 'step')} an epoch; predicted from event "
        f"{work.largest.name} with {work.largest.cost:,} edges",
        f"network: {config.model}, hidden {config.hidden}, {several(config.graph_iters, 'iteration')}",
        sep="\n",
        flush=True,
    )
    most, estimates = min(len(cores_here()), config.most_ranks), []
    for ranks in sorted({most, *(2**power for power in range(most.bit_length()))}):
        for domain_size in dict.fromkeys((ranks, 1)):
            if domain_size <= work.tiling.tiles.num_tiles:
                with PROGRESS_LOG.doing(f"steps of {several(ranks, 'rank')}, {domain_size} to an event"):
                    lines = [Line(*line) for line in _lines_of(training, store, ranks, domain_size)]
                estimates += work.estimates(training, ranks, domain_size, lines)
    return estimates


def _lines_of(config: TrainingFlags, store: Path, ranks: int, domain_size: int) -> list[list[float]]:
    """Seconds of a step against the edges of a rank, for each way to recompute, on so many processes."""
    from domainpar.testing import find_mpiexec, run_ranks
    from domainpar.tracking.training.work import step_lines

    transport: Any = "threads" if ranks == 1 else "mpi" if find_mpiexec() else "gloo"
    how = {"transport": transport, "domain_size": domain_size, "timeout": 600.0}
    lines: list[list[float]] = run_ranks(step_lines, ranks, config, store, **how)[0]
    return lines


def _row(estimate: "Estimate", alone: float) -> dict[str, str]:
    return {
        "ranks": str(estimate.ranks),
        "to an event": str(estimate.domain_size),
        "recompute": "-" if estimate.recompute_every is None else f"every {estimate.recompute_every}",
        "s per step": f"{estimate.seconds:.3g}",
        "x 1 rank": f"{alone / estimate.seconds:.2f}",
        "memory of a rank": byte_size(estimate.bytes_of_rank),
        "": "" if estimate.fits else "does not fit",
    }


if __name__ == "__main__":
    sys.exit(main())
