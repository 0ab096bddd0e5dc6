"""A program whose ranks end in different ways; `test_ending.py` starts it under launchers."""

import os
import signal
import sys
import time

import torch

from domainpar.common.agreement import agree
from domainpar.parallel.world import World


def main(how: str) -> None:
    with World.session(domain_size=3 if how == "wrong grid" else None, timeout=100.0) as world:
        world.mark("working", step=1)
        if how == "refuse":
            agree(world.transport, "event 7 has no truth" if world.rank == 1 else None)
        if how == "fail" and world.rank == 1:
            raise KeyError("no such thing")
        if how == "fail while others compute":
            if world.is_root:
                raise KeyError("no such thing")
            time.sleep(100)
        if how == "rank 0 is killed while others compute":
            if world.is_root:
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(100)
        if how == "fail everywhere":
            raise KeyError("no such thing")
        world.transport.barrier()
        print(f"rank {world.rank} of {world.size} over {world.transport.name}", flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(sys.argv[1])
