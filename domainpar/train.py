"""Train a network on whole events, each split over the ranks: the same answer on any number of them.

Without --store it makes and uses built-in simulated events, so that it runs with no argument at all.

Examples:
  python -m domainpar.train                                        one rank, built-in events
  mpiexec -n 8 python -m domainpar.train                           eight ranks, the same answer
  mpiexec -n 8 python -m domainpar.train --store stores/mine --epochs 20 --out runs/mine
  mpiexec -n 4 python -m domainpar.train --out runs/mine --resume --epochs 40    go on, on fewer ranks
  python -m domainpar.train --model mynet:factory                  a PyG model of your own, from mynet.py
  python -m domainpar.train --mode naive --sectors 8               for comparison: independent sectors
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from domainpar.command_line import run_command
from domainpar.config import PrepareConfig, TrainConfig
from domainpar.parallel.allocator import set_up_allocator


def main(argv: Sequence[str] | None = None) -> int:
    """Train as the command line says; returns the exit code. Collective."""
    return run_command(TrainConfig, _work, __doc__, argv)


def _work(config: TrainConfig) -> int:
    allocator = set_up_allocator(config.allocator)

    import torch

    from domainpar.parallel.world import World
    from domainpar.prepare import prepare_store
    from domainpar.training.run import train

    torch.set_num_threads(1)  # ranks are the parallelism; more threads inside a kernel could change its bits
    # Sectors are samples of their own: unless told otherwise, each rank takes others.
    domain_size = 1 if config.mode == "naive" and config.domain_size is None else config.domain_size
    with World.session(config.transport, config.device, domain_size) as world:
        store = Path(config.store) if config.store is not None else prepare_store(PrepareConfig(), world)
        train(config, store, world, allocator)
    return 0


if __name__ == "__main__":
    sys.exit(main())
