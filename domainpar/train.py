"""Train a network on whole events. Each event is split over the ranks; the result is the same on any number of ranks.

Without --store, the command simulates events and trains on them, so that it runs without any flag.

Examples:
  python -m domainpar.train                                        one rank, built-in events
  mpiexec -n 8 python -m domainpar.train                           eight ranks, the same result
  mpiexec -n 8 python -m domainpar.train --store stores/mine --epochs 20 --out runs/mine
  mpiexec -n 4 python -m domainpar.train --out runs/mine --resume --epochs 40    continue, on fewer ranks
  srun python -m domainpar.train --out runs/mine --resume auto                    begin, or continue when queued again
  python -m domainpar.train --model mynet:factory                  a PyG model of your own, from mynet.py
  python -m domainpar.train --mode naive --sectors 8               for comparison: independent sectors
"""

import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from domainpar.common.problems import error_text
from domainpar.parallel.allocator import set_up_allocator
from domainpar.parallel.launcher import started_as_root
from domainpar.parallel.signals import StopFlag
from domainpar.tracking.command_line import run_command
from domainpar.tracking.config import TrainConfig, session_arguments

if TYPE_CHECKING:
    from domainpar.parallel.world import World
    from domainpar.tracking.training.run import Run


def main(argv: Sequence[str] | None = None) -> int:
    """Train as the command line says; returns the exit code. Collective."""
    # From the first moment, so that a signal while ranks start or events are read stops the run with a checkpoint.
    with StopFlag.listening() as stop:
        try:
            return run_command(TrainConfig, partial(_work, stop=stop), __doc__, argv)
        except KeyboardInterrupt:  # ranks that have met say so themselves
            if started_as_root():
                sys.stderr.write(error_text("interrupted before the ranks met"))
            return 130


def _work(config: TrainConfig, stop: StopFlag) -> int:
    allocator = set_up_allocator(config.allocator)

    import torch

    from domainpar.parallel.world import World
    from domainpar.tracking.training import run  # noqa: F401  # before ranks meet: a slow disk takes none of their time
    from domainpar.tracking.training.inputs import store_to_resume

    torch.set_num_threads(1)  # ranks are the parallelism; more threads inside a kernel could change its bits
    with World.session(**session_arguments(config)) as world:
        store = Path(config.store or store_to_resume(config, world) or _built_in_events(config, world))
        return train(config, store, world, allocator, stop).exit_code


def train(
    config: TrainConfig, store: Path, world: "World", allocator: str | None = None, stop: StopFlag | None = None
) -> "Run":
    """Train on the events of a store as a configuration says (`tracking.training.run.train`). *Collective*."""
    from domainpar.tracking.training import run

    return run.train(config, config, store, world, allocator, stop)


def _built_in_events(config: TrainConfig, world: "World") -> Path:
    """The store of the built-in simulated events, prepared where it is not there yet. *Collective*."""
    from domainpar.common.agreement import Refused
    from domainpar.prepare import prepare_store
    from domainpar.tracking.config import PrepareConfig

    try:
        return prepare_store(PrepareConfig(partitioner=config.partitioner), world)
    except Refused as refused:
        what = f"the built-in simulated events cannot be prepared: {refused.what}"
        hint = "name a store of your own with --store, and a place for the run with --out"
        if "--overwrite" in refused.hint:  # of other settings, or damaged
            hint = "python -m domainpar.prepare --overwrite makes them anew; or name a store of your own with --store"
        raise Refused(what, hint, event=refused.event, file=refused.file) from refused


if __name__ == "__main__":
    sys.exit(main())
